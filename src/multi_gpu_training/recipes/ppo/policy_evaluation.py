"""How good a policy is: episodes it has not seen, or a later period of the market."""

from __future__ import annotations

import numpy as np
import torch

from multi_gpu_training.data.order import cut, derive_seed
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.recipes.ppo.gymnasium_environments import GymnasiumEnvironments
from multi_gpu_training.recipes.ppo.options import PPOOptions
from multi_gpu_training.recipes.ppo.policy import CLSTMPolicy
from multi_gpu_training.recipes.ppo.rollout import Collector
from multi_gpu_training.recipes.ppo.trading_evaluation import trade
from multi_gpu_training.recipes.ppo.worlds import World

_EVALUATION = 0xE7A1  # sets the seeds of evaluation apart from those of training


def evaluate(
    policy: CLSTMPolicy,
    start: CLSTMPolicy,
    world: World,
    options: PPOOptions,
    seed: int,
    placement: Placement,
) -> tuple[dict[str, float], list[str]]:
    """Metrics over all ranks, and lines that say them. Collective.

    `start` is the policy as it was before training.
    """
    if world.tables is not None:
        test = trade(
            policy,
            start,
            world.tables,
            world.rules,
            options.normalises,
            parts=options.test_parts,
            draws=options.test_draws,
            seed=derive_seed(seed, _EVALUATION),
        )
        return test.metrics(), test.lines()
    returns = np.array(play(policy, options, seed, placement))
    metrics = {
        "eval_return": float(returns.mean()),
        "eval_return_std": float(returns.std()),
        "eval_return_min": float(returns.min()),
    }
    line = (
        f"evaluation: {len(returns)} episodes, return {returns.mean():.1f} +- {returns.std():.1f}, "
        f"least {returns.min():.1f}"
    )
    return metrics, [line]


def play(policy: CLSTMPolicy, options: PPOOptions, seed: int, placement: Placement) -> list[float]:
    """Returns of new episodes with the likeliest actions, shared out over the ranks."""
    mine = range(*cut(options.eval_episodes, placement.dp_size, placement.dp_rank))
    played: list[float] = []
    if mine:
        seed = derive_seed(seed, _EVALUATION)
        device = placement.device
        environments = GymnasiumEnvironments(
            options.env, mine, seed, options.hide, device, options.env_processes
        )
        collector = Collector(environments, policy, options.normalises)
        played = first_returns(collector, options.eval_steps)
        environments.close()
    return [value for part in placement.gather_json(played) for value in part]


def first_returns(collector: Collector, longest: int) -> list[float]:
    """The return of the first episode of each environment, or of its first `longest` steps."""
    found: dict[int, float] = {}
    done = 0
    count = len(collector.environments.numbers)
    while done < longest and len(found) < count:
        steps = min(100, longest - done)
        _, finished = collector.collect(steps, None)
        done += steps
        for ended, returns in zip(finished.ended, finished.returns, strict=True):
            for i in torch.nonzero(ended).flatten().tolist():
                found.setdefault(i, float(returns[i]))
    running = collector.returns.tolist()
    return [found.get(i, running[i]) for i in range(count)]
