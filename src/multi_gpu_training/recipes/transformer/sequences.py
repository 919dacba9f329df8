"""From token numbers to samples of one length: packed without a gap, or padded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from multi_gpu_training.errors import DataError
from multi_gpu_training.recipes.held_out import held_out
from multi_gpu_training.recipes.transformer.linear_cross_entropy import IGNORED
from multi_gpu_training.recipes.transformer.tokens import Tokens

VAL_SHARE = 0.1  # of the samples, for validation where nothing else is


@dataclass(frozen=True)
class Sequences:
    """Samples of equal length: their tokens (int32) and, where they are padded, their lengths."""

    tokens: Tensor
    lengths: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def count(self) -> int:
        """Tokens that are text."""
        return int(self.tokens.numel() if self.lengths is None else self.lengths.sum())

    def select(self, chosen: Tensor) -> Sequences:
        return Sequences(
            self.tokens[chosen], None if self.lengths is None else self.lengths[chosen]
        )

    def columns(self) -> list[Tensor]:
        """What a batch starts with: tokens, and lengths where there are any."""
        return [self.tokens] if self.lengths is None else [self.tokens, self.lengths]


def pack(documents: Sequence[str], tokens: Tokens, length: int) -> Sequences:
    """All documents one after the other, an end token between them, cut into full sequences.

    What is left at the end, less than a sequence, is not used.
    """
    end = torch.tensor([] if tokens.end is None else [tokens.end], dtype=torch.int32)
    parts = [part for document in documents for part in (tokens.encode(document), end)]
    stream = torch.cat(parts)
    count = len(stream) // length
    if count == 0:
        raise DataError(
            f"the text has {len(stream)} tokens ({tokens.describe()}), which is less than one "
            f"sequence of sequence_length={length}; give more text, a smaller sequence_length, or "
            "layout=padded",
            code="MGT302",
        )
    return Sequences(stream[: count * length].view(count, length))


def pad_lines(documents: Sequence[str], tokens: Tokens, length: int) -> Sequences:
    """Each line that is not blank a sample of its own."""
    lines = (line for document in documents for line in document.split("\n") if line.strip())
    return pad((tokens.encode(line)[:length] for line in lines), tokens)


def pad(samples: Iterable[Tensor], tokens: Tokens) -> Sequences:
    """Samples filled up to the longest of them."""
    kept = [sample for sample in samples if len(sample)]
    if not kept:
        raise DataError("the text has no line with a token in it; give a text that has some")
    lengths = torch.tensor([len(sample) for sample in kept], dtype=torch.int32)
    padded = torch.nn.utils.rnn.pad_sequence(
        kept, batch_first=True, padding_value=float(tokens.pad or 0)
    )
    return Sequences(padded, lengths)


def hold_back(sequences: Sequences, seed: int) -> tuple[Sequences, Sequences]:
    """Training and validation samples."""
    train, val = parts(len(sequences), seed)
    return sequences.select(train), sequences.select(val)


def parts(count: int, seed: int, labels: Sequence[str] | None = None) -> tuple[Tensor, Tensor]:
    """Which of `count` samples are for training and which for validation: a tenth, drawn by the
    seed, of every label alike."""
    if count < 2:
        raise DataError(
            f"the text makes {count} sample, which leaves none for validation; give more text, a "
            "smaller sequence_length, or separate validation data",
            code="MGT302",
        )
    held = held_out(count, VAL_SHARE, seed, labels)
    if not held.any():
        raise DataError(
            f"each of the {count} samples has its own label, which leaves none for "
            "validation; give more text, or separate validation data",
            code="MGT302",
        )
    return ~held, held


def inputs(batch: Sequence[Tensor], padded: bool) -> dict[str, Tensor]:
    """What a Hugging Face model takes, from the columns of a batch."""
    found = {"input_ids": batch[0].long()}
    if padded:
        place = torch.arange(batch[0].shape[1], device=batch[0].device)
        found["attention_mask"] = (place < batch[1][:, None]).long()
    return found


def next_tokens(ids: Tensor, mask: Tensor | None) -> Tensor:
    """For each token the one that follows it; nothing to learn at the end and in the padding."""
    following = ids[:, 1:]
    if mask is not None:
        following = torch.where(mask[:, 1:].bool(), following, IGNORED)
    return torch.nn.functional.pad(following, (0, 1), value=IGNORED)


# Masked language modelling


@dataclass(frozen=True)
class Masking:
    """BERT's rule: of the chosen tokens 80 % become the mask, 10 % any word, 10 % stay."""

    share: float
    mask: int
    words: int
    special: tuple[int, ...]

    def __call__(self, ids: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens with some hidden, and labels for those. `draws`: three numbers in [0, 1) each."""
        chosen, way, word = draws.unbind(-1)
        hidden = chosen < self.share
        for number in self.special:
            hidden &= ids != number
        # The largest draw times a large vocabulary can round up to its size.
        random = (word * self.words).to(ids.dtype).clamp(max=self.words - 1)
        shown = torch.where(way < 0.8, torch.full_like(ids, self.mask), ids)
        shown = torch.where((way >= 0.8) & (way < 0.9), random, shown)
        labels = torch.where(hidden, ids, torch.full_like(ids, IGNORED))
        return torch.where(hidden, shown, ids), labels


@dataclass(frozen=True, eq=False)
class MaskedSequences(Dataset[tuple[Tensor, ...]]):
    """Samples with other tokens hidden at each look.

    The draws come from torch's global generator, which the loader seeds for each sample: what is
    hidden depends on (seed, epoch, sample), not on the rank or worker that loads it.
    """

    sequences: Sequences
    masking: Masking

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        ids, *rest = (column[index] for column in self.sequences.columns())
        shown, labels = self.masking(ids, torch.rand(*ids.shape, 3))
        return (shown, *rest, labels)


def masked_once(sequences: Sequences, masking: Masking) -> TensorDataset:
    """Samples with tokens hidden once and for all, so that validation is always the same."""
    draws = torch.rand(*sequences.tokens.shape, 3, generator=torch.Generator().manual_seed(0))
    shown, labels = masking(sequences.tokens, draws)
    return TensorDataset(shown, *sequences.columns()[1:], labels)


def plain(sequences: Sequences, *more: Any) -> TensorDataset:
    """Samples as they are, and further columns."""
    return TensorDataset(*sequences.columns(), *more)
