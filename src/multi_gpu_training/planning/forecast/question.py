"""What a forecast was asked: checked, and how it falls on each rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from multi_gpu_training.errors import ConfigError

from .interconnect import Interconnect
from .profile import GradientBucket, StepProfile
from .result import Price, Scaling
from .timeline import step_s


@dataclass(frozen=True)
class Length:
    """So many epochs of so many samples. What is not divided into epochs is one of them."""

    epochs: float
    epoch_samples: float

    @staticmethod
    def of(
        dataset_samples: int | None, epochs: float | None, samples: float | None
    ) -> Length | None:
        """`samples` in all, or `epochs` of the dataset; None where neither says how long."""
        if samples is not None:
            whole = dataset_samples or samples
            return Length(samples / whole, whole)
        if epochs is not None and dataset_samples:
            return Length(epochs, dataset_samples)
        return None

    def steps(self, global_batch: int) -> int:
        """An epoch ends with a step, filled or not: it has at least one."""
        whole, rest = divmod(self.epochs, 1)
        last = round(rest * self.epoch_samples / global_batch, 6)  # a hair more is no step more
        steps = int(whole) * math.ceil(self.epoch_samples / global_batch) + math.ceil(last)
        return max(1, steps)


@dataclass(frozen=True)
class Question:
    """What `predict` was asked, checked."""

    profile: StepProfile
    interconnect: Interconnect
    gpus_per_node: int
    scaling: Scaling
    global_batch: int
    length: Length | None
    loader_rate: float | None
    node_loader_rate: float | None
    offers: tuple[Price, ...]
    electricity_per_kwh: float | None
    power_overhead: float
    residual: bool
    image: float

    def nodes(self, gpus: int) -> int:
        return math.ceil(gpus / self.gpus_per_node)

    @property
    def epoch_samples(self) -> float:
        """Without end where the length is not known."""
        return math.inf if self.length is None else self.length.epoch_samples

    def share(self, gpus: int) -> tuple[int, int]:
        """Micro-batch and accumulation of each rank."""
        profile = self.profile
        if self.scaling == "weak":
            return profile.per_rank_batch, profile.accumulation
        each = math.ceil(self.global_batch / gpus)
        accumulation = math.ceil(each / profile.per_rank_batch)
        return math.ceil(each / accumulation), accumulation

    def input_s(self, samples: float, gpus: int) -> float:
        """How long a rank's loader takes for so many samples."""
        rates = []
        if self.loader_rate is not None:
            rates.append(self.loader_rate)
        if self.node_loader_rate is not None:
            rates.append(self.node_loader_rate / min(gpus, self.gpus_per_node))
        return samples / min(rates) if rates else 0.0

    @property
    def computing_s(self) -> float:
        """Seconds per sample of one GPU with the profile's own batch, were data always there."""
        profile = self.profile
        step = Phases.of(profile, profile.per_rank_batch).step_s(profile.accumulation)
        return step / (profile.per_rank_batch * profile.accumulation)

    @property
    def alone_per_s(self) -> float:
        """Samples per second of one GPU with its own batch: what efficiency is measured by."""
        return 1 / max(self.computing_s, self.input_s(1, 1))


@dataclass(frozen=True)
class Phases:
    """One rank's step without waiting for anybody: the measured mean, in its parts."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    # Between the steps: host work that the phases do not show.
    rest_s: float
    buckets: tuple[GradientBucket, ...]

    @staticmethod
    def of(profile: StepProfile, batch: int) -> Phases:
        """Forward and backward of a micro-batch take time as its samples do."""
        parts = profile.accumulation * (profile.forward_s + profile.backward_s)
        parts += profile.optimizer_s
        mean = float(np.mean(profile.step_times_s)) if profile.step_times_s else parts
        # Phases are measured with the device awaited between them: together they can be longer
        # than a step that runs through.
        shrink = min(1.0, mean / parts) if parts > 0 else 1.0
        scale = shrink * batch / profile.per_rank_batch
        return Phases(
            profile.forward_s * scale,
            profile.backward_s * scale,
            profile.optimizer_s * shrink,
            max(0.0, mean - parts),
            tuple(replace(b, ready_s=b.ready_s * scale) for b in profile.buckets),
        )

    def step_s(self, accumulation: int) -> float:
        """Without exchange."""
        alone = step_s(self.forward_s, self.backward_s, self.optimizer_s, 0.0, accumulation)
        return alone + self.rest_s


def loader_rate(profile: StepProfile, workers: int | None) -> float | None:
    """Samples per second of one rank's loader; of the nearest measured number of workers below."""
    if profile.data_on_device or not profile.loader_rates:
        return None
    wanted = profile.loader_workers if workers is None else workers
    known = [count for count in profile.loader_rates if count <= wanted]
    return profile.loader_rates[max(known) if known else min(profile.loader_rates)]


def check(
    profile: StepProfile,
    gpus: Sequence[int],
    gpus_per_node: int,
    scaling: str,
    global_batch: int | None,
    epochs: float | None,
    samples: float | None,
    electricity_per_kwh: float | None,
) -> None:
    problems = []
    if not gpus or min(gpus) < 1:
        problems.append(f"gpus={list(gpus)}: give numbers of GPUs from 1")
    if gpus_per_node < 1:
        problems.append(f"gpus_per_node={gpus_per_node} must be at least 1")
    if scaling not in ("weak", "strong"):
        problems.append(f"scaling={scaling!r} must be weak or strong")
    if profile.per_rank_batch < 1 or profile.forward_s + profile.backward_s <= 0:
        problems.append(f"the profile {profile.name} holds no measured step; measure it again")
    if scaling == "strong" and gpus and not problems:
        whole = global_batch or profile.per_rank_batch * profile.accumulation
        if whole < max(gpus):
            problems.append(
                f"a global batch of {whole} cannot be shared by {max(gpus)} GPUs; "
                f"use at most {whole} GPUs, a larger global batch, or weak scaling"
            )
    for name, amount in (("epochs", epochs), ("samples", samples)):
        if amount is not None and not 0 < amount < math.inf:
            problems.append(f"{name}={amount:g} must be a number above 0")
    if epochs is not None and not profile.dataset_samples:
        problems.append("epochs need the size of the dataset, which the profile does not hold")
    if electricity_per_kwh is not None and profile.power_w is None:
        problems.append("electricity needs measured power, which the profile does not hold")
    if problems:
        raise ConfigError(problems)
