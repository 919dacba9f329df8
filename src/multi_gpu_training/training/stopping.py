"""What a run does when a signal asks it to end: save where all ranks stop, say so, exit."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from multi_gpu_training.distributed.control import NAMES, Control, exit_code
from multi_gpu_training.errors import CheckpointError

if TYPE_CHECKING:
    from multi_gpu_training.training.manager import MultiGPUTrainingManager


class Stopped(SystemExit):
    """Ends a run that a signal asked to end: with 143, or with 130 after Ctrl-C."""


def start_control(manager: MultiGPUTrainingManager) -> Control:
    """Listen for signals; the end of every step of the trainer is a boundary."""
    control = Control(manager.placement, manager.config.grace_s)
    control.listen()
    manager.trainer.after_move = control.cross
    weakref.finalize(manager, control.close)  # where nobody calls finish
    return control


def until_stop(batches: Iterable[Any], control: Control) -> Iterator[Any]:
    """Batches of an evaluation, which nobody needs any more once all ranks stop at its end."""
    for batch in batches:
        if control.stops_next:
            return
        yield batch


def stop(manager: MultiGPUTrainingManager) -> NoReturn:
    """Save the step that all ranks stand at and leave. Collective."""
    save_stop(manager)
    manager.control.leave()
    raise leaving(manager)


def save_stop(manager: MultiGPUTrainingManager) -> None:
    """A checkpoint of this step, safe on the disk, unless there is one; told in one line."""
    begun, step = time.perf_counter(), manager.trainer.step
    problem = None
    if not manager.config.enable_fault_tolerance:
        outcome = f"stopped at step {step}; nothing saved, as enable_fault_tolerance is false"
    else:
        try:
            if manager.saved_step == step:
                manager.fault_tolerance.saver.settle()
            else:
                manager.save_checkpoint()
            outcome = f"saved step {step}; go on with --resume auto"
        except CheckpointError as error:
            problem = str(error)
            outcome = f"step {step} is lost: {problem}. An earlier one: --resume auto"
    name = _name(manager)
    took_s = time.perf_counter() - begun
    manager.logger.record("stopped", step=step, signal=name, problem=problem, save_s=took_s)
    manager.console.end_bar()
    _say(manager, f"{name}: {outcome}")


def leaving(manager: MultiGPUTrainingManager) -> Stopped:
    """What to raise after a signal."""
    asked = manager.control.asked
    assert asked is not None
    return Stopped(exit_code(asked))


def end_control(manager: MultiGPUTrainingManager) -> None:
    """At the very end of a run: signals are the user's again. One that came too late to stop the
    run ends the process now, with everything kept."""
    control = manager.control
    control.close()
    if sys.exception() is None and control.asked is not None:
        if not control.reached:
            _say(manager, f"{_name(manager)}: the run had ended, its state is kept")
        raise leaving(manager)


def _name(manager: MultiGPUTrainingManager) -> str:
    asked = manager.control.asked
    assert asked is not None
    return NAMES.get(asked, asked.name)


def _say(manager: MultiGPUTrainingManager, text: str) -> None:
    if manager.placement.is_main:
        print(text, file=sys.stderr, flush=True)
