"""`mgt check`: is this machine, or every machine of a job, ready to train."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console

from multi_gpu_training.cli.measured_script import (
    command_of,
    file_problems,
    place_problems,
    rank_problems,
)
from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.distributed.identity import from_environment
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.run_places import is_url

if TYPE_CHECKING:
    from multi_gpu_training.launch.engine import LaunchPlan, RankJob
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
    engine = flags.hosts.get("engine")
    if engine in ("slurm", "ray", "kubernetes"):
        return _check_cluster(flags)
    if engine == "torchrun" and from_environment() is None:
        _become_torchrun(flags)
    if engine is not None:
        _validate_engine(engine, flags)
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


def _validate_engine(engine: str, flags: CheckFlags) -> None:
    """For engines that start ranks where the command is typed, the check itself is the test."""
    from multi_gpu_training.launch.engine import Hosts, choose_engine

    hosts = Hosts.from_environment(**flags.hosts)
    choose_engine(hosts)  # is there one of that name, and are the flags its own
    if engine == "elastic" and hosts.nodes < 2:
        raise ConfigError(
            "mgt check --engine elastic needs --nnodes N, --node-rank and --master-addr, and to be "
            "started on every machine: the ranks of all of them meet"
        )
    if engine == "local" and hosts.nodes > 1:
        raise ConfigError(f"--engine local is for one machine, not for --nnodes {hosts.nodes}")


def _become_torchrun(flags: CheckFlags) -> NoReturn:
    """Start `mgt check` under torchrun, as a training would be."""
    from multi_gpu_training.cli.engine_options import rank_command
    from multi_gpu_training.launch.engine import Hosts
    from multi_gpu_training.launch.launcher import ranks_for

    hosts = Hosts.from_environment(**flags.hosts)
    count = ranks_for(flags.num_gpus, device=flags.device)
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    if hosts.nodes > 1:
        words += ["--nnodes", str(hosts.nodes), "--node-rank", str(hosts.node_rank)]
        words += ["--master-addr", str(hosts.master_addr)]
        words += ["--master-port", str(hosts.master_port or 29500)]
    else:
        words += ["--standalone"]
    sys.stdout.flush()
    os.execv(sys.executable, [*words, *rank_command()])


def _check_cluster(flags: CheckFlags) -> int:
    """Check the scheduler from here, then its nodes: ranks on them run `mgt check`."""
    from multi_gpu_training.cli.engine_options import rank_command
    from multi_gpu_training.launch.engine import Hosts, LaunchPlan, RankJob
    from multi_gpu_training.launch.launcher import ranks_per_node, supervise
    from multi_gpu_training.planning.check.check_report import CheckReport, Printer

    hosts = Hosts.from_environment(**flags.hosts)
    plan = LaunchPlan(ranks_per_node(flags.num_gpus), hosts, max_restarts=0)
    job = RankJob(tuple(rank_command()))
    printer, report = Printer(Console(highlight=False)), CheckReport()
    if not flags.as_json:
        report.heard = printer.show
    report.add(_scheduler(plan, job))
    dry = hosts.engine_options.get("dry_run") or hosts.engine == "kubernetes"
    if flags.as_json or report.exit_code or dry:
        _show(flags, report, printer)
        return report.exit_code
    if hosts.engine == "slurm":
        printer.note("Slurm", "now a job looks at the nodes")
        short = {**hosts.engine_options, "time": CHECK_JOB, "max_requeues": 0}
        plan = replace(plan, hosts=replace(hosts, engine_options=short))
    else:
        printer.note("Ray", "now ranks look at the nodes")
    return supervise(job.command, plan)


def _scheduler(plan: LaunchPlan, job: RankJob) -> Iterator[Finding]:
    """What the cluster says before anything is started there."""
    if plan.hosts.engine == "slurm":
        from multi_gpu_training.launch.slurm.slurm_engine import batch_job
        from multi_gpu_training.planning.check.slurm_queue import check_queue

        return check_queue(batch_job(plan, job))
    if plan.hosts.engine == "ray":
        from multi_gpu_training.planning.check.ray_room import check_ray

        return check_ray(plan)
    from multi_gpu_training.launch.kubernetes.kubernetes_engine import kubernetes_job
    from multi_gpu_training.planning.check.kubernetes_api import check_kubernetes

    return check_kubernetes(kubernetes_job(plan, job))


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
