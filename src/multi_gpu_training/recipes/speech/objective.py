"""What the recogniser is trained for, how its frames are read as text, and how well."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multi_gpu_training.recipes.speech.alphabet import Alphabet
from multi_gpu_training.recipes.speech.ctc import BLANK, ctc_loss, possible
from multi_gpu_training.recipes.speech.dataset import Batch
from multi_gpu_training.training.metrics import MetricsCollector

MASKS = (0.2, 0.1)  # SpecAugment: the share of all bands and of the time that a mask may take


@dataclass(frozen=True)
class Objective:
    """CTC as a mean over the characters of all ranks: (mean, characters)."""

    augment: bool

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        draws = batch.draws if self.augment and model.training else None
        logits, lengths = model(batch.sound, batch.samples, draws, MASKS)
        return mean_loss(logits, lengths, batch)


def mean_loss(logits: Tensor, lengths: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Loss a character, and the characters that it is a mean over."""
    losses = ctc_loss(logits, lengths, batch.targets, batch.sizes)
    fine = possible(lengths, batch.targets, batch.sizes)
    characters = torch.where(fine, batch.sizes, 0).sum()
    return losses.sum() / characters.clamp(min=1), characters


def evaluate(
    model: nn.Module,
    batch: Batch,
    metrics: MetricsCollector,
    *,
    alphabet: Alphabet,
    decoder: str,
    width: int,
) -> None:
    """Add the loss, and the word and character errors, of one batch."""
    logits, lengths = model(batch.sound, batch.samples)
    mean, characters = mean_loss(logits, lengths, batch)
    metrics.add("loss", mean.double() * characters, characters)
    log_probs = logits.float().log_softmax(2)
    read = greedy(log_probs, lengths) if decoder == "greedy" else beam(log_probs, lengths, width)
    rows: list[Any] = batch.targets.tolist()
    wanted = [row[:size] for row, size in zip(rows, batch.sizes.tolist(), strict=True)]
    add_error_rates(
        metrics, [alphabet.decode(text) for text in read], [alphabet.decode(t) for t in wanted]
    )


# From frames to text: the best path, or the best text over all its paths


def greedy(log_probs: Tensor, lengths: Tensor) -> list[list[int]]:
    """The likeliest class of every frame, repeats and blanks taken out; (batch, time, classes)."""
    best = log_probs.argmax(2)
    paths, sizes = best.tolist(), lengths.tolist()
    return [collapse(path[:size]) for path, size in zip(paths, sizes, strict=True)]


def collapse(path: list[int]) -> list[int]:
    """A path without its repeats, then without its blanks."""
    kept = [c for i, c in enumerate(path) if i == 0 or c != path[i - 1]]
    return [c for c in kept if c != BLANK]


def beam(log_probs: Tensor, lengths: Tensor, width: int) -> list[list[int]]:
    """The likeliest text of every utterance, by prefix beam search; (batch, time, classes)."""
    frames, sizes = log_probs.double().cpu(), lengths.tolist()
    return [
        prefix_beam(one[:size].tolist(), width) for one, size in zip(frames, sizes, strict=True)
    ]


def prefix_beam(log_probs: list[list[float]], width: int) -> list[int]:
    """The likeliest text, the paths that spell it added up; `width` prefixes survive a frame.

    After Hannun et al. 2014, without a language model. Each prefix carries the likelihood of the
    paths that end in a blank and of those that end in its last character: only over a blank can
    the same character follow.
    """
    never = -math.inf
    beams: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, never)}
    for frame in log_probs:
        grown: dict[tuple[int, ...], list[float]] = defaultdict(lambda: [never, never])
        for prefix, (blank, label) in beams.items():
            whole = add(blank, label)
            kept = grown[prefix]
            kept[0] = add(kept[0], whole + frame[BLANK])
            if prefix:
                kept[1] = add(kept[1], label + frame[prefix[-1]])
            for c, likelihood in enumerate(frame):
                if c == BLANK:
                    continue
                longer = grown[(*prefix, c)]
                before = blank if prefix and prefix[-1] == c else whole
                longer[1] = add(longer[1], before + likelihood)
        best = sorted(grown.items(), key=lambda item: add(*item[1]), reverse=True)[:width]
        beams = {prefix: (blank, label) for prefix, (blank, label) in best}
    best_prefix, _ = max(beams.items(), key=lambda item: add(*item[1]))
    return list(best_prefix)


def add(one: float, other: float) -> float:
    """The logarithm of the sum of two numbers given by their logarithms."""
    high, low = (one, other) if one > other else (other, one)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))


# Word and character error rates, as edits and lengths that add up over batches and ranks


def edits(found: Sequence[Any], wanted: Sequence[Any]) -> int:
    """Insertions, deletions and replacements that turn one sequence into the other."""
    row = list(range(len(wanted) + 1))
    for i, item in enumerate(found, 1):
        corner, row[0] = row[0], i
        for j, other in enumerate(wanted, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (item != other))
    return row[-1]


def add_error_rates(metrics: MetricsCollector, found: Sequence[str], wanted: Sequence[str]) -> None:
    """`wer` and `cer`: summed edits over summed lengths, never a mean of rates."""
    for text, reference in zip(found, wanted, strict=True):
        words = reference.split()
        metrics.add("wer", edits(text.split(), words), len(words))
        metrics.add("cer", edits(text, reference), len(reference))
