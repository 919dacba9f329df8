"""`mgt check` as a user runs it: the whole report, the curve, and what a training needs."""

from __future__ import annotations

import csv
import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from processes import Program, Said, mgt_here
from ranks import run_ranks
from test_bench import run_in_rank

from multi_gpu_training.cli import train_command as train
from multi_gpu_training.data.feeding import BatchSizes
from multi_gpu_training.measure.request import MeasureRequest
from multi_gpu_training.measure.script_runner import ScriptRunner
from multi_gpu_training.planning.check.check_report import Finding, Level
from multi_gpu_training.planning.check.training_fit import Fitting, TrainingFit, judge
from multi_gpu_training.planning.forecast.interconnect import measured

LIMIT_S = 240
SCRIPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x):
        if len(x) > LARGEST:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return self.layers(x)


if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(200, 8)
    config = MultiGPUConfig(device="cpu", batch_size=16, epochs=7)
    MultiGPUTrainingManager(config).fit(Net(), TensorDataset(x, (x[:, 0] > 0).long()))
"""


def test_this_machine_is_checked_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("check", "--device", "cpu", "--json", "--save-curve", "curve.csv")
    said = mgt_here(monkeypatch, capsys, *words)
    code, report = said.code, json.loads(said.out)
    assert report["ready"] == (code == 0)
    topics = {raw["topic"]: raw for raw in report["findings"]}
    assert set(topics) >= {
        *("torch", "CUDA", "/dev/shm", "open files", "cores", "memory", "OMP threads", "disk"),
        *("hostname", "port", "meeting", "all-reduce", "training step", "curve"),
    }
    for raw in report["findings"]:
        assert raw["level"] == "pass" or raw["remedy"]
    for name in ("meeting", "all-reduce", "training step", "curve"):
        assert topics[name]["level"] == "pass", topics[name]
    with (tmp_path / "curve.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["bytes"]) for row in rows] == [p["bytes"] for p in report["all_reduce"]]
    for row in rows:
        assert (row["gpus"], row["nodes"], row["hardware"]) == ("2", "1", "CPU")
        speed = int(row["bytes"]) / float(row["time_us"]) / 1e3  # two ranks: bus = algorithm
        assert float(row["busbw_GBps"]) == pytest.approx(speed, rel=0.02, abs=1e-3)
    # `mgt estimate --curve` reads it.
    size, seconds = int(rows[-1]["bytes"]), float(rows[-1]["time_us"]) / 1e6
    assert measured(Path("curve.csv")).allreduce_s(size, 2) == pytest.approx(seconds)


class WarmRunner(ScriptRunner):
    """Trains in the ranks of the tests: seconds less for each case."""

    def start(self, request: MeasureRequest, log: Path) -> int:
        (script,) = self.command
        path = str(Path(request.save()).resolve())
        answers = run_ranks(request.ranks, run_in_rank, script, path)
        log.write_text("\n".join(text for _, text in answers))
        return max(code for code, _ in answers)


def fitted(folder: Path, largest: int, ranks: int = 2) -> tuple[TrainingFit | None, list[Finding]]:
    script = folder / "train.py"
    script.write_text(SCRIPT.replace("LARGEST", str(largest)))
    runner = WarmRunner([str(script)], folder / "out", 4, 1, "cpu", ranks_at_hand=ranks)
    said: list[Finding] = []
    found = Fitting(runner, ranks, [], 2**33, said.append).measure()
    return found, said


def test_a_step_is_counted_tensor_by_tensor(tmp_path: Path) -> None:
    fit, said = fitted(tmp_path, 10_000)
    assert fit is not None and not said
    weights = 4 * (8 * 32 + 32 + 32 * 2 + 2)
    parts = fit.memory_parts
    assert (parts.parameters, parts.gradients) == (weights, weights)
    assert 2 * weights <= parts.optimizer <= 2 * weights + 64  # AdamW: two moments, and counters
    assert parts.batch == 16 * (8 * 4 + 8)
    # The first layer's output after ReLU, the logits' logarithm and what the loss keeps of its
    # weights: at least the first, and no more than every output once over.
    assert 16 * 32 * 4 <= parts.activations <= 16 * (32 + 32 + 2 + 2) * 4 + 64
    assert fit.asked["epochs"] == 7 and fit.counted["samples"] == 200 and fit.batch == 16
    assert fit.capped_by_data and fit.largest == 200
    assert [speed.ranks for speed in fit.speeds] == [1, 2]
    assert all(speed.samples_per_s > 0 for speed in fit.speeds)
    fit.too_busy = False  # which is not this test's
    lines = {one.topic: one for one in judge(fit, 2**30)}
    assert all(one.level is Level.PASS for one in lines.values())
    full = {one.topic: one for one in judge(fit, 100)}
    assert full["checkpoints"].level is Level.FAIL


def test_a_batch_that_does_not_fit_is_halved_until_it_does(tmp_path: Path) -> None:
    fit, said = fitted(tmp_path, 5, ranks=1)
    assert fit is not None and fit.batch == 4
    # The step stays what it was, in four parts.
    assert fit.chosen.batch == BatchSizes(4, 4, 1, 16)
    assert fit.chosen.settings == {"batch_size": 4, "global_batch_size": 16}
    assert "16 samples per CPU rank do not fit" in said[0].text and "4 do" in said[0].text
    assert "--batch-size 4 global_batch_size=16" in said[0].remedy
    nothing, said = fitted(tmp_path, 0, ranks=1)
    assert nothing is None and "nor do 1" in said[0].text


def test_a_recipe_ends_with_a_command_that_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The machine's part is another test's; the training's is as bench measures it."""
    from multi_gpu_training.planning.check.checkup import Checkup

    def start(runner: ScriptRunner, request: MeasureRequest, log: Path) -> int:
        request.save()
        log.write_text("")
        times = [0.01] * 4 if request.ranks == 1 else [0.012] * 4
        batch = request.settings.get("batch_size", 32)
        record: dict[str, Any] = {
            "step_times_s": times,
            "samples_per_step": batch * request.ranks,
            "per_rank_batch": batch,
            "accumulation": 1,
            "copies": request.ranks,
            "global_batch": batch * request.ranks,
            "peak_bytes": 10**8 + batch * 10**4,
            "reserved_bytes": 10**8,
            "precision": "float32",
        }
        counted = {"parameters": 10**6, "activations": 10**5, "samples": 1437, "in_memory": True}
        for name, value in (
            *((f"rank-{rank}", record) for rank in range(request.ranks)),
            ("footprint", counted),
            ("asked", {"epochs": 3, "batch_size": 32}),
        ):
            (Path(request.out) / f"{name}.json").write_text(json.dumps(value))
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ScriptRunner, "start", start)
    monkeypatch.setattr(Checkup, "run", lambda self: None)

    def mgt(*words: object) -> Said:
        return mgt_here(monkeypatch, capsys, "check", *words, "--device", "cpu")

    said = mgt("image", "--mode", "cnn")
    assert said.code == 0, said.err
    command = said.out.strip().splitlines()[-1].strip()
    assert command == (
        "mgt train image --mode cnn --num-gpus 2 --batch-size 32 num_workers=0 "
        "use_mixed_precision=false"
    )
    words = shlex.split(command)[3:]
    cut = words.index("--num-gpus")
    _, config, _ = train.resolve(
        train.TrainFlags("image", 2, {}, {}, [*words[:cut], *words[cut + 2 :]])
    )
    assert (config.batch_size, config.num_workers, config.use_mixed_precision) == (32, 0, False)
    for part in ("parameters", "gradients", "optimizer", "batch", "activations", "2 CPU ranks"):
        assert part in said.out
    plain = json.loads(mgt("image", "--json").out)
    assert plain["advice"]["recommendation"]["ranks"] == 2
    assert plain["advice"]["times"][1]["samples_per_s"] == pytest.approx(64 / 0.012)


