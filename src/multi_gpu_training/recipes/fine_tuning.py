"""Defaults for weights that are trained already."""

from __future__ import annotations

PRETRAINED_RATE = 5e-5
HIGH_RATE = 1e-3  # above it AdamW takes trained weights apart within a few steps


def high_rate_note(rate: float) -> str | None:
    """What to say about a rate that is too high for pretrained weights."""
    if rate <= HIGH_RATE:
        return None
    return (
        f"warning: learning_rate={rate:g} is high for pretrained weights and may undo what they "
        f"know; {PRETRAINED_RATE:g} is the default, 2e-5 to 5e-5 is usual (from_scratch=true "
        "starts from fresh weights)"
    )
