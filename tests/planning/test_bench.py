"""`mgt bench` measures what it says, and loses nothing to a case that fails."""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from processes import Program, Said, mgt_here
from ranks import run_ranks
from tiny import flat, line, manager_for, points, quiet, sgd, squares

from multi_gpu_training import MultiGPUConfig, TrainingMode
from multi_gpu_training.data.order import ShuffledBatches
from multi_gpu_training.measure.case import Case, CaseResult, Failure, percentile
from multi_gpu_training.measure.meter import Meter, Repeated, StepTimes
from multi_gpu_training.measure.request import MeasureRequest
from multi_gpu_training.measure.script_runner import ScriptRunner
from multi_gpu_training.planning.bench.bench_tables import compare_modes, compare_precisions

Mgt = Callable[..., Said]
DDP = TrainingMode.DISTRIBUTED_DATA_PARALLEL
SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x):
        if len(x) > 64:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return self.layer(x)


if __name__ == "__main__":
    x = torch.randn(50, 8)
    torch.manual_seed(0)
    MultiGPUTrainingManager(MultiGPUConfig(device="cpu", batch_size=8)).fit(
        Net(), TensorDataset(x, (x[:, 0] > 0).long()), epochs=1)
"""


def run_in_rank(script: str, request: str) -> tuple[int, str]:
    """Run a script in a rank of the pool as `mgt bench` runs it in a process of its own."""
    os.environ["MGT_MEASURE"] = request
    hook = sys.excepthook
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        return int(stop.code or 0), ""
    except Exception:
        return 1, traceback.format_exc()
    finally:
        sys.excepthook = hook
        del os.environ["MGT_MEASURE"]
    return 0, ""


@pytest.fixture
def warm_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `mgt bench` train in the ranks of the tests: seconds less for each case."""

    def start(runner: ScriptRunner, request: MeasureRequest, log: Path) -> int:
        (script,) = runner.command
        # The pool's ranks stand in the folder of the test that started them.
        path = str(Path(request.save()).resolve())
        answers = run_ranks(request.ranks, run_in_rank, str(Path(script).resolve()), path)
        log.write_text("\n".join(text for _, text in answers))
        return max(code for code, _ in answers)

    monkeypatch.setattr(ScriptRunner, "start", start)


@pytest.fixture
def mgt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Mgt:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "script.py").write_text(SCRIPT)

    def call(*words: object) -> Said:
        return mgt_here(monkeypatch, capsys, "bench", "script.py", *words, "--out", "out")

    return call


def data() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("out/bench.json").read_text())
    return found


ROW = {
    "case": str,
    "mode": str,
    "ranks": int,
    "settings": dict,
    "per_rank_batch": int,
    "accumulation": int,
    "global_batch": int,
    "steps": int,
    "samples_per_s": float,
    "step_mean_s": float,
    "step_p10_s": float,
    "step_p50_s": float,
    "step_p90_s": float,
    "clock": str,
    "peak_bytes": int,
    "reserved_bytes": int,
    "device": str,
    "precision": str,
    "parameters": int,
    "execution": str,
    "graph_share": float,
    "out_of_memory": bool,
}


def check_row(row: dict[str, Any]) -> None:
    for name, kind in ROW.items():
        assert isinstance(row[name], kind), (name, row[name])
    assert 0 < row["step_p10_s"] <= row["step_p50_s"] <= row["step_p90_s"]
    assert row["samples_per_s"] == pytest.approx(row["global_batch"] / row["step_mean_s"])
    assert row["peak_bytes"] > 2**20
    assert row["error"] is None


# The tables


