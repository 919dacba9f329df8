"""Checkpoints: complete, verified on load, and never lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager
from multi_gpu_training.errors import CheckpointError
from multi_gpu_training.reliability.checkpoint import CheckpointStore, Snapshot, damage, load
from multi_gpu_training.reliability.codec import from_text, pack, to_text, unpack
from multi_gpu_training.reliability.state import load_optimizer_state, model_state, optimizer_state


def snapshot(step: int, value: float = 1.0) -> Snapshot:
    return Snapshot(
        step=step,
        epoch=0,
        model={"weight": torch.full((3, 2), value)},
        aliases={},
        optimizer={"state": {}, "groups": []},
        state={"milestones": Counter({30: 1, 80: 1}), "betas": (0.9, 0.999)},
    )


def test_state_comes_back_with_its_types() -> None:
    state = {
        "tuple": (1, 2.5, None),
        "numbers": {3: "x", 7: [1, (2,)]},
        "set": {1, 2},
        "counter": Counter({10: 2}),
        "tensor": torch.arange(3),
        "bytes": b"ab\x00",
        "inf": float("inf"),
        "dtype": torch.bfloat16,
        "nested": [{"deep": torch.ones(2, dtype=torch.bfloat16)}],
    }
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(pack(state, tensors))
    back = unpack(json.loads(text), tensors)
    assert torch.equal(back.pop("tensor"), state.pop("tensor"))
    assert torch.equal(back.pop("nested")[0]["deep"], state.pop("nested")[0]["deep"])
    assert back == state
    assert type(back["counter"]) is Counter
    assert from_text(json.loads(json.dumps(to_text({"a": (1,)})))) == {"a": (1,)}


def test_state_that_could_run_code_is_refused() -> None:
    with pytest.raises(CheckpointError, match="hook"):
        pack({"hook": lambda: None}, {})


def test_a_checkpoint_is_plain_files_with_hashes(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).save(snapshot(100))
    assert path.name == "step-00000100"
    assert {p.name for p in path.iterdir()} == {
        "model.safetensors",
        "optimizer.safetensors",
        "state.safetensors",
        "state.json",
        "manifest.json",
    }
    assert torch.equal(load_file(path / "model.safetensors")["weight"], torch.ones(3, 2))
    back = load(path)
    assert back.state == snapshot(100).state
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "optimizer.safetensors",
        "state.safetensors",
        "state.json",
        "manifest.json",
    ],
)
@pytest.mark.parametrize(
    "how", ["flip-first", "flip-middle", "flip-last", "truncate", "empty", "remove"]
)
def test_every_damage_is_seen_and_the_older_one_used(tmp_path: Path, name: str, how: str) -> None:
    store = CheckpointStore(tmp_path)
    older = store.save(snapshot(1))
    newer = store.save(snapshot(2))
    file = newer / name
    raw = bytearray(file.read_bytes())
    if how.startswith("flip"):
        place = {"first": 0, "middle": len(raw) // 2, "last": len(raw) - 1}[how.split("-")[1]]
        raw[place] ^= 0x10
        file.write_bytes(raw)
    elif how == "truncate":
        file.write_bytes(raw[:-1])
    elif how == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()
    assert damage(newer) is not None
    assert damage(older) is None
    found, damaged = store.newest_intact()
    assert found == older
    assert len(damaged) == 1 and "step-00000002 is damaged" in damaged[0]
    with pytest.raises(CheckpointError, match="damaged"):
        load(newer)


def test_old_ones_are_dropped_and_the_best_is_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in range(1, 6):
        path = store.save(snapshot(step))
        if step == 2:
            store.mark_best(path)
        store.prune()
    assert sorted(p.name for p in tmp_path.glob("step-*")) == [
        "step-00000002",
        "step-00000004",
        "step-00000005",
    ]
    assert (tmp_path / "best").resolve().name == "step-00000002"


def test_the_same_step_again_replaces_the_first(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(snapshot(5, 1.0))
    path = store.save(snapshot(5, 2.0))
    assert float(load(path).model["weight"][0, 0]) == 2.0


def test_a_crash_between_the_renames_is_undone(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = store.save(snapshot(5))
    path.rename(tmp_path / ".old-step-00000005-123")
    store.recover()
    assert store.newest_intact()[0] == path


def test_after_going_back_the_abandoned_future_does_not_win(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (10, 20, 30):
        store.save(snapshot(step))
    again = CheckpointStore(tmp_path)
    again.branch(10)
    assert again.newest_intact()[0] == tmp_path / "step-00000010"
    again.save(snapshot(15))
    assert again.newest_intact()[0] == tmp_path / "step-00000015"


def test_tied_weights_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

    tensors, aliases, _ = model_state(Tied())
    assert set(tensors) == {"embed.weight"} and aliases == {"head.weight": "embed.weight"}


def test_channels_last_momenta_keep_their_place(tmp_path: Path) -> None:
    """Files hold no strides; a fused optimizer that ignores them trains the wrong weights."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        inputs = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        model(inputs.to(memory_format=torch.channels_last)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    whole, optimizer = build()
    for seed in range(3):
        step(whole, optimizer, seed)
    store = CheckpointStore(tmp_path)
    saved = Snapshot(3, 0, dict(whole.state_dict()), {}, optimizer_state(whole, optimizer), {})
    path = store.save(saved)
    for seed in range(3, 6):
        step(whole, optimizer, seed)
    resumed, fresh = build()
    back = load(path)
    resumed.load_state_dict(back.model)
    load_optimizer_state(resumed, fresh, back.optimizer, "test")
    for seed in range(3, 6):
        step(resumed, fresh, seed)
    assert torch.equal(resumed.weight, whole.weight)


