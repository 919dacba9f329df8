"""One round on one client: an ordinary run, which resumes where this client's last round ended.

    FOLDER/<federation>/rounds.json       rounds that are done: their last step, what they were sent
    FOLDER/<federation>/runs/...          the run, with the client's optimizer and place in the data
    FOLDER/<federation>/round/            weights in and out of the round under way

A round that the server asks for again (because it was killed, say) starts from the same state, and
gets the same answer without training where nothing else has changed.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from multi_gpu_training.checkpoint.store import CheckpointStore
from multi_gpu_training.config_file import split
from multi_gpu_training.data.order import seed_everything
from multi_gpu_training.errors import ConfigError, MultiGPUError
from multi_gpu_training.launch.rank_main import run_command
from multi_gpu_training.manager import MultiGPUTrainingManager
from multi_gpu_training.measure.federated_round import INCOMING, OUTGOING, RESULT
from multi_gpu_training.measure.request import VARIABLE, MeasureRequest
from multi_gpu_training.measure.script_runner import complaint, end
from multi_gpu_training.recipes import RECIPES
from multi_gpu_training.recipes.recipe import Announce, Job, find_recipe
from multi_gpu_training.safe_files import make_private, read_json, write_atomically

Weights = dict[str, NDArray[Any]]
ROUNDS = "rounds.json"
KEPT_ROUNDS = 2  # states that a server which was killed may go back to
RUN = "client"
# A simulated client is one of many: what shows single runs would only cost time.
QUIET = {"monitor": False, "tensorboard": False, "report": False, "progress": "off"}


class RoundFailed(MultiGPUError):
    """A round that this client could not train, and why."""

    code = "MGT800"


@dataclass(frozen=True)
class ClientSetup:
    """A client: what it trains, with which settings, where, and on how many ranks.

    part: its part of the data (how, parts, part, seed), in a simulation. in_process: train in this
    process, which spares a simulated client of one rank the start of Python.
    """

    target: str
    folder: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    words: Sequence[str] = ()  # of a script
    ranks: int = 1
    device: str = "auto"
    part: Mapping[str, Any] | None = None
    in_process: bool = False
    require_secure: bool = False
    name: str = ""

    @property
    def recipe(self) -> str:
        return self.target if self.target in RECIPES else "custom"

    def save(self, path: Path) -> Path:
        write_atomically(path, json.dumps(asdict(self)))
        return path

    @classmethod
    def load(cls, path: Path) -> ClientSetup:
        return cls(**read_json(path, dict[str, Any]))


@dataclass(frozen=True)
class RoundTask:
    """What the server asks of a client. task: init, evaluate or train."""

    task: str
    federation: str
    number: int
    facts: Mapping[str, Any]  # rounds, local_epochs, local_steps, mu
    weights: Weights = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Names the weights that were sent, so that the same question is known again."""
        told = hashlib.sha256(json.dumps(dict(self.facts), sort_keys=True).encode())
        for name in sorted(self.weights):
            told.update(name.encode())
            told.update(self.weights[name].tobytes())
        return told.hexdigest()


@dataclass(frozen=True)
class RoundResult:
    """What a client found: its weights after a round, or metrics of the server's weights."""

    samples: int
    metrics: Mapping[str, float]
    seconds: float
    weights: Weights = field(default_factory=dict)
    kinds: Mapping[str, list[str]] = field(default_factory=dict)  # of an untrained model's weights


def do_round(setup: ClientSetup, task: RoundTask) -> RoundResult:
    """Do what the server asks, and return what it is to get."""
    base = Path(setup.folder) / task.federation
    make_private(base)
    work = base / ("round" if task.task == "train" else task.task)
    done = _done(base)
    if task.task == "train":
        same = next((entry for entry in done if entry["round"] == task.number), None)
        known = same is not None and same is done[-1] and same["digest"] == task.digest
        if known and (work / RESULT).exists():
            return _read(work)
        done = [entry for entry in done if entry["round"] < task.number]
        _go_back(_run_folder(setup, base), done[-1]["step"] if done else 0)
    shutil.rmtree(work, ignore_errors=True)
    make_private(work)
    save_file(task.weights, work / INCOMING)
    request = _request(setup, task, base, work)
    if setup.in_process:
        _train_here(setup, request)
    else:
        _train_in_processes(setup, request, work)
    if not (work / RESULT).exists():
        raise RoundFailed(
            f"{setup.target} ended without training the round; train with manager.fit, "
            "manager.train_epoch or manager.trainer.train_step, until manager.should_stop"
        )
    if task.task == "train":
        step = read_json(work / RESULT, dict[str, Any])["step"]
        if not CheckpointStore(_run_folder(setup, base) / "checkpoints").path_of(step).is_dir():
            raise RoundFailed(
                f"the round ended at step {step} without a checkpoint, so the optimizer would be "
                "lost; call manager.finish, and leave enable_fault_tolerance on"
            )
        done.append({"round": task.number, "step": step, "digest": task.digest})
        write_atomically(base / ROUNDS, json.dumps(done))
    return _read(work)


def _done(base: Path) -> list[dict[str, Any]]:
    try:
        return read_json(base / ROUNDS, list[dict[str, Any]])
    except FileNotFoundError:
        return []