def test_single_dp_and_ddp_are_measured_side_by_side(mgt: Mgt, warm_ranks: None) -> None:
    said = mgt("--steps", 6)
    assert said.code == 0, said.out + said.err
    assert "single, 1 CPU rank" in said.out and "DP, 1 CPU rank" in said.out
    assert "waits for" in said.out and "exchange" in said.out
    found = data()
    assert found["schema"] == 1 and found["kind"] == "modes"
    assert found["machine"]["torch"] == torch.__version__
    single, dp, ddp = found["rows"]
    for row in found["rows"]:
        check_row(row)
        assert row["steps"] == 6
        assert row["per_rank_batch"] == 8
    modes = ["single", "data_parallel", "distributed_data_parallel"]
    assert [row["mode"] for row in found["rows"]] == modes
    assert (single["global_batch"], dp["global_batch"], ddp["global_batch"]) == (8, 8, 16)
    assert single["speedup"] == 1
    assert single["exposed_s"] is None
    assert ddp["exposed_s"] >= 0 and ddp["exposed_by"].startswith("the step less")
    assert Path("out/bench.png").stat().st_size > 5000
    assert "| single, 1 CPU rank | 8 |" in Path("out/bench.md").read_text()


def test_a_batch_that_does_not_fit_is_a_row_of_the_table(mgt: Mgt, warm_ranks: None) -> None:
    said = mgt("--steps", 6, "--batch-sizes", "128,64,4,256")
    assert said.code == 0, said.out + said.err
    found = data()
    assert [row["batch_size"] for row in found["rows"]] == [4, 64, 128, 256]
    small, good, full, untried = found["rows"]
    check_row(small)
    check_row(good)
    assert (small["total_batch"], good["total_batch"], full["total_batch"]) == (8, 128, 256)
    assert small["relative_speed"] == 1 and good["relative_speed"] > 1
    assert full["out_of_memory"] and full["samples_per_s"] is None
    assert untried["error"] == "not tried: 128 was out of memory"
    assert found["recommended"] == {"batch_size": 64}
    assert "baseline" in said.out and "x faster" in said.out
    assert "out of memory" in said.out and "Recommended: batch_size=64 per CPU rank" in said.out


def test_precisions_take_the_same_global_batch(mgt: Mgt, warm_ranks: None) -> None:
    said = mgt("--steps", 4, "--precision", "--ranks", 1)
    assert said.code == 0, said.out + said.err
    rows = data()["rows"]
    for row in rows:
        check_row(row)
    assert [row["case"] for row in rows] == [
        "FP32",
        "mixed precision",
        "mixed precision + accumulation 4",
    ]
    assert [row["precision"] for row in rows] == ["float32", *["bf16 mixed precision"] * 2]
    assert [row["global_batch"] for row in rows] == [8, 8, 8]
    assert [row["per_rank_batch"] for row in rows] == [8, 8, 2]
    assert rows[0]["speedup"] == 1 and rows[0]["memory_ratio"] == 1


# Its clock runs by the setting, not by the load of the machine that tests this.
SLOW = """
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager
from multi_gpu_training.measure import meter


class Clock:
    now = 0.0

    def perf_counter(self):
        return self.now


def loss_fn(model, batch):
    meter.time.now += (0.01 if manager.config.static_graph else 0.03) * len(batch[0])
    return model(batch[0]).square().mean()


if __name__ == "__main__":
    meter.time = Clock()
    try:
        manager = MultiGPUTrainingManager(MultiGPUConfig(device="cpu", batch_size=8))
        manager.fit(nn.Linear(4, 1), TensorDataset(torch.randn(50, 4)), loss_fn=loss_fn, epochs=1)
    finally:
        meter.time = time
"""


def test_tune_finds_the_setting_that_is_faster(mgt: Mgt, warm_ranks: None, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SLOW)
    said = mgt("--steps", 4, "--warmup", 1, "--tune", "--repeats", 2)
    assert said.code == 0, said.out + said.err
    found = data()
    assert found["recommended"] == {"static_graph": True}, said.out
    assert "# for your config file\nstatic_graph: true\n" in said.out
    verdicts = {row["case"]: row["verdict"] for row in found["rows"]}
    # Every candidate was really trained; those that wait as long as the config are not faster.
    assert {"failed", "out of memory"}.isdisjoint(verdicts.values()), verdicts
    assert verdicts["static graph, once more"] == "confirmed"
    for row in found["rows"]:
        check_row(row)
    same = next(row for row in found["rows"] if row["case"] == "accumulation 2, same step")
    assert (same["per_rank_batch"], same["accumulation"], same["global_batch"]) == (4, 2, 16)
    twice = next(row for row in found["rows"] if row["case"] == "accumulation 2, twice the step")
    assert twice["global_batch"] == 32


