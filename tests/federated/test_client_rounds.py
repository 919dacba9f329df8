"""A client's rounds as runs, without Flower: what is kept between them, what is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multi_gpu_training.errors import ConfigError, ModelError
from multi_gpu_training.federated.client_run import ClientSetup, RoundResult, RoundTask, do_round
from multi_gpu_training.federated.federation_settings import FederatedSettings
from multi_gpu_training.federated.simulation import Simulation, simulate

SCRIPT = str(Path(__file__).with_name("train_small.py"))
FACTS = {"rounds": 3, "local_epochs": 2, "local_steps": 0, "mu": 0.0}


def setup(folder: Path, momentum: float = 0.9) -> ClientSetup:
    words = [str(momentum), "10"]
    return ClientSetup(SCRIPT, str(folder), words=words, device="cpu", in_process=True)


def train(client: ClientSetup, number: int, weights: Any, **facts: Any) -> RoundResult:
    return do_round(client, RoundTask("train", "f", number, {**FACTS, **facts}, weights))


def test_rounds_continue_one_run_and_a_repeated_round_starts_from_the_same_state(
    tmp_path: Path,
) -> None:
    client = setup(tmp_path / "a")
    first = do_round(client, RoundTask("init", "f", 0, FACTS)).weights
    one = train(client, 1, first)
    two = train(client, 2, one.weights)
    # Weights handed back unchanged: the rounds are one training of four epochs, momentum included.
    whole = train(setup(tmp_path / "b"), 1, first, local_epochs=4, rounds=2)
    for name, value in two.weights.items():
        assert np.array_equal(value, whole.weights[name])
    # The server was killed and asks again, with other weights: not counted twice.
    other = {name: value + 0.01 for name, value in one.weights.items()}
    train(client, 2, other)
    again = train(client, 2, one.weights)
    for name, value in two.weights.items():
        assert np.array_equal(value, again.weights[name])
    seen = do_round(client, RoundTask("evaluate", "f", 2, FACTS, two.weights))
    assert seen.samples == 47
    assert seen.metrics["loss"] == pytest.approx(two.metrics["val/loss"], abs=1e-12)


def test_a_server_that_lost_its_newest_checkpoint_may_go_back_two_rounds(tmp_path: Path) -> None:
    client = setup(tmp_path)
    found = [do_round(client, RoundTask("init", "f", 0, FACTS))]
    for number in (1, 2, 3):
        found.append(train(client, number, found[-1].weights))
    # The optimizer's momentum is that after round 1, not none.
    again = train(client, 2, found[1].weights)
    for name, value in found[2].weights.items():
        assert np.array_equal(value, again.weights[name])


def test_fedprox_adds_the_pull_towards_the_server_to_every_step(tmp_path: Path) -> None:
    client = setup(tmp_path / "a", momentum=0.0)
    first = do_round(client, RoundTask("init", "f", 0, FACTS)).weights
    one = train(client, 1, first, local_epochs=0, local_steps=1, mu=0.5)
    two = train(replace(client, folder=str(tmp_path / "b")), 1, first, local_steps=2, mu=0.5)
    plain = train(replace(client, folder=str(tmp_path / "c")), 1, first, local_steps=2)
    # The first step has no distance yet; the second is pulled back by rate * mu * distance.
    for name, value in two.weights.items():
        pull = 0.1 * 0.5 * (one.weights[name] - first[name])
        assert np.allclose(plain.weights[name] - value, pull, atol=1e-14)


TWO_OPTIMIZERS = """
import torch
from torch import nn
from train_small import data
from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

manager = MultiGPUTrainingManager(MultiGPUConfig(device="cpu", progress="off"))
nets = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)]).double()
optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
manager.prepare(nets, *optimizers, dataset=data())
"""


def test_fedprox_is_refused_where_several_optimizers_would_pull_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(SCRIPT).parent))
    (tmp_path / "train.py").write_text(TWO_OPTIMIZERS)
    client = replace(setup(tmp_path), target=str(tmp_path / "train.py"))
    first = do_round(client, RoundTask("init", "f", 0, FACTS)).weights
    with pytest.raises(ConfigError, match="2 optimizers; use --strategy fedavg"):
        train(client, 1, first, mu=0.5)


def test_another_model_is_refused_before_the_first_step(tmp_path: Path) -> None:
    client = setup(tmp_path)
    weights = do_round(client, RoundTask("init", "f", 0, FACTS)).weights
    weights["0.weight"] = np.zeros((8, 5))
    del weights["2.bias"]
    with pytest.raises(ModelError, match=r"2\.bias is missing; 0\.weight has shape \(8, 5\)"):
        train(client, 1, weights)


def test_without_flower_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flwr", None)
    federation = FederatedSettings(clients=3)
    with pytest.raises(ConfigError, match=r"pip install 'multi-gpu-training\[federated\]'"):
        simulate(Simulation(SCRIPT, tmp_path, federation))
