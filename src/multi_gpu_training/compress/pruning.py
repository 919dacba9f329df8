"""Prune a model: whole channels, or two of every four weights.

Structured pruning removes channels, so that every machine computes less. Which layers must lose a
channel together follows from the model's graph, which torch-pruning traces.

2:4 sparsity zeroes the two smallest of every four weights in a row. Files halve; only GPUs with
sparse tensor cores (Ampere and later) compute faster with it, CPUs do not.

Both lose accuracy until the model is fine-tuned; `KeepSparse` holds the zeros while it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from multi_gpu_training.compress.quantization import CONVOLUTIONS, linear_from_conv1d, quietly
from multi_gpu_training.errors import CheckpointError, ConfigError, ModelError
from multi_gpu_training.extras import install, installed
from multi_gpu_training.training.callbacks import Callback, Run
from multi_gpu_training.training.step import StepResult

LAYERS = (nn.Linear, *CONVOLUTIONS)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


# 2:4


def sparse_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Layers whose rows can be cut into groups of four, all but the last one: the head reads
    every feature, and is small."""
    linear_from_conv1d(model)
    layers = [(name, one) for name, one in model.named_modules() if type(one) in LAYERS]
    found = {
        name: layer
        for name, layer in layers[:-1]
        if _weight(layer)[0].numel() % 4 == 0  # a row
    }
    if not found:
        raise ModelError(
            "2:4 pruning found no layer whose rows have a multiple of four weights, the last layer "
            "aside; use structured pruning or quantisation"
        )
    return found


def prune_two_of_four(model: nn.Module) -> list[str]:
    """Zero the two smallest of every four weights in place. Returns the names of the weights."""
    names = []
    with torch.no_grad():
        for name, layer in sparse_layers(model).items():
            weight = _weight(layer)
            weight.mul_(two_of_four_mask(weight))
            names.append(f"{name}.weight" if name else "weight")
    return names


def two_of_four_mask(weight: Tensor) -> Tensor:
    """1 for the two largest of every four weights in a row, else 0."""
    groups = weight.detach().abs().reshape(-1, 4)
    kept = groups.topk(2, dim=1).indices
    return torch.zeros_like(groups).scatter_(1, kept, 1.0).view_as(weight)


class KeepSparse(Callback):
    """Zeroes the same weights again after every step of the fine-tuning."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._masks: list[tuple[Tensor, Tensor]] = []

    def on_setup(self, run: Run) -> None:
        parameters = dict(run.model.named_parameters())
        weights = [parameters[name] for name in self.names]
        self._masks = [(weight, (weight != 0).to(weight.dtype)) for weight in weights]

    def on_step_end(self, run: Run, result: StepResult) -> None:
        with torch.no_grad():
            for weight, mask in self._masks:
                weight.mul_(mask)


def check_two_of_four(model: nn.Module, names: Sequence[str]) -> None:
    """Raise if a group of four has more than two weights left."""
    parameters = dict(model.named_parameters())
    for name in names:
        left = (parameters[name].detach().reshape(-1, 4) != 0).sum(1).max()
        if left > 2:
            raise ModelError(f"{name} is not 2:4 sparse after fine-tuning; this is a bug")


# Structured


def prune_channels(
    model: nn.Module, program: nn.Module, examples: tuple[Tensor, ...], ratio: float
) -> dict[str, list[int]]:
    """Remove this share of the channels of every layer in place, the least important ones.

    `program` calls `model` on tensors like `examples`; its outputs keep their form. Returns the
    shapes of all parameters that changed.
    """
    if not 0 < ratio < 1:
        raise ConfigError(f"prune={ratio:g}: use a share of channels between 0 and 1, such as 0.5")
    if not installed("torch_pruning"):
        raise ConfigError(
            f"structured pruning needs torch-pruning; run {install('compress')}", code="MGT105"
        )
    linear_from_conv1d(model)
    before = {name: list(p.shape) for name, p in model.named_parameters()}
    was_training = model.training
    model.eval()
    wanted = _output_shapes(program, examples)
    try:
        _prune(model, program, examples, ratio)
        found = _output_shapes(program, examples)
    except Exception as error:
        raise ModelError(
            f"structured pruning cannot follow this model ({type(error).__name__}: "
            f"{str(error)[:200]}); use --prune 2:4 or --quantize"
        ) from None
    model.train(was_training)
    if found != wanted:
        raise ModelError(
            f"structured pruning changed the outputs from {wanted} to {found}; use --prune 2:4 or "
            "--quantize"
        )
    shapes = {
        name: list(p.shape) for name, p in model.named_parameters() if list(p.shape) != before[name]
    }
    if not shapes:
        raise ModelError(
            f"structured pruning by {ratio:g} found no channel to remove; use a larger share, "
            "--prune 2:4 or --quantize"
        )
    return shapes


def _prune(
    model: nn.Module, program: nn.Module, examples: tuple[Tensor, ...], ratio: float
) -> None:
    with quietly():
        import torch_pruning

        layers = [one for one in model.modules() if type(one) in LAYERS]
        pruner: Any = torch_pruning.pruner.BasePruner(
            program,
            examples,
            importance=torch_pruning.importance.GroupMagnitudeImportance(p=2),
            pruning_ratio=ratio,
            ignored_layers=layers[-1:],  # the outputs
            round_to=1,
        )
        pruner.step()
    for parameter in model.parameters():
        parameter.grad = None


def _output_shapes(program: nn.Module, examples: tuple[Tensor, ...]) -> list[tuple[int, ...]]:
    with torch.no_grad():
        found = program(*examples)
    parts = found if isinstance(found, tuple | list) else (found,)
    return [tuple(part.shape) for part in parts]


def resize(model: nn.Module, shapes: Mapping[str, Sequence[int]]) -> None:
    """Give parameters of a freshly built model the shapes that pruning left."""
    linear_from_conv1d(model)
    parameters = dict(model.named_parameters())
    for name, shape in shapes.items():
        parent, _, attribute = name.rpartition(".")
        smaller = name in parameters and len(shape) == parameters[name].dim()
        if not smaller or any(
            not 0 < new <= old for new, old in zip(shape, parameters[name].shape, strict=True)
        ):
            raise CheckpointError(
                f"the pruned shape {list(shape)} of {name[:100]} fits no part of the model",
                code="MGT702",
            )
        module = model.get_submodule(parent)
        old = parameters[name]
        setattr(module, attribute, nn.Parameter(old.new_empty(tuple(shape)), old.requires_grad))
    for module in model.modules():
        _set_sizes(module)


def _set_sizes(module: nn.Module) -> None:
    """Let the attributes of a layer agree with the shape of its weight."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        return
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = weight.shape
    elif isinstance(module, CONVOLUTIONS):
        module.out_channels = weight.shape[0]
        module.in_channels = weight.shape[1] * module.groups
    elif isinstance(module, nn.LayerNorm):
        module.normalized_shape = tuple(weight.shape)
    elif isinstance(module, BATCH_NORMS) and module.num_features != weight.shape[0]:
        module.num_features = weight.shape[0]
        for name in ("running_mean", "running_var"):
            if getattr(module, name) is not None:
                setattr(module, name, getattr(module, name)[: weight.shape[0]].clone())


def _weight(layer: nn.Module) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight
