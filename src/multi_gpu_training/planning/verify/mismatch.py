"""Find the first place where several ranks do not do what one rank does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from multi_gpu_training.measure.recorder import LATE_SETTINGS
from multi_gpu_training.measure.tensor_sketch import Sketches, furthest, total_norm
from multi_gpu_training.planning.verify.recorded_run import (
    CANNOT_START,
    RankRecord,
    RecordedRun,
    RowMatch,
    match_rows,
    merged,
)


@dataclass(frozen=True)
class Tolerance:
    """How far equal things may be apart: ||a-b|| / ||a||.

    Float64 agrees to 1e-12 or better; a wrong result is wrong by far more than 1e-7. In float32
    optimizers like Adam make full steps of gradients that are nothing but rounding, so that later
    steps say little. `zero`: a gradient that is this small a part of all is rounding.
    """

    loss: float
    first_grads: float
    grads: float
    moves: float
    weights: float
    zero: float
    nothing: float


DOUBLE = Tolerance(1e-8, 1e-8, 1e-7, 1e-6, 1e-7, 1e-9, 1e-13)
SINGLE = Tolerance(2e-4, 1e-3, 5e-2, 0.2, 1e-2, 1e-5, 1e-6)
# Where a step notes parameters or buffers (measure/recorder.py): under which key, under which it
# has noted them before (None: at the end of the step before), and how that is said.
NOTED_AT: dict[str, tuple[str, str | None, str]] = {
    "between": ("begin", None, "when the step begins"),
    "forward": ("before", "begin", "before the optimizer moves it"),
    "optimizer": ("moved", "before", "after the optimizer has moved it"),
    "callback": ("after", "moved", "after the step's callbacks"),
    "buffers": ("buffers", "buffers_begin", "after the step"),
}
# Small tensors are measured against this part of all tensors together.
FLOOR = 1e-5


@dataclass
class Mismatch:
    """The first difference. `stage` says where in the step it stands.

    ranks_differ: ranks whose values differ from rank 0's, where all must be equal.
    """

    stage: str
    step: int
    text: str
    manager: int = 0
    name: str = "-"
    apart: float = math.nan
    ranks_differ: list[int] = field(default_factory=list)
    match: RowMatch | None = None
    micro: int = 0
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class RankComparison:
    """How one number of ranks compares with one rank."""

    ranks: int
    mismatch: Mismatch | None
    steps: int
    gradients: float  # the largest difference of any gradient, in any step
    moves: float
    worst_name: str
    metrics: str | None

    @property
    def passed(self) -> bool:
        return self.mismatch is None


def compare_runs(one: RecordedRun, many: RecordedRun) -> RankComparison:
    """Go through both trainings side by side, up to the first difference."""
    limits = DOUBLE if one.double and many.double else SINGLE
    worst_grad, worst_move, name = 0.0, 0.0, "-"
    found: Mismatch | None = None
    for number, (alone, ranks) in enumerate(zip(one.managers, many.managers, strict=False)):
        pair = PairedRecords(alone[0], ranks, limits, many.error)
        found = next(iter(pair.mismatches()), None)
        grad, move, where = pair.distances()
        if grad >= worst_grad:
            worst_grad, name = grad, where
        worst_move = max(worst_move, move)
        if found is not None:
            found.manager = number
            break
    if found is None and many.failure is not None:
        text = f"the training on {many.ranks} ranks failed after {many.steps} steps: {many.error}"
        if many.error.startswith(CANNOT_START):  # the cause says the rest
            text = f"the training on {many.ranks} ranks cannot start"
        found = Mismatch("failed", many.steps + 1, text)
    metrics = None
    if found is None:
        metrics, found = _metrics(one, many)
    return RankComparison(many.ranks, found, many.steps, worst_grad, worst_move, name, metrics)


class PairedRecords:
    """One rank's record beside those of several ranks."""

    def __init__(
        self, one: RankRecord, many: Sequence[RankRecord], limits: Tolerance, error: str = ""
    ) -> None:
        self.one = one
        self.many = many
        self.limits = limits
        self.error = error

    def distances(self) -> tuple[float, float, str]:
        """The largest difference of gradients, of updates, and the tensor of the first."""
        grad, move, name = 0.0, 0.0, "-"
        for alone, ranks in self._steps():
            if not self._no_gradients(alone, ranks):
                apart, where = furthest(*_filled(alone.get("grads"), ranks[0].get("grads")), FLOOR)
                if not apart <= grad:
                    grad, name = apart, where
            apart, _ = self._moves(alone, ranks[0])
            move = move if apart <= move else apart
        return grad, move, name

    def _steps(self) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
        return (
            (step[0], list(step[1:]))
            for step in zip(self.one.steps, *(rank.steps for rank in self.many), strict=False)
        )

    def mismatches(self) -> Iterator[Mismatch]:
        """Every difference in the order in which it arose; the first one is the cause."""
        yield from self._start()
        for number, (alone, ranks) in enumerate(self._steps()):
            step = number + 1
            yield from self._tensors("between", step, alone, ranks)
            yield from self._data(step, alone, ranks)
            # A parameter that the forward changes (initialised from the first batch) explains the
            # loss, and not the other way round: no gradient has moved it yet.
            yield from self._tensors("forward", step, alone, ranks)
            yield from self._loss(step, alone, ranks)
            yield from self._settings(step, alone, ranks)
            yield from self._grads(step, alone, ranks)
            yield from self._move(step, alone, ranks)
            yield from self._tensors("optimizer", step, alone, ranks)
            yield from self._tensors("callback", step, alone, ranks)
            yield from self._tensors("buffers", step, alone, ranks)
            yield from self._train_metrics(step, alone, ranks)
        yield from self._length()
        yield from self._asked()

    def _start(self) -> Iterator[Mismatch]:
        for key, what in (("parameters", "parameter"), ("buffers", "buffer")):
            apart, name = furthest(self.one.header[key], self.many[0].header[key], FLOOR)
            if not apart <= self.limits.weights:
                text = (
                    f"before the first step, {what} {name} differs from one rank's by {apart:.1e}"
                )
                yield Mismatch("start", 0, text, name=name, apart=apart)

    def _tensors(
        self, stage: str, step: int, alone: dict[str, Any], ranks: list[dict[str, Any]]
    ) -> Iterator[Mismatch]:
        """Parameters or buffers at one point of the step: equal on all ranks, and to one rank's."""
        key, _, when = NOTED_AT[stage]
        what = "buffer" if stage == "buffers" else "parameter"
        if any(key not in line for line in (alone, *ranks)):
            return  # a step that was not finished
        # Buffers of other ranks are overwritten by rank 0's where they are broadcast.
        if stage != "buffers":
            among = _among_ranks(stage, step, key, ranks, f"{what} {{name}} of rank {{rank}}", when)
            if among is not None:
                yield among
                return
        limit = self.limits.weights
        apart, name = furthest(self._kept(alone, key), self._kept(ranks[0], key, alone), FLOOR)
        if not apart <= limit:
            text = f"{what} {name} differs from one rank's by {apart:.1e} {when}"
            yield Mismatch(stage, step, text, 0, name, apart)

    def _kept(
        self, line: dict[str, Any], key: str, reference: dict[str, Any] | None = None
    ) -> Sketches:
        """Tensors without those whose gradient is nothing but rounding: they drift at random."""
        reference = reference or line
        drifting = self._drifting(reference)
        return {name: found for name, found in line[key].items() if name not in drifting}

    def _drifting(self, line: dict[str, Any]) -> set[str]:
        grads = line.get("grads")
        if grads is None:
            return set()
        least = self.limits.zero * total_norm(grads)
        return {name for name, found in grads.items() if 0 < found[0] <= least}

    def _no_gradients(self, alone: dict[str, Any], ranks: list[dict[str, Any]]) -> bool:
        """Whether the gradients of a step cancel out: what is left of them is rounding."""
        sides = (alone, step_loss([alone])), (ranks[0], step_loss(ranks))
        return all(
            "grads" in line and total_norm(line["grads"]) <= self.limits.nothing * abs(loss)
            for line, loss in sides
        )

    def _no_moves(self, alone: dict[str, Any], other: dict[str, Any]) -> bool:
        """The same for what an optimizer makes of them: Adam divides them by its epsilon."""
        return self._no_gradients(alone, [other]) and all(
            total_norm(line["moves"]) <= self.limits.zero * total_norm(line["before"])
            for line in (alone, other)
        )

    def _data(
        self, step: int, alone: dict[str, Any], ranks: list[dict[str, Any]]
    ) -> Iterator[Mismatch]:
        micros = [alone["micros"], *(rank["micros"] for rank in ranks)]
        total_one = sum(micro["count"] for micro in micros[0])
        total = sum(micro["count"] for part in micros[1:] for micro in part)
        pairs = list(zip_longest(*micros))
        if any(not self._same_samples(mine, theirs) for mine, *theirs in pairs):
            # Cut into other micro-batches, perhaps: what counts is the step as a whole.
            pairs = [tuple(merged(part) for part in micros)]
        for mine, *theirs in pairs:
            if self._same_samples(mine, theirs):
                continue
            match = match_rows(self.one, self.many, mine, theirs)
            text = (
                f"the ranks train on {total} samples, one rank on {total_one}"
                if total != total_one
                else f"{len(match.extra)} of {total} samples are not those that one rank sees"
            )
            facts = {"mine": mine, "theirs": theirs, "total": total, "total_one": total_one}
            yield Mismatch("data", step, text, match=match, facts=facts)

    def _same_samples(
        self, mine: dict[str, Any] | None, theirs: Sequence[dict[str, Any] | None]
    ) -> bool:
        # Samples that cannot be told apart by content, such as the nodes of several graphs, are
        # told by their numbers.
        if mine is not None and any(o and o["layout"] != mine["layout"] for o in theirs):
            numbers = [index for other in theirs if other is not None for index in other["indices"]]
            if numbers and sorted(numbers) == sorted(mine["indices"]):
                return True
        # A whole batch on every rank is wasteful, but gives the same result.
        return match_rows(self.one, self.many, mine, theirs).same or self._all_whole(mine, theirs)

    @staticmethod
    def _all_whole(mine: dict[str, Any] | None, theirs: Sequence[dict[str, Any] | None]) -> bool:
        return mine is not None and all(
            other is not None and sorted(other["hashes"]) == sorted(mine["hashes"])
            for other in theirs
        )

    def _loss(
        self, step: int, alone: dict[str, Any], ranks: list[dict[str, Any]]
    ) -> Iterator[Mismatch]:
        mine, theirs = step_loss([alone]), step_loss(ranks)
        if differs(mine, theirs, self.limits.loss):
            text = f"the loss is {theirs:.9g}, on one rank {mine:.9g}"
            yield Mismatch("loss", step, text, apart=theirs - mine, micro=self._micro(alone, ranks))

    def _micro(self, alone: dict[str, Any], ranks: list[dict[str, Any]]) -> int:
        """The first micro-batch of the step whose loss differs; else the first."""
        parts = zip_longest(alone["micros"], *(rank["micros"] for rank in ranks))
        for number, (mine, *theirs) in enumerate(parts):
            if mine is None:
                continue
            there = [{"micros": [micro]} for micro in theirs if micro is not None]
            if differs(step_loss([{"micros": [mine]}]), step_loss(there), self.limits.loss):
                return number
        return 0

    def _settings(
        self, step: int, alone: dict[str, Any], ranks: list[dict[str, Any]]
    ) -> Iterator[Mismatch]:
        mine = alone.get("settings")
        for rank, line in enumerate(ranks):
            theirs = line.get("settings")
            if mine is None or theirs is None:
                continue
            pairs: list[tuple[dict[str, Any], dict[str, Any]]]
            pairs = list(zip_longest(mine, theirs, fillvalue={}))
            for group, (a, b) in enumerate(pairs):
                keys = [key for key in {*a, *b} if _setting_differs(a.get(key), b.get(key))]
                if not keys:
                    continue
                # One schedule may set several; the rate says most. Another optimizer has others.
                keys.sort(key=lambda key: (key != "lr", key))
                keys = ["optimizer"] if "optimizer" in keys else keys
                key = keys[0]
                name = ", ".join("learning rate" if key == "lr" else key for key in keys)
                text = (
                    f"{name} of parameter group {group} is {_shown(b.get(key))} on rank {rank}, "
                    f"on one rank {_shown(a.get(key))}"
                )
                facts = {"key": key, "one": a.get(key), "many": b.get(key), "rank": rank}
                differ = [r for r, o in enumerate(ranks) if o["settings"] != theirs]
                yield Mismatch("settings", step, text, 0, name, ranks_differ=differ, facts=facts)
                return

    def _grads(
        self, step: int, alone: dict[str, Any], ranks: list[dict[str, Any]]
    ) -> Iterator[Mismatch]:
        if any("grads" not in line for line in (alone, *ranks)):
            return
        if self._no_gradients(alone, ranks):
            return
        among = _among_ranks("grads", step, "grads", ranks, "the gradient of {name} on rank {rank}")
        if among is not None:
            yield among
            return
        apart, name = furthest(*_filled(alone["grads"], ranks[0]["grads"]), FLOOR)
        limit = self.limits.first_grads if step == 1 else self.limits.grads
        if not apart <= limit:
            text = f"the gradient of {name} differs from one rank's by {apart:.1e}"
            yield Mismatch("grads", step, text, 0, name, apart)

    def _moves(self, alone: dict[str, Any], other: dict[str, Any]) -> tuple[float, str]:
        if "moves" not in alone or "moves" not in other or self._no_moves(alone, other):
            return 0.0, "-"
        mine, theirs = self._kept(alone, "moves"), self._kept(other, "moves", alone)
        return furthest(mine, theirs, FLOOR)

    def _move(
        self, step: int, alone: dict[str, Any], ranks: list[dict[str, Any]]
    ) -> Iterator[Mismatch]:
        if "after" not in alone or "after" not in ranks[0]:
            return
        if ("moves" in alone) != ("moves" in ranks[0]):
            yield Mismatch("move", step, "the weights move on one side only")
            return
        apart, name = self._moves(alone, ranks[0])
        if not apart <= self.limits.moves:
            text = f"the update of {name} differs from one rank's by {apart:.1e}"
            yield Mismatch("move", step, text, 0, name, apart)

    def _train_metrics(
        self, step: int, alone: dict[str, Any], ranks: list[dict[str, Any]]
    ) -> Iterator[Mismatch]:
        """Metrics that the loss function returns as sums and weights."""
        mine, theirs = step_metrics([alone]), step_metrics(ranks)
        for key, value in mine.items():
            other = theirs.get(key, math.nan)
            if differs(value, other, max(self.limits.loss, 1e-6)):
                text = (
                    f"the metric {key} of the loss function is {other:.6g}, on one rank {value:.6g}"
                )
                yield Mismatch("train_metrics", step, text, name=key)
                return

    def _asked(self) -> Iterator[Mismatch]:
        """Settings whose effect lies behind the steps that are compared."""
        mine, theirs = self.one.header, self.many[0].header
        if mine["own_batch"] is not None and mine["own_batch"] == theirs["own_batch"]:
            return  # more ranks take larger steps, and may need other settings
        for key in LATE_SETTINGS:
            one, many = mine["asked"][key], theirs["asked"][key]
            if one != many:
                text = f"the script asks for {key}={many} on {len(self.many)} ranks, {one} on one"
                yield Mismatch("asked", 0, text, name=key)
                return

    def _length(self) -> Iterator[Mismatch]:
        counts = [len(rank.steps) for rank in self.many]
        alone = len(self.one.steps)
        if len(set(counts)) > 1:
            text = f"ranks take different numbers of steps: {', '.join(map(str, counts))}"
            text += f" ({self.error})" if self.error else ""
            least = min(counts)
            behind = [rank for rank, count in enumerate(counts) if count == least]
            yield Mismatch("length", least + 1, text, ranks_differ=behind)
        elif counts[0] != alone and not self.error:
            text = f"the ranks take {counts[0]} steps, one rank {alone}"
            yield Mismatch("length", min(counts[0], alone) + 1, text)


