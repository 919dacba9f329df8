"""The engine that hands a run to Slurm: writes the job, submits it, follows its log to the end."""

from __future__ import annotations

import codecs
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.distributed.identity import Identity
from multi_gpu_training.errors import ConfigError, LaunchError, RankFailure
from multi_gpu_training.launch.engine import Engine, Hosts, LaunchPlan, RankJob, RunOutcome
from multi_gpu_training.launch.signals import LauncherSignals
from multi_gpu_training.launch.slurm.batch_script import (
    JOBS,
    MAX_REQUEUES,
    BatchJob,
    exit_code_file,
    parse_components,
    read_setup,
    seconds_of,
)
from multi_gpu_training.launch.slurm.slurm_commands import (
    JobStatus,
    cancel,
    job_status,
    require_slurm,
    submit,
)
from multi_gpu_training.safe_files import make_private

ASK_EVERY_S = 2.0  # the controller serves the whole cluster
LOG_LAG_S = 5.0  # a network file system shows the end of a log late
CANCEL_S = 90.0  # Slurm kills what has not ended KillWait (usually 30 s) after it was asked


class SlurmEngine(Engine):
    """Submits a job whose nodes each run a launcher, and reports how the job ends.

    The job does not need this process: it requeues and resumes by itself.
    """

    options = (
        *("gpus_per_node", "gpus_per_task", "time", "partition", "sbatch", "het", "setup_file"),
        *("max_requeues", "dry_run", "detach"),
    )

    def __init__(self, plan: LaunchPlan) -> None:
        self.plan = plan
        self._outcome: RunOutcome | None = None
        self._job = ""
        self._follower: LogFollower | None = None

    @classmethod
    def fits(cls, hosts: Hosts, config: MultiGPUConfig | None) -> bool:
        return False  # nobody's run is queued unasked

    @classmethod
    def identity(cls, config: MultiGPUConfig) -> Identity | None:
        return None

    def start(self, job: RankJob, signals: LauncherSignals) -> None:
        given = self.plan.hosts.engine_options
        batch = batch_job(self.plan, job)
        if given.get("dry_run"):
            print(batch.text(), end="")
            self._outcome = RunOutcome()
            return
        if batch.is_array and not given.get("detach"):
            raise ConfigError(
                "--sbatch array starts several runs, and one terminal cannot follow them; add "
                "--detach and watch them with `mgt jobs`"
            )
        require_slurm("--engine slurm")
        make_private(batch.folder)
        began = time.time()
        self._job = submit(batch.text())
        (batch.folder / f"{self._job}.sh").write_text(batch.text())
        log = batch.log(self._job)
        _say(f"submitted job {self._job}; its log is {log}")
        if given.get("detach"):
            _say(f"`mgt jobs` shows how it stands, `mgt cancel {self._job}` ends it")
            self._outcome = RunOutcome()
            return
        signals.listen()
        self._signals = signals
        self._follower = LogFollower(self._job, log, began)

    def watch(self) -> RunOutcome | None:
        if self._outcome is None:
            assert self._follower is not None, "start() comes first"
            self._outcome = self._follower.look()
        return self._outcome

    def stop(self, number: int) -> None:
        if self._follower is None:
            return
        if number != signal.SIGINT:
            # A closed terminal or a login node that tidies up must not end hours of training.
            _say(
                f"job {self._job} continues without this terminal; `mgt cancel {self._job}` ends it"
            )
            raise SystemExit(128 + number)
        _say(f"cancelling job {self._job}; it saves first")
        cancel([self._job])
        deadline = time.monotonic() + CANCEL_S
        while self._follower.look() is None and time.monotonic() < deadline:
            if self._signals.interrupts > 1:
                _say(f"not waiting for job {self._job} any longer; `mgt jobs` shows how it ends")
                return
            time.sleep(0.2)

    def close(self) -> None:
        pass


