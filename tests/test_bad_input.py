"""What cannot work says so: what was asked, what was found, what to do, and never a traceback.

Most of it runs in this process or in the ranks of the tests; a few programs at the end show
that the same words arrive where a user reads them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Program, Said, mgt_here
from ranks import run_ranks
from tiny import line, manager_for, points, quiet, sgd, squares
from torch import Tensor, nn
from torch.utils.data import Dataset

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager
from multi_gpu_training.errors import ConfigError, MultiGPUError

Mgt = Callable[..., Said]


@pytest.fixture
def mgt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Mgt:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("multi_gpu_training.launch.local.LocalEngine.start", never)

    def call(*words: object) -> Said:
        return mgt_here(monkeypatch, capsys, *words)

    return call


def never(agent: Any) -> None:
    raise AssertionError("ranks were started")


def refused(said: Said, *words: str, code: int = 2) -> None:
    """It ended with `code`, and its message holds all of `words`."""
    assert said.code == code, said
    assert "Traceback" not in said.err
    missing = [word for word in words if word not in said.err]
    assert not missing, f"{missing} not in:\n{said.err}"


# The command line

TRAIN = ("train", "image", "--num-gpus", "1")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "imagge"], ["unknown recipe 'imagge'", "did you mean 'image'?"]),
        (["train", "image", "--multi-gpu", "tdp"], ["tdp", "use ddp, fsdp, dp or single"]),
        (["train", "image", "--mode", "cmn"], ["mode='cmn'", "flatten", "cnn"]),
        ([*TRAIN, "epoch=3"], ["unknown key 'epoch'", "did you mean 'epochs'?"]),
        ([*TRAIN, "--epoochs", "3"], ["unknown key 'epoochs'", "did you mean 'epochs'?"]),
        ([*TRAIN, "whatever"], ["'whatever' is not a setting", "key=value"]),
        ([*TRAIN, "best_metric=acuracy"], ["best_metric='acuracy'", "accuracy, f1, loss"]),
        (
            ["train", "image", "--num-gpus", "3", "global_batch_size=2"],
            ["global_batch_size=2", "world_size=3", "use at least 3"],
        ),
        ([*TRAIN, "batch_size=many"], ["batch_size='many'", "valid integer"]),
        ([*TRAIN, "--batch-size", "many"], ["--batch-size", "valid integer"]),
        ([*TRAIN, "batch_size=0", "epochs=0"], ["batch_size=0", "epochs=0", "greater than 0"]),
        ([*TRAIN, "persistent_workers=true"], ["persistent_workers", "num_workers"]),
        ([*TRAIN, "prefetch_factor=4"], ["prefetch_factor=4", "num_workers"]),
        ([*TRAIN, "--gpu-ids", "0,5"], ["--gpu-ids 0,5", "not there", "no GPU"]),
        ([*TRAIN, "--gpu-ids", "0,x"], ["--gpu-ids 0,x", "0,1,3"]),
        ([*TRAIN, "--resume", "nowhere/step-9"], ["nowhere/step-9", "no checkpoint there", "auto"]),
        ([*TRAIN, "--save-dir", "file/runs"], ["cannot write", "file", "--save-dir"]),
        ([*TRAIN, "--save-dir", "/proc/runs"], ["cannot write", "/proc", "--save-dir"]),
        ([*TRAIN, "--data-dir", "nowhere"], ["nowhere"]),
        (["train", "tabs.yaml"], ["tabs.yaml, line 2: tab; indent with spaces"]),
        (["train", "a.yaml"], ["go in a circle: a -> b -> a"]),
        (["train", "nowhere.yaml"], ["config 'nowhere.yaml' not found"]),
        (["train", "no_recipe.yaml"], ["no_recipe.yaml names no recipe", "recipe: image"]),
        (["run", "nowhere.py"], ["mgt run nowhere.py: no such file"]),
        (["run", "--num-gpus", "0", "file"], ["--num-gpus 0", "-1 for all"]),
        (["run", "--num-gpus", "2", "--master-port", "99999", "file"], ["99999", "65535"]),
        (["run", "--num-gpus", "2", "--nnodes", "0", "file"], ["--nnodes 0"]),
        (["run", "--nnodes", "2", "file"], ["--nnodes 2", "--master-addr"]),
        (
            ["run", "--nnodes", "2", "--node-rank", "2", "--master-addr", "127.0.0.1", "file"],
            ["--node-rank 2", "--nnodes 2"],
        ),
        (["verify", "nowhere.py"], ["mgt verify nowhere.py: no such file"]),
        (["verify", "image", "--ranks", "1"], ["--ranks 1", "use 2 or more"]),
        (["verify", "image", "--steps", "1"], ["--steps 1", "at least 4"]),
        (["trian"], ["trian"]),
    ],
    ids=lambda value: "_".join(value)[:40] if value and isinstance(value[0], str) else None,
)
def test_a_wrong_command_is_refused_with_what_to_do(
    mgt: Mgt, tmp_path: Path, words: list[str], expected: list[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "tabs.yaml").write_text("recipe: image\n\tepochs: 3\n")
    (tmp_path / "a.yaml").write_text("defaults: [b]\nrecipe: image\n")
    (tmp_path / "b.yaml").write_text("defaults: [a]\n")
    (tmp_path / "no_recipe.yaml").write_text("epochs: 3\n")
    said = mgt(*words)
    # A checkpoint that is not there is a failed run, not a wrong word.
    refused(said, *expected, code=1 if "--resume" in words else 2)
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"file", "tabs.yaml", "a.yaml", "b.yaml", "no_recipe.yaml", "runs"}


def test_all_that_is_wrong_is_said_at_once(mgt: Mgt) -> None:
    said = mgt(*TRAIN, "epoch=3", "batchsize=4", "lr=fast")
    refused(said, "'epoch'", "'batchsize'")
    said = mgt(*TRAIN, "epochs=-1", "lr=fast", "schedule=round")
    refused(said, "epochs=-1", "learning_rate='fast'", "schedule='round'", "constant")


@pytest.mark.parametrize("port", ["http", "-1", "70000", ""])
def test_a_port_variable_that_is_no_port_is_named(
    mgt: Mgt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, port: str
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("MASTER_PORT", port)
    monkeypatch.setattr("multi_gpu_training.launch.launcher.supervise", lambda command, plan: 0)
    if not port:
        assert mgt("run", "--num-gpus", 2, "train.py").code == 0
        return
    refused(mgt("run", "--num-gpus", 2, "train.py"), "MASTER_PORT", port, "65535")
    refused(mgt("train", "image", "--num-gpus", 2), "MASTER_PORT", port)


def test_rank_variables_that_are_no_numbers_are_named(
    mgt: Mgt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "first")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(mgt("train", "image"), "RANK='first'", "not a whole number")


def test_more_ranks_than_gpus_are_refused(
    mgt: Mgt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("multi_gpu_training.launch.launcher.available_gpus", lambda: 2)
    (tmp_path / "train.py").touch()
    asked = "--num-gpus 4: this machine has only 2 GPUs"
    refused(mgt("run", "--num-gpus", 4, "train.py"), asked, "at most 2", "--share-gpu")
    refused(mgt("train", "image", "--num-gpus", 4), asked, "at most 2", "--share-gpu")
    refused(mgt("train", "image", "--gpu-ids", "0,2"), "[2] not there", "2 GPUs")
    refused(mgt("train", "image", "--gpu-ids", "0,0"), "repeats a GPU", "--share-gpu")
    refused(mgt("train", "image", "--gpu-ids", "0", "--num-gpus", 2), "--num-gpus 2")
    with pytest.raises(ConfigError, match=r"world_size=4 needs 4 GPUs .* has 2"):
        MultiGPUTrainingManager(MultiGPUConfig(world_size=4))


# Models, data and losses, on one rank and on two


class Empty(Dataset[Any]):
    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> Any:
        raise IndexError(index)


class Endless(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return points()[index]


class Spare(nn.Module):
    """One layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.used = line()
        self.forgotten = line()

    def forward(self, inputs: Tensor) -> Any:
        return self.used(inputs)


