"""Population-based training: members continue one another's checkpoints, also after kills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna", reason="optuna is not installed (extra: search)")

from multi_gpu_training.checkpoint.integrity import read_manifest
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.search import search
from multi_gpu_training.search.objectives import read_objective
from multi_gpu_training.search.settings import read_settings
from multi_gpu_training.search.space import read_space
from multi_gpu_training.search.study import Study, TrialRecord
from multi_gpu_training.search.trial_run import TrialEnd, TrialEnding

RATE = {"learning_rate": "1e-4..1e-1:log"}
SCRIPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

config = MultiGPUConfig(
    device="cpu", monitor=False, tensorboard=False, report=False, batch_size=4, progress="off"
)
manager = MultiGPUTrainingManager(config)
torch.manual_seed(0)
x = torch.randn(16, 2)
data = TensorDataset(x, x.sum(1, keepdim=True))
manager.fit(nn.Linear(2, 1), data, data, loss_fn=nn.MSELoss())
"""


def study_of(folder: Path, resume: bool = False) -> Study:
    url = f"sqlite:///{folder / 'study.db'}"
    goal = [read_objective("val/loss")]
    return Study("s", url, read_space(RATE), goal, "pbt", seed=3, resume=resume, population=4)


def ended(study: Study, number: int, value: float) -> None:
    study.tell(number, TrialEnd(TrialEnding.COMPLETE, (value,)))


def test_the_worst_go_on_from_the_best_and_a_killed_search_decides_the_same(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    first = [study.ask(str) for _ in range(4)]
    assert [one.parent for one in first] == [None] * 4
    assert len({one.params["learning_rate"] for one in first}) == 4
    for number, value in enumerate((3.0, 1.0, 9.0)):
        ended(study, number, value)
    assert not study.ready()  # one member still trains
    ended(study, 3, 2.0)
    assert study.ready()
    second: list[TrialRecord] = [study.ask(str) for _ in range(2)]
    del study
    # As after a kill: another process continues with what the storage says.
    second += [study_of(tmp_path, resume=True).ask(str) for _ in range(2)]
    assert [one.parent for one in second] == [0, 1, 1, 3]
    for one, before in ((second[0], first[0]), (second[1], first[1]), (second[3], first[3])):
        assert one.params == before.params
    factor = second[2].params["learning_rate"] / first[1].params["learning_rate"]
    assert min(abs(factor - 0.8), abs(factor - 1.2)) < 1e-9


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"trials": 9}, "multiple of the population"),
        ({"params": {"batch_size": [8, 16]}}, "cannot change it"),
        ({"pruner": "median"}, "replaces weak members itself"),
        ({"settings": {"epochs": 3}}, "--generation-epochs"),
        ({"metric": ["val/loss", "val/f1"]}, "optimizes one metric"),
        ({"target": ""}, "a function has none"),
        ({"repeat_best": 1, "seeds": 2}, "--repeat-best"),
    ],
)
def test_what_a_population_cannot_do_is_refused_before_it_starts(
    given: dict[str, Any], words: str
) -> None:
    common = {"target": "image", "params": RATE, "sampler": "pbt", "trials": 8, "population": 4}
    with pytest.raises(ConfigError, match=words):
        read_settings({**common, **given}).check()


@pytest.mark.engines
@pytest.mark.timeout(1800)
def test_a_member_trains_on_from_its_parents_weights(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    folder = tmp_path / "study"
    found = search(
        str(script), RATE, folder=folder, sampler="pbt", population=2, trials=6, device="cpu",
        parallel=2, generation_epochs=2,
    )  # fmt: skip
    assert [one.state for one in found.trials] == ["complete"] * 6
    for one in found.trials:
        generation = one.number // 2
        saved = max((folder / one.run / "checkpoints").glob("step-*"))
        assert read_manifest(saved)["step"] == 8 * (generation + 1)
        # Only what was trained in this generation is in its events.
        assert len(one.reported) == 2
    assert found.best is not None and found.best.number >= 4
    assert {one.parent for one in found.trials[2:4]} <= {0, 1}
    assert found.trials[2].parent == found.trials[3].parent or [
        one.parent for one in found.trials[2:4]
    ] == [0, 1]
