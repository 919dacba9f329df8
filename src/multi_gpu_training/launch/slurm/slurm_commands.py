"""Slurm's own commands, called and read: sbatch, scontrol, squeue, scancel.

`scontrol` alone says how a job stands. sacct would know more, but many clusters have no
accounting, and it lags behind.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from multi_gpu_training.distributed.identity import slurm_key
from multi_gpu_training.errors import ConfigError, LaunchError
from multi_gpu_training.safe_output import printable

PATIENCE_S = 60.0
# How a job ends, and the exit code that stands for it where it has none of its own.
ENDED = {
    "COMPLETED": 0,
    "FAILED": 1,
    "CANCELLED": 143,
    "PREEMPTED": 143,
    "TIMEOUT": 143,
    "DEADLINE": 143,
    "NODE_FAIL": 1,
    "BOOT_FAIL": 1,
    "OUT_OF_MEMORY": 137,
}


class SlurmRefused(LaunchError):
    """A command of Slurm failed; `said` is its message."""

    code = "MGT505"

    def __init__(self, text: str, said: str) -> None:
        super().__init__(text)
        self.said = said


@dataclass(frozen=True)
class JobStatus:
    """A job as `scontrol show job` describes it."""

    state: str
    reason: str = ""
    restarts: int = 0
    exit_status: int = 0
    exit_signal: int = 0
    nodes: str = ""
    name: str = ""
    start: str = ""
    excluded: str = ""
    task: str = ""  # of an array; one that waits may stand for several, such as 0-3

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def exit_code(self) -> int:
        if self.state == "FAILED" and (self.exit_status or self.exit_signal):
            return self.exit_status or 128 + self.exit_signal
        return ENDED.get(self.state, 1)


def missing_command() -> str | None:
    """Which of the commands is not on this machine; None if all are."""
    names = ("sbatch", "scontrol", "scancel", "sinfo")
    return next((name for name in names if shutil.which(name) is None), None)


def require_slurm(what: str) -> None:
    name = missing_command()
    if name is not None:
        raise ConfigError(
            f"{what} needs Slurm, and {name} is not on this machine; run it on a login node of the "
            "cluster, or add --dry-run to see the job's script",
            code="MGT505",
        )


def call(*command: str, text: str | None = None, errors_too: bool = False) -> str:
    """What a command of Slurm printed. SlurmRefused: it failed.

    `text` is its standard input. Some write what they found to standard error: `errors_too`.
    """
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    except FileNotFoundError:
        require_slurm(command[0])
        raise
    except subprocess.TimeoutExpired:
        raise SlurmRefused(
            f"{command[0]} did not answer within {PATIENCE_S:g} s; see whether `scontrol ping` "
            "reaches the controller",
            "",
        ) from None
    if done.returncode:
        said = printable(" ".join((done.stderr or done.stdout).split()))
        if "unable to contact" in said.lower():
            raise SlurmRefused(
                "Slurm's controller (slurmctld) does not answer. See whether `scontrol ping` "
                "reaches it; SLURM_CONF may name another cluster, or it is down: try again later",
                said,
            )
        raise SlurmRefused(f"{command[0]} failed: {said[:500] or done.returncode}", said)
    return done.stdout + (done.stderr if errors_too else "")


def submit(script: str) -> str:
    """Submit a batch script; the id of its job."""
    try:
        out = call("sbatch", "--parsable", text=script)
    except SlurmRefused as error:
        raise ConfigError(explain_refusal(error.said or str(error)), code="MGT505") from None
    number = out.strip().splitlines()[-1].partition(";")[0] if out.strip() else ""
    if not number.isdecimal():
        raise LaunchError(
            f"sbatch answered {printable(out)[:200]!r} instead of a job id", code="MGT505"
        )
    return number


def explain_refusal(said: str) -> str:
    """Why sbatch refused a job, and what to do."""
    said = re.sub(r"(sbatch: )?(error: )?", "", said).strip()
    low = said.lower()
    if "partition" in low and "invalid" in low:
        return (
            f"Slurm refused the job ({said[:200]}); use --partition with one of "
            f"{', '.join(partitions()) or 'those that `sinfo` lists'}"
        )
    remedies = {
        "node count specification": "ask for fewer --nodes; `sinfo` shows what a partition has",
        "more processors": "ask for fewer cores or GPUs; `sinfo` shows what a partition has",
        "node configuration is not available": "ask for fewer GPUs, or another --partition; "
        "`sinfo -o '%P %D %G'` shows what each has",
        "time limit": "ask for a shorter --time; `sinfo -o '%P %l'` shows the limits",
        "invalid generic resource": "ask for another --gpus-per-node; `sinfo -o '%P %G'` shows "
        "what each partition has",
        "invalid account": "give your account with --sbatch account=NAME",
        "unable to contact": "see whether `scontrol ping` reaches the controller",
        "invalid qos": "give a valid one with --sbatch qos=NAME",
        "unrecognized option": "drop that --sbatch; `man sbatch` lists the options",
        "nodelist": "see `sinfo -N` for the names of the nodes",
    }
    remedy = next((text for key, text in remedies.items() if key in low), None)
    remedy = remedy or "change the option that it names, or see --dry-run for the whole script"
    return f"Slurm refused the job ({said[:300]}); {remedy}"


def partitions() -> list[str]:
    try:
        found = call("sinfo", "-h", "-o", "%R").split()
    except LaunchError:
        return []
    return list(dict.fromkeys(found))


def job_statuses(job: str) -> list[JobStatus]:
    """How a job stands, or each task of an array; empty where Slurm has forgotten it."""
    try:
        out = call("scontrol", "-o", "show", "job", job)
    except SlurmRefused as error:
        if "invalid job id" in error.said.lower():
            return []
        raise
    found = [parse_job(line) for line in out.splitlines() if line.strip()]
    # A heterogeneous job has a line per component. The first one decides.
    return found if any(status.task for status in found) else found[:1]


def job_status(job: str) -> JobStatus | None:
    """How a job that is not an array stands; None where Slurm has forgotten it."""
    return next(iter(job_statuses(job)), None)


def parse_job(line: str) -> JobStatus:
    """Read one line of `scontrol -o show job`. Names and comments may hold anything."""

    def field(name: str) -> str:
        found = re.search(rf"(?:^| ){name}=(\S*)", line)
        return "" if found is None or found[1] == "(null)" else found[1]

    status, _, number = field("ExitCode").partition(":")
    return JobStatus(
        field("JobState"),
        field("Reason"),
        int(field("Restarts") or 0),
        int(status or 0),
        int(number or 0),
        field("NodeList"),
        field("JobName"),
        field("StartTime"),
        field("ExcNodeList"),
        field("ArrayTaskId"),
    )


def node_fields(name: str) -> dict[str, str]:
    """`scontrol show node` of one node."""
    out = call("scontrol", "-o", "show", "node", name)
    pairs = (word.partition("=") for word in out.split())
    return {key: value for key, equals, value in pairs if equals}


def node_is_down(name: str) -> bool:
    try:
        state = node_fields(name).get("State", "")
    except LaunchError:
        return False  # the controller is away: nobody knows
    return any(word in state for word in ("DOWN", "FAIL", "NOT_RESPONDING", "*"))


def cancel(jobs: Sequence[str]) -> None:
    call("scancel", *jobs)


def own_job() -> str:
    """The id under which this job is requeued and asked about."""
    # One task of an array has the array's own id as its job id, which would mean all tasks.
    # Of a heterogeneous job only the leader can be requeued.
    return slurm_key(os.environ) or os.environ["SLURM_JOB_ID"]