def fake(case: Case, step_s: float = 0.01, **facts: Any) -> CaseResult:
    known = {"per_rank_batch": 8, "accumulation": 1, "global_batch": 8 * case.ranks}
    known |= {"device_name": "GPU", "precision": "float32", "parameters": 10, "peak_bytes": 2**30}
    return CaseResult(case, (step_s,) * 5, 8 * case.ranks, {**known, **facts})


def test_a_case_that_fails_does_not_lose_the_others() -> None:
    def measure(case: Case) -> CaseResult:
        if case.mode is TrainingMode.DATA_PARALLEL:
            return CaseResult(case, failure=Failure.OUT_OF_MEMORY, error="CUDA out of memory")
        if case.silent:
            return CaseResult(case, failure=Failure.CRASH, error="died")
        logged = {
            "avg_backward_comm_time": 0.003,
            "avg_backward_compute_comm_overlap_time": 0.001,
        }
        return fake(case, ddp_logger=logged)

    report = compare_modes(measure, 4)
    single, dp, ddp = report.rows
    assert single["samples_per_s"] == pytest.approx(800)
    assert ddp["speedup"] == pytest.approx(4)
    assert dp["samples_per_s"] is None and "DP, 4 GPUs: out of memory" in report.markdown()
    # Without the silent case, the exchange is what DDP's own clock says of it.
    assert ddp["exposed_s"] == pytest.approx(0.002) and ddp["exposed_by"] == "DDP's logger"


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ((8, 16), "The batch per CPU rank is the same in every case;"),
        ((4, 8), "The global batch is the same in every case, shared out over each CPU rank;"),
        ((5, 10), "The batch per CPU rank and the global batch differ between the cases;"),
    ],
)
def test_the_note_says_which_batch_the_cases_share(batches: tuple[int, int], said: str) -> None:
    def measure(case: Case) -> CaseResult:
        per_rank, whole = batches if case.ranks > 1 else (8, 8)
        return fake(case, per_rank_batch=per_rank, global_batch=whole)

    report = compare_modes(measure, 2, [TrainingMode.SINGLE, DDP], unit="CPU rank")
    assert said in report.markdown()


def test_the_exchange_is_what_the_silent_step_saves() -> None:
    report = compare_modes(lambda case: fake(case, 0.008 if case.silent else 0.010), 2, [DDP])
    assert report.rows[0]["exposed_s"] == pytest.approx(0.002)
    assert "2.00 ms (20%)" in report.markdown()


def test_results_that_cannot_be_true_are_marked() -> None:
    def measure(case: Case) -> CaseResult:
        return fake(case, 0.002 if case.ranks > 1 else 0.01)

    report = compare_modes(measure, 2, [TrainingMode.SINGLE, DDP], unit="CPU rank")
    single, ddp = report.rows
    assert single["doubts"] == [] and ddp["speedup"] == pytest.approx(10)
    assert "10.00x ?" in report.markdown()
    assert "Not believable: DDP, 2 CPU ranks: 10.00x with 2 times the ranks" in report.markdown()
    assert "--repeats 3" in report.markdown()

    def noisy(case: Case) -> CaseResult:
        return replace(fake(case), step_times_s=(0.01, 0.01, 0.05, 0.05, 0.01))

    report = compare_precisions(noisy, TrainingMode.SINGLE, 1)
    assert "its steps take between 10.00 ms and 50.00 ms" in report.markdown()
    assert all(row["doubts"] for row in report.rows)
    believable = compare_modes(lambda case: fake(case), 2, [TrainingMode.SINGLE, DDP])
    assert "?" not in believable.markdown() and "Not believable" not in believable.markdown()


