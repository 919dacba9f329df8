"""`mgt verify`: train a few steps on one rank and on several, compare, and name the cause."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from multi_gpu_training.config import TrainingMode
from multi_gpu_training.measure.case import Case, Failure
from multi_gpu_training.measure.script_runner import MeasureError, ScriptRunner

# Float32 rounds at 6e-8; other orders of addition leave well under this after a few steps.
TOLERANCE = 1e-5
# Where float32 differs by rounding alone, float64 agrees to this.
DOUBLE_TOLERANCE = 1e-9
# A gradient that is this small a part of all is zero but for rounding.
ZERO = 1e-6
TIMEOUT_S = 1800.0  # of one training; a script may take minutes to read its data


@dataclass
class RankComparison:
    """How one number of ranks compares with one rank."""

    ranks: int
    worst: float
    worst_name: str
    left_out: list[str]
    same_samples: bool
    metrics: str | None
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.problems


@dataclass
class VerifyReport:
    """`by_hand` is how far one rank is from a plain PyTorch loop. `rounding`: what differs in
    float32 agrees in float64."""

    outcomes: list[RankComparison]
    by_hand: float | None
    problems: list[str]
    notes: list[str]
    rounding: bool = False

    @property
    def passed(self) -> bool:
        agree = self.rounding or all(outcome.passed for outcome in self.outcomes)
        return not self.problems and agree


def verify(
    command: Sequence[str],
    ranks: Sequence[int] = (2, 3),
    steps: int = 8,
    device: str = "auto",
    say: Callable[[str], None] = print,
) -> VerifyReport:
    """Run `command` (a script or `-m module`, with arguments) on 1 and on each of `ranks`."""
    with tempfile.TemporaryDirectory(prefix="mgt-verify-") as folder:
        run = RecordingRunner(list(command), Path(folder), steps, device, max(ranks), say)
        return compare(run, ranks)


def compare(run: Callable[..., RecordedRun], ranks: Sequence[int]) -> VerifyReport:
    """Hold `ranks` against one rank; `run(ranks, **changes)` gives a recorded training."""
    one = run(1)
    notes: list[str] = []
    by_hand, by_hand_problems = _by_hand(one)
    problems = _coverage(one)
    outcomes = [_outcome(one, run(n)) for n in ranks]
    failed = next((o for o in outcomes if o.problems), None)
    # A plain loop adds in another order too: its float32 says as little as that of other ranks.
    differs = failed is not None or bool(by_hand_problems)
    if differs and not problems and _only_rounding(run, ranks, notes):
        return VerifyReport(outcomes, by_hand, problems, notes, rounding=True)
    if failed is not None:
        failed.problems += _causes(run, one, failed.ranks)
    return VerifyReport(outcomes, by_hand, by_hand_problems + problems, notes)


def _by_hand(one: RecordedRun, tolerance: float = TOLERANCE) -> tuple[float | None, list[str]]:
    """How far one rank is from a plain PyTorch loop, and what is wrong with that."""
    if one.by_hand is None:
        return None, []
    apart, name, _ = _distance(one.weights, one.by_hand, one.largest, tolerance)
    if apart <= tolerance:
        return apart, []
    return apart, [
        f"one rank does not compute what a plain PyTorch loop computes on the same batches: {name} "
        f"differs by {apart:.1e}"
    ]


@dataclass
class RecordedRun:
    """What the ranks of one short training wrote down."""

    ranks: int
    weights: dict[str, Tensor]
    by_hand: dict[str, Tensor] | None
    records: list[dict[str, Any]]

    @property
    def facts(self) -> dict[str, Any]:
        return self.records[0]

    @property
    def largest(self) -> dict[str, float]:
        found: dict[str, float] = self.records[0]["largest"]
        return found

    def order(self) -> list[tuple[int, int, list[int]]]:
        """The samples of every step, in order, over all ranks."""
        steps: dict[tuple[int, int], list[int]] = {}
        parts = [list(record["seen"]) for record in self.records]
        for micro in zip(*parts, strict=True):
            for share in micro:
                key = (share["epoch"], share["position"])
                steps.setdefault(key, []).extend(share["indices"])
        return [(epoch, position, found) for (epoch, position), found in sorted(steps.items())]


class RecordingRunner:
    """Trains `command` for a few steps on any number of ranks, and reads what was recorded."""

    def __init__(
        self,
        command: list[str],
        folder: Path,
        steps: int,
        device: str,
        most_ranks: int,
        say: Callable[[str], None],
    ) -> None:
        self.runner = ScriptRunner(
            command,
            folder,
            steps,
            device=device,
            timeout_s=TIMEOUT_S,
            ranks_at_hand=most_ranks,
            timeout_flag="",
        )
        self.say = say

    def __call__(
        self, ranks: int, sync_bn: bool | None = None, noise: int = 0, double: bool = False
    ) -> RecordedRun:
        changed = {"sync_bn": sync_bn, "noise": noise, "double": double}
        what = ", ".join(f"{key}={value}" for key, value in changed.items() if value)
        several = f"{ranks} rank{'s' if ranks > 1 else ''}"
        self.say(
            f"training {self.runner.steps} steps on {several}" + (f" ({what})" if what else "")
        )
        found = self.runner(
            Case(
                several,
                TrainingMode.SINGLE if ranks == 1 else TrainingMode.DISTRIBUTED_DATA_PARALLEL,
                ranks,
                {} if sync_bn is None else {"sync_bn": sync_bn},
                kind="recorder",
                noise=noise,
                double=double,
            )
        )
        if not found.ok:
            early = found.failure in (Failure.NO_MANAGER, Failure.TOO_SHORT)
            why = (
                "it must use MultiGPUTrainingManager and take at least that many steps (--steps)"
                if early
                else found.error
            )
            raise MeasureError(
                f"the training on {several} ended before {self.runner.steps} steps were done: {why}"
            )
        by_hand = self.runner.out / "by_hand.safetensors"
        return RecordedRun(
            ranks,
            load_file(self.runner.out / "weights.safetensors"),
            load_file(by_hand) if by_hand.exists() else None,
            [dict(record) for record in found.records],
        )


def _distance(
    ours: dict[str, Tensor],
    reference: dict[str, Tensor],
    largest: dict[str, float],
    tolerance: float = TOLERANCE,
) -> tuple[float, str, list[str]]:
    """Largest ||a-b|| / ||a|| over the tensors, and those left out for a zero gradient."""
    worst, worst_name = 0.0, "-"
    left_out = []
    for name, value in reference.items():
        apart = float((ours[name].double() - value.double()).norm())
        apart /= max(float(value.double().norm()), 1e-30)
        if apart > tolerance and largest.get(name, 1.0) < ZERO:
            left_out.append(name)
        elif not apart <= worst:  # also where it is NaN
            worst, worst_name = apart, name
    return worst, worst_name, left_out


def _outcome(one: RecordedRun, many: RecordedRun, tolerance: float = TOLERANCE) -> RankComparison:
    worst, name, left_out = _distance(many.weights, one.weights, one.largest, tolerance)
    problems = []
    if not worst <= tolerance:
        problems.append(f"{name} differs by {worst:.1e}, more than {tolerance:.0e}")
    same = one.order() == many.order()
    if not same:
        problems.append("a step does not see the samples that one rank sees, in the same order")
    mine, theirs = one.facts["metrics"], many.facts["metrics"]
    metrics = None
    if mine is not None:
        metrics = "equal"
        for key, value in mine.items():
            if abs(theirs[key] - value) > 1e-5 * max(abs(value), 1e-6):
                metrics = f"{key} {value:.6g} became {theirs[key]:.6g}"
                problems.append(f"validation {metrics}")
    return RankComparison(many.ranks, worst, name, left_out, same, metrics, problems)


def _only_rounding(
    run: Callable[..., RecordedRun], ranks: Sequence[int], notes: list[str], **changes: Any
) -> bool:
    """Whether the same trainings agree in float64. Optimizers like Adam make a full step of a
    gradient that is nothing but rounding, so that float32 alone cannot tell."""
    try:
        one = run(1, double=True, **changes)
        runs = [run(n, double=True, **changes) for n in ranks]
        outcomes = [_outcome(one, many, DOUBLE_TOLERANCE) for many in runs]
    except MeasureError:
        return False  # the script does not run in float64
    if _by_hand(one, DOUBLE_TOLERANCE)[1] or not all(outcome.passed for outcome in outcomes):
        return False
    worst = max(outcome.worst for outcome in outcomes)
    notes.append(
        f"float32 differs by rounding only, made larger by the optimizer: the same trainings in "
        f"float64 agree to {worst:.1e}"
    )
    return True


def _coverage(one: RecordedRun) -> list[str]:
    """Each sample once in every epoch that was finished."""
    samples, steps = one.facts.get("samples"), one.facts.get("steps_per_epoch")
    if samples is None or steps is None:
        return []
    first = [i for epoch, _, found in one.order() if epoch == 0 for i in found]
    done = sum(1 for epoch, _, _ in one.order() if epoch == 0)
    if done < steps or sorted(first) == list(range(samples)):
        return []
    twice = len(first) - len(set(first))
    never = samples - len(set(first))
    return [f"of {samples} samples {never} were never seen and {twice} seen twice in an epoch"]


def _causes(run: Callable[..., RecordedRun], one: RecordedRun, ranks: int) -> list[str]:
    """Why the result differs, found by changing one thing at a time."""
    causes = []
    facts = one.facts
    if facts["batchnorm"] and not facts["sync_bn"]:
        synced = _outcome(run(1, sync_bn=True), run(ranks, sync_bn=True))
        if synced.passed or _only_rounding(run, [ranks], [], sync_bn=True):
            return [
                f"cause: BatchNorm ({', '.join(facts['batchnorm'][:3])}) normalises each rank's "
                "part alone; set sync_bn=true (with it the results agree)"
            ]
        causes.append(
            f"cause (one of several): BatchNorm ({', '.join(facts['batchnorm'][:3])}) is not "
            "synchronised; set sync_bn=true"
        )
    if facts["loss_depends_on_batch"]:
        causes.append(
            "cause: the loss is not weighted: a batch's loss is not the mean over its samples. "
            "For means over tokens or class weights let loss_fn return (mean_loss, weight); a "
            "loss over pairs in the batch does depend on how the batch is split"
        )
    if _distance(run(1).weights, one.weights, one.largest)[0] > TOLERANCE:
        causes.append(
            "cause: one rank alone gives another result when it is run again: kernels without a "
            "deterministic variant, or code that depends on time or on unseeded randomness"
        )
    elif _distance(run(1, noise=1).weights, one.weights, one.largest)[0] > TOLERANCE:
        causes.append(
            "cause: the model or the loss draws random numbers while training; these differ "
            "between ranks, so results agree only on average"
        )
    if not causes:
        causes.append(
            "cause not found by verify: look for code that depends on the rank, statistics over "
            "the batch kept inside the model, or weights changed outside the trainer"
        )
    return causes
