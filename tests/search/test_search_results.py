"""What a search reads from its runs, and what it leaves behind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna", reason="optuna is not installed (extra: search)")

from multi_gpu_training.cli.train_command import TrainFlags
from multi_gpu_training.cli.train_command import resolve as resolve_training
from multi_gpu_training.data.feeding import batch_sizes
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.measure.memory_model import MemoryModel
from multi_gpu_training.monitoring.events import EventFile
from multi_gpu_training.monitoring.loggers.jsonl_logger import JsonlLogger
from multi_gpu_training.search import search
from multi_gpu_training.search.objectives import final_values, read_events, read_objective
from multi_gpu_training.search.planning_ahead import BatchLimit, per_rank_batch
from multi_gpu_training.search.run_search import RepeatedTrial, Slots, StudyFolder, find_slots
from multi_gpu_training.search.search_report import history_plot, page
from multi_gpu_training.search.settings import SearchSettings, read_settings
from multi_gpu_training.search.study import TrialRecord

EVIL = "<script>alert('x')</script>"


def settings_for(**given: Any) -> SearchSettings:
    common = {"target": "image", "params": {"learning_rate": "1e-4..1e-1:log"}, "metric": ["loss"]}
    return read_settings({**common, **given})


def record(**params: Any) -> TrialRecord:
    return TrialRecord(3, "complete", params, (0.25,), {}, "", "", 0.0, 1.0)


def test_a_validation_that_a_resumed_run_repeats_counts_once(tmp_path: Path) -> None:
    objectives = [read_objective("val/loss"), read_objective("parameters")]
    assert read_events(tmp_path, objectives).history == []
    events = EventFile(tmp_path / "events" / "rank-0.jsonl", run="r", rank=0)
    log = JsonlLogger(events)
    events.write("rank", step=0, parameters=81)
    log.log({"val/loss": 3.0, "val/accuracy": 0.1}, 10)
    log.log({"val/loss": 1.0}, 20)
    events.write("rank", step=10, parameters=81)  # killed, and resumed from step 10
    log.log({"train/loss": 5.0}, 15)
    log.log({"val/loss": 1.0}, 20)
    found = read_events(tmp_path, objectives)
    assert [(one.step, one.values) for one in found.history] == [
        (10, (3.0, 81.0)),
        (20, (1.0, 81.0)),
    ]
    assert not found.finished
    log.log({"val/loss": 2.0}, 30)
    events.write("run_end", step=30)
    events.close()
    found = read_events(tmp_path, objectives)
    assert found.finished and found.missing([read_objective("val/f1")]) == ["val/f1"]
    assert final_values(found, objectives, "last") == [2.0, 81.0]
    assert final_values(found, objectives, "best") == [1.0, 81.0]


def test_the_best_trial_is_a_config_that_mgt_train_takes(tmp_path: Path) -> None:
    settings = settings_for(settings={"epochs": 3, "mode": "cnn"})
    folder = StudyFolder(tmp_path / "s", settings, resume=False)
    path = folder.write_best(record(learning_rate=0.0123, schedule="linear"))
    place = folder.place("trial-0003", {"learning_rate": 0.0123}, Slots(1, 2), 0)
    folder.close()
    recipe, config, options = resolve_training(TrainFlags(str(path), 1, {}, {}, []))
    assert recipe.name == "image" and options.mode == "cnn"
    assert (config.epochs, config.learning_rate, config.schedule) == (3, 0.0123, "linear")
    # A trial is the same file with a place to run in.
    file = str(tmp_path / "s" / "trials" / "trial-0003.yaml")
    _, config, _ = resolve_training(TrainFlags(file, 1, {}, {}, []))
    assert config.run_name == "trial-0003" and config.resume == "auto"
    assert place.command[-2:] == ["--num-gpus", "2"] and file in place.command


def test_the_best_trial_keeps_its_global_batch_on_any_number_of_gpus(tmp_path: Path) -> None:
    for given, expected in (
        ({}, (32, 64)),
        ({"batch_size": 16, "gradient_accumulation_steps": 2}, (16, 64)),
        ({"global_batch_size": 48}, (None, 48)),
    ):
        settings = settings_for(settings=given).model_copy(update={"gpus_per_trial": 2})
        folder = StudyFolder(tmp_path / str(expected), settings, resume=False)
        path = folder.write_best(record(learning_rate=0.0123))
        folder.close()
        _, config, _ = resolve_training(TrainFlags(str(path), 1, {}, {}, []))
        sizes = batch_sizes(config, 1), batch_sizes(config, 4)
        assert {one.global_batch for one in sizes} == {expected[1]} == {config.global_batch_size}
        if expected[0] is not None:
            assert config.batch_size == expected[0]


def test_a_secret_is_refused_rather_than_written(tmp_path: Path) -> None:
    settings = settings_for(settings={"logger_options": {"wandb": {"api_key": "1234"}}})
    folder = StudyFolder(tmp_path / "s", settings, resume=False)
    with pytest.raises(ConfigError, match="looks like a secret"):
        folder.place("trial-0000", {}, Slots(1, 1), 0)
    folder.close()
    assert "1234" not in "".join(f.read_text() for f in tmp_path.rglob("*.yaml"))


def test_the_report_escapes_everything_and_needs_no_network(tmp_path: Path) -> None:
    def objective(params: dict[str, Any]) -> tuple[float, float]:
        if params["x"] > 0.9:
            raise ValueError(EVIL)
        return params["x"], 1.0 - params["x"]

    params = {"x": "0.0..1.0", "kind": [EVIL, "b & c"]}
    metrics = ["loss", f"{EVIL}:max"]
    found = search(
        objective, params, folder=tmp_path / "s", metric=metrics, trials=12, storage="memory"
    )
    settings = read_settings({"params": params, "metric": metrics})
    shown = page(found, settings, [RepeatedTrial(1, EVIL, 0.5, (0.4, 0.6))])
    assert "<script" not in shown and "&lt;script&gt;" in shown
    assert "http" not in shown and "src=" not in shown
    for part in ("All parameters at once", "Pareto front", "Repeated with other seeds", "polyline"):
        assert part in shown


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_diverged_trial_does_not_press_the_others_flat_in_the_report(
    sign: float, tmp_path: Path
) -> None:
    def objective(params: dict[str, Any]) -> float:
        return sign * (
            1e9 if params["x"] == 9 else float("inf") if params["x"] == 8 else params["x"]
        )

    given: dict[str, Any] = {"metric": "m:min" if sign > 0 else "m:max", "sampler": "grid"}
    found = search(objective, {"x": "0..9"}, folder=tmp_path / "s", storage="memory", **given)
    drawn = history_plot(found.trials, found.objectives[0])
    heights = {
        int(number): float(y)
        for y, number in re.findall(r'cy="([0-9.]+)" r="4"><title>trial (\d+):', drawn)
    }
    by_x = {one.params["x"]: heights[one.number] for one in found.trials}
    # Worse is up where small values are good, and down where large ones are.
    assert len({round(by_x[x]) for x in range(8)}) == 8
    assert by_x[9] == by_x[8] == (min if sign > 0 else max)(by_x.values())
    assert ("≥ " if sign > 0 else "≤ ") in drawn


def test_batches_that_do_not_fit_are_refused_before_they_run() -> None:
    settings = settings_for(params={"global_batch_size": "16..4096"})
    model = MemoryModel.from_parts(2**30, 2**20)
    limit = BatchLimit(model, 2 * 2**30, lambda p: per_rank_batch(settings, 2, p))
    assert limit({"global_batch_size": 128}) is None
    reason = limit({"global_batch_size": 4096})
    assert reason is not None and "2048 samples per GPU do not fit" in reason


def test_small_trials_share_gpus_one_each_before_two_on_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("multi_gpu_training.search.run_search.available_gpus", lambda: 2)
    found = find_slots(settings_for(trials_per_gpu=2))
    shown = [found.variables(slot)["CUDA_VISIBLE_DEVICES"] for slot in range(found.count)]
    assert shown == ["0", "1", "0", "1"]
    with pytest.raises(ConfigError, match="--trials-per-gpu"):
        find_slots(settings_for(parallel=3))
    with pytest.raises(ConfigError, match="contradict"):
        settings_for(trials_per_gpu=2, gpus_per_trial=2).check()


def test_repeats_show_mean_and_spread_and_what_failed() -> None:
    found = RepeatedTrial(7, "val/loss", 0.1, (0.2, 0.4), failed=1)
    assert found.words() == (
        "trial 7: val/loss 0.1 in the search; with 2 seeds 0.3 +- 0.14 (standard deviation), "
        "1 failed"
    )
    assert "no repeat was complete" in RepeatedTrial(7, "val/loss", 0.1, (), 2).words()
