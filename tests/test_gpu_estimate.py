"""`mgt estimate` on a real GPU: the device's clock, memory, power."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from multi_gpu_training.measure.memory_model import MemoryModel
from multi_gpu_training.measure.script_runner import ScriptRunner
from multi_gpu_training.planning.estimate.outcome import available_bytes
from multi_gpu_training.planning.estimate.profiling import Profiled, profile_training

pytestmark = pytest.mark.gpu

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(4096, WIDTH)
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    manager = MultiGPUTrainingManager(MultiGPUConfig(batch_size=BATCH, step_execution="MODE"))
    LOOP
"""
FIT = "manager.fit(net, TensorDataset(x, torch.randint(0, 10, (4096,))), epochs=3)"
OWN = """net, loader, _ = manager.setup_training(net, TensorDataset(x, torch.zeros(4096).long()))
    y = torch.randint(0, 10, (BATCH,), device="cuda")
    for step in range(70):
        manager.trainer.train_step([x[:BATCH].cuda(), y])"""


def estimated(folder: Path, loop: str, width: int, batch: int, mode: str) -> Profiled:
    text = SCRIPT.replace("LOOP", loop).replace("WIDTH", str(width)).replace("BATCH", str(batch))
    (folder / "train.py").write_text(text.replace("MODE", mode))
    runner = ScriptRunner([str(folder / "train.py")], folder / "cases", 20, 20, timeout_s=240)
    return profile_training(runner, "train.py")


def test_a_recorded_step_is_taken_apart_on_the_devices_clock(tmp_path: Path) -> None:
    profile = estimated(tmp_path, FIT, 256, 128, "graph").profile
    assert profile.execution == "graph" and profile.data_on_device
    parts = profile.forward_s + profile.backward_s + profile.optimizer_s
    # Python takes ten times as long as the device for such a step: it must not be in the parts.
    assert 0.3 * median(profile.step_times_s) < parts < 4 * median(profile.step_times_s)
    ready = [bucket.ready_s for bucket in profile.buckets]
    assert ready and ready == sorted(ready) and ready[-1] <= 1.1 * profile.backward_s
    assert profile.gradient_bytes == profile.parameter_bytes + 4
    assert profile.power_w is None or 30 < profile.power_w < 2000


@pytest.mark.parametrize("loop", [FIT, OWN])
def test_memory_by_batch_says_what_fits(tmp_path: Path, loop: str) -> None:
    found = estimated(tmp_path, loop, 4096, 1024, "eager")
    profile = found.profile
    assert [point.per_rank_batch for point in profile.memory] == [512, 1024], found.notes
    less, more = profile.memory
    # Five tensors of 4096 floats a sample and more are kept for backward.
    assert more.peak_bytes - less.peak_bytes > 512 * 4096 * 4
    assert more.backward_bytes is not None and more.backward_bytes <= 1.1 * more.peak_bytes
    memory, room = MemoryModel.from_points(profile.memory), available_bytes(profile)
    assert memory is not None and room is not None
    largest = memory.largest_batch(room)
    assert largest is not None and largest > 10_000
    assert memory.peak(2048) > more.peak_bytes
