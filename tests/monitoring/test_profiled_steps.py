"""Traces of chosen steps: what is recorded, and what is read from it."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import mgt_here
from tiny import line, manager_for, points, sgd, squares

from multi_gpu_training import Callback, ConfigError, MultiGPUConfig
from multi_gpu_training.cli.profile_command import profile
from multi_gpu_training.monitoring.profiling.trace_intervals import length, merged, without
from multi_gpu_training.monitoring.profiling.trace_summary import (
    read_trace,
    short_name,
    summarise,
    write_summary,
)
from multi_gpu_training.monitoring.profiling.trace_view import profiles_of
from multi_gpu_training.monitoring.report.html import page
from multi_gpu_training.monitoring.report.run_record import read_run


def test_times_without_others_are_what_is_left_of_them() -> None:
    busy = merged([(5, 7), (0, 2), (1, 3), (7, 8)])
    assert busy == [(0, 3), (5, 8)]
    assert without(busy, [(1, 2), (2.5, 6), (9, 10)]) == [(0, 1), (2, 2.5), (6, 8)]
    assert length(without(busy, busy)) == 0


def event(name: str, cat: str, start: float, end: float, tid: int = 1, **args: Any) -> Any:
    return {
        "ph": "X",
        "name": name,
        "cat": cat,
        "ts": start,
        "dur": end - start,
        "tid": tid,
        "args": args,
    }


def test_kernels_exchange_and_gaps_of_a_gpu_are_told_apart() -> None:
    """Two steps of 500 us. A kernel hides half of the exchange; the GPU waits for the loader."""
    events = [
        event("ProfilerStep#20", "user_annotation", 0, 500),
        event("ProfilerStep#21", "user_annotation", 500, 1000),
        event("enumerate(DataLoader)#it.__next__", "user_annotation", 700, 1000),
        event("aten::mm", "cpu_op", 0, 20, **{"External id": 7}),
        event("ampere_sgemm_128x64", "kernel", 100, 400, tid=7, **{"External id": 7}),
        event("elementwise", "kernel", 400, 450, tid=7),
        event("ncclDevKernel_AllReduce", "kernel", 350, 550, tid=8),
        event("elementwise", "kernel", 550, 700, tid=7),
        {
            "ph": "i",
            "name": "[memory]",
            "ts": 10,
            "args": {"Device Type": 1, "Total Allocated": 2**30},
        },
    ]
    found = summarise(events)
    assert (found["first"], found["last"], found["on"]) == (20, 21, "gpu")
    per_step = {key: found[f"{key}_s"] * 1e6 for key in ("step", "busy", "exchange", "exposed")}
    assert per_step == pytest.approx({"step": 500, "busy": 250, "exchange": 100, "exposed": 50})
    assert found["idle_s"] * 1e6 == pytest.approx(200)  # 100 us of Python, 300 of the loader
    top = found["top"][0]
    assert (top["name"], top["op"], top["calls"]) == ("ampere_sgemm_128x64", "aten::mm", 0.5)
    assert found["gaps"][0]["during"] == "waiting for a batch"
    assert found["memory"] == {"peak_bytes": 2**30, "during": "aten::mm"}
    gains = [(round(gain["share"], 2), gain["what"]) for gain in found["gains"]]
    assert set(gains) >= {
        (0.3, "the longest kernel: ampere_sgemm_128x64 (of aten::mm)"),
        (0.3, "waiting for a batch"),
    }
    assert any("use_mixed_precision" in gain["do"] for gain in found["gains"])


def test_recorded_steps_and_kernels_made_from_templates_are_called_by_short_names() -> None:
    adam = (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
        "namespace)::FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::"
        "FusedAdamMathFunctor<float, 4>, float const*>(at::native::Metadata<4>, float const*)"
    )
    product = "void cutlass::Kernel2<cutlass_80_s1688gemm_64x64_nt>(cutlass_80::Params)"
    events = [
        event("ProfilerStep#20", "user_annotation", 0, 500),
        event("cudaGraphLaunch", "cuda_runtime", 0, 20),
        event(adam, "kernel", 100, 200, tid=7),
        event(product, "kernel", 200, 250, tid=7),
    ]
    found = summarise(events)
    said = {gain["what"]: gain["do"] for gain in found["gains"]}
    assert "the longest kernel: multi_tensor_apply_kernel (FusedAdamMath)" in said
    assert "recorded already" in said["the GPU waits for Python"]
    assert short_name(product) == "cutlass_80_s1688gemm_64x64_nt"
    assert found["top"][0]["name"] == adam  # as Perfetto finds it


def test_operators_of_cpu_ranks_count_without_those_they_call() -> None:
    events = [
        event("ProfilerStep#1", "user_annotation", 0, 100),
        event("aten::linear", "cpu_op", 10, 60),
        event("aten::addmm", "cpu_op", 15, 55),
        event("gloo:all_reduce", "user_annotation", 50, 90, tid=2),
        # Waiting for the exchange is no computation, though an operator of autograd does it.
        event("autograd::engine::evaluate_function: AccumulateGrad", "cpu_op", 60, 95),
    ]
    found = summarise(events)
    assert [(row["name"], round(row["seconds"] * 1e6)) for row in found["top"]] == [
        ("aten::addmm", 40),
        ("aten::linear", 10),
    ]
    assert found["exposed_s"] * 1e6 == pytest.approx(30)
    assert found["idle_s"] * 1e6 == pytest.approx(20)


def test_pauses_and_many_small_operators_are_told_from_fixed_costs() -> None:
    """A step of 100 ms: a pause of 40, 300 operators of 100 us with 10 us between them."""
    events = [
        event("ProfilerStep#1", "user_annotation", 0, 100_000),
        event("DistributedDataParallel.forward", "user_annotation", 100, 60_000),
        event("aten::mm", "cpu_op", 40_000, 66_700),
    ]
    small = [event("aten::add", "cpu_op", 67_000 + n * 110, 67_015 + n * 110) for n in range(300)]
    found = summarise([*events, *small])
    said = {gain["what"]: round(gain["share"], 2) for gain in found["gains"]}
    assert list(said) == [
        "pauses in which nothing is computed, the longest in DistributedDataParallel.forward",
        "time outside torch's operators",
        "the longest operator: mm",
    ]
    assert list(said.values()) == [0.4, 0.29, 0.27]
    assert found["small_calls"] == 300 and found["small_s"] == pytest.approx(0.0045)
    # The main thread that waits for its exchange to begin does not pause.
    handing_over = event("c10d::allreduce_", "cpu_op", 500, 39_500)
    gains = summarise([*events, handing_over, *small])["gains"]
    assert not any(gain["what"].startswith("pauses") for gain in gains)
    longer = [event("aten::add", "cpu_op", 67_000 + n * 19, 67_019 + n * 19) for n in range(1700)]
    said = {gain["what"]: gain["do"] for gain in summarise([*events, *longer])["gains"]}
    assert "instead of in loops" in said["1,700 small operators per step, mostly their fixed cost"]


def test_who_waits_in_the_exchange_is_sent_to_the_rank_that_comes_last(tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    folder.mkdir()
    for rank, ready in enumerate((30, 90)):  # milliseconds at which a rank comes to the exchange
        events = [
            event("ProfilerStep#5", "user_annotation", 0, 100_000),
            event("aten::mm", "cpu_op", 0, 30_000),
            event("gloo:all_reduce", "user_annotation", ready * 1000, 95_000, tid=2),
        ]
        trace = folder / f"rank-{rank}.steps-5-5.json.gz"
        with gzip.open(trace, "wt") as file:
            json.dump({"traceEvents": events}, file)
        write_summary(trace)
    waiting, last = profiles_of(tmp_path, [])
    assert waiting.gains()[0] == (
        "65%: waiting for rank 1 in the exchange. What gains is in its trace"
    )
    assert last.gains()[0].startswith("65%: pauses in which nothing is computed, the longest in ")
    assert "exchange of gradients" in last.gains()[2]
    # Of one rank alone nobody can tell.
    (folder / "rank-1.steps-5-5.summary.json").unlink()
    [alone] = profiles_of(tmp_path, [])
    assert "exchange of gradients" in alone.gains()[0] and "--ranks all" in alone.gains()[0]


class Present(Callback):
    """How many listen to the end of each step."""

    def __init__(self) -> None:
        self.count: list[int] = []

    def on_step_end(self, run: Any, result: Any) -> None:
        self.count.append(len(run.callbacks.on_step_end))


def test_chosen_steps_are_traced_and_the_report_says_what_they_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    present = Present()
    settings: dict[str, Any] = {"training_mode": "single", "batch_size": 2, "epochs": 2}
    manager = manager_for(tmp_path, profile_steps="2-3,5", **settings)
    manager.fit(line(), points(), loss_fn=squares, optimizer=sgd, callbacks=[present])
    plain = manager_for(tmp_path / "plain", **settings)
    plain.fit(line(), points(), loss_fn=squares, optimizer=sgd)
    assert all(map(torch.equal, manager.model.parameters(), plain.model.parameters()))
    assert present.count[-1] == present.count[0] - 1, "nobody listens after the last traced step"
    folder = manager.folder / "profile"
    names = ["rank-0.steps-2-3", "rank-0.steps-5-5"]
    assert sorted(path.name for path in folder.glob("*.gz")) == [f"{n}.json.gz" for n in names]
    steps = [e for e in read_trace(folder / f"{names[0]}.json.gz") if "ProfilerStep" in e["name"]]
    assert sorted(e["name"] for e in steps) == ["ProfilerStep#2", "ProfilerStep#3"]
    run = read_run(manager.folder)
    assert [shown.name for shown in run.profiles] == [
        "rank 0, steps 2 to 3",
        "rank 0, steps 5 to 5",
    ]
    text = page([run])
    assert "Profiled steps" in text and "aten::" in text and "What would gain most" in text
    # Killed before its traces were read: the command reads them.
    (folder / f"{names[0]}.summary.json").unlink()
    shown = mgt_here(monkeypatch, capsys, "profile", str(manager.folder))
    assert shown.code == 0 and "rank 0, steps 2 to 3" in shown.out, shown
    # What somebody else wrote there is named, and the rest is shown.
    (folder / f"{names[1]}.summary.json").write_text(json.dumps({"step_s": "<script>"}))
    with gzip.open(folder / "rank-1.steps-1-1.json.gz", "wt") as file:
        file.write("[]")
    shown = mgt_here(monkeypatch, capsys, "profile", str(manager.folder))
    assert shown.code == 0 and "rank-0.steps-5-5.summary.json cannot be read" in shown.out, shown
    assert "rank-1.steps-1-1.json.gz cannot be read" in shown.out


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"profile_steps": "0-3"}, "profile_steps"),
        ({"profile_steps": "5-3"}, "steps count from 1"),
        ({"profile_steps": "1-5,3-9"}, "overlap"),
        ({"profile_steps": "1-100000"}, "at most 50"),
        ({"profile_steps": "some"}, "give steps like 20-24"),
        ({"profile_ranks": "first"}, "give ranks like 0"),
    ],
)
def test_steps_that_cannot_be_traced_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MultiGPUConfig(**settings)


def _step(**changes: Any) -> bytes:
    whole = {"ph": "X", "name": "ProfilerStep#5", "cat": "user_annotation"}
    event = {**whole, "ts": 0, "dur": 10, "tid": 1, **changes}
    return gzip.compress(json.dumps({"traceEvents": [event]}).encode())


@pytest.mark.parametrize(
    "raw",
    [
        b"hello",
        gzip.compress(os.urandom(3000))[:40] + bytes(500),  # damaged inside
        gzip.compress(b"x" * 10**6)[:-9],
        gzip.compress(b'{"traceEvents": ' + b"[" * 200_000),
        gzip.compress(b'{"traceEvents": [{}, '),
        gzip.compress(b"[1]"),
        _step(dur=0),
        _step(dur=float("nan")),
        _step(dur=10**400),
        _step(tid=[1]),
        _step(name="ProfilerStep#" + "9" * 5000),
    ],
    ids=[
        "text",
        "damaged",
        "cut",
        "deep",
        "unfinished",
        "a list",
        "no time",
        "NaN",
        "10**400",
        "thread",
        "number",
    ],
)
def test_a_trace_that_is_none_is_named_and_not_shown(
    tmp_path: Path, raw: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "rank-0.json.gz").write_bytes(raw)
    with pytest.raises(ConfigError, match="there is no profile in it"):
        profile([str(tmp_path)], None, "0", -1, "auto")
    assert "cannot be read: " in capsys.readouterr().out


def test_a_trace_that_is_a_fifo_or_lies_elsewhere_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("fifo", "linked"):
        (tmp_path / name).mkdir()
    (tmp_path / "fifo" / "profile").mkdir()
    os.mkfifo(tmp_path / "fifo" / "profile" / "rank-0.json.gz")
    with pytest.raises(ConfigError, match="no profile"):
        profile([str(tmp_path / "fifo")], None, "0", -1, "auto")
    assert "cannot be read" in capsys.readouterr().out
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "rank-0.json.gz").write_bytes(_step())
    (tmp_path / "linked" / "profile").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="symbolic link"):
        profile([str(tmp_path / "linked")], None, "0", -1, "auto")
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["rank-0.json.gz"]
