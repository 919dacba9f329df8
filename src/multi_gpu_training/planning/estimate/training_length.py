"""How long the training is, from what was asked for or else from its config; in words too."""

from __future__ import annotations

import math
from dataclasses import dataclass

from multi_gpu_training.planning.forecast.profile import StepProfile


@dataclass(frozen=True)
class TrainingLength:
    """`epochs` or `samples` for a forecast, none of them where it is not known; the words for it,
    and what to tell the user."""

    epochs: float | None = None
    samples: float | None = None
    words: str = ""
    notes: tuple[str, ...] = ()


def training_length(
    profile: StepProfile, epochs: float | None = None, samples: float | None = None
) -> TrainingLength:
    """`epochs` and `samples` come before what the config says."""
    if samples is not None:
        return TrainingLength(samples=samples, words=f"{samples:,.0f} samples")
    if epochs is None and profile.max_steps is not None:
        found = _up_to_max_steps(profile, profile.max_steps)
        if found is not None:
            return found
    if profile.dataset_samples is None:
        unknown = (
            "the number of samples per epoch is unknown, so there is no time and no cost; "
            "--samples says how many the whole training has"
        )
        return TrainingLength(notes=(unknown,))
    epochs = profile.epochs if epochs is None else epochs
    if epochs is None:
        note = "the number of epochs is not known: times are for one (--epochs)"
        return TrainingLength(1.0, words="1 epoch", notes=(note,))
    return TrainingLength(epochs, words=f"{epochs:g} epoch{'s' if epochs != 1 else ''}")


def _up_to_max_steps(profile: StepProfile, max_steps: int) -> TrainingLength | None:
    """What one GPU sees until then; None where the epochs end sooner."""
    words = f"{max_steps} steps of one GPU"
    note = f"max_steps={max_steps} ends the training; its length is what one GPU sees then"
    batch = profile.per_rank_batch * profile.accumulation
    if profile.dataset_samples is None:
        return TrainingLength(samples=float(max_steps * batch), words=words, notes=(note,))
    epochs = max_steps / math.ceil(profile.dataset_samples / batch)
    if profile.epochs is not None and profile.epochs <= epochs:
        return None
    return TrainingLength(epochs, words=words, notes=(note,))
