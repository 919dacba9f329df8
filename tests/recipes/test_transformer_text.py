"""From text to samples: packed, padded, masked and labelled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformer_folders import tiny_bert, transformers

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


def test_every_tenth_sample_is_held_back() -> None:
    train, val = hold_back(Sequences(torch.arange(25)[:, None]))
    assert val.tokens.flatten().tolist() == [9, 19]
    assert len(train) == 23
    train, val = hold_back(Sequences(torch.arange(3)[:, None]))
    assert (train.tokens.flatten().tolist(), val.tokens.flatten().tolist()) == ([0, 1], [2])


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
