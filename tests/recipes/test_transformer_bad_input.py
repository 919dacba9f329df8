"""Wrong input of the transformer recipe: the message says what was asked, found and is to do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformer_folders import reviews, tiny_bert, tiny_tokenizer, transformers

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.recipes.recipe import find_recipe


def problem(**options: Any) -> str:
    recipe = find_recipe("transformer")
    with pytest.raises(ConfigError) as caught:
        recipe.build(recipe.config({"device": "cpu"}), recipe.options(**options))
    return str(caught.value)


def test_hub_name_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = problem(model="nobody/no-such-model")
    assert "tokenizer='nobody/no-such-model' is not a folder here" in message
    assert "hf download nobody/no-such-model --local-dir no-such-model" in message
    assert "model='nobody/none' is not a folder" in problem(model="nobody/none", tokenizer="bytes")


def test_folder_that_is_not_there_or_no_model(tmp_path: Path) -> None:
    assert "model='./nowhere/bert' does not exist" in problem(
        model="./nowhere/bert", tokenizer="bytes"
    )
    message = problem(model=str(tmp_path), tokenizer="bytes")
    assert "cannot be loaded by AutoConfig" in message
    assert "save_pretrained" in message


def test_tokenizer_without_pad_token(tmp_path: Path) -> None:
    tokenizer = str(tiny_tokenizer(tmp_path / "letters", without=("pad",)))
    texts = str(reviews(tmp_path / "texts"))
    asked = {"tokenizer": tokenizer, "task": "classification", "data_dir": texts}
    message = problem(**asked)
    assert "there is no pad token, and texts of unequal length need one" in message
    assert "pad_token=" in message
    assert "pad_token='<none>' is not a token of the tokenizer" in problem(
        **asked, pad_token="<none>"
    )
    recipe = find_recipe("transformer")
    job = recipe.build(recipe.config({}), recipe.options(**asked, pad_token="[SEP]"))
    assert job.model.config.pad_token_id == 3


def test_tokenizer_without_mask_token(tmp_path: Path) -> None:
    folder = str(tiny_tokenizer(tmp_path / "letters", without=("mask",)))
    message = problem(tokenizer=folder, task="masked")
    assert "there is no mask token, which task=masked needs" in message


def test_sequence_longer_than_the_model_takes(tmp_path: Path) -> None:
    folder = str(tiny_bert(tmp_path / "bert", kind=transformers.BertForMaskedLM))
    message = problem(model=folder, task="masked", sequence_length=33)
    assert "sequence_length=33 is longer than the 32 tokens that this bert takes" in message


def test_vocabulary_of_another_model(tmp_path: Path) -> None:
    folder = str(tiny_bert(tmp_path / "bert", vocabulary=50))
    message = problem(model=folder, tokenizer="bytes", task="masked", sequence_length=16)
    assert "the tokenizer has 259 words but this bert only 50" in message


def test_label_that_the_head_does_not_have(tmp_path: Path) -> None:
    folder = str(
        tiny_bert(
            tmp_path / "bert",
            kind=transformers.BertForSequenceClassification,
            id2label={0: "bad", 1: "good"},
            label2id={"bad": 0, "good": 1},
        )
    )
    asked = {"model": folder, "task": "classification", "sequence_length": 16}
    texts = str(reviews(tmp_path / "texts", labels=("bad", "splendid")))
    message = problem(**asked, data_dir=texts)
    assert "the data has the label 'splendid', which the model's head does not have" in message
    assert "it has bad, good" in message
    recipe = find_recipe("transformer")
    options = recipe.options(**asked, data_dir=texts, new_head=True)
    model = recipe.build(recipe.config({}), options).model
    assert model.config.id2label == {0: "bad", 1: "splendid"}


def test_validation_label_that_training_never_saw(tmp_path: Path) -> None:
    folder = reviews(tmp_path / "texts")
    reviews(folder, labels=("bad", "ugly"), name="val")
    message = problem(task="classification", data_dir=str(folder))
    assert "the validation texts have the label 'ugly', which no training text has" in message


def test_empty_text_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "b.txt").write_text("  \n")
    assert "b.txt is empty; put text into it or remove it" in problem(data_dir=str(tmp_path))


def test_text_that_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("a few words")
    message = problem(data_dir=str(tmp_path), sequence_length=64)
    assert "the text has 12 tokens (bytes), which is less than one sequence" in message
    assert "which leaves none for validation" in problem(data_dir=str(tmp_path), sequence_length=12)


def test_text_that_is_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_bytes("Größe".encode("latin1"))
    message = problem(data_dir=str(tmp_path))
    assert "train.txt is not UTF-8 (byte 2 is 0xf6)" in message
    assert "iconv" in message


@pytest.mark.parametrize("task", ["causal", "classification"])
def test_folder_without_text(tmp_path: Path, task: str) -> None:
    assert "is not a folder" in problem(data_dir=str(tmp_path / "nowhere"), task=task)
    (tmp_path / "notes.md").write_text("notes")
    message = problem(data_dir=str(tmp_path), task=task)
    assert "it holds notes.md" in message
    assert "train.txt" in message if task == "causal" else "train.jsonl" in message


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("train.jsonl", '{"text": "a", "label": 1}\n{"text": "b"}', "line 2: there is no label"),
        ("train.jsonl", '{"text": "a"', "line 1: "),
        ("train.jsonl", '{"text": "\\ud800", "label": 1}', "line 1: 'utf-8' codec can't encode"),
        ("train.csv", "text,kind\na,1\n", "line 2: there is no label (found text, kind)"),
        ("train.tsv", "text\tlabel\n", "holds no sample"),
        ("train.csv", 'text,label\n"a\n\nb",1\n\nc,\n', "line 6: there is no label"),
        ("train.csv", "text,label\na, b,1\n", "line 2: 3 fields, but the first line names 2"),
        ("train.csv", 'text,label\na,1\n"b,2\nc,3\n', "line 3: "),
    ],
)
def test_line_without_text_or_label(tmp_path: Path, name: str, text: str, found: str) -> None:
    (tmp_path / name).write_text(text)
    message = problem(task="classification", data_dir=str(tmp_path))
    assert name in message
    assert found in message


def test_all_rows_that_lack_something_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\na,\nb,1\n,2\n")
    message = problem(task="classification", data_dir=str(tmp_path))
    assert "line 2: there is no label" in message and "line 4: there is no text" in message
    (tmp_path / "train.tsv").write_text("text\tlabel\na\t1\n")
    message = problem(task="classification", data_dir=str(tmp_path))
    assert "has train.csv and train.tsv; keep one of them" in message


def test_code_that_comes_with_a_model_is_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "was-run"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"model_type": "mine", "auto_map": {"AutoConfig": "mine.MyConfig"}}'
    )
    (folder / "mine.py").write_text(
        "from pathlib import Path\nfrom transformers import PretrainedConfig\n"
        f"Path({str(marker)!r}).touch()\nclass MyConfig(PretrainedConfig):\n"
        "    model_type = 'mine'\n"
    )
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # whoever is asked says yes
    assert "brings its own Python code" in problem(model=str(folder), tokenizer="bytes")
    assert not marker.exists()


def test_options_that_contradict_each_other(tmp_path: Path) -> None:
    folder = str(tiny_bert(tmp_path / "bert"))
    message = problem(model=folder, layers=3, mask_share=0.2, new_head=True)
    assert "layers=3 is for model=small" in message
    assert "mask_share=0.2 is for task=masked" in message
    assert "new_head=true is for task=classification" in message
    assert "model=small always is" in problem(from_scratch=True)
    assert "texts with a label each are padded" in problem(task="classification", layout="packed")
    assert "width=100 cannot be divided over heads=3" in problem(width=100, heads=3)
    assert "tokenizer=bytes has its own" in problem(pad_token="x")


def test_missing_transformers_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install 'multi-gpu-training[transformer]'" in problem()


def test_weights_of_another_model_do_not_pass_for_a_pretrained_one(tmp_path: Path) -> None:
    folder = tiny_bert(tmp_path / "bert", kind=transformers.BertForMaskedLM)
    asked: dict[str, Any] = {"model": str(folder), "task": "masked", "sequence_length": 16}
    recipe = find_recipe("transformer")
    recipe.build(recipe.config({"device": "cpu"}), recipe.options(**asked))
    save_file({"conv.weight": torch.zeros(3, 3)}, folder / "model.safetensors", {"format": "pt"})
    assert "none of its weights fits a BertForMaskedLM" in problem(**asked)


def test_fresh_weights_are_not_quantized(tmp_path: Path) -> None:
    folder = tiny_bert(tmp_path / "bert")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "none-that-is-known"}
    (folder / "config.json").write_text(json.dumps(config))
    message = problem(model=str(folder), task="masked", from_scratch=True, sequence_length=16)
    assert "take quantization_config out" in message
