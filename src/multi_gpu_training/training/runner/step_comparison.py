"""Compares a recorded or compiled step with the eager one, from the same state."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.training.runner.eager import EagerRunner
from multi_gpu_training.training.runner.graph import resolve_kept
from multi_gpu_training.training.runner.graph_cache import GraphCache, GraphRunner
from multi_gpu_training.training.runner.rollback_window import Fed
from multi_gpu_training.training.state_rollback import StateCopies
from multi_gpu_training.training.step_state import StepState


class StepComparison:
    """Computes one step several times without counting it, and measures how far results differ.

    newest: keys and batches of the step to compare. copies: named states; each computation starts
    from "before".
    """

    def __init__(
        self, state: StepState, eager: EagerRunner, cache: GraphCache, graph: GraphRunner
    ) -> None:
        self.newest: tuple[list[Any], list[Fed]] = ([], [])
        self.copies = StateCopies(state)
        self._state = state
        self._eager = eager
        self._cache = cache
        self._graph = graph

    def eager_step(self) -> Tensor:
        """Run the latest step without its recording, but compiled if that is; the losses."""
        recorded = self._cache.steps.get(self.newest[0][0])
        with self._state.step_module.computing(None if recorded is None else recorded.compiled):
            return self.plain_step()

    def plain_step(self) -> Tensor:
        """Run the latest step operation by operation; returns the losses."""
        losses = []
        for batch, samples, share in self.newest[1]:
            self._state.seed_noise()
            self._state.rates.send()
            result, _ = self._eager.compute(resolve_kept(batch), samples, share)
            losses.append(result.mean.detach())
        self._state.give_back_generators()
        return torch.stack(losses)

    def replayed_step(self) -> Tensor:
        """Replay the latest step; returns the losses."""
        keys, step = self.newest
        micros = self._cache.steps[keys[0]].micros
        self._graph.keep_result()
        for micro, (batch, samples, _) in zip(micros, step, strict=True):
            self._state.seed_noise(on_host=False)
            self._state.rates.send()
            micro.replay(resolve_kept(batch), samples)
        self._state.give_back_generators()
        return torch.stack([micro.mean for micro in micros])

    def first(self) -> tuple[float, float]:
        """How far two eager steps are apart, and how far the replayed step is from them. Leaves
        the state unchanged."""
        self.copies.keep("before")
        losses = self.eager_step()
        self.copies.keep("eager")
        self.copies.restore("before")
        again = self._difference(losses, self.eager_step())
        self.copies.restore("before")
        return again, self._replayed_difference(losses)

    def again(self) -> float:
        """How far the replayed step is from the eager one. Leaves the state unchanged, and a copy
        of it as "before"."""
        self.copies.keep("before")
        for call in self._state.callbacks.on_compare_begin:
            call()
        losses = self.eager_step()
        for call in self._state.callbacks.on_compare_end:
            call()
        self.copies.keep("eager")
        self.copies.restore("before")
        return self._replayed_difference(losses)

    def _replayed_difference(self, losses: Tensor) -> float:
        difference = self._difference(losses, self.replayed_step())
        self.copies.restore("before")
        self._cache.forget()
        return difference

    def _difference(self, losses: Tensor, others: Tensor) -> float:
        return max(self.copies.difference("eager"), max_rel_diff(losses, others))

    def seconds(self, work: Callable[[], Any], times: int = 3) -> float:
        """How long `work` takes. Does not restore the state."""
        self._synchronise()
        start = time.perf_counter()
        for _ in range(times):
            work()
        self._synchronise()
        return (time.perf_counter() - start) / times

    def _synchronise(self) -> None:
        if self._state.placement.device.type == "cuda":
            torch.cuda.synchronize(self._state.placement.device)


def max_rel_diff(a: Tensor, b: Tensor) -> float:
    """The largest relative difference of two lists of losses."""
    # A NaN counts as no difference here: the NaN guard judges those.
    return float(((a - b).abs() / a.abs().clamp(min=1e-12)).nan_to_num().max())
