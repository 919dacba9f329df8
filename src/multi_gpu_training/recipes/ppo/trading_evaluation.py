"""The test of a trading agent, beside traders that know nothing, and whether it learned at all.

The agent walks through the days behind the split with its likeliest actions: once through all of
them, and once through each of several parts, which begin in cash and do not overlap. Beside it go
the policy it started from, agents that trade at random, and someone who buys the same value of
every asset on the first day and waits. All pay the same costs and the same prices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import fmean, stdev

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from multi_gpu_training.recipes.ppo.policy import CLSTMPolicy
from multi_gpu_training.recipes.ppo.rollout import Collector, Rollout
from multi_gpu_training.recipes.ppo.trading import Rules, Tables, TradingEnvironments

TRADING_DAYS = 252  # in a year
SHORTEST_PART = 20
IN_CASH = 0.01  # whoever has less than this in shares has a Sharpe ratio of rounding
MOVED = 0.01  # nats per step between the action distributions of the start and of now
ERRORS = 2.0  # standard errors by which a difference must stand out
Worth = NDArray[np.float64]


@dataclass(frozen=True)
class Performance:
    """Of one path.

    exposure: mean part of the worth that was in shares. turnover: value traded per year, over the
    mean worth. costs: what the trades cost, over the worth at the beginning.
    """

    total_return: float
    sharpe: float
    drawdown: float
    exposure: float
    turnover: float
    costs: float

    @classmethod
    def of(cls, worth: Worth, exposure: Worth, traded: Worth, cost: float) -> Performance:
        """From the worth and exposure at every close, and the value traded between them."""
        daily = np.diff(worth) / worth[:-1]
        spread = float(daily.std(ddof=1))
        held = float(exposure[1:].mean())
        sharpe = 0.0
        if spread > 0 and held >= IN_CASH:
            sharpe = math.sqrt(TRADING_DAYS) * float(daily.mean()) / spread
        return cls(
            total_return=float(worth[-1] / worth[0] - 1),
            sharpe=sharpe,
            drawdown=float((1 - worth / np.maximum.accumulate(worth)).max()),
            exposure=held,
            turnover=float(traded.sum() / worth.mean() * TRADING_DAYS / len(daily)),
            costs=float(traded.sum() * cost / worth[0]),
        )

    @classmethod
    def mean(cls, several: Sequence[Performance]) -> Performance:
        names = [field.name for field in fields(cls)]
        return cls(*(fmean(getattr(one, name) for one in several) for name in names))


@dataclass(frozen=True)
class Trader:
    """How one trader did: `whole` through all days, once per draw of chance, and the return of
    each of the `parts`, over the draws."""

    name: str
    whole: Sequence[Performance]
    parts: Sequence[float]

    @property
    def performance(self) -> Performance:
        return Performance.mean(self.whole)

    def metrics(self, whose: str) -> dict[str, float]:
        found = {**vars(self.performance), "part_return": fmean(self.parts)}
        found["part_return_std"] = stdev(self.parts) if len(self.parts) > 1 else 0.0
        return {f"{whose}_{name.removeprefix('total_')}": value for name, value in found.items()}

    def cells(self) -> list[str]:
        mean = self.performance
        sharpe = f"{mean.sharpe:.2f}" if mean.exposure >= IN_CASH else "-"
        spread = f" +- {stdev(self.parts):.1%}" if len(self.parts) > 1 else ""
        several = [one.total_return for one in self.whole]
        chance = f" +- {stdev(several):.1%}" if len(several) > 1 else ""
        return [
            self.name,
            f"{mean.total_return:+.1%}{chance}",
            sharpe,
            f"{mean.drawdown:.1%}",
            f"{mean.exposure:.0%}",
            f"{mean.turnover:.1f}x",
            f"{mean.costs:.2%}",
            f"{fmean(self.parts):+.1%}{spread}",
        ]


HEADER = ["", "return", "Sharpe", "drawdown", "exposure", "turnover/y", "costs", "return per part"]


@dataclass(frozen=True)
class Comparison:
    """The agent's return per part less another trader's: mean and its standard error."""

    other: str
    mean: float
    error: float

    @classmethod
    def of(cls, agent: Trader, other: Trader) -> Comparison:
        apart = [mine - theirs for mine, theirs in zip(agent.parts, other.parts, strict=True)]
        error = stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else math.inf
        return cls(f"the {other.name}".replace("the its", "its"), fmean(apart), error)

    @property
    def better(self) -> bool:
        return self.mean > ERRORS * self.error

    @property
    def verdict(self) -> str:
        return "is worse than" if self.mean < -ERRORS * self.error else "cannot be told from"

    def __str__(self) -> str:
        error = f"{self.error:.2%}" if math.isfinite(self.error) else "unknown"
        return f"{self.mean:+.2%} per part (standard error {error})"


@dataclass(frozen=True)
class TradingTest:
    """What came out, for agent, start, random agents and buy and hold; `moved` is the mean KL
    divergence of the agent's actions from those of its start."""

    first_day: str
    last_day: str
    part_days: int
    agent: Trader
    start: Trader
    chance: Trader
    hold: Trader
    moved: float

    @property
    def learned(self) -> bool:
        return not self.doubts()

    def comparisons(self) -> list[Comparison]:
        return [Comparison.of(self.agent, other) for other in (self.start, self.chance)]

    def doubts(self) -> list[str]:
        """Why nothing was learned; nothing where all of it stands out."""
        found = []
        if self.moved < MOVED:
            found.append(
                f"the policy is that of its start (KL {self.moved:.2g} per step, below {MOVED:g})"
            )
        if self.agent.performance.exposure < IN_CASH:
            found.append(
                f"it sat in cash ({self.agent.performance.exposure:.2%} of its worth in shares)"
            )
        if len(self.agent.parts) < 3:
            found.append(f"{len(self.agent.parts)} parts of the test are too few to tell")
        else:
            found += [
                f"it {one.verdict} {one.other}, {one}"
                for one in self.comparisons()
                if not one.better
            ]
        return found

    def metrics(self) -> dict[str, float]:
        return {
            **self.agent.metrics("test"),
            **self.start.metrics("start"),
            **self.chance.metrics("random"),
            **self.hold.metrics("hold"),
            "kl_from_start": self.moved,
            "learned": float(self.learned),
        }

    def lines(self) -> list[str]:
        traders = (self.agent, self.start, self.chance, self.hold)
        rows = [HEADER, *(trader.cells() for trader in traders)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
        table = []
        for name, *cells in rows:
            padded = (c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))
            table.append("  ".join([name.ljust(widths[0]), *padded]))
        return [
            f"test from {self.first_day} to {self.last_day}, never seen in training, and "
            f"{len(self.agent.parts)} parts of {self.part_days} days (mean +- spread):",
            *(f"  {line}" for line in table),
            self.verdict(),
        ]

    def verdict(self) -> str:
        if self.doubts():
            return f"nothing learned: {'; '.join(self.doubts())}"
        beside = ", and ".join(f"better than {one.other} by {one}" for one in self.comparisons())
        return (
            f"learned: {beside}; KL {self.moved:.2g} per step from its start. One training seed: "
            "others may differ"
        )


