"""Processes that have torch loaded, and fork a rank for each of `mgt verify`'s short trainings.

Loading torch costs more than the few steps that are compared. Every rank has its own server, not a
fork of a common one: hash seeds differ between processes, and a script that depends on the order
of a set must not look right here.
"""

from __future__ import annotations

import ast
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from multi_gpu_training.measure.request import VARIABLE, MeasureRequest
from multi_gpu_training.measure.script_runner import TIMED_OUT, ScriptRunner

# Libraries that take longer to import than most of these trainings take.
LARGE = {"transformers", "torchvision", "timm", "sklearn", "scipy", "matplotlib", "pandas"}
OTHERS_S = 5.0  # that ranks may take to end after one has failed
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


class RankServers:
    """The servers of ranks 0 to N-1. `with` ends them."""

    def __init__(self, ranks: int) -> None:
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},  # a fork has no threads of OpenMP
            )
            for _ in range(ranks)
        ]

    def __enter__(self) -> RankServers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()  # its rank dies with it
        for process in self.processes:
            process.communicate()

    def train(
        self,
        command: Sequence[str],
        request: str,
        ranks: int,
        log: Path,
        timeout_s: float,
        idle_s: float,
    ) -> int:
        """Run the script once per rank; the exit code of the first that fails, else 0.

        Several ranks that do nothing for `idle_s` wait for each other, and are ended."""
        logs = [log.with_name(f"output-{rank}.txt") for rank in range(ranks)]
        port = _free_port()
        for rank in range(ranks):
            env = {VARIABLE: request, "NO_COLOR": "1"}
            if ranks > 1:
                env |= dict(zip(_RANK_VARIABLES, map(str, (rank, rank, ranks, ranks)), strict=True))
                env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            self._tell(rank, {"command": list(command), "env": env, "log": str(logs[rank])})
        codes, hang = self._codes(ranks, timeout_s, idle_s if ranks > 1 else timeout_s)
        failed = [rank for rank, code in codes.items() if code]
        # The first that failed says why; the others lost their peer. What is read last counts.
        order = [rank for rank in range(ranks) if rank not in failed] + failed[::-1]
        texts = [logs[rank].read_text(errors="replace") for rank in order if logs[rank].exists()]
        late = len(codes) < ranks and not failed
        if late:
            left = "for one that has left" if codes else "for each other"
            texts.append(
                f"hang: the ranks wait {left}" if hang else f"not done after {timeout_s:g} s"
            )
        log.write_text("\n".join(texts))
        return TIMED_OUT if late else codes[failed[0]] if failed else 0

    def _codes(self, ranks: int, timeout_s: float, idle_s: float) -> tuple[dict[int, int], bool]:
        """Exit codes in the order in which the ranks ended, of those that ended in time; and
        whether the others were idle."""
        codes: dict[int, int] = {}
        until = time.monotonic() + timeout_s
        before, busy_until = Activity(), time.monotonic()
        while len(codes) < ranks and time.monotonic() < until:
            waiting = {self._output(rank): rank for rank in range(ranks) if rank not in codes}
            ready, _, _ = select.select([*waiting], [], [], 1.0)
            for stream in ready:
                codes[waiting[stream]] = _code(stream.readline())
            if any(codes.values()):
                until = min(until, time.monotonic() + OTHERS_S)
            now = Activity.of([process.pid for process in self.processes])
            if ready or now.is_work_since(before, time.monotonic() - busy_until, ranks):
                before, busy_until = now, time.monotonic()
            if time.monotonic() > busy_until + idle_s:
                break
        for rank in set(range(ranks)) - set(codes):
            self._tell(rank, {"end": True})
            self._output(rank).readline()
        return codes, time.monotonic() > busy_until + idle_s

    def _tell(self, rank: int, what: Mapping[str, Any]) -> None:
        stdin = self.processes[rank].stdin
        assert stdin is not None
        stdin.write(json.dumps(what).encode() + b"\n")
        stdin.flush()

    def _output(self, rank: int) -> Any:
        return self.processes[rank].stdout