def test_steps_that_were_no_graph_are_named_with_the_reason() -> None:
    execution = {"mode": "eager", "share": 0.25, "reason": "the loss reads .item()"}
    report = compare_modes(lambda case: fake(case, execution=execution), 1, [DDP])
    assert report.rows[0]["graph_share"] == 0.25
    assert "25% of the steps ran as a graph (eager): the loss reads .item()" in report.markdown()


def test_repeats_are_interleaved() -> None:
    order: list[str] = []

    def measure(case: Case) -> CaseResult:
        order.append(case.name)
        return fake(case)

    report = compare_precisions(measure, TrainingMode.SINGLE, 1, repeats=2)
    names = [row["case"] for row in report.rows]
    assert order == names * 2
    assert [row["steps"] for row in report.rows] == [10, 10, 10]


# What happens in a rank


def test_every_measured_step_is_a_whole_batch() -> None:
    batches = list(Repeated(ShuffledBatches(10, 4), 6).batches(0, 0))
    assert [len(batch) for batch in batches] == [4] * 6
    flattened = [index for batch in batches for index in batch]
    assert sorted(flattened[:10]) == list(range(10)) == sorted(flattened[10:20])
    assert len(Repeated(ShuffledBatches(3, 8), 2)) == 2


def test_a_case_changes_what_it_names_and_saves_nothing(tmp_path: Path) -> None:
    config = MultiGPUConfig(
        global_batch_size=64,
        reduce_bucket_size=2**20,
        use_fp16_allreduce=True,
        use_mixed_precision=True,
        mixed_precision_dtype="bf16",
        sync_bn=True,
        resume="auto",
    )
    settings = {
        "batch_size": 16,
        "bucket_cap_mb": 5.0,
        "fp16_compression": False,
        "use_mixed_precision": False,
    }
    request = MeasureRequest("meter", str(tmp_path), 2, 5)
    dp = replace(request, mode="data_parallel", settings=settings)
    case = StepTimes(dp).adapt(config)
    assert (case.batch_size, case.global_batch_size) == (16, None)
    assert case.bucket_bytes == 5 * 2**20 and not case.compress_gradients
    assert case.training_mode is TrainingMode.DATA_PARALLEL and not case.sync_bn
    assert case.resume is None and not case.enable_fault_tolerance
    assert StepTimes(request).adapt(config).global_batch_size == 64


def measured_weights(folder: str, silent: bool) -> Any:
    request = MeasureRequest("meter", folder, 2, 3, warmup=1, device="cpu", silent=silent)
    os.environ["MGT_MEASURE"] = request.save()
    try:
        manager = manager_for(Path(folder), batch_size=2)
        with pytest.raises(SystemExit):
            manager.fit(line(), points(), loss_fn=squares, optimizer=sgd)
    finally:
        del os.environ["MGT_MEASURE"]
    return flat(manager.model).tolist()


def test_without_exchange_each_rank_goes_its_own_way(tmp_path: Path) -> None:
    one, other = run_ranks(2, measured_weights, str(tmp_path / "loud"), False)
    assert one == other
    one, other = run_ranks(2, measured_weights, str(tmp_path / "silent"), True)
    assert one != other


def test_the_share_of_replayed_steps_is_that_of_the_measured_ones(tmp_path: Path) -> None:
    request = MeasureRequest("meter", str(tmp_path), 1, 4, mode="single", warmup=2, device="cpu")
    manager = manager_for(tmp_path, training_mode="single")
    manager.setup_training(line(), points(64), loss_fn=squares)
    execution = manager.trainer.execution
    execution.mode, execution.reason = "graph", ""
    manager.callbacks.add(Meter(manager, request))
    with pytest.raises(SystemExit):
        for number, batch in enumerate(iter(manager.train_loader.__iter__, None)):
            execution.replayed += number > 2  # warm-up, capture, then replays
            manager.trainer.train_step(next(batch))
    manager.finish()
    record = json.loads((tmp_path / "rank-0.json").read_text())
    assert record["execution"] == {"mode": "graph", "reason": "", "share": 0.75}
    assert len(record["step_times_s"]) == 4


