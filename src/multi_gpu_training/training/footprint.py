"""What one training step keeps in memory, counted tensor by tensor while it really runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.batch import map_tensors

if TYPE_CHECKING:
    from multi_gpu_training.manager import MultiGPUTrainingManager

FILE = "footprint.json"
ASKED = "footprint-asked.json"
SIZES = "footprint-sizes.json"
ASKED_FIELDS = (
    "epochs",
    "max_steps",
    "batch_size",
    "global_batch_size",
    "gradient_accumulation_steps",
    "num_workers",
    "keep_last",
)


def note_asked(config: MultiGPUConfig, folder: str) -> None:
    """What the user's own config says, before a measurement changes it."""
    found = {name: getattr(config, name) for name in ASKED_FIELDS}
    if config.lr_scaling != "none":
        found["base_batch_size"] = config.base_batch_size or config.batch_size
    Path(folder, ASKED).write_text(json.dumps(found))


def note_footprint(manager: MultiGPUTrainingManager, folder: str) -> None:
    """Count the first step of this training and write it to `folder`, from rank 0."""
    if not manager.placement.is_main:
        return
    # Before the first step, which a batch that does not fit would end.
    Path(folder, SIZES).write_text(json.dumps(asdict(manager.sizes)))
    trainer = manager.trainer
    step = trainer.train_step
    found = _length(manager)
    state = {"written": False}

    def counted(batch: Any) -> Any:
        if state["written"]:
            return step(batch)
        saved = _Saved(manager.model, batch)
        with torch.autograd.graph.saved_tensors_hooks(saved.keep, _as_it_is):
            result = step(batch)
        found.setdefault("batch", saved.batch_bytes)
        found.setdefault("activations", saved.count)
        if result.moved:
            state["written"] = True
            found.update(_of_model(manager))
            Path(folder, FILE).write_text(json.dumps(found))
        return result

    trainer.train_step = counted  # type: ignore[method-assign]


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class _Saved:
    """Counts each storage that backward will read, once; weights and the batch are not of it."""

    def __init__(self, model: torch.nn.Module, batch: Any) -> None:
        self._known = {_place(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        parts = _tensors_of(batch)
        self.batch_bytes = size_of(parts)
        self._known |= {_place(tensor) for tensor in parts}
        self.count = 0

    def keep(self, tensor: Tensor) -> Tensor:
        place = _place(tensor)
        if place not in self._known:
            self._known.add(place)
            self.count += tensor.untyped_storage().nbytes()
        return tensor


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _tensors_of(batch: Any) -> list[Tensor]:
    gather = getattr(batch, "gather", None)
    if callable(gather) and not isinstance(batch, Tensor):
        batch = gather(batch.index)  # it lies on the GPU, and is put together there
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(batch, note)
    return found


def size_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _of_model(manager: MultiGPUTrainingManager) -> dict[str, int]:
    parameters = list(manager.model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    states = manager.trainer.optimizer.state.values()
    return {
        "parameters": size_of(parameters),
        "buffers": size_of(manager.model.buffers()),
        # Some are freed after the step; each is as large as its weight.
        "gradients": size_of(trained),
        "optimizer": size_of(
            value for state in states for value in state.values() if isinstance(value, Tensor)
        ),
    }


def _length(manager: MultiGPUTrainingManager) -> dict[str, Any]:
    """How much data an epoch has, and where it lies; None where that is not known."""
    loader: Any = manager.train_loader
    dataset = getattr(loader, "dataset", None)
    on_device = getattr(loader, "tensors", ())
    try:
        steps = loader.steps
    except (AttributeError, TypeError):
        steps = None
    return {
        "samples": getattr(getattr(loader, "source", None), "samples", None),
        "steps_per_epoch": steps,
        "in_memory": type(dataset) is TensorDataset,
        "data_on_device": size_of(on_device) if manager.placement.device.type == "cuda" else 0,
    }
