"""One measured step and an interconnect in, one row for each number of GPUs out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from multi_gpu_training.errors import ConfigError

from . import bill, published
from .interconnect import Interconnect
from .profile import Bucket, StepProfile
from .result import Forecast, Limit, Price, Row, Scaling
from .stragglers import straggler_s
from .timeline import exchange

# A loss below this share of the step limits nothing.
NOTICED = 0.02
DEARER = 1.1

BAND_MEANING = (
    "80 % of published trainings like this one lie inside: models, machines and projects that the "
    "coefficients had not seen. One GPU was measured and has no band."
)


@dataclass(frozen=True)
class Question:
    """What `predict` was asked, checked."""

    profile: StepProfile
    interconnect: Interconnect
    gpus_per_node: int
    scaling: Scaling
    global_batch: int
    samples: float | None
    loader_rate: float | None
    node_loader_rate: float | None
    price: Price | None
    electricity_per_kwh: float | None
    power_overhead: float
    residual: bool
    image: float

    def nodes(self, gpus: int) -> int:
        return math.ceil(gpus / self.gpus_per_node)

    def share(self, gpus: int) -> tuple[int, int]:
        """Micro-batch and accumulation of each rank."""
        profile = self.profile
        if self.scaling == "weak":
            return profile.per_rank_batch, profile.accumulation
        each = math.ceil(self.global_batch / gpus)
        accumulation = math.ceil(each / profile.per_rank_batch)
        return math.ceil(each / accumulation), accumulation


@dataclass(frozen=True)
class Phases:
    """One rank's step without waiting for anybody: the measured mean, in its parts."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    # Between the steps: host work that the phases do not show.
    rest_s: float
    buckets: tuple[Bucket, ...]

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
        return accumulation * (self.forward_s + self.backward_s) + self.optimizer_s + self.rest_s


def predict(
    profile: StepProfile,
    interconnect: Interconnect,
    gpus: Sequence[int],
    *,
    gpus_per_node: int = 8,
    scaling: Scaling = "weak",
    global_batch: int | None = None,
    epochs: float | None = None,
    samples: float | None = None,
    loader_workers: int | None = None,
    node_loader_rate: float | None = None,
    price: Price | None = None,
    electricity_per_kwh: float | None = None,
    power_overhead: float = 1.0,
    residual: bool = True,
    images: bool | None = None,
) -> Forecast:
    """What to expect on each number of GPUs.

    `weak` keeps the profile's batch per GPU and its accumulation; `strong` keeps `global_batch`
    (by default what one GPU takes a step) and shares it out: first accumulation shrinks, then the
    micro-batch. Time, GPU-hours and cost need to know how long the training is: `samples` in all,
    or `epochs` of the profile's `dataset_samples`. Each rank loads as fast as the one measured did
    with `loader_workers` (default: the profile's); `node_loader_rate` says what the ranks of a
    node load together at most. `power_overhead` multiplies the measured power of the GPU to get
    that of the plug. `residual=False` leaves out what published trainings lose beyond
    communication, stragglers and input; `images` says whether the data are images, which lose
    less.
    """
    _check(profile, gpus, gpus_per_node, scaling, global_batch, epochs, electricity_per_kwh)
    if samples is None and epochs is not None and profile.dataset_samples:
        samples = epochs * profile.dataset_samples
    question = Question(
        profile,
        interconnect,
        gpus_per_node,
        scaling,
        global_batch or profile.per_rank_batch * profile.accumulation,
        samples,
        _loader_rate(profile, loader_workers),
        node_loader_rate,
        price,
        electricity_per_kwh,
        power_overhead,
        residual,
        0.5 if images is None else float(images),
    )
    rows = tuple(row_for(question, each) for each in gpus)
    return Forecast(
        profile.name,
        profile.device,
        interconnect.name,
        interconnect.source,
        scaling,
        rows,
        published.shipped().level,
        BAND_MEANING if residual else "none: what published trainings lose was left out",
        _dearer_from(question, max(gpus)),
        price,
        _notes(question, rows),
    )


def row_for(question: Question, gpus: int) -> Row:
    """One number of GPUs."""
    profile, nodes = question.profile, question.nodes(gpus)
    batch, accumulation = question.share(gpus)
    phases = Phases.of(profile, batch)
    compute = phases.step_s(accumulation)
    sent = exchange(
        phases.buckets if gpus > 1 else (),
        phases.backward_s,
        lambda size: question.interconnect.allreduce_s(size, gpus, nodes),
    )
    # The spread was measured on whole steps; of shorter ones it is as much smaller.
    slowness = compute / Phases.of(profile, profile.per_rank_batch).step_s(profile.accumulation)
    straggler = straggler_s(profile.step_times_s, gpus) * slowness
    explained = compute + sent.exposed_s + straggler
    usual, small_batch = _usual_s(question, gpus, batch, accumulation, compute)
    unexplained = max(0.0, usual - explained)
    # A global batch that does not divide is shared unevenly: the largest share sets the pace.
    global_batch = (
        question.global_batch if question.scaling == "strong" else gpus * batch * accumulation
    )
    busy = explained + unexplained
    loading = _input_s(question, batch * accumulation, gpus)
    step = max(busy, loading)
    fastest, slowest = (max(each, loading) for each in _band(question, gpus, compute, busy))
    alone = _alone_per_s(question) * gpus
    unshared = compute - global_batch / gpus * _computing_s(question)
    losses: dict[Limit, float] = {
        "communication": sent.exposed_s,
        "stragglers": straggler,
        "input pipeline": step - busy,
        "batch": unshared + min(small_batch, unexplained),
        "unexplained": unexplained - min(small_batch, unexplained),
    }
    worst = max(losses, key=lambda name: losses[name])
    row = Row(
        gpus=gpus,
        nodes=nodes,
        per_rank_batch=batch,
        accumulation=accumulation,
        global_batch=global_batch,
        step_s=step,
        low_step_s=fastest,
        high_step_s=slowest,
        samples_per_s=global_batch / step,
        low_samples_per_s=global_batch / slowest,
        high_samples_per_s=global_batch / fastest,
        speedup=global_batch / step / alone * gpus,
        efficiency=global_batch / step / alone,
        low_efficiency=global_batch / slowest / alone,
        high_efficiency=global_batch / fastest / alone,
        compute_s=compute,
        communication_s=sent.communication_s,
        exposed_communication_s=sent.exposed_s,
        straggler_s=straggler,
        input_wait_s=step - busy,
        unexplained_s=unexplained,
        limit=worst if losses[worst] > NOTICED * step else "nothing",
        extrapolated=question.interconnect.extrapolated(gpus, nodes),
    )
    return bill.priced(
        row,
        question.samples,
        question.price,
        profile.power_w,
        question.electricity_per_kwh,
        question.power_overhead,
    )


