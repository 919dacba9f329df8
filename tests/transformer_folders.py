"""Folders as users have them: a tiny BERT with its tokenizer, and texts with labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def tiny_tokenizer(folder: Path, without: tuple[str, ...] = ()) -> Path:
    """A tokenizer of single letters, without some of the tokens that BERT's has."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz.,TZ"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    kinds = [n for n in ("pad", "unk", "cls", "sep", "mask") if n not in without]
    named = {f"{kind}_token": f"[{kind.upper()}]" for kind in kinds}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    fast.save_pretrained(folder)
    return folder


def tiny_bert(
    folder: Path,
    vocabulary: int = 60,
    kind: Any = transformers.BertModel,
    **more: Any,
) -> Path:
    """A BERT with fresh weights and a tokenizer of single letters, as save_pretrained leaves it."""
    tiny_tokenizer(folder)
    settings = transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=vocabulary,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **more,
    )
    torch.manual_seed(0)
    kind(settings).save_pretrained(folder)
    return folder


def reviews(folder: Path, labels: tuple[str, ...] = ("bad", "good"), name: str = "train") -> Path:
    folder.mkdir(exist_ok=True)
    rows = [{"text": f"text {'ab'[i % 2] * 5} {i}", "label": labels[i % 2]} for i in range(24)]
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder
