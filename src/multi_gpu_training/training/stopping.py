"""What a run does when a signal asks it to end: save where all ranks stop, say so, exit."""

from __future__ import annotations

import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from multi_gpu_training.data.loader import wait_for_no_worker
from multi_gpu_training.distributed.cleanup import end_workers
from multi_gpu_training.distributed.control import NAMES, Control, LeaveWait, exit_code
from multi_gpu_training.distributed.progress_slot import note_count
from multi_gpu_training.errors import CheckpointError

if TYPE_CHECKING:
    from multi_gpu_training.training.manager import MultiGPUTrainingManager


class Stopped(SystemExit):
    """Ends a run that a signal asked to end: with 143, or with 130 after Ctrl-C."""


def start_control(manager: MultiGPUTrainingManager) -> Control:
    """Listen for signals; before every step of the trainer is a boundary. Collective."""
    control = Control(manager.placement, manager.config.grace_s)
    alive = weakref.ref(manager)

    def on_stop() -> None:
        found = alive()
        assert found is not None
        stop(found)

    control.on_stop = on_stop
    control.on_leave = wait_for_no_worker
    manager.trainer.boundary = control
    control.listen()
    weakref.finalize(manager, control.close)  # where nobody calls finish
    return control


def validation_batches(manager: MultiGPUTrainingManager, batches: Iterable[Any]) -> Iterator[Any]:
    """Batches of a validation, which is left once all ranks stop behind it."""
    control = manager.control
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


_END = object()


def stop(manager: MultiGPUTrainingManager, save: Callable[[], Any] | None = None) -> None:
    """Save the step that all ranks stand at, unless it is saved already, and leave. `save`: how,
    where a manager's checkpoint alone would not do. Collective."""
    wait_for_no_worker()
    begun, step = time.perf_counter(), manager.trainer.step
    problem = None
    try:
        outcome = _save(manager, save)
    except CheckpointError as error:
        problem = str(error)
        outcome = f"step {step} is lost: {problem}. An earlier one: --resume auto"
    name = _name(manager)
    took_s = time.perf_counter() - begun
    manager.logger.record("stopped", step=step, signal=name, problem=problem, save_s=took_s)
    manager.console.end_bar()
    _say(manager, f"{name}: {outcome}")
    raise leaving(manager)


def _save(manager: MultiGPUTrainingManager, save: Callable[[], Any] | None) -> str:
    step = manager.trainer.step
    if not manager.config.enable_fault_tolerance:
        return f"stopped at step {step}; nothing saved, as enable_fault_tolerance is false"
    saver = manager.fault_tolerance.saver
    if step == 0:
        return "stopped before the first step; there is nothing to save"
    if manager.saved_step == step:
        saver.settle()
    elif save is not None:
        save()
        saver.settle()
    else:
        manager.check_finite_now()
        manager.save_checkpoint()
    return f"saved step {step}; go on with --resume auto"


def leaving(manager: MultiGPUTrainingManager) -> Stopped:
    """What to raise after a signal."""
    return Stopped(exit_code(manager.control.asked or signal.SIGTERM))


def end_control(manager: MultiGPUTrainingManager) -> None:
    """At the very end of a run: signals are the user's again. One that came too late to stop the
    run ends the process now, with everything kept."""
    control = manager.control
    control.close()
    if isinstance(sys.exception(), Stopped):
        end_workers()  # which a child process would wait for at its exit
    if sys.exception() is None and control.asked is not None:
        _say(manager, f"{_name(manager)}: the run had ended, its state is kept")
        raise leaving(manager)


def _name(manager: MultiGPUTrainingManager) -> str:
    asked = manager.control.asked or signal.SIGTERM
    return NAMES.get(asked, asked.name)


def _say(manager: MultiGPUTrainingManager, text: str) -> None:
    if manager.placement.is_main:
        print(text, file=sys.stderr, flush=True)
