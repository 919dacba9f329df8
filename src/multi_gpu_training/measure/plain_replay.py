"""Repeat one rank's first steps in plain PyTorch, as somebody would write them by hand."""

from __future__ import annotations

import copy
import itertools
import math
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from multi_gpu_training.data.order import Share
from multi_gpu_training.measure.request import MeasuredRun, MeasureRequest
from multi_gpu_training.training.callbacks import Callback
from multi_gpu_training.training.delayed_hooks import called_by_torch
from multi_gpu_training.training.loss import read_loss

REPLAYED_STEPS = 3
REPLAYED_BYTES = 64 * 2**20  # larger models repeat one step only: each is kept whole


class PlainReplay:
    """Repeats the first steps of one rank in plain PyTorch: no trainer, no wrapper, no shares."""

    def __init__(self, run: MeasuredRun, request: MeasureRequest) -> None:
        self.run = run
        self.tolerance = 1e-6 if request.double else 1e-2
        self.state = copy.deepcopy(run.optimizer.state_dict())
        self.attributes, self.unknown = own_attributes(run.optimizer)
        self.trained = run.trainer.state.trained
        size = sum(p.nbytes for p in self.trained.parameters())
        self.steps = REPLAYED_STEPS if size <= REPLAYED_BYTES else 1
        self.starts: dict[int, list[Tensor]] = {}
        self.modes: dict[int, list[bool]] = {}  # which modules were training: some may be frozen
        self.parts: dict[int, list[tuple[Any, float, Tensor, float]]] = {}
        self.ends: dict[int, tuple[list[dict[str, Any]], dict[str, Tensor]]] = {}
        self.frozen: dict[int, set[str]] = {}

    def _tensors(self) -> list[Tensor]:
        model = self.trained
        return [t.detach() for t in itertools.chain(model.parameters(), model.buffers())]

    def begin(self, step: int) -> None:
        if step <= self.steps:
            self.starts[step] = [t.clone() for t in self._tensors()]
            self.modes[step] = [module.training for module in self.trained.modules()]

    def note(self, step: int, batch: Any, share: Share, noise: Tensor, loss: float) -> None:
        if step <= self.steps:
            self.parts.setdefault(step, []).append((batch, float(share.count), noise, loss))

    def moved(self, step: int, optimizer: Optimizer) -> None:
        if step <= self.steps:
            settings = [
                {key: value for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
            ]
            named = self.trained.named_parameters()
            after = {name: p.detach().clone() for name, p in named}
            self.ends[step] = copy.deepcopy(settings), after
            named = self.trained.named_parameters()
            self.frozen[step] = {name for name, p in named if p.grad is None}

    def compare(self) -> dict[str, Any]:
        """How far each step's result is from the plain one; or why that cannot be said. Leaves
        everything as it was: the script may go on to another training."""
        optimizer = self.run.optimizer
        tensors = [t.clone() for t in self._tensors()]
        modes = [module.training for module in self.trained.modules()]
        state, attributes = copy.deepcopy(optimizer.state_dict()), own_attributes(optimizer)[0]
        numbers = torch.get_rng_state(), random.getstate(), np.random.get_state()
        try:
            return self._compare()
        finally:
            with torch.no_grad():
                for tensor, value in zip(self._tensors(), tensors, strict=True):
                    tensor.copy_(value)
            for module, training in zip(self.trained.modules(), modes, strict=True):
                module.training = training
            optimizer.load_state_dict(state)
            for key, value in attributes.items():
                setattr(optimizer, key, value)
            torch.set_rng_state(numbers[0])
            random.setstate(numbers[1])
            np.random.set_state(numbers[2])

    def _compare(self) -> dict[str, Any]:
        run = self.run
        others = [
            type(member).__name__
            for member in run.callbacks.members
            if not type(member).__module__.startswith("multi_gpu_training.")
            and any(
                getattr(type(member), event) is not getattr(Callback, event)
                for event in ("on_optimizer", "on_exchange")
            )
        ]
        if others:
            return {"skipped": f"{', '.join(others)} takes part in the step"}
        if self.unknown:
            kind = type(run.optimizer).__name__
            return {"skipped": f"{kind}.{self.unknown} may hold state that cannot be put back"}
        if len(self.state["param_groups"]) != len(run.optimizer.param_groups):
            return {"skipped": "the optimizer has got parameter groups since"}
        worst, name = 0.0, "-"
        run.optimizer.load_state_dict(self.state)
        for key in own_attributes(run.optimizer)[0].keys() - self.attributes.keys():
            delattr(run.optimizer, key)  # a counter that the first step has begun
        for key, value in self.attributes.items():
            setattr(run.optimizer, key, value)
        for step in sorted(self.ends):
            again = self._again(step)
            if again is not None:
                return {"skipped": again} if step == 1 else {"apart": worst, "name": name}
            start = dict(zip(self._names(), self.starts[step], strict=True))
            found = dict(self.trained.named_parameters())
            ends = self.ends[step][1]
            moves = {key: float((end - start[key]).double().norm()) for key, end in ends.items()}
            # A tensor that hardly moves is moved by rounding: it is measured against all of them.
            least = 1e-3 * math.sqrt(sum(move**2 for move in moves.values()))
            for key, end in ends.items():
                apart = float((found[key].detach() - end).double().norm())
                apart /= max(moves[key], least, 1e-300)
                if not apart <= worst:
                    worst, name = apart, key
        return {"apart": worst, "name": name, "passed": worst <= self.tolerance}

    def _names(self) -> list[str]:
        model = self.trained
        return [n for n, _ in [*model.named_parameters(), *model.named_buffers()]]

    def _again(self, step: int) -> str | None:
        """Compute the step by hand; a reason where the recorded loss does not come out again."""
        run, optimizer = self.run, self.run.optimizer
        model, device = run.model, next(run.model.parameters()).device
        with torch.no_grad():
            for tensor, value in zip(self._tensors(), self.starts[step], strict=True):
                tensor.copy_(value)
        for module, training in zip(self.trained.modules(), self.modes[step], strict=True):
            module.training = training
        losses: list[tuple[Tensor, Tensor]] = []
        for batch, count, noise, recorded in self.parts[step]:
            torch.set_rng_state(noise)
            loss = read_loss(run.loss_fn(model, batch), device)
            if abs(loss.mean.item() - recorded) > 1e-6 * max(abs(recorded), 1e-6):
                return "the loss function gives another number when it is called again"
            weight = torch.tensor(count) if loss.weight is None else loss.weight
            losses.append((loss.mean, weight.to(device).double()))
        optimizer.zero_grad()
        weights = torch.stack([weight for _, weight in losses]).sum()
        # In a step in which nothing counts, gradients are zero.
        weights = torch.where(weights != 0, weights, torch.ones_like(weights))
        with called_by_torch(self.trained.parameters()):
            for mean, weight in losses:
                (mean * weight / weights).backward()
        for name, parameter in self.trained.named_parameters():
            if name in self.frozen[step]:  # and trained since
                parameter.grad = None
        limit = run.config.max_grad_norm
        if limit is not None:
            nn.utils.clip_grad_norm_(self.trained.parameters(), limit)
        if run.config.max_grad_value is not None:
            nn.utils.clip_grad_value_(self.trained.parameters(), run.config.max_grad_value)
        for group, settings in zip(optimizer.param_groups, self.ends[step][0], strict=True):
            group.update(settings)
        optimizer.step()
        return None


def own_attributes(optimizer: Optimizer) -> tuple[dict[str, Any], str | None]:
    """Copies of what an optimizer of the user's own keeps beside its `state` (counters, slow
    weights), and the name of an attribute that cannot be copied."""
    found: dict[str, Any] = {}
    for key, value in vars(optimizer).items():
        known = key in ("defaults", "state", "param_groups") or key.startswith("_")
        if known or callable(value):
            continue
        if not _is_plain(value):
            return found, key
        found[key] = copy.deepcopy(value)
    return found, None


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    if isinstance(value, Tensor):
        return not value.requires_grad  # a parameter, which the model puts back
    return value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype))
