"""Each cause in a sentence: what it is, where it lies, what to do, and what that would gain."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from multi_gpu_training.monitoring.report.attribution import Steps
from multi_gpu_training.monitoring.report.cause import Cause
from multi_gpu_training.monitoring.report.causes import BETTER_BATCH
from multi_gpu_training.monitoring.report.run_record import RunRecord

AFFORDABLE = 0.01  # of the time, for checkpoints
STATISTICS = "BatchNorm's statistics (sync_bn)"


def sentence(run: RunRecord, steps: Steps | None, cause: Cause) -> str:
    return WORDS[cause.kind](run, steps, cause)


def exchanges_statistics(run: RunRecord) -> bool:
    """Whether ranks talk in every BatchNorm, too: that is part of their exchange."""
    return run.config.get("sync_bn") is True


def _data(run: RunRecord, steps: Steps | None, cause: Cause) -> str:
    if not cause.ranks or run.world_size == 1:
        who = "every rank waits" if run.world_size > 1 else "training waits"
        workers = run.config.get("num_workers", 0)
        return (
            f"{who} {duration(cause.seconds)} per step for data; more loader workers "
            f"(num_workers is {workers}) or cheaper samples would {gain(cause)}"
        )
    return (
        f"{ranks_do(cause.ranks, 'wait')} {duration(cause.seconds)} per step for data"
        f"{_waiting(steps, cause)}; fix {_its(cause)} loader and {gain(cause, _at_most(steps))}"
    )


def _compute(run: RunRecord, steps: Steps | None, cause: Cause) -> str:
    facts = cause.facts
    if "part" in facts:
        return (
            f"{_who(run, cause, 'compute')} {duration(facts['spike_s'])} longer than usual in "
            f"{_part(facts['part'])}, {duration(cause.seconds)} per step on average"
            f"{_waiting(steps, cause)}; find what is done in those steps, here or by "
            f"another process on this machine, and {gain(cause, _at_most(steps))}"
        )
    return (
        f"{ranks_do(cause.ranks, 'compute')} {duration(cause.seconds)} per step longer than the "
        f"others ({duration(facts['typical_s'])} instead of {duration(facts['usual_s'])})"
        f"{_waiting(steps, cause)}; look at {_its(cause)} device (other processes, clocks, heat), "
        f"or give it a smaller share (balance=measured), and {gain(cause, _at_most(steps))}"
    )


def _hooks(run: RunRecord, steps: Steps | None, cause: Cause) -> str:
    facts = cause.facts
    often = ""
    if "part" in facts:
        often = f" ({duration(facts['spike_s'])} in {_part(facts['part'])})"
    return (
        f"{_who(run, cause, 'spend')} {duration(cause.seconds)} per step between steps{often}, in "
        f"hooks, the log or other Python{_waiting(steps, cause)}; make them cheaper and "
        f"{gain(cause, _at_most(steps))}"
    )


def _unseen(run: RunRecord, steps: Steps | None, cause: Cause) -> str:
    others = "other ranks" if steps is None else strangers(steps)
    return (
        f"{ranks_do(cause.ranks, 'wait')} {duration(cause.seconds)} per step for {others} or for "
        "the network: only the missing events could tell which"
    )


def _network(run: RunRecord, steps: Steps | None, cause: Cause) -> str:
    sent = cause.facts["bytes"]
    amount = f"{sent / 1e6:,.1f} MB" if sent >= 1e5 else f"{sent / 1e3:,.1f} kB"
    size = f"{amount} of gradients" if sent else "gradients"
    rate = f" ({cause.facts['rate'] / 1e6:,.1f} MB/s)" if sent else ""
    remedies = "a faster connection, gradient_accumulation_steps or fp16_compression"
    slow = "the network is slow" if cause.facts["slow"] else "the network is the limit"
    if exchanges_statistics(run):  # how long the gradients alone take is not known
        size, rate, slow = f"{size} and {STATISTICS}", "", "the network is the limit"
        remedies = "a faster connection, or sync_bn=false if each rank may normalise its own part,"
    return (
        f"{slow}: exchanging {size} takes {duration(cause.seconds)} per step on every rank{rate}, "
        f"while no rank is late; {remedies} would {gain(cause, 'up to ')}"
    )


def _checkpoint(run: RunRecord, steps: Steps | None, cause: Cause) -> str:
    facts = cause.facts
    every = facts["every"]
    stands = (
        f"training pauses for them {facts['share']:.0%} of the time, "
        f"{duration(facts['stall_s'])} each time"
    )
    if facts["at_ends"]:
        return (
            f"epochs are short for the checkpoints at their ends: {stands}; longer epochs would "
            f"{gain(cause, 'up to ')} (rank 0 saves, the others wait for it)"
        )
    text = f"checkpoints come too often: {stands}"
    if isinstance(every, int):
        better = _rounded_up(every * facts["share"] / AFFORDABLE)
        when = f"{every:,} steps" if every > 1 else "step"
        text += f", every {when}; checkpoint_frequency={better} would {gain(cause)}"
    return text + " (rank 0 saves, the others wait for it)"


def _validation(run: RunRecord, steps: Steps | None, cause: Cause) -> str:
    return (
        f"validation takes {cause.facts['share']:.0%} of the time, "
        f"{duration(cause.facts['each_s'])} after each epoch; fewer or cheaper validation samples, "
        f"or longer epochs, would {gain(cause, 'up to ')}"
    )


def _epochs(run: RunRecord, steps: Steps | None, cause: Cause) -> str:
    return (
        f"{cause.facts['share']:.0%} of the time passes between epochs, "
        f"{duration(cause.facts['each_s'])} after each: in on_epoch_end hooks, in starting loader "
        f"workers or in other Python; make it cheaper and {gain(cause, 'up to ')}"
    )


def _batch(run: RunRecord, steps: Steps | None, cause: Cause) -> str:
    size = cause.facts["size"]
    samples = f"{size} sample{'s' if size > 1 else ''}"
    return (
        f"batches are tiny: {samples} a rank. Most of a step does not depend on the batch: "
        f"starting operations, moving the weights, exchanging gradients; a larger batch_size takes "
        f"hardly longer, and {BETTER_BATCH} samples would {gain(cause, 'up to ')}"
    )


def _shared(run: RunRecord, steps: Steps | None, cause: Cause) -> str:
    text = f"{ranks_do(cause.ranks, 'share')} {cause.facts['place']}"
    kind = "GPU" if cause.facts["place"].startswith("GPU") else "core"
    if cause.facts.get("measured") is False:
        return f"{text}; give each rank its own {kind}"
    return f"{text} and {_slow_down(cause)}; give each rank its own {kind} and {gain(cause)}"


def _slow_down(cause: Cause) -> str:
    return f"slow each other down, by about {duration(cause.seconds)} per step"


WORDS: dict[str, Callable[[RunRecord, Steps | None, Cause], str]] = {
    "data": _data,
    "compute": _compute,
    "hooks": _hooks,
    "network": _network,
    "unseen": _unseen,
    "checkpoint": _checkpoint,
    "validation": _validation,
    "epochs": _epochs,
    "batch": _batch,
    "shared": _shared,
}


def _waiting(steps: Steps | None, cause: Cause) -> str:
    """ "; ranks 0, 2, 3 wait for rank 1" """
    if steps is None or not cause.ranks or len(steps.ranks) < 2:
        return ""
    waits = (np.mean if "part" in cause.facts else np.median)(steps.waits, axis=1)
    late = [
        rank
        for rank, wait in zip(steps.ranks, waits, strict=True)
        if rank not in cause.ranks and wait > 0.3 * cause.seconds
    ]
    if not late:
        return ""
    return f"; {ranks_do(late, 'wait')} for {ranks(cause.ranks)}"


def ranks(found: Sequence[int]) -> str:
    if len(found) == 1:
        return f"rank {found[0]}"
    more = f" and {len(found) - 20:,} more" if len(found) > 20 else ""
    return "ranks " + ", ".join(map(str, found[:20])) + more


def ranks_do(found: Sequence[int], verb: str) -> str:
    return f"{ranks(found)} {verb}{'s' if len(found) == 1 else ''}"


def _who(run: RunRecord, cause: Cause, verb: str) -> str:
    if cause.ranks and run.world_size > 1:
        return ranks_do(cause.ranks, verb)
    return f"{'every rank' if run.world_size > 1 else 'training'} {verb}s"


def strangers(steps: Steps) -> str:
    return f"{ranks(steps.unseen)} (no events)"


def _part(of_steps: float) -> str:
    times = round(1 / of_steps)
    return f"one step in {times:,}" if times > 3 else f"{of_steps:.0%} of the steps"


def _at_most(steps: Steps | None) -> str:
    """A rank that nobody sees may be slow as well."""
    return "up to " if steps is not None and steps.unseen else ""


def _its(cause: Cause) -> str:
    return "its" if len(cause.ranks) == 1 else "their"


def gain(cause: Cause, least: str = "") -> str:
    more = cause.gain
    return f"gain {least}{more:.0%}" if more < 3 else f"train {least}{1 + more:.0f} times as fast"


def duration(seconds: float) -> str:
    if seconds >= 120:
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            value = seconds / size
            return f"{value:.0f} {unit}" if value >= 20 else f"{value:.1f} {unit}"
    return f"{seconds * 1e6:.0f} us"


def _rounded_up(steps: float) -> int:
    size = 10 ** max(0, len(str(int(steps))) - 1)
    return int(-(-steps // size) * size)
