"""Find out whether a step can be recorded as a CUDA graph before trying it."""

from __future__ import annotations

import random
import sys
import warnings
from typing import Any

import numpy as np
import torch

from multi_gpu_training.training.optimizer import optimizer_obstacle
from multi_gpu_training.training.step_state import StepState


def obstacle(state: StepState, asked: str) -> str | None:
    """Why steps of this run can never be compiled (`asked`) or recorded; None if it is worth
    trying."""
    if asked == "compile":
        return state.strategy.compile_obstacle()
    if state.placement.device.type != "cuda":
        return "there is no GPU"
    problem = state.strategy.recording_obstacle()
    if problem is not None:
        return problem
    if state.precision.scaler.is_enabled():
        return "fp16 loss scaling decides on the CPU whether to step"
    if state.config.use_gradient_checkpointing:
        return "use_gradient_checkpointing keeps the random state on the CPU"
    return optimizer_obstacle(state.optimizer)


class StepWatch:
    """Watches eager steps for things a recording would not repeat: waiting for the GPU, and
    drawing random numbers on the CPU. `finding` says what was seen, `draws_noise` whether the GPU
    draws random numbers."""

    def __init__(self, state: StepState) -> None:
        self._state = state
        self._device = state.placement.device
        self.finding: str | None = None
        self.draws_noise = False

    def __enter__(self) -> None:
        self._before = (random.getstate(), _numpy_state())
        self._caught = warnings.catch_warnings(record=True)
        self._seen = self._caught.__enter__()
        warnings.simplefilter("always")
        self._state.watch_noise = self._look_at_generators
        if self._device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")

    def _look_at_generators(self) -> None:
        """Runs at the end of a micro-batch, which began by seeding torch's generators: one that
        nobody drew from is still as seeded."""
        if self._device.type == "cuda":
            generator = torch.cuda.default_generators[self._device.index or 0]
            self.draws_noise = self.draws_noise or generator.get_offset() > 0
        seed = torch.default_generator.initial_seed()
        unused = torch.Generator().manual_seed(seed).get_state()
        if not torch.equal(unused, torch.get_rng_state()):
            self.finding = "it draws random numbers on the CPU"

    def __exit__(self, *_: Any) -> None:
        self._state.watch_noise = None
        if self._device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        self._caught.__exit__(None, None, None)
        for warning in self._seen or []:
            text = str(warning.message)
            if "synchronizing CUDA operation" in text:
                where = f"{warning.filename.rsplit('/', 1)[-1]}:{warning.lineno}"
                wait = f"it waits for the GPU ({where}: .item(), .cpu() or a mask)"
                # Numbers drawn on the CPU are then copied: that wait is only a consequence.
                self.finding = self.finding or wait
            elif "Synchronization debug mode" not in text:
                warnings.warn_explicit(
                    warning.message,
                    warning.category,
                    warning.filename,
                    warning.lineno,
                    _module_of(warning.filename),
                )
        if self._before != (random.getstate(), _numpy_state()):
            self.finding = "it draws random numbers on the CPU"


def _module_of(filename: str) -> str | None:
    """The module name of this file: filters such as `ignore::DeprecationWarning:torch` need it, and
    a recorded warning does not hold it."""
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) == filename:
            return name
    return None


def _numpy_state() -> tuple[Any, ...]:
    name, words, place, has_gauss, cached = np.random.get_state()
    return name, np.asarray(words).tobytes(), place, has_gauss, cached