def _among_ranks(
    stage: str, step: int, key: str, ranks: Sequence[dict[str, Any]], what: str, when: str = ""
) -> Mismatch | None:
    """The first rank whose tensors are not those of rank 0, where all must be equal to the bit."""
    first = ranks[0][key]
    for rank, other in enumerate(ranks[1:], 1):
        apart, name = furthest(first, other[key], FLOOR)
        if apart:
            differ = [number for number, line in enumerate(ranks) if line[key] != first]
            said = " ".join([what.format(name=name, rank=rank), "is not rank 0's", when]).strip()
            return Mismatch(stage, step, f"{said}: {apart:.1e} apart", 0, name, apart, differ)
    return None


def _filled(one: Sketches | None, other: Sketches | None) -> tuple[Sketches, Sketches]:
    """No gradient and one of zeros are the same here; whether the weight moves is seen later."""
    zeros = {name: [0.0] * len(found) for name, found in {**(one or {}), **(other or {})}.items()}
    return {**zeros, **(one or {})}, {**zeros, **(other or {})}


def step_loss(ranks: Sequence[dict[str, Any]]) -> float:
    """The loss of a step over all ranks and micro-batches."""
    total = weights = 0.0
    for rank in ranks:
        for micro in rank["micros"]:
            weight = micro["count"] if micro["weight"] is None else micro["weight"]
            if weight:
                total += weight * micro["loss"]
                weights += weight
    return total / weights if weights else 0.0