def test_own_batches_are_measured_too(tmp_path: Path) -> None:
    request = MeasureRequest("meter", str(tmp_path), 1, 3, mode="single", warmup=1, device="cpu")
    config = quiet(tmp_path, training_mode="single", gradient_accumulation_steps=2)
    manager = manager_for(tmp_path, **{k: getattr(config, k) for k in config.model_fields_set})
    manager.setup_training(line(), points(64), loss_fn=squares)
    manager.callbacks.add(Meter(manager, request))
    batch = [torch.randn(6, 4), torch.randn(6, 1)]
    with pytest.raises(SystemExit):
        for _ in range(20):
            manager.trainer.train_step(batch)
    manager.finish()
    record = json.loads((tmp_path / "rank-0.json").read_text())
    assert record["samples_per_step"] == 12


def test_percentiles_lie_between_values() -> None:
    assert percentile([1, 2, 3, 4, 5], 50) == 3
    assert percentile([4, 1, 3, 2], 10) == pytest.approx(1.3)
    assert percentile([7], 90) == 7


# Processes


def test_a_case_that_hangs_is_ended(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import time\ntime.sleep(100)\n")
    script = tmp_path / "script.py"
    runner = ScriptRunner([str(script)], tmp_path / "out", device="cpu", timeout_s=3)
    found = runner(Case("single", TrainingMode.SINGLE, 1))
    assert not found.ok and found.error == "not done after 3 s (--timeout)"


def test_wrong_requests_say_what_is_wrong(mgt: Mgt, tmp_path: Path) -> None:
    said = mgt("--steps", 1, "--modes", "single,pipeline", "--batch-sizes", "8,x", "--tune")
    assert said.code == 2
    for words in (
        "--batch-sizes and --tune each make their own table",
        "--steps 1: use at least 2",
        "'pipeline' is unknown; use single, dp, ddp",
        "--batch-sizes 8,x: use numbers like 128,256,512",
    ):
        assert words in said.err, said.err
    assert mgt("--device", "cuda").code == 2
    (tmp_path / "script.py").unlink()
    assert "mgt bench script.py: no such file" in mgt().err


def test_ranks_of_another_launcher_are_refused(mgt: Mgt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = mgt()
    assert said.code == 2 and "start it without torchrun" in said.err


@pytest.mark.engines  # long; scripts start ranks of their own in the quick tests
def test_bench_of_a_recipe_starts_ranks_of_its_own(tmp_path: Path) -> None:
    words = ("bench", "image", "--steps", 5, "--modes", "ddp", "--batch-size", 16)
    with Program("-m", "multi_gpu_training", *words, "--out", "out", cwd=tmp_path) as program:
        assert program.end_of_run(200) == 0, program
        assert "samples/s" in program.out
        assert program.nothing_left(5)
    found = json.loads((tmp_path / "out" / "bench.json").read_text())
    (row,) = found["rows"]
    check_row(row)
    assert (row["ranks"], row["per_rank_batch"], row["global_batch"]) == (2, 16, 32)
    assert row["exposed_s"] is not None
    assert not (tmp_path / "runs").exists()


def test_what_the_recipe_cannot_do_ends_the_bench_with_its_words(tmp_path: Path) -> None:
    words = ("bench", "image", "--steps", 5, "--ranks", 1, "batchsize=3")
    with Program("-m", "multi_gpu_training", *words, cwd=tmp_path) as program:
        assert program.end_of_run(60) == 2, program
        assert "unknown key 'batchsize'" in program.err, program


def test_yaml_of_a_report_is_a_config(tmp_path: Path) -> None:
    from multi_gpu_training.planning.bench.tuning import as_yaml

    settings = {"bucket_cap_mb": 5.0, "static_graph": True}
    assert MultiGPUConfig(**yaml.safe_load(as_yaml(settings))).static_graph
