"""Gymnasium environments: no step is lost or invented where an episode ends."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from recipes import scripted
from torch import Tensor

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.recipes.ppo.environment import take_environments
from multi_gpu_training.recipes.ppo.gymnasium_environments import GymnasiumEnvironments
from multi_gpu_training.recipes.ppo.policy import CLSTMPolicy
from multi_gpu_training.recipes.ppo.rollout import Collector

ONE = torch.zeros(1, dtype=torch.int64)


@pytest.fixture(autouse=True)
def variable_of_gymnasium(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gymnasium sets it when it is first imported."""
    monkeypatch.setenv("PYGAME_HIDE_SUPPORT_PROMPT", "hide")


def one_scripted() -> GymnasiumEnvironments:
    return GymnasiumEnvironments(scripted.NAME, range(1), seed=0)


def test_the_step_that_ends_an_episode_gives_the_first_observation_of_the_next() -> None:
    environments = one_scripted()
    seen = [environments.reset()[0, :2].tolist()]
    steps = [environments.step(ONE) for _ in range(9)]
    seen += [step.observations[0, :2].tolist() for step in steps]
    # (episode, step of it): three steps to a termination, five to a truncation.
    expected = [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [1, 3], [1, 4], [2, 0], [2, 1]]
    assert seen == expected
    assert [float(step.rewards) for step in steps] == [1, 2, 3, 1, 2, 3, 4, 5, 1]
    assert [bool(step.terminated) for step in steps] == [i == 2 for i in range(9)]
    assert [bool(step.truncated) for step in steps] == [i == 7 for i in range(9)]
    assert [step.ended for step in steps] == [i in (2, 7) for i in range(9)]
    assert [step.final is not None for step in steps] == [i == 7 for i in range(9)]
    assert steps[7].final is not None
    assert steps[7].final[0, :2].tolist() == [1, 5]


