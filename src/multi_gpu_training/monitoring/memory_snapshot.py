"""Which lines of code hold the GPU's memory at its peak.

torch's allocator can note the stack of every allocation. `held_at_peak` goes back through what it
noted to the moment when most was allocated, and adds up what was alive then by the stack that
allocated it. `MemoryWatch` does so where it is asked to, for two steps, and when memory runs out.
Until then nothing is noted, which would cost a few microseconds per allocation.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.monitoring.events import StructuredLogger
from multi_gpu_training.monitoring.memory_view import (
    BEFORE,
    FOLDER,
    MOST_FRAMES,
    MOST_HOLDERS,
    Holder,
    MemorySnapshot,
)
from multi_gpu_training.safe_files import make_private, write_atomically
from multi_gpu_training.safe_output import printable
from multi_gpu_training.torch_internals import (
    memory_snapshot,
    note_allocations,
    on_out_of_memory,
)
from multi_gpu_training.training.callbacks import Callback, CallbackList, Run
from multi_gpu_training.training.step import StepResult

STEPS = 2  # that are noted on request: the first may still allocate what is then kept
MOST_OOM = 3  # snapshots of a run that runs out of memory again and again
# Frames that say nothing to who looks for their own line.
LIBRARIES = ("/torch/", "/multi_gpu_training/", "<frozen", "importlib")


def held_at_peak(snapshot: dict[str, Any], device: int, why: str, step: int) -> MemorySnapshot:
    """What was alive when most was, from torch's snapshot of its allocator."""
    segments = [s for s in snapshot.get("segments", ()) if s.get("device", 0) == device]
    traces = snapshot.get("device_traces") or []
    trace = traces[device] if device < len(traces) else []
    alive: dict[int, tuple[int, list[Any]]] = {}
    for segment in segments:
        address = segment.get("address", 0)
        for block in segment.get("blocks", ()):
            at = block.get("address", address)
            if block.get("state") == "active_allocated":
                alive[at] = block.get("requested_size") or block["size"], block.get("frames") or []
            address = at + block["size"]
    alive = _at_peak(alive, trace)
    held: dict[tuple[str, ...], list[int]] = {}
    for size, frames in alive.values():
        held.setdefault(_stack(frames), []).append(size)
    largest = sorted(held.items(), key=lambda item: -sum(item[1]))[:MOST_HOLDERS]
    return MemorySnapshot(
        why="asked for" if why == "asked for" else "out of memory",
        step=step,
        bytes=sum(size for size, _ in alive.values()),
        reserved=sum(segment.get("total_size", 0) for segment in segments),
        holders=[
            Holder(bytes=sum(sizes), blocks=len(sizes), line=_own_line(stack), stack=list(stack))
            for stack, sizes in largest
        ],
    )


def _at_peak(
    alive: dict[int, tuple[int, list[Any]]], trace: Sequence[dict[str, Any]]
) -> dict[int, tuple[int, list[Any]]]:
    """The blocks that were alive at the peak: allocations and releases undone from the end."""
    born: dict[int, list[Any]] = {}  # place of a release -> stack of its allocation
    open_: dict[int, list[Any]] = {}
    for place, event in enumerate(trace):
        if event["action"] == "alloc":
            open_[event["addr"]] = event.get("frames") or []
        elif event["action"] == "free_completed":
            born[place] = open_.pop(event["addr"], [])
    total = highest = sum(size for size, _ in alive.values())
    peak_at = len(trace)
    for place in range(len(trace) - 1, -1, -1):
        action, size = trace[place]["action"], trace[place].get("size", 0)
        total += size * ((action == "free_completed") - (action == "alloc"))
        if total > highest:
            highest, peak_at = total, place
    for place in range(len(trace) - 1, peak_at - 1, -1):
        event = trace[place]
        if event["action"] == "alloc":
            alive.pop(event["addr"], None)
        elif event["action"] == "free_completed":
            alive[event["addr"]] = event.get("size", 0), born[place]
    return alive


