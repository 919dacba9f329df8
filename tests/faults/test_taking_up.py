"""A run that is taken up again: the right one, and no further than it was to go."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from processes import quickly
from ranks import run_ranks
from torch import Tensor

from multi_gpu_training import ConfigError, MultiGPUConfig
from multi_gpu_training.distributed.identity import from_environment
from multi_gpu_training.distributed.signal_thread import SignalThread
from multi_gpu_training.training.progress import Progress


def fit(folder: Path, **settings: Any) -> tuple[int, dict[str, Tensor], Any]:
    manager = tiny.manager_for(
        folder, enable_fault_tolerance=True, run_name="it", resume="auto", batch_size=4, **settings
    )
    model = tiny.line()
    result = manager.fit(model, tiny.points(), tiny.points(), optimizer=tiny.sgd)
    return manager.trainer.step, tiny.weights(model), result


@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 3, "max_steps": 6},
        {"epochs": 3, "max_steps": 8},
        {"epochs": 9, "early_stopping_patience": 2, "best_metric_mode": "max"},
    ],
    ids=["max_steps in an epoch", "max_steps at its end", "early stopping"],
)
def test_a_run_that_is_over_trains_nothing_more(tmp_path: Path, settings: dict[str, Any]) -> None:
    steps, weights, result = fit(tmp_path, **settings)
    for _ in range(2):
        again, same, told = fit(tmp_path, **settings)
        assert again == steps
        assert all(torch.equal(same[name], weights[name]) for name in weights)
        assert told.metrics == result.metrics != {}
    if "max_steps" in settings:
        further, _, _ = fit(tmp_path, **{**settings, "max_steps": settings["max_steps"] + 1})
        assert further == steps + 1


def test_an_epoch_that_was_not_recorded_is_closed_without_further_steps(tmp_path: Path) -> None:
    """Ended between the last step's checkpoint and the epoch's end."""
    settings = {"epochs": 3, "max_steps": 6, "checkpoint_frequency": 2}
    _, weights, result = fit(tmp_path / "whole", **settings)
    given = {"enable_fault_tolerance": True, "run_name": "it", "batch_size": 4, **settings}
    manager = tiny.manager_for(tmp_path / "cut", **given)
    manager.setup_training(tiny.line(), tiny.points(), tiny.points(), optimizer=tiny.sgd)
    manager.train_epoch(manager.train_loader, 0)
    manager.validate_epoch()
    manager._end_of_epoch = lambda epoch: {}  # type: ignore[method-assign]
    manager.train_epoch(manager.train_loader, 1)
    manager.finish()
    steps, ours, told = fit(tmp_path / "cut", **settings)
    assert steps == 6 and told.metrics == result.metrics
    assert all(torch.equal(ours[name], weights[name]) for name in weights)


def test_a_loop_of_ones_own_gets_each_epochs_own_validation(tmp_path: Path) -> None:
    def losses(epochs: int) -> list[float]:
        given = {"enable_fault_tolerance": True, "run_name": "it", "resume": "auto"}
        manager = tiny.manager_for(tmp_path, batch_size=4, epochs=epochs, **given)
        _, train, val = manager.setup_training(
            tiny.line(), tiny.points(), tiny.points(), optimizer=tiny.sgd
        )
        found = []
        for epoch in range(epochs):
            manager.train_epoch(train, epoch)
            found.append(manager.validate_epoch(val)["loss"])
        manager.finish()
        return found

    first = losses(3)
    assert len(set(first)) == 3
    assert losses(4)[:3] == first


@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_is_never_the_best(mode: str) -> None:
    progress = Progress(MultiGPUConfig(best_metric_mode=mode, early_stopping_patience=2))
    values = [float("nan"), 3.0, float("nan"), 2.0]
    better = [progress.finish_epoch({"loss": value}, None) for value in values]
    assert better == [False, True, False, mode == "min"]
    assert progress.best == (2.0 if mode == "min" else 3.0)


FOLDS = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
from torch import nn
from torch.utils.data import TensorDataset
from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager

class Killed(Callback):
    def on_step_end(self, manager, result):
        step = result.step
        mark = Path("killed")
        if fold == 1 and step == 3 and manager.placement.dp_rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

for fold in range(3):
    if sys.argv[1] == "skip" and Path(f"done-{{fold}}").exists():
        continue
    manager = MultiGPUTrainingManager(MultiGPUConfig(
        device="cpu", batch_size=2, epochs=1, checkpoint_frequency=1, save_dir="runs",
        tensorboard=False, progress="off",
        run_name=None if sys.argv[1] == "nameless" else f"fold-{{fold}}"))
    torch.manual_seed(fold)
    x = torch.randn(16, 4)
    model = nn.Linear(4, 1)
    hooks = [] if sys.argv[1] == "whole" else [Killed()]
    manager.fit(model, TensorDataset(x, x.sum(1, keepdim=True)), callbacks=hooks)
    if manager.placement.is_main:
        print("fold", fold, manager.run.path.name, model.weight.flatten().tolist(), flush=True)
    Path(f"done-{{fold}}").touch()
"""


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=quickly(), capture_output=True, text=True, timeout=200
    )


