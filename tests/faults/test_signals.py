"""A run that gets SIGTERM, SIGUSR1 or Ctrl-C saves, exits, and goes on to the same bits."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from processes import Program
from safetensors.torch import load_file

from multi_gpu_training.reliability.integrity import read_manifest

SCRIPT = """
import sys, time, torch
from torch import nn
from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

name, pause, val_pause, grace_s = sys.argv[1], *map(float, sys.argv[2:5])

class Slow(torch.utils.data.Dataset):
    def __init__(self, samples, pause):
        self.inputs = torch.randn(samples, 16, generator=torch.Generator().manual_seed(1))
        self.pause = pause
    def __len__(self):
        return len(self.inputs)
    def __getitem__(self, index):
        time.sleep(self.pause)
        return self.inputs[index], index % 3

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 3))
config = MultiGPUConfig(
    device="cpu", run_name=name, epochs=3, global_batch_size=8, checkpoint_frequency=2,
    log_every=1, tensorboard=False, progress="off", resume="auto", grace_s=grace_s,
)
MultiGPUTrainingManager(config).fit(
    model, Slow(64, pause), Slow(32, val_pause),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-2),
)
"""


def start(
    folder: Path, ranks: int, name: str, pause: float, val: float = 0.0, grace: float = 30
) -> Program:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    given = ("train.py", name, pause, val, grace)
    if ranks == 1:
        return Program(*given, cwd=folder)
    return Program("-m", "multi_gpu_training", "run", "--num-gpus", ranks, *given, cwd=folder)


def logged(folder: Path, name: str) -> int:
    """The last step in the events."""
    file = folder / "runs" / "custom" / name / "events" / "rank-0.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    steps = [json.loads(line) for line in lines if line.endswith("}")]
    return max((event["step"] for event in steps if event["event"] == "step"), default=0)


def weights(folder: Path, name: str) -> tuple[int, dict[str, torch.Tensor]]:
    newest = max((folder / "runs" / "custom" / name / "checkpoints").glob("step-*"))
    return int(read_manifest(newest)["step"]), load_file(newest / "model.safetensors")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path: Path, ranks: int) -> None:
    """Stopped in training, beside saving and in the validation; then left to end."""
    with start(tmp_path, ranks, "whole", 0.0) as program:
        assert program.end_of_run() == 0, program
    stops = [(signal.SIGTERM, 0.03, 0.0), (signal.SIGUSR1, 0.0, 1.0), (signal.SIGINT, 0.03, 0.0)]
    for number, pause, val in stops:
        before = logged(tmp_path, "stopped")
        with start(tmp_path, ranks, "stopped", pause, val) as program:
            # With a slow validation the eight steps of an epoch are over at once.
            aim = before + 2 if not val else before // 8 * 8 + 8
            program.when(lambda aim=aim: logged(tmp_path, "stopped") >= aim)
            time.sleep(random.uniform(0.0, 0.4) + (0.5 if val else 0.0))
            sent = program.send(number)
            assert program.end_of_run(20) == (130 if number == signal.SIGINT else 143), program
            assert time.monotonic() - sent < 10
            assert "saved step" in program.err and "Traceback" not in program.err, program
            assert program.nothing_left(within_s=1), program.alive()
        assert weights(tmp_path, "stopped")[0] >= logged(tmp_path, "stopped")
    with start(tmp_path, ranks, "stopped", 0.0) as program:
        assert program.end_of_run() == 0, program
    (step, ours), (end, reference) = weights(tmp_path, "stopped"), weights(tmp_path, "whole")
    assert step == end
    assert [name for name in reference if not torch.equal(ours[name], reference[name])] == []


def test_ctrl_c_twice_stops_now_and_grace_s_bounds_the_wait(tmp_path: Path) -> None:
    with start(tmp_path, 1, "twice", 1.0) as program:
        program.when(lambda: logged(tmp_path, "twice") >= 1)
        program.send(signal.SIGINT)
        program.when(lambda: "once more" in program.err)
        sent = program.send(signal.SIGINT)
        assert program.end_of_run(5) == 130, program
        assert time.monotonic() - sent < 2
    with start(tmp_path, 1, "slow", 1.0, grace=1.0) as program:
        program.when(lambda: logged(tmp_path, "slow") >= 1)
        sent = program.send(signal.SIGTERM)
        assert program.end_of_run(6) == 143, program
        assert time.monotonic() - sent < 4
        assert "grace_s=1" in program.err, program
