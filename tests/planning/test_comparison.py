"""`comparison_report` of guide 003: results side by side, wherever they come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import line, manager_for, points, squares

from multi_gpu_training import ConfigError, FitResult, comparison_report

# The table of guide 003.
GUIDE = {
    "Single GPU": {"num_gpus": 1, "batch_size": 32, "throughput": 1200, "memory_usage": 4.2},
    "DataParallel": {"num_gpus": 4, "batch_size": 32, "throughput": 4100, "memory_usage": 16.8},
    "DistributedDataParallel": {
        "training_mode": "distributed_data_parallel",
        "num_gpus": 8,
        "batch_size": 32,
        "avg_throughput": 8200,
        "max_memory_usage": 4.2,
        "loss_history": [2.0, 0.5],
    },
}


def test_summaries_become_a_table_json_and_a_picture(tmp_path: Path) -> None:
    report = comparison_report(GUIDE, out=tmp_path)
    text = str(report)
    assert "| Single GPU | - | 1 | 32 | 1,200 | 1.00x | 100% | 4.20 GB | - |" in text
    assert (
        "| DistributedDataParallel | distributed_data_parallel | 8 | 32 | 8,200 | 6.83x | 85% "
        "| 4.20 GB | 0.5000 |" in text
    )
    assert "Fastest: DistributedDataParallel, 6.83x Single GPU." in text
    data = json.loads((tmp_path / "comparison.json").read_text())
    assert data["kind"] == "comparison"
    assert [row["case"] for row in data["rows"]] == list(GUIDE)
    assert data["rows"][1]["peak_bytes"] == pytest.approx(16.8 * 2**30)
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "comparison.md").read_text().startswith("# Comparison")


def trained(folder: Path, name: str) -> FitResult:
    manager = manager_for(folder, training_mode="single", log_every=1, run_name=name, epochs=2)
    return manager.fit(line(), points(64), loss_fn=squares)


def test_runs_are_compared_by_their_folders(tmp_path: Path) -> None:
    one, two = trained(tmp_path, "one"), trained(tmp_path, "two")
    report = comparison_report([one.folder, str(two.folder)])
    assert [row["case"] for row in report.rows] == ["custom/one", "custom/two"]
    for row, result in zip(report.rows, (one, two), strict=True):
        assert row["mode"] == "single" and row["ranks"] == 1 and row["per_rank_batch"] == 32
        assert row["samples_per_s"] > 0
        assert row["metrics"]["loss"] == pytest.approx(result.metrics["loss"])
    by_result = comparison_report({"first": one, "second": two})
    assert [row["case"] for row in by_result.rows] == ["first", "second"]
    assert by_result.rows[0]["samples_per_s"] == report.rows[0]["samples_per_s"]


def test_the_call_of_guide_003_works_on_the_manager(tmp_path: Path) -> None:
    manager = manager_for(tmp_path, training_mode="single", run_name="own")
    manager.fit(line(), points(64), loss_fn=squares)
    comparison = manager._generate_comparison_report(GUIDE)
    assert str(comparison) == str(comparison_report(GUIDE))
    [own] = manager._generate_comparison_report().rows
    assert own["case"] == "custom/own" and own["training_time_s"] > 0


def test_a_run_that_was_killed_is_still_read(tmp_path: Path) -> None:
    result = trained(tmp_path, "one")
    with (result.folder / "events" / "rank-0.jsonl").open("a") as file:
        file.write('{"event": "st')
    assert comparison_report([result.folder]).rows[0]["samples_per_s"] > 0


def test_what_bench_wrote_can_be_compared(tmp_path: Path) -> None:
    written = comparison_report(GUIDE, out=tmp_path)
    again = comparison_report([tmp_path / "comparison.json"])
    assert [row["samples_per_s"] for row in again.rows] == [1200, 4100, 8200]
    assert comparison_report(written).rows == again.rows


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ({}, "got no results"),
        (["nowhere"], "nowhere is not a run folder"),
        ({"a": 3}, "cannot read a, a int"),
        (["missing.json"], "cannot be read as results of `mgt bench`"),
    ],
)
def test_what_cannot_be_compared_is_named(results: object, words: str) -> None:
    with pytest.raises(ConfigError, match=r"comparison_report|is not|cannot be read") as caught:
        comparison_report(results)  # type: ignore[arg-type]
    assert words in str(caught.value)
