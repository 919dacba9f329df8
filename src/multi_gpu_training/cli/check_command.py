"""`mgt check`: is this machine, or every machine of a job, ready to train."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from multi_gpu_training.cli.measured_script import (
    command_of,
    file_problems,
    place_problems,
    rank_problems,
)
from multi_gpu_training.config import MultiGPUConfig, is_url
from multi_gpu_training.errors import ConfigError

if TYPE_CHECKING:
    from multi_gpu_training.planning.check.check_report import CheckReport, Finding, Printer
    from multi_gpu_training.planning.check.checkup import Checkup


CHECK_JOB = "15:00"  # minutes that the job of `mgt check --engine slurm` may take


@dataclass(frozen=True)
class CheckFlags:
    """What the command line said; `command` is a recipe, config or script with its words."""

    command: list[str]
    device: str
    num_gpus: int
    save_dir: str
    timeout: float
    as_json: bool
    save_curve: str | None
    hosts: Mapping[str, Any]


def check(flags: CheckFlags) -> int:
    """0 if nothing fails, else 1."""
    _validate(flags)
    if flags.hosts.get("engine") == "slurm":
        return _check_slurm(flags)
    if flags.hosts.get("engine") is not None:
        raise ConfigError(
            f"mgt check --engine {flags.hosts['engine']}: only slurm can be checked from "
            "elsewhere; start `mgt check` on each machine, or with torchrun"
        )
    from multi_gpu_training.planning.check.check_report import CheckReport, Printer
    from multi_gpu_training.planning.check.checkup import Checkup
    from multi_gpu_training.planning.check.registry import CheckOptions

    printer = Printer(Console(highlight=False))
    report = CheckReport()
    kept = MultiGPUConfig(save_dir=flags.save_dir)
    url = kept.save_dir if is_url(kept.save_dir) else None
    folder = kept.local_save_dir if url else Path(flags.save_dir)
    options = CheckOptions(flags.device, flags.num_gpus, folder, flags.timeout, flags.hosts, url)
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
    except BaseException:  # Ctrl-C too: no rank is left waiting for this one
        checkup.abort()
        raise


def _check_slurm(flags: CheckFlags) -> int:
    """Check the queue from here, then every node in a short job, which runs `mgt check` there."""
    from multi_gpu_training.cli.slurm_options import rank_command
    from multi_gpu_training.launch.engine import Hosts, LaunchPlan, RankJob
    from multi_gpu_training.launch.launcher import supervise
    from multi_gpu_training.launch.slurm.slurm_engine import batch_job
    from multi_gpu_training.planning.check.check_report import CheckReport, Printer
    from multi_gpu_training.planning.check.slurm_queue import check_queue

    hosts = Hosts.from_environment(**flags.hosts)
    plan = LaunchPlan(max(0, flags.num_gpus), hosts, max_restarts=0)
    job = RankJob(tuple(rank_command()))
    printer, report = Printer(Console(highlight=False)), CheckReport()
    if not flags.as_json:
        report.heard = printer.show
    report.add(check_queue(batch_job(plan, job)))
    if flags.as_json or report.exit_code or hosts.engine_options.get("dry_run"):
        _show(flags, report, printer)
        return report.exit_code
    printer.note("Slurm", "now a job looks at the nodes")
    short = {**hosts.engine_options, "time": CHECK_JOB, "max_requeues": 0}
    return supervise(job.command, replace(plan, hosts=replace(hosts, engine_options=short)))


def _fit(flags: CheckFlags, checkup: Checkup, printer: Printer) -> Callable[[], None] | None:
    """Measure the recipe or script; what then prints its tables, or nothing to print."""
    from multi_gpu_training.planning.check import recommendation, training_fit

    def say(text: str) -> None:
        if not flags.as_json:
            printer.note(training_fit.GROUP.name, text)

    try:
        found = checkup.fit(command_of(flags.command, "check"), say)
    except OSError as error:
        text = f"it cannot be tried: {error.strerror} ({error.filename})"
        remedy = "make room there, or set TMPDIR to a folder with room"
        checkup.report.add([training_fit.GROUP.fail("training", text, remedy)])
        return None
    if found is None:
        return None
    workers = checkup.workers(found.chosen.ranks)
    chosen = recommendation.recommend(found, flags.command, workers, checkup.context.ranks_here)
    checkup.report.advice = recommendation.plain(found, chosen)
    return lambda: recommendation.show(printer, found, chosen)


def _curve(flags: CheckFlags, checkup: Checkup) -> list[Finding]:
    """The measured all-reduce times as a file, where it was asked for."""
    from multi_gpu_training.planning.check.rank_trial import GROUP, save_curve

    if flags.save_curve is None:
        return []
    path = Path(flags.save_curve)
    if checkup.team is None or not checkup.report.curve or checkup.team.ranks == 1:
        text = f"{path} is not written: none was measured"
        return [GROUP.fail("curve", text, "fix the lines above, then run it again")]
    try:
        save_curve(path, checkup.report.curve, checkup.team, checkup.hardware)
    except OSError as error:
        text = f"{path} cannot be written: {error.strerror}"
        return [GROUP.fail("curve", text, "choose another --save-curve")]
    return [GROUP.passed("curve", f"{path}: for `mgt estimate --curve`")]


def _show(flags: CheckFlags, report: CheckReport, printer: Printer) -> None:
    if flags.as_json:
        print(json.dumps(report.plain(), indent=1), flush=True)
        return
    if not printer.begun:  # this process was to be silent, and rank 0 did not hear it
        for finding in report.findings:
            printer.show(finding)
    printer.summary(report)


def _validate(flags: CheckFlags) -> None:
    if flags.command and command_of(flags.command, "check")[0] == "-m":
        from multi_gpu_training.cli.train_command import TrainFlags, resolve

        # A recipe or config that is not there, or words that it does not know: say so now.
        resolve(TrainFlags(flags.command[0], None, {}, {}, flags.command[1:]))
    problems = place_problems(flags.device, flags.timeout)
    if flags.num_gpus == 0 or flags.num_gpus < -1:
        problems.append(f"--num-gpus {flags.num_gpus}: use -1 for all, or a positive number")
    problems += rank_problems("--num-gpus", flags.num_gpus, flags.device)
    problems += file_problems("--save-curve", flags.save_curve)
    if problems:
        raise ConfigError(problems)
