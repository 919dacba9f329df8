"""From the options to environments: a market to trade in, or a game of Gymnasium."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.recipes.ppo.environment import Environments
from multi_gpu_training.recipes.ppo.gymnasium_environments import GymnasiumEnvironments
from multi_gpu_training.recipes.ppo.market import generate_market, read_market, split_symbols
from multi_gpu_training.recipes.ppo.options import PPOOptions
from multi_gpu_training.recipes.ppo.trading import (
    WARMUP_DAYS,
    Rules,
    Tables,
    TradingEnvironments,
    prepare,
)


@dataclass(frozen=True)
class World:
    """Environments of a rank; `tables` and `rules` where they trade."""

    environments: Environments
    description: str
    rules: Rules
    tables: Tables | None = None


def build_world(
    options: PPOOptions, numbers: range, market_seed: int, seed: int, device: torch.device
) -> World:
    """Environments `numbers`. Every problem of names, files and spaces shows here, before the
    first step."""
    # An option that does nothing is a mistake of whoever set it.
    idle = options.without_effect()
    if idle:
        prices = f" with data_dir={options.data_dir}" if options.trades else ""
        raise ConfigError(
            f"{', '.join(f'{name}={getattr(options, name)}' for name in idle)} means nothing for "
            f"env={options.env}{prices}; drop it"
        )
    rules = Rules(
        options.initial_balance,
        options.trading_cost,
        options.max_shares,
        options.turbulence_quantile,
        options.execution or "next_open",
    )
    if not options.trades:
        game = GymnasiumEnvironments(
            options.env, numbers, seed, options.hide, device, options.env_processes
        )
        return World(game, options.env, rules)
    if options.data_dir is None:
        market = generate_market(options.assets, options.market_days, market_seed)
    else:
        market = read_market(options.data_dir, split_symbols(options.symbols))
    tables = prepare(market, rules, options.episode_days, options.test_fraction, device)
    # The last day on which an episode can begin and still end before the test.
    days = (WARMUP_DAYS, tables.split - 1 - options.episode_days)
    trading = TradingEnvironments(
        tables, rules, numbers, options.num_envs, seed, days, options.episode_days
    )
    text = f"{market.describe()}; tested from {market.days[tables.split]} on"
    return World(trading, text, rules, tables)
