"""Real ranks for tests: warm pools of processes, each pool one gloo group.

    losses = run_ranks(3, train, tmp_path, {"sync_bn": True})

calls `train(tmp_path, {...})` on three ranks and returns their results in rank order. The
function must live in a module. One rank runs without a group, as a user's single process does.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "multi_gpu_training.manager"])

# Asks a rank, or a loader worker forked from one, where it is; nobody else uses this signal.
WHERE = signal.SIGRTMAX - 5

_pools: dict[int, RankPool] = {}


class RankError(AssertionError):
    pass


class RankPool:
    def __init__(self, world: int) -> None:
        self.world = world
        self.folder = tempfile.TemporaryDirectory(prefix="mgt-test-ranks-")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_serve, args=(rank, world, self.folder.name, theirs), daemon=False
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float
    ) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((function, args))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        failed_at = None
        while len(answers) < self.world:
            left = min(deadline, (failed_at or deadline) + 3) - time.monotonic()
            silent = [r for r in range(self.world) if r not in answers]
            ready = wait([self.pipes[r] for r in silent], timeout=max(0, left))
            if not ready:
                parts = [f"ranks {silent} of {self.world} fell silent in {function.__name__}"]
                parts += [f"rank {r}:\n{a[1]}" for r, a in answers.items() if not a[0]]
                parts += [self.stacks(rank) for rank in range(self.world)]
                self.end()
                raise RankError("\n".join(parts))
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = (False, "the process died", None)
                if not answers[rank][0]:
                    failed_at = failed_at or time.monotonic()
        failures = [(a[2] or 0.0, r, a[1]) for r, a in answers.items() if not a[0]]
        if failures:
            self.end()
            raise RankError("\n".join(f"rank {r}:\n{text}" for _, r, text in sorted(failures)))
        return [answers[r][1] for r in range(self.world)]

    def stacks(self, rank: int) -> str:
        """Where each thread of a rank is, and of the processes that it started."""
        file = Path(self.folder.name, f"stacks-{rank}.txt")
        pids = [self.processes[rank].pid]
        with suppress(psutil.Error):
            pids += [child.pid for child in psutil.Process(pids[0]).children(recursive=True)]
        for pid in pids:
            with file.open("a") as notes:
                notes.write(f"\n--- rank {rank}, process {pid}\n")
            with suppress(OSError):  # it is gone
                if _answers(pid):
                    os.kill(pid, WHERE)
                    time.sleep(0.2)  # it writes to the same file, after the line above
        return file.read_text(errors="replace")

    def end(self) -> None:
        _pools.pop(self.world, None)
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):  # a loader worker may never look for its rank
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()
            process.join()
        self.folder.cleanup()


def run_ranks(
    world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120
) -> list[Any]:
    if world not in _pools:
        _pools[world] = RankPool(world)
    return _pools[world].run(function, args, timeout_s)


def end_pools() -> None:
    for pool in list(_pools.values()):
        pool.end()


def _answers(pid: int) -> bool:
    """Whether a process has a handler for WHERE: the signal would end any other."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")]
    return bool(caught) and bool(int(caught[0], 16) >> (WHERE - 1) & 1)


def _serve(rank: int, world: int, folder: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # Loader workers inherit both the handler and the file.
    faulthandler.register(WHERE, file=Path(folder, f"stacks-{rank}.txt").open("a"))  # noqa: SIM115
    if world > 1:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_WORLD_SIZE=str(world),
            GLOO_SOCKET_IFNAME="lo",
        )
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
        )
        dist.barrier()
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((True, function(*args), None))
        except BaseException:
            pipe.send((False, traceback.format_exc(), time.time()))
