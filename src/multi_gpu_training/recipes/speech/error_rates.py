"""Word and character error rates, as edits and lengths that add up over batches and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from multi_gpu_training.training.metrics import MetricsCollector


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