def frozen() -> nn.Module:
    return line().requires_grad_(False)


def of_another_model(parameters: Any) -> torch.optim.Optimizer:
    return sgd(line().parameters())


def by_rank() -> nn.Module:
    return nn.Linear(4, 1 + int(os.environ.get("RANK", 0)))


def no_scalar(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]) ** 2


def no_gradient(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return squares(model, batch).detach()


def no_tensor(model: nn.Module, batch: list[Tensor]) -> float:
    return squares(model, batch).item()


def own_metric(model: nn.Module, batch: list[Tensor], collected: Any) -> None:
    collected.add_mean(squares(model, batch), len(batch[0]), {})


def attempt(folder: Path, case: str) -> tuple[str, int, str]:
    """Kind, exit code and words of the error that a training of `case` ends with."""
    settings: dict[str, Any] = {"batch_size": 4}
    given: dict[str, Any] = {"loss_fn": squares, "optimizer": sgd}
    model: Any = line
    dataset: Any = points()
    match case:
        case "empty":
            dataset = Empty()
        case "empty validation":
            given["val_dataset"] = Empty()
        case "endless":
            dataset = Endless()
        case "no dataset":
            dataset = 7
        case "no scalar" | "no gradient" | "no tensor":
            given["loss_fn"] = globals()[case.replace(" ", "_")]
        case "three answers":
            given["loss_fn"] = lambda model, batch: (squares(model, batch), 1, {}, None)
        case "frozen":
            model = frozen
        case "spare":
            model = Spare
        case "by rank":
            model = by_rank
        case "other optimizer":
            given["optimizer"] = sgd(line().parameters())
        case "other optimizer function":
            given["optimizer"] = of_another_model
        case "no optimizer":
            given["optimizer"] = lambda parameters: None
        case "no model":
            model = lambda: 7  # noqa: E731
        case "sum":
            given["loss_fn"] = nn.MSELoss(reduction="sum")
        case "metric":
            settings["best_metric"] = "bleu"
        case "own metric":
            settings["best_metric"], given["eval_fn"] = "bleu", own_metric
            given["val_dataset"] = points()
        case "small batch":
            settings = {"global_batch_size": 1}
            if int(os.environ.get("WORLD_SIZE", 1)) == 1:
                settings = {"global_batch_size": 1, "training_mode": "single"}
        case "folder":
            (folder / "file").touch()
            settings["save_dir"] = str(folder / "file" / "runs")
    try:
        manager_for(folder, **settings).fit(model, dataset, **given)
    except MultiGPUError as error:
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
        return type(error).__name__, error.exit_code, f"{error}{notes}"
    return "nothing", 0, ""


CASES = {
    "empty": ["training dataset Empty has 0 samples"],
    "empty validation": ["validation dataset Empty has 0 samples"],
    "endless": ["training dataset Endless has no length", "__len__", "IterableDataset"],
    "no dataset": ["int is not a dataset", "__getitem__"],
    "no scalar": ["loss of shape", "return a scalar", "mean"],
    "no gradient": ["the loss has no gradient", ".detach()"],
    "no tensor": ["loss_fn returned float", "scalar tensor"],
    "three answers": ["a tuple of 4", "(mean_loss, weight)"],
    "frozen": ["Linear has no parameter with requires_grad=True", "unfreeze"],
    "spare": ["2 parameters got no gradient", "forgotten.weight", "forgotten.bias"],
    "other optimizer": [
        "2 parameters that are neither the model's nor",
        "build it from this model's",
    ],
    "other optimizer function": ["parameters that are neither the model's nor"],
    "no optimizer": ["optimizer gave a NoneType"],
    "no model": ["model is a int", "torch.nn.Module"],
    "sum": ["MSELoss(reduction='sum')", "use reduction='mean'"],
    "metric": ["best_metric='bleu' is", "loss"],
    "own metric": ["best_metric='bleu' is not among the metrics of this run", "loss"],
    "folder": ["cannot write the run folder", "file", "--save-dir"],
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_trained_is_named_on_every_rank(
    tmp_path: Path, case: str, ranks: int
) -> None:
    for kind, code, message in run_ranks(ranks, attempt, tmp_path, case, timeout_s=60):
        assert code == 2, f"{kind}: {message}"
        missing = [word for word in CASES[case] if word not in message]
        assert not missing, f"{missing} not in {kind}: {message}"


def test_ranks_that_build_different_models_are_told_where_they_differ(tmp_path: Path) -> None:
    for kind, code, message in run_ranks(2, attempt, tmp_path, "by rank", timeout_s=60):
        assert (kind, code) == ("ModelError", 2)
        assert "rank 1 built another model than rank 0" in message
        assert "weight (1, 4) float32" in message and "weight (2, 4) float32" in message


def test_a_batch_smaller_than_the_ranks_is_refused(tmp_path: Path) -> None:
    assert run_ranks(1, attempt, tmp_path, "small batch") == [("nothing", 0, "")]
    for _, code, message in run_ranks(2, attempt, tmp_path, "small batch"):
        assert code == 2
        assert "global_batch_size=1 is smaller than world_size=2; use at least 2" in message


def save(folder: Path) -> str:
    manager = manager_for(folder, enable_fault_tolerance=True, epochs=1)
    manager.recipe_options = {"width": 4, "data": Path("here"), "same": True}
    manager.fit(line(), points(), loss_fn=squares, optimizer=sgd)
    return str(manager.save_checkpoint())


def go_on(folder: Path, checkpoint: str, change: str) -> tuple[str, int, str]:
    model: nn.Module = line()
    if change == "shape":
        model = nn.Linear(4, 3)
    elif change == "name":
        model = nn.Sequential(line())
    elif change == "dtype":
        model = line().double()
    optimizer: Any = sgd
    if change == "optimizer":
        optimizer = lambda p: torch.optim.SGD([{"params": [q]} for q in p], lr=0.1)  # noqa: E731
    dtype = torch.float64 if change == "dtype" else torch.float32
    try:
        manager = MultiGPUTrainingManager(quiet(folder, resume=checkpoint, epochs=2))
        manager.recipe_options = {"width": 3, "data": Path("here"), "same": True}
        manager.fit(model, points(dtype=dtype), loss_fn=squares, optimizer=optimizer)
    except MultiGPUError as error:
        return type(error).__name__, error.exit_code, str(error)
    return "nothing", 0, ""


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = save(tmp_path)
    for change, expected in {
        "shape": ["weight has shape (1, 4), the model wants (3, 4)", "another model"],
        "name": ["0.weight is missing", "bias is not in this model", "another model"],
        "dtype": ["weight is torch.float32, the model wants torch.float64"],
        "optimizer": ["1 groups of [2] parameters, this one [1, 1]"],
    }.items():
        for kind, code, message in run_ranks(2, go_on, tmp_path, checkpoint, change):
            assert (kind, code) == ("CheckpointError", 1), message
            missing = [word for word in expected if word not in message]
            assert not missing, f"{missing} not in {message}"
            assert checkpoint in message
            assert message.endswith("That run had width=4; this one has width=3")


# As a user sees it

BAD = """
import os, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from tiny import line, points, sgd, squares
from torch import nn
from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

if __name__ == "__main__":
    manager = MultiGPUTrainingManager(MultiGPUConfig(
        device="cpu", save_dir={folder!r}, num_workers=1, persistent_workers=True,
        enable_fault_tolerance=False, tensorboard=False, world_size={world}))
    {what}
"""
DIFFERENT = "manager.fit(nn.Linear(4, 1 + int(os.environ['RANK'])), points(), loss_fn=squares)"
VECTOR = "manager.fit(line(), points(), loss_fn=lambda m, b: (m(b[0]) - b[1]) ** 2, optimizer=sgd)"


@pytest.fixture(scope="module")
def busy() -> Iterator[str]:
    with closing(socket.socket()) as taken:
        taken.bind(("", 0))
        taken.listen()
        yield str(taken.getsockname()[1])


@pytest.fixture(scope="module")
def programs(
    busy: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Said]]]:
    """All programs of this part, beside each other."""
    folder = tmp_path_factory.mktemp("programs")
    facts = {"tests": str(Path(__file__).parent), "folder": str(folder / "runs")}
    for name, world, what in (("different", 2, DIFFERENT), ("vector", 1, VECTOR)):
        (folder / f"{name}.py").write_text(BAD.format(world=world, what=what, **facts))
    mgt_run = ("-m", "multi_gpu_training", "run", "--num-gpus", "2")
    commands: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
        "different models": ((*mgt_run, "different.py"), {}),
        "vector loss": (("vector.py",), {}),
        "busy flag": ((*mgt_run, "--master-port", busy, "different.py"), {}),
        "busy variable": (("different.py",), {"MASTER_PORT": busy}),
        "missing file": ((*mgt_run, "nowhere.py"), {}),
    }

    def run(name: str) -> Said:
        words, env = commands[name]
        with Program(*words, cwd=folder, env=env) as program:
            code = program.end_of_run(100)
            assert program.nothing_left(within_s=2), program.alive()
            return Said(code, program.out, program.err)

    with ThreadPoolExecutor(3) as starters:
        yield {name: starters.submit(run, name) for name in commands}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("different models", ["rank 1 built another model than rank 0", "(2, 4)"]),
        ("vector loss", ["loss of shape (", "return a scalar"]),
        ("busy flag", ["port {busy}", "in use", "--master-port"]),
        ("busy variable", ["port {busy}", "in use", "--master-port"]),
        ("missing file", ["mgt run nowhere.py: no such file"]),
    ],
)
def test_a_program_ends_with_the_message_alone(
    programs: dict[str, Future[Said]], busy: str, name: str, expected: list[str]
) -> None:
    said = programs[name].result(timeout=230)
    refused(said, *(word.format(busy=busy) for word in expected))
    assert said.err.count("This run cannot start") == 1, said.err
    if name == "vector loss":
        assert "rank 0 on" in said.err and "step 1" in said.err
