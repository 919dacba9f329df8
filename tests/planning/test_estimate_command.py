"""`mgt estimate`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from processes import Program, Said, mgt_here

import multi_gpu_training
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.measure.memory_model import MemoryPoint
from multi_gpu_training.planning.estimate import outcome as outcomes
from multi_gpu_training.planning.estimate.outcome import duration, money
from multi_gpu_training.planning.forecast.profile import GradientBucket, StepProfile

MB = 2**20
PROFILE = StepProfile(
    name="train.py --large",
    device="NVIDIA H100",
    per_rank_batch=64,
    forward_s=0.030,
    backward_s=0.060,
    optimizer_s=0.005,
    buckets=(
        GradientBucket(25 * MB, 0.02),
        GradientBucket(25 * MB, 0.04),
        GradientBucket(40 * MB, 0.06),
    ),
    step_times_s=tuple(0.100 + 0.0001 * (number % 7) for number in range(50)),
    dataset_samples=1_281_167,
    epochs=90,
    loader_rates={0: 200.0, 8: 1500.0},
    loader_workers=8,
    memory=(
        MemoryPoint(32, 10 * 1024 * MB, 11 * 1024 * MB),
        MemoryPoint(64, 18 * 1024 * MB, 19 * 1024 * MB),
    ),
    memory_total_bytes=80 * 1024 * MB,
    memory_outside_bytes=500 * MB,
    parameter_bytes=90 * MB,
    power_w=600.0,
    images=True,
)
SCRIPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

if __name__ == "__main__":
    x = torch.randn(64, 8)
    manager = MultiGPUTrainingManager(MultiGPUConfig(device="cpu", batch_size=1, world_size=2))
    manager.fit(nn.Linear(8, 2), TensorDataset(x, (x[:, 0] > 0).long()), epochs=3)
"""
Mgt = Callable[..., Said]


def no_picture(outcome: object, path: Path) -> Path:
    return path


@pytest.fixture
def mgt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Mgt:
    monkeypatch.chdir(tmp_path)
    PROFILE.save(tmp_path / "profile.json")

    def call(*words: object) -> Said:
        if "--price" not in words:  # one picture is enough to see that it is drawn
            monkeypatch.setattr(outcomes, "draw", no_picture)
        given = [*words, *([] if "--profile" in words else ["--profile", "profile.json"])]
        return mgt_here(monkeypatch, capsys, "estimate", *given, "--out", "out")

    return call


def written() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("out/forecast.json").read_text())
    return found


def test_the_table_has_the_columns_of_guide_002_and_what_they_rest_on(mgt: Mgt) -> None:
    said = mgt("--gpus", "1,2,4,8", "--interconnect", "h100-nvlink", "--price", 3.99)
    assert said.code == 0, said.err
    heads = [line for line in said.out.splitlines() if "GPUs  " in line and "GPU" in line[6:]]
    names = ["GPUs", "theoretical", "actual", "efficiency", "80% band", "epochs)", "GPU-hours"]
    more = ["GPUs", "samples/s", "step", "80% band", "communication", "per GPU", "limit"]
    for head, expected in zip(heads, ([*names, "cost"], more), strict=True):
        places = [head.index(name) for name in expected]
        assert places == sorted(places)
    assert "train.py --large on NVIDIA H100, h100-nvlink, weak scaling" in said.out
    # Who reads a price must know whose it is, and of which day.
    assert "3.99 USD per GPU-hour, given with --price, 20" in said.out
    assert "3 buckets of gradients, 90.0 MB: 25.0 MB after 20.00 ms" in said.out
    assert "600 W while training" in said.out
    for name in ("profile.json", "forecast.json", "estimate.md", "estimate.png"):
        assert Path("out", name).stat().st_size > 100
    assert "| 8 | 8.0x |" in Path("out/estimate.md").read_text()


def test_a_strategy_is_asked_for_by_name_and_needs_the_models_blocks(mgt: Mgt) -> None:
    link = ("--gpus", "8", "--interconnect", "h100-nvlink")
    assert "--strategy zero: use ddp or fsdp" in mgt(*link, "--strategy", "zero").err
    assert "needs the model's blocks" in mgt(*link, "--strategy", "fsdp").err
    replace(PROFILE, block_bytes=9 * MB, blocks=10).save(Path("blocks.json"))
    said = mgt(*link, "--strategy", "fsdp", "--profile", "blocks.json")
    assert "on NVIDIA H100, fsdp, h100-nvlink" in said.out and written()["strategy"] == "fsdp"


