"""The scripts in benchmarks/ compare what they say they compare."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import line, manager_for, points, squares

FOLDER = str(Path(__file__).parent.parent / "benchmarks")


@pytest.fixture
def gpu_steps(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    import gpu_steps

    return gpu_steps


def test_the_written_out_resnet_is_torchvisions(gpu_steps: Any) -> None:
    from gpu_models import ResNet50

    model = ResNet50()
    # What torchvision.models.resnet50 has.
    assert sum(p.numel() for p in model.parameters()) == 25_557_032
    assert model.layer4[2].conv2.weight.shape == (512, 512, 3, 3)
    assert model.layer2[0].conv2.stride == (2, 2) and model.layer2[0].conv1.stride == (1, 1)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 1000)


def test_an_epoch_is_timed_without_its_validation(
    gpu_steps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from multi_gpu_training.training.loop import TrainingLoop

    now = iter(range(0, 100, 3))
    watch = gpu_steps.Watch("cpu")
    monkeypatch.setattr(watch, "now", lambda: float(next(now)))
    before = dict(vars(TrainingLoop))

    def two_epochs() -> None:
        manager = manager_for(tmp_path, training_mode="single", epochs=2)
        manager.fit(line(), points(), points(), loss_fn=squares, eval_fn=always)
        raise SystemExit(0)

    monkeypatch.setattr("multi_gpu_training.cli.main", two_epochs)
    monkeypatch.setattr(sys, "argv", ["pytest"])
    watch.train([])
    assert watch.epochs_s == [3.0, 3.0]
    assert watch.accuracies == [0.75, 0.75]
    assert watch.execution["mode"] == "eager" and watch.execution["reason"]
    assert dict(vars(TrainingLoop)) == before


def always(model: Any, batch: Any, metrics: Any) -> None:
    metrics.add("accuracy", 3.0, 4.0)


def test_a_fast_step_that_is_no_graph_fails_its_row(gpu_steps: Any) -> None:
    fast = {"step_mean_s": 50e-6, "execution": {"mode": "graph", "share": 1.0, "reason": ""}}
    assert gpu_steps.judged("mlp-fit", dict(fast))["ok"]
    slow = {**fast, "step_mean_s": 150e-6}
    assert not gpu_steps.judged("mlp-fit", slow)["ok"]
    eager = {**fast, "execution": {"mode": "eager", "share": 0.0, "reason": "why"}}
    assert not gpu_steps.judged("mlp-fit", eager)["ok"]
    assert gpu_steps.judged("resnet-fit", {"samples_per_s": 7000.0})["ok"]
    assert not gpu_steps.judged("mlp-fit", {"error": "died"})["ok"]


def test_what_was_measured_is_kept_when_the_rest_is_not(gpu_steps: Any, tmp_path: Path) -> None:
    row = gpu_steps.judged("mlp-plain", {"step_mean_s": 0.002, "peak_bytes": 2**20})
    mine = {"step_mean_s": 1e-4, "peak_bytes": 2**20, "execution": {"mode": "graph", "share": 1}}
    rows = {"mlp-plain": row, "mlp-fit": gpu_steps.judged("mlp-fit", mine)}
    rows["mlp-hf"] = gpu_steps.judged("mlp-hf", {"error": "not done after 60 s"})
    facts = {"device": "GPU", "torch": "2", "python": "3", "cpus": 1, "command": "python x"}
    document = {"machine": facts, "rows": rows, "memory": gpu_steps.memory(rows)}
    gpu_steps.write(tmp_path / "out.json", document)
    text = (tmp_path / "out.md").read_text()
    assert "| MLP step, plain loop | 2,000 us | - | - | - | 1 MB |" in text
    assert "| MLP step, fit | 100 us | <= 100 us | yes | graph, 100% replayed | 1 MB |" in text
    assert "not done after 60 s" in text and "- mlp: 1.00x" in text
    assert (tmp_path / "out.json").exists() and not list(tmp_path.glob("*.new"))


def test_the_plain_loop_is_measured(gpu_steps: Any) -> None:
    from gpu_models import QUICK
    from gpu_peers import Clock, Job, plain

    clock = Clock("cpu", 1, 3)
    plain(Job(QUICK["mlp"], "cpu", clock))
    assert clock.passes == clock.total == 5 and clock.step_s > 0


def test_the_contenders_train_a_cnn_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    from contenders import Task

    task = Task(8, 1, 2, 3, 20, tmp_path, 1, "cnn")
    x, y = task.dataset()[:2]
    assert task.model()(x).shape == (2, 10) and y.shape == (2,)
    assert len(task.ticks) == 1
    assert "overhead" not in sys.modules


def test_a_slowed_net_learns_what_a_fast_one_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    import balance

    batch = list(balance.images(4).tensors)
    grads = []
    for times in (1, 3):
        model = balance.Net(4, times, wait_s=0.0)
        balance.loss_fn(model, batch).backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_memory_is_forecast_before_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    import memory_forecast

    took = {8: 1000, 16: 1800, 12: 1400, 64: 7000}
    tried: list[int] = []

    def train(subject: Any, batch: int, device: str) -> Any:
        tried.append(batch)
        if len(tried) > 4:
            raise torch.OutOfMemoryError("as if")
        return memory_forecast.MemoryPoint(batch, took[batch] * 2**20)

    monkeypatch.setattr(memory_forecast, "train", train)
    name = "MLP 1024-4096-4096"
    row = memory_forecast.examine(name, memory_forecast.TINY[name], "cpu")
    assert [round(asked["error"], 3) for asked in row["asked"]] == [0.0, -0.057]
    assert row["largest"]["trained"] is False  # said to fit, and did not
    text = memory_forecast.table([row], "a GPU")
    assert "OUT OF MEMORY" in text and "said to fit: 1" in text


@pytest.mark.engines
def test_the_sharded_step_is_compared_with_the_same_training_unsharded() -> None:
    command = [sys.executable, f"{FOLDER}/fsdp_step.py", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "| fsdp / single |" in done.stdout and "differ by 0.0e+00" in done.stdout
