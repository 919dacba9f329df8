"""Out of memory: the step is taken back, cut into smaller micro-batches and computed again.

The weights have not moved yet, and the global batch stays what it was. With several ranks the
one that failed says so in the store and breaks the group; the others, who wait for its gradients,
fail at once, find the word, and all connect anew. Processes are not restarted.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from multi_gpu_training.data.batch import batch_count, share_of
from multi_gpu_training.data.order import Share
from multi_gpu_training.data.parts import in_parts, step_batches, versions
from multi_gpu_training.distributed.batchnorm import SyncBatchNorm
from multi_gpu_training.errors import DataError, MemoryShortError
from multi_gpu_training.training.buffers import BufferCopies
from multi_gpu_training.training.takeover import take_over

if TYPE_CHECKING:
    from multi_gpu_training.training.step import StepResult
    from multi_gpu_training.training.trainer import MultiGPUTrainer

_SIGNS = ("out of memory", "ALLOC_FAILED", "DefaultCPUAllocator: can't allocate")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the memory of the device, or of the host, was too small."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


class MemoryRecovery:
    """What a trainer needs to take a step back and compute it in smaller parts.

    parts: how many each micro-batch of a rank is cut into; 1 until memory was short.
    busy: the trainer computes a step; exchanges that break are the step's to mend.
    retrying: a step is computed again; what goes wrong in it is not mended inside of it.
    told: called with (action, text, facts) once the ranks agreed on what to do.
    """

    def __init__(self, trainer: MultiGPUTrainer) -> None:
        self.trainer = trainer
        self.parts = 1
        self.whole = 0  # samples of a whole micro-batch on a rank, where they are known
        self.busy = False
        self.retrying = False
        self.told: Callable[[str, str, dict[str, Any]], None] = lambda *_: None
        self._earlier: list[tuple[Any, list[int]]] = []
        self._begun: int | None = None  # the step that was noted at its begin
        self._metrics: dict[str, Any] = {}
        self._buffers = BufferCopies(trainer)
        self._freed_at: int | None = None

    # Every step

    def begin_step(self) -> None:
        """Note what a step changes before its weights move: metrics, and BatchNorm's buffers."""
        self._begun = self.trainer.step
        self._metrics = self.trainer.metrics.kept()
        self._buffers.keep()

    def remember(self, batch: Any) -> None:
        """A micro-batch of the user's own, which no loader can fetch again."""
        if self.trainer._given == 0:
            self._earlier.clear()
        self._earlier.append((batch, versions(batch)))

    def run_parts(self, batch: Any, samples: Tensor | None, share: Share) -> StepResult:
        """Train on a micro-batch in parts; the result is that of the whole."""
        trainer = self.trainer
        losses: list[Tensor] = []
        weights: list[float] = []
        parts = in_parts(batch, samples, share, self._parts_of(share), trainer.loader)
        for part, numbers, smaller in parts:
            result = trainer.eager_step(part, numbers, smaller)
            losses.append(result.loss.detach())
            weights.append(float(smaller.count))
        if len(losses) > 1:
            shares = torch.tensor(weights, device=losses[0].device)
            kept = torch.where(shares > 0, torch.stack(losses), torch.zeros_like(shares))
            result._loss = (kept * shares).sum() / shares.sum().clamp(min=1)
        return result

    def _parts_of(self, share: Share) -> int:
        if any(isinstance(m, SyncBatchNorm) for m in self.trainer.model.modules()):
            return self.parts  # ranks talk in every part
        return max(1, min(self.parts, share.count))

    # Faults

    def concerns(self, error: RuntimeError) -> bool:
        """Whether this error is ours to mend: no memory here, or on a rank that said so."""
        placement = self.trainer.placement
        if not is_out_of_memory(error):
            return placement.breakable is not None and placement.breakable.announced
        alone = placement.dp_size == 1
        mendable = not self.trainer._stepping if alone else placement.breakable is not None
        mendable = mendable and self.trainer.config.on_out_of_memory == "split"
        if not mendable:
            error.add_note(advice(self.trainer))
        return mendable

    def retry(self, batch: Any, mine: bool) -> StepResult:
        """Compute the unfinished step again, up to and with `batch`. `mine`: the memory of this
        rank was short."""
        given = self.trainer._given
        self.retrying = True
        try:
            while True:
                self.busy = True
                try:
                    return self._mend(batch, mine) or self._again(batch, given)
                except RuntimeError as error:
                    if not self.concerns(error):
                        raise
                    mine = is_out_of_memory(error)
        finally:
            self.busy = self.retrying = False

    def join(self, error: RuntimeError) -> bool:
        """Between steps an exchange broke: True if a rank had said so and a new group is there."""
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
        """Take the step back on every rank, agree on smaller parts, connect anew.

        Returns the step's result where other ranks had finished it before the group broke: then
        their weights are taken over.
        """
        trainer, placement = self.trainer, self.trainer.placement
        halve = mine and self._must_halve()
        if halve:
            self._check_can_halve(batch)
        vote = [mine, 2 * self.parts if halve else self.parts, trainer.step, trainer._stepping]
        votes: list[Any] = [vote]
        self._free()
        if placement.breakable is not None:
            if mine:
                placement.breakable.announce()
            trainer.strategy.unwrap()
            placement.regroup()
            votes = placement.gather_json(vote)
        steps = [step for _, _, step, _ in votes]
        newest = max(steps)
        if any(moving and step == newest for _, _, step, moving in votes):
            raise MemoryShortError(
                f"out of memory while the optimizer moved the weights of step {newest + 1}; "
                f"{advice(trainer)}"
            )
        if min(steps) < newest:
            take_over(trainer, steps.index(newest), trainer.step < newest)
        if placement.breakable is not None:
            trainer.strategy.rewrap()
        self._settle(votes)
        if trainer.step < newest:
            trainer._given = 0
            return trainer.finish_step()
        self.rewind()
        if trainer.execution.active:
            trainer.execution.give_up("memory was short")
            self._free()  # what recordings held
        return None

    def _free(self) -> None:
        trainer = self.trainer
        trainer._stepping = False
        trainer.drop_gradients()
        if trainer.precision.scaler.is_enabled():
            trainer.precision.scaler._per_optimizer_states.clear()
        gc.collect()
        if trainer.placement.device.type == "cuda":
            torch.cuda.empty_cache()

    def rewind(self) -> None:
        """Back to the begin of the step that was not finished."""
        trainer = self.trainer
        if self._begun == trainer.step:
            trainer.metrics.put_back(self._metrics)
            self._buffers.put_back()
        trainer.finite.losses.clear()
        trainer._micro = 0

    def _must_halve(self) -> bool:
        """BatchNorm would see smaller batches: there, freed memory is tried first."""
        step = self.trainer.step
        if self._freed_at == step or not normalises_batches(self.trainer.model):
            return True
        self._freed_at = step
        return False

    def _check_can_halve(self, batch: Any) -> None:
        share = share_of(batch)
        count = batch_count(batch) if share is None else share.count
        # BatchNorm cannot normalise a single sample.
        least = 2 if normalises_batches(self.trainer.model) else 1
        if count < 2 * self.parts * least if least == 2 else count <= self.parts:
            now = -(-count // self.parts)
            error = MemoryShortError(
                f"out of memory at step {self.trainer.step + 1} on rank "
                f"{self.trainer.placement.identity.rank} with {now} sample{'s' * (now > 1)} at a "
                f"time, which cannot be halved; {advice(self.trainer)}"
            )
            error.restart_helps = False
            raise error

    def _again(self, batch: Any, given: int) -> StepResult:
        trainer = self.trainer
        before = self._before(batch, given)
        trainer._given = 0
        for earlier in before:
            trainer.train_step(earlier)
        return trainer.train_step(batch)

    def _before(self, batch: Any, given: int) -> list[Any]:
        """The micro-batches of this step that came before `batch`."""
        share = share_of(batch)
        if given == 0:
            return []
        if share is not None and self.trainer.loader is not None:
            return list(
                islice(step_batches(self.trainer.loader, share.epoch, share.position), given)
            )
        kept = self._earlier[:given]
        if any(versions(earlier) != written for earlier, written in kept):
            raise DataError(
                "memory was short, and the step cannot be computed again: a batch of it was "
                "overwritten after train_step; give each micro-batch tensors of its own, or "
                "lower batch_size"
            )
        return [earlier for earlier, _ in kept]

    def _settle(self, votes: list[Any]) -> None:
        """Use the smallest parts that a rank asked for, and tell."""
        before, self.parts = self.parts, max(parts for _, parts, _, _ in votes)
        short = [rank for rank, (mine, _, _, _) in enumerate(votes) if mine]
        step = min(step for _, _, step, _ in votes) + 1
        ranks = f"rank{'s' if len(short) > 1 else ''} {', '.join(map(str, short))}"
        text = f"out of memory at step {step} on {ranks}: "
        if self.parts > before:
            action = "halve_micro_batch"
            text += f"{self.describe()}; the global batch stays the same"
            if normalises_batches(self.trainer.model):
                text += ", but BatchNorm sees smaller batches"
        else:
            action = "free_memory"
            text += "memory was freed, and the step is computed again"
        self.told(action, text, {"step": step, "ranks": short, "parts": self.parts})

    def describe(self) -> str:
        size = f", {-(-self.whole // self.parts)} samples at a time" if self.whole else ""
        return f"every micro-batch is computed in {self.parts} parts{size}"

    # Saved with a run

    def state_dict(self) -> dict[str, Any]:
        return {"parts": self.parts, "whole": self.whole}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parts, whole = int(state["parts"]), int(state["whole"])
        if whole and self.whole:  # another batch_size or number of ranks than then
            parts = -(-parts * self.whole // whole)
        self.parts = max(1, parts) if int(state["parts"]) > 1 else 1


def normalises_batches(model: nn.Module) -> bool:
    """Whether a sample's result depends on the others in its micro-batch."""
    kind = nn.modules.batchnorm._BatchNorm
    return any(isinstance(module, kind) and module.training for module in model.modules())


def advice(trainer: MultiGPUTrainer) -> str:
    """What a user may do about too little memory."""
    wishes = ["a smaller model or shorter inputs"]
    if not trainer.config.use_gradient_checkpointing:
        wishes.insert(0, "use_gradient_checkpointing=true")
    if trainer.precision.dtype is None:
        wishes.insert(0, "use_mixed_precision=true")
    return f"lower batch_size, or try {', '.join(wishes)}"
