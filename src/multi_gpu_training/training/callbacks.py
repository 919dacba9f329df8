"""Callbacks: how to observe a run or add to it.

Progress bar, log, phase timing, fault injection, `mgt verify` and `mgt bench` use the same events
as your code. An event that no callback overrides costs nothing.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.order import Share
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.training.metrics import MetricsCollector
from multi_gpu_training.training.progress import Progress
from multi_gpu_training.training.step import StepResult


class Run(Protocol):
    """What a callback receives as `run`. The manager is one."""

    config: MultiGPUConfig
    placement: Placement
    progress: Progress
    model: nn.Module

    @property
    def optimizer(self) -> Optimizer: ...

    @property
    def step(self) -> int:
        """Optimizer steps so far, including those before a resume."""

    @property
    def folder(self) -> Path:
        """Where the run writes."""

    @property
    def evaluated(self) -> MetricsCollector:
        """The metrics that this rank collected in the last validation."""

    def say(self, text: str) -> None:
        """Print a line, on rank 0 only."""

    def show_table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table, on rank 0 only."""

    def log(self, **metrics: float | Tensor) -> None:
        """Send your own metrics to every logger, under the current step."""


class RunLog(Protocol):
    """Where messages for people (`info`, `warning`, `error`) and events (`record`) go."""

    def info(self, message: str, **fields: Any) -> None: ...

    def warning(self, message: str, **fields: Any) -> None: ...

    def error(self, message: str, **fields: Any) -> None: ...

    def record(self, event: str, **fields: Any) -> None: ...


class StepLog(Protocol):
    """What the loop needs from the step log. active: false if the user's loop logs for itself."""

    active: bool

    def flush(self) -> None:
        """Log the steps not logged yet; raise if their loss is not finite."""

    def end_epoch(self) -> None:
        """Wait for pending metrics; steps not logged yet count towards the epoch only."""

    def went_back(self) -> None:
        """Tell the log that the run returned to an earlier step."""


@dataclass(frozen=True)
class TrainingFault:
    """Something went wrong at `step`, and `action` was taken."""

    kind: str
    action: str
    text: str
    step: int
    facts: Mapping[str, Any] = field(default_factory=dict)


class Callback:
    """Override the events you need. A whole run looks like this:

        on_setup                        model, data and optimizer are ready, state is resumed
        for each epoch:
            on_epoch_begin              again if a rollback returns into the epoch
            for each step:
                on_step_begin
                on_step_end             the weights have moved
                on_log                  every `log_every` steps, with their metrics
                on_checkpoint           rank 0: the files of a checkpoint are safe on the disk
            on_validation
            on_epoch_end
        on_fault                        whenever something went wrong: what, and what was done
        on_end                          always, also after a failure

    and these are the parts of a step, for timing:

        on_input                        about to ask for a batch
        on_batch                        it has arrived
        on_data_end                     no batch is left, or the epoch ends early
        on_forward                      about to compute the loss of a micro-batch
        on_backward                     about to compute its gradients
        on_exchange                     this rank has its gradients; ranks now wait for each other
        on_optimizer                    last micro-batch only: the gradients of the whole step,
                                        before clipping (fp16: still scaled)
        on_micro_batch_end              also after a failure
        on_save_begin, on_save_end      training pauses while its state is copied
        on_compare_begin, on_compare_end
                                        around the eager step that a CUDA graph is compared with

    Every rank gets every event, except on_checkpoint (rank 0) and on_fault (the rank that reports
    it). Your own loop around `train_step` gets step events, but no epoch and input events. A step
    replayed as a CUDA graph has no events from on_forward to on_micro_batch_end. Checkpoints are
    written in the background, so on_checkpoint comes a few steps after the step that was saved.

    Rarely, the run undoes steps and computes them again, for example when a recorded step fails
    its comparison with the eager one. Then on_step_end comes again for these steps, so that what
    you set or count stays right. Set `watches_only` in a callback that changes nothing.
    """

    watches_only = False

    def on_setup(self, run: Run) -> None: ...

    def on_epoch_begin(self, run: Run, epoch: int) -> None: ...

    def on_step_begin(self, run: Run, step: int) -> None: ...

    def on_input(self, run: Run) -> None: ...

    def on_batch(self, run: Run) -> None: ...

    def on_data_end(self, run: Run) -> None: ...

    def on_forward(self, run: Run, share: Share) -> None: ...

    def on_backward(self, run: Run, loss: Tensor) -> None: ...

    def on_exchange(self, run: Run) -> None: ...

    def on_optimizer(self, run: Run) -> None: ...

    def on_micro_batch_end(self, run: Run) -> None: ...

    def on_step_end(self, run: Run, result: StepResult) -> None: ...

    def on_log(self, run: Run, metrics: Mapping[str, float], step: int) -> None: ...

    def on_save_begin(self, run: Run) -> None: ...

    def on_save_end(self, run: Run) -> None: ...

    def on_compare_begin(self, run: Run) -> None: ...

    def on_compare_end(self, run: Run) -> None: ...

    def on_validation(self, run: Run, metrics: Mapping[str, float]) -> None: ...

    def on_epoch_end(self, run: Run, epoch: int, metrics: Mapping[str, float]) -> None: ...

    def on_checkpoint(self, run: Run, path: Path) -> None: ...

    def on_fault(self, run: Run, fault: TrainingFault) -> None: ...

    def on_end(self, run: Run) -> None: ...


