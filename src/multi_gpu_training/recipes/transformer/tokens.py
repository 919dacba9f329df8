"""From text to token numbers: bytes, which need no file, or a Hugging Face tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from multi_gpu_training.errors import DataError
from multi_gpu_training.recipes.hugging_face import fetch

PIECE = 1 << 20  # characters that a tokenizer gets at once


class Tokens(Protocol):
    """A vocabulary, and how text becomes its numbers. None where it has no such token."""

    size: int
    words: int  # numbers below this stand for text
    pad: int | None
    mask: int | None
    end: int | None
    longest: int | None  # tokens that its model takes, where it knows

    def encode(self, text: str) -> Tensor:
        """The numbers of a text as int32, nothing added."""

    def encode_sample(self, text: str, length: int) -> Tensor:
        """The same for one sample to classify: cut to `length`, with what a classifier needs."""

    def special(self) -> list[int]:
        """Numbers that stand for no text, and are never masked."""

    def save(self, folder: Path) -> None:
        """Write a tokenizer that `AutoTokenizer.from_pretrained(folder)` loads."""

    def describe(self) -> str: ...


class ByteTokens:
    """Every byte of UTF-8 is a token, and three more serve as padding, mask and end of text."""

    words = 256
    pad: int | None = 256
    mask: int | None = 257
    end: int | None = 258
    size = 259
    longest: int | None = None
    names = {256: "<|pad|>", 257: "<|mask|>", 258: "<|end|>"}

    def encode(self, text: str) -> Tensor:
        raw = bytearray(text.encode())
        if not raw:
            return torch.empty(0, dtype=torch.int32)
        return torch.frombuffer(raw, dtype=torch.uint8).to(torch.int32)

    def encode_sample(self, text: str, length: int) -> Tensor:
        # The first token has no meaning of its own: there the classifier gathers the text's.
        first = torch.tensor([self.end], dtype=torch.int32)
        return torch.cat([first, self.encode(text)])[:length]

    def special(self) -> list[int]:
        return list(self.names)

    def save(self, folder: Path) -> None:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        # A byte-pair encoding without any pair: what is left are the bytes.
        vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(name) for name in self.names.values()])
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token=self.names[256],
            mask_token=self.names[257],
            eos_token=self.names[258],
        ).save_pretrained(folder)

    def describe(self) -> str:
        return "bytes"


def byte_characters() -> list[str]:
    """The visible character that byte-level tokenizers since GPT-2 write for each byte."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(b) if b in visible else chr(256 + hidden.index(b)) for b in range(256)]


class ModelTokens:
    """A Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self.tokenizer = tokenizer
        self.name = name
        self.size = self.words = len(tokenizer)
        self.pad: int | None = tokenizer.pad_token_id
        self.mask: int | None = tokenizer.mask_token_id
        ends = (tokenizer.eos_token_id, tokenizer.sep_token_id)
        self.end: int | None = next((end for end in ends if end is not None), None)
        # Without a limit of its own a tokenizer says 1e30.
        longest = tokenizer.model_max_length
        self.longest: int | None = int(longest) if longest < 1e9 else None

    def encode(self, text: str) -> Tensor:
        # A whole book at once would take a tokenizer many times the text's memory.
        pieces = split_at_lines(text, PIECE)
        found = self.tokenizer(pieces, add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor([number for piece in found for number in piece], dtype=torch.int32)

    def encode_sample(self, text: str, length: int) -> Tensor:
        found = self.tokenizer(text, truncation=True, max_length=length, verbose=False)
        return torch.tensor(found["input_ids"], dtype=torch.int32)

    def special(self) -> list[int]:
        return sorted(self.tokenizer.all_special_ids)

    def save(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)

    def describe(self) -> str:
        return f"tokenizer {self.name}, {self.size:,} words"


def load_tokens(name: str, pad_token: str | None, trust: bool = False) -> Tokens:
    """`bytes`, or the tokenizer of a folder or hub name. `pad_token` names one of its words."""
    if name == "bytes":
        if pad_token is not None:
            raise DataError(f"pad_token={pad_token!r}: tokenizer=bytes has its own; drop pad_token")
        return ByteTokens()
    tokenizer = fetch("AutoTokenizer", "tokenizer", name, trust)
    if pad_token is not None:
        if pad_token not in tokenizer.get_vocab():
            raise DataError(
                f"pad_token={pad_token!r} is not a token of the tokenizer {name!r}; name one that "
                f"it has, such as {tokenizer.eos_token or next(iter(tokenizer.get_vocab()))!r}"
            )
        tokenizer.pad_token = pad_token
    return ModelTokens(tokenizer, name)


def require(tokens: Tokens, pad: bool, mask: bool) -> None:
    """Raise where the vocabulary lacks what the task needs."""
    problems = []
    if pad and tokens.pad is None:
        problems.append(
            f"{tokens.describe()}: there is no pad token, and texts of unequal length need one; "
            "name one of its words, as in pad_token='<|endoftext|>', or use layout=packed"
        )
    if mask and tokens.mask is None:
        problems.append(
            f"{tokens.describe()}: there is no mask token, which task=masked needs; use a "
            "tokenizer that has one (BERT's do), tokenizer=bytes, or task=causal"
        )
    if problems:
        raise DataError(problems)


def split_at_lines(text: str, size: int) -> Sequence[str]:
    """The text in pieces of at least `size` characters that end where a line ends."""
    pieces = []
    start = 0
    while start < len(text):
        stop = text.find("\n", start + size) + 1 or len(text)
        pieces.append(text[start:stop])
        start = stop
    return pieces
