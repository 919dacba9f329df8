"""Out of memory: undo the step, split it into smaller micro-batches, and compute it again.

The weights have not moved yet, and the global batch stays the same. With several ranks, the one
that failed announces it in the store and breaks the process group. The others, waiting for its
gradients, fail at once and find the announcement; then all connect again. No process restarts.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from multi_gpu_training.data.batch import share_of
from multi_gpu_training.data.order import Share
from multi_gpu_training.data.parts import in_parts, step_batches, versions
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import DataError, MemoryShortError
from multi_gpu_training.safe_files import Count, Ranks, read_json, write_atomically
from multi_gpu_training.torch_internals import BatchNormBase, forget_scaler_steps
from multi_gpu_training.training.runner.eager import EagerRunner
from multi_gpu_training.training.state_broadcast import broadcast_state
from multi_gpu_training.training.step import StepResult
from multi_gpu_training.training.step_state import StepState

# torch's CPU allocator and CUDA's libraries raise a plain RuntimeError.
_SIGNS = ("out of memory", "ALLOC_FAILED", "DefaultCPUAllocator: can't allocate")
_HINT = "memory.json"  # in the run's folder, for ranks that are started again


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


class OomRecovery:
    """Undoes a step and computes it in smaller parts.

    parts: how many parts each micro-batch of a rank is split into; 1 until memory runs out.
    whole: samples of a whole micro-batch on a rank; 0 if unknown.
    busy: a step is being computed, and repairs broken exchanges itself.
    retrying: a step is being recomputed; errors inside it are not repaired there.
    told: called with (action, text, facts) once the ranks have agreed on what to do.
    give_up_recording: called with a reason; frees the memory of recordings.
    """

    def __init__(
        self,
        state: StepState,
        eager: EagerRunner,
        told: Callable[[str, str, dict[str, Any]], None],
        give_up_recording: Callable[[str], None],
    ) -> None:
        self.state = state
        self.eager = eager
        self.parts = 1
        self.whole = 0
        self.busy = False
        self.retrying = False
        self._report = told
        self._give_up_recording = give_up_recording
        self._earlier: list[tuple[Any, list[int]]] = []
        self._freed_at: int | None = None

    # Every step

    def remember(self, batch: Any) -> None:
        """Keep a micro-batch made by the user, which no loader can fetch again."""
        if self.state.calls_in_step == 0:
            self._earlier.clear()
        self._earlier.append((batch, versions(batch)))

    def run(self, batch: Any, samples: Tensor | None, share: Share) -> StepResult:
        """Train on a micro-batch in parts; the result is that of the whole."""
        losses: list[Tensor] = []
        weights: list[float] = []
        for part, numbers, smaller in in_parts(
            batch, samples, share, self._parts_of(share), self.state.loader
        ):
            result = self.eager.run(part, numbers, smaller)
            losses.append(result.loss.detach())
            weights.append(float(smaller.count))
        if len(losses) == 1:
            return result
        counts = torch.tensor(weights, device=losses[0].device)
        # A part without samples has a stand-in's loss, which may be NaN.
        kept = torch.where(counts > 0, torch.stack(losses), torch.zeros_like(counts))
        mean = (kept * counts).sum() / counts.sum().clamp(min=1)
        return StepResult(mean, result.step, result.moved, result.grad_norm, False)

    def _parts_of(self, share: Share) -> int:
        if self.state.strategy.forward_exchanges:
            return self.parts  # ranks talk in every part: all need as many
        return max(1, min(self.parts, share.count))

    # Faults

    def concerns(self, error: RuntimeError) -> bool:
        """Whether this error can be handled here: this rank ran out of memory, or another one
        announced that it did."""
        state, placement = self.state, self.state.placement
        if not is_out_of_memory(error):
            return placement.breakable is not None and placement.breakable.announced
        alone = placement.dp_size == 1
        # Half-moved weights cannot be undone; a rank that finished the step may pass on its own.
        mendable = not state.moving if alone else placement.breakable is not None
        mendable = mendable and state.config.on_out_of_memory == "split"
        # A sharded rank is in the middle of a collective.
        mendable = mendable and (alone or state.strategy.computes_alone)
        if not mendable:
            error.add_note(advice(state))
        return mendable

    def retry(self, batch: Any, mine: bool, train_step: Callable[[Any], StepResult]) -> StepResult:
        """Recompute the unfinished step, up to and including `batch`. `mine`: this rank is the one
        that ran out of memory."""
        given = self.state.calls_in_step
        self.retrying = True
        try:
            while True:
                self.busy = True
                try:
                    return self._mend(batch, mine) or self._again(batch, given, train_step)
                except RuntimeError as error:
                    if not self.concerns(error):
                        raise
                    mine = is_out_of_memory(error)
        finally:
            self.busy = self.retrying = False

    def join(self, error: RuntimeError) -> bool:
        """Handle an exchange broken between steps: True if a rank had announced it and a new
        group exists."""
        if self.busy or is_out_of_memory(error) or not self.concerns(error):
            return False
        self.busy = True
        try:
            while True:
                try:
                    self._mend(None, mine=False)
                    return True
                except RuntimeError as another:
                    if not self.concerns(another):
                        raise
        finally:
            self.busy = False

    def _mend(self, batch: Any, mine: bool) -> StepResult | None:
        """Undo the step on every rank, agree on smaller parts, connect again.

        Returns the step's result if other ranks had finished it before the group broke: then
        this rank gets their weights.
        """
        state, placement = self.state, self.state.placement
        halve = mine and self._must_halve()
        if halve:
            self._check_can_halve(batch)
        vote = [mine, 2 * self.parts if halve else self.parts, state.step, state.moving]
        votes: list[Any] = [vote]
        self._free()
        if placement.breakable is not None:
            if mine:
                placement.breakable.announce()
            # DDP holds the broken group; it is built anew on the next one.
            state.strategy.unwrap()
            placement.regroup()
            votes = placement.gather_json(vote)
        steps = [step for _, _, step, _ in votes]
        newest = max(steps)
        if any(moving and step == newest for _, _, step, moving in votes):
            raise MemoryShortError(
                f"out of memory while the optimizer moved the weights of step {newest + 1}; "
                f"{advice(state)}"
            )
        # The group may break after some ranks finished the step: the rest take over their state.
        if min(steps) < newest:
            broadcast_state(state, steps.index(newest), state.step < newest)
        if placement.breakable is not None:
            state.strategy.rewrap()
        self._settle(votes)
        if state.step < newest:
            state.calls_in_step = 0
            return self.eager.finish_step()
        self.eager.start.put_back()
        self.eager.guard.losses.clear()
        self._give_up_recording("memory was short")
        self._free()  # the memory of recordings
        return None

    def _free(self) -> None:
        state = self.state
        state.moving = False
        state.drop_gradients()
        if state.precision.scaler.is_enabled():
            forget_scaler_steps(state.precision.scaler)
        # Tensors in reference cycles, such as those of a traceback, would stay until later.
        gc.collect()
        if state.placement.device.type == "cuda":
            torch.cuda.empty_cache()

    def _must_halve(self) -> bool:
        """Whether to split further. With BatchNorm, which would see smaller batches, first try
        freeing memory."""
        step = self.state.step
        if self._freed_at == step or not normalises_batches(self.state.model):
            return True
        self._freed_at = step
        return False

    def _check_can_halve(self, batch: Any) -> None:
        share = share_of(batch)
        count = self.state.count_samples(batch) if share is None else share.count
        # BatchNorm cannot normalise a single sample.
        least = 2 if normalises_batches(self.state.model) else 1
        if count < 2 * self.parts * least if least == 2 else count <= self.parts:
            now = -(-count // self.parts)
            error = MemoryShortError(
                f"out of memory at step {self.state.step + 1} on rank "
                f"{self.state.placement.identity.rank} with {now} sample{'s' * (now > 1)} at a "
                f"time, which cannot be halved; {advice(self.state)}"
            )
            error.restart_helps = False
            raise error

    def _again(self, batch: Any, given: int, train_step: Callable[[Any], StepResult]) -> StepResult:
        before = self._before(batch, given)
        self.state.calls_in_step = 0
        for earlier in before:
            train_step(earlier)
        return train_step(batch)

    def _before(self, batch: Any, given: int) -> list[Any]:
        """The micro-batches of this step that came before `batch`."""
        share, loader = share_of(batch), self.state.loader
        if given == 0:
            return []
        if share is not None and not share.changed and loader is not None:
            return list(islice(step_batches(loader, share.epoch, share.position), given))
        kept = self._earlier[:given]
        # A loop may fill the same tensors with its next batch.
        if any(versions(earlier) != written for earlier, written in kept):
            raise DataError(
                "memory was short, and the step cannot be computed again: one of its batches was "
                "overwritten after train_step; give each micro-batch its own tensors, or lower "
                "batch_size"
            )
        return [earlier for earlier, _ in kept]

    def _settle(self, votes: list[Any]) -> None:
        """Use the smallest parts that any rank asked for, and report it."""
        before, self.parts = self.parts, max(parts for _, parts, _, _ in votes)
        short = [rank for rank, (mine, _, _, _) in enumerate(votes) if mine]
        step = min(step for _, _, step, _ in votes) + 1
        ranks = f"rank{'s' if len(short) > 1 else ''} {', '.join(map(str, short))}"
        text = f"out of memory at step {step} on {ranks}: "
        if self.parts > before:
            action = "halve_micro_batch"
            text += f"{self.describe()}; the global batch stays the same"
            if normalises_batches(self.state.model):
                text += ", but BatchNorm sees smaller batches"
        else:
            action = "free_memory"
            text += "memory was freed, and the step is computed again"
        self._report(action, text, {"step": step, "ranks": short, "parts": self.parts})

    def describe(self) -> str:
        size = f", {-(-self.whole // self.parts)} samples at a time" if self.whole else ""
        return f"every micro-batch is computed in {self.parts} parts{size}"

    # Saved with a run

    def state_dict(self) -> dict[str, Any]:
        return {"parts": self.parts, "whole": self.whole}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parts, whole = int(state["parts"]), int(state["whole"])
        if whole and self.whole:  # batch_size or the number of ranks may have changed
            parts = -(-parts * self.whole // whole)
        self.parts = max(1, parts) if int(state["parts"]) > 1 else 1


class _OomHint(BaseModel):
    parts: Ranks
    whole: Count


def leave_oom_hint(folder: Path, recovery: OomRecovery) -> None:
    """Write into the run's folder that restarted ranks should try half of what was tried."""
    with suppress(OSError):
        state = {**recovery.state_dict(), "parts": 2 * recovery.parts}
        write_atomically(folder / _HINT, json.dumps(state))


