"""When a run ends: by max_steps, early stopping or on request; or at once, by a signal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.distributed.cleanup import end_workers
from multi_gpu_training.distributed.control import Control, LeaveWait, exit_code
from multi_gpu_training.distributed.progress_slot import INPUT, note_count, note_phase
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.training.progress import Progress
from multi_gpu_training.training.step_state import StepState

_END = object()


@dataclass
class Stopping:
    """What ends a run without a signal. All ranks see the same."""

    config: MultiGPUConfig
    progress: Progress
    state: StepState
    last_epoch: int | None = None  # the epoch after which the run was asked to end

    @property
    def should_stop(self) -> bool:
        """True once max_steps is reached, early stopping has decided, or the epoch after which the
        run was asked to end is over."""
        return self.reached_max_steps or self.progress.out_of_patience or self.asked_to_end

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to train, and all of it is recorded."""
        recorded = self.progress.epochs_done >= self.config.epochs
        ended = self.progress.out_of_patience or self.asked_to_end
        return self.is_complete or ended or recorded

    @property
    def reached_max_steps(self) -> bool:
        return self.config.max_steps is not None and self.state.step >= self.config.max_steps

    @property
    def is_complete(self) -> bool:
        """Whether max_steps is reached and the epoch of the last step is recorded."""
        progress = self.progress
        recorded = progress.unfinished is not None or progress.epochs_done > self.state.epoch
        return self.reached_max_steps and recorded

    @property
    def asked_to_end(self) -> bool:
        return self.last_epoch is not None and self.progress.epochs_done > self.last_epoch

    def end_after_epoch(self) -> None:
        """End the run once the current epoch is closed. Every rank must call this."""
        if self.progress.epoch is None:
            raise ConfigError(
                "this training does not go by epochs of the manager; use stop, which saves first"
            )
        self.last_epoch = self.progress.epochs_done


class Stopped(SystemExit):
    """Ends a run after a stop signal: with exit code 143, or 130 after Ctrl-C."""


def training_batches(
    batches: Iterable[Any],
    control: Control,
    state: StepState,
) -> Iterator[Any]:
    """Yield batches one by one. The wait for a batch ends if all ranks stop right before it."""
    source, callbacks = iter(batches), state.callbacks
    try:
        while True:
            boundary = state.micro == 0  # no step is in progress
            if boundary and control.ends_next:
                control.arrive()
            note_phase(INPUT)
            for call in callbacks.on_input:
                call()
            control.waiting = boundary  # a signal may only cut off a wait that no step needs
            batch = next(source, _END)
            control.waiting = False
            if batch is _END:
                return
            for call in callbacks.on_batch:
                call()
            yield batch
    except LeaveWait:
        control.arrive()
    finally:
        control.waiting = False
        for call in callbacks.on_data_end:
            call()


def validation_batches(batches: Iterable[Any], control: Control) -> Iterator[Any]:
    """Batches of a validation, which ends early once all ranks are to stop after it."""
    source, number = iter(batches), 0
    try:
        while not control.ends_next:
            control.waiting = True
            batch = next(source, _END)
            control.waiting = False
            if batch is _END:
                break
            number += 1
            note_count(number)
            yield batch
    except LeaveWait:
        pass
    control.arrive()


def leave(control: Control, outcome: str) -> None:
    """Report what became of a run after a stop signal, and end this process."""
    if control.is_main:
        print(f"{control.asked_by}: {outcome}", file=sys.stderr, flush=True)
    raise Stopped(exit_code(control.asked or signal.SIGTERM))


def end_control(control: Control, error: BaseException | None) -> None:
    """At the very end of a run, successful or failed: give signals back to the user. A signal that
    came too late to stop the run ends the process now, with everything saved."""
    control.close()
    if isinstance(error, Stopped):
        end_workers()  # which a child process would wait for at its exit
    if error is None and control.asked is not None:
        leave(control, "the run had ended, its state is kept")
