"""A gloo group that can be broken and rebuilt while the processes keep running.

Gloo has no abort. A rank that cannot finish a step says so in the store and shuts its
connections. A rank that waits for it gets an error at once, finds that word in the store, and
does the same. Then all ranks connect again, under a new number.

When a connection ends, gloo forgets the exchange whose message is half sent or half received:
that exchange waits for its whole timeout. So connections are shut only when nothing travels.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from multi_gpu_training.distributed.store_relay import guard
from multi_gpu_training.torch_internals import default_store

_OPEN = Path("/proc/self/fd")
_QUIET_MS = 200  # nothing has travelled for so long: no message is half sent
_PATIENCE_S = 5.0


class RecoverableGroup:
    """A gloo group over all ranks. `number` counts its rebuilds and is the same on every rank."""

    def __init__(self, timeout: timedelta, number: int = 0) -> None:
        self.number = number
        self.timeout = timeout
        self.world = dist.group.WORLD
        before = open_sockets()
        self.group: Any = dist.new_group(backend="gloo", timeout=timeout)
        self._sockets = open_sockets() - before
        shut_listeners(self._sockets)

    def announce(self) -> None:
        """Say in the store that this group is about to be broken, and that all may go on."""
        default_store().set(self._key, "broken")

    @property
    def announced(self) -> bool:
        """Whether a rank has said so. False as well where the store is gone."""
        with suppress(RuntimeError):
            return bool(default_store().check([self._key]))
        return False

    def renew(self) -> RecoverableGroup:
        """Break this group and connect anew. Waits for all ranks to do so."""
        self._break()
        dist.destroy_process_group(self.group)
        self._destroy()
        # Another number: what ranks announced about the old group must not count for this one.
        fresh = RecoverableGroup(self.timeout, self.number + 1)
        _current[0] = fresh
        return fresh

    def release(self) -> None:
        """Let go of the group before the process exits, so that its threads end now.

        Such a thread frees the tensors of its last exchange. If that needs the interpreter, and the
        interpreter is shutting down, the whole process aborts.
        """
        self.group = self.world = None
        if _current[0] is self:
            _current[0] = None

    @property
    def _key(self) -> str:
        return f"mgt/broken/{self.number}"

    def _break(self) -> None:
        with ExitStack() as stack:
            connections = [
                stack.enter_context(found)
                for number, name in self._sockets
                if (found := _connection(number, name)) is not None
            ]
            deadline = time.monotonic() + _PATIENCE_S
            while time.monotonic() < deadline and not all(map(_is_quiet, connections)):
                time.sleep(0.01)
            for connection in connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _destroy(self) -> None:
        """Free the group without blocking for long: its destructor waits for every exchange, and a
        forgotten one fails only after its timeout."""
        last = [self.group]
        self.group = None
        thread = threading.Thread(target=last.clear, name="mgt-destroy-group", daemon=True)
        thread.start()
        thread.join(_PATIENCE_S)


_current: list[RecoverableGroup | None] = [None]  # one per process, like torch's own


def recoverable_group(timeout: timedelta) -> RecoverableGroup:
    """This process's group over all ranks. The first call creates it; every rank must make it."""
    found = _current[0]
    if found is None or found.world is not dist.group.WORLD or found.group is None:
        found = _current[0] = RecoverableGroup(timeout)
    return found


def shut_listeners(sockets: set[tuple[int, str]]) -> None:
    """Let nobody connect any more to a group that is complete.

    Gloo asks nobody who he is. Its listening socket is not needed again, but gloo aborts without
    it: so the kernel drops whatever comes there. Where it cannot, the socket stays open.
    """
    if os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0"):
        return  # ranks connect only when they first talk
    for number, _ in sockets:
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as found:
            if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                guard(found, secrets.token_bytes(32))


def open_sockets() -> set[tuple[int, str]]:
    """The open sockets of this process: number, and a name that no later socket has."""
    found: set[tuple[int, str]] = set()
    if not _OPEN.exists():  # macOS: a broken group is then only found by its timeout
        return found
    for entry in list(_OPEN.iterdir()):
        with suppress(OSError):
            name = str(entry.readlink())
            if name.startswith("socket:"):
                found.add((int(entry.name), name))
    return found


def _connection(number: int, name: str) -> socket.socket | None:
    """A duplicate of a connected socket. None if the socket was closed since, or only listens."""
    with suppress(OSError):
        if str(_OPEN.joinpath(str(number)).readlink()) != name:
            return None  # the number was taken by another
        found = socket.socket(fileno=os.dup(number))
        try:
            found.getpeername()  # not the listening one: gloo aborts without it
        except OSError:
            found.close()
            return None
        return found
    return None


def _is_quiet(connection: socket.socket) -> bool:
    """Whether a connection has carried no data for a while."""
    with suppress(OSError):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        sent, received = struct.unpack_from("=I4xI", info, 44)  # ms ago; see linux/tcp.h
        return bool(min(sent, received) >= _QUIET_MS)
    return True