def test_cartpole_goes_as_in_gymnasiums_own_vector_environment() -> None:
    """Until the second episode, whose seed is ours."""
    count = 5
    ours = GymnasiumEnvironments("CartPole-v1", range(count), seed=4)
    first = ours.reset()
    theirs = SyncVectorEnv(
        [lambda: gymnasium.make("CartPole-v1") for _ in range(count)],
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    from multi_gpu_training.data.order import derive_seed

    rows, _ = theirs.reset(seed=[derive_seed(4, i, 0) % 2**31 for i in range(count)])
    np.testing.assert_array_equal(first.numpy(), rows)
    living = np.ones(count, bool)
    random = np.random.default_rng(0)
    while living.any():
        actions = random.integers(0, 2, count)
        step = ours.step(torch.from_numpy(actions))
        rows, rewards, terminated, _, _ = theirs.step(actions)
        np.testing.assert_array_equal(step.terminated.numpy()[living], terminated[living])
        np.testing.assert_array_equal(step.rewards.numpy()[living], rewards[living])
        living &= ~terminated
        np.testing.assert_array_equal(step.observations.numpy()[living], rows[living])
    theirs.close()
    ours.close()


def test_a_truncated_episode_is_worth_what_the_critic_says_and_a_terminated_one_nothing() -> None:
    environments = one_scripted()
    torch.manual_seed(0)
    policy = CLSTMPolicy(3, environments.actions, window=2, features=4, hidden=6)
    torch.nn.init.normal_(policy.value_head.weight)
    rollout, finished = Collector(environments, policy).collect(10, None)
    assert finished.episodes() == [(2, 0, 6.0, 3), (7, 0, 15.0, 5)]
    assert float(rollout.after[0, 2]) == 0  # terminated
    inner = [t for t in range(9) if t not in (2, 7)]
    assert torch.equal(rollout.after[0, inner], rollout.values[0, [t + 1 for t in inner]])
    # The last observation of the truncated episode, seen by a critic that knows this episode.
    seen = torch.cat([rollout.observations[:, 3:8], torch.tensor([[[1, 5, 0.0]]])], 1)
    seen[0, :, 2] = rollout.observations[0, 3, 2]
    nothing = torch.zeros(1, 4, 6)
    with torch.no_grad():
        values = policy(
            seen, torch.zeros(1, 1, 3), nothing, torch.zeros(1, 6, dtype=torch.bool), True
        ).values
    assert float(rollout.after[0, 7]) == pytest.approx(float(values[0, 5]), rel=1e-5)
    assert float(rollout.after[0, 7]) != pytest.approx(float(rollout.values[0, 8]), rel=1e-2)


def trajectory(environments: GymnasiumEnvironments, actions: Tensor) -> Tensor:
    rows = [environments.reset()]
    for step in actions:
        rows.append(environments.step(step[list(environments.numbers)]).observations)
    return torch.stack(rows)


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_an_environment_does_the_same_whoever_holds_it(name: str) -> None:
    everyone = GymnasiumEnvironments(name, range(4), seed=1)
    if everyone.actions.kind == "discrete":
        actions = torch.randint(0, 2, (60, 4))
    else:
        actions = torch.randn(60, 4, 1)
    whole = trajectory(everyone, actions)
    part = trajectory(GymnasiumEnvironments(name, range(2, 4), seed=1), actions)
    assert torch.equal(whole[:, 2:], part)
    other = trajectory(GymnasiumEnvironments(name, range(2, 4), seed=2), actions)
    assert not torch.equal(part, other)


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_environments_go_on_from_their_state_to_the_bit(name: str) -> None:
    environments = GymnasiumEnvironments(name, range(3), seed=1)
    discrete = environments.actions.kind == "discrete"
    actions = torch.randint(0, 2, (50, 3)) if discrete else torch.randn(50, 3, 1)
    environments.reset()
    for step in actions[:30]:
        last = environments.step(step)
    state = environments.mark()
    later = [environments.step(step) for step in actions[30:]]
    resumed = GymnasiumEnvironments(name, range(1, 3), seed=1)
    now = resumed.load(take_environments(state(), range(1, 3)))
    assert torch.equal(now, last.observations[1:])
    for step, one in zip(actions[30:], later, strict=True):
        other = resumed.step(step[1:])
        assert torch.equal(one.observations[1:], other.observations)
        assert torch.equal(one.rewards[1:], other.rewards)


def test_environments_in_processes_of_their_own_do_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actions = torch.randint(0, 2, (60, 3))
    here = GymnasiumEnvironments("CartPole-v1", range(3), seed=1)
    whole = trajectory(here, actions)
    apart = GymnasiumEnvironments("CartPole-v1", range(3), seed=1, processes=True)
    assert torch.equal(whole, trajectory(apart, actions))
    resumed = GymnasiumEnvironments("CartPole-v1", range(3), seed=1, processes=True)
    assert torch.equal(resumed.load(apart.mark()()), whole[-1])
    for environments in (here, apart, resumed):
        environments.close()


def test_hidden_observations_are_not_there() -> None:
    environments = GymnasiumEnvironments("CartPole-v1", range(2), seed=0, hide=[1, 3])
    full = GymnasiumEnvironments("CartPole-v1", range(2), seed=0)
    assert environments.observation_size == 2
    assert torch.equal(environments.reset(), full.reset()[:, [0, 2]])


def test_discrete_observations_are_one_hot() -> None:
    environments = GymnasiumEnvironments("FrozenLake-v1", range(2), seed=0)
    rows = environments.reset()
    assert rows.shape == (2, 16)
    assert rows.sum(1).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("name", "hide", "words"),
    [
        ("CartPole-v9", [], ["CartPole-v9", "not registered", "env=trading"]),
        ("NoSuchGame-v0", [], ["NoSuchGame-v0", "not registered"]),
        ("no_such_module:Game-v0", [], ["no_such_module", "not registered"]),
        ("Odd-v0", [], ["Dict", "FlattenObservation"]),
        ("OddActions-v0", [], ["MultiBinary", "Discrete"]),
        ("CartPole-v1", [4], ["hide=4", "0 to 3"]),
        ("CartPole-v1", [0, 1, 2, 3], ["not all"]),
    ],
)
def test_an_environment_that_cannot_be_used_says_why(
    name: str, hide: list[int], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        GymnasiumEnvironments(name, range(1), seed=0, hide=hide)
    for word in words:
        assert word in str(caught.value)