def _read(work: Path) -> RoundResult:
    told = read_json(work / RESULT, dict[str, Any])
    file = work / OUTGOING
    weights: Weights = load_file(file) if file.exists() else {}
    return RoundResult(
        told["samples"], told["metrics"], told["seconds"], weights, told.get("kinds", {})
    )


def _run_folder(setup: ClientSetup, base: Path) -> Path:
    return base / "runs" / setup.recipe / RUN


def _go_back(run: Path, step: int) -> None:
    """Leave the run as it was after `step`: what a round that did not count has saved must not be
    resumed from."""
    if step == 0:
        shutil.rmtree(run, ignore_errors=True)
        return
    store = CheckpointStore(run / "checkpoints")
    for folder in store.folders():
        if folder > store.path_of(step):
            shutil.rmtree(folder)
    best = store.folder / "best"
    if best.is_symlink() and not best.exists():
        best.unlink()
    if not store.path_of(step).is_dir():
        raise RoundFailed(
            f"{run} has no checkpoint of step {step}, where the round before this one ended; "
            f"remove {run.parent.parent.parent} to begin with a new optimizer"
        )


def _request(setup: ClientSetup, task: RoundTask, base: Path, work: Path) -> MeasureRequest:
    training = task.task == "train"
    settings: dict[str, Any] = {
        "save_dir": str(base / "runs" if training else work / "runs"),
        "recipe": setup.recipe,
        "run_name": RUN,
        "resume": "auto" if training else None,
        "device": setup.device,
        "world_size": setup.ranks,
        "local_dir": None,
        # Every epoch is saved, and the state before the last round must stay.
        "keep_last": KEPT_ROUNDS * max(1, int(task.facts["local_epochs"])) + 1,
    }
    if setup.in_process:
        settings |= {**QUIET, "training_mode": "single", "world_size": None}
    if not training:
        settings |= {**QUIET, "enable_fault_tolerance": False}
    facts = {**task.facts, "task": task.task, "part": setup.part}
    return MeasureRequest(
        "federated_round", str(work), setup.ranks, 1, settings=settings, round=facts
    )


# In this process


_jobs: dict[str, Job] = {}  # reading the data again in every round would take longer than training


def _train_here(setup: ClientSetup, request: MeasureRequest) -> None:
    before = {name: os.environ.get(name) for name in (VARIABLE,)}
    words, path = sys.argv, list(sys.path)
    os.environ[VARIABLE] = request.save()
    try:
        if setup.recipe != "custom":
            _train_recipe(setup)
        else:
            run_command([setup.target, *setup.words])
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise RoundFailed(f"{setup.target} ended with code {stop.code}") from stop
    finally:
        sys.argv, sys.path[:] = words, path
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _train_recipe(setup: ClientSetup) -> None:
    """`Recipe.train`, with data that an earlier round of this process has read."""
    recipe = find_recipe(setup.recipe)
    fields, own = split(setup.settings, recipe.options.model_fields)
    options = recipe.options(**own)
    config = recipe.config(fields, options)
    if recipe.build is None:
        raise ConfigError(f"recipe {recipe.name} makes its own data; federated training cannot")
    key = json.dumps([setup.recipe, dict(setup.settings)], sort_keys=True, default=str)
    if key not in _jobs:
        seed_everything(config.seed)
        torch.manual_seed(config.seed)
        built = recipe.build(config, options)
        stateless = all(isinstance(one, Announce) for one in built.callbacks) and not built.states
        ours = built.optimizer is None and built.scheduler is None
        if not (stateless and ours):
            raise ConfigError(
                f"recipe {recipe.name} with these options keeps state between rounds; add "
                "--client-processes"
            )
        _jobs[key] = replace(built, callbacks=())
    job = _jobs[key]
    manager = MultiGPUTrainingManager(config)
    manager.recipe_options = options.model_dump()
    manager.fit(**{**vars(job), "model": copy.deepcopy(job.model)})


# In processes


def _train_in_processes(setup: ClientSetup, request: MeasureRequest, work: Path) -> None:
    main = ["multi_gpu_training.launch.rank_main", f"--launcher={os.getpid()}"]
    if setup.ranks > 1:
        main = ["multi_gpu_training.measure.case_launcher", str(setup.ranks)]
    command = [setup.target, *setup.words]
    if setup.recipe != "custom":
        config = work / "config.yaml"
        write_atomically(config, yaml.safe_dump({"recipe": setup.recipe, **setup.settings}))
        command = ["-m", "multi_gpu_training", "train", str(config)]
    env = {**os.environ, VARIABLE: request.save(), "NO_COLOR": "1"}
    if setup.device == "cpu" or not torch.cuda.is_available():
        env.setdefault("OMP_NUM_THREADS", "1")
    log = work / "output.txt"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *main, *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait()
        finally:
            end(process)
    if code != 0:
        text = log.read_text(errors="replace")
        said = f": {complaint(text, code)[:500]}" if text.strip() else ""
        ended = f"signal {-code}" if code < 0 else f"code {code}"
        raise RoundFailed(f"training ended with {ended}{said}")
