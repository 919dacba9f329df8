"""PPO computes the same on any number of ranks, goes on where it stopped, and learns."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity.training import difference
from processes import Program, mgt_here
from ranks import run_ranks

from multi_gpu_training import Callback, MultiGPUConfig
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.recipes.ppo import DistributedCLSTMPPOTrainer, PPOOptions, recipe
from multi_gpu_training.recipes.ppo.gymnasium_environments import GymnasiumEnvironments
from multi_gpu_training.recipes.ppo.options import CONFIG_DEFAULTS
from multi_gpu_training.recipes.ppo.rollout import Collector
from multi_gpu_training.training.trainer import MultiGPUTrainer

CARTPOLE = {
    "env": "CartPole-v1",
    "hide": [1, 3],
    "num_envs": 7,
    "rollout_steps": 24,
    "features": 8,
    "hidden": 8,
    "eval_episodes": 3,
}
TRADING = {
    "num_envs": 7,
    "rollout_steps": 15,
    "num_episodes": 14,
    "assets": 3,
    "market_days": 400,
    "episode_days": 20,
    "window": 3,
    "features": 8,
    "hidden": 8,
}


@pytest.fixture(autouse=True)
def variable_of_gymnasium(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gymnasium sets it when it is first imported."""
    monkeypatch.setenv("PYGAME_HIDE_SUPPORT_PROMPT", "hide")


class Stop(Exception):
    pass


class StopAfter(Callback):
    def __init__(self, iteration: int | None) -> None:
        self.iteration = iteration

    def on_epoch_end(self, manager: Any, epoch: int, metrics: dict[str, float]) -> None:
        if epoch == self.iteration:
            raise Stop


