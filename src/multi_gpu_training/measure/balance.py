"""Unequal GPUs: shares of a batch that follow each rank's speed and memory.

    measure      every rank computes the same samples, at its own share's size
    share out    in proportion to what each did, within what fits into its memory
    repeat       at the new sizes; the fastest division that was measured is kept

Shares are agreed by all ranks, kept for the run and saved with it, so that a resumed run adds up
the same samples in the same places.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import torch

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.feeding import Loader, ValLoaders
from multi_gpu_training.data.order import cut, proportional
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import ConfigError, DataError
from multi_gpu_training.measure.rank_speed import Probe, RankSpeed, first_batch
from multi_gpu_training.training.callbacks import RunLog
from multi_gpu_training.training.probe import untouched
from multi_gpu_training.training.step_state import StepState

UNEQUAL = 1.10  # slowest against fastest rank, from which on shares are looked for
EVEN = 1.03
WORTH_IT = 0.95  # a division that is kept takes at most this part of the time before
ROUNDS = 3
WHOLE = 1000  # what weights that a user gives are parts of

Counts = tuple[int, ...]
T = TypeVar("T")


def allot(total: int, speeds: Sequence[float], limits: Sequence[int | None]) -> Counts:
    """Samples for each rank, so that the last one is done soonest; every rank gets one.

    `limits` hold while there is another rank to turn to.
    """
    counts = [1] * len(speeds)
    for bounded in (True, False):
        queue = [((counts[rank] + 1) / speed, rank) for rank, speed in enumerate(speeds)]
        heapq.heapify(queue)
        while queue and sum(counts) < total:
            _, rank = heapq.heappop(queue)
            limit = limits[rank]
            if bounded and limit is not None and counts[rank] >= limit:
                continue
            counts[rank] += 1
            heapq.heappush(queue, ((counts[rank] + 1) / speeds[rank], rank))
    return tuple(counts)


def search(
    measure: Callable[[Counts], Sequence[RankSpeed]], start: Counts
) -> tuple[Counts, Sequence[RankSpeed]]:
    """The fastest division found from `start` on, and what was measured there.

    `measure(counts)` gives each rank's result at these sizes. `start` stays where ranks are about
    even, or where nothing clearly better was measured.
    """
    found = first = measure(start)
    best, best_s = (start, _slowest(found)) if _fits(start, found) else (None, float("inf"))
    best_found = found
    if best is not None and _spread(found) <= UNEQUAL:
        return start, found
    limits: list[int | None] = [None] * len(start)
    tried = {start}
    for _ in range(ROUNDS):
        limits = [_smaller(old, new.limit) for old, new in zip(limits, found, strict=True)]
        counts = allot(sum(start), [measured.speed for measured in found], limits)
        if counts in tried:
            break
        tried.add(counts)
        found = measure(counts)
        if _fits(counts, found):
            if _slowest(found) < best_s:
                best, best_s, best_found = counts, _slowest(found), found
            if _spread(found) <= EVEN:
                break
    if best is None:
        raise DataError(
            f"memory is short: {sum(start)} samples per micro-batch do not fit into the ranks "
            f"together (they take {', '.join(map(str, limits))}); lower batch_size",
            code="MGT603",
        )
    if _fits(start, first) and best_s > WORTH_IT * _slowest(first):
        return start, first
    return best, best_found


class Balance:
    """How the batches of a run are shared out over its ranks; `weights` None is equally.

    It is saved with the run from the start; `settle` gives it what it works with.
    """

    state: StepState
    loaders: list[Loader]  # of training, and of validation where there is one
    log: RunLog
    say: Callable[[str], None]

    def __init__(self, config: MultiGPUConfig, placement: Placement) -> None:
        self.config = config
        self.placement = placement
        self.weights: Counts | None = None
        self.devices: list[str] = []  # those that the weights were chosen for
        self._probe: Probe | None = None
        self._fresh = False

    def state_dict(self) -> dict[str, Any]:
        weights = None if self.weights is None else list(self.weights)
        return {"weights": weights, "devices": list(self.devices)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = None if state["weights"] is None else tuple(state["weights"])
        self.devices = list(state["devices"])

    def settle(
        self,
        state: StepState,
        loader: Loader,
        val_loader: ValLoaders | None,
        log: RunLog,
        say: Callable[[str], None],
    ) -> None:
        """Decide before the first step of this process: what was asked for, what was saved with
        the checkpoint, or what is measured. Every rank must call it."""
        self.state, self.log, self.say = state, log, say
        self.loaders = [loader]
        if val_loader is not None:
            self.loaders += val_loader.values() if isinstance(val_loader, dict) else [val_loader]
        ranks, config = self.placement.dp_size, self.config
        if config.share_weights is not None and len(config.share_weights) != ranks:
            raise ConfigError(
                f"share_weights={config.share_weights} are for {len(config.share_weights)} ranks, "
                f"but there are {ranks}; give one per rank, or drop them"
            )
        if ranks == 1:
            return
        saved, saved_for = self.weights, self.devices
        self.devices = self.placement.gather_json(describe(self.placement.device))
        if config.share_weights is not None:
            whole = sum(config.share_weights)
            parts = tuple(max(1, round(WHOLE * w / whole)) for w in config.share_weights)
            self._use(parts, "share_weights")
        elif config.balance == "equal":
            self._use(None, "balance=equal")
        elif saved_for == self.devices:
            self._use(saved, "as saved with the checkpoint")
        elif config.balance == "auto" and len(set(self.devices)) == 1:
            self._use(None, "all ranks have the same device")
        elif not state.strategy.computes_alone:  # so none can be measured by itself
            self._use(None, "no rank computes alone; share_weights sets others")
        elif config.balance == "auto" and config.deterministic:
            self._use(None, "deterministic=true; share_weights sets others")
            names = ", ".join(self.devices)
            self.say(
                f"shares: equal although devices differ ({names}), because deterministic=true and "
                "measured shares vary from run to run; share_weights sets others"
            )
        else:
            self.weights = None
            self._measure()
            self._fresh = True

    def renew(self) -> None:
        """Measure again at the start of an epoch, with balance=dynamic. Every rank must call it."""
        fresh, self._fresh = self._fresh, False
        if self.config.balance != "dynamic" or self.config.share_weights is not None:
            return
        if self.placement.dp_size > 1 and not fresh and self.loaders[0].start == 0:
            self._measure()

    def _measure(self) -> None:
        ranks = self.placement.dp_size
        try:
            probe = self._agreed(lambda: self._probe or self._new_probe())
            micro = min(self.loaders[0].feeding.micro_size, probe.micro)
            if micro < 2 * ranks:
                raise DataError(
                    f"{micro} samples per micro-batch are too few to share out", code="MGT302"
                )
            equal = (1,) * ranks
            start = proportional(micro, self.weights or equal)
            counts, found = search(lambda sizes: self._all_measure(probe, sizes), start)
            probe.clean()
        except DataError as error:
            self.log.warning(f"shares stay as they are: {error}")
            self._use(self.weights, f"not measured: {error}")
            return
        speeds = [round(measured.speed, 3) for measured in found]
        if counts == start:
            even = "ranks are about even" if self.weights is None else "they still fit"
            self._use(self.weights, f"measured: {even}", samples_per_s=speeds)
            return
        level = counts == tuple(b - a for a, b in (cut(micro, ranks, r) for r in range(ranks)))
        fastest = max(speeds)
        relative = ", ".join(f"{speed / fastest:.2f}" for speed in speeds)
        self._use(
            None if level else counts,
            f"by measured speed ({relative})",
            samples_per_s=speeds,
        )

    def _new_probe(self) -> Probe:
        with untouched(self.state):
            probe = Probe(self.state, first_batch(self.loaders[0]))
        if self.config.balance == "dynamic":
            self._probe = probe  # a stream would be read anew each time
        return probe

    def _all_measure(self, probe: Probe, counts: Counts) -> list[RankSpeed]:
        mine = counts[self.placement.dp_rank]
        self.placement.barrier()  # ranks that share a machine load it together, as in training
        answers: list[dict[str, Any]] = []
        self._agreed(lambda: asdict(probe.measure(mine)), answers)
        return [RankSpeed(**answer) for answer in answers]

    def _agreed(self, work: Callable[[], T], answers: list[Any] | None = None) -> T:
        """Do it on every rank. Where it fails on one, it fails on all, and with the same words:
        a rank that measured on alone would wait for the others."""
        result: T | None = None
        problem = None
        try:
            result = work()
        except Exception as error:  # the user's dataset and loss may raise anything
            text = str(error).strip().splitlines()
            problem = f"{type(error).__name__}: {text[0][:200] if text else ''}"
            if isinstance(error, DataError):
                problem = str(error)
        sent = result if answers is not None else None
        everyone = self.placement.gather_json({"problem": problem, "answer": sent})
        for rank, answer in enumerate(everyone):
            if answer["problem"] is not None:
                raise DataError(f"rank {rank}: {answer['problem']}")
        if answers is not None:
            answers.extend(answer["answer"] for answer in everyone)
        assert result is not None
        return result

    def _use(self, weights: Counts | None, why: str, **facts: Any) -> None:
        """Let the loaders cut by these weights; say so, and record it."""
        changed = weights != self.loaders[0].feeding.weights
        self.weights = weights
        if changed:
            for loader in self.loaders:
                loader.set_shares(weights=weights)
        micro, ranks = self.loaders[0].feeding.micro_size, self.placement.dp_size
        bounds = [cut(micro, ranks, rank, weights) for rank in range(ranks)]
        samples = [stop - start for start, stop in bounds]
        if changed:
            shown = ", ".join(map(str, samples))
            self.say(f"shares: {shown} of {micro} samples per micro-batch, {why}")
        self.log.record(
            "shares",
            step=self.state.step,
            weights=None if weights is None else list(weights),
            samples=samples,
            why=why,
            **facts,
        )


def describe(device: torch.device) -> str:
    """What kind of device this is; equal for devices that should be equally fast."""
    if device.type != "cuda":
        return device.type
    facts = torch.cuda.get_device_properties(device)
    return f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB"


def _smaller(one: int | None, other: int | None) -> int | None:
    return one if other is None else other if one is None else min(one, other)


def _slowest(found: Sequence[RankSpeed]) -> float:
    return max(measured.seconds for measured in found)


def _spread(found: Sequence[RankSpeed]) -> float:
    return _slowest(found) / max(min(measured.seconds for measured in found), 1e-9)


def _fits(counts: Counts, found: Sequence[RankSpeed]) -> bool:
    return all(measured.count >= count for count, measured in zip(counts, found, strict=True))
