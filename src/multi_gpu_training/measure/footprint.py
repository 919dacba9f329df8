"""The memory of a step, counted tensor by tensor while it really runs, beside the step times."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from multi_gpu_training.data.batch import map_tensors
from multi_gpu_training.data.order import Share
from multi_gpu_training.measure.meter import StepTimes
from multi_gpu_training.measure.request import MeasuredRun
from multi_gpu_training.training.callbacks import Callback, Run
from multi_gpu_training.training.step import StepResult

COUNTED = "footprint.json"


class Footprint(Callback):
    """Counts what the first micro-batch keeps for its backward, and what the first step leaves."""

    watches_only = True

    def __init__(self, run: MeasuredRun, folder: str) -> None:
        self.state = run.trainer.state
        self.folder = folder
        self.found = _data_facts(run)
        self._known = {_place(t) for t in [*run.model.parameters(), *run.model.buffers()]}
        self._hooks: Any = None

    def on_forward(self, run: Run, share: Share) -> None:
        if "activations" not in self.found and share.count:
            self.found["activations"] = 0
            self.state.transform = self._see
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, _unchanged)
            self._hooks.__enter__()

    def on_backward(self, run: Run, loss: Tensor) -> None:
        self._leave()

    def on_micro_batch_end(self, run: Run) -> None:
        self._leave()  # where forward failed

    def on_step_end(self, run: Run, result: StepResult) -> None:
        if "parameters" not in self.found:
            self.found |= _state_sizes(run)
            Path(self.folder, COUNTED).write_text(json.dumps(self.found))

    def _leave(self) -> None:
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = self.state.transform = None

    def _see(self, batch: Any) -> Any:
        """The loss is about to get this batch: it is not an activation."""
        parts: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            parts.append(tensor)
            return tensor

        map_tensors(batch, note)
        self.found["batch"] = size_of(parts)
        self._known |= {_place(tensor) for tensor in parts}
        return batch

    def _keep(self, tensor: Tensor) -> Tensor:
        # Views share a storage, which is kept once.
        place = _place(tensor)
        if place not in self._known:
            self._known.add(place)
            self.found["activations"] += tensor.untyped_storage().nbytes()
        return tensor


class StepFootprint(StepTimes):
    """The time and the memory of a step, for `mgt check`."""

    def callbacks(self, run: MeasuredRun) -> list[Callback]:
        # First: the meter changes the length of an epoch, and ends the process.
        counting = [Footprint(run, self.request.out)] if run.placement.is_main else []
        return [*counting, *super().callbacks(run)]


MEASUREMENT = StepFootprint


def size_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _state_sizes(run: Run) -> dict[str, int]:
    parameters = list(run.model.parameters())
    states = run.optimizer.state.values()
    return {
        "parameters": size_of(parameters),
        "buffers": size_of(run.model.buffers()),
        # Some are freed after the step; each is as large as its weight.
        "gradients": size_of(p for p in parameters if p.requires_grad),
        "optimizer": size_of(
            value for state in states for value in state.values() if isinstance(value, Tensor)
        ),
    }


def _data_facts(run: MeasuredRun) -> dict[str, Any]:
    """How much data an epoch has, and where it lies; None where that is not known."""
    loader: Any = run.train_loader
    try:
        steps = loader.steps
    except (AttributeError, TypeError):
        steps = None
    on_gpu = run.placement.device.type == "cuda"
    return {
        "samples": getattr(getattr(loader, "source", None), "samples", None),
        "steps_per_epoch": steps,
        "in_memory": type(getattr(loader, "dataset", None)) is TensorDataset,
        "data_on_device": size_of(getattr(loader, "tensors", ())) if on_gpu else 0,
    }
