"""Which device a run computes on, and what that kind of device can and cannot do.

Tested on CPUs and NVIDIA GPUs. Apple's `mps`, Intel's `xpu` and AMD GPUs under ROCm, which torch
calls `cuda` as well, follow torch's documentation and are untested.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from multi_gpu_training.errors import ConfigError, ModelError

# In the order in which `device: auto` takes them.
ACCELERATORS = ("cuda", "xpu", "mps")
NO_FLOAT64 = {"mps"}


def is_available(kind: str) -> bool:
    if kind == "mps":
        return bool(torch.backends.mps.is_available())
    return bool(getattr(torch, kind).is_available()) if kind in ACCELERATORS else kind == "cpu"


def choose(asked: str) -> str:
    """The kind of device for `device: asked`; ConfigError where the machine has none."""
    if asked == "auto":
        return next((kind for kind in ACCELERATORS if is_available(kind)), "cpu")
    if not is_available(asked):
        others = [kind for kind in ACCELERATORS if is_available(kind)]
        instead = f"use device={others[0]}" if others else "use device=cpu"
        raise ConfigError(
            f"device={asked} was asked for, but {why_missing(asked)}; {instead}, or auto; "
            "`mgt info` shows what there is",
            code="MGT201",
        )
    return asked


def why_missing(kind: str) -> str:
    """Why torch cannot use this kind of device here."""
    if kind == "mps":
        if not torch.backends.mps.is_built():
            return f"torch {torch.__version__} is built without MPS: it is for Macs with Apple GPUs"
        return "this Mac has no GPU for MPS, or its macOS is too old (12.3 or newer)"
    if kind == "xpu":
        return "torch sees no Intel GPU: it takes torch's xpu build and Intel's GPU driver"
    return "torch sees no GPU"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "xpu":
        return str(torch.xpu.get_device_name(device))
    return "Apple GPU" if device.type == "mps" else "CPU"


def wide_float(device: torch.device) -> torch.dtype:
    """The type for sums of weights and metrics: float64, except on mps, which has none."""
    return torch.float32 if device.type in NO_FLOAT64 else torch.float64


def widened(tensor: Tensor) -> Tensor:
    return tensor.to(wide_float(tensor.device))


def computes_bf16(device: torch.device) -> bool:
    """Whether bf16 is arithmetic of the device, and not emulated."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "xpu":
        return bool(torch.xpu.is_bf16_supported())
    return True  # CPUs always; every Mac that torch supports


def refuse_float64(model: nn.Module, device: torch.device) -> None:
    """Raise where a model holds float64 parameters or buffers and the device has no float64."""
    if device.type not in NO_FLOAT64:
        return
    names = [name for name, t in model.state_dict().items() if t.dtype is torch.float64]
    if names:
        raise ModelError(
            f"device={device.type} has no float64, and {len(names)} tensors of the model are "
            f"float64, the first is {names[0]!r}; call model.float(), or use device=cpu",
            code="MGT403",
        )


class DeviceGenerator:
    """The default generator of an mps or xpu device, which torch has no object for."""

    def __init__(self, kind: str) -> None:
        self._module: Any = getattr(torch, kind)

    def get_state(self) -> Tensor:
        state: Tensor = self._module.get_rng_state()
        return state

    def set_state(self, state: Tensor) -> None:
        self._module.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        self._module.manual_seed(seed)


def device_generators(device: torch.device) -> list[Any]:
    """The generator that noise on the device comes from; none for the CPU."""
    if device.type == "cuda":
        return [torch.cuda.default_generators[device.index or 0]]
    return [DeviceGenerator(device.type)] if device.type in ACCELERATORS else []
