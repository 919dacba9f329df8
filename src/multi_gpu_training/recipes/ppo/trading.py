"""Trading a portfolio: thousands of copies as tensors on one device.

Every day the agent names for each asset how many shares to buy or sell. What it sees: its
balance, and for each asset price, shares held, MACD, RSI, CCI and ADX, all of them at the close.
Orders are filled at the next price there is, the open of the next day: nobody trades at a price
that they have already seen. A trade costs 0.1 %. After a day of high turbulence everything is sold
and nothing bought. The reward is the change of the net worth from close to close, in units of
10,000.

All copies begin and end their episodes together, each on a day of its own, so that no step has to
ask the device whether an episode is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from multi_gpu_training.data.order import derive_seed
from multi_gpu_training.errors import DataError
from multi_gpu_training.recipes.ppo.environment import ByEnvironment, Step
from multi_gpu_training.recipes.ppo.indicators import adx, cci, macd, rsi, turbulence
from multi_gpu_training.recipes.ppo.market import Market
from multi_gpu_training.recipes.ppo.policy import Actions

WARMUP_DAYS = 60  # before that, indicators over 30 days, smoothed once more, say little
REWARD_SCALE = 1e-4
Execution = Literal["next_open", "close"]


@dataclass(frozen=True)
class Rules:
    """What trading costs and allows."""

    balance: float = 1_000_000.0
    cost: float = 0.001
    max_shares: int = 100
    turbulence_quantile: float = 0.99
    execution: Execution = "next_open"  # "close": at the price just seen, as in version 0.1


@dataclass(frozen=True)
class Tables:
    """A market as the environment reads it: one row a day, all on one device.

    split: the first day that training does not see. Scales and the turbulence that stops trading
    are taken from the days before it.
    """

    market: Market
    split: int
    prices: Tensor  # at the close
    fills: Tensor  # what orders given on that day cost
    signals: Tensor  # price, MACD, RSI, CCI, ADX of each asset, scaled
    share_scale: Tensor
    calm: Tensor

    @property
    def assets(self) -> int:
        return self.prices.shape[1]


def prepare(
    market: Market,
    rules: Rules,
    episode_days: int,
    test_fraction: float,
    device: torch.device | str = "cpu",
) -> Tables:
    """Indicators and scales of a market, cut into a part to train on and a later one to test."""
    days = len(market.days)
    split = days - round(days * test_fraction)
    needed = WARMUP_DAYS + episode_days + 1
    if split < needed or days - split < 20:
        raise DataError(
            f"{market.describe()}; of these the first {split} are for training, which needs "
            f"{WARMUP_DAYS} to warm up + {episode_days} of an episode + 1 = {needed}, and the last "
            f"{days - split} for the test, which needs 20: give more days, lower episode_days, "
            "or change test_fraction"
        )
    level = market.close[:split].mean(0)
    signals = np.concatenate(
        [
            market.close / level,
            10 * macd(market.close) / level,
            rsi(market.close) / 100,
            cci(market.high, market.low, market.close) / 200,
            adx(market.high, market.low, market.close) / 100,
        ],
        axis=1,
    )
    fills = market.close
    if rules.execution == "next_open":
        # Nothing follows the last day: no order given on it is ever filled.
        fills = np.concatenate([market.open[1:], np.full_like(market.open[:1], np.nan)])
    unrest = turbulence(market.close)
    known = unrest[:split][unrest[:split] > 0]
    limit = np.quantile(known, rules.turbulence_quantile) if len(known) else np.inf
    return Tables(
        market,
        split,
        prices=torch.tensor(market.close, device=device),
        fills=torch.tensor(fills, device=device),
        signals=torch.tensor(signals, dtype=torch.float32, device=device),
        share_scale=torch.tensor(level / rules.balance, device=device),
        calm=torch.tensor(unrest <= limit, device=device),
    )


@dataclass(eq=False)
class TradingEnvironments:
    """Copies `numbers` of `total`. An episode begins on a day drawn from (seed, episode, copy)
    between the two of `days`, or on that of `starts`, and is cut off after `episode_days`.

    `traded` is the value of the shares that each copy bought and sold in its last step.
    """

    tables: Tables
    rules: Rules
    numbers: range
    total: int
    seed: int
    days: tuple[int, int]
    episode_days: int
    starts: Sequence[int] | None = None

    traded: Tensor = field(init=False)
    day: Tensor = field(init=False)
    balance: Tensor = field(init=False)
    shares: Tensor = field(init=False)
    episode: int = field(default=0, init=False)
    elapsed: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.observation_size = 1 + 6 * self.tables.assets
        self.actions = Actions("continuous", self.tables.assets)
        self.device = self.tables.prices.device
        self._never = torch.zeros(len(self.numbers), dtype=torch.bool, device=self.device)

    def reset(self) -> Tensor:
        self.episode = 0
        self._begin()
        return self.observe()

    def step(self, actions: Tensor) -> Step:
        before = self.worth()
        self._trade(actions)
        self.day = self.day + 1
        self.elapsed += 1
        rewards = (self.worth() - before) * REWARD_SCALE
        observations = self.observe()
        if self.elapsed < self.episode_days:
            return Step(observations, rewards.float(), self._never, self._never, None, False)
        # The market goes on, only our watching ends: cut off, not over.
        self.episode += 1
        self._begin()
        return Step(self.observe(), rewards.float(), self._never, ~self._never, observations, True)

    def _trade(self, actions: Tensor) -> None:
        prices, rules = self.tables.fills[self.day], self.rules
        wanted = (actions.double().clamp(-1, 1) * rules.max_shares).round()
        calm = self.tables.calm[self.day].unsqueeze(1)
        wanted = torch.where(calm, wanted, -self.shares)
        sold = torch.minimum((-wanted).clamp_min(0), self.shares)
        cash = self.balance + (sold * prices).sum(1) * (1 - rules.cost)
        bought = wanted.clamp_min(0)
        bill = (bought * prices).sum(1) * (1 + rules.cost)
        # Where the cash does not reach, all orders shrink alike; shares are whole.
        part = (cash / bill.clamp_min(1e-9)).clamp_max(1)
        bought = (bought * part.unsqueeze(1)).floor()
        self.balance = cash - (bought * prices).sum(1) * (1 + rules.cost)
        self.shares = self.shares - sold + bought
        self.traded = ((sold + bought) * prices).sum(1)

    def worth(self) -> Tensor:
        """Balance and shares at today's prices, of each copy."""
        held: Tensor = (self.shares * self.tables.prices[self.day]).sum(1)
        return self.balance + held

    def exposure(self) -> Tensor:
        """The part of the worth that is in shares, of each copy."""
        worth = self.worth()
        return (worth - self.balance) / worth

    def observe(self) -> Tensor:
        cash = (self.balance / self.rules.balance).unsqueeze(1)
        held = self.shares * self.tables.share_scale
        return torch.cat([cash.float(), held.float(), self.tables.signals[self.day]], 1)

    def _begin(self) -> None:
        """Every copy draws for all, so that its day does not depend on who holds it."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, self.episode))
        first, last = self.days
        drawn = torch.randint(first, last + 1, (self.total,), generator=generator)
        if self.starts is not None:
            drawn = torch.tensor(self.starts)
        self.day = drawn[self.numbers.start : self.numbers.stop].to(self.device)
        count, assets = len(self.numbers), self.tables.assets
        # In float64: a reward is a small difference between two large sums.
        self.balance = torch.full(
            (count,), self.rules.balance, dtype=torch.float64, device=self.device
        )
        self.shares = torch.zeros(count, assets, dtype=torch.float64, device=self.device)
        self.traded = torch.zeros_like(self.balance)
        self.elapsed = 0

    def mark(self) -> Callable[[], ByEnvironment]:
        count = len(self.numbers)
        state: ByEnvironment = {  # tensors that no step changes in place
            "day": self.day,
            "balance": self.balance,
            "shares": self.shares,
            "episode": torch.full((count,), self.episode, device=self.device),
            "elapsed": torch.full((count,), self.elapsed, device=self.device),
        }
        return lambda: state

    def load(self, state: ByEnvironment) -> Tensor:
        tensors = {name: torch.as_tensor(value) for name, value in state.items()}
        self.day, self.balance, self.shares = (
            tensors[name].to(self.device) for name in ("day", "balance", "shares")
        )
        self.episode, self.elapsed = (int(tensors[n][0]) for n in ("episode", "elapsed"))
        return self.observe()

    def close(self) -> None:
        return
