"""`mgt verify`: train a few steps on one rank and on several, compare, and name the cause.

rank_server    keeps processes with torch loaded, which fork the ranks
recorded_run   trains the script under measure/recorder.py and reads what its ranks wrote
mismatch       finds the first place where several ranks do not do what one does
diagnosis      names the cause from that place, training the script again where it must
data_causes    causes in the samples that ranks see
split_batch    causes in losses and gradients, from a batch that one rank computes in parts
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from multi_gpu_training.launch.launcher import available_gpus
from multi_gpu_training.measure.case import Failure
from multi_gpu_training.measure.request import OWN_BACKWARD
from multi_gpu_training.measure.script_runner import HOW, MeasureError
from multi_gpu_training.planning.verify.conclusion import Diagnosis
from multi_gpu_training.planning.verify.diagnosis import diagnose
from multi_gpu_training.planning.verify.mismatch import Mismatch, RankComparison, compare_runs
from multi_gpu_training.planning.verify.rank_server import RankServers
from multi_gpu_training.planning.verify.recorded_run import (
    CANNOT_START,
    Conditions,
    RecordedRun,
    VerifyRunner,
)

# Of the repeat with the script's own settings: enough for its workers and data to show.
OWN_STEPS = 4

Run = Callable[..., RecordedRun]


@dataclass
class VerifyReport:
    """outcomes: one per number of ranks. own: the script with its own batch size, workers and
    data. problems: what differs, and why. not_comparable: why nothing can be said."""

    outcomes: list[RankComparison]
    conditions: Conditions
    own: RankComparison | None = None
    by_hand: float | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    not_comparable: str | None = None

    @property
    def passed(self) -> bool:
        return not self.problems and self.not_comparable is None


def verify(
    command: Sequence[str],
    ranks: Sequence[int] = (2, 3),
    steps: int = 8,
    device: str = "auto",
    say: Callable[[str], None] = print,
    servers: RankServers | None = None,
) -> VerifyReport:
    """Run `command` (a script or `-m module`, with arguments) on 1 and on each of `ranks`.

    servers: those that fork CPU ranks, for several calls; each call starts its own otherwise.
    """
    with ExitStack() as stack:
        if servers is None and (device == "cpu" or not available_gpus()):
            servers = stack.enter_context(RankServers(max(ranks)))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mgt-verify-"))
        run = VerifyRunner(list(command), Path(folder), steps, device, ranks, say, servers)
        return compare(run, ranks)


def compare(run: Run, ranks: Sequence[int]) -> VerifyReport:
    """Hold `ranks` against one rank; `run(ranks, conditions)` gives a recorded training."""
    notes: list[str] = []
    one, conditions = _alone(run, notes)
    report = VerifyReport([], conditions, notes=notes)
    _look_at_one(one, report)
    for number in ranks:
        many = run(number, conditions)
        outcome = compare_runs(one, many)
        report.outcomes.append(outcome)
        if outcome.mismatch is not None:
            # Differences on more ranks have the same cause.
            _explain(run, one, many, outcome.mismatch, conditions, report)
            return report
    if not conditions.as_is:
        _repeat_as_it_is(run, min(ranks), report)
    return report


def _alone(run: Run, notes: list[str]) -> tuple[RecordedRun, Conditions]:
    """Train on one rank: in float64 where the script runs in it, else as far as it can."""
    tried = (Conditions(), Conditions(double=False), Conditions(double=False, as_is=True))
    first: RecordedRun | None = None
    for conditions in tried:
        one = run(1, conditions)
        first = first or one
        if one.failure in (None, Failure.TOO_SHORT) and one.steps:
            if conditions != tried[0]:
                notes.append(
                    f"compared in {conditions.describe()}, where rounding hides small differences: "
                    f"the script does not run otherwise ({first.error})"
                )
            return one, conditions
        if not one.settings or one.failure is Failure.TIMEOUT or OWN_BACKWARD in one.error:
            break  # what fails before there is a manager fails under any conditions
    assert first is not None
    if first.failure is Failure.NO_MANAGER:
        raise MeasureError(
            "the script ended without a MultiGPUTrainingManager, so no training could be compared; "
            f"{HOW}. A training that a function or `if __name__ == '__main__'` holds must be called"
        )
    why = first.error
    if first.failure is Failure.TOO_SHORT:
        why = (
            "the script sets up a training, but no step goes through the trainer. If it trains, "
            "its model is called past the wrapper, with its own backward and optimizer: "
            "ranks would not exchange gradients. Use fit, train_epoch or trainer.train_step"
        )
    if why.startswith(CANNOT_START):
        error = MeasureError(why)
        error.exit_code = 2
        raise error
    raise MeasureError(f"the training on 1 rank ended before its first step was done: {why}")


def _look_at_one(one: RecordedRun, report: VerifyReport) -> None:
    """What one rank alone can tell: plain PyTorch, and each sample once an epoch."""
    record = one.first
    by_hand = (record.last or {}).get("by_hand") or {}
    if "skipped" in by_hand:
        report.notes.append(f"not compared with a plain PyTorch loop: {by_hand['skipped']}")
    elif by_hand:
        report.by_hand = by_hand["apart"]
        if not by_hand.get("passed", True):
            report.problems.append(
                "one rank does not compute what a plain PyTorch loop computes on the same batches: "
                f"the update of {by_hand['name']} differs by {by_hand['apart']:.1e}"
            )
    if one.failure is Failure.TOO_SHORT:
        report.notes.append(f"the script ended after {one.steps} steps; these were compared")
    last = one.managers[-1][0].header
    if one.failure is None and int(last["number"]) + 1 < last["managers_in_script"]:
        report.notes.append(
            f"the script was ended after {one.steps} steps; should it train again later, that was "
            "not compared"
        )
    dropout = record.header["dropout"]
    if dropout:
        report.notes.append(
            f"dropout was off ({', '.join(dropout[:3])}): its noise depends on the rank"
        )
    samples, steps = record.header["samples"], record.header["steps_per_epoch"]
    first = [m for step in record.steps for m in step["micros"] if m["epoch"] == 0 and m["window"]]
    if samples is None or steps is None or len({m["position"] for m in first}) < steps:
        return
    indices = [index for micro in first for index in micro["indices"]]
    if sorted(indices) != list(range(samples)):
        twice = len(indices) - len(set(indices))
        never = samples - len(set(indices))
        report.notes.append(
            f"of {samples} samples {never} were never seen and {twice} seen twice in an epoch"
        )


def _explain(
    run: Run,
    one: RecordedRun,
    many: RecordedRun,
    found: Mismatch,
    conditions: Conditions,
    report: VerifyReport,
) -> None:
    """Add the finding first, then its cause: a diagnosis that fails must not hide it."""
    where = f"step {found.step}: " if found.step else ""
    finding = f"{many.ranks} ranks: {where}{found.text}"
    try:
        cause = diagnose(run, one, many, found, conditions)
    except Exception as error:
        cause = Diagnosis([f"not found: the diagnosis itself failed ({error!r})"])
    if cause.not_comparable is not None:
        report.notes.append(finding)
        report.notes += [f"cause: {text}" for text in cause.causes]
        report.not_comparable = cause.not_comparable
        return
    report.problems.append(finding)
    report.problems += [f"cause: {text}" for text in cause.causes]


def _repeat_as_it_is(run: Run, ranks: int, report: VerifyReport) -> None:
    """Once more with the script's own batch size, workers and dataset."""
    own = Conditions(double=report.conditions.double, as_is=True)
    one = run(1, own, steps=OWN_STEPS)
    if one.failure not in (None, Failure.TOO_SHORT) or not one.steps:
        report.notes.append(f"with its own batch size, workers and data it fails: {one.error}")
        return
    many = run(ranks, own, steps=OWN_STEPS)
    report.own = compare_runs(one, many)
    found = report.own.mismatch
    if found is None:
        return
    number = found.manager
    alone = one.managers[number][0].header
    rank = many.managers[number][0].header if many.managers else alone
    if alone["batchnorm"] and alone["accumulation"] != rank["accumulation"]:
        report.problems += [
            f"{ranks} ranks, with its own batch size: step {found.step}: {found.text}",
            "cause: BatchNorm normalises one micro-batch at a time, and with the script's own "
            f"batch size a step has {alone['accumulation']} of them on one rank and "
            f"{rank['accumulation']} on {ranks}. Set gradient_accumulation_steps, and no "
            "batch_size beside global_batch_size",
        ]
        return
    _explain(run, one, many, found, own, report)