# Per event, the methods to call: those that somebody overrides.
Listeners = tuple[Callable[..., None], ...]
_NOTHING = {name: does for name, does in vars(Callback).items() if name.startswith("on_")}
EVENTS = tuple(_NOTHING)


# Event names of other libraries whose closest match here would be the wrong event.
_ELSEWHERE = {
    "on_fit_start": "on_setup",
    "on_train_start": "on_setup",
    "on_train_begin": "on_setup",
    "on_train_batch_start": "on_step_begin",
    "on_train_batch_end": "on_step_end",
    "on_train_epoch_start": "on_epoch_begin",
    "on_train_epoch_end": "on_epoch_end",
    "on_validation_end": "on_validation",
    "on_validation_epoch_end": "on_validation",
    "on_evaluate": "on_validation",
    "on_before_optimizer_step": "on_optimizer",
    "on_pre_optimizer_step": "on_optimizer",
    "on_save": "on_checkpoint",
    "on_save_checkpoint": "on_checkpoint",
    "on_exception": "on_fault",
    "on_train_end": "on_end",
    "on_fit_end": "on_end",
}


def check_callbacks(callbacks: Any) -> None:
    """Refuse methods that would never be called, or could not be, and say what to write instead."""
    if isinstance(callbacks, (Callback, Hook)) or not isinstance(callbacks, Iterable):
        raise ConfigError(f"callbacks={callbacks!r:.100}: give a list of them, callbacks=[...]")
    problems: list[str] = []
    for one in callbacks:
        if isinstance(one, Callback):
            problems += _misfits(one)
        elif not isinstance(one, Hook):
            made = f"write {one.__name__}()" if isinstance(one, type) else "derive it from Callback"
            problems.append(f"callbacks holds {one!r:.100}, which is not a Callback object; {made}")
    if problems:
        raise ConfigError(problems)


def _misfits(callback: Callback) -> list[str]:
    kinds = [kind for kind in type(callback).__mro__ if issubclass(kind, Callback)]
    name, problems = type(callback).__name__, []
    for event in dict.fromkeys(n for kind in kinds for n in vars(kind) if n.startswith("on_")):
        if event not in EVENTS:
            near = difflib.get_close_matches(event, EVENTS, 1, 0.75)
            meant = _ELSEWHERE.get(event) or (near[0] if near else None)
            problems.append(
                f"{name}.{event} would never be called: there is no such event; "
                + (f"name it {meant}" if meant else f"there are {', '.join(EVENTS)}")
            )
        elif getattr(type(callback), event) is not _NOTHING[event]:
            wanted = list(inspect.signature(_NOTHING[event]).parameters)
            try:
                inspect.signature(getattr(callback, event)).bind(*wanted[1:])
            except TypeError:
                problems.append(
                    f"{name}.{event} is called with other arguments; write "
                    f"def {event}({', '.join(wanted)})"
                )
            except ValueError:  # written in C: it has no signature to inspect
                pass
    return problems