@pytest.mark.parametrize("device", ["NVIDIA H100", "CPU"])
def test_two_tables_fit_100_columns_with_a_band_in_every_row(
    mgt: Mgt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    replace(PROFILE, device=device, memory_total_bytes=12 * 1024 * MB).save(tmp_path / "p.json")
    link = ("--gpus", "1,8,1024", "--interconnect", "a100-nvlink+infiniband-8x200g")
    said = mgt(*link, "--price", 3.99, "--electricity", 0.3, "--profile", "p.json")
    assert said.code == 0, said.err
    tables = said.out.partition("scaling\n")[2].partition("all-reduce times")[0]
    assert max(map(len, tables.splitlines())) <= 100
    rows = [line for line in tables.splitlines() if re.match(r" (1|8|1,024) ", line)]
    assert len(rows) == 6 and all(re.search(r"\d - +\d", row) for row in rows), tables
    assert ("ranks" in tables, "GPU" in tables) == (device == "CPU", device != "CPU")
    for row in written()["gpus"].values():
        assert row["low"] < row["step_time_s"] < row["high"]


def test_a_later_run_finds_its_number_of_gpus_in_the_forecast(mgt: Mgt) -> None:
    assert mgt("--gpus", "1,8", "--interconnect", "h100-nvlink").code == 0
    found = written()
    assert list(found["gpus"]) == ["1", "8"]
    for row in found["gpus"].values():
        assert row["low"] <= row["step_time_s"] <= row["high"]
        assert row["samples_per_s"] == pytest.approx(row["global_batch"] / row["step_time_s"])
    eight = found["gpus"]["8"]
    assert eight["theoretical_speedup"] == 8 and eight["actual_speedup"] < 8
    assert eight["peak_bytes"] == 18 * 1024 * MB and eight["fits"] is True
    assert eight["cost"] is None and eight["gpu_hours"] > 0
    assert found["largest_batch"] > 200 and found["profile"]["name"] == PROFILE.name
    assert any("no price was given" in note for note in found["notes"])


def test_json_is_all_that_is_printed(mgt: Mgt) -> None:
    said = mgt("--gpus", "1,2", "--interconnect", "a100-nvlink", "--json")
    assert json.loads(said.out)["gpus"] == written()["gpus"]
    assert "written: out/profile.json" in said.err


def test_without_an_interconnect_one_gpu_is_told_and_more_are_refused(mgt: Mgt) -> None:
    said = mgt()
    assert said.code == 0
    assert list(written()["gpus"]) == ["1"]
    assert "say what connects them: --interconnect NAME" in said.out
    assert "h200-nvlink" in said.out and "ethernet-100g" in said.out
    said = mgt("--gpus", "1,4")
    assert said.code == 2
    assert "how fast 4 GPUs exchange gradients depends on the network between them" in said.err
    assert "h200-nvlink" in said.err


def test_by_default_all_numbers_that_the_interconnect_knows_are_forecast(mgt: Mgt) -> None:
    said = mgt("--interconnect", "a100-nvlink")
    assert list(written()["gpus"]) == ["1", "2", "4", "8"]
    assert "other numbers of GPUs: interconnect a100-nvlink was asked for" in said.out
    mgt("--interconnect", "a100-nvlink+infiniband-8x200g")
    assert list(written()["gpus"]) == [str(2**power) for power in range(11)]
    mgt("--interconnect", "a100-nvlink+infiniband-8x200g", "--scaling", "strong")
    assert list(written()["gpus"]) == [str(2**power) for power in range(7)]  # 64 samples
    assert written()["gpus"]["64"]["per_rank_batch"] == 1


def test_prices_of_a_node_of_a_catalog_and_of_electricity(mgt: Mgt, tmp_path: Path) -> None:
    link = ("--gpus", "1,8", "--interconnect", "h100-nvlink")
    mgt(*link, "--price", 80, "--price-per", "node", "--price-source", "offer 7")
    one, eight = (written()["gpus"][key] for key in ("1", "8"))
    assert one["cost"] == pytest.approx(80 * one["training_s"] / 3600)  # all of the node is paid
    assert eight["cost"] == pytest.approx(80 * eight["training_s"] / 3600)
    assert written()["price"]["source"] == "offer 7"
    with Path("sky.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(
            ["InstanceType", "AcceleratorName", "AcceleratorCount", "Price", "SpotPrice", "Region"]
        )
        table.writerow(["h100-8x", "H100", 8, 40, 16, "here"])
        table.writerow(["h100-1x", "H100", 1, 4, 2, "there"])
    mgt(*link, "--catalog", "sky.csv", "--instance", "h100-8x", "--spot")
    assert written()["price"]["per_gpu_hour"] == 2.0
    assert "h100-8x, here" in written()["price"]["source"]
    mgt(*link, "--catalog", "sky.csv", "--accelerator", "h100", "--region", "there")
    assert written()["price"]["per_gpu_hour"] == 4.0
    note = "8 GPUs: no such instance holds a node of the forecast"
    assert any(note in line for line in written()["notes"])
    said = mgt(*link, "--catalog", "sky.csv", "--accelerator", "H100", "--spot")
    assert "Price on 1 GPU: 2 USD per GPU-hour, sky.csv: spot, h100-1x, there, 20" in said.out
    assert "Price on 8 GPUs: 2 USD per GPU-hour, sky.csv: spot, h100-8x, here, 20" in said.out
    paid = {count: row["price"]["instance"] for count, row in written()["gpus"].items()}
    assert paid == {"1": "h100-1x", "8": "h100-8x"} and written()["price"] is None
    said = mgt(*link, "--catalog", "sky.csv", "--instance", "none")
    assert said.code == 2 and "h100-1x, h100-8x" in said.err
    mgt(*link, "--electricity", 0.3)
    one = written()["gpus"]["1"]
    assert one["electricity_cost"] == pytest.approx(0.3 * 0.6 * one["training_s"] / 3600)
    replace(PROFILE, power_w=None).save(tmp_path / "cold.json")
    said = mgt(*link, "--electricity", 0.3, "--profile", "cold.json")
    assert said.code == 0 and "no power was measured" in said.out


def test_a_batch_that_does_not_fit_is_the_limit(mgt: Mgt, tmp_path: Path) -> None:
    small = replace(PROFILE, memory_total_bytes=12 * 1024 * MB)
    small.save(tmp_path / "small.json")
    said = mgt("--gpus", "1", "--profile", "small.json")
    assert written()["gpus"]["1"]["fits"] is False
    assert (
        "memory: does" in said.out and "memory: does not fit" in Path("out/estimate.md").read_text()
    )
    assert 0 < written()["largest_batch"] < 40


def test_the_length_of_the_training_is_what_was_asked_for(mgt: Mgt, tmp_path: Path) -> None:
    mgt("--epochs", 2)
    assert written()["length"] == "2 epochs"
    replace(PROFILE, epochs=None).save(tmp_path / "open.json")
    said = mgt("--profile", "open.json")
    assert written()["length"] == "1 epoch" and "the number of epochs is not known" in said.out
    replace(PROFILE, max_steps=100).save(tmp_path / "steps.json")
    mgt("--profile", "steps.json")
    assert written()["length"] == "100 steps of one GPU"
    assert written()["gpus"]["1"]["training_s"] == pytest.approx(10, rel=0.01)
    replace(PROFILE, dataset_samples=None).save(tmp_path / "stream.json")
    said = mgt("--profile", "stream.json", "--epochs", 3)
    assert written()["length"] is None and "there is no time and no cost; --samples" in said.out
    mgt("--profile", "stream.json", "--samples", "6400")
    assert written()["length"] == "6,400 samples"
    assert written()["gpus"]["1"]["training_s"] == pytest.approx(10, rel=0.01)


def test_a_profile_is_scaled_as_its_config_asked(mgt: Mgt, tmp_path: Path) -> None:
    replace(PROFILE, scaling="strong").save(tmp_path / "strong.json")
    link = ("--gpus", "8", "--interconnect", "h100-nvlink", "--profile", "strong.json")
    assert "h100-nvlink, strong scaling" in mgt(*link).out
    strong = written()["gpus"]["8"]
    assert strong["global_batch"] == 64
    found = multi_gpu_training.estimate_training_speedup(8, "strong.json", "h100-nvlink")
    assert found["actual_speedup"] == pytest.approx(strong["actual_speedup"])
    mgt(*link, "--scaling", "weak")
    assert written()["gpus"]["8"]["global_batch"] == 8 * 64
    assert written()["profile"]["scaling"] == "strong"  # what was measured stays


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpus", "two"), "--gpus two: use numbers like"),
        (("--gpus", "0"), "each must be at least 1"),
        (("--interconnect", "carrier-pigeon"), "no all-reduce times for 'carrier-pigeon'"),
        (("--interconnect", "a100-nvlink", "--curve", "x.csv"), "use only one"),
        (("--interconnect", "h100-nvlink", "--gpus", "64"), "add a network, e.g. h100-nvlink+"),
        (("--curve", "none.csv"), "no all-reduce curve at none.csv"),
        (("--price", "-1"), "--price -1: give a number above 0"),
        (("--price-per", "hour"), "--price-per hour: use gpu or node"),
        (("--spot",), "choose from a --catalog"),
        (("--price", "3", "--catalog", "x.csv", "--instance", "a"), "both set the price"),
        (("--epochs", "2", "--samples", "5"), "both set the length of the training"),
        (("--scaling", "huge"), "--scaling huge: use strong or weak"),
        (("--profile", "nothing.json"), "profile nothing.json: No such file"),
        (("--profile", "wrong.json"), "is not a profile"),
        (("--device", "tpu"), "use auto, cpu or cuda"),
        (("--interconnect", "h100-nvlink+a100-nvlink"), "a100-nvlink is a node; join one node"),
        (("--interconnect", "efa-8x400g+ethernet-10g"), "ethernet-10g is a network; join one"),
        (("train.py",), "--profile measures nothing, so train.py would not be used"),
        (("--price-date", "2025-01-01"), "--price-date describe a --price; add it"),
    ],
)
def test_what_cannot_be_is_refused(mgt: Mgt, words: tuple[str, ...], said: str) -> None:
    Path("wrong.json").write_text('{"loss": 3}')
    answer = mgt(*words)
    assert answer.code == 2 and said in answer.err, answer


