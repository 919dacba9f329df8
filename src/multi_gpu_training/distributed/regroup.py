"""A group of ranks that can be broken and made anew while the processes live on.

Gloo has no abort. A rank that cannot finish a step says so in the store and shuts its
connections; whoever waits for it gets an error at once, finds the word in the store, and does the
same. Then all of them connect again, under a new number.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_OPEN = Path("/proc/self/fd")


class BreakableGroup:
    """A gloo group over all ranks. `number` counts those of this process, alike on every rank."""

    def __init__(self, timeout: timedelta, number: int = 0) -> None:
        self.number = number
        self.timeout = timeout
        self.world = dist.group.WORLD
        before = _sockets()
        self.group: Any = dist.new_group(backend="gloo", timeout=timeout)
        self._sockets = _sockets() - before

    def announce(self) -> None:
        """Say in the store that this group is about to be broken, and that all may go on."""
        _get_default_store().set(self._key, "broken")

    @property
    def announced(self) -> bool:
        """Whether a rank has said so. False as well where the store is gone."""
        with suppress(RuntimeError):
            return bool(_get_default_store().check([self._key]))
        return False

    def renew(self) -> BreakableGroup:
        """Break this group and connect anew. Waits for all ranks to do so."""
        self._break()
        dist.destroy_process_group(self.group)
        self.group = None
        fresh = BreakableGroup(self.timeout, self.number + 1)
        _current[0] = fresh
        return fresh

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


_current: list[BreakableGroup | None] = [None]  # one a process, as torch's own group is


def breakable_group(timeout: timedelta) -> BreakableGroup:
    """This process's breakable group over all ranks of the world; made by the first call, which
    every rank must take part in."""
    found = _current[0]
    if found is None or found.world is not dist.group.WORLD or found.group is None:
        found = _current[0] = BreakableGroup(timeout)
    return found


def _sockets() -> set[tuple[int, str]]:
    """The open sockets of this process: number, and a name that no later socket has."""
    found = set()
    for entry in list(_OPEN.iterdir()):
        with suppress(OSError):
            name = str(entry.readlink())
            if name.startswith("socket:"):
                found.add((int(entry.name), name))
    return found
