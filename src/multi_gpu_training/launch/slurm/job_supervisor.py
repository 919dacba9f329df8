"""What the batch script of a job runs: starts a launcher on every node and has the job requeued.

    what happens                         what follows
    the run ends well, or by its error   the job ends with the run's exit code
    SIGUSR1: the time limit is near      the ranks save; the job is requeued and resumes
    ranks end by a signal, not the job   likewise (scancel --signal)
    SIGTERM: cancelled or preempted      the ranks save; Slurm requeues what it preempted
    the run fails and a node is broken   the job is requeued without that node
    a node is down                       Slurm requeues the job by itself

A job that was requeued --max-requeues times ends instead.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from multi_gpu_training.distributed.cluster_token import INSECURE, TOKEN, TOKEN_FILE
from multi_gpu_training.distributed.identity import REQUEUES, RUN_KEY, slurm_key
from multi_gpu_training.distributed.sockets import listening_socket
from multi_gpu_training.errors import LaunchError
from multi_gpu_training.launch.slurm.batch_script import exit_code_file
from multi_gpu_training.launch.slurm.fence import Fence
from multi_gpu_training.launch.slurm.node_lists import expand
from multi_gpu_training.launch.slurm.node_task import MASTER
from multi_gpu_training.launch.slurm.slurm_commands import (
    call,
    job_status,
    node_fields,
    node_is_down,
    own_job,
)
from multi_gpu_training.safe_files import make_private, write_atomically

STOPPED = 143
PROBE_S = 90.0
LOOK_EVERY_S = 0.2


class JobSupervisor:
    """One attempt at a job, on its first node."""

    def __init__(self, flags: argparse.Namespace, env: Mapping[str, str]) -> None:
        self._flags = flags
        self._env = env
        self._restarts = int(env.get("SLURM_RESTART_COUNT", 0))
        self._folder = flags.folder / slurm_key(env)
        self.fence = Fence(self._folder, self._restarts)
        self._limit_near = False
        self._ended_by_slurm = False
        self._srun: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """The job's exit code, unless the job is requeued."""
        signal.signal(signal.SIGUSR1, self._note)
        signal.signal(signal.SIGTERM, self._note)
        make_private(self._folder)
        exit_code_file(self._flags.folder, slurm_key(self._env)).unlink(missing_ok=True)
        if self._restarts > self._flags.max_requeues:
            return self._give_up(f"it was requeued {self._restarts} times")
        if not self.fence.take():
            return self._give_up("a later attempt of it has begun")
        code = self._run_step()
        if self._ended_by_slurm or self.fence.passed():
            return STOPPED
        if self._limit_near or code == STOPPED:
            why = "the time limit is near" if self._limit_near else "its ranks were asked to end"
            return 0 if code == 0 else self._requeue(why, [])
        if code:
            # Also after 2, a wrong config: Slurm ends a task with it whose program is missing.
            broken = self._broken_nodes()
            if broken:
                return self._requeue(f"{', '.join(broken)} cannot run a process", broken, code)
        return code

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            self._ended_by_slurm = True
        else:
            self._limit_near = True
            if self._srun is not None:
                self._srun.send_signal(signal.SIGUSR1)  # srun passes it on to the launchers

    # One step on all nodes

    def _run_step(self) -> int:
        if self._limit_near or self._ended_by_slurm:
            return STOPPED
        self._srun = subprocess.Popen(self._command(), env=self._step_environment())
        if self._limit_near:  # it came while srun was starting
            self._srun.send_signal(signal.SIGUSR1)
        while self._srun.poll() is None:
            time.sleep(LOOK_EVERY_S)
        code = self._srun.returncode
        return code if code >= 0 else 128 - code

    def _command(self) -> list[str]:
        """One task per node, or per `--gpus-per-task`: those that the job was given."""
        flags = self._flags
        words = ["srun", "--unbuffered", "--kill-on-bad-exit=0"]
        groups = int(self._env.get("SLURM_HET_SIZE", 1))
        if groups > 1:
            words.append(f"--het-group=0-{groups - 1}")
        elif flags.most_nodes:  # the job was given tasks for the most nodes, whichever it has
            nodes = self._env["SLURM_JOB_NUM_NODES"]
            words += [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
        words += [*self._task(), f"--recovery-timeout={flags.recovery_timeout:g}"]
        words += [f"--most-nodes={flags.most_nodes}"]
        if flags.ranks is not None:
            words.append(f"--ranks={flags.ranks}")
        if flags.max_restarts is not None:
            words.append(f"--max-restarts={flags.max_restarts}")
        return [*words, "--", *flags.command]

    def _task(self) -> list[str]:
        """The start of what srun runs on a node."""
        words = shlex.split(self._env.get("MGT_TASK_PREFIX", ""))  # a container's command
        words += [self._env.get("MGT_PYTHON") or sys.executable, "-m", NODE_TASK]
        return [*words, f"--folder={self._folder}"]

    def _step_environment(self) -> dict[str, str]:
        """What the launchers need to know. Nothing of it stands in a file or on a command line."""
        port = self._env.get("MASTER_PORT") or str(_free_port())
        found = {
            **self._env,
            MASTER: f"{_address(self._nodes()[0])}:{port}",
            RUN_KEY: f"slurm-{slurm_key(self._env)}-{self._flags.submission}",
            REQUEUES: str(self._restarts),
        }
        # srun no longer takes it over from sbatch since Slurm 22.05.
        if "SLURM_CPUS_PER_TASK" in self._env:
            found.setdefault("SRUN_CPUS_PER_TASK", self._env["SLURM_CPUS_PER_TASK"])
        if TOKEN_FILE not in found and found.get(INSECURE, "") in ("", "0"):
            # Fresh for each attempt: launchers that an earlier one left behind cannot join.
            found[TOKEN] = secrets.token_hex(32)
        for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
            found.pop(name, None)
        return found

    def _nodes(self) -> list[str]:
        groups = int(self._env.get("SLURM_HET_SIZE", 1))
        if groups == 1:
            return expand(self._env["SLURM_JOB_NODELIST"])
        lists = (self._env[f"SLURM_JOB_NODELIST_HET_GROUP_{g}"] for g in range(groups))
        return [name for text in lists for name in expand(text)]

    # After the step

    def _broken_nodes(self) -> list[str]:
        """The nodes of the job that are down, or on which a process or a GPU fails."""
        nodes = self._nodes()
        if len(nodes) == 1:
            return []  # this process runs there
        broken = [name for name in nodes if node_is_down(name)]
        probes = {
            name: subprocess.Popen(
                [
                    *("srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={name}"),
                    *("--quiet", *self._task(), "--probe"),
                ],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for name in nodes
            if name not in broken and "SLURM_HET_SIZE" not in self._env
        }
        deadline = time.monotonic() + PROBE_S
        for name, found in probes.items():
            try:
                if found.wait(max(0.0, deadline - time.monotonic())):
                    broken.append(name)
            except subprocess.TimeoutExpired:
                found.kill()
                broken.append(name)
        # If every node fails, then not for its own sake.
        return broken if len(broken) < len(nodes) else []

    def _requeue(self, why: str, broken: Sequence[str], code: int = STOPPED) -> int:
        job = own_job()
        if self._restarts >= self._flags.max_requeues:
            self._give_up(f"{why}, and --max-requeues {self._flags.max_requeues} is used up")
            return code
        try:
            status = job_status(job)
            if status is not None and (
                status.state != "RUNNING" or status.restarts != self._restarts
            ):
                return code  # cancelled, or Slurm has requeued it already
            before = status.excluded if status is not None else ""
            call("scontrol", "requeue", job)
            say(f"{why}; job {job} is requeued and resumes ({self._restarts + 1} so far)")
            if broken:
                # Only a job that waits can be changed; this one does so from now on.
                excluded = ",".join(dict.fromkeys([*([before] if before else []), *broken]))
                call("scontrol", "update", f"JobId={job}", f"ExcNodeList={excluded}")
        except LaunchError as error:
            self._give_up(f"{why}, and it cannot be requeued ({error})")
        return code

    def _give_up(self, why: str) -> int:
        say(f"job {own_job()} ends: {why}. Submit it again with --resume auto to continue")
        return 1


NODE_TASK = "multi_gpu_training.launch.slurm.node_task"


def _address(name: str) -> str:
    """The address of a node, as Slurm itself reaches it."""
    try:
        return node_fields(name).get("NodeAddr") or name
    except LaunchError:
        return name


def _free_port() -> int:
    """A port that is free here, where the first launcher will listen."""
    with listening_socket("0.0.0.0", 0) as found:
        return int(found.getsockname()[1])


def say(text: str) -> None:
    print(f"slurm: {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--submission", required=True)
    parser.add_argument("--max-requeues", type=int, required=True)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--most-nodes", type=int, default=0)
    parser.add_argument("--max-restarts", type=int)
    parser.add_argument("--recovery-timeout", type=float, default=300.0)
    parser.add_argument("command", nargs="+")
    flags = parser.parse_args()
    supervisor = JobSupervisor(flags, os.environ)
    code = supervisor.run()
    if not supervisor.fence.passed():
        write_atomically(exit_code_file(flags.folder, slurm_key(os.environ)), str(code))
    sys.exit(code)


if __name__ == "__main__":
    main()
