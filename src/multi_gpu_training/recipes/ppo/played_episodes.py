"""One episode of a trained policy, step by step, and its pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.recipes.ppo.gymnasium_environments import GymnasiumEnvironments
from multi_gpu_training.recipes.ppo.options import PPOOptions
from multi_gpu_training.recipes.ppo.policy import CLSTMPolicy
from multi_gpu_training.recipes.ppo.rollout import Collector
from multi_gpu_training.recipes.user_data import library

FRAME_MS, MOST_FRAMES = 33, 2000


def play_episode(
    policy: CLSTMPolicy, options: PPOOptions, number: int, seed: int, record: str | None
) -> dict[str, Any]:
    """Return and length of episode `number`; it depends on the seed and the number alone."""
    device = policy.value_head.weight.device
    environments = GymnasiumEnvironments(
        options.env, range(number, number + 1), seed, options.hide, device, render=bool(record)
    )
    frames: list[Any] = []
    found: dict[str, Any]
    try:
        collector = Collector(environments, policy, options.normalises)
        for step in range(options.eval_steps):
            if record and len(frames) < MOST_FRAMES:
                frames.append(picture(environments, options.env))
            _, finished = collector.collect(1, None)
            if finished.ended:
                found = {"return": float(finished.returns[0][0]), "steps": step + 1, "ended": True}
                break
        else:
            found = {
                "return": float(collector.returns[0]),
                "steps": options.eval_steps,
                "ended": False,
            }
    finally:
        environments.close()
    found = {"episode": number, **found}
    if record:
        found["recording"] = str(write_gif(frames, Path(record), options.env, number))
    return found


def picture(environments: GymnasiumEnvironments, name: str) -> Any:
    """The environment as it is now; ConfigError where it lacks what it renders with."""
    from gymnasium.error import DependencyNotInstalled

    try:
        return environments.picture()
    except DependencyNotInstalled as error:
        raise ConfigError(f"--record: env={name} cannot be rendered: {error}") from None


def write_gif(frames: list[Any], folder: Path, name: str, number: int) -> Path:
    """Frames as a GIF; ConfigError where the environment gave none."""
    pictures = [frame for frame in frames if isinstance(frame, np.ndarray)]
    if not pictures:
        raise ConfigError(
            f"env={name} renders no pictures (render_mode rgb_array); drop --record, or install "
            "what it renders with, as in pip install 'gymnasium[classic-control]'"
        )
    image = library("PIL.Image", "writing a GIF needs Pillow", extra="image")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name.rpartition(':')[2].replace('/', '-')}-{number}.gif"
    first, *rest = [image.fromarray(frame.astype(np.uint8)) for frame in pictures]
    first.save(path, save_all=True, append_images=rest, duration=FRAME_MS, loop=0)
    return path
