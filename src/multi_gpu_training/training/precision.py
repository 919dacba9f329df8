"""Mixed precision: which 16-bit type this device uses, and loss scaling if it needs it."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch

from multi_gpu_training.accelerator import computes_bf16, device_name
from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.errors import ConfigError

_switched: dict[str, bool] = {}


class Precision:
    """bf16 if the hardware supports it; otherwise fp16 with loss scaling."""

    def __init__(self, config: MultiGPUConfig, device: torch.device, mixed: bool) -> None:
        self.device, self.device_type = device, device.type
        self.dtype = _dtype(config, device) if mixed else None
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype is torch.float16)

    def autocast(self) -> AbstractContextManager[object]:
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)

    def describe(self) -> str:
        if self.dtype is None:
            return "float32"
        if self.dtype is torch.bfloat16:
            return "bf16 mixed precision"
        return "fp16 mixed precision with loss scaling"


def _dtype(config: MultiGPUConfig, device: torch.device) -> torch.dtype:
    wanted = config.mixed_precision_dtype
    has_bf16 = computes_bf16(device)
    if wanted == "bf16" and not has_bf16:
        raise ConfigError(
            f"mixed_precision_dtype=bf16, but {device_name(device)} computes no bf16; use fp16 or "
            "auto"
        )
    if wanted == "fp16" or not has_bf16:
        return torch.float16
    return torch.bfloat16


def set_arithmetic(config: MultiGPUConfig, reproducible: bool = False) -> None:
    """Set the process-wide torch switches that a run needs.

    `reproducible` is `deterministic` for code with operations that have no such variant.
    """
    tf32 = config.fast_defaults if config.allow_tf32 is None else config.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    if config.deterministic or reproducible:
        # cuBLAS reads this when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=not config.deterministic)
        torch.backends.cudnn.benchmark = config.cudnn_benchmark
        _switched["deterministic"] = True
        return
    if _switched.pop("deterministic", False):  # by an earlier run here, not the user
        torch.use_deterministic_algorithms(False)
    if config.cudnn_benchmark:
        torch.backends.cudnn.benchmark = _switched["autotuner"] = True
    elif _switched.pop("autotuner", False):
        torch.backends.cudnn.benchmark = False
