"""`mgt check`: is this machine, or every machine of a job, ready to train."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from multi_gpu_training.cli.measured_script import command_of
from multi_gpu_training.errors import ConfigError

if TYPE_CHECKING:
    from multi_gpu_training.planning.check.check_report import CheckReport, Finding, Printer
    from multi_gpu_training.planning.check.checkup import Checkup


@dataclass(frozen=True)
class CheckFlags:
    """What the command line said; `command` is a recipe, config or script with its words."""

    command: list[str]
    device: str = "auto"
    num_gpus: int = -1
    save_dir: str = "runs"
    timeout_s: float = 60.0
    as_json: bool = False
    curve: str | None = None
    hosts: Mapping[str, Any] = field(default_factory=dict)


def check(flags: CheckFlags) -> int:
    """0 if nothing fails, else 1."""
    _validate(flags)
    from multi_gpu_training.planning.check.check_report import CheckReport, Printer
    from multi_gpu_training.planning.check.checkup import Checkup
    from multi_gpu_training.planning.check.registry import CheckOptions

    printer = Printer(Console(highlight=False))
    report = CheckReport()
    options = CheckOptions(
        flags.device, flags.num_gpus, Path(flags.save_dir), flags.timeout_s, flags.hosts
    )
    checkup = Checkup(options, report, os.environ)
    if checkup.main and not flags.as_json:
        report.heard = printer.show
    try:
        checkup.run()
        if checkup.main:
            report.add(_curve(flags, checkup))
        tables = _fit(flags, checkup, printer) if flags.command and checkup.main else None
        if checkup.speaks:
            _show(flags, report, printer)
        if tables is not None and not flags.as_json:
            tables()
        return checkup.finish()
    except BaseException:
        checkup.abort()
        raise


def _fit(flags: CheckFlags, checkup: Checkup, printer: Printer) -> Callable[[], None] | None:
    """Measure the recipe or script; what then prints its tables, or nothing to print."""
    from multi_gpu_training.planning.check import recommendation, training_fit

    try:

        def say(text: str) -> None:
            if not flags.as_json:
                printer.note(training_fit.GROUP.name, text)

        found = checkup.fit(command_of(flags.command, "check"), say)
    except OSError as error:
        where = f"{error.strerror} ({error.filename})"
        remedy = "make room there, or set TMPDIR to a folder with room"
        checkup.report.add(
            [training_fit.GROUP.fail("training", f"it cannot be tried: {where}", remedy)]
        )
        return None
    if found is None:
        return None
    workers = checkup.workers(found.chosen.ranks)
    chosen = recommendation.recommend(found, flags.command, workers, checkup.ranks_here)
    checkup.report.advice = recommendation.plain(found, chosen)
    return lambda: recommendation.show(printer, found, chosen)


def _curve(flags: CheckFlags, checkup: Checkup) -> list[Finding]:
    """The measured all-reduce times as a file, where it was asked for."""
    from multi_gpu_training.planning.check import rank_trial

    if flags.curve is None:
        return []
    path = Path(flags.curve)
    remedy = "fix the lines above, then run it again"
    if checkup.team is None or not checkup.report.curve or checkup.team.ranks == 1:
        return [rank_trial.GROUP.fail("curve", f"{path} is not written: none was measured", remedy)]
    try:
        rank_trial.save_curve(path, checkup.report.curve, checkup.team, checkup.hardware)
    except OSError as error:
        text = f"{path} cannot be written: {error.strerror}"
        return [rank_trial.GROUP.fail("curve", text, "choose another --save-curve")]
    return [rank_trial.GROUP.passed("curve", f"{path}: for `mgt estimate --curve`")]


def _show(flags: CheckFlags, report: CheckReport, printer: Printer) -> None:
    if flags.as_json:
        print(json.dumps(report.plain(), indent=1), flush=True)
        return
    if not printer.begun:
        for finding in report.findings:
            printer.show(finding)
    printer.summary(report)


def _validate(flags: CheckFlags) -> None:
    problems = []
    if flags.command:
        _look_at(flags.command)
    if flags.timeout_s <= 0:
        problems.append(f"--timeout {flags.timeout_s:g}: give seconds, more than 0")
    if flags.device not in ("auto", "cpu", "cuda"):
        problems.append(f"--device {flags.device}: use auto, cpu or cuda")
    if flags.num_gpus == 0 or flags.num_gpus < -1:
        problems.append(f"--num-gpus {flags.num_gpus}: use -1 for all, or a positive number")
    if problems:
        raise ConfigError(problems)


def _look_at(command: list[str]) -> None:
    """A recipe, config or script that is not there, or words that it does not know: say so now."""
    from multi_gpu_training.cli.train_command import TrainFlags, resolve

    if command_of(command, "check")[0] == "-m":
        resolve(TrainFlags(command[0], None, {}, {}, command[1:]))
