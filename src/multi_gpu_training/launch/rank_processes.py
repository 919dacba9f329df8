"""The processes of the ranks on this machine: started, looked at, asked to end, ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from multi_gpu_training.distributed import progress_slot
from multi_gpu_training.distributed.stacks import Stack, collect
from multi_gpu_training.errors import RankFailure
from multi_gpu_training.launch.engine import RankJob
from multi_gpu_training.launch.rank_errors import first_failure
from multi_gpu_training.launch.restart_policy import Fault
from multi_gpu_training.portability import exit_code, process_state
from multi_gpu_training.python_internals import interpreter_flags

# Ranks get this long to end by themselves before they are killed; Ctrl-C must end within 5 s.
GRACE_S = 3
# How ranks end that were asked to: by themselves, or before they could listen.
STOPPED = {
    143: signal.SIGTERM,
    130: signal.SIGINT,
    -signal.SIGTERM: signal.SIGTERM,
    -signal.SIGUSR1: signal.SIGTERM,
    -signal.SIGHUP: signal.SIGTERM,
    -signal.SIGQUIT: signal.SIGTERM,
}


class RankProcesses:
    """One attempt at a job. Everything is keyed by the number of the rank in the whole run.

    `environments` are the variables of each rank, `folder` is where they leave error reports.
    `bystanders` are the ranks that were well until we ended them.
    """

    def __init__(
        self, job: RankJob, environments: Mapping[int, Mapping[str, str]], folder: Path
    ) -> None:
        self.bystanders: frozenset[int] = frozenset()
        self.results: dict[int, Any] = {}
        self.error_files: dict[int, str] = {}
        self.pids: dict[int, int] = {}
        self._wait: list[Callable[[], Any]] = []
        self._connections: dict[int, Connection] = {}
        try:
            for rank, variables in environments.items():
                file = folder / f"rank-{rank}" / "error.json"
                file.parent.mkdir(parents=True)
                self.error_files[rank] = str(file)
                env = {**variables, "TORCHELASTIC_ERROR_FILE": str(file)}
                if job.function is None:
                    self._start_command(rank, job.command, env)
                else:
                    self._start_function(rank, job.function, job.args, env)
        except BaseException:
            self.end(signal.SIGKILL)  # the caller gets no object to do it with
            raise

    def _start_command(self, rank: int, command: tuple[str, ...], env: Mapping[str, str]) -> None:
        flags = interpreter_flags()
        main = ["-m", "multi_gpu_training.launch.rank_main", f"--launcher={os.getpid()}"]
        process = subprocess.Popen(
            [sys.executable, *flags, *main, *command],
            env={**os.environ, **env},
            # The launcher passes signals on, to this rank and all that it starts.
            start_new_session=True,
        )
        self.pids[rank] = process.pid
        self._wait.append(process.wait)

    def _start_function(
        self, rank: int, function: Callable[..., Any], args: tuple[Any, ...], env: Mapping[str, str]
    ) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_call, args=(function, args, dict(env), os.getpid(), theirs), daemon=False
        )
        # Until the function is called, Ctrl-C would show where the imports of a rank stand.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        assert process.pid is not None
        self.pids[rank] = process.pid
        self._connections[rank] = ours
        self._wait.append(process.join)

    # Looking

    def codes(self) -> dict[int, int | None]:
        """The exit code of each rank; None while it runs, negative for a signal."""
        for rank, connection in list(self._connections.items()):
            with suppress(EOFError, OSError):
                if connection.poll():
                    self.results[rank] = connection.recv()
                    # Tensors are in memory of that process: it waits until we have them.
                    connection.send(None)
        return {rank: exit_code(pid) for rank, pid in self.pids.items()}

    @property
    def alive(self) -> dict[int, int]:
        return {rank: pid for rank, pid in self.pids.items() if exit_code(pid) is None}

    @property
    def progress(self) -> dict[int, progress_slot.RankProgress]:
        return {rank: progress_slot.of_rank(file) for rank, file in self.error_files.items()}

    @property
    def grace_s(self) -> float:
        """How long the ranks have said that they need to save."""
        return max((found.grace_s for found in self.progress.values()), default=0.0)

    def host(self, rank: int) -> str:
        """The machine that a rank runs on."""
        return socket.gethostname()

    def states(self) -> dict[int, str]:
        """The kernel's letter for each process."""
        return {rank: process_state(pid) for rank, pid in self.pids.items()}

    def stacks(self, ranks: Iterable[int]) -> dict[int, Stack]:
        """The stacks of those of `ranks` that answer."""
        return collect({rank: self.pids[rank] for rank in ranks}, self.error_files)

    def first_failure(self, codes: Mapping[int, int], begun: bool) -> tuple[Fault, RankFailure]:
        """Who failed first, once all have ended; `codes` are those from before that."""
        return first_failure(codes, self.error_files, self.bystanders, begun, self.host)

    # Ending

    def ask(self, number: signal.Signals, interrupts: Callable[[], int]) -> None:
        """Ask the ranks to save and end, in the time they need, and kill those that do not.

        A second Ctrl-C ends the waiting, and so does a rank that fails meanwhile.
        """
        deadline = time.monotonic() + GRACE_S + self.grace_s
        for rank in self.alive:
            self.send(rank, number)
        while time.monotonic() < deadline and interrupts() < 2:
            if self._wait_for_stopped(time.monotonic() + 0.5):
                self.end(number)
                return
        self.end(signal.SIGKILL)

    def send(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank, but not to its children: it needs them to save."""
        with suppress(ProcessLookupError):
            os.kill(self.pids[rank], number)

    def end_after_failure(self) -> None:
        """End the other ranks soon after one has failed."""
        grace_s = self.grace_s
        if any(code in STOPPED for code in self.codes().values()):
            # It ended because it was asked to: let the others do the same.
            self._wait_for_stopped(time.monotonic() + grace_s)
        self.bystanders = frozenset(self.alive)
        # Ranks that save on SIGTERM would take it for a request to save.
        self.end(signal.SIGKILL if grace_s else signal.SIGTERM)

    def end(self, number: signal.Signals) -> None:
        """End every rank with a signal, or SIGKILL after GRACE_S, and all that they started."""
        self._signal(self.alive, number)
        deadline = time.monotonic() + GRACE_S
        while self.alive and time.monotonic() < deadline:
            time.sleep(0.02)
        # Also the groups of ranks that were gone before. Nobody has waited for them yet, so the
        # kernel has not given their numbers to other processes.
        self._signal(self.pids, signal.SIGKILL)
        self.forget()

    def forget(self) -> None:
        """Wait for processes that have ended, and let go of their numbers."""
        for wait in self._wait:
            wait()
        for connection in self._connections.values():
            connection.close()
        self.pids, self._wait, self._connections = {}, [], {}

    def _signal(self, pids: Mapping[int, int], number: signal.Signals) -> None:
        for pid in pids.values():
            try:
                os.killpg(pid, number)
            except ProcessLookupError:
                # A function's process leads its own group only once it has come that far.
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            except PermissionError:
                continue

    def _wait_for_stopped(self, deadline: float) -> bool:
        """Whether all ranks ended, or one of them otherwise than asked to, before the deadline."""
        while True:
            codes = self.codes().values()
            ended = {code for code in codes if code is not None}
            if None not in codes or not ended <= STOPPED.keys() | {0}:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)


def _call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    env: Mapping[str, str],
    launcher: int,
    connection: Connection,
) -> None:
    """In a rank's process: call the function and hand its result to the launcher."""
    from multi_gpu_training.launch.rank_main import as_rank

    os.environ.update(env)
    os.setsid()  # as for commands: the launcher passes signals on

    def work() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        connection.send(function(*args))
        connection.recv()

    as_rank(work, launcher)