SCRIPT = """
import sys, torch
from torch import nn
from torch.utils.data import TensorDataset
from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager
torch.manual_seed(0)
data = TensorDataset(torch.randn(320, 8), torch.arange(320) % 3)
config = MultiGPUConfig(
    training_mode="single", batch_size=4, epochs=2, checkpoint_frequency=1, save_dir=sys.argv[1],
    run_name="run", resume="auto", progress="off", tensorboard=False, log_every=1000,
)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 3))
manager = MultiGPUTrainingManager(config)
print("ready", flush=True)
manager.fit(model, data)
torch.save(model.state_dict(), sys.argv[1] + "/weights.pt")
"""


def test_a_run_that_is_killed_while_saving_goes_on_bit_for_bit(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    whole = tmp_path / "whole"
    whole.mkdir()
    subprocess.run([sys.executable, str(script), str(whole)], env=env, check=True, timeout=120)
    broken = tmp_path / "broken"
    broken.mkdir()
    kills = 0
    for delay_s in (0.05, 0.21, 0.4, 0.63):
        with subprocess.Popen(
            [sys.executable, str(script), str(broken)], env=env, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(delay_s)
            kills += process.poll() is None
            process.send_signal(signal.SIGKILL)
            process.wait(30)
    subprocess.run([sys.executable, str(script), str(broken)], env=env, check=True, timeout=120)
    assert kills >= 3
    ours, reference = (torch.load(f / "weights.pt") for f in (broken, whole))
    assert all(torch.equal(ours[name], reference[name]) for name in reference)


def test_a_checkpoint_of_another_model_names_the_difference(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(16, 4), torch.arange(16) % 2)
    settings = {
        "training_mode": "single",
        "progress": "off",
        "tensorboard": False,
        "epochs": 1,
        "save_dir": str(tmp_path),
        "run_name": "run",
    }
    MultiGPUTrainingManager(MultiGPUConfig(**settings)).fit(nn.Linear(4, 2), data)
    again = MultiGPUConfig(**settings, resume="auto")
    with pytest.raises(
        CheckpointError, match=r"weight has shape \(2, 4\), the model wants \(3, 4\)"
    ):
        MultiGPUTrainingManager(again).fit(nn.Linear(4, 3), data)
    with pytest.raises(CheckpointError, match=r"torch.float32, the model wants torch.float64"):
        MultiGPUTrainingManager(again).fit(nn.Linear(4, 2).double(), data)


def test_a_full_disk_keeps_the_older_checkpoint(tmp_path: Path) -> None:
    """A real small file system, filled while saving."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("cannot mount a small file system here (needs root)")
    try:
        store = CheckpointStore(disk)
        older = store.save(snapshot(1))
        big = snapshot(2)
        big.model["weight"] = torch.ones(400_000)
        with pytest.raises(CheckpointError, match="could not save step 2"):
            store.save(big)
        assert store.newest_intact() == (older, [])
        assert [p.name for p in disk.iterdir()] == ["step-00000001"]
        store.save(snapshot(3))
    finally:
        subprocess.run(["umount", str(disk)], check=True)
