"""One measured step and an interconnect in, one row for each number of GPUs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from multi_gpu_training.errors import ConfigError

from . import cost, published
from .cost import Rising
from .interconnect import Interconnect
from .profile import StepProfile
from .question import Question
from .result import Forecast, ForecastRow, Limit, Price, Scaling, Strategy
from .timeline import Phases, exchange, sharded_exposed_s, straggler_s

# A loss below this share of the step limits nothing.
NOTICED = 0.02

BAND_MEANING = (
    "holds 80 % of comparable published trainings, on models, machines and projects left out of "
    "the fit. The band of one rank holds 80 % of its measured steps."
)


def predict(
    profile: StepProfile,
    interconnect: Interconnect,
    gpus: Sequence[int],
    *,
    gpus_per_node: int = 8,
    scaling: Scaling | None = None,
    global_batch: int | None = None,
    epochs: float | None = None,
    samples: float | None = None,
    loader_workers: int | None = None,
    node_loader_rate: float | None = None,
    price: Price | Sequence[Price] | None = None,
    electricity_per_kwh: float | None = None,
    power_overhead: float = 1.0,
    residual: bool = True,
    images: bool | None = None,
    strategy: Strategy = "ddp",
) -> Forecast:
    """What to expect on each number of GPUs.

    `scaling` is by default the profile's: `weak` keeps its batch per GPU and its accumulation,
    `strong` keeps `global_batch` (by default what one GPU takes per step) and shares it out: first
    accumulation shrinks, then the micro-batch. Time, GPU-hours and cost need to know how long the
    training is: `samples` in all, or `epochs` of the profile's `dataset_samples`. Each rank loads
    as fast as the one measured did with `loader_workers` (default: the profile's);
    `node_loader_rate` says what the ranks of a node load together at most. `power_overhead`
    multiplies the measured power of the GPU to get that of the plug. `residual=False` leaves out
    what published trainings lose beyond communication, stragglers and input; `images` says whether
    the data are images, which lose less. `strategy`: whether each rank has a copy of the model, or
    a part (fsdp), which it gathers from the others block by block.
    """
    question = Question(
        profile,
        interconnect,
        gpus,
        gpus_per_node,
        scaling or profile.scaling,
        global_batch,
        epochs,
        samples,
        loader_workers,
        node_loader_rate,
        (price,) if isinstance(price, Price) else tuple(price or ()),
        electricity_per_kwh,
        power_overhead,
        residual,
        0.5 if images is None else float(images),
        strategy,
    )
    rows = tuple(row_for(question, each) for each in gpus)
    rising = _rising(question)
    return Forecast(
        profile.name,
        profile.device,
        interconnect.name,
        interconnect.source,
        question.scaling,
        rows,
        published.shipped().level,
        BAND_MEANING if residual else "none: what published trainings lose was left out",
        rising.lastingly_from,
        tuple(filter(None, (rising.sentence(), *_notes(question, rows)))),
    )


def row_for(question: Question, gpus: int) -> ForecastRow:
    """One number of GPUs."""
    profile, nodes = question.profile, question.nodes(gpus)
    batch, accumulation = question.share(gpus)
    phases = Phases.of(profile, batch)
    compute = phases.step_s(accumulation)
    communication, exposed = _talk_s(question, phases, gpus, accumulation)
    # The spread was measured on whole steps; of shorter ones it is as much smaller.
    measured = question.computing_s * profile.per_rank_batch * profile.accumulation
    slowness = compute / measured
    straggler = straggler_s(profile.step_times_s, gpus) * slowness
    explained = compute + exposed + straggler
    usual, small_batch = _usual_s(question, gpus, batch, accumulation, compute)
    # Published trainings lose to communication too: only what they lose beyond it is added.
    unexplained = max(0.0, usual - explained)
    # A global batch that does not divide is shared unevenly: the largest share sets the pace.
    global_batch = (
        question.global_batch if question.scaling == "strong" else gpus * batch * accumulation
    )
    busy = explained + unexplained
    loading = question.input_s(batch * accumulation, gpus)
    step = max(busy, loading)  # the loader works beside the GPU
    fastest, slowest = (max(each, loading) for each in _band(question, gpus, compute, busy))
    alone = question.alone_per_s * gpus
    # Time for samples that a rounded-up share has room for, and does not get.
    unshared = compute - global_batch / gpus * question.computing_s
    losses: dict[Limit, float] = {
        "communication": exposed,
        "stragglers": straggler,
        "input pipeline": step - busy,
        "batch": unshared + min(small_batch, unexplained),
        "unexplained": unexplained - min(small_batch, unexplained),
    }
    worst = max(losses, key=lambda name: losses[name])
    row = ForecastRow(
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
        communication_s=communication,
        exposed_communication_s=exposed,
        straggler_s=straggler,
        input_wait_s=step - busy,
        unexplained_s=unexplained,
        limit=worst if losses[worst] > NOTICED * step else "nothing",
        extrapolated=question.interconnect.extrapolated(gpus, nodes),
    )
    return cost.priced(row, question)


def _talk_s(
    question: Question, phases: Phases, gpus: int, accumulation: int
) -> tuple[float, float]:
    """How long ranks talk in a step, and how much longer it takes for that."""
    if gpus < 2:
        return 0.0, 0.0
    nodes, profile = question.nodes(gpus), question.profile
    send = lambda size: question.interconnect.allreduce_s(size, gpus, nodes)  # noqa: E731
    if question.strategy == "fsdp":
        return sharded_exposed_s(
            phases.forward_s,
            phases.backward_s,
            profile.parameter_bytes,
            profile.gradient_bytes,
            profile.blocks,
            send,
            accumulation,
        )
    sent = exchange(phases.buckets, phases.backward_s, send)
    return sent.communication_s, sent.exposed_s


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


def _band(question: Question, gpus: int, compute: float, busy: float) -> tuple[float, float]:
    """The step at its best and at its worst. What one GPU computes was measured; the band is
    about what is lost on top."""
    if gpus < 2 or not question.residual:
        return busy, busy
    low, high = published.shipped().band(compute / busy)
    return compute / high, compute / low


def _rising(question: Question) -> Rising:
    """Of the numbers asked for, every one within a node, and whole nodes up to the largest."""
    most, node = max(question.gpus), question.gpus_per_node
    counts = [*question.gpus, *range(2, min(node, most) + 1), *range(2 * node, most + 1, node)]
    alone = _gpu_time(question, 1)

    def relative(count: int) -> float | None:
        if question.scaling == "strong" and count > question.global_batch:
            return None
        try:
            return _gpu_time(question, count) / alone
        except ConfigError:  # nothing measured for so few: the answer is about the others
            return None

    return Rising.of([count for count in counts if count > 1], relative)


def _gpu_time(question: Question, gpus: int) -> float:
    """Of the training where its length is known, else per sample."""
    row = row_for(question, gpus)
    return row.gpu_hours or gpus / row.samples_per_s


def _notes(question: Question, rows: Sequence[ForecastRow]) -> tuple[str, ...]:
    profile = question.profile
    notes = []
    beyond = [row.gpus for row in rows if row.extrapolated]
    if beyond:
        notes.append(
            f"From {min(beyond)} GPUs on, all-reduce times are extrapolated from the largest "
            "measured group: latency with the depth of a tree, bandwidth as in a ring."
        )
    if len(profile.step_times_s) < max(row.gpus for row in rows) > 1:
        notes.append(
            f"Stragglers are drawn from {len(profile.step_times_s)} measured steps: the slowest of "
            "more ranks than that may be slower."
        )
    if question.loader_rate is not None and question.node_loader_rate is None and rows:
        notes.append(
            "Assumes that every rank loads data as fast as the measured one, with its own cores."
        )
    unfilled = [row.gpus for row in rows if row.global_batch > question.epoch_samples]
    if unfilled:
        notes.append(
            f"With {min(unfilled)} or more GPUs, each step has room for "
            f"more than the {question.epoch_samples:,.0f} samples of an epoch: each epoch is one "
            "step that is not filled, and is counted with the time of a whole one."
        )
    return (*notes, *cost.notes(rows, question.length))
