"""Whether Slurm would take a job, seen from the machine that submits it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from multi_gpu_training.errors import ConfigError, LaunchError
from multi_gpu_training.launch.slurm.batch_script import BatchJob, seconds_of
from multi_gpu_training.launch.slurm.slurm_commands import (
    SlurmRefused,
    call,
    explain_refusal,
    missing_command,
)
from multi_gpu_training.planning.check.check_report import Finding, Group

SLURM = Group("Slurm")
_USABLE = ("idle", "mix", "alloc", "comp", "resv", "plnd")
_CORES = ("cpus-per-task", "cpus-per-gpu", "exclusive", "mincpus", "cores-per-socket")


def check_queue(job: BatchJob) -> Iterator[Finding]:
    """What stands between this job and its start; the first failure is the last finding."""
    missing = missing_command()
    if missing is not None:
        remedy = "run it on a login node of the cluster"
        yield SLURM.fail("commands", f"{missing} is not on this machine", remedy)
        return
    try:
        yield SLURM.passed("commands", call("sbatch", "--version").strip())
        said = " ".join(call("scontrol", "ping").split())
        yield SLURM.passed("controller", said)
        yield from _partition(job)
        yield _cores(job)
        yield SLURM.passed("job", f"Slurm would take it: {_tested(job)}")
    except SlurmRefused as error:
        text = explain_refusal(error.said) if error.said else str(error)
        problem, _, remedy = text.partition("); ")
        yield SLURM.fail("job", f"{problem})" if remedy else problem, remedy)
    except LaunchError as error:
        yield SLURM.fail("controller", str(error), "see whether `scontrol ping` reaches it")


def _partition(job: BatchJob) -> Iterator[Finding]:
    topic = SLURM.about("partition")
    for component in job.components:
        where = ("-p", component.partition) if component.partition else ()
        rows = [
            line.split("|") for line in call("sinfo", "-h", *where, "-o", "%P|%a|%l").splitlines()
        ]
        # Without --partition it is the default one, which sinfo marks.
        chosen = [row for row in rows if component.partition or row[0].endswith("*")]
        if not chosen:
            name = component.partition or "the default one"
            known = ", ".join(call("sinfo", "-h", "-o", "%R").split())
            yield topic.fail(f"{name} does not exist", f"use --partition with one of {known}")
            continue
        name, state, limit = chosen[0]
        name = name.rstrip("*")
        if state != "up":
            yield topic.fail(f"{name} is {state}", "choose another --partition, or wait")
            continue
        asked = seconds_of(job.limit) if job.limit is not None else None
        most = _limit(limit)
        if asked is not None and most is not None and asked > most:
            yield topic.fail(f"{name} ends jobs after {limit}", f"ask for --time {limit} or less")
            continue
        lines = call("sinfo", "-h", "-N", "-p", name, "-o", "%N|%t").split()
        nodes = dict(line.split("|") for line in lines)
        usable = [node for node, state in nodes.items() if state.rstrip("*~#!%$@^-") in _USABLE]
        away = sorted(node for node, state in nodes.items() if node not in usable or "*" in state)
        needed = int(re.split("[-:]", component.nodes)[0])
        text = f"{name}: {len(usable)} of {len(nodes)} nodes are usable, {needed} needed"
        if len(usable) < needed:
            yield topic.fail(text, f"ask for fewer --nodes, or wait for {', '.join(away)}")
        elif away:
            yield topic.warn(text, f"{', '.join(away)} cannot replace a node that fails")
        else:
            yield topic.passed(f"{text}, limit {limit}")


def _limit(text: str) -> int | None:
    try:
        return seconds_of(text)
    except ConfigError:
        return None


def _cores(job: BatchJob) -> Finding:
    """One task per node holds all its ranks, and Slurm's default is one core per task."""
    topic = SLURM.about("cores")
    for component in job.components:
        asked = [o for o in component.options if o.partition("=")[0] in _CORES]
        if not asked:
            return topic.warn(
                "the job names no number of cores, and each node's task may get one core for all "
                "of its ranks",
                "add --sbatch cpus-per-task=N (cores of each node), or --sbatch exclusive",
            )
    return topic.passed("the job asks for cores")


def _tested(job: BatchJob) -> str:
    said = call("sbatch", "--test-only", text=job.text(), errors_too=True)
    return said.strip().removeprefix("sbatch: ")
