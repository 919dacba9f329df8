"""Train a PyTorch model on many GPUs and get what one GPU computes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multi_gpu_training.config import MultiGPUConfig
    from multi_gpu_training.config_fields import TrainingMode
    from multi_gpu_training.data.sharded_stream import ShardedStream
    from multi_gpu_training.delivery.loaded_model import LoadedModel, load
    from multi_gpu_training.errors import ConfigError, MultiGPUError
    from multi_gpu_training.faults.fault_tolerance import FaultToleranceManager
    from multi_gpu_training.gpus import get_gpu_info, print_gpu_info
    from multi_gpu_training.launch.launcher import launch_distributed_training
    from multi_gpu_training.launch.notebook import notebook_launch
    from multi_gpu_training.manager import MultiGPUTrainingManager
    from multi_gpu_training.monitoring.performance import PerformanceMonitor
    from multi_gpu_training.planning.bench.run_comparison import comparison_report
    from multi_gpu_training.planning.estimate.speedup import (
        estimate_training_speedup,
        print_training_speedup_estimates,
    )
    from multi_gpu_training.training.callbacks import Callback, Hook
    from multi_gpu_training.training.metrics import MetricsCollector
    from multi_gpu_training.training.progress import FitResult
    from multi_gpu_training.training.step import StepResult
    from multi_gpu_training.training.trainer import (
        DataParallelTrainer,
        DistributedDataParallelTrainer,
        FullyShardedTrainer,
        MultiGPUTrainer,
        SingleDeviceTrainer,
    )

_HOMES = {
    "ConfigError": "errors",
    "MultiGPUError": "errors",
    "MultiGPUConfig": "config",
    "TrainingMode": "config_fields",
    "launch_distributed_training": "launch.launcher",
    "notebook_launch": "launch.notebook",
    "MetricsCollector": "training.metrics",
    "PerformanceMonitor": "monitoring.performance",
    "comparison_report": "planning.bench.run_comparison",
    "estimate_training_speedup": "planning.estimate.speedup",
    "print_training_speedup_estimates": "planning.estimate.speedup",
    "get_gpu_info": "gpus",
    "print_gpu_info": "gpus",
    "FaultToleranceManager": "faults.fault_tolerance",
    "Callback": "training.callbacks",
    "Hook": "training.callbacks",
    "FitResult": "training.progress",
    "MultiGPUTrainingManager": "manager",
    "DataParallelTrainer": "training.trainer",
    "DistributedDataParallelTrainer": "training.trainer",
    "FullyShardedTrainer": "training.trainer",
    "MultiGPUTrainer": "training.trainer",
    "ShardedStream": "data.sharded_stream",
    "SingleDeviceTrainer": "training.trainer",
    "StepResult": "training.step",
    "LoadedModel": "delivery.loaded_model",
    "load": "delivery.loaded_model",
}

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "ConfigError",
    "DataParallelTrainer",
    "DistributedDataParallelTrainer",
    "FaultToleranceManager",
    "FitResult",
    "FullyShardedTrainer",
    "Hook",
    "LoadedModel",
    "MetricsCollector",
    "MultiGPUConfig",
    "MultiGPUError",
    "MultiGPUTrainer",
    "MultiGPUTrainingManager",
    "PerformanceMonitor",
    "ShardedStream",
    "SingleDeviceTrainer",
    "StepResult",
    "TrainingMode",
    "comparison_report",
    "estimate_training_speedup",
    "get_gpu_info",
    "launch_distributed_training",
    "load",
    "notebook_launch",
    "print_gpu_info",
    "print_training_speedup_estimates",
]


def __getattr__(name: str) -> Any:
    # Names are imported when first used: `mgt --help` must not wait for torch.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
