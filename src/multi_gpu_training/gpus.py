"""What GPUs this machine has."""

from __future__ import annotations

from typing import Any

import torch

from multi_gpu_training import accelerator


def get_gpu_info() -> list[dict[str, Any]]:
    """One entry per visible GPU: index, name, uuid, memory, compute capability."""
    if not torch.cuda.is_available():
        return []
    return [_describe(index) for index in range(torch.cuda.device_count())]


def print_gpu_info() -> None:
    """Print a table of the visible GPUs, or why there is none."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    gpus = get_gpu_info()
    kind = accelerator.choose("auto")
    if not gpus and kind != "cpu":
        name = accelerator.device_name(torch.device(kind))
        console.print(f"{name}: one process trains on it (device={kind}).", markup=False)
        return
    if not gpus:
        console.print(f"No GPU: {why_no_gpu()}. Training runs on the CPU (gloo).", markup=False)
        return
    table = Table("GPU", "name", "memory", "free", "compute", "bf16", "UUID")
    for gpu in gpus:
        table.add_row(
            str(gpu["index"]),
            gpu["name"],
            f"{gpu['total_memory_gb']:.1f} GB",
            f"{gpu['free_memory_gb']:.1f} GB",
            gpu["compute_capability"],
            "yes" if gpu["bf16"] else "no",
            gpu["uuid"],
        )
    console.print(table)


def why_no_gpu() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch has CUDA but finds no driver or device (CUDA_VISIBLE_DEVICES? nvidia-smi?)"
    return "CUDA_VISIBLE_DEVICES hides every device"


def _describe(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return {
        "index": index,
        "name": properties.name,
        "uuid": f"GPU-{getattr(properties, 'uuid', 'unknown')}",
        "total_memory_gb": total / 2**30,
        "free_memory_gb": free / 2**30,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multi_processor_count": properties.multi_processor_count,
        "bf16": properties.major >= 8,
    }
