"""Wrong searches are refused before anything runs, each in one sentence with its remedy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("optuna", reason="optuna is not installed (extra: search)")

from multi_gpu_training.cli.search_command import SearchFlags, resolve
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.search import search
from multi_gpu_training.search.objectives import read_objective
from multi_gpu_training.search.settings import read_settings
from multi_gpu_training.search.space import read_parameter

RATE = "learning_rate=1e-4..1e-1:log"


def asked(
    tmp_path: Path,
    params: list[str],
    words: tuple[str, ...] = (),
    target: str = "image",
    study: str | None = "s",
    resume: bool = False,
    **given: Any,
) -> None:
    """What `mgt search` does before its first trial."""
    flags = SearchFlags(target, list(words), params, given, study, str(tmp_path), resume, False)
    settings, _ = resolve(flags)
    settings.check()


@pytest.mark.parametrize(
    ("params", "given", "remedy"),
    [
        ([], {}, "at least one --param"),
        (["learning_rate"], {}, "write NAME=VALUES"),
        (["learning_rate=0.1"], {}, "one value leaves nothing to search"),
        (["learning_rate=1e-1..1e-4"], {}, "smaller than the second"),
        (["learning_rate=0..1:log"], {}, "above 0"),
        (["learning_rate=a..b"], {}, "is not a number"),
        (["learning_rate=0.1..1:lag"], {}, ":log or :step="),
        (["learning_rate=0.1..1:step=3"], {}, "at most 0.9"),
        (["lerning_rate=0.1..1"], {}, "learning_rate"),
        (["learning_rate=-1..1"], {}, "greater than 0"),
        (["batch_size=0.5..1.5"], {}, "batch_size"),
        (["batch_size=16..1e3"], {}, "valid integer"),
        (["batch_size=1..1e3:step=0.5"], {}, "batch_size"),  # both ends would do
        (["training_mode=single,tdp"], {}, "training_mode"),
        (["schedule=constant,cosin"], {}, "cosine"),
        (["schedule=cosine,cosine"], {}, "name each once"),
        (["accumulation_steps=1,true"], {}, "the same to Optuna"),
        (["max_grad_norm=1.0,"], {}, "a value is missing; for none write null"),
        (["learning_rate=1e-5...1e-1"], {}, "three dots"),
        (["batch_size=8..16,32"], {}, "one range, or a list"),
        (["seed_everything=1..9007199254740993"], {}, "2**53"),
        (["lr=0.1..1", "learning_rate=0.1..1"], {}, "given twice"),
        (["seed=1,2,3"], {}, "--repeat-best"),
        (["save_dir=a,b"], {}, "sets this itself"),
        (["mode=flatten,cmm"], {}, "cnn"),
        ([RATE], {"sampler": "bayes"}, "tpe, random"),
        ([RATE], {"pruner": "mean"}, "median"),
        ([RATE], {"sampler": "grid"}, "finite number"),
        (["schedule=constant,cosine"], {"sampler": "cmaes"}, "--sampler tpe"),
        ([RATE], {"metric": ["speed"]}, ":min or"),
        ([RATE], {"metric": ["val/loss:down"]}, ":min or :max"),
        ([RATE], {"metric": ["val/loss", "parameters"], "pruner": "median"}, "--pruner none"),
        ([RATE], {"metric": ["val/loss", "parameters"], "pruner": "asha"}, "--pruner none"),
        ([RATE], {"metric": ["val/loss", "parameters"], "sampler": "cmaes"}, "nsga2"),
        ([RATE], {"metric": ["val/loss", "val/loss"]}, "name each once"),
        ([RATE], {"trials": 0}, "greater than or equal to 1"),
        ([RATE], {"repeat_best": 2}, "--seeds N"),
        ([RATE], {"storage": "memory"}, "sqlite:///"),
    ],
)
def test_a_wrong_search_is_refused_with_its_remedy(
    params: list[str], given: dict[str, Any], remedy: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        asked(tmp_path, params, **given)
    assert remedy in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_words_and_places_that_contradict_the_search_are_refused(tmp_path: Path) -> None:
    for words, target, remedy in (
        (("lr=0.1",), "image", "both fixed"),
        (("num_gpus=2",), "image", "--gpus-per-trial"),
        (("run_name=x",), "image", "drop it"),
        ((), "nothing.py", "no such file"),
    ):
        with pytest.raises(ConfigError) as refused:
            asked(tmp_path, [RATE], words, target)
        assert remedy in str(refused.value)
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(ConfigError, match="MultiGPUConfig"):
        asked(tmp_path, ["hidden=1..8"], target=str(script))
    with pytest.raises(ConfigError, match="give the search's folder"):
        asked(tmp_path, [], study=None, resume=True)


def test_a_yaml_file_says_the_same_as_the_flags(tmp_path: Path) -> None:
    file = tmp_path / "search.yaml"
    file.write_text(
        "target: image\nparams:\n  learning_rate: 1e-4..1e-1:log\n  schedule: [constant, cosine]\n"
        "metric: val/accuracy\ntrials: 7\nsettings:\n  epochs: 2\n"
    )
    by_file, _ = resolve(SearchFlags(str(file), [], [], {"trials": 9}, "s", "x", False, False))
    words = ["--epochs", "2"]
    params = ["learning_rate=1e-4..1e-1:log", "schedule=constant,cosine"]
    given = {"metric": ["val/accuracy"], "trials": 9}
    by_flags, _ = resolve(SearchFlags("image", words, params, given, "s", "x", False, False))
    assert by_file.space() == by_flags.space()
    assert by_file.model_dump(exclude={"params"}) == by_flags.model_dump(exclude={"params"})


def test_parameters_mean_what_they_say() -> None:
    assert read_parameter("lr", "1e-5..1e-1:log").name == "learning_rate"
    assert read_parameter("batch_size", "16..256").whole
    assert not read_parameter("weight_decay", "0.0..1.0").whole
    assert read_parameter("batch_size", "16..64:step=16").grid() == [16, 32, 48, 64]
    assert read_parameter("sync_bn", "true,false").choices == (True, False)
    assert read_objective("val/accuracy").direction == "max"
    assert read_objective("val/loss").direction == "min"
    assert read_objective("speed:max").direction == "max"


def test_choices_may_hold_commas_dots_and_nothing() -> None:
    found = read_parameter("x", """"a,b", c d ,'1',null,../e,"",1e-3""")
    assert found.choices == ("a,b", "c d", "1", None, "../e", "", 0.001)
    assert read_parameter("x", "0.1..0.75:step=0.1").grid() == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]


def test_a_metric_is_turned_only_by_words_that_say_so() -> None:
    for name, way in (
        ("val/cancer_recall", "max"), ("val/answer_f1", "max"), ("val/word_error_rate", "min"),
        ("val/logloss", "min"), ("val/map", "max"), ("cer", "min"), ("val/macro-f1", "max"),
    ):  # fmt: skip
        assert read_objective(name).direction == way
    for name in ("val/power", "val/heatmap", "brier_score", "neg_mse", "val/accuracy_loss"):
        with pytest.raises(ConfigError, match=":min or"):
            read_objective(name)


def test_a_loss_of_minus_infinity_is_not_the_best_one(tmp_path: Path) -> None:
    def objective(params: dict[str, Any]) -> float:
        return {1: 3.0, 2: -math.inf, 3: math.inf}[params["x"]]

    given: dict[str, Any] = {"sampler": "grid", "storage": "memory", "metric": "loss"}
    found = search(objective, {"x": [1, 2, 3]}, folder=tmp_path / "s", **given)
    assert found.best is not None and found.best.params == {"x": 1}
    states = {one.params["x"]: (one.state, one.reason) for one in found.trials}
    assert states[2] == ("fail", "loss is -inf at the end") and states[3][0] == "complete"


def test_functions_that_fail_end_the_search_with_their_reason(tmp_path: Path) -> None:
    def broken(params: dict[str, Any]) -> float:
        raise ValueError("no such thing")

    with pytest.raises(Exception, match=r"first 3 trials failed.*no such thing"):
        search(broken, {"x": "0..9"}, folder=tmp_path / "s", metric="loss", storage="memory")

    def short(params: dict[str, Any]) -> float:
        if params["x"] > 4:
            raise MemoryError("9 GB")
        return float("nan") if params["x"] == 0 else params["x"]

    found = search(
        short, {"x": "0..9"}, folder=tmp_path / "t", metric="loss", sampler="grid", storage="memory"
    )
    by_x = {one.params["x"]: one for one in found.trials}
    assert by_x[7].state == "pruned" and "out of memory: 9 GB" in by_x[7].reason
    assert by_x[0].state == "fail" and "NaN" in by_x[0].reason
    assert found.best is not None and found.best.params == {"x": 1}


def test_a_function_that_runs_out_of_gpu_memory_is_pruned_and_one_without_a_value_fails(
    tmp_path: Path,
) -> None:
    def objective(params: dict[str, Any]) -> float | None:
        if params["x"] > 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return None if params["x"] == 3 else params["x"]

    found = search(
        objective, {"x": "0..9"}, folder=tmp_path / "s", metric="loss", sampler="grid",
        storage="memory", seed=1,
    )  # fmt: skip
    by_x = {one.params["x"]: one for one in found.trials}
    assert [by_x[x].state for x in (7, 8, 9)] == ["pruned"] * 3
    assert "out of memory: CUDA" in by_x[7].reason
    assert by_x[3].state == "fail" and "gave None; return or yield a number" in by_x[3].reason
    assert [one.state for one in found.trials].count("complete") == 6


def test_python_values_are_kept_as_a_yaml_file_has_them(tmp_path: Path) -> None:
    rates = np.logspace(-3, -1, 3)
    for params in ({"rate": rates}, {"rate": list(rates)}, {"rate": tuple(rates)}):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        common: dict[str, Any] = {"folder": folder, "metric": "loss", "trials": 2}
        search(lambda values: values["rate"], params, **common)
        again = search(lambda values: values["rate"], params, resume=True, **common)
        assert len(again.trials) == 2 and again.trials[0].params["rate"] in rates
    settings = read_settings({"params": {"lr": [0, 1]}, "settings": {"data_dir": Path("/data")}})
    assert settings.settings == {"data_dir": "/data"}


def test_what_only_runs_can_do_is_refused_for_a_function_and_a_missing_script_is_named(
    tmp_path: Path,
) -> None:
    given: dict[str, Any] = {"folder": tmp_path / "s", "metric": "loss"}
    with pytest.raises(ConfigError, match="--repeat-best"):
        search(lambda values: 1.0, {"x": "0..9"}, repeat_best=1, seeds=2, **given)
    with pytest.raises(ConfigError, match="no such file"):
        search(str(tmp_path / "train.py"), {"learning_rate": "1e-4..1e-1:log"}, **given)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("line", ["settings: 5", "settings: [1]", "words: 5", "words: [1, 2]"])
def test_a_yaml_file_with_values_of_the_wrong_kind_is_refused_by_name(
    tmp_path: Path, line: str
) -> None:
    file = tmp_path / "search.yaml"
    file.write_text(f"target: image\nparams: {{lr: [0.1, 0.2]}}\n{line}\n")
    with pytest.raises(ConfigError, match=f"search.yaml: {line.partition(':')[0]}="):
        asked(tmp_path, [], target=str(file))


def test_a_price_that_is_infinite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="price"):
        asked(tmp_path, [RATE], price=float("inf"))


@pytest.mark.parametrize("line", ["settings: {world_size: 2}", "study: [x]"])
def test_a_yaml_file_may_not_say_what_the_command_line_may_not(tmp_path: Path, line: str) -> None:
    file = tmp_path / "search.yaml"
    file.write_text(f"target: image\nparams: {{lr: [0.1, 0.2]}}\n{line}\n")
    with pytest.raises(ConfigError, match=r"world_size|is not a name"):
        asked(tmp_path, [], target=str(file), study=None)