def run_folds(folder: Path, way: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    (folder / "folds.py").write_text(FOLDS.format(tests=str(Path(__file__).parent.parent)))
    command = [sys.executable, "-m", "multi_gpu_training", "run", "--num-gpus", "2"]
    return run(*command, "folds.py", way, cwd=folder)


def whole_folds(folder: Path) -> str:
    """What the script says when nobody is killed."""
    before = Path.cwd()
    os.chdir(folder)
    sys.argv = ["folds.py", "whole"]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            script = FOLDS.format(tests=str(Path(__file__).parent.parent))
            exec(compile(script, "folds.py", "exec"), {"__name__": "__main__"})
    finally:
        os.chdir(before)
    return said.getvalue()


def weights_told(said: str) -> dict[str, str]:
    lines = [line.split(maxsplit=3) for line in said.splitlines() if line.startswith("fold ")]
    return {fold: weights for _, fold, _, weights in lines}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_script_of_several_named_runs_goes_on_with_each_of_them(tmp_path: Path) -> None:
    """Also with those that are left, where it skips the others."""
    undisturbed = weights_told(run_ranks(2, whole_folds, tmp_path)[0])
    assert set(undisturbed) == {"0", "1", "2"}
    for way in ("kill", "skip"):
        done = run_folds(tmp_path / way, way)
        assert done.returncode == 0, done.stdout + done.stderr
        runs = sorted(path.name for path in (tmp_path / way / "runs/custom").iterdir())
        assert runs == ["fold-0", "fold-1", "fold-2"]
        assert (tmp_path / way / "killed").exists()
        assert weights_told(done.stdout) == undisturbed


@pytest.mark.slow
def test_several_runs_without_a_name_are_not_mixed_up_after_a_restart(tmp_path: Path) -> None:
    done = run_folds(tmp_path / "it", "nameless")
    assert done.returncode != 0
    assert "began 2 runs without a run_name" in done.stderr
    assert "give each its own run_name" in done.stderr


def test_a_stale_record_does_not_end_an_epoch_that_goes_on(tmp_path: Path) -> None:
    fit(tmp_path, epochs=1, max_steps=2)
    given = {"enable_fault_tolerance": True, "run_name": "it", "resume": "auto", "batch_size": 4}
    manager = tiny.manager_for(tmp_path, epochs=1, max_steps=4, **given)
    manager.setup_training(tiny.line(), tiny.points(), tiny.points(), optimizer=tiny.sgd)
    manager.train_epoch(manager.train_loader, 0)
    manager.save_checkpoint()  # and ended before the validation
    manager.finish()
    steps, _, result = fit(tmp_path, epochs=1, max_steps=4)
    assert steps == 4 and len(result.history) == 1
    whole, _, expected = fit(tmp_path / "whole", epochs=1, max_steps=4)
    assert whole == 4 and result.metrics == expected.metrics


def test_a_forked_child_does_not_end_the_listening() -> None:
    heard: list[signal.Signals] = []
    listener = SignalThread(heard.append, lambda: None, lambda: None, 10.0)
    listener.start()
    child = os.fork()
    if child == 0:
        listener.close()
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGTERM)
    listener.close()
    assert heard == [signal.SIGTERM]


