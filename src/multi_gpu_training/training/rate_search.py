"""Find a learning rate: train a few steps at rising rates, then restore everything."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.data.batch import share_of
from multi_gpu_training.data.feeding import Loader
from multi_gpu_training.data.own_batches import OwnBatches
from multi_gpu_training.errors import ConfigError, DataError, NonFiniteLossError
from multi_gpu_training.state_dicts import random_state, set_random_state
from multi_gpu_training.training.state_rollback import Counters
from multi_gpu_training.training.step_state import StepState
from multi_gpu_training.training.trainer import MultiGPUTrainer

SMOOTHING = 0.9  # smooths the loss before it is judged; single batches are noisy
DIVERGED = 4.0  # times the best loss so far: beyond this, higher rates tell nothing more


@dataclass(frozen=True)
class RateSearch:
    """rates, losses: of each step, over all ranks. suggestion: the rate at which the smoothed loss
    falls fastest; None if it never fell."""

    rates: list[float]
    losses: list[float]
    suggestion: float | None


def search_rate(
    trainer: MultiGPUTrainer, loader: Loader, lowest: float, highest: float, steps: int
) -> RateSearch:
    """Train `steps` steps at rates from `lowest` to `highest`, then restore everything. Every rank
    must call it."""
    if not 0 < lowest < highest or steps < 2:
        raise ConfigError(
            f"find_learning_rate(lowest={lowest:g}, highest={highest:g}, steps={steps}): give "
            "0 < lowest < highest and at least 2 steps"
        )
    if isinstance(loader, OwnBatches):
        raise DataError("find_learning_rate needs the dataset of setup_training to draw from")
    state = trainer.state
    rates: list[float] = []
    losses: list[float] = []
    groups = state.optimizer.param_groups
    parts = [float(group["lr"]) for group in groups]  # groups keep their ratios
    parts = [part / parts[0] if parts[0] else 1.0 for part in parts]
    best = smooth = 0.0
    with _everything_back(trainer, loader):
        batches = _endless(loader)
        for number in range(steps):
            rate = lowest * (highest / lowest) ** (number / (steps - 1))
            for group, part in zip(groups, parts, strict=True):
                group["lr"] = rate * part
            loss = _one_step(trainer, batches)
            smooth = loss if not losses else SMOOTHING * smooth + (1 - SMOOTHING) * loss
            best = smooth if not losses else min(best, smooth)
            if not math.isfinite(loss):
                break
            rates.append(rate)
            losses.append(loss)
            if smooth > DIVERGED * best > 0:
                break
    return RateSearch(rates, losses, _steepest(rates, losses))


def _one_step(trainer: MultiGPUTrainer, batches: Iterator[Any]) -> float:
    """The loss of one step over all ranks; NaN if the step failed."""
    state = trainer.state
    state.metrics.reset()
    while True:
        batch = next(batches)
        share = share_of(batch)
        assert share is not None
        if not trainer.strategy.settled:
            trainer.strategy.settle(partial(state.settling_batch, batch, share))
        samples = None if state.augment is None else state.sample_numbers(batch, share)
        try:
            # Bypass recorded forms and callbacks: these steps are not part of the run.
            result = trainer.eager.run(batch, samples, share)
        except NonFiniteLossError:  # raised on every rank
            return math.nan
        if result.moved:
            return state.metrics.compute(state.placement).get("loss", math.nan)


def _endless(loader: Loader) -> Iterator[Any]:
    while True:
        found = False
        for batch in loader:
            found = True
            yield batch
        if not found:
            raise DataError("the training data gave no batch", code="MGT302")


@contextmanager
def _everything_back(trainer: MultiGPUTrainer, loader: Loader) -> Iterator[None]:
    state, device = trainer.state, trainer.placement.device
    trainer.execution.verify()
    random, place = random_state(device), (loader.epoch, loader.start)
    modes = [(module, module.training) for module in state.model.modules()]
    trained = state.trained
    tensors = [*trained.parameters(), *trained.buffers(), *state.extra_tensors]
    kept = [tensor.detach().clone() for tensor in tensors]
    optimizer = _optimizer_copy(state)
    counters = Counters.of(state)
    scaler = copy.deepcopy(state.precision.scaler.state_dict())
    schedule_rates = [dict(group) for group in state.optimizer.param_groups]
    state.modes.enter_training()
    try:
        yield
    finally:
        state.abandon_step()
        with torch.no_grad():
            for tensor, before in zip(tensors, kept, strict=True):
                tensor.copy_(before)
        _put_back(state, optimizer)
        for group, before_group in zip(state.optimizer.param_groups, schedule_rates, strict=True):
            group.update(before_group)
        state.precision.scaler.load_state_dict(scaler)
        counters.restore(state)
        for module, training in modes:
            module.training = training
        trainer.nan_guard.reset()
        trainer.nan_guard.start()
        loader.seek(*place)
        set_random_state(random, device)


def _optimizer_copy(state: StepState) -> dict[Tensor, dict[str, Any]]:
    """The optimizer's state: the tensors themselves and their values, because recorded steps keep
    reading the same tensors."""
    return {
        parameter: {
            key: (value, value.detach().clone()) if isinstance(value, Tensor) else value
            for key, value in found.items()
        }
        for parameter, found in state.optimizer.state.items()
    }


def _put_back(state: StepState, kept: dict[Tensor, dict[str, Any]]) -> None:
    state.optimizer.state.clear()
    with torch.no_grad():
        for parameter, found in kept.items():
            state.optimizer.state[parameter] = {
                key: value[0].copy_(value[1]) if isinstance(value, tuple) else value
                for key, value in found.items()
            }


def _steepest(rates: list[float], losses: list[float]) -> float | None:
    """The index where the smoothed loss falls most per step of the search, that is, per factor."""
    smooth: list[float] = []
    for loss in losses:
        smooth.append(SMOOTHING * (smooth[-1] if smooth else 0.0) + (1 - SMOOTHING) * loss)
    smooth = [value / (1 - SMOOTHING ** (n + 1)) for n, value in enumerate(smooth)]
    falls = [after - before for before, after in pairwise(smooth)]
    if not falls or min(falls) >= 0:
        return None
    return rates[falls.index(min(falls)) + 1]
