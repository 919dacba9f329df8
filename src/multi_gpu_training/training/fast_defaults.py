"""Settings that make a GPU fast by default; each was chosen by measurement.

`fast_defaults=false` turns all of them off; each has its own config field.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.torch_internals import ConvBase, mark_fused

_RECURRENT_OR_CONVOLUTION = (ConvBase, nn.RNNBase)
_LARGE = 1_000_000


@dataclass(frozen=True)
class FastDefaults:
    """The chosen settings for one model on one device."""

    mixed_precision: bool
    channels_last: bool
    fused_optimizer: bool


def choose_fast_defaults(
    config: MultiGPUConfig, model: nn.Module, device: torch.device
) -> FastDefaults:
    """What the config says, or else what pays off for this model on this device.

    16 bits pay off when matrix products are large: in a small perceptron the casts cost more than
    they save. The rule looks only at the model, so every run and every rank chooses the same.
    """
    fast = config.fast_defaults and device.type == "cuda"
    layers = [type(module) for module in model.modules()]
    large = sum(p.numel() for p in model.parameters()) >= _LARGE
    suits_16_bits = large or any(issubclass(kind, _RECURRENT_OR_CONVOLUTION) for kind in layers)
    mixed = config.use_mixed_precision
    if mixed is None:
        asked = config.mixed_precision_dtype != "auto"
        mixed = asked or (fast and suits_16_bits and _computes_bf16())
    channels_last = config.channels_last
    if channels_last is None:
        channels_last = fast and any(
            isinstance(module, (nn.Conv2d, nn.Conv3d)) for module in model.modules()
        )
    fused = config.fused_optimizer
    return FastDefaults(mixed, channels_last, fast if fused is None else fused)


def _computes_bf16() -> bool:
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def lay_out_channels_last(model: nn.Module) -> None:
    """Store convolution weights in the layout that tensor cores read."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, ConvBase) and module.weight.ndim in formats:
                laid_out = module.weight.contiguous(memory_format=formats[module.weight.ndim])
                module.weight.data = laid_out


def fuse(optimizer: Optimizer, sparse: bool = False) -> None:
    """Let Adam, AdamW or SGD update all parameters in one kernel, unless the user chose.

    sparse: some gradients are.
    """
    if type(optimizer) not in (Adam, AdamW, SGD) or sparse:  # kernels refuse sparse gradients
        return
    for group in optimizer.param_groups:
        open_to_it = group.get("foreach") is None and group.get("fused") is None
        # Fused kernels take a recorded step's rate in float32: too coarse for float64 weights.
        kinds = (torch.float32, torch.float16, torch.bfloat16)
        fits = all(p.is_cuda and p.dtype in kinds for p in group["params"])
        if open_to_it and fits and not group.get("differentiable"):
            group["fused"] = True
            group["foreach"] = False
            mark_fused(optimizer)
