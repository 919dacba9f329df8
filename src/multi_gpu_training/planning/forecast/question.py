"""What a forecast was asked: checked, and how it falls on each rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from multi_gpu_training.errors import ConfigError

from .interconnect import Interconnect
from .profile import StepProfile
from .result import Price, Scaling, Strategy
from .timeline import Phases


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
    """The arguments of `predict`, which explains them; what is wrong with them is one error."""

    profile: StepProfile
    interconnect: Interconnect
    gpus: Sequence[int]
    gpus_per_node: int
    scaling: Scaling
    asked_batch: int | None
    epochs: float | None
    samples: float | None
    loader_workers: int | None
    node_loader_rate: float | None
    offers: tuple[Price, ...]
    electricity_per_kwh: float | None
    power_overhead: float
    residual: bool
    image: float
    strategy: Strategy = "ddp"

    def __post_init__(self) -> None:
        profile, problems = self.profile, []
        if not self.gpus or min(self.gpus) < 1:
            problems.append(f"gpus={list(self.gpus)}: give numbers of GPUs from 1")
        if self.gpus_per_node < 1:
            problems.append(f"gpus_per_node={self.gpus_per_node} must be at least 1")
        if self.scaling not in ("weak", "strong"):
            problems.append(f"scaling={self.scaling!r} must be weak or strong")
        if profile.per_rank_batch < 1 or profile.forward_s + profile.backward_s <= 0:
            problems.append(f"the profile {profile.name} holds no measured step; measure it again")
        if not problems and self.scaling == "strong" and self.global_batch < max(self.gpus):
            problems.append(
                f"a global batch of {self.global_batch} cannot be shared by {max(self.gpus)} GPUs; "
                f"use at most {self.global_batch} GPUs, a larger global batch, or weak scaling"
            )
        for name, amount in (("epochs", self.epochs), ("samples", self.samples)):
            if amount is not None and not 0 < amount < math.inf:
                problems.append(f"{name}={amount:g} must be a number above 0")
        if self.epochs is not None and not profile.dataset_samples:
            problems.append("epochs need the size of the dataset, which the profile does not hold")
        if self.electricity_per_kwh is not None and profile.power_w is None:
            problems.append("electricity needs measured power, which the profile does not hold")
        if problems:
            raise ConfigError(problems)

    @property
    def global_batch(self) -> int:
        return self.asked_batch or self.profile.per_rank_batch * self.profile.accumulation

    @cached_property
    def length(self) -> Length | None:
        return Length.of(self.profile.dataset_samples, self.epochs, self.samples)

    @property
    def epoch_samples(self) -> float:
        """Without end where the length is not known."""
        return math.inf if self.length is None else self.length.epoch_samples

    def nodes(self, gpus: int) -> int:
        return math.ceil(gpus / self.gpus_per_node)

    def share(self, gpus: int) -> tuple[int, int]:
        """Micro-batch and accumulation of each rank."""
        profile = self.profile
        if self.scaling == "weak":
            return profile.per_rank_batch, profile.accumulation
        # Accumulation shrinks first, which costs nothing, then the micro-batch.
        each = math.ceil(self.global_batch / gpus)
        accumulation = math.ceil(each / profile.per_rank_batch)
        return math.ceil(each / accumulation), accumulation

    @cached_property
    def loader_rate(self) -> float | None:
        """Samples per second of a rank's loader; of the nearest measured workers below."""
        rates = self.profile.loader_rates
        if self.profile.data_on_device or not rates:
            return None
        asked = self.loader_workers
        wanted = self.profile.loader_workers if asked is None else asked
        return rates[max((count for count in rates if count <= wanted), default=min(rates))]

    def input_s(self, samples: float, gpus: int) -> float:
        """How long a rank's loader takes for so many samples."""
        rates = []
        if self.loader_rate is not None:
            rates.append(self.loader_rate)
        if self.node_loader_rate is not None:
            # The ranks of a node share its disk and cores.
            rates.append(self.node_loader_rate / min(gpus, self.gpus_per_node))
        return samples / min(rates) if rates else 0.0

    @cached_property
    def computing_s(self) -> float:
        """Seconds per sample of one GPU with the profile's own batch, were data always there."""
        profile = self.profile
        step = Phases.of(profile, profile.per_rank_batch).step_s(profile.accumulation)
        return step / (profile.per_rank_batch * profile.accumulation)

    @property
    def alone_per_s(self) -> float:
        """Samples per second of one GPU with its own batch: what efficiency is measured by."""
        return 1 / max(self.computing_s, self.input_s(1, 1))