def test_a_curve_of_ones_own_connects_the_gpus(mgt: Mgt) -> None:
    lines = ["source,method,hardware,gpus,nodes,bytes,time_us,busbw_GBps"]
    lines += [f"here,measured,mine,4,1,{2**power},{2**power / 1000:g}," for power in range(20, 28)]
    Path("mine.csv").write_text("\n".join(lines))
    assert mgt("--gpus", "4", "--curve", "mine.csv").code == 0
    assert written()["interconnect"] == "mine" and written()["gpus"]["4"]["communication_s"] > 0.05


def test_guide_002s_functions_rest_on_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    estimate = multi_gpu_training.estimate_training_speedup
    with pytest.raises(ConfigError, match="nothing was measured yet, and speed-up is not guessed"):
        estimate(4)
    (tmp_path / "runs/estimate/train-1").mkdir(parents=True)
    PROFILE.save(tmp_path / "runs/estimate/train-1/profile.json")
    found = estimate(8, interconnect="h100-nvlink", price=2.0)
    assert found["world_size"] == 8 and found["theoretical_speedup"] == 8.0
    assert found["actual_speedup"] == pytest.approx(8 * found["efficiency"])
    assert found["cost"] == pytest.approx(2.0 * found["gpu_hours"])
    assert estimate(1, PROFILE)["actual_speedup"] == pytest.approx(1.0)
    with pytest.raises(ConfigError, match="8 GPUs: what connects them decides"):
        estimate(8)
    with pytest.raises(ConfigError, match="world_size=0"):
        estimate(0)
    multi_gpu_training.print_training_speedup_estimates(interconnect="h100-nvlink", price=2.0)
    shown = capsys.readouterr().out
    assert "theoretical" in shown and "cost" in shown and "8.0x" in shown


