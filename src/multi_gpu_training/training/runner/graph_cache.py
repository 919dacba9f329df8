"""Recorded steps by shape, and the runner that replays them."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.data.order import Share
from multi_gpu_training.data.resident import ResidentBatch, ResidentLoader
from multi_gpu_training.training.loss import LossFn
from multi_gpu_training.training.metrics import MetricsCollector
from multi_gpu_training.training.nan_guard import NanGuard
from multi_gpu_training.training.runner.eager import EagerRunner
from multi_gpu_training.training.runner.graph import (
    CapturedMicro,
    CaptureError,
    Graphs,
    resolve_kept,
    signature,
)
from multi_gpu_training.training.runner.rollback_window import Fed, step_bytes
from multi_gpu_training.training.step import MicroResult, StepResult
from multi_gpu_training.training.step_state import StepState

KEPT_BYTES = 2**26  # memory for batches that a rollback may need again
LONGEST_RING = 1024
_PLAN = "plan"


@dataclass(frozen=True)
class RecordedStep:
    """The micro-batches of one recorded step; `keys` describe each. compiled: the loss it was
    recorded with, None for the plain one."""

    keys: list[Any]
    micros: list[CapturedMicro]
    compiled: LossFn | None = None

    def at(self, place: int, key: Any) -> CapturedMicro | None:
        """The recording of micro-batch number `place`, if it fits."""
        fits = place < len(self.keys) and self.keys[place] == key
        return self.micros[place] if fits else None

    @property
    def is_full(self) -> bool:
        """Whether no more of the user's own batches can be kept."""
        return any(micro.ring is not None and micro.ring.full for micro in self.micros)


def micro_key(state: StepState, batch: Any, share: Share) -> Any:
    """What a micro-batch must look like for a recording to fit it.

    Batches of data on the device follow from the global plan: their key describes the whole step on
    all ranks, so every rank finds the same recording without asking. Any other key is local.
    """
    loader = state.loader
    if (
        type(batch) is ResidentBatch
        and isinstance(loader, ResidentLoader)
        and batch.tensors is loader.tensors
    ):
        # From these three, every rank can compute all ranks' shares of each micro-batch.
        weights = loader.feeding.weights
        shares = None if weights is None else tuple(weights)
        return _PLAN, share.window_count, loader.feeding.micro_size, shares
    return signature(batch), share.count, share.left_out, share.window_count, share.last


def is_planned(key: Any) -> bool:
    """Whether all ranks have this key for the step by construction."""
    return bool(key[0] == _PLAN)


class GraphCache:
    """The recorded steps, by the key of their first micro-batch."""

    def __init__(self, state: StepState, eager: EagerRunner, guard: NanGuard) -> None:
        self.graphs: Graphs | None = None
        self.steps: dict[Any, RecordedStep] = {}
        self._state = state
        self._eager = eager
        self._guard = guard

    def record(
        self, keys: list[Any], step: list[Fed], compiled: LossFn | None = None
    ) -> str | None:
        """Record the step just trained; returns None, or why it cannot be recorded."""
        assert self.graphs is not None
        micros: list[CapturedMicro] = []
        kept = 0
        if step[0][2].window_count == 0:  # the user's own batches are kept in rings
            kept = min(LONGEST_RING, max(1, KEPT_BYTES // max(1, step_bytes(step))))
        parameters = self.parameters()
        self._state.drop_gradients()
        try:
            with _no_recompiling(compiled), self._state.step_module.computing(compiled):
                for batch, samples, share in step:
                    batch = resolve_kept(batch)
                    micros.append(
                        CapturedMicro(
                            self.graphs, self._compute, batch, samples, share, parameters, kept
                        )
                    )
        except CaptureError as error:
            return f"it cannot be recorded: {error}"
        finally:
            self._state.drop_gradients()
        self.steps[keys[0]] = RecordedStep(list(keys), micros, compiled)
        return None

    def _compute(
        self, batch: Any, samples: Tensor | None, share: Share
    ) -> tuple[MicroResult, Tensor | None]:
        with self._guard.aside():
            return self._eager.compute(batch, samples, share)

    def parameters(self) -> list[Tensor]:
        # The gradient of the tally is the weight of the step.
        return [*self._state.parameters, self._state.step_module.tally]

    def collect(self, metrics: MetricsCollector) -> None:
        """Add the sums of all replays since the last call to `metrics`."""
        for micro in self._all():
            micro.collect(metrics)

    def forget(self) -> None:
        """Discard the sums of replays that only compared or timed."""
        for micro in self._all():
            micro.forget()

    def rewind_rings(self) -> None:
        """The kept batches are no longer needed."""
        for micro in self._all():
            if micro.ring is not None:
                micro.ring.rewind()

    def drop(self) -> None:
        self.steps.clear()
        self.graphs = None

    def _all(self) -> list[CapturedMicro]:
        return [micro for step in self.steps.values() for micro in step.micros]


def _no_recompiling(compiled: LossFn | None) -> AbstractContextManager[Any]:
    """The compiler synchronises with the device, which a recording forbids."""
    if compiled is None:
        return nullcontext()  # the compiler is not even imported
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("fail_on_recompile")
    return stance


class GraphRunner:
    """Runs micro-batches by replaying their recordings. `find` must have found one before `run`.

    kept: where the batch of the last `run` was kept for a rollback, or None.
    """

    def __init__(self, state: StepState, cache: GraphCache) -> None:
        self._state = state
        self._cache = cache
        self._step: RecordedStep | None = None
        self._micro: CapturedMicro | None = None
        self._result: weakref.ref[StepResult] | None = None
        self.kept: Any = None

    def find(self, place: int, key: Any) -> bool:
        """Whether micro-batch number `place` of the step can be replayed."""
        if place == 0:
            self._step = self._cache.steps.get(key)
        self._micro = None if self._step is None else self._step.at(place, key)
        return self._micro is not None

    @property
    def ring_is_full(self) -> bool:
        return self._step is not None and self._step.is_full

    def run(self, batch: Any, samples: Tensor | None, share: Share) -> StepResult:
        state, micro = self._state, self._micro
        assert micro is not None
        self.keep_result()
        state.seed_noise(on_host=False)
        state.rates.send()
        micro.replay(batch, samples)
        self.kept = None if micro.ring is None else micro.ring.newest()
        if share.last:
            state.replayed += 1
        result = state.advance(micro.mean, micro.norm, share, shared=True)
        self._result = weakref.ref(result)
        return result

    def keep_result(self) -> None:
        """If someone holds the last result, copy its numbers before the next replay overwrites
        them."""
        held = self._result() if self._result is not None else None
        if held is not None:
            held.keep()

    def give_gradients(self, place: int) -> None:
        """The rest of the step runs eagerly: let it add to the gradients left by the replay of
        micro-batch `place`."""
        if self._step is None:
            return
        grads = self._step.micros[place].grads
        for parameter, grad in zip(self._cache.parameters(), grads, strict=True):
            parameter.grad = grad