class ServedRunner(ScriptRunner):
    """Starts ranks by servers. GPU ranks are processes of their own: CUDA survives no fork."""

    servers: RankServers | None = None

    def start(self, request: MeasureRequest, log: Path) -> int:
        if self.servers is None:
            return super().start(request, log)
        return self.servers.train(
            self.command,
            request.save(),
            request.ranks,
            log,
            self.timeout_s,
            request.settings.get("hang_timeout_s", self.timeout_s),
        )


def _code(line: bytes) -> int:
    return int(line) if line.strip() else 1  # the server itself has died


@dataclass(frozen=True)
class Activity:
    """What all processes of the ranks have used so far: seconds of their main threads, and of all
    threads. running: a main thread computes right now, or would if a core were free."""

    main_s: float = 0.0
    total_s: float = 0.0
    running: bool = False

    @classmethod
    def of(cls, servers: Sequence[int]) -> Activity:
        main = total = 0.0
        running = False
        for server in servers:
            with suppress(psutil.Error):
                for process in psutil.Process(server).children(recursive=True):
                    with suppress(psutil.Error):
                        own = [t for t in process.threads() if t.id == process.pid]
                        main += sum(t.user_time + t.system_time for t in own)
                        total += sum(process.cpu_times()[:2])
                        states = psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP
                        running = running or process.status() in states
        return cls(main, total, running)

    def is_work_since(self, before: Activity, seconds: float, ranks: int) -> bool:
        """Threads that watch for signals and stalls use up to 1 % of a core each, which adds up;
        main threads that wait for another rank use nothing."""
        main, total = self.main_s - before.main_s, self.total_s - before.total_s
        return self.running or main > 0.02 or total > max(0.02, 0.05 * ranks * seconds)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# In the server


def main() -> None:
    from multi_gpu_training.distributed.cleanup import die_with_parent

    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command that started it ends it
    # What every training imports; optimizers import dynamo when they are built.
    import torch._dynamo  # noqa: F401

    import multi_gpu_training.manager
    import multi_gpu_training.measure.recorder  # noqa: F401

    pending = b""
    child = 0
    while True:
        if child:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                child = 0
                os.write(1, b"%d\n" % os.waitstatus_to_exitcode(status))
        if not select.select([0], [], [], 0.01 if child else None)[0]:
            continue
        said = os.read(0, 2**16)
        if not said:
            os._exit(0)
        *lines, pending = (pending + said).split(b"\n")
        for line in lines:
            told = json.loads(line)
            if "end" not in told:
                child = _fork(told)
            elif child:
                os.kill(child, signal.SIGKILL)


def preload(script: Path) -> list[str]:
    """Import the large libraries that a script imports at its top, once for all its ranks; their
    names. A script that sets variables first may mean these libraries: it imports them itself."""
    try:
        text = script.read_text()
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError):
        return []
    if "environ" in text.replace("environ.get", ""):
        return []
    done = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""] if node.level == 0 else []
        else:
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        if names and all(name.split(".")[0] in LARGE for name in names):
            with suppress(Exception):  # the script raises it again, where somebody sees it
                exec(compile(ast.Module([node], []), str(script), "exec"), {})
                done += names
    return done


def _preload_quietly(command: Sequence[str]) -> None:
    """What libraries print must not reach the pipe to the command that started this server."""
    kept, nothing = [os.dup(1), os.dup(2)], os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    try:
        preload(Path(command[0]))
    finally:
        for number, descriptor in enumerate(kept, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(nothing)


def _fork(told: Mapping[str, Any]) -> int:
    _preload_quietly(told["command"])
    pid = os.fork()
    if pid:
        return pid
    try:
        code = _as_rank(told)
    except BaseException:
        traceback.print_exc()
        code = 1
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _as_rank(told: Mapping[str, Any]) -> int:
    import numpy as np

    from multi_gpu_training.distributed.cleanup import end_workers
    from multi_gpu_training.launch import rank_main

    log = os.open(told["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ |= told["env"]
    # A new process has its own; a fork would repeat its server's.
    random.seed()
    np.random.seed()
    code: Any = 0
    try:
        rank_main.as_rank(lambda: rank_main.run_command(list(told["command"])))
    except SystemExit as stop:
        code = stop.code or 0
    if isinstance(code, str):
        print(code, file=sys.stderr)
    end_workers(all_children=True)
    return code if isinstance(code, int) else 1