@pytest.mark.parametrize("count", [0, -2, 2.5, "8", None])
def test_a_number_of_gpus_is_a_whole_number(count: Any) -> None:
    with pytest.raises(ConfigError, match=r"world_size=.*: use a whole number, 1 or more"):
        multi_gpu_training.estimate_training_speedup(count, PROFILE, "h100-nvlink")


@pytest.mark.parametrize("wrong", [-3, 0, float("nan"), float("inf"), "3", True])
@pytest.mark.parametrize("name", ["epochs", "price"])
def test_epochs_and_prices_are_above_zero(name: str, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.*: give a number above 0"):
        multi_gpu_training.estimate_training_speedup(8, PROFILE, "h100-nvlink", **{name: wrong})


def test_times_and_money_read_as_in_the_guide() -> None:
    assert [duration(s) for s in (0.034, 5, 612, 8300, 400_000, None)] == [
        "0.034 seconds",
        "5.0 seconds",
        "10.2 minutes",
        "2.3 hours",
        "4.6 days",
        "-",
    ]
    assert [money(v, "USD") for v in (0.17, 0.0012, 12345.6)] == ["$0.17", "$0.0012", "$12,345.60"]


def test_a_script_is_measured_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["estimate", "train.py", "--steps", "5", "--device", "cpu"]
    words += ["--interconnect", "ethernet-10g+h100-nvlink", "--gpus", "1,2", "--out", "out"]
    with Program("-m", "multi_gpu_training", *words, cwd=tmp_path) as program:
        assert program.end_of_run(240) == 0, program
        assert "this is a forecast for CPU ranks" in program.out
        profile = StepProfile.load(tmp_path / "out/profile.json")
        assert (profile.per_rank_batch, profile.epochs) == (1, 3)
        assert profile.gradient_bytes == 4 * 18 + 4 and len(profile.memory) == 1
        assert not list(tmp_path.glob("runs"))  # nothing of the training is left