def _usual_s(
    question: Question, gpus: int, batch: int, accumulation: int, compute: float
) -> tuple[float, float]:
    """The step as published trainings of this kind go, and what of it the smaller batch costs."""
    if not question.residual or gpus < 2:
        return compute, 0.0
    profile, fit = question.profile, published.shipped()
    gradients = profile.gradient_bytes or profile.parameter_bytes
    kind = published.Kind(
        gpus,
        accumulation=accumulation,
        generation=published.generation(profile.device),
        image=question.image,
        params_millions=gradients / 4e6 or None,
    )
    same = compute / fit.efficiency(kind)
    shrunk = fit.efficiency(replace(kind, batch_shrink=profile.per_rank_batch / batch))
    return compute / shrunk, compute / shrunk - same


def _input_s(question: Question, samples: int, gpus: int) -> float:
    """How long a rank's loader takes for a step's samples."""
    rates = []
    if question.loader_rate is not None:
        rates.append(question.loader_rate)
    if question.node_loader_rate is not None:
        rates.append(question.node_loader_rate / min(gpus, question.gpus_per_node))
    return samples / min(rates) if rates else 0.0


def _computing_s(question: Question) -> float:
    """Seconds a sample of one GPU with the profile's own batch, were data always there."""
    profile = question.profile
    step = Phases.of(profile, profile.per_rank_batch).step_s(profile.accumulation)
    return step / (profile.per_rank_batch * profile.accumulation)


def _alone_per_s(question: Question) -> float:
    """Samples a second of one GPU with the profile's own batch: what efficiency is measured by."""
    return 1 / max(_computing_s(question), _input_s(question, 1, 1))


def _band(question: Question, gpus: int, compute: float, busy: float) -> tuple[float, float]:
    """The step at its best and at its worst. What one GPU computes was measured; the band is
    about what is lost on top."""
    if gpus < 2 or not question.residual:
        return busy, busy
    low, high = published.shipped().band(compute / busy)
    return compute / high, compute / low


def _loader_rate(profile: StepProfile, workers: int | None) -> float | None:
    """Samples a second of one rank's loader; of the nearest measured number of workers below."""
    if profile.data_on_device or not profile.loader_rates:
        return None
    wanted = profile.loader_workers if workers is None else workers
    known = [count for count in profile.loader_rates if count <= wanted]
    return profile.loader_rates[max(known) if known else min(profile.loader_rates)]


def _dearer_from(question: Question, most: int) -> int | None:
    """The number of GPUs from which a sample stays 10 % dearer than on one."""
    node = question.gpus_per_node
    counts = [*range(2, min(node, most) + 1), *range(2 * node, most + 1, node)]
    dearer = None
    for gpus in reversed(counts):
        if question.scaling == "strong" and gpus > question.global_batch:
            continue
        try:
            efficiency = row_for(question, gpus).efficiency
        except ConfigError:  # nothing measured for so few: the answer is about the others
            continue
        if efficiency * DEARER > 1:
            break
        dearer = gpus
    return dearer


def _notes(question: Question, rows: Sequence[Row]) -> tuple[str, ...]:
    profile = question.profile
    notes = []
    beyond = [row.gpus for row in rows if row.extrapolated]
    if beyond:
        notes.append(
            f"From {min(beyond)} GPUs the all-reduce time is carried on from the largest group "
            "measured: latency with the depth of a tree, bandwidth as in a ring."
        )
    if len(profile.step_times_s) < max(row.gpus for row in rows) > 1:
        notes.append(
            f"Stragglers are drawn from {len(profile.step_times_s)} measured steps: the slowest of "
            "more ranks than that may be slower."
        )
    if question.loader_rate is not None and question.node_loader_rate is None and rows:
        notes.append("Every rank is taken to load as fast as the one measured: with its own cores.")
    if question.price is not None and question.samples is None:
        notes.append("No cost: it is not known how many samples the training has.")
    if question.price is not None:
        cost = question.price
        notes.append(
            f"Price: {cost.per_gpu_hour:.4g} {cost.currency} per GPU-hour, {cost.source}, "
            f"{cost.date}."
        )
    return tuple(notes)


def _check(
    profile: StepProfile,
    gpus: Sequence[int],
    gpus_per_node: int,
    scaling: str,
    global_batch: int | None,
    epochs: float | None,
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
    if epochs is not None and not profile.dataset_samples:
        problems.append("epochs need the size of the dataset, which the profile does not hold")
    if electricity_per_kwh is not None and profile.power_w is None:
        problems.append("electricity needs measured power, which the profile does not hold")
    if problems:
        raise ConfigError(problems)