def step_metrics(ranks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What the loss function's own metrics come to over all ranks and micro-batches."""
    sums: dict[str, list[float]] = {}
    for rank in ranks:
        for micro in rank["micros"]:
            for name, (total, weight) in micro.get("metrics", {}).items():
                found = sums.setdefault(name, [0.0, 0.0])
                found[0] += total
                found[1] += weight
    return {name: total / weight for name, (total, weight) in sums.items() if weight}


def differs(one: float, other: float, tolerance: float) -> bool:
    """NaN differs from every number, and equals NaN."""
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) != math.isnan(other)
    if math.isinf(one) or math.isinf(other):
        return one != other
    return abs(one - other) > tolerance * max(abs(one), abs(other), 1e-4)


def _setting_differs(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return any(_setting_differs(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        # A rate that follows a metric follows its rounding.
        return abs(one - other) > 1e-6 * max(abs(one), abs(other))
    return bool(one != other)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _metrics(one: RecordedRun, many: RecordedRun) -> tuple[str | None, Mismatch | None]:
    """Compare what validation says, at the end and at the end of each epoch."""
    limit = 1e-6 if one.double and many.double else 1e-2
    shown: str | None = None
    for alone, ranks in zip(one.managers, many.managers, strict=False):
        pairs = list(zip(alone[0].validations, ranks[0].validations, strict=False))
        if alone[0].last and ranks[0].last:
            pairs.append((alone[0].last, ranks[0].last))
            failed = ranks[0].last["metrics_failed"]
            if failed and not alone[0].last["metrics_failed"]:
                return "failed", Mismatch("metrics", many.steps, f"validation fails: {failed}")
        for mine, theirs in pairs:
            if not mine["metrics"] or not theirs["metrics"]:
                continue
            shown = "equal"
            for key, value in mine["metrics"].items():
                other = theirs["metrics"].get(key, math.nan)
                if differs(value, other, limit):
                    text = f"{key} {value:.6g} became {other:.6g}"
                    facts = {"key": key, "one": value, "many": other}
                    step = mine.get("step", one.steps)
                    return text, Mismatch("metrics", step, f"validation {text}", facts=facts)
    return shown, None