def train(
    folder: Path,
    settings: dict[str, Any],
    options: dict[str, Any],
    stop: int | None = None,
) -> Any:
    """What training gave: metrics, weights, all progress; None where it was stopped."""
    from recipes import scripted

    scripted.register()
    quiet = {
        "device": "cpu",
        "progress": "off",
        "tensorboard": False,
        "save_dir": str(folder),
        "recipe": "ppo",
        "global_batch_size": 3,
        "epochs": 2,
        "checkpoint_frequency": 1,
        "enable_fault_tolerance": False,
    }
    defaults = {k: v for k, v in CONFIG_DEFAULTS.items() if k != "batch_size"}
    config = MultiGPUConfig(**{**defaults, **quiet, **settings})
    trainer = DistributedCLSTMPPOTrainer(config, PPOOptions(**options), callbacks=[StopAfter(stop)])
    trainer.initialize()
    try:
        result = trainer.train()
    except Stop:
        return None
    weights = {k: v.detach().clone() for k, v in trainer.policy.state_dict().items()}
    return result, weights, trainer.progress.state_dict()


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        (CARTPOLE | {"total_steps": 3 * 24 * 7}, 1e-4),
        (CARTPOLE | {"total_steps": 2 * 24 * 7, "advantages": "minibatch"}, 1e-4),
        (TRADING, 1e-4),
    ],
    ids=["cartpole", "advantages of a minibatch", "trading"],
)
def test_ranks_learn_together_what_one_learns(
    tmp_path: Path, options: dict[str, Any], limit: float
) -> None:
    """Rollouts, statistics, updates and evaluation: all of a run. The limit leaves room for what
    Adam makes of rounding; `mgt verify` has the exact comparison."""
    result, reference, progress = run_ranks(1, train, tmp_path, {}, options)[0]
    assert progress["episodes"] > 0
    for world in (2, 3):
        for other, weights, seen in run_ranks(world, train, tmp_path, {}, options):
            assert max(difference(weights, reference).values()) <= limit
            assert seen["episodes"] == progress["episodes"]
            for (one, _), (two, _) in zip(progress["recent"], seen["recent"], strict=True):
                assert one == pytest.approx(two, rel=1e-3)
            mine, theirs = result.metrics, other.metrics
            assert theirs == pytest.approx(mine, rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(
    "options",
    [CARTPOLE | {"total_steps": 4 * 24 * 7, "decay": "linear"}, TRADING],
    ids=["cartpole", "trading"],
)
def test_a_stopped_run_goes_on_to_the_bit(
    tmp_path: Path, options: dict[str, Any], world: int
) -> None:
    keep = {"enable_fault_tolerance": True}
    whole = run_ranks(world, train, tmp_path, keep | {"run_name": "whole"}, options)
    stopped = keep | {"run_name": "stopped"}
    assert run_ranks(world, train, tmp_path, stopped, options, 1)[0] is None
    resumed = run_ranks(world, train, tmp_path, stopped | {"resume": "auto"}, options)
    for (_, ours, progress), (_, reference, expected) in zip(resumed, whole, strict=True):
        assert [k for k in reference if not torch.equal(ours[k], reference[k])] == []
        assert progress["recent"] == expected["recent"]
        assert progress["env_steps"] == expected["env_steps"]
        mine, theirs = progress["environments"], expected["environments"]
        for name, value in theirs.items():
            assert torch.equal(mine[name], value) if torch.is_tensor(value) else mine[name] == value


def train_signalled(
    folder: Path, settings: dict[str, Any], options: dict[str, Any], where: str, call: int
) -> Any:
    """SIGTERM to rank 0 at that call of a part of the work; the exit code, and how many calls of
    it there were in all."""
    kind = {"rollout": GymnasiumEnvironments, "update": MultiGPUTrainer}[where]
    name = {"rollout": "step", "update": "train_step"}[where]
    work, calls = getattr(kind, name), 0

    def counted(self: Any, *given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and int(os.environ["RANK"]) == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        if calls >= call:
            time.sleep(0.1)  # let it be heard, and agreed on
        return work(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, name, counted)
        try:
            train(folder, settings, options)
        except SystemExit as stopped:
            return stopped.code, calls
    return None


# A rollout has 24 steps of the environments, the update after it two passes of three.
@pytest.mark.parametrize(
    ("where", "call", "saved"),
    [("rollout", 30, 6), ("update", 9, 6), ("update", 2, None)],
    ids=["second rollout", "second update", "first update"],
)
def test_a_signal_takes_it_back_to_its_last_iteration_and_it_goes_on_to_the_bit(
    tmp_path: Path, where: str, call: int, saved: int | None
) -> None:
    options = CARTPOLE | {"total_steps": 4 * 24 * 7, "decay": "linear"}
    keep = {"enable_fault_tolerance": True, "checkpoint_frequency": 1000}
    whole = run_ranks(2, train, tmp_path, keep | {"run_name": "whole"}, options)
    stopped = keep | {"run_name": "stopped"}
    for code, calls in run_ranks(2, train_signalled, tmp_path, stopped, options, where, call):
        assert code == 143
        assert calls <= call + 12, "it did not wait for the end of the iteration"
    found = sorted(path.name for path in tmp_path.glob("ppo/stopped/checkpoints/step-*"))
    assert found == ([] if saved is None else [f"step-{saved:08d}"])
    resumed = run_ranks(2, train, tmp_path, stopped | {"resume": "auto"}, options)
    for (_, ours, progress), (_, reference, expected) in zip(resumed, whole, strict=True):
        assert [k for k in reference if not torch.equal(ours[k], reference[k])] == []
        assert progress["recent"] == expected["recent"]
        assert progress["passes"] == expected["passes"]


def test_another_number_of_ranks_goes_on_with_the_same_environments(tmp_path: Path) -> None:
    options = CARTPOLE | {"total_steps": 4 * 24 * 7}
    _, reference, expected = run_ranks(1, train, tmp_path, {"run_name": "whole"}, options)[0]
    keep = {"enable_fault_tolerance": True, "run_name": "moved"}
    run_ranks(3, train, tmp_path, keep, options, 1)
    for _, weights, progress in run_ranks(2, train, tmp_path, keep | {"resume": "auto"}, options):
        assert max(difference(weights, reference).values()) <= 1e-4
        assert progress["episodes"] == expected["episodes"]


def test_a_resumed_run_keeps_its_number_of_environments(tmp_path: Path) -> None:
    keep = {"enable_fault_tolerance": True, "run_name": "r"}
    options = CARTPOLE | {"total_steps": 24 * 7}
    train(tmp_path, keep, options)
    with pytest.raises(Exception, match=r"num_envs +7 +8"):
        train(tmp_path, keep | {"resume": "auto"}, options | {"num_envs": 8})


def test_a_run_of_an_earlier_version_keeps_its_execution_and_a_new_one_waits_for_the_open(
    tmp_path: Path,
) -> None:
    def saved() -> str:
        files = sorted(tmp_path.glob("ppo/r/checkpoints/step-*/manifest.json"))
        return str(json.loads(files[-1].read_text())["options"]["execution"])

    keep = {"enable_fault_tolerance": True, "run_name": "r"}
    train(tmp_path, keep, TRADING | {"execution": "close"})
    for episodes in (21, 28):
        train(tmp_path, keep | {"resume": "auto"}, TRADING | {"num_episodes": episodes})
        assert saved() == "close"
    train(tmp_path / "new", keep, TRADING)
    tmp_path /= "new"
    assert saved() == "next_open"


def train_unevenly(folder: Path, settings: dict[str, Any], stop: int | None = None) -> Any:
    """As `train`, where rank 1 takes ten times as long for an environment by the clock that the
    trainer reads. How many environments the rank held in each rollout, and the weights."""
    from multi_gpu_training.recipes.ppo import ppo_trainer

    held: list[int] = []
    clock = [0.0]

    class Timed(Collector):
        def collect(self, *given: Any) -> Any:
            held.append(len(self.environments.numbers))
            clock[0] += held[-1] * (0.1 if dist.get_rank() == 1 else 0.01)
            return super().collect(*given)

    names: Any = ppo_trainer
    names.Collector, names.time = Timed, SimpleNamespace(perf_counter=lambda: clock[0])
    try:
        found = train(folder, settings, UNEVEN, stop)
    finally:
        names.Collector, names.time = Collector, time
    return held, None if found is None else found[1]


UNEVEN = CARTPOLE | {"total_steps": 4 * 24 * 7, "eval_episodes": 1, "eval_steps": 20}


def test_environments_go_to_the_faster_rank_and_what_is_learned_stays_the_same(
    tmp_path: Path,
) -> None:
    reference = run_ranks(1, train, tmp_path, {}, UNEVEN)[0][1]
    for settings, expected in (
        ({"share_weights": [3.0, 1.0]}, ([5] * 4, [2] * 4)),
        ({"balance": "measured"}, ([4, 4, 6, 6], [3, 3, 1, 1])),  # the first is not judged
    ):
        found = run_ranks(2, train_unevenly, tmp_path, settings)
        assert tuple(held for held, _ in found) == expected, settings
        for _, weights in found:
            assert max(difference(weights, reference).values()) <= 1e-4
    # A stopped run goes on with the shares that it had found.
    kept = {"balance": "measured", "enable_fault_tolerance": True, "run_name": "stopped"}
    run_ranks(2, train_unevenly, tmp_path, kept, 2)
    again = run_ranks(2, train_unevenly, tmp_path, kept | {"resume": "auto"})
    assert [held[0] for held, _ in again] == [6, 1]
    for _, weights in again:
        assert max(difference(weights, reference).values()) <= 1e-4


def test_the_update_ends_early_on_all_ranks_together(tmp_path: Path) -> None:
    options = CARTPOLE | {"total_steps": 2 * 24 * 7, "target_kl": 1e-9}
    for _, _, progress in run_ranks(3, train, tmp_path, {"epochs": 5}, options):
        assert progress["iteration"] == 2
        # A first pass of one minibatch would have no KL; these have three, and two steps of it.
        assert progress["passes"] == 2


def test_episodes_are_counted_where_a_rank_has_none(tmp_path: Path) -> None:
    """Of Patient, environments whose episode has an even seed never end."""
    options = CARTPOLE | {"env": "Patient-v0", "num_envs": 3, "total_steps": 72, "eval_steps": 9}
    options |= {"hide": []}
    seed = {"seed": 2}  # the third environment begins with an even one
    one = run_ranks(1, train, tmp_path, seed, options)[0][2]
    for _, _, progress in run_ranks(3, train, tmp_path, seed, options):
        assert progress["episodes"] == one["episodes"] > 0
        assert progress["recent"] == one["recent"]


def test_small_micro_batches_change_nothing(tmp_path: Path) -> None:
    options = CARTPOLE | {"total_steps": 2 * 24 * 7}
    _, reference, _ = train(tmp_path, {}, options)
    _, weights, _ = train(tmp_path, {"batch_size": 1}, options)
    assert max(difference(weights, reference).values()) <= 1e-4


@pytest.mark.slow
@pytest.mark.engines  # long; mgt verify of other recipes is among the quick tests
def test_verify_passes(tmp_path: Path) -> None:
    words = [f"{k}={v}" for k, v in CARTPOLE.items() if k != "hide"]
    asked = ("verify", "ppo", "--ranks", "2", "--device", "cpu", *words, "hide=1,3")
    with Program("-m", "multi_gpu_training", *asked, cwd=tmp_path) as program:
        assert program.end_of_run() == 0, program
        assert "PASS" in program.out
        assert "one rank against a plain PyTorch loop: 0.0e+00" in program.out


@pytest.mark.slow
def test_it_learns_to_balance_a_pole_whose_speed_it_cannot_see(tmp_path: Path) -> None:
    options = {
        "env": "CartPole-v1",
        "hide": [1, 3],
        "num_envs": 8,
        "rollout_steps": 32,
        "features": 32,
        "hidden": 32,
        "gamma": 0.98,
        "gae_lambda": 0.8,
        "total_steps": 10_000,
    }
    settings = {"global_batch_size": 8, "epochs": 10, "learning_rate": 2e-3}
    result, _, _ = train(tmp_path, settings, options)
    # A random policy holds it for 22 steps, and one that sees only where the pole stands for 40.
    assert result.metrics["eval_return"] > 80


# Settings


def test_the_defaults_are_those_of_the_guide() -> None:
    assert recipe.config({}).batch_size == 128
    assert PPOOptions().num_episodes == 5000
    assert (PPOOptions().features, PPOOptions().hidden) == (128, 512)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--env", "CartPole-v9"], ["CartPole-v9", "not registered"]),
        (["--data-dir", "nowhere"], ["nowhere", "does not exist"]),
        (["--multi-gpu", "dp"], ["data_parallel", "ddp or single"]),
        (["schedule=cosine"], ["decay=linear"]),
        (["num_workers=2"], ["num_workers=2"]),
        (["step_execution=graph"], ["use eager"]),
        (["--hide", "1,3"], ["hide=[1, 3]", "env=trading"]),
        (["--symbols", "AAPL"], ["symbols=AAPL", "data_dir=None"]),
        (["--env", "CartPole-v1", "--max-shares", "5"], ["max_shares=5", "CartPole-v1"]),
        (["--clip-range", "-1"], ["clip_range=-1"]),
        (["--num-environments", "3"], ["num_environments"]),
    ],
)
def test_wrong_settings_say_what_to_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    one = [] if "--multi-gpu" in words else ["--multi-gpu", "single"]
    answer = mgt_here(monkeypatch, capsys, "train", "ppo", *one, "device=cpu", *words)
    assert answer.code in (1, 2), answer
    for word in said:
        assert word in answer.err + answer.out


def too_many_ranks(folder: Path) -> str:
    try:
        train(folder, {}, CARTPOLE | {"num_envs": 2, "total_steps": 10})
    except ConfigError as error:
        return str(error)
    return "nothing"


def test_fewer_environments_than_ranks_are_an_error(tmp_path: Path) -> None:
    for said in run_ranks(3, too_many_ranks, tmp_path):
        assert "num_envs=2 is smaller than world_size=3" in said


def test_the_class_of_the_guide_trains_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"training_mode": "single", "progress": "lines"}
    result, _, progress = train(tmp_path, settings, TRADING)
    assert "Epoch" not in capsys.readouterr().out  # an iteration is none to people
    assert progress["episodes"] == 14
    wanted = {"return", "sharpe", "drawdown", "exposure", "turnover", "costs", "part_return_std"}
    for whose in ("test", "start", "random", "hold"):
        assert {f"{whose}_{name}" for name in wanted} <= result.metrics.keys()
    assert result.metrics["learned"] == 0  # after 14 episodes
    assert sys.modules["multi_gpu_training.recipes.ppo"].recipe.name == "ppo"
