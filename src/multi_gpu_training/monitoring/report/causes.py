"""Causes of slowness, each with the seconds a step that would be gained without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from multi_gpu_training.monitoring.report.attribution import Steps, side_by_side
from multi_gpu_training.monitoring.report.cause import (
    EVERYWHERE,
    NOTICEABLE,
    Cause,
    everyone,
    ranks_of,
    saved,
)
from multi_gpu_training.monitoring.report.own_work import compute, hooks
from multi_gpu_training.monitoring.report.pauses import between_epochs, checkpoints
from multi_gpu_training.monitoring.report.run_record import RunRecord

TINY_BATCH = {"cpu": 8, "cuda": 16}
BETTER_BATCH = 64
# Part of what the device could compute that it does compute, below which a step is mostly something
# else.
USED_ON_CPU, USED_ON_GPU = 0.25, 0.02
SLOW_BYTES_PER_S = 100e6  # slower than a 1 Gbit network
ALWAYS = 0.1  # what nearly every step has is no accident
LATENCY_S = 3e-3  # of an exchange of next to nothing, on a busy machine


def find_causes(run: RunRecord) -> list[Cause]:
    """Everything that costs a noticeable part of a step, the worst first."""
    steps = side_by_side(run)
    if steps is None:
        return [cause for cause in _shared(run, None)]
    found = [cause for find in FINDERS for cause in find(run, steps)]
    found += _shared(run, steps)
    found = _explained(run, found)
    found = [cause for cause in found if cause.saved_s >= NOTICEABLE * cause.step_s]
    return sorted(found, key=lambda cause: -cause.gain)


def _data(run: RunRecord, steps: Steps) -> Iterator[Cause]:
    """Ranks that wait for their batches."""
    waits = steps.typical("input")
    less = saved(steps, np.minimum(waits[:, None], steps.phases["input"]))
    worst = float(waits.max())
    if worst <= 0.02 * steps.step:
        return
    late = waits > max(0.5 * worst, 0.02 * steps.step)
    # A batch that comes late now and then is not in the median step, but in the mean.
    rare = max(worst - float(np.median(steps.phases["input"], axis=1).max()), 0.0)
    found = Cause("data", ranks_of(steps, late), worst, max(less, rare), steps.step + rare, {})
    apart = worst - float(waits[~late].max()) if not late.all() else 0.0
    if apart >= NOTICEABLE * steps.step:
        yield found
    elif found.saved_s >= EVERYWHERE * found.step_s:  # reading a batch takes some time anyway
        yield replace(found, ranks=everyone(steps))


def _network(run: RunRecord, steps: Steps) -> Iterator[Cause]:
    """An exchange that is slow although everyone is there."""
    if len(steps.ranks) < 2 or steps.unseen:
        return
    # A slow network is so in every step; a busy machine delays an exchange now and then.
    transfer = float(np.quantile(steps.transfer, ALWAYS))
    share = transfer / steps.step
    facts = run.facts.get(steps.ranks[0], {})
    size = float(facts.get("gradient_bytes") or 0.0)
    sent = size * 2 * (run.world_size - 1) / run.world_size
    rate = sent / transfer if transfer > 0 else float("inf")
    slow = transfer > LATENCY_S + sent / SLOW_BYTES_PER_S
    if share < (0.25 if slow else 0.5) or transfer < 1e-3:
        return
    usual = min(transfer, LATENCY_S + sent / (10 * SLOW_BYTES_PER_S))
    less = steps.step - float(np.median(steps.modelled(transfer=usual)))
    about = {"bytes": size, "rate": rate, "slow": slow}
    yield Cause("network", (), float(np.median(steps.transfer)), less, steps.step, about)


def _unseen(run: RunRecord, steps: Steps) -> Iterator[Cause]:
    """Waiting that only the events of other ranks could explain."""
    waited = float(np.median(steps.transfer))
    if steps.unseen and waited >= max(EVERYWHERE * steps.step, LATENCY_S):
        yield Cause("unseen", tuple(steps.ranks), waited, waited, steps.step, {})


def _batch(run: RunRecord, steps: Steps) -> Iterator[Cause]:
    """Batches so small that what a step costs anyway (starting operations, reading and moving
    the weights, exchanging gradients) is most of it."""
    facts = run.facts.get(steps.ranks[0], {})
    work = run.work.get(steps.ranks[0], {})
    cuda = str(facts.get("device", "")).startswith("cuda")
    size, peak = facts.get("per_rank_batch"), facts.get("peak_flops")
    if not isinstance(size, int) or size > TINY_BATCH["cuda" if cuda else "cpu"] or not work:
        return
    typical = np.median(steps.computing, axis=1)
    computing = float(typical.min())
    cpu = float(np.median(steps.cpu_s[int(typical.argmin())]))
    transfer = float(np.quantile(steps.transfer, ALWAYS))
    used = float(work.get("flops") or 0) / (peak * computing) if peak and computing > 0 else 0.0
    asleep = not cuda and np.isfinite(cpu) and cpu < 0.5 * computing
    if used > (USED_ON_GPU if cuda else USED_ON_CPU) or asleep or transfer > 10e-3:
        return
    # What does not grow with the batch is paid once for many samples.
    fixed = (steps.step - float(np.median(steps.phases["input"].max(axis=0)))) * (1 - used)
    times = max(2.0, BETTER_BATCH / size)
    about = {"size": size, "operations": work.get("operations"), "used": used}
    yield Cause("batch", (), fixed, fixed * (1 - 1 / times), steps.step, about)


def _shared(run: RunRecord, steps: Steps | None) -> Iterator[Cause]:
    """Ranks that were put onto one GPU, or were bound to fewer cores than they are."""
    for ranks, place in shared_places(run):
        if steps is None:
            yield Cause("shared", ranks, 0.0, 1.0, 1.0, {"place": place, "measured": False})
            continue
        rows = [steps.ranks.index(rank) for rank in ranks if rank in steps.ranks]
        if not rows:
            continue
        if place.startswith("core"):
            # Time without a core was another rank's, as far as these need the core at all.
            most = (len(ranks) / (1 + place.count(",")) - 1) * np.median(steps.own[rows], axis=1)
            lost = float(np.minimum(np.median(steps.queued[rows], axis=1), most).max())
            yield Cause("shared", ranks, lost, lost, steps.step + lost, {"place": place})
            continue
        # A rank is held up by no more than what the others of its GPU compute.
        own = np.median(steps.computing[rows], axis=1)
        others = (own.sum() - own) / max(1, len(rows) - 1)
        less = np.zeros((len(steps.ranks), 1))
        less[rows, 0] = np.minimum(own, others) * (1 - 1 / len(ranks))
        gained = saved(steps, less)
        yield Cause("shared", ranks, float(less.max()), gained, steps.step, {"place": place})


def shared_places(run: RunRecord) -> list[tuple[tuple[int, ...], str]]:
    """Groups of ranks on one device, and which it is."""
    by_gpu: dict[tuple[str, str], list[int]] = {}
    by_cores: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, facts in sorted(run.facts.items()):
        host = str(facts.get("host", ""))
        cores = tuple(facts.get("cores") or ())
        if facts.get("device_uuid"):
            by_gpu.setdefault((host, facts["device_uuid"]), []).append(rank)
        elif cores and len(cores) < int(facts.get("machine_cores") or 0):
            by_cores.setdefault((host, cores), []).append(rank)
    found = [(tuple(r), f"GPU {uuid}") for (_, uuid), r in by_gpu.items() if len(r) > 1]
    for (_, cores), ranks in by_cores.items():
        if len(ranks) > len(cores):
            name = "core" if len(cores) == 1 else "cores"
            found.append((tuple(ranks), f"{name} {', '.join(map(str, cores))}"))
    return found


def _explained(run: RunRecord, found: list[Cause]) -> list[Cause]:
    """Without causes that another one explains."""
    kinds = {cause.kind: cause for cause in found}
    shared = [(set(cause.ranks), cause.seconds) for cause in found if cause.kind == "shared"]
    kept = []
    for cause in found:
        slow = set(cause.ranks)
        if cause.kind == "compute" and any(
            slow <= ranks and cause.seconds <= 2 * lost for ranks, lost in shared
        ):
            continue
        checkpoint = kinds.get("checkpoint")
        # The main rank writes beside training, in the same process.
        if (
            cause.kind in ("compute", "hooks")
            and slow == {0}
            and checkpoint is not None
            and checkpoint.facts["writing"] > 0.3
        ):
            continue
        if cause.kind in ("hooks", "network") and "batch" in kinds and not cause.ranks:
            continue
        kept.append(cause)
    return kept


Finder = Callable[[RunRecord, Steps], Iterator[Cause]]
FINDERS: tuple[Finder, ...] = (
    _data,
    compute,
    hooks,
    _network,
    _unseen,
    checkpoints,
    between_epochs,
    _batch,
)
