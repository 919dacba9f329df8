"""Checkpoints: complete, verified on load, and never lost."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import CONTEXT
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager
from multi_gpu_training.checkpoint import integrity
from multi_gpu_training.checkpoint.file_layout import DTYPE_NAMES
from multi_gpu_training.checkpoint.integrity import damage
from multi_gpu_training.checkpoint.snapshot import Snapshot
from multi_gpu_training.checkpoint.store import CheckpointStore, load
from multi_gpu_training.errors import CheckpointError
from multi_gpu_training.state_dicts import (
    from_text,
    load_optimizer_state,
    model_state,
    optimizer_state,
    pack,
    to_text,
    unpack,
)


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


FILES = [
    "model.safetensors",
    "optimizer.safetensors",
    "state.safetensors",
    "state.json",
    "manifest.json",
]


def damages(size: int) -> Iterator[tuple[str, Callable[[bytes], bytes | None]]]:
    """Twenty ways to harm a file of `size` bytes: flips and cuts all over it, and its loss."""
    for part in range(11):
        place = min(size - 1, part * size // 10)
        flip = lambda raw, at=place: raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :]  # noqa: E731
        yield f"byte {place} flipped", flip
    for part in range(7):
        yield f"cut at {part}/7", lambda raw, end=part * size // 7: raw[:end]
    yield "one byte more", lambda raw: raw + b" "
    yield "removed", lambda raw: None


def test_a_hundred_damages_are_all_seen_and_the_older_one_used(tmp_path: Path) -> None:
    """In every region of every file; the model is large enough to be hashed in chunks."""
    store = CheckpointStore(tmp_path, chunk_bytes=1000)
    older, later = snapshot(1), snapshot(2)
    later.model["large"] = torch.randn(3000)
    later.optimizer["momentum"] = torch.randn(7)
    later.state["ema"] = torch.randn(5)
    old, new = store.save(older), store.save(later)
    facts = json.loads((new / "manifest.json").read_text())["files"]
    assert "sha256_of_chunks" in facts["model.safetensors"] and "sha256" in facts["state.json"]
    tried = 0
    for name in FILES:
        whole = (new / name).read_bytes()
        for what, harm in damages(len(whole)):
            harmed = harm(whole)
            if harmed is None:
                (new / name).unlink()
            else:
                (new / name).write_bytes(harmed)
            found, damaged = store.newest_intact()
            assert found == old, f"{name}, {what}: taken for intact"
            assert len(damaged) == 1 and "step-00000002 is damaged" in damaged[0], (name, what)
            with pytest.raises(CheckpointError, match="damaged"):
                load(new)
            tried += 1
        (new / name).write_bytes(whole)
    assert tried == 100
    assert store.newest_intact() == (new, [])


def test_checkpoints_of_format_1_are_read(tmp_path: Path) -> None:
    """It recorded the plain SHA-256 of every file, whatever its size."""
    path = CheckpointStore(tmp_path).save(snapshot(7))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["format"] = 1
    manifest["files"] = {
        name: {
            "bytes": (path / name).stat().st_size,
            "sha256": hashlib.sha256((path / name).read_bytes()).hexdigest(),
        }
        for name in manifest["files"]
    }
    manifest["sha256"] = integrity.digest(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert damage(path) is None
    assert load(path).step == 7
    manifest["format"] = 99
    manifest["sha256"] = integrity.digest(manifest)
    (path / "manifest.json").write_text(integrity.manifest_text(manifest))
    assert "format 99, which is not known to this version" in str(damage(path))


def test_every_type_of_tensor_is_read_by_any_safetensors_reader(tmp_path: Path) -> None:
    """Also in a layout that the file does not keep, of odd sizes, empty, and shared."""
    base = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    tensors = {str(dtype): (torch.arange(5) % 2).to(dtype) for dtype in DTYPE_NAMES}
    tensors |= {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "transposed": base.transpose(0, 2),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.tensor([1.0]).expand(3, 2),
        "shared": base,
        "parameter": nn.Parameter(torch.ones(3)),
    }
    saved = Snapshot(1, 0, dict(tensors), {}, {}, {})
    back = load_file(CheckpointStore(tmp_path).save(saved) / "model.safetensors")
    assert set(back) == set(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape
        raw, expected = (t.detach().contiguous().flatten() for t in (back[name], tensor))
        assert torch.equal(raw.view(torch.uint8), expected.view(torch.uint8)), name


def test_a_tensor_that_no_file_holds_is_named(tmp_path: Path) -> None:
    saved = snapshot(1)
    saved.model["rare"] = torch.eye(2).to_sparse()
    with pytest.raises(CheckpointError, match=r"cannot save rare in model\.safetensors"):
        CheckpointStore(tmp_path).save(saved)


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

    tensors, aliases, _ = model_state(Tied().state_dict())
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


def train_to_the_end(folder: Path, ready: Any) -> None:
    """160 steps, each saved, from wherever the run is; in a process that may be killed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(320, 8), torch.arange(320) % 3)
    config = MultiGPUConfig(
        training_mode="single",
        device="cpu",
        batch_size=4,
        epochs=2,
        checkpoint_frequency=1,
        save_dir=str(folder),
        run_name="run",
        resume="auto",
        progress="off",
        tensorboard=False,
        log_every=1000,
    )
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 3))
    manager = MultiGPUTrainingManager(config)
    ready.set()
    manager.fit(model, data)
    torch.save(model.state_dict(), folder / "weights.pt")


def test_a_run_that_is_killed_while_saving_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def start(folder: Path) -> Any:
        folder.mkdir(exist_ok=True)
        ready = CONTEXT.Event()
        process = CONTEXT.Process(target=train_to_the_end, args=(folder, ready))
        process.start()
        assert ready.wait(60)
        return process

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    undisturbed = start(whole)
    kills = 0
    for delay_s in (0.05, 0.21, 0.3, 0.13, 0.4, 0.33, 0.27, 0.1):
        process = start(broken)
        process.join(delay_s)
        kills += process.exitcode is None
        process.kill()
        process.join()
    for process in (undisturbed, start(broken)):
        process.join(120)
        assert process.exitcode == 0
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
