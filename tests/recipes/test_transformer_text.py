"""From text to samples: packed, padded, masked and labelled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformer_folders import tiny_bert, transformers

from multi_gpu_training.recipes.recipe import find_recipe
from multi_gpu_training.recipes.transformer.sequences import (
    IGNORED,
    Masking,
    Sequences,
    hold_back,
    masked_once,
    pack,
    pad_lines,
)
from multi_gpu_training.recipes.transformer.text import read_corpus, read_labelled
from multi_gpu_training.recipes.transformer.tokens import ByteTokens, ModelTokens


def test_packed_text_is_all_of_the_text_in_its_order() -> None:
    tokens = ByteTokens()
    found = pack(["first", "the second"], tokens, 4)
    stream = [*b"first", 258, *b"the second", 258]
    assert found.tokens.flatten().tolist() == stream[:16]
    assert found.lengths is None


def test_padded_text_is_a_sample_a_line() -> None:
    found = pad_lines(["one\n\n  \nthree", "a line that is too long"], ByteTokens(), 8)
    assert [
        bytes(row[:n].tolist()) for row, n in zip(found.tokens, found.lengths, strict=True)
    ] == [  # type: ignore[arg-type]
        b"one",
        b"three",
        b"a line t",
    ]
    assert found.tokens[0, 3:].tolist() == [256] * 5


def test_a_tenth_of_the_samples_is_held_back_by_the_seed() -> None:
    samples = Sequences(torch.arange(200)[:, None])
    train, val = hold_back(samples, seed=3)
    chosen = val.tokens.flatten().tolist()
    assert len(chosen) == 20
    assert sorted([*chosen, *train.tokens.flatten().tolist()]) == list(range(200))
    assert chosen != list(range(9, 200, 10))
    assert torch.equal(hold_back(samples, seed=3)[1].tokens, val.tokens)
    assert not torch.equal(hold_back(samples, seed=4)[1].tokens, val.tokens)
    train, val = hold_back(Sequences(torch.arange(3)[:, None]), seed=0)
    assert (len(train), len(val)) == (2, 1)


def classified(folder: Path, seed: int = 0) -> tuple[list[int], list[int]]:
    """Labels of the training and the validation samples that the recipe makes."""
    recipe = find_recipe("transformer")
    options = recipe.options(task="classification", data_dir=str(folder), width=16, layers=1)
    job = recipe.build(recipe.config({"seed": seed}), options)
    return job.dataset.tensors[-1].tolist(), job.val_dataset.tensors[-1].tolist()


def test_labels_in_a_regular_order_are_all_in_the_validation_samples(tmp_path: Path) -> None:
    # Every tenth row has the same label here, and the rarest has two rows.
    rows = [f"text {n},{'ab'[n % 2]}" for n in range(60)] + ["rare one,c", "rare two,c"]
    (tmp_path / "train.csv").write_text("\n".join(["text,label", *rows]))
    train, val = classified(tmp_path)
    assert sorted(val) == [0, 0, 0, 1, 1, 1, 2]
    assert sorted(train) == [0] * 27 + [1] * 27 + [2]


def test_validation_files_of_every_format_are_validated_with(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("a book")
    (tmp_path / "val.txt").write_text("to validate with")
    corpus = read_corpus(str(tmp_path))
    assert (corpus.train, corpus.val) == (["a book"], ["to validate with"])
    (tmp_path / "val.txt").unlink()
    (tmp_path / "val.jsonl").write_text('{"text": "one"}\n{"text": "two"}')
    assert read_corpus(str(tmp_path)).val == ["one", "two"]
    (tmp_path / "val.jsonl").unlink()
    (tmp_path / "val.csv").write_text("label,text\n1,three")
    (tmp_path / "train.jsonl").write_text('{"text": "a", "label": 1}')
    assert read_corpus(str(tmp_path)).val == ["three"]
    assert read_labelled(str(tmp_path)).val == [("three", "1")]


def test_a_single_file_is_read_as_data_dir(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("a book")
    (tmp_path / "reviews.tsv").write_text("text\tlabel\nfine\tgood\n")
    corpus = read_corpus(str(tmp_path / "book.txt"))
    assert (corpus.name, corpus.train, corpus.val) == ("book.txt", ["a book"], None)
    assert read_corpus(str(tmp_path / "reviews.tsv")).train == ["fine"]
    assert read_labelled(str(tmp_path / "reviews.tsv")).train == [("fine", "good")]


def test_line_breaks_inside_a_text_stay_in_it(tmp_path: Path) -> None:
    text = "one\u2028two\x85three\x0cfour"
    row = json.dumps({"text": text, "label": "x"}, ensure_ascii=False)
    (tmp_path / "train.jsonl").write_text(f"{row}\n{row}\n", encoding="utf-8")
    assert read_labelled(str(tmp_path)).train == [(text, "x")] * 2
    (tmp_path / "train.jsonl").unlink()
    (tmp_path / "train.csv").write_text('\ufefftext,label\n"one\n\ntwo",x\n\nthree,y\n')
    assert read_labelled(str(tmp_path)).train == [("one\n\ntwo", "x"), ("three", "y")]
    assert len(pad_lines(["one\u2028two\nthree"], ByteTokens(), 8)) == 2


def test_a_text_longer_than_csvs_own_limit_is_read(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(f"text,label\n{'a' * 200_000},x\n")
    assert len(read_labelled(str(tmp_path)).train[0][0]) == 200_000


def test_masking_follows_berts_rule() -> None:
    ids = torch.full((400, 100), 65)
    ids[:, 0] = 258
    shown, labels = masked_once(Sequences(ids), Masking(0.15, 257, 256, (256, 257, 258))).tensors
    hidden = labels != IGNORED
    assert torch.equal(ids[hidden], labels[hidden])
    assert torch.equal(shown[~hidden], ids[~hidden])
    assert not hidden[:, 0].any()
    # 5,940 of 39,600 are expected to be hidden; five times the spread of such a count.
    assert int(hidden.sum()) == pytest.approx(5940, abs=5 * (39_600 * 0.15 * 0.85) ** 0.5)
    share = (shown[hidden] == 257).double().mean()
    assert float(share) == pytest.approx(0.8, abs=0.03)
    assert float((shown[hidden] == 65).double().mean()) == pytest.approx(0.1, abs=0.03)
    assert int(shown[hidden & (shown != 257)].max()) < 256


def test_labels_and_texts_read_alike_from_every_format(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text('label,text\n3,"one, two"\n10,three\n')
    (tmp_path / "val.tsv").write_text("text\tlabel\nfour\t3\n")
    found = read_labelled(str(tmp_path))
    assert found.train == [("one, two", "3"), ("three", "10")]
    assert found.val == [("four", "3")]
    assert found.labels() == ["3", "10"]


def test_the_built_in_texts_are_there() -> None:
    assert sum(map(len, read_corpus(None).train)) > 300_000
    found = read_labelled(None)
    assert len(found.labels()) == 6
    assert len(found.train) > 500


def test_a_tokenizer_gets_long_texts_in_pieces_and_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_bert(tmp_path / "bert"))
    text = "abc.\n" * 50
    whole = ModelTokens(tokenizer, "bert").encode(text)
    monkeypatch.setattr("multi_gpu_training.recipes.transformer.tokens.PIECE", 12)
    assert torch.equal(ModelTokens(tokenizer, "bert").encode(text), whole)
    assert whole.dtype == torch.int32
