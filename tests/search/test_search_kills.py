"""A search that is killed goes on: no trial is lost, none counts twice."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna", reason="optuna is not installed (extra: search)")

from multi_gpu_training.cli.search_command import SearchFlags, resolve
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.search import search
from multi_gpu_training.search.run_search import Slots, StudyFolder
from multi_gpu_training.search.settings import SearchSettings, read_settings
from multi_gpu_training.search.study import SearchError

PARAMS = {"x": "0.0..1.0", "kind": ["a", "b"]}


class Killed(BaseException):
    """What a kill leaves: nothing is told, nothing is tidied up."""


def test_a_killed_search_goes_on_with_its_running_trial(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    kill_at = {2: 2, 5: 1}  # the trial, counted from 0, and how many values it gives before

    def objective(params: dict[str, Any]) -> Iterator[float]:
        number = len(seen)
        seen.append(params)
        for epoch in range(4):
            if kill_at.get(number) == epoch:
                raise Killed
            yield params["x"] + 1.0 / (epoch + 1)

    folder = tmp_path / "study"
    common: dict[str, Any] = {"metric": "loss", "trials": 6, "seed": 5, "pruner": "median"}
    with pytest.raises(Killed):
        search(objective, PARAMS, folder=folder, **common)
    with pytest.raises(ConfigError, match="--resume"):
        search(objective, PARAMS, folder=folder, **common)
    with pytest.raises(Killed):
        search(objective, PARAMS, folder=folder, resume=True, **common)
    found = search(objective, PARAMS, folder=folder, resume=True, **common)

    assert [one.number for one in found.trials] == list(range(6))
    assert all(one.finished for one in found.trials)
    # Six trials and two that began again, each of those with the values it had before.
    assert len(seen) == 8 and seen[2] == seen[3] and seen[5] == seen[6]
    distinct = {tuple(one.params.items()) for one in found.trials}
    assert len(distinct) == 6
    for one in found.trials:
        assert list(one.reported) == list(range(1, len(one.reported) + 1))
    assert (folder / "best.yaml").is_file()
    # Finished: nothing is left to do, and more trials may be asked for.
    again = search(objective, PARAMS, folder=folder, resume=True, **common)
    assert len(again.trials) == 6 and len(seen) == 8
    more = search(objective, PARAMS, folder=folder, resume=True, **{**common, "trials": 7})
    assert len(more.trials) == 7
    # As the command line says it: flags that were not given change nothing.
    unsaid = {"metric": (), "sampler": None, "trials": 9}
    flags = SearchFlags(str(folder), [], [], unsaid, None, "runs", True, False)
    settings, path = resolve(flags)
    assert path == folder and settings.metric == ["loss"] and settings.trials == 9
    with pytest.raises(ConfigError, match="another search"):
        search(objective, {"x": "0.0..2.0"}, folder=folder, resume=True, **common)


def test_a_decision_to_prune_survives_a_kill_before_the_trial_has_ended(tmp_path: Path) -> None:
    from multi_gpu_training.search.run_search import Study, sqlite_url
    from multi_gpu_training.search.trial_run import TrialEnding

    folder = tmp_path / "study"
    search(lambda params: params["x"], {"x": "0..9"}, folder=folder, metric="loss", trials=2)
    settings = SearchSettings.load(folder)
    study = Study("study", sqlite_url(folder), settings.space(), settings.objectives(), resume=True)
    number = study.ask().number
    study.note_ending(number, TrialEnding.PRUNED, "pruned after validation 1 at 3")
    seen: list[Any] = []
    found = search(
        lambda params: seen.append(params) or params["x"],
        {"x": "0..9"},
        folder=folder,
        metric="loss",
        trials=4,
        resume=True,
    )
    assert [one.state for one in found.trials] == ["complete", "complete", "pruned", "complete"]
    assert len(seen) == 1


def test_a_search_goes_on_after_its_folder_was_moved_and_from_inside_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[float] = []

    def objective(params: dict[str, Any]) -> float:
        calls.append(params["x"])
        return calls[-1]

    common: dict[str, Any] = {"metric": "loss", "sampler": "random"}
    first = search(objective, {"x": "0.0..1.0"}, folder=tmp_path / "a", trials=3, **common)
    (tmp_path / "a").rename(tmp_path / "b")
    monkeypatch.chdir(tmp_path / "b")
    common["resume"] = True
    found = search(objective, {"x": "0.0..1.0"}, folder=tmp_path / "b", trials=4, **common)
    assert len(calls) == 4 and found.trials[:3] == first.trials
    found = search(objective, {"x": "0.0..1.0"}, folder=".", trials=5, **common)
    assert len(calls) == 5 and found.trials[:3] == first.trials


def test_trials_of_a_resumed_search_run_where_the_search_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    rate = {"learning_rate": "1e-4..1e-1:log"}
    settings = read_settings({"target": "train.py", "params": rate})
    StudyFolder(Path("study"), settings, resume=False).close()
    monkeypatch.chdir(tmp_path / "study")
    settings = SearchSettings.load(Path())
    settings.check()
    folder = StudyFolder(Path(), settings, resume=True)
    place = folder.place("trial-0000", {"learning_rate": 0.01}, Slots(1, 1), 0)
    folder.close()
    assert place.working_dir == tmp_path and place.command == ["train.py"]
    assert place.folder == tmp_path / "study" / "runs" / "custom" / "trial-0000"


def test_a_resumed_search_whose_storage_is_gone_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    search(lambda params: params["x"], {"x": "0..9"}, folder=folder, metric="loss", trials=2)
    (folder / "study.db").unlink()
    (folder / "trials").mkdir()  # as trials that are runs leave it
    with pytest.raises(ConfigError, match="the storage knows no study"):
        search(lambda p: p["x"], {"x": "0..9"}, folder=folder, metric="loss", trials=2, resume=True)


def test_a_storage_that_lost_its_values_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    common: dict[str, Any] = {"folder": folder, "metric": "loss", "trials": 2}
    search(lambda params: params["x"], {"x": "0..9"}, **common)
    with closing(sqlite3.connect(folder / "study.db")) as base:
        base.execute("DELETE FROM trial_values")
        base.commit()
    with pytest.raises(ConfigError, match=r"trial 0 .* is complete and has no value"):
        search(lambda params: params["x"], {"x": "0..9"}, resume=True, **common)


def test_a_storage_that_fails_is_told_in_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "study"

    def objective(params: dict[str, Any]) -> float:
        with closing(sqlite3.connect(folder / "study.db")) as base:
            base.execute("DROP TABLE trial_values")
        return 1.0

    with pytest.raises(SearchError, match=r"storage failed: no such table.*resume=True"):
        search(objective, PARAMS, folder=folder, metric="loss", trials=2)


@pytest.mark.engines
def test_a_search_waits_for_another_program_that_locks_its_storage(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    hold = "import sqlite3, sys, time; base = sqlite3.connect(sys.argv[1], timeout=9)\n"
    hold += "base.execute('BEGIN EXCLUSIVE'); print('', flush=True); time.sleep(9)"
    held: list[subprocess.Popen[bytes]] = []

    def objective(params: dict[str, Any]) -> float:
        if not held:
            command = [sys.executable, "-c", hold, str(folder / "study.db")]
            held.append(subprocess.Popen(command, stdout=subprocess.PIPE))
            assert held[0].stdout is not None and held[0].stdout.readline()
        return params["x"]

    try:
        found = search(objective, PARAMS, folder=folder, metric="loss", trials=2)
    finally:
        held[0].kill()
        held[0].communicate()
    assert [one.state for one in found.trials] == ["complete"] * 2


def test_ctrl_c_ends_a_function_at_once(tmp_path: Path) -> None:
    reached = []

    def objective(params: dict[str, Any]) -> float:
        if len(reached) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        reached.append(params["x"])
        return params["x"]

    common: dict[str, Any] = {"folder": tmp_path / "s", "metric": "loss", "trials": 3}
    with pytest.raises(KeyboardInterrupt):
        search(objective, {"x": "0..9"}, **common)
    assert len(reached) == 1
    reached.clear()
    reached.extend([0, 0])
    found = search(objective, {"x": "0..9"}, resume=True, **common)
    assert [one.state for one in found.trials] == ["complete"] * 3
