"""Make the changes of a compression once more, on a freshly built model, and load its weights.

A checkpoint of a compressed model lists its steps under "compression" in its description:

    {"method": "distil", ...}                                    nothing to do: the model is small
    {"method": "prune", "kind": "structured", "shapes": {...}}
    {"method": "prune", "kind": "2:4", "weights": [...]}
    {"method": "quantize", "scheme": "int4", "group": 32}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter
from torch import Tensor, nn

from multi_gpu_training.compress.pruning import resize
from multi_gpu_training.compress.quantization import linear_from_conv1d, quantize
from multi_gpu_training.compress.tensor_packing import load_tensors
from multi_gpu_training.errors import CheckpointError, MultiGPUError

Step = dict[str, Any]


def restore(
    model: nn.Module, steps: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]
) -> None:
    """Change `model` as the steps say, and fill it with the tensors of the checkpoint."""
    for step in steps:
        try:
            _repeat(model, dict(step))
        except MultiGPUError:
            raise
        except Exception as error:  # steps of nonsense fail in every way there is
            raise CheckpointError(
                f"the checkpoint's compression step {str(step)[:200]} is not understood "
                f"({type(error).__name__}: {error!s:.200}); load it with the version that wrote it",
                code="MGT702",
            ) from None
    load_tensors(model, tensors)
    model.requires_grad_(False)


def _repeat(model: nn.Module, step: Step) -> None:
    method = step["method"]
    if method == "quantize":
        quantize(model, str(step["scheme"]), int(step.get("group", 32)))
    elif method == "prune":
        linear_from_conv1d(model)
        if step["kind"] == "structured":
            resize(model, TypeAdapter(dict[str, list[int]]).validate_python(step["shapes"]))
    elif method != "distil":
        raise CheckpointError(
            f"the checkpoint was compressed by {str(method)[:80]!r}, which this version does not "
            "know; install a newer one"
        )


def check_steps(steps: Any) -> None:
    """Raise a ValueError where these are not the steps of a compression; None is none."""
    for step in TypeAdapter(list[Step]).validate_python(steps or [], strict=True):
        TypeAdapter(list[str]).validate_python(step.get("weights", []), strict=True)
        TypeAdapter(str).validate_python(step.get("method"), strict=True)


def sparse_weights(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the weights that are 2:4 sparse after these steps."""
    return [name for step in steps if step.get("kind") == "2:4" for name in step.get("weights", [])]
