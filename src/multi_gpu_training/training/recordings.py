"""The recorded steps of a trainer, by shape, and the eager step to compare them with."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multi_gpu_training.data.order import Share
from multi_gpu_training.training.capture import CapturedMicro, CaptureError, Graphs, found
from multi_gpu_training.training.metrics import MetricsCollector
from multi_gpu_training.training.rewind import Fed, step_bytes
from multi_gpu_training.training.step import MicroResult

if TYPE_CHECKING:
    from multi_gpu_training.training.step import StepResult
    from multi_gpu_training.training.trainer import MultiGPUTrainer

KEPT_BYTES = 2**26  # of batches that a rewind may need again
LONGEST_RING = 1024


@dataclass(frozen=True)
class Chain:
    """The micro-batches of one recorded step; `keys` say what each must look like."""

    keys: list[Any]
    micros: list[CapturedMicro]

    def at(self, place: int, key: Any) -> CapturedMicro | None:
        """The recording of the micro-batch at `place`, if it fits."""
        fits = place < len(self.keys) and self.keys[place] == key
        return self.micros[place] if fits else None

    @property
    def is_full(self) -> bool:
        """Whether no more batches of the user's own can be kept."""
        return any(micro.ring is not None and micro.ring.full for micro in self.micros)


class Recordings:
    """What was recorded, by the key of a step's first micro-batch.

    newest: keys and batches of the newest step that was replayed or is to be recorded.
    result: the last result that was given out, whose numbers the next replay overwrites.
    """

    def __init__(self, trainer: MultiGPUTrainer) -> None:
        self.trainer = trainer
        self.graphs: Graphs | None = None
        self.chains: dict[Any, Chain] = {}
        self.newest: tuple[list[Any], list[Fed]] = ([], [])
        self.result: weakref.ref[StepResult] | None = None

    def find(self, key: Any) -> Chain | None:
        return self.chains.get(key)

    def record(self, keys: list[Any], step: list[Fed], foreign: bool) -> str | None:
        """Record the step that was just trained; None, or why it cannot be. Batches that are not
        our loader's (`foreign`) are kept in rings."""
        assert self.graphs is not None
        trainer = self.trainer
        micros: list[CapturedMicro] = []
        kept = 0
        if foreign:
            kept = min(LONGEST_RING, max(1, KEPT_BYTES // max(1, step_bytes(step))))
        trainer.drop_gradients()
        counted = trainer._counted
        try:
            for batch, samples, share in step:
                micros.append(
                    CapturedMicro(
                        self.graphs,
                        self._compute,
                        found(batch),
                        samples,
                        share,
                        self._parameters(),
                        kept,
                    )
                )
        except CaptureError as error:
            return f"it cannot be recorded: {error}"
        finally:
            trainer.drop_gradients()
            trainer._counted = counted
        self.chains[keys[0]] = Chain(list(keys), micros)
        return None

    def _compute(
        self, batch: Any, samples: Tensor | None, share: Share
    ) -> tuple[MicroResult, Tensor | None]:
        with self.trainer.finite.aside():
            return self.trainer.compute(batch, samples, share)

    def replay_step(self) -> Tensor:
        """The newest recorded step once more, without counting it; the losses."""
        keys, step = self.newest
        micros = self.chains[keys[0]].micros
        self.keep_result()
        for micro, (batch, samples, _) in zip(micros, step, strict=True):
            self.trainer.seed_noise()
            self.trainer.rates.send()
            micro.replay(found(batch), samples)
        return torch.stack([micro.mean for micro in micros])

    def eager_step(self) -> Tensor:
        """The same step operation by operation, without counting it; the losses."""
        losses = []
        for batch, samples, share in self.newest[1]:
            self.trainer.seed_noise()
            self.trainer.rates.send()
            result, _ = self.trainer.compute(found(batch), samples, share)
            losses.append(result.mean.detach())
        return torch.stack(losses)

    def keep_result(self) -> None:
        """If someone holds the last result, let it have its numbers before they are overwritten."""
        held = self.result() if self.result is not None else None
        if held is not None:
            held.keep()

    def give_gradients(self, micro: CapturedMicro) -> None:
        """The rest of the step runs eagerly: let it add to what `micro` has left."""
        for parameter, grad in zip(self._parameters(), micro.grads, strict=True):
            parameter.grad = grad

    def collect(self, metrics: MetricsCollector) -> None:
        """Hand over the sums of all replays since the last time."""
        for micro in self._all():
            micro.collect(metrics)

    def forget(self) -> None:
        """Drop the sums of replays that only compared or timed."""
        for micro in self._all():
            micro.forget()

    def rewind_rings(self) -> None:
        """The batches that were kept are no longer needed."""
        for micro in self._all():
            if micro.ring is not None:
                micro.ring.rewind()

    def drop(self) -> None:
        self.chains.clear()
        self.graphs = None

    def _all(self) -> list[CapturedMicro]:
        return [micro for chain in self.chains.values() for micro in chain.micros]

    def _parameters(self) -> list[Tensor]:
        return [*self.trainer._parameters, self.trainer.step_module.tally]


def apart(a: Tensor, b: Tensor) -> float:
    """The largest relative difference of two lists of losses."""
    return float(((a - b).abs() / a.abs().clamp(min=1e-12)).nan_to_num().max())