def test_launches_of_torchrun_without_a_name_are_told_apart() -> None:
    env = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
    ask = (
        "from multi_gpu_training.distributed.identity import from_environment as ask;"
        "print(ask().run_id)"
    )
    mine = from_environment(env)
    assert mine is not None and mine.run_id != "none"
    again = [
        subprocess.run(
            [sys.executable, "-c", ask],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    assert again[0] == again[1], "ranks of one agent, started again"
    assert again[0].strip() != mine.run_id, "another agent"
    named = from_environment({**env, "TORCHELASTIC_RUN_ID": "job-7"})
    assert named is not None and named.run_id == "job-7"


def test_a_signal_right_before_the_end_is_heard() -> None:
    for _ in range(20):
        heard: list[signal.Signals] = []
        listener = SignalThread(heard.append, lambda: None, lambda: None, 10.0)
        listener.start()
        os.kill(os.getpid(), signal.SIGTERM)
        listener.close()
        assert heard == [signal.SIGTERM]


REFUSED = """
import sys
from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager
from torch import nn
manager = MultiGPUTrainingManager(MultiGPUConfig(device="cpu", save_dir=sys.argv[1]))
manager.fit(nn.Linear(1, 1), [])
"""


def test_a_rank_under_torchrun_says_why_it_ends(tmp_path: Path) -> None:
    (tmp_path / "refused.py").write_text(REFUSED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = run(*command, "--nproc-per-node", "1", "refused.py", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 1
    assert "the training dataset list has 0 samples" in done.stderr, done.stderr


def test_warnings_are_seen_with_progress_off(tmp_path: Path, capsys: Any) -> None:
    manager = tiny.manager_for(tmp_path)
    manager.setup_training(tiny.line(), tiny.points(), optimizer=tiny.sgd)
    manager.logger.info("quiet")
    manager.logger.warning("the disk is full")
    manager.finish()
    said = capsys.readouterr()
    assert said.err == "warning: the disk is full\n" and "quiet" not in said.out


@pytest.mark.parametrize(
    ("metric", "smaller"),
    [
        ("val_loss", True),
        ("wer", True),
        ("power", False),
        ("answer_f1", False),
        ("certainty", False),
    ],
)
def test_whether_smaller_is_better_follows_from_whole_words(metric: str, smaller: bool) -> None:
    assert Progress(MultiGPUConfig(best_metric=metric)).smaller_is_better is smaller


def test_a_manager_trains_once(tmp_path: Path) -> None:
    manager = tiny.manager_for(tmp_path, training_mode="single")
    manager.fit(tiny.line(), tiny.points(), optimizer=tiny.sgd)
    with pytest.raises(ConfigError, match="create another MultiGPUTrainingManager"):
        manager.fit(tiny.line(), tiny.points(), optimizer=tiny.sgd)


def test_states_must_not_take_names_of_the_run(tmp_path: Path) -> None:
    manager = tiny.manager_for(tmp_path, training_mode="single")
    with pytest.raises(ConfigError, match="the run itself uses these names"):
        manager.fit(tiny.line(), tiny.points(), optimizer=tiny.sgd, states={"progress": object()})


DIVERGING = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from tiny import line, points, quiet, sgd
from multi_gpu_training import Callback, MultiGPUTrainingManager

class Meddle(Callback):
    def on_step_end(self, run, result):
        if run.placement.dp_rank == 1:
            run.model.weight.data.add_(1.0)

manager = MultiGPUTrainingManager(quiet(Path("runs"), batch_size=2, consistency_check_every=1,
                                        enable_fault_tolerance=True, checkpoint_frequency=1))
with open("attempts", "a") as file:
    file.write("x")
manager.fit(line(), points(), optimizer=sgd, callbacks=[Meddle()])
"""


def test_a_fault_whose_policy_is_stop_is_not_restarted(tmp_path: Path) -> None:
    script = DIVERGING.format(tests=str(Path(__file__).parent.parent))
    (tmp_path / "diverging.py").write_text(script)
    command = [sys.executable, "-m", "multi_gpu_training", "run", "--num-gpus", "2"]
    done = run(*command, "diverging.py", cwd=tmp_path)
    assert done.returncode != 0 and "replicas differ" in done.stderr
    assert (tmp_path / "attempts").read_text() == "xx"  # both ranks, once
