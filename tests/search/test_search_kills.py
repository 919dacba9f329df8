"""A search that is killed goes on: no trial is lost, none counts twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna", reason="optuna is not installed (extra: search)")

from multi_gpu_training.cli.search_command import SearchFlags, resolve
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.search import search

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
    from multi_gpu_training.search.settings import SearchSettings
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
