"""What the recogniser is trained for, and how well it reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from multi_gpu_training.recipes.speech.alphabet import Alphabet
from multi_gpu_training.recipes.speech.ctc import ctc_loss, possible
from multi_gpu_training.recipes.speech.dataset import Batch
from multi_gpu_training.recipes.speech.decode import beam, greedy
from multi_gpu_training.recipes.speech.error_rates import add_error_rates
from multi_gpu_training.training.metrics import MetricsCollector

MASKS = (0.2, 0.1)  # SpecAugment: the share of all bands and of the time that a mask may take


class Objective:
    """CTC as a mean over the characters of all ranks: (mean, characters)."""

    def __init__(self, augment: bool) -> None:
        self.augment = augment

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