def take_oom_hint(folder: Path, recovery: OomRecovery, placement: Placement) -> None:
    """Follow the hint left on any machine before the ranks were restarted. Collective."""
    hint: Any = None
    with suppress(OSError, ValueError):
        hint = read_json(folder / _HINT, _OomHint).model_dump()
    before = recovery.state_dict()
    for state in [found for found in placement.gather_json(hint) if found]:
        recovery.load_state_dict(state)
        if recovery.parts < before["parts"]:
            recovery.load_state_dict(before)
        before = recovery.state_dict()


def drop_oom_hint(folder: Path) -> None:
    """The run succeeded: remove the hint, so the next run in this folder starts without it."""
    with suppress(OSError):
        (folder / _HINT).unlink()


def normalises_batches(model: nn.Module) -> bool:
    """Whether a sample's result depends on the others in its micro-batch."""
    return any(isinstance(module, BatchNormBase) and module.training for module in model.modules())


def add_advice(error: Exception, state: StepState) -> None:
    """Say with an error what a user can do, if memory ran out. One from a step says it already."""
    if is_out_of_memory(error) and not hasattr(error, "__notes__"):
        error.add_note(advice(state))


def advice(state: StepState) -> str:
    """What a user can do when memory runs out."""
    wishes = ["a smaller model or shorter inputs"]
    if not state.config.use_gradient_checkpointing:
        wishes.insert(0, "use_gradient_checkpointing=true")
    if state.precision.dtype is None:
        wishes.insert(0, "use_mixed_precision=true")
    return f"lower batch_size, or try {', '.join(wishes)}"
