"""Recurrent PPO: what it learns, how fast it is beside sb3-contrib, and trading on a GPU.

    python benchmarks/ppo.py cartpole            100,000 steps, three seeds, 20 evaluation episodes
    python benchmarks/ppo.py speed               steps per second beside sb3-contrib's RecurrentPPO
    python benchmarks/ppo.py ranks               2 ranks against 1, five seeds
    python benchmarks/ppo.py trading             5,000 episodes of 252 days with all updates

Each prints a table and, with --out FILE, writes JSON. --quick makes everything tiny.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

Rates = tuple[float, float]
# CartPole with hidden velocities: RL Zoo's settings for sb3-contrib, with smaller LSTMs.
OURS = {
    "env": "CartPole-v1",
    "hide": [1, 3],
    "num_envs": 8,
    "rollout_steps": 32,
    "features": 64,
    "hidden": 64,
    "gamma": 0.98,
    "gae_lambda": 0.8,
    "decay": "linear",
    "total_steps": 100_000,
}
CONFIG = {"global_batch_size": 8, "epochs": 20, "learning_rate": 1e-3}
# As large as sb3-contrib's.
LARGE = {**OURS, "hidden": 256}
SB3 = {
    "n_steps": 32,
    "batch_size": 256,
    "gae_lambda": 0.8,
    "gamma": 0.98,
    "n_epochs": 20,
    "ent_coef": 0.0,
}


def trainer(options: dict[str, Any], config: dict[str, Any], device: str, folder: str) -> Any:
    from multi_gpu_training import MultiGPUConfig
    from multi_gpu_training.recipes.ppo import DistributedCLSTMPPOTrainer, PPOOptions
    from multi_gpu_training.recipes.ppo.options import CONFIG_DEFAULTS

    defaults = {k: v for k, v in CONFIG_DEFAULTS.items() if k != "batch_size"}
    quiet = {"recipe": "ppo", "progress": "off", "tensorboard": False, "save_dir": folder}
    settings = {**defaults, **quiet, "device": device, "enable_fault_tolerance": False, **config}
    return DistributedCLSTMPPOTrainer(MultiGPUConfig(**settings), PPOOptions(**options))


# What it learns


def cartpole(args: argparse.Namespace) -> dict[str, Any]:
    steps = 3_000 if args.quick else 100_000
    rows = []
    for seed in range(1 if args.quick else args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            made = trainer(
                {**OURS, "total_steps": steps},
                {**CONFIG, "seed": seed, "training_mode": "single"},
                args.device,
                folder,
            )
            started = time.perf_counter()
            found = made.train()
            seconds = time.perf_counter() - started
        rows.append({"seed": seed, "seconds": seconds, **found.metrics})
        print(
            f"seed {seed}: {steps:,} steps in {seconds:.0f} s, evaluation "
            f"{found.metrics['eval_return']:.1f} +- {found.metrics['eval_return_std']:.1f}",
            flush=True,
        )
    return {"steps": steps, "seeds": rows}


# How fast it is


def rates(work: Callable[[], Any], steps: int) -> Rates:
    """Steps per second of the clock and of CPU time: the latter is steady on a busy machine."""
    started, used = time.perf_counter(), time.process_time()
    work()
    return steps / (time.perf_counter() - started), steps / (time.process_time() - used)


def time_ours(
    options: dict[str, Any], config: dict[str, Any], steps: int, device: str, folder: str
) -> Rates:
    """Environment steps per second, after a warm-up, with collecting, updating and reporting."""
    made = trainer(options, {**config, "training_mode": "single"}, device, folder)
    made.initialize()
    per = made.options.num_envs * made.options.steps

    def iterate() -> None:
        started = time.perf_counter()
        rollout, finished = made._collect()
        collected = time.perf_counter()
        metrics = made.update(rollout, made.options.clip_range)
        made._finish_iteration(metrics, finished, started, collected)

    iterate()
    count = max(1, steps // per)
    return rates(lambda: [iterate() for _ in range(count)], count * per)


def time_sb3(steps: int, device: str) -> Rates:
    import gymnasium
    import numpy as np
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    class Hide(gymnasium.ObservationWrapper):  # type: ignore[misc, type-arg]
        def __init__(self, env: Any) -> None:
            super().__init__(env)
            box = env.observation_space
            self.observation_space = gymnasium.spaces.Box(
                box.low[[0, 2]], box.high[[0, 2]], dtype=np.float32
            )

        def observation(self, observation: Any) -> Any:
            return observation[[0, 2]]

    games = DummyVecEnv([lambda: Hide(gymnasium.make("CartPole-v1")) for _ in range(8)])
    model = RecurrentPPO(
        "MlpLstmPolicy",
        games,
        learning_rate=lambda rest: 1e-3 * rest,
        clip_range=lambda rest: 0.2 * rest,
        seed=0,
        device=device,
        **SB3,
    )
    model.learn(256)
    return rates(lambda: model.learn(steps), steps)


def speed(args: argparse.Namespace) -> dict[str, Any]:
    rounds = 1 if args.quick else args.rounds
    steps = {"ours": 4096, "ours, 256 units": 1024, "sb3-contrib": 512}
    if args.quick:
        steps = dict.fromkeys(steps, 256)
    found: dict[str, list[Rates]] = {name: [] for name in steps}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            for name in list(steps)[turn % 3 :] + list(steps)[: turn % 3]:
                count = steps[name]
                if name == "ours":
                    rate = time_ours(OURS, CONFIG, count, args.device, folder)
                elif name == "sb3-contrib":
                    rate = time_sb3(count, args.device)
                else:
                    rate = time_ours(LARGE, CONFIG, count, args.device, folder)
                found[name].append(rate)
                text = f"{rate[0]:,.0f} steps/s, {rate[1]:,.0f} a CPU second"
                print(f"round {turn + 1}: {name} {text}", flush=True)
    table = {}
    print("\n| | steps/s | steps a CPU second | times sb3-contrib, by clock | by CPU time |")
    print("|---|---|---|---|---|")
    for name, rows in found.items():
        pairs = list(zip(rows, found["sb3-contrib"], strict=True))
        row = [statistics.median(rate[i] for rate in rows) for i in (0, 1)]
        row += [statistics.median(ours[i] / theirs[i] for ours, theirs in pairs) for i in (0, 1)]
        table[name] = row
        print(f"| {name} | {row[0]:,.0f} | {row[1]:,.0f} | {row[2]:.1f} | {row[3]:.1f} |")
    return {"rounds": found, "medians": table}


# Ranks


def ranks(args: argparse.Namespace) -> dict[str, Any]:
    """Through the command line, as a user starts it; the same number of environment steps.

    `eval_return` is what the trained agent reaches; `learned` the mean return of all episodes on
    the way, which tells early learning from late.
    """
    steps = 2_000 if args.quick else args.steps
    words = [
        f"{key}={','.join(map(str, value)) if isinstance(value, list) else value}"
        for key, value in {**OURS, **CONFIG, "total_steps": steps}.items()
    ]

    def train(seed: int, count: int) -> tuple[int, float, float]:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "multi_gpu_training", "train", "ppo"]
            command += ["--num-gpus", str(count), "--save-dir", folder, "--seed", str(seed)]
            command += ["device=cpu", "tensorboard=false", "enable_fault_tolerance=false"]
            subprocess.run([*command, *words], check=True, stdout=subprocess.DEVNULL)
            events = next(Path(folder).glob("ppo/*/events/rank-0.jsonl"))
            lines = [json.loads(line) for line in events.read_text().splitlines()]
        last = [line for line in lines if line["event"] == "evaluation"][-1]["eval_return"]
        rounds = [line["train"]["return"] for line in lines if line["event"] == "epoch"]
        # Before the first episode has ended there is none.
        learned = statistics.fmean(r for r in rounds if isinstance(r, float) and math.isfinite(r))
        print(f"seed {seed}, {count} ranks: {last:.1f}, {learned:.1f} on the way", flush=True)
        return count, last, learned

    seeds = range(1 if args.quick else args.seeds)
    found: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    with ThreadPoolExecutor(args.jobs) as pool:
        plans = [(seed, count) for seed in seeds for count in found]
        for count, *values in pool.map(train, *zip(*plans, strict=True)):
            found[count].append((values[0], values[1]))
    medians = {}
    print(f"\n{steps:,} steps, {len(seeds)} seeds, medians\n")
    print("| ranks | evaluation | mean return on the way |\n|---|---|---|")
    for count, rows in found.items():
        medians[count] = [statistics.median(row[i] for row in rows) for i in (0, 1)]
        print(f"| {count} | {medians[count][0]:.1f} | {medians[count][1]:.1f} |")
    return {"steps": steps, "eval_return_and_learned": found, "medians": medians}


# Trading


def trading(args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {"num_episodes": 5000}
    if args.quick:
        options = {
            "num_episodes": 16,
            "num_envs": 8,
            "assets": 4,
            "features": 16,
            "hidden": 32,
            "window": 5,
            "market_days": 600,
        }
    options |= {name: value for name, value in (("num_envs", args.envs),) if value}
    if args.data_dir:
        options |= {"data_dir": args.data_dir, "symbols": args.symbols}
    if args.device == "cuda":
        torch.cuda.init()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config = {"batch_size": 128, "training_mode": "single", "progress": "lines"}
        made = trainer(options, config, args.device, folder)
        made.initialize()
        ready = time.perf_counter()
        result = made.train()
    done = time.perf_counter()
    history = [entry["train"] for entry in result.history]
    facts = {
        "episodes": made.progress.episodes,
        "env_steps": made.progress.env_steps,
        "optimizer_steps": result.steps,
        "setup_s": ready - started,
        "train_and_test_s": done - ready,
        "collect_s": sum(entry["collect_s"] for entry in history),
        "update_s": sum(entry["update_s"] for entry in history),
        "steps_per_s": made.progress.env_steps / (done - ready),
        "returns": [entry["return"] for entry in history],
        "test": result.metrics,
    }
    if args.device == "cuda":
        facts["peak_bytes"] = torch.cuda.max_memory_allocated()
    print("\n| | |\n|---|---|")
    for name, value in facts.items():
        if isinstance(value, (int, float)):
            print(f"| {name} | {value:,.1f} |")
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["cartpole", "speed", "ranks", "trading"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, default=None, help="cartpole: 3, ranks: 5")
    parser.add_argument("--rounds", type=int, default=3, help="speed")
    parser.add_argument("--steps", type=int, default=100_000, help="ranks: environment steps")
    parser.add_argument("--jobs", type=int, default=1, help="ranks: trainings side by side")
    parser.add_argument("--envs", type=int, help="trading: copies of the environment")
    parser.add_argument("--data-dir", help="trading: prices")
    parser.add_argument("--symbols", help="trading: which of them")
    args = parser.parse_args()
    args.seeds = args.seeds or {"ranks": 5}.get(args.what, 3)
    if args.device == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    found = globals()[args.what](args)
    machine = platform.processor() or platform.machine()
    if args.device == "cuda":
        machine = torch.cuda.get_device_name()
    found |= {"machine": machine, "torch": torch.__version__, "load": os.getloadavg()[0]}
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
