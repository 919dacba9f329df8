"""The arithmetic of PPO against definitions: policy, advantages, loss, minibatches."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.recipes.ppo.policy import Actions, CLSTMPolicy, Stepper
from multi_gpu_training.recipes.ppo.rollout import Rollout, advantages
from multi_gpu_training.recipes.ppo.update import (
    PPOLoss,
    explained_variance,
    minibatches,
    moments,
    normalise,
    shares,
)

N, T, SIZE = 3, 9, 2
DISCRETE = Actions("discrete", 3)
CONTINUOUS = Actions("continuous", 2)


def policy(window: int, actions: Actions = DISCRETE) -> CLSTMPolicy:
    torch.manual_seed(0)
    built = CLSTMPolicy(SIZE, actions, window, features=5, hidden=7).double()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return built


def step_by_step(model: CLSTMPolicy, observations: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Heads and values as a rollout computes them; memory is cleared where an episode begins."""
    stepper = Stepper(model)
    recent = torch.zeros(N, model.window - 1, SIZE, dtype=torch.float64)
    state = torch.zeros(2, 2, N, model.hidden, dtype=torch.float64)
    heads, values = [], []
    for t in range(T):
        keep = (~starts[:, t]).double()
        state, recent = state * keep.view(1, 1, N, 1), recent * keep.view(N, 1, 1)
        windows = torch.cat([recent, observations[:, t : t + 1]], 1)
        output, state = stepper(windows, state)
        recent = windows[:, 1:]
        heads.append(output.head)
        values.append(output.values)
    return torch.stack(heads, 1), torch.stack(values, 1)


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("window", [1, 4])
def test_the_update_sees_what_the_rollout_computed(window: int, resets: bool) -> None:
    model = policy(window)
    observations = torch.randn(N, T, SIZE, dtype=torch.float64)
    starts = torch.zeros(N, T, dtype=torch.bool)
    starts[:, 0] = True
    if resets:
        starts[0, 3] = starts[0, 4] = starts[2, 8] = True
    with torch.no_grad():
        heads, values = step_by_step(model, observations, starts)
        recent = torch.zeros(N, window - 1, SIZE, dtype=torch.float64)
        state = torch.zeros(N, 4, model.hidden, dtype=torch.float64)
        output = model(observations, recent, state, starts, whole=not resets)
    torch.testing.assert_close(output.head, heads, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(output.values, values, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [1, 4])
def test_nothing_of_an_earlier_episode_is_remembered(window: int) -> None:
    model = policy(window)
    observations = torch.randn(N, T, SIZE, dtype=torch.float64)
    starts = torch.zeros(N, T, dtype=torch.bool)
    starts[:, 4] = True
    recent = torch.randn(N, window - 1, SIZE, dtype=torch.float64)
    state = torch.randn(N, 4, model.hidden, dtype=torch.float64)
    changed = observations.clone()
    changed[:, :4] += 1
    with torch.no_grad():
        before = model(observations, recent, state, starts, whole=False)
        after = model(changed, recent + 1, state + 1, starts, whole=False)
    assert torch.equal(before.head[:, 4:], after.head[:, 4:])
    assert not torch.equal(before.head[:, :4], after.head[:, :4])


def test_gradients_do_not_depend_on_how_sequences_are_cut() -> None:
    """`whole` only spares work: the same gradient with and without it."""
    model = policy(4)
    observations = torch.randn(N, T, SIZE, dtype=torch.float64)
    starts = torch.zeros(N, T, dtype=torch.bool)
    recent = torch.randn(N, 3, SIZE, dtype=torch.float64)
    state = torch.randn(N, 4, model.hidden, dtype=torch.float64)
    found = []
    for whole in (True, False):
        output = model(observations, recent, state, starts, whole)
        loss = output.head.square().sum() + output.values.sum()
        found.append(torch.autograd.grad(loss, list(model.feature.parameters())))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("actions", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
def test_distributions_are_those_of_torch(actions: Actions) -> None:
    head = torch.randn(5, actions.size)
    log_std = torch.randn(actions.size) if actions.kind == "continuous" else None
    if log_std is None:
        reference: Any = torch.distributions.Categorical(logits=head)
    else:
        normal = torch.distributions.Normal(head, log_std.exp())
        reference = torch.distributions.Independent(normal, 1)
    chosen = reference.sample()
    torch.testing.assert_close(actions.log_prob(head, log_std, chosen), reference.log_prob(chosen))
    torch.testing.assert_close(actions.entropy(head, log_std), reference.entropy())


def test_samples_follow_the_policy() -> None:
    head = torch.tensor([0.0, 1.0, -1.0])
    noise = DISCRETE.noise(20_000, 1, seed=3)[:, 0]
    counts = torch.bincount(DISCRETE.sample(head, None, noise), minlength=3)
    # Five standard deviations of a count of 20,000.
    torch.testing.assert_close(counts / 20_000, head.softmax(0), rtol=0, atol=0.018)
    noise = CONTINUOUS.noise(20_000, 1, seed=3)[:, 0]
    drawn = CONTINUOUS.sample(torch.ones(2), torch.full((2,), math.log(0.5)), noise)
    torch.testing.assert_close(drawn.mean(0), torch.ones(2), rtol=0, atol=0.02)
    torch.testing.assert_close(drawn.std(0), torch.full((2,), 0.5), rtol=0, atol=0.02)


# Advantages


def rollout(**changes: Any) -> Rollout:
    torch.manual_seed(1)
    made = Rollout(
        observations=torch.randn(N, T, SIZE),
        actions=torch.zeros(N, T, dtype=torch.int64),
        log_probs=torch.zeros(N, T),
        values=torch.randn(N, T),
        rewards=torch.randn(N, T),
        after=torch.randn(N, T),
        done=torch.zeros(N, T, dtype=torch.bool),
        starts=torch.zeros(N, T, dtype=torch.bool),
        recent=torch.zeros(N, 0, SIZE),
        state=torch.zeros(N, 4, 7),
        whole=False,
    )
    return dataclasses.replace(made, **changes)


def test_advantages_are_the_sum_of_discounted_surprises_until_the_episode_ends() -> None:
    done = torch.zeros(N, T, dtype=torch.bool)
    done[0, 2] = done[1, 8] = True
    made = rollout(done=done)
    gamma, lam = 0.9, 0.7
    for n in range(N):
        for t in range(T):
            expected, weight = 0.0, 1.0
            for k in range(t, T):
                surprise = made.rewards[n, k] + gamma * made.after[n, k] - made.values[n, k]
                expected += weight * float(surprise)
                weight *= gamma * lam
                if done[n, k]:
                    break
            found = float(advantages(made, gamma, lam)[n, t])
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_advantages_of_all_together_get_mean_0_and_spread_1() -> None:
    values = 5 + 3 * torch.randn(40, 7)
    scaled = normalise(values, *moments(values, Placement()))
    assert float(scaled.mean()) == pytest.approx(0, abs=1e-6)
    assert float(scaled.std(unbiased=False)) == pytest.approx(1, rel=1e-5)


def test_explained_variance_is_1_for_a_seer_and_0_for_a_constant() -> None:
    returns = torch.randn(4, 5)
    assert explained_variance(returns, returns, Placement()) == pytest.approx(1)
    assert explained_variance(torch.zeros(4, 5), returns, Placement()) == pytest.approx(0)


# Loss


@pytest.mark.parametrize("value_clip", [None, 0.1])
def test_the_loss_is_that_of_the_paper(value_clip: float | None) -> None:
    model = policy(1).float()
    made = rollout()
    batch = {
        "observations": made.observations,
        "actions": torch.randint(0, 3, (N, T)),
        "log_probs": torch.randn(N, T) * 0.3 - 1,
        "values": made.values,
        "advantages": torch.randn(N, T),
        "returns": torch.randn(N, T),
        "starts": made.starts,
        "recent": made.recent,
        "state": made.state,
        "clip_range": torch.tensor(0.2),
        "whole": True,
    }
    mean, weight, metrics = PPOLoss(0.5, 0.01, value_clip)(model, batch)
    mean = mean.detach()
    with torch.no_grad():
        output = model(made.observations, made.recent, made.state, made.starts, True)
    distribution = torch.distributions.Categorical(logits=output.head)
    total, clipped = 0.0, 0
    for n in range(N):
        for t in range(T):
            new = distribution.log_prob(batch["actions"])[n, t]
            ratio = float(torch.exp(new - batch["log_probs"][n, t]))
            clipped += abs(ratio - 1) > 0.2
            advantage = float(batch["advantages"][n, t])
            gain = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
            value, old = float(output.values[n, t]), float(made.values[n, t])
            aim = float(batch["returns"][n, t])
            error = (value - aim) ** 2
            if value_clip is not None:
                near = old + min(max(value - old, -value_clip), value_clip)
                error = max(error, (near - aim) ** 2)
            entropy = float(distribution.entropy()[n, t])
            total += -gain + 0.5 * 0.5 * error - 0.01 * entropy
    assert weight is None
    assert float(mean) == pytest.approx(total / (N * T), rel=1e-4)
    assert float(metrics["clip_fraction"][0]) == pytest.approx(clipped)
    assert metrics["clip_fraction"][1] == N * T


# Minibatches


@pytest.mark.parametrize(("environments", "count"), [(10, 3), (8, 1), (500, 4), (7, 7)])
def test_a_pass_shows_every_environment_once_and_ranks_have_equal_work(
    environments: int, count: int
) -> None:
    for number in range(5):
        batches = minibatches(environments, count, seed=1, number=number)
        assert sorted(i for batch in batches for i in batch) == list(range(environments))
        for ranks in (1, 2, 3, 4):
            size = environments // ranks
            held = range(size, 2 * size) if ranks > 1 else range(environments)
            parts = [len([i for i in batch if i in held]) for batch in batches]
            assert max(parts) - min(parts) <= 2
    if count > 1:
        assert batches != minibatches(environments, count, seed=1, number=9)


def test_micro_batches_add_up_to_what_a_rank_holds_of_a_minibatch() -> None:
    batch = [1, 2, 5, 6, 8]
    found = list(shares(batch, range(2, 9), number=4, position=1, accumulation=3))
    assert [share.indices for share in found] == [(2, 5), (6,), (8,)]
    assert all(share.window_count == 5 for share in found)
    assert [share.last for share in found] == [False, False, True]