@pytest.mark.gpu
def test_a_machine_with_gpus_is_checked_and_a_recipe_measured(tmp_path: Path) -> None:
    words = ("check", "image", "--json", "--save-curve", "curve.csv")
    env = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    with Program("-m", "multi_gpu_training", *words, cwd=tmp_path, env=env) as program:
        program.end_of_run(LIMIT_S)
        report = json.loads(program.out)
        assert program.nothing_left(), program
    topics = {raw["topic"]: raw for raw in report["findings"]}
    for name in ("driver", "NCCL", "GPU 0", "host - GPU 0", "all-reduce", "training step"):
        assert topics[name]["level"] != "fail", topics[name]
    assert topics["host - GPU 0"]["facts"]["right"]
    memory = report["advice"]["memory"]
    assert memory["together"] == sum(memory.values()) - memory["together"]
    assert memory["parameters"] > 0 and memory["activations"] > 0
    assert report["advice"]["largest_batch_tried"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["imag"], "did you mean 'image'?"),
        (["nowhere.py"], "mgt check nowhere.py: no such file"),
        (["image", "batchsize=3"], "batchsize"),
        (["--timeout", "0"], "--timeout 0: give seconds"),
        (["--device", "tpu"], "--device tpu: use auto, cpu or cuda"),
        (["--num-gpus", "0"], "--num-gpus 0"),
        (["--nnodes", "2"], "--nnodes 2 needs --master-addr"),
        (["--nnodes", "1:2"], "--nnodes 2 needs --master-addr"),
        (["--nnodes", "two"], "--nnodes two: give a number, or LEAST:MOST"),
        (["--frob"], "unknown flag --frob; `mgt check --help`"),
        (["--frob", "image"], "unknown flag --frob; `mgt check --help`"),
    ],
)
def test_wrong_words_are_said_at_once(
    words: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = mgt_here(monkeypatch, capsys, "check", *words)
    assert said.code == 2 and says in said.err, said
