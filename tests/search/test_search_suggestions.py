"""One process suggests and decides; what it suggests is what Optuna suggests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

optuna = pytest.importorskip("optuna", reason="optuna is not installed (extra: search)")

from multi_gpu_training.search import search  # noqa: E402
from multi_gpu_training.search.study import make_pruner  # noqa: E402

SAMPLERS = {
    "tpe": lambda: optuna.samplers.TPESampler(seed=3, n_startup_trials=5),
    "optuna-tpe": lambda: optuna.samplers.TPESampler(seed=3),
    "random": lambda: optuna.samplers.RandomSampler(seed=3),
    "nsga2": lambda: optuna.samplers.NSGAIISampler(seed=3),
}
PARAMS = {"rate": "1e-4..1e-1:log", "width": "4..64", "kind": ["a", "b", "c"]}


def curve(params: dict[str, Any]) -> Iterator[float]:
    """A deterministic training of six validations."""
    best = (params["rate"] * 30 - 1) ** 2 + abs(params["width"] - 20) / 50
    for epoch in range(1, 7):
        yield best + "abc".index(params["kind"]) * 0.1 + 1.0 / epoch


def by_plain_optuna(name: str, sampler: str, pruner: str, trials: int) -> list[Any]:
    """The loop of Optuna's documentation."""
    study = optuna.create_study(
        study_name=name, sampler=SAMPLERS[sampler](), pruner=make_pruner(pruner)
    )

    def objective(trial: Any) -> float:
        params = {
            "rate": trial.suggest_float("rate", 1e-4, 1e-1, log=True),
            "width": trial.suggest_int("width", 4, 64),
            "kind": trial.suggest_categorical("kind", ["a", "b", "c"]),
        }
        value = 0.0
        for epoch, value in enumerate(curve(params), 1):
            trial.report(value, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
        return value

    study.optimize(objective, n_trials=trials)
    return study.trials


@pytest.mark.parametrize(
    ("sampler", "pruner"),
    [
        ("tpe", "median"),
        ("tpe", "asha"),
        ("optuna-tpe", "median"),
        ("random", "hyperband"),
        ("nsga2", "none"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_search_suggests_and_prunes_exactly_as_plain_optuna_does(
    sampler: str, pruner: str, tmp_path: Path
) -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    found = search(
        curve,
        PARAMS,
        folder=tmp_path / "study",
        metric="loss",
        trials=14,
        sampler=sampler,
        pruner=pruner,
        seed=3,
        storage="memory",
    )
    plain = by_plain_optuna("study", sampler, pruner, 14)
    assert [dict(one.params) for one in found.trials] == [one.params for one in plain]
    assert [one.state for one in found.trials] == [one.state.name.lower() for one in plain]
    assert [list(one.values) for one in found.trials] == [one.values for one in plain]
    assert [dict(one.reported) for one in found.trials] == [o.intermediate_values for o in plain]
    if pruner != "none":
        assert any(one.state == "pruned" for one in found.trials)


@pytest.mark.filterwarnings("ignore")
def test_with_several_metrics_tpe_has_optunas_own_arguments(tmp_path: Path) -> None:
    def both(x: float) -> tuple[float, float]:
        return x, (x - 0.7) ** 2

    found = search(
        lambda params: both(params["x"]), {"x": "0.0..1.0"}, folder=tmp_path / "study",
        metric=["loss", "error"], trials=14, seed=3, storage="memory",
    )  # fmt: skip
    plain = optuna.create_study(directions=["minimize"] * 2, sampler=SAMPLERS["optuna-tpe"]())
    plain.optimize(lambda trial: both(trial.suggest_float("x", 0.0, 1.0)), n_trials=14)
    assert [dict(one.params) for one in found.trials] == [one.params for one in plain.trials]


@pytest.mark.filterwarnings("ignore")
def test_nsga2_finds_the_front_of_a_grid_that_brute_force_gives(tmp_path: Path) -> None:
    grid = {"width": [1, 2, 3, 4, 5], "depth": [1, 2, 3, 4, 5]}

    def both(params: dict[str, Any]) -> tuple[float, float]:
        width, depth = params["width"], params["depth"]
        loss = 1.0 / (width * depth) + 0.05 * abs(width - depth)
        return loss, float(width * width * depth)

    names = ["loss", "parameters"]
    every = search(
        both,
        grid,
        folder=tmp_path / "all",
        metric=names,
        sampler="grid",
        trials=100,
        storage="memory",
    )
    assert len(every.trials) == 25
    front = {one.values for one in every.front}
    found = search(
        both,
        grid,
        folder=tmp_path / "some",
        metric=names,
        sampler="nsga2",
        trials=100,
        seed=1,
        storage="memory",
    )
    assert {one.values for one in found.front} == front
