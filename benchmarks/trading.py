"""What a small PPO trader learns in three kinds of market, over several seeds.

    python benchmarks/trading.py --out benchmarks/trading.md
    python benchmarks/trading.py --seeds 5 --episodes 2000 --device cuda

trends   every asset follows a trend for forty days on average: who looks back can find it
noise    prices wander without drift or trend: there is nothing to find
fall     as noise, but falling by a tenth of a percent per day

Each seed has its own prices, written as a CSV file and read with --data-dir, and its own policy.
The table shows means and spreads over the seeds of the test period, which training never sees.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch

from multi_gpu_training import MultiGPUConfig
from multi_gpu_training.recipes.ppo import DistributedCLSTMPPOTrainer, PPOOptions
from multi_gpu_training.recipes.ppo.options import CONFIG_DEFAULTS

REGIMES = ("trends", "noise", "fall")
TRADERS = {"agent": "test", "its start": "start", "random agent": "random", "buy and hold": "hold"}
ASSETS = 4


def write_prices(path: Path, regime: str, days: int, seed: int) -> None:
    """Four assets with a common factor; the regime adds what there is to find."""
    random = np.random.default_rng([REGIMES.index(regime), seed])
    drift = np.zeros((days, ASSETS))
    if regime == "trends":
        for day in range(1, days):
            turns = random.random(ASSETS) < 1 / 40
            drift[day] = np.where(turns, random.normal(0.0003, 0.006, ASSETS), drift[day - 1])
    elif regime == "fall":
        drift -= 0.001
    moves = drift + random.normal(0, 0.006, (days, 1)) + random.normal(0, 0.01, (days, ASSETS))
    close = 50 * np.exp(np.cumsum(moves, 0))
    opens = np.concatenate([close[:1], close[:-1]]) * np.exp(random.normal(0, 0.003, close.shape))
    top, bottom = np.maximum(opens, close) * 1.002, np.minimum(opens, close) * 0.998
    dates = np.busday_offset("2000-01-03", np.arange(days), roll="forward")
    lines = ["Ticker,Date,Open,High,Low,Close,Volume"]
    for asset in range(ASSETS):
        lines += [
            f"A{asset},{dates[d]},{opens[d, asset]:.4f},{top[d, asset]:.4f},"
            f"{bottom[d, asset]:.4f},{close[d, asset]:.4f},1000"
            for d in range(days)
        ]
    path.write_text("\n".join(lines))


def train(regime: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        prices = Path(folder) / "prices.csv"
        write_prices(prices, regime, args.days, seed)
        options = {
            "data_dir": str(prices),
            "num_envs": 32,
            "num_episodes": args.episodes,
            "episode_days": 126,
            "window": 10,
            "features": 32,
            "hidden": 64,
            "max_shares": 500,
            "test_fraction": 0.3,
            "turbulence_quantile": 1.0,  # so that exposure is the agent's own choice
        }
        config = {**CONFIG_DEFAULTS, "batch_size": 8, "learning_rate": 1e-3, "seed": seed}
        config |= {"recipe": "ppo", "progress": "off", "tensorboard": False, "save_dir": folder}
        config |= {"enable_fault_tolerance": False, "training_mode": "single"}
        trainer = DistributedCLSTMPPOTrainer(
            MultiGPUConfig(**config, device=args.device), PPOOptions(**options)
        )
        started = time.perf_counter()
        found = trainer.train()
    seconds = time.perf_counter() - started
    print(f"{regime}, seed {seed}: {seconds:.0f} s", flush=True)
    return {"regime": regime, "seed": seed, "seconds": seconds, **found.metrics}


def spread(values: list[float], form: str) -> str:
    around = stdev(values) if len(values) > 1 else 0.0
    return f"{fmean(values):{form}} +- {around:{form.replace('+', '')}}"


def table(rows: list[dict[str, Any]]) -> list[str]:
    header = ["market", "trader", "return", "Sharpe", "drawdown", "exposure", "turnover per year"]
    header += ["costs", "learned"]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for regime in REGIMES:
        of = [row for row in rows if row["regime"] == regime]
        for trader, whose in TRADERS.items():
            column = {
                name: [row[f"{whose}_{name}"] for row in of]
                for name in ("return", "sharpe", "drawdown", "exposure", "turnover", "costs")
            }
            in_cash = max(column["exposure"]) < 0.01
            learned = f"{sum(row['learned'] for row in of):.0f} of {len(of)} seeds"
            cells = [
                regime if trader == "agent" else "",
                trader,
                spread(column["return"], "+.1%"),
                "-" if in_cash else spread(column["sharpe"], "+.2f"),
                spread(column["drawdown"], ".1%"),
                spread(column["exposure"], ".0%"),
                spread(column["turnover"], ".1f"),
                spread(column["costs"], ".2%"),
                learned if trader == "agent" else "",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def processor() -> str:
    try:
        facts = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in facts if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=320)
    parser.add_argument("--days", type=int, default=1500)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, help="the table; figures of each seed go to .json")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    plans = [(regime, seed) for seed in range(args.seeds) for regime in REGIMES]
    rows = [train(regime, seed, args) for regime, seed in plans]
    machine = torch.cuda.get_device_name() if args.device == "cuda" else processor()
    text = [
        f"{args.episodes} episodes of 126 days, {args.days} days of {ASSETS} assets, the last 30 % "
        f"for the test, {args.seeds} seeds (mean +- spread over seeds). {machine}, one thread, "
        f"torch {torch.__version__}; `benchmarks/trading.py`.",
        "",
        *table(rows),
    ]
    print("\n".join(["", *text]))
    if args.out:
        args.out.write_text("\n".join(text) + "\n")
        args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
