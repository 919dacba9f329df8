"""Averaged weights, kept alongside the trained ones: EMA or SWA.

    EMA  average += (1 - ema_decay) * (weights - average), after every step
    SWA  the mean of the weights at the steps swa_start, swa_start + swa_every, ...

Validation, `predict` and checkpoints use the average. Training continues with its own weights,
which a checkpoint also holds. The average is updated between steps, on the same stream: steps
replayed as a CUDA graph are not affected.

BatchNorm: with EMA the buffers are those of the trained model. With SWA, running statistics are
averaged like weights; nothing is recomputed from the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.errors import ConfigError, ModelError
from multi_gpu_training.state_dicts import plain_name
from multi_gpu_training.torch_internals import foreach_lerp_
from multi_gpu_training.training.callbacks import Callback, Run
from multi_gpu_training.training.state_rollback import copy_each
from multi_gpu_training.training.step import StepResult
from multi_gpu_training.training.step_state import StepState

_SHORT = (torch.float16, torch.bfloat16)  # too short for small changes: averaged in float32


class AveragedWeights(Callback):
    """The average of one training's weights; does nothing if the config asks for none.

    updates: number of weights in the average. step: the last step that was considered.
    """

    def __init__(
        self, config: MultiGPUConfig, state: StepState, steps_per_epoch: int | None
    ) -> None:
        self.kind = "ema" if config.ema_decay is not None else "swa"
        self.active = config.ema_decay is not None or config.swa_start is not None
        self.updates = self.step = 0
        self._config = config
        self._state = state
        self._every = config.swa_every or steps_per_epoch
        # By name: the model's parameters and buffers, their values as real numbers, their average.
        self._owners: dict[str, Tensor] = {}
        self._live: dict[str, Tensor] = {}
        self._average: dict[str, Tensor] = {}
        self._by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        self._seen: list[nn.Parameter] | None = None
        self._trained: dict[str, Tensor] | None = None  # while the model holds the average
        if self.active and self.kind == "swa" and self._every is None:
            raise ConfigError(
                f"swa_start={config.swa_start} averages once per epoch, but the length of this "
                "stream is not known; set swa_every to a number of steps"
            )
        if self.active:
            self._look_up()

    def describe(self) -> str:
        config = self._config
        how = f"EMA with decay {config.ema_decay}"
        if self.kind == "swa":
            how = f"SWA every {self._every} steps from step {config.swa_start or self._every} on"
        return f"weights: {how}; validation and checkpoints use the average"

    @property
    def in_use(self) -> bool:
        """Whether an average exists yet: SWA begins late."""
        return self.active and (self.kind == "ema" or self.updates > 0)

    # Every step

    def on_step_end(self, run: Run, result: StepResult) -> None:
        self._follow(result.step)

    @torch.no_grad()
    def _follow(self, step: int) -> None:
        """Add the weights of a step to the average. Undone steps come again when recomputed; the
        second time changes nothing."""
        if step <= self.step:
            return
        if self._trained is not None:
            raise ModelError(
                "a step was trained while the model holds its averaged weights; train outside "
                "`with manager.averaged_weights()`"
            )
        if self._state.parameters is not self._seen:
            self._look_up()
        self.step = step
        if self.kind == "ema":
            assert self._config.ema_decay is not None
            self._move(1.0 - self._config.ema_decay)
        elif self._is_due(step):
            self._move(1.0 / (self.updates + 1))

    def _is_due(self, step: int) -> bool:
        start, every = self._config.swa_start, self._every
        assert start is not None and every is not None
        return step >= max(start, 1) and (step - start) % every == 0

    def _move(self, weight: float) -> None:
        self.updates += 1
        for short, (averages, live) in self._by_type.items():
            ends = [tensor.float() for tensor in live] if short in _SHORT else live
            foreach_lerp_(averages, ends, weight)

    def _look_up(self) -> None:
        """Find the tensors to average. A new one starts with its current value."""
        state = self._state
        self._seen = state.parameters
        found: dict[str, Tensor] = dict(state.model.named_parameters())
        if self.kind == "swa":
            found |= dict(state.model.named_buffers())
        before, self._owners, self._live = self._owners, {}, {}
        for name, tensor in found.items():
            if hasattr(tensor, "to_local"):
                raise ConfigError(
                    f"ema_decay and swa_start need whole parameters on every rank, and {name} is "
                    "sharded; leave them out, or train with ddp"
                )
            if not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            name = plain_name(name)
            # The parameter itself, not a view of its memory, which somebody may replace.
            live = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor
            self._owners[name], self._live[name] = tensor, live
            if before.get(name) is not tensor:
                kind = torch.float32 if live.dtype in _SHORT else live.dtype
                average = self._average[name] = live.detach().to(kind, copy=True)
                state.extra_tensors.append(average)  # restored when recorded steps are undone
        self._average = {name: self._average[name] for name in self._live}
        self._by_type = {}
        for name, average in self._average.items():
            averages, same = self._by_type.setdefault(self._live[name].dtype, ([], []))
            averages.append(average)
            same.append(self._live[name])

    # Where it is used

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model hold the average for the length of a `with` block. Collective."""
        if not self.in_use or self._trained is not None:
            yield
            return
        if self._config.broadcast_buffers and self.kind == "swa":
            names = {plain_name(name) for name, _ in self._state.model.named_buffers()}
            mine = [self._average[name] for name in sorted(names & self._average.keys())]
            self._state.placement.broadcast_tensors(mine)
        self._trained = {name: live.detach().clone() for name, live in self._live.items()}
        self._put(self._average)
        try:
            yield
        finally:
            self._put(self._trained)
            self._trained = None

    def leave_in_model(self) -> None:
        """At the end of a run: leave the model as it was validated and saved."""
        if self.in_use:
            self._put(self._average)

    def _put(self, tensors: dict[str, Tensor]) -> None:
        """Overwrite the model's tensors in place: recorded steps read them where they lie."""
        copy_each(list(self._live.values()), [tensors[name] for name in self._live])

    # In checkpoints

    def in_checkpoint(self, whole: dict[str, Any]) -> dict[str, Any]:
        """A state_dict of the model with the average in place of the weights, so that whoever
        reads a checkpoint gets the model that was validated."""
        if not self.in_use or self._trained is not None:
            return whole
        mine: dict[int, Tensor] = {}
        replaced = dict(whole)
        for name, value in self._state.model.state_dict(keep_vars=True).items():
            known = self._average.get(plain_name(name))
            if known is not None:
                known = torch.view_as_complex(known) if value.is_complex() else known
                mine[id(value)] = known.to(value.dtype)
            if id(value) in mine:  # also under the other names of a tied weight
                replaced[plain_name(name)] = mine[id(value)]
        return replaced

    def state_dict(self) -> dict[str, Any]:
        """The trained weights; the checkpoint's model holds the averaged ones."""
        state: dict[str, Any] = {"kind": self.kind, "updates": self.updates, "step": self.step}
        if self.in_use:
            trained = self._live if self._trained is None else self._trained
            state["trained"] = dict(trained)
            # The model holds them in 16 bits.
            state["average"] = {
                name: average
                for name, average in self._average.items()
                if average.dtype != self._live[name].dtype
            }
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called after the model was loaded with the average: keep that average, and load the
        trained weights. A run that no longer averages continues with those alone."""
        trained = state.get("trained", {})
        if self.active:
            self._look_up()
            self._begin(state["step"])
            if state["kind"] == self.kind:
                self.updates = state["updates"]
                copy_each(
                    [self._average[name] for name in state.get("average", {})],
                    list(state.get("average", {}).values()),
                )
        model = self._state.model
        found = {**dict(model.named_buffers()), **dict(model.named_parameters())}
        for name, tensor in found.items():
            if plain_name(name) in trained:
                live = torch.view_as_real(tensor) if tensor.is_complex() else tensor
                live.copy_(trained[plain_name(name)])
        if self.active and state["kind"] != self.kind:
            self._begin(state["step"])

    def begin(self) -> None:
        """A checkpoint without an average was loaded: start from its weights."""
        if self.active:
            self._look_up()
            self._begin(self._state.step)

    def _begin(self, step: int) -> None:
        self.updates, self.step = 0, step
        copy_each(list(self._average.values()), [self._live[name] for name in self._average])

    def kept(self) -> Callable[[], None]:
        """State to restore when recorded steps are undone; the average is kept with the weights."""
        updates, step = self.updates, self.step

        def put_back() -> None:
            self.updates, self.step = updates, step
            if self.active:  # a state is kept before callbacks have seen its step
                self._follow(self._state.step)

        return put_back
