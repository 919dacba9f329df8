"""One writer at a time for a run in object storage.

    lease/00000003.json    who writes, and a count that grows while it lives

Object storage has no locks, but it can create a file unless it is there. So each writer takes the
next number; the highest number is the one that may write, and whoever finds a higher one than its
own has lost the run and writes no more. A writer that died is known by a count that stands still.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel

from multi_gpu_training.distributed.identity import Identity
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.safe_files import Count, parse_json
from multi_gpu_training.safe_output import printable
from multi_gpu_training.storage.remote_folder import RemoteFolder, StorageError

BEAT_S = 10.0
BEATS_MISSED = 4.5  # after so many a writer counts as dead
_LARGEST = 64 * 1024


class LeaseFile(BaseModel):
    """Who holds a run. `process` is what a process is known by on its machine."""

    host: str
    pid: Count
    process: str
    run_id: str
    attempt: Count
    since: str
    beat_s: float
    beat: Count = 0
    released: bool = False


class LeaseLost(Exception):
    """Another machine continues the run."""


class Lease:
    """The right to write one run. Make it with `take_lease`."""

    def __init__(self, folder: RemoteFolder, generation: int, facts: LeaseFile) -> None:
        self.generation = generation
        self.folder = folder
        self._facts = facts

    def check(self) -> None:
        """Raise LeaseLost if another writer has taken the run."""
        newest = _newest(self.folder)
        if newest > self.generation:
            by = _read(self.folder, newest)
            who = "another machine" if by is None else f"process {by.pid} on {printable(by.host)}"
            raise LeaseLost(f"{who} has continued the run at {self.folder.url}")

    def renew(self) -> None:
        """Show that this writer lives."""
        self.check()
        self._facts.beat += 1
        self._write()

    def release(self) -> None:
        """Let the next writer begin without waiting."""
        self._facts.released = True
        self._write()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Renew it beside something that takes long, such as a download."""
        done = threading.Event()

        def renew() -> None:
            while not done.wait(self._facts.beat_s):
                with contextlib.suppress(StorageError, LeaseLost):  # seen by the next check
                    self.renew()

        thread = threading.Thread(target=renew, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _write(self) -> None:
        self.folder.write(_name(self.generation), _bytes(self._facts))


def take_lease(
    folder: RemoteFolder,
    identity: Identity,
    say: Callable[[str], None] = lambda _: None,
    beat_s: float = BEAT_S,
) -> Lease:
    """Become the writer of a run, or say who is. Waits to see whether a silent one is dead."""
    mine = LeaseFile(
        host=socket.gethostname(),
        pid=os.getpid(),
        process=_process_name(os.getpid()),
        run_id=identity.run_id,
        attempt=identity.attempt,
        since=datetime.now().astimezone().isoformat(timespec="seconds"),
        beat_s=beat_s,
    )
    while True:
        newest = _newest(folder)
        if newest:
            _wait_until_free(folder, newest, mine, say)
        if folder.create(_name(newest + 1), _bytes(mine)):
            older = [_name(number) for number in range(max(1, newest - 3), newest + 1)]
            folder.delete(older)
            return Lease(folder, newest + 1, mine)


def holder(folder: RemoteFolder) -> LeaseFile | None:
    """Who took the run last; `released` says whether that is over."""
    newest = _newest(folder)
    return _read(folder, newest) if newest else None


def _wait_until_free(
    folder: RemoteFolder, generation: int, mine: LeaseFile, say: Callable[[str], None]
) -> None:
    """Return once the holder of this generation has let go or is dead; raise if it lives."""
    found = _read(folder, generation)
    if found is not None and (found.released or _is_over(found, mine)):
        return
    wait_s = BEATS_MISSED * (BEAT_S if found is None else min(found.beat_s, 10 * BEAT_S))
    if found is None:
        holder = "an unknown process"
    else:
        holder = f"process {found.pid} on {printable(found.host)} since {printable(found.since)}"
    say(f"{folder.url} is held by {holder}; waiting {wait_s:.0f} s to see whether it is alive")
    begun = time.monotonic()
    while time.monotonic() - begun < wait_s:
        time.sleep(min(1.0, wait_s / 10))
        now = _read(folder, generation)
        if now is not None and now.released:
            return
        if now != found or _newest(folder) > generation:
            raise ConfigError(
                f"the run {folder.url} is being trained by {holder}; wait for it, stop it, or "
                "choose another --run-name",
                code="MGT705",
            )


def _is_over(found: LeaseFile, mine: LeaseFile) -> bool:
    """Whether it is plain that the holder no longer trains."""
    # Ranks that this very launch started before, and started again.
    if found.run_id and found.run_id == mine.run_id and found.attempt < mine.attempt:
        return True
    if found.process == mine.process:
        return True
    # A process of this machine that we would see if it lived.
    place, _, _ = found.process.rpartition("/")
    here, _, _ = mine.process.rpartition("/")
    return bool(here) and place == here and _process_name(found.pid) != found.process


def _process_name(pid: int) -> str:
    """What tells a process from all others: boot, process namespace, number, time of its start."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - not a path
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, IndexError):
        return ""
    begun = "" if state[0] in "ZX" else state[19]
    return f"{boot}/{space}/{pid}-{begun}"


def _newest(folder: RemoteFolder) -> int:
    numbers = [re.fullmatch(r"lease/([0-9]{8})\.json", name) for name in folder.files("lease")]
    return max((int(number[1]) for number in numbers if number), default=0)


def _read(folder: RemoteFolder, generation: int) -> LeaseFile | None:
    name = _name(generation)
    with contextlib.suppress(FileNotFoundError, ValueError):
        return parse_json(folder.read(name, _LARGEST), LeaseFile, name)
    return None


def _name(generation: int) -> str:
    return f"lease/{generation:08d}.json"


def _bytes(facts: LeaseFile) -> bytes:
    return json.dumps(facts.model_dump()).encode()
