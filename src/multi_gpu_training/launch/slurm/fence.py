"""A fence around the attempts of a job: what an earlier attempt left running ends itself.

When the slurmd of a node dies, Slurm gives the node up and requeues the job, but the tasks there
run on: nobody can end them, and they would write into the same run folder as the new attempt. So
each attempt raises a number in a file on the disk that they share, and every launcher ends its
ranks when it reads a number above its own.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from multi_gpu_training.safe_files import write_atomically

LOOK_EVERY_S = 1.0
# A new attempt waits this long for the launchers of the last one to look.
WAIT_S = 5.0


class Fence:
    """The attempt's number (`restarts` of the job) against the highest one that began."""

    def __init__(self, folder: Path, restarts: int) -> None:
        self._file = folder / "attempt"
        self.restarts = restarts

    def take(self) -> bool:
        """Shut out earlier attempts. False: a later one has begun, and this one must not."""
        # The first attempt finds a number only where job ids have begun anew.
        if self.restarts and self.passed():
            return False
        before = self._number()
        write_atomically(self._file, str(self.restarts))
        if before is not None and before < self.restarts:
            time.sleep(WAIT_S)
        return not self.passed()

    def passed(self) -> bool:
        """Whether a later attempt has begun."""
        number = self._number()
        return number is not None and number > self.restarts

    def watch(self) -> None:
        """Look from time to time; kill this process, and its ranks with it, when passed."""
        threading.Thread(target=self._watch, name="slurm-fence", daemon=True).start()

    def _watch(self) -> None:
        while not self.passed():
            time.sleep(LOOK_EVERY_S)
        print(
            f"slurm: attempt {self._number()} of this job has begun, and this is attempt "
            f"{self.restarts}: the ranks here are ended without saving",
            file=sys.stderr,
            flush=True,
        )
        # Ranks die with their launcher, at once: nothing of theirs reaches the run folder.
        os.kill(os.getpid(), signal.SIGKILL)

    def _number(self) -> int | None:
        # Opening it, rather than asking for its time, makes NFS look at the server.
        try:
            return int(self._file.read_text())
        except (OSError, ValueError):
            return None
