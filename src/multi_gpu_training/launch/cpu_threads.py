"""How many threads one process on the CPU computes with, where the user does not say."""

from __future__ import annotations

import os

import psutil
import torch

from multi_gpu_training.portability import usable_cores

LOOK_S = 0.3  # at what others do on the machine


def choose_threads(had: int | None, deterministic: bool) -> str | None:
    """Compute with as many threads as cores are free: waiting for one that others use costs far
    more than computing without it. Returns what was chosen, in a line, where it is not all cores.

    Sums depend on the number of threads in their last bits. So a resumed run keeps the number it
    `had`, and `deterministic` runs take all cores.
    """
    cores = usable_cores()
    if "OMP_NUM_THREADS" in os.environ or torch.get_num_threads() != len(cores):
        return None  # somebody chose
    if had is not None:
        torch.set_num_threads(had)
        return None if had == len(cores) else f"threads: {had}, as the run had before"
    if deterministic or len(cores) == 1:
        return None
    used = psutil.cpu_percent(LOOK_S, percpu=True)
    free = sum(1 - used[core] / 100 for core in cores if core < len(used))
    threads = max(1, min(len(cores), round(free)))
    if threads == len(cores):
        return None
    torch.set_num_threads(threads)
    return (
        f"threads: {threads} of {len(cores)}, as others use the machine (OMP_NUM_THREADS sets "
        "another number)"
    )