def _stack(frames: Sequence[Any]) -> tuple[str, ...]:
    shown = [
        printable(f"{frame.get('filename', '?')}:{frame.get('line', 0)} {frame.get('name', '?')}")
        for frame in frames
        if isinstance(frame, dict)
    ]
    own = [line for line in shown if not any(part in line for part in LIBRARIES)]
    # The innermost frame says which operation, the own ones which line of the user's.
    kept = [*shown[:2], *(line for line in own if line not in shown[:2])]
    return tuple(line[:500] for line in kept[:MOST_FRAMES])


def _own_line(stack: tuple[str, ...]) -> str:
    """The user's innermost line; a library's where there is none."""
    own = (line for line in stack if not any(part in line for part in LIBRARIES))
    return next(own, stack[0] if stack else BEFORE)


class MemoryWatch(Callback):
    """Takes snapshots of this rank's device into RUN/memory, on request and when memory runs out.

    The first time it does, stacks are not known: they are noted from then on, so that a run that
    runs out again, or is started again after it, says which line needs the memory.
    was_short: it ran out before these ranks were started. step: the one that training is at.
    snapshot: reads the allocator.
    """

    watches_only = True

    def __init__(
        self,
        device: torch.device,
        folder: Path,
        rank: int,
        logger: StructuredLogger,
        callbacks: CallbackList,
        was_short: bool,
        step: Callable[[], int],
        snapshot: Callable[[], dict[str, Any]] = memory_snapshot,
    ) -> None:
        self._device, self._folder, self._rank = device, folder / FOLDER, rank
        self._logger, self._callbacks, self._snapshot = logger, callbacks, snapshot
        self._keep_noting = was_short
        self._until: int | None = None
        self._step, self._short = step, 0
        if device.type == "cuda":
            on_out_of_memory(_weakly(self.ran_out))
            if was_short:
                note_allocations(True)

    def request(self) -> str:
        """Note the stacks of the next steps, and write what they find."""
        if self._device.type != "cuda":
            raise ConfigError(f"{self._device} has no CUDA allocator to take a snapshot of")
        note_allocations(True)
        if self._until is None:
            self._callbacks.add(self)
        self._until = -1
        return f"after {STEPS} steps, in {FOLDER}/rank-{self._rank}.json and in the report"

    def on_step_end(self, run: Run, result: StepResult) -> None:
        if self._until == -1:
            self._until = result.step + STEPS - 1
        if self._until is not None and result.step >= self._until:
            self._until = None
            self._callbacks.remove(self)
            self.write("asked for", result.step)
            if not self._keep_noting:
                note_allocations(False)

    def ran_out(self, *_: Any) -> None:
        """Called by the allocator, right before it raises: everything is still alive."""
        self._short += 1
        if self._short > MOST_OOM:
            return
        with contextlib.suppress(Exception):  # the error that follows is what matters
            self.write("out of memory", self._step() + 1)
            self._keep_noting = True
            note_allocations(True)

    def write(self, why: str, step: int) -> MemorySnapshot | None:
        """Look at the allocator and write what was found; None where the disk does not let it."""
        peak = held_at_peak(self._snapshot(), self._device.index or 0, why, step)
        name = "" if why == "asked for" else f".oom-{self._short}"
        try:
            if self._folder.is_symlink():  # of a folder that somebody else prepared
                self._folder.unlink()
            make_private(self._folder)
            text = json.dumps(peak.model_dump())
            write_atomically(self._folder / f"rank-{self._rank}{name}.json", text)
        except OSError as error:
            self._logger.warning(f"no memory snapshot was written: {error}")
            return None
        self._logger.record(
            "memory", step=step, kind=why, bytes=peak.bytes, message=peak.headline()
        )
        return peak


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """The allocator forgets nobody: a run that is over must be free to go all the same."""
    found = weakref.WeakMethod(method)

    def call(*given: Any) -> None:
        alive = found()
        if alive is not None:
            alive(*given)

    return call
