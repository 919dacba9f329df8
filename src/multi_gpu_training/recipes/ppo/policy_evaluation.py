"""How good a policy is: episodes it has not seen, or a later period of the market."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from multi_gpu_training.data.order import cut, derive_seed
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.recipes.ppo.gymnasium_environments import GymnasiumEnvironments
from multi_gpu_training.recipes.ppo.options import PPOOptions
from multi_gpu_training.recipes.ppo.policy import CLSTMPolicy
from multi_gpu_training.recipes.ppo.rollout import Collector
from multi_gpu_training.recipes.ppo.trading import REWARD_SCALE, Rules, Tables, TradingEnvironments
from multi_gpu_training.recipes.ppo.worlds import World

TRADING_DAYS = 252  # in a year
_EVALUATION = 0xE7A1  # sets the seeds of evaluation apart from those of training


def evaluate(
    policy: CLSTMPolicy, world: World, options: PPOOptions, seed: int, placement: Placement
) -> tuple[dict[str, float], list[str]]:
    """Metrics over all ranks, and lines that say them. Collective."""
    if world.tables is not None:
        test = trade(policy, world.tables, world.rules, options.normalises)
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
        environments = GymnasiumEnvironments(options.env, mine, seed, options.hide, device)
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


@dataclass(frozen=True)
class Performance:
    """Of a net worth, day by day."""

    total_return: float
    sharpe: float
    drawdown: float

    @classmethod
    def of(cls, worth: NDArray[np.float64]) -> Performance:
        daily = np.diff(worth) / worth[:-1]
        spread = float(daily.std(ddof=1))
        sharpe = math.sqrt(TRADING_DAYS) * float(daily.mean()) / spread if spread > 0 else 0.0
        drawdown = float((1 - worth / np.maximum.accumulate(worth)).max())
        return cls(float(worth[-1] / worth[0] - 1), sharpe, drawdown)

    def metrics(self, whose: str) -> dict[str, float]:
        values = {"return": self.total_return, "sharpe": self.sharpe, "drawdown": self.drawdown}
        return {f"{whose}_{name}": value for name, value in values.items()}


@dataclass(frozen=True)
class TradingTest:
    first_day: str
    last_day: str
    agent: Performance
    hold: Performance

    def metrics(self) -> dict[str, float]:
        return {**self.agent.metrics("test"), **self.hold.metrics("hold")}

    def lines(self) -> list[str]:
        return [
            f"test from {self.first_day} to {self.last_day}, never seen in training:",
            *(
                f"  {name:12}  return {p.total_return:+.1%}  Sharpe {p.sharpe:.2f}  "
                f"drawdown {p.drawdown:.1%}"
                for name, p in (("agent", self.agent), ("buy and hold", self.hold))
            ),
        ]


def trade(policy: CLSTMPolicy, tables: Tables, rules: Rules, normalise: bool) -> TradingTest:
    """One walk through the days behind the split, with the likeliest actions."""
    first, last = tables.split, len(tables.market.days) - 1
    days = last - first
    environments = TradingEnvironments(tables, rules, range(1), 1, 0, (first, first), days)
    rollout, _ = Collector(environments, policy, normalise).collect(days, None)
    earned = rollout.rewards[0].double().cumsum(0).cpu().numpy() / REWARD_SCALE
    agent = np.concatenate([[0.0], earned]) + rules.balance
    prices = tables.market.close[first:]
    return TradingTest(
        tables.market.days[first],
        tables.market.days[last],
        Performance.of(agent),
        Performance.of(buy_and_hold(prices, rules)),
    )


def buy_and_hold(prices: NDArray[np.float64], rules: Rules) -> NDArray[np.float64]:
    """Net worth of who buys the same value of every asset on the first day, at the same cost."""
    each = rules.balance / prices.shape[1]
    shares = np.floor(each / (prices[0] * (1 + rules.cost)))
    cash = rules.balance - float((shares * prices[0]).sum()) * (1 + rules.cost)
    worth: NDArray[np.float64] = cash + prices @ shares
    # Bought at once: the day's worth before the cost is where the way begins.
    worth[0] = rules.balance
    return worth
