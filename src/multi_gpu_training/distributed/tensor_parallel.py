"""Layers that neighbouring ranks compute together, by the plan that a Hugging Face model brings.

A plan gives modules a style by name: a linear layer is split by its outputs (colwise) or by its
inputs (rowwise), so that between the two no rank needs what another one has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from multi_gpu_training.errors import ModelError

_STYLES: dict[str, Callable[[], Any]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    # A norm over each head, of which a rank has some: its gradient is the sum over all of them.
    "replicated_with_grad_allreduce": lambda: SequenceParallel(
        sequence_dim=2, use_local_output=True
    ),
}


def parallelise(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the layers of `model` over the ranks of `mesh`. Its weights must be equal there."""
    ranks, kind = mesh.size(), type(model).__name__
    plan = getattr(model, "tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        raise ModelError(
            f"tensor_parallel={ranks}: {kind} brings no plan for it (tp_plan of a Hugging Face "
            "model); use training_mode=fsdp without tensor_parallel",
            code="MGT403",
        )
    unknown = sorted(set(plan.values()) - _STYLES.keys())
    if unknown:
        raise ModelError(
            f"tensor_parallel={ranks}: the plan of {kind} asks for {', '.join(unknown)}, which is "
            f"not supported (there are {', '.join(_STYLES)}); train without tensor_parallel",
            code="MGT403",
        )
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(getattr(model, "config", None), field, None)
        if isinstance(heads, int) and heads % ranks:
            raise ModelError(
                f"tensor_parallel={ranks} cannot divide {field}={heads} of {kind}; use a divisor",
                code="MGT403",
            )
    found = {
        name: _STYLES[style]()
        for pattern, style in plan.items()
        for name, _ in model.named_modules()
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name)
    }
    tied = _tied(model)
    parallelize_module(model, mesh, found)
    for names in tied:
        _tie_again(model, names)


def _tied(model: nn.Module) -> list[list[str]]:
    """Names of parameters that are one and the same."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [same for same in names.values() if len(same) > 1]


def _tie_again(model: nn.Module, names: list[str]) -> None:
    first, *others = (model.get_parameter(name) for name in names)
    split = [p.placements if isinstance(p, DTensor) else None for p in (first, *others)]
    if any(placements != split[0] for placements in split):
        raise ModelError(
            f"tensor_parallel: {' and '.join(names)} are one weight, which the plan of "
            f"{type(model).__name__} splits in two ways; train without tensor_parallel",
            code="MGT403",
        )
    for name in names[1:]:
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, first)