def batch_job(plan: LaunchPlan, job: RankJob) -> BatchJob:
    """The job for a plan. ConfigError: what its flags ask for is wrong, all of it at once."""
    hosts, given = plan.hosts, plan.hosts.engine_options
    problems: list[str] = []
    if not job.command:
        problems.append(
            "--engine slurm starts scripts, not functions; put the training into a file and use "
            "`mgt run FILE --engine slurm`"
        )
    if hosts.master_addr is not None or hosts.node_rank:
        problems.append(
            "--engine slurm finds its nodes by itself; drop --master-addr and --node-rank, and "
            "unset MASTER_ADDR"
        )
    nodes = f"{hosts.least}-{hosts.nodes}" if hosts.elastic else str(hosts.nodes)
    components = parse_components(nodes, given, problems)
    if hosts.elastic and len(components) > 1:
        problems.append("--het needs a fixed number of --nodes, not LEAST:MOST")
    if not plan.ranks_here and not any(
        _asks_for_gpus(c.gpus_per_node, c.options) for c in components
    ):
        problems.append(
            "--engine slurm needs --gpus-per-node N, or --num-gpus N for CPU ranks on each node"
        )
    setup = ""
    for read in (
        lambda: seconds_of(given["time"]) if given.get("time") else None,
        lambda: read_setup(given.get("setup_file")),
    ):
        try:
            found: Any = read()
            setup = found if isinstance(found, str) else setup
        except ConfigError as error:
            problems += error.problems
    requeues = given.get("max_requeues")
    if problems:
        raise ConfigError(problems)
    return BatchJob(
        job.command,
        components,
        Path(JOBS).absolute(),
        _name(job.command),
        given.get("time"),
        setup,
        plan.ranks_here or None,
        hosts.nodes if hosts.elastic else 0,
        MAX_REQUEUES if requeues is None else requeues,
        plan.max_restarts,
        plan.recovery_timeout,
    )


def _asks_for_gpus(per_node: str | None, options: tuple[str, ...]) -> bool:
    return per_node is not None or any(o.startswith(("gres=", "gpus=")) for o in options)


def _name(command: tuple[str, ...]) -> str:
    """The job's name: the recipe or the script."""
    # `-m multi_gpu_training train image` is called image.
    word = command[3] if command[0] == "-m" and len(command) > 3 else command[0]
    found = "".join(c if c.isalnum() or c in "-_." else "-" for c in Path(word).stem)
    return found.lstrip("-")[:60] or "mgt"


class LogFollower:
    """Shows what a job writes and how it stands, until it ends."""

    def __init__(self, job: str, log: Path, began: float) -> None:
        self._job = job
        self._log = log
        self._place = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # reads may cut a letter
        # Where job ids began anew, an older job's log may lie there.
        with suppress(OSError):
            if log.stat().st_mtime < began:
                self._place = log.stat().st_size
        self._next = 0.0
        self._shown = ""
        self._restarts = 0
        self._ended: tuple[float, RunOutcome] | None = None

    def look(self) -> RunOutcome | None:
        """Show what is new; the outcome once the job has ended and its log is shown."""
        self._show_log()
        now = time.monotonic()
        if self._ended is not None:
            return self._ended[1] if now > self._ended[0] else None
        if now < self._next:
            return None
        self._next = now + ASK_EVERY_S
        try:
            status = job_status(self._job)
        except LaunchError as error:
            self._tell(f"{error}; still trying")
            return None
        if status is None or status.ended:
            self._ended = (now + LOG_LAG_S, self._outcome(status))
            if self._complete():
                self._ended = (now, self._ended[1])
            return None
        if status.restarts > self._restarts:
            self._restarts = status.restarts
            _say(f"job {self._job} was requeued ({status.restarts} so far)")
        waiting = f" ({status.reason})" if status.state == "PENDING" else f" on {status.nodes}"
        self._tell(f"job {self._job} is {status.state.lower()}{waiting}")
        return None

    def _tell(self, text: str) -> None:
        if text != self._shown:
            self._shown = text
            _say(text)

    def _show_log(self) -> None:
        try:
            with self._log.open("rb") as file:
                file.seek(self._place)
                new = file.read(1 << 20)
        except OSError:
            return  # the job has not begun
        self._place += len(new)
        if new:
            sys.stdout.write(self._decoder.decode(new))
            sys.stdout.flush()

    @property
    def _code_file(self) -> Path:
        return exit_code_file(self._log.parent, self._job)

    def _complete(self) -> bool:
        """Whether the log has been shown up to the job's last word."""
        with suppress(OSError):
            return self._code_file.exists() and self._log.stat().st_size == self._place
        return False

    def _outcome(self, status: JobStatus | None) -> RunOutcome:
        if status is None:
            try:
                code = int(self._code_file.read_text())
            except (OSError, ValueError):
                code, how = 1, "has been forgotten by Slurm, and left no exit code"
            else:
                how = f"ended with code {code}"
        else:
            code, how = status.exit_code, f"ended as {status.state} with code {status.exit_code}"
        if code == 0:
            return RunOutcome()
        where = f"its log is {self._log}"
        if not self._log.exists():
            where = f"it wrote no log: do the nodes see {self._log.parent}?"
        error = RankFailure(f"job {self._job} {how}; {where}")
        error.exit_code = code
        return RunOutcome(error=error)


def _say(text: str) -> None:
    print(f"slurm: {text}", file=sys.stderr, flush=True)
