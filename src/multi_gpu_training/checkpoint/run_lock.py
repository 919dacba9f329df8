"""One run at a time in a run folder.

The kernel holds the lock for the process that has the file open and drops it however that process
dies, so a killed run never blocks the one that resumes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from multi_gpu_training.distributed import round_lease
from multi_gpu_training.distributed.identity import REQUEUES
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.redaction import redact_command
from multi_gpu_training.safe_files import Count, open_regular, parse_json
from multi_gpu_training.safe_output import printable

NAME = ".lock"
# A killed process keeps its files open until the kernel has cleaned up, which a GPU makes slow.
GRACE_S = 3.0
# A node that was cut off ends its ranks when it has lost the others, and they end in their time.
OTHER_NODE_S = 20.0
# A node that lost power holds its locks on a network disk until the server's lease on it ends.
GRACE_AFTER_REQUEUE_S = 120.0

_held: dict[str, tuple[int, int]] = {}  # folder -> (open file, how often it is held)


class RunLock:
    """The lock on a run folder, held by this process until `release`.

    A process does not lock itself out: a second run of it in the same folder shares the lock.
    """

    def __init__(self, folder: Path, grace_s: float | None = None) -> None:
        if grace_s is None:
            requeued = os.environ.get(REQUEUES, "0") != "0"
            grace_s = OTHER_NODE_S if round_lease.bound() else GRACE_S
            grace_s = GRACE_AFTER_REQUEUE_S if requeued else grace_s
        self._key: str | None = str(folder.resolve())
        if self._key in _held:
            descriptor, count = _held[self._key]
            _held[self._key] = (descriptor, count + 1)
            return
        descriptor = open_regular(folder / NAME, os.O_RDWR | os.O_CREAT)
        try:
            held = _take(descriptor, folder, grace_s)
        except BaseException:
            os.close(descriptor)
            raise
        if not held:
            os.close(descriptor)
            self._key = None
            return
        _held[self._key] = (descriptor, 1)
        _sign(descriptor)

    @property
    def held(self) -> bool:
        """False where the file system has no locks: then another run may be in the folder."""
        return self._key is not None

    def release(self) -> None:
        key, self._key = self._key, None
        if key is None or key not in _held:
            return
        descriptor, count = _held.pop(key)
        if count > 1:
            _held[key] = (descriptor, count - 1)
        else:
            os.close(descriptor)


def owner(folder: Path) -> dict[str, Any] | None:
    """Return who trains in this folder now, if anyone does."""
    try:
        descriptor = open_regular(folder / NAME, os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _signature(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)
    return None


def _take(descriptor: int, folder: Path, grace_s: float) -> bool:
    """Return True once the lock is ours, False if the file system has no locks."""
    deadline = time.monotonic() + grace_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                by = {"pid": "?", "host": "?", "since": "?", "command": "?"}
                by |= _signature(descriptor)
                raise ConfigError(
                    f"the run {folder} is in use by process {by['pid']} on {by['host']} since "
                    f"{by['since']} ({by['command']}); wait for it, stop it, or choose another "
                    "--run-name",
                    code="MGT705",
                ) from None
            time.sleep(0.05)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise
            print(
                f"{folder} is on a file system without locks ({error.strerror}); make sure "
                "that no other run uses it",
                file=sys.stderr,
            )
            return False


def _sign(descriptor: int) -> None:
    signature = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": " ".join(redact_command(sys.orig_argv))[:500],
    }
    # On a full disk the lock holds all the same; nobody can read whose it is.
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(signature).encode(), 0)


class _Signature(BaseModel):
    pid: Count
    host: str
    since: str
    command: str


def _signature(descriptor: int) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = parse_json(os.pread(descriptor, 4096, 0), _Signature, NAME)
        return {n: printable(v) if isinstance(v, str) else v for n, v in found.model_dump().items()}
    return {}


def _forget() -> None:
    """Let go of the locks in a forked child: a loader worker must not hold its parent's."""
    for descriptor, _ in _held.values():
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
