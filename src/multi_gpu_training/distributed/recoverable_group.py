"""A gloo group that can be broken and rebuilt while the processes keep running.

Gloo has no abort. A rank that cannot finish a step says so in the store and shuts its
connections. Whoever waits for it gets an error at once, finds that word in the store, and does
the same. Then all ranks connect again, under a new number.
"""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from multi_gpu_training.distributed.store_relay import guard
from multi_gpu_training.torch_internals import default_store

_OPEN = Path("/proc/self/fd")


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
        self.group = None
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
        for number, name in self._sockets:
            with suppress(OSError):
                if str(_OPEN.joinpath(str(number)).readlink()) != name:
                    continue  # closed meanwhile, and the number taken by another
                with socket.socket(fileno=os.dup(number)) as connection:
                    connection.getpeername()  # not the listening one: gloo aborts without it
                    connection.shutdown(socket.SHUT_RDWR)


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
