"""How long training waits for data, and what would help."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from multi_gpu_training.portability import usable_cores
from multi_gpu_training.training.callbacks import Callback, Run

NOTICEABLE = 0.1  # share of the time from which on it is worth a word


class InputWait(Callback):
    """Measures, batch by batch, how long the device had nothing to do for want of data.

    On a GPU, a wait of the CPU costs nothing while earlier steps are still being computed.
    """

    watches_only = True

    def __init__(
        self, device: torch.device, resident: bool, tell: Callable[[str], None] = lambda _: None
    ) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" and not resident else None
        self._tell = tell
        self._resident = resident  # data on the device are never waited for
        self._busy = False
        self._told = False
        self.total_s = 0.0  # since the run began
        self.reset()

    def reset(self) -> None:
        self.batches = 0
        self.waited_s = 0.0
        self._started = self._asked = time.perf_counter()

    def on_epoch_begin(self, run: Run, epoch: int) -> None:
        self.reset()

    def on_input(self, run: Run) -> None:
        if self._event is not None and self.batches:
            self._event.record()  # behind the work of the batch before
            self._busy = True
        self._asked = time.perf_counter()

    def on_batch(self, run: Run) -> None:
        self.batches += 1
        if self._event is None or not self._busy or self._event.query():
            waited = time.perf_counter() - self._asked
            self.waited_s += waited
            self.total_s += waited

    def on_data_end(self, run: Run) -> None:
        """Say what would help, once."""
        advice = self.advice(run.config.num_workers)
        if advice is not None and not self._told:
            self._tell(advice)
            self._told = True
        self.batches = 0

    @property
    def share(self) -> float:
        """The part of the time since the last reset that was spent waiting."""
        if self._resident:
            return 0.0
        elapsed = time.perf_counter() - self._started
        return self.waited_s / elapsed if elapsed > 0 else 0.0

    def advice(self, workers: int) -> str | None:
        """What to say about it; None where there is nothing to gain."""
        if self._resident or self.share < NOTICEABLE or self.batches < 10:
            return None
        elapsed = time.perf_counter() - self._started
        needed = workers_needed(workers, elapsed, self.waited_s)
        cores = len(usable_cores())
        text = f"input-bound: {self.share:.0%} of the step waits for data; "
        more = needed - workers
        if needed > cores:
            return text + (
                f"{needed} workers would hide it, but there are {cores} cores: make a sample "
                "cheaper, or cache it"
            )
        plural = "s" if more > 1 else ""
        return text + f"{more} more worker{plural} (num_workers={needed}) would hide it"


def workers_needed(workers: int, elapsed_s: float, waited_s: float) -> int:
    """Workers that load as fast as the device computes: loading takes `workers` (or this process
    alone) all of the time while it is the limit."""
    computing = max(elapsed_s - waited_s, 1e-9)
    loading = waited_s if workers == 0 else workers * elapsed_s
    return max(workers + 1, -int(-loading // computing))