def trade(
    policy: CLSTMPolicy,
    start: CLSTMPolicy,
    tables: Tables,
    rules: Rules,
    normalise: bool,
    parts: int = 10,
    draws: int = 5,
    seed: int = 0,
) -> TradingTest:
    """Let all four trade through the days behind the split. `start` is brought to the policy's
    device and scales of observation."""
    start.to(policy.value_head.weight)
    start.observation_mean.copy_(policy.observation_mean)
    start.observation_scale.copy_(policy.observation_scale)
    first, last = tables.split, len(tables.market.days) - 1
    days = last - first
    parts = max(1, min(parts, days // SHORTEST_PART))
    length = days // parts
    begins = [first + length * part for part in range(parts)]

    def of_policy(name: str, whose: CLSTMPolicy) -> tuple[Trader, Rollout]:
        whole, rollout = walk(tables, rules, [first], days, whose, normalise)
        pieces, _ = walk(tables, rules, begins, length, whose, normalise)
        return Trader(name, whole, [one.total_return for one in pieces]), rollout

    agent, rollout = of_policy("agent", policy)
    by_chance = [one.total_return for one in stroll(tables, rules, begins * draws, length, seed)]
    chance = Trader(
        "random agent",
        stroll(tables, rules, [first] * draws, days, seed + 1),
        [fmean(by_chance[part::parts]) for part in range(parts)],
    )
    hold = Trader(
        "buy and hold",
        [buy_and_hold(tables, rules, first, days)],
        [buy_and_hold(tables, rules, begin, length).total_return for begin in begins],
    )
    return TradingTest(
        tables.market.days[first],
        tables.market.days[last],
        length,
        agent,
        of_policy("its start", start)[0],
        chance,
        hold,
        divergence(start, policy, rollout),
    )


class Ledger:
    """Notes worth, exposure and trades of environments; called before every step and at the end."""

    def __init__(self, environments: TradingEnvironments) -> None:
        self.environments = environments
        self.rows: list[Tensor] = []

    def note(self) -> None:
        now = self.environments
        self.rows.append(torch.stack([now.worth(), now.exposure(), now.traded]))

    def performances(self, cost: float) -> list[Performance]:
        worth, exposure, traded = torch.stack(self.rows, 2).cpu().numpy()
        return [
            Performance.of(*path, cost) for path in zip(worth, exposure, traded[:, 1:], strict=True)
        ]


def _at(tables: Tables, rules: Rules, starts: Sequence[int], days: int) -> TradingEnvironments:
    # One day longer than is walked: the last step must not begin a new episode.
    count = len(starts)
    return TradingEnvironments(tables, rules, range(count), count, 0, (0, 0), days + 1, starts)


def walk(
    tables: Tables,
    rules: Rules,
    starts: Sequence[int],
    days: int,
    policy: CLSTMPolicy,
    normalise: bool,
) -> tuple[list[Performance], Rollout]:
    """The policy's likeliest actions for `days` days from each of the `starts`."""
    environments = _at(tables, rules, starts, days)
    ledger = Ledger(environments)
    rollout, _ = Collector(environments, policy, normalise).collect(days, None, ledger.note)
    ledger.note()
    return ledger.performances(rules.cost), rollout


def stroll(
    tables: Tables, rules: Rules, starts: Sequence[int], days: int, seed: int
) -> list[Performance]:
    """Orders drawn evenly between selling and buying all that a day allows."""
    environments = _at(tables, rules, starts, days)
    ledger = Ledger(environments)
    environments.reset()
    generator = torch.Generator().manual_seed(seed % 2**63)
    for _ in range(days):
        ledger.note()
        drawn = 2 * torch.rand(len(starts), tables.assets, generator=generator) - 1
        environments.step(drawn.to(environments.device))
    ledger.note()
    return ledger.performances(rules.cost)


def buy_and_hold(tables: Tables, rules: Rules, first: int, days: int) -> Performance:
    """Buy the same value of every asset with the first order, and wait."""
    prices = tables.prices[first : first + days + 1].cpu().numpy()
    paid = tables.fills[first].cpu().numpy()
    shares = np.floor(rules.balance / len(paid) / (paid * (1 + rules.cost)))
    bought = float((shares * paid).sum())
    cash = rules.balance - bought * (1 + rules.cost)
    held = prices @ shares
    held[0] = 0.0  # the order is not filled yet
    worth = cash + held
    worth[0] = rules.balance
    traded = np.zeros(days)
    traded[0] = bought
    return Performance.of(worth, held / worth, traded, rules.cost)


@torch.no_grad()
def divergence(start: CLSTMPolicy, policy: CLSTMPolicy, rollout: Rollout) -> float:
    """Mean KL divergence of the policy's action distribution from that of its start, per step of
    the rollout."""
    seen = (rollout.observations, rollout.recent, rollout.state, rollout.starts, rollout.whole)
    before, now = start(*seen).head.double(), policy(*seen).head.double()
    assert start.log_std is not None and policy.log_std is not None
    old, new = start.log_std.double(), policy.log_std.double()
    each = new - old + ((2 * old).exp() + (before - now).square()) / (2 * (2 * new).exp()) - 0.5
    return float(each.sum(-1).mean())
