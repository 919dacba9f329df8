"""The Ray actor that holds one rank: it starts the rank's process and tells how that fares.

The rank is a process of its own, as on one machine: it gets signals, exits with its code and may
crash without Ray knowing. Actors answer within moments, whatever their rank is busy with.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from multi_gpu_training.distributed import sockets
from multi_gpu_training.distributed.cleanup import Scratch
from multi_gpu_training.distributed.cluster_token import TOKEN
from multi_gpu_training.distributed.stacks import Stack
from multi_gpu_training.distributed.store_relay import StoreRelay, remote_upstream
from multi_gpu_training.launch.engine import RankJob
from multi_gpu_training.launch.rank_processes import RankProcesses
from multi_gpu_training.portability import kill_with_parent

# An actor that hears nothing for so long ends its rank: the driver cannot reach it, and starts
# another world elsewhere once this time has passed.
LEASE_S = 20.0
LOOK_S = 0.5
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Site:
    """Where an actor is. `shared`: it sees the driver's folder; `shipped` is Ray's copy of it.

    `interfaces` are variables that let gloo and NCCL use the interface that Ray uses.
    """

    node: str
    address: str
    host: str
    gpus: tuple[str, ...]
    shared: bool
    shipped: str
    interfaces: Mapping[str, str]
    versions: tuple[str, ...]


@dataclass(frozen=True)
class RankLook:
    """How a rank fares: its exit code, None while it runs, and what it left since the last look.

    `state` is the kernel's letter for its process, `results` holds what its function returned.
    """

    code: int | None
    state: str
    progress: bytes
    report: bytes
    output: bytes
    errors: bytes
    more: bool  # there is output left to fetch
    results: Mapping[int, Any]


class RankActor:
    """One rank. The driver calls `where` and `start`, then `look` again and again."""

    def __init__(self) -> None:
        # Ray's actors outlive a raylet that is killed, and would train on beside the next world.
        kill_with_parent()
        self._raylet = _visible_process(os.environ.get("RAY_RAYLET_PID"))
        self._shipped = str(Path.cwd())
        self._scratch = Scratch()
        self._outputs = [self._scratch.path / "out", self._scratch.path / "err"]
        self._read = [0, 0]
        self._ranks: RankProcesses | None = None
        self._relay: StoreRelay | None = None
        self._heard = math.inf  # until the rank runs
        threading.Thread(target=self._keep_lease, name="lease", daemon=True).start()

    def where(self, ticket: str) -> Site:
        """`ticket` is a file that the driver made in its folder for this question."""
        import ray

        gpus = tuple(map(str, ray.get_gpu_ids()))
        python = ".".join(map(str, sys.version_info[:2]))
        address = ray.util.get_node_ip_address()
        return Site(
            ray.get_runtime_context().get_node_id(),
            address,
            socket.gethostname(),
            gpus,
            Path(ticket).exists(),
            self._shipped,
            sockets.interface_variables(address),
            (f"Python {python}", f"torch {_version('torch')}"),
        )

    def start(
        self,
        rank: int,
        job: RankJob,
        variables: Mapping[str, str],
        folder: str,
        store: tuple[str, int],
        token: bytes,
    ) -> None:
        """Start the rank in `folder`; `store` admits who knows the token."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
        relay = StoreRelay(
            sockets.listening_socket(sockets.LOOPBACK, 0), remote_upstream(*store, token)
        )
        self._relay = relay
        environment = {
            **variables,
            "MASTER_ADDR": sockets.LOOPBACK,
            "MASTER_PORT": str(relay.port),
            TOKEN: token.decode(),
        }
        # The rank inherits them: Ray's own way to the driver is late, and loses the last lines.
        for number, path in zip((1, 2), self._outputs, strict=True):
            with path.open("wb") as file:
                os.dup2(file.fileno(), number)
        # Ray blocks SIGINT in its workers, and a script that starts Ray in the background ignores
        # it; a process inherits both.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            self._ranks = RankProcesses(job, {rank: environment}, self._scratch.path)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            signal.signal(signal.SIGINT, handler)
        self._heard = time.monotonic()

    def look(self, patience_s: float = LOOK_S) -> RankLook:
        """How the rank fares, at once if it has ended, else after `patience_s`."""
        self._heard = time.monotonic()
        ranks = self._running
        deadline = time.monotonic() + patience_s
        while True:
            (code,) = ranks.codes().values() or (0,)
            if code is not None or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        (state,) = ranks.states().values() or ("",)
        (file,) = map(Path, ranks.error_files.values())
        output, errors = self._new_output(0), self._new_output(1)
        more = len(output) == _CHUNK or len(errors) == _CHUNK
        return RankLook(
            code,
            state,
            _bytes(file.with_name("progress")),
            _bytes(file) if code is not None else b"",
            output,
            errors,
            more,
            dict(ranks.results),
        )

    def send(self, number: int) -> None:
        self._heard = time.monotonic()
        for rank in self._running.alive:
            self._running.send(rank, signal.Signals(number))

    def stacks(self) -> Stack | None:
        found = self._running.stacks(self._running.alive)
        return next(iter(found.values()), None)

    def end(self, number: int) -> RankLook | None:
        """End the rank with a signal and all that it started, and say what it left."""
        if self._ranks is None:
            return None
        before = self.look(0.0)
        code = before.code
        if code is None:
            self._ranks.bystanders = frozenset(self._ranks.alive)
        self._ranks.end(signal.Signals(number))
        last = self._new_output(0), self._new_output(1)
        self.close()
        return RankLook(
            code,
            before.state,
            before.progress,
            before.report,
            before.output + last[0],
            before.errors + last[1],
            False,
            before.results,
        )

    def close(self) -> None:
        if self._relay is not None:
            self._relay.close()
        self._scratch.remove()

    @property
    def _running(self) -> RankProcesses:
        assert self._ranks is not None, "start() comes first"
        return self._ranks

    def _new_output(self, which: int) -> bytes:
        try:
            with self._outputs[which].open("rb") as file:
                file.seek(self._read[which])
                found = file.read(_CHUNK)
        except OSError:
            return b""
        self._read[which] += len(found)
        return found

    def _keep_lease(self) -> None:
        """End the rank when the driver or the raylet is gone."""
        while True:
            time.sleep(LOOK_S)
            silent = time.monotonic() - self._heard > LEASE_S
            orphaned = self._raylet is not None and not Path(f"/proc/{self._raylet}").exists()
            if silent or orphaned:
                for pid in list(self._ranks.pids.values()) if self._ranks is not None else []:
                    with suppress(OSError):
                        os.killpg(pid, signal.SIGKILL)
                self._scratch.remove()
                os._exit(1)


def _visible_process(text: str | None) -> int | None:
    """The process id, unless it belongs to another process namespace."""
    found = text is not None and text.isdecimal() and Path(f"/proc/{text}").exists()
    return int(text) if found and text is not None else None


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "is not installed"


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
