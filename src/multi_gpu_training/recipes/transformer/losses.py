"""The losses. Each gives its mean and the number it is a mean over, which is its weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multi_gpu_training.recipes.transformer.attention import evaluating
from multi_gpu_training.recipes.transformer.linear_cross_entropy import linear_cross_entropy
from multi_gpu_training.recipes.transformer.sequences import inputs, next_tokens
from multi_gpu_training.training.loss import token_cross_entropy
from multi_gpu_training.training.metrics import MetricsCollector


@dataclass(frozen=True)
class CausalLoss:
    """Cross entropy of the next token, over the tokens that have one.

    padded: batches carry the lengths of their samples.
    masked: the model wants to be told where padding is. With causal attention of our own it need
    not be: padding comes last, and no token looks ahead.
    direct: the model's scores are its last hidden state times a matrix; then that product and the
    cross entropy are computed together, a part of the tokens at a time.
    """

    padded: bool
    masked: bool
    direct: bool
    budget_bytes: int

    def __call__(self, model: Any, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        given = inputs(batch, self.padded)
        labels = next_tokens(given["input_ids"], given.get("attention_mask"))
        if not self.masked:
            given.pop("attention_mask", None)
        head = model.get_output_embeddings()
        # Quantised weights only know the product of their own layer.
        if not self.direct or hasattr(head.weight, "qdata"):
            return token_cross_entropy(exact(model(**given, use_cache=False).logits), labels)
        # Past the model's own head, whose scores would be the largest tensor of the step.
        hidden = model.base_model(**given, use_cache=False).last_hidden_state
        return linear_cross_entropy(hidden, head.weight, head.bias, labels, self.budget_bytes)


@dataclass(frozen=True)
class MaskedLoss:
    """Cross entropy of the hidden tokens."""

    padded: bool

    def __call__(self, model: Any, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        *columns, labels = batch
        logits = model(**inputs(columns, self.padded)).logits
        return token_cross_entropy(exact(logits), labels.long())


class ClassificationLoss:
    """Cross entropy of the label; every text counts the same."""

    def __call__(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return F.cross_entropy(self.logits(model, batch), batch[-1].long())

    def logits(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return exact(model(**inputs(batch[:-1], padded=True)).logits)

    def evaluate(
        self, model: nn.Module, batch: Sequence[Tensor], metrics: MetricsCollector
    ) -> None:
        """Loss, accuracy and macro F1."""
        logits, labels = self.logits(model, batch), batch[-1].long()
        metrics.add("loss", F.cross_entropy(logits, labels, reduction="sum"), len(labels))
        metrics.add_predictions(logits.argmax(1), labels, logits.shape[1])


def exact(logits: Tensor) -> Tensor:
    """In float32 or better, as a loss wants them."""
    return logits if logits.dtype == torch.float64 else logits.float()


def is_direct(model: Any) -> bool:
    """Whether the scores are the last hidden state times a matrix and nothing else. Found by
    trying: some models scale or bend their scores, and their configs say so in many ways."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or model.base_model is model:
        return False
    ids = torch.arange(8)[None] % head.out_features  # any tokens of the vocabulary
    try:
        with evaluating(model):
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            logits = model(input_ids=ids, use_cache=False).logits
            same_shape = logits.shape[:-1] == hidden.shape[:-1]
            return same_shape and torch.allclose(head(hidden), logits, rtol=1e-4, atol=1e-5)
    except (AttributeError, TypeError):
        return False