class CallbackList:
    """The callbacks of one run: for each event, a tuple of the methods that listen to it.

    for call in callbacks.on_step_end:
        call(result)
    """

    on_setup: Listeners
    on_epoch_begin: Listeners
    on_step_begin: Listeners
    on_input: Listeners
    on_batch: Listeners
    on_data_end: Listeners
    on_forward: Listeners
    on_backward: Listeners
    on_exchange: Listeners
    on_optimizer: Listeners
    on_micro_batch_end: Listeners
    on_step_end: Listeners
    on_log: Listeners
    on_save_begin: Listeners
    on_save_end: Listeners
    on_compare_begin: Listeners
    on_compare_end: Listeners
    on_validation: Listeners
    on_epoch_end: Listeners
    on_checkpoint: Listeners
    on_fault: Listeners
    on_end: Listeners

    def __init__(self, run: Run | None = None, members: Iterable[Callback | Hook] = ()) -> None:
        self._run = run
        self._members: list[tuple[Callback, dict[str, Callable[..., None]]]] = []
        self.redo_step_end: Listeners = ()  # on_step_end of a step that is computed again
        self._sort(EVENTS)
        self.extend(members)

    @property
    def members(self) -> list[Callback]:
        return [member for member, _ in self._members]

    def extend(self, members: Iterable[Callback | Hook]) -> None:
        """Add callbacks; events call them in this order."""
        for member in members:
            self.add(_HookAdapter(member) if isinstance(member, Hook) else member)

    def add(self, callback: Callback) -> None:
        # Only the events it listens to: timing adds and removes callbacks between steps.
        heard: dict[str, Callable[..., None]] = {
            event: functools.partial(getattr(callback, event), self._run)
            for event in EVENTS
            if getattr(type(callback), event) is not _NOTHING[event]
            if not isinstance(callback, _HookAdapter) or callback.listens(event)
        }
        self._members.append((callback, heard))
        self._sort(heard)

    def remove(self, callback: Callback) -> None:
        """Remove a callback if it is present. An event being delivered is not affected."""
        for place, (member, heard) in enumerate(self._members):
            if member is callback:
                del self._members[place]
                self._sort(heard)
                return

    def only_watch(self, events: Iterable[str]) -> bool:
        """Whether nobody who listens to one of these events may change anything."""
        return all(
            member.watches_only or heard.keys().isdisjoint(events)
            for member, heard in self._members
        )

    def _sort(self, events: Iterable[str]) -> None:
        for event in events:
            calls = [(m, heard[event]) for m, heard in self._members if event in heard]
            setattr(self, event, tuple(call for _, call in calls))
            # Steps that are computed again must not be counted twice by what only watches.
            if event == "on_step_end":
                self.redo_step_end = tuple(call for m, call in calls if not m.watches_only)


class Hook:
    """Deprecated: use `Callback`. The same events under their old names and arguments."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        warnings.warn(
            f"{cls.__name__} is a Hook, which is deprecated; derive from Callback: on_run_start is "
            "on_setup, on_run_end is on_end, and on_step_end gets a StepResult with `.step`",
            DeprecationWarning,
            stacklevel=2,
        )

    def on_run_start(self, manager: Any) -> None: ...

    def on_step_end(self, manager: Any, step: int) -> None: ...

    def on_epoch_end(self, manager: Any, epoch: int, metrics: dict[str, float]) -> None: ...

    def on_checkpoint(self, manager: Any, path: Path) -> None: ...

    def on_run_end(self, manager: Any) -> None: ...


class _HookAdapter(Callback):
    """Makes a Hook usable as a Callback."""

    _NAMES = {
        "on_setup": "on_run_start",
        "on_step_end": "on_step_end",
        "on_epoch_end": "on_epoch_end",
        "on_checkpoint": "on_checkpoint",
        "on_end": "on_run_end",
    }

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def listens(self, event: str) -> bool:
        name = self._NAMES[event]
        return getattr(type(self.hook), name) is not getattr(Hook, name)

    def on_setup(self, run: Run) -> None:
        self.hook.on_run_start(run)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        self.hook.on_step_end(run, result.step)

    def on_epoch_end(self, run: Run, epoch: int, metrics: Mapping[str, float]) -> None:
        self.hook.on_epoch_end(run, epoch, dict(metrics))

    def on_checkpoint(self, run: Run, path: Path) -> None:
        self.hook.on_checkpoint(run, path)

    def on_end(self, run: Run) -> None:
        self.hook.on_run_end(run)
