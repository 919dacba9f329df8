"""Sharded checkpoints: every rank writes its part, and any ranks and any strategy read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from ranks import run_ranks
from safetensors.torch import load_file
from tiny import FEATURES, manager_for, points, squares
from torch import Tensor, nn
from typer.testing import CliRunner

from multi_gpu_training.checkpoint.inspection import inspect
from multi_gpu_training.checkpoint.store import load
from multi_gpu_training.cli.app import app

Weights = dict[str, Tensor]


class Tied(nn.Module):
    """Two blocks with seven rows each, a scalar, and a weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.read = nn.Linear(FEATURES, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.write = nn.Linear(FEATURES, 7, bias=False)
        self.write.weight = self.read.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.read(x).tanh()
        for block in self.blocks:
            x = block(x).tanh()
        return (x @ self.write.weight * self.scale).sum(1, keepdim=True)


def train(folder: Path, name: str, mode: str, until: int, **more: Any) -> Weights:
    """Train a run up to a step, from its last checkpoint where it has one."""
    settings = {"global_batch_size": 4, "epochs": 9, "run_name": name, "resume": "auto"}
    keeps = {"enable_fault_tolerance": True, "keep_last": 9, "seed": 3}
    manager = manager_for(
        folder, training_mode=mode, max_steps=until, **{**settings, **keeps, **more}
    )
    adamw = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)  # noqa: E731
    manager.fit(Tied(), points(dtype=torch.float64), loss_fn=squares, optimizer=adamw)
    return {n: t.detach().clone() for n, t in manager.trainer.full_state().items()}


def broken_off(folder: Path) -> tuple[Weights, Weights]:
    """A training in one go, and one that was resumed in between, on the same ranks."""
    whole = train(folder, "whole", "fsdp", 6)
    train(folder, "parts", "fsdp", 3, checkpoint_frequency=2)
    return whole, train(folder, "parts", "fsdp", 6)


def apart(ours: Weights, theirs: Weights) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[n] - theirs[n]).norm() / theirs[n].norm()) for n in theirs)


def merge(*words: Path) -> str:
    found = CliRunner().invoke(app, ["checkpoints", "merge", *map(str, words)])
    return f"{found.exit_code} {found.output}{found.exception}"


def test_a_sharded_run_resumes_bit_for_bit_and_anywhere(tmp_path: Path) -> None:
    whole, parts = run_ranks(3, broken_off, tmp_path)[0]
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    checkpoint = tmp_path / "custom" / "parts" / "checkpoints" / "step-00000003"
    names = [f"shard-0000{rank}-of-00003.safetensors" for rank in (1, 2, 3)]
    assert sorted(path.name for path in checkpoint.glob("shard-*")) == names
    assert not any(path.name.startswith(".") for path in checkpoint.iterdir())
    assert set(names) < set(json.loads((checkpoint / "manifest.json").read_text())["files"])
    sizes = [sum(t.numel() for t in load_file(checkpoint / name).values()) for name in names]
    assert max(sizes) < 0.5 * sum(sizes)  # optimizer state is split as well

    # Other ranks, other strategies, and back: the same training. 1e-12: float64, other sums.
    step3 = load(checkpoint).model
    run_ranks(2, train, tmp_path, "parts", "ddp", 8)
    run_ranks(1, train, tmp_path, "parts", "single", 9)
    run_ranks(4, train, tmp_path, "parts", "fsdp", 11)
    last = run_ranks(2, train, tmp_path, "parts", "fsdp", 12)[1]
    plain = run_ranks(1, train, tmp_path, "plain", "single", 12)[0]
    assert apart(last, plain) < 1e-12

    # Merged into one file that anything reads.
    run, out = tmp_path / "custom" / "parts", tmp_path / "merged.safetensors"
    assert merge(run, out).startswith("0 the weights of step 12")
    merged = load_file(out)
    assert torch.equal(merged["blocks.1.weight"], last["blocks.1.weight"])
    assert torch.equal(merged["write.weight"], last["read.weight"])
    model = Tied()
    model.load_state_dict(merged)
    assert merge(checkpoint, tmp_path / "folder").startswith("0 the weights of step 3")
    again = load_file(tmp_path / "folder" / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in step3.items())

    # A flipped bit in any rank's file is found.
    newest = run / "checkpoints" / "step-00000012"
    file = newest / "shard-00002-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    listed = {item.name: item.problem for item in inspect(run).checkpoints}
    assert listed["step-00000012"] == "shard-00002-of-00002.safetensors was changed"
    assert listed["step-00000011"] is None
    assert "was changed" in merge(newest, tmp_path / "never")
    assert not (tmp_path / "never").exists()
