"""Causes of slowness, each with the seconds a step that would be gained without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from multi_gpu_training.monitoring.report.attribution import Steps, side_by_side
from multi_gpu_training.monitoring.report.run import Run

NOTICEABLE = 0.10  # of a step, from which on a cause is one
EVERYWHERE = 0.2  # the same for what all ranks have alike
TINY_BATCH = {"cpu": 8, "cuda": 16}
BETTER_BATCH = 64
# Part of what the device could compute that it does compute, below which a step is mostly something
# else.
USED_ON_CPU, USED_ON_GPU = 0.25, 0.02
SLOW_BYTES_PER_S = 100e6  # slower than a 1 Gbit network
ALWAYS = 0.1  # what nearly every step has is no accident
LATENCY_S = 3e-3  # of an exchange of next to nothing, on a busy machine


@dataclass(frozen=True)
class Cause:
    """kind: data, compute, hooks, network, batch, checkpoint, shared. ranks: where it lies; empty
    is everywhere. seconds: of it in a step. saved_s: what a step would be shorter without it."""

    kind: str
    ranks: tuple[int, ...]
    seconds: float
    saved_s: float
    step_s: float
    facts: dict[str, Any]

    @property
    def gain(self) -> float:
        """How much more would be trained in the same time, 0.35 for 35 %."""
        left = max(self.step_s - self.saved_s, 0.02 * self.step_s)
        return self.step_s / left - 1.0


def find_causes(run: Run) -> list[Cause]:
    """Everything that costs a noticeable part of a step, the worst first."""
    steps = side_by_side(run)
    if steps is None:
        return [cause for cause in _shared(run, None)]
    found = [cause for find in FINDERS for cause in find(run, steps)]
    found += _shared(run, steps)
    found = _explained(run, found)
    found = [cause for cause in found if cause.saved_s >= NOTICEABLE * cause.step_s]
    return sorted(found, key=lambda cause: -cause.gain)


def _data(run: Run, steps: Steps) -> Iterator[Cause]:
    """Ranks that wait for their batches."""
    waits = steps.typical("input")
    saved = _saved(steps, np.minimum(waits[:, None], steps.phases["input"]))
    worst = float(waits.max())
    if worst <= 0.02 * steps.step:
        return
    late = waits > max(0.5 * worst, 0.02 * steps.step)
    # A batch that comes late now and then is not in the median step, but in the mean.
    rare = max(worst - float(np.median(steps.phases["input"], axis=1).max()), 0.0)
    found = Cause("data", _ranks(steps, late), worst, max(saved, rare), steps.step + rare, {})
    apart = worst - float(waits[~late].max()) if not late.all() else 0.0
    if apart >= NOTICEABLE * steps.step:
        yield found
    elif found.saved_s >= EVERYWHERE * found.step_s:  # reading a batch takes some time anyway
        yield replace(found, ranks=())


def _compute(run: Run, steps: Steps) -> Iterator[Cause]:
    """Ranks that compute longer than the others do; with what other work on their cores takes
    only where that is so much that it cannot be chance."""
    found = list(_excess("compute", steps, steps.computing, 0.2))
    yield from found or _hogged(steps)


def _hogged(steps: Steps) -> Iterator[Cause]:
    """A rank whose core other work has most of the time, while the others have theirs."""
    if len(steps.ranks) < 2:
        return
    queued = np.median(steps.queued, axis=1)
    worst, usual = int(queued.argmax()), float(np.median(np.delete(queued, queued.argmax())))
    excess, whole = float(queued[worst]) - usual, steps.loaded_step
    if excess < 0.3 * whole or excess < 2 * usual:
        return
    computing = float(np.median(steps.computing[worst]))
    facts = {"usual_s": computing, "typical_s": computing + excess}
    yield Cause("compute", (steps.ranks[worst],), excess, excess, whole, facts)


def _hooks(run: Run, steps: Steps) -> Iterator[Cause]:
    """Hooks and other Python between the phases, on some ranks or on all."""
    other = steps.phases["other"]
    found = list(_excess("hooks", steps, other, 0.2))
    yield from found
    typical = np.median(other, axis=1)
    # What comes every few steps, like a rollout, is not in the median step, but in the mean.
    often = (other > 2 * typical[:, None] + 1e-3).sum(axis=1).min() >= 2
    rare = max(float((other.mean(axis=1) - typical).min()), 0.0) if often else 0.0
    if not found and typical.min() + rare > max(0.2 * (steps.step + rare), 2e-3):
        saved = _saved(steps, typical[:, None]) + rare
        yield Cause("hooks", (), float(typical.max()) + rare, saved, steps.step + rare, {})


def _excess(kind: str, steps: Steps, seconds: np.ndarray, limit: float) -> Iterator[Cause]:
    """Ranks whose `seconds` are more than `limit` times the usual longer than the usual."""
    if len(steps.ranks) < 2:
        return
    typical = np.median(seconds, axis=1)
    usual = float(np.median(typical) if len(typical) > 2 else typical.min())
    excess = np.maximum(typical - usual, 0.0)
    slow = (excess > limit * usual) & (excess > 0.05 * steps.step)
    excess = np.where(slow, excess, 0.0)
    saved = _saved(steps, excess[:, None])
    if saved < NOTICEABLE * steps.step:
        return
    facts = {"usual_s": usual, "typical_s": float(typical.max())}
    yield Cause(kind, _ranks(steps, slow), float(excess.max()), saved, steps.step, facts)


def _network(run: Run, steps: Steps) -> Iterator[Cause]:
    """An exchange that is slow although everyone is there."""
    if len(steps.ranks) < 2:
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
    saved = steps.step - float(np.median(steps.modelled(transfer=usual)))
    about = {"bytes": size, "rate": rate, "slow": slow}
    yield Cause("network", (), float(np.median(steps.transfer)), saved, steps.step, about)


def _checkpoint(run: Run, steps: Steps) -> Iterator[Cause]:
    """Checkpoints that training stands still for, or that are always being written."""
    kept = [e for e in run.notable if e["event"] == "checkpoint"]
    if not kept:
        return
    whole = max(run.trained_s, 1e-9)
    writing = sum(float(e.get("write_s") or 0.0) for e in kept) / whole
    share = steps.checkpoint_share
    if share < NOTICEABLE:
        return
    # The median step has no checkpoint in it: the time they take comes on top.
    mean = steps.step / max(1.0 - share, 0.02)
    stalls = [float(e.get("stall_s") or 0.0) + float(e.get("waited_s") or 0.0) for e in kept]
    every = run.config.get("checkpoint_frequency")
    facts = {"every": every, "stall_s": float(np.median(stalls)), "share": share}
    yield Cause("checkpoint", (), mean * share, mean * share, mean, facts | {"writing": writing})


def _batch(run: Run, steps: Steps) -> Iterator[Cause]:
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


def _shared(run: Run, steps: Steps | None) -> Iterator[Cause]:
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
        saved = _saved(steps, less)
        yield Cause("shared", ranks, float(less.max()), saved, steps.step, {"place": place})


def shared_places(run: Run) -> list[tuple[tuple[int, ...], str]]:
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


def _explained(run: Run, found: list[Cause]) -> list[Cause]:
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


def _saved(steps: Steps, less: np.ndarray) -> float:
    """What a typical step would be shorter if each rank took `less`."""
    return steps.step - float(np.median(steps.modelled(less)))


def _ranks(steps: Steps, chosen: np.ndarray) -> tuple[int, ...]:
    """The chosen ranks; none if it is all of several."""
    if chosen.all() and len(steps.ranks) > 1:
        return ()
    return tuple(rank for rank, yes in zip(steps.ranks, chosen, strict=True) if yes)


Finder = Callable[[Run, Steps], Iterator[Cause]]
FINDERS: tuple[Finder, ...] = (_data, _compute, _hooks, _network, _checkpoint, _batch)
