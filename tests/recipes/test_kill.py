"""Every recipe, killed with SIGKILL at some instant and resumed, ends with the undisturbed bits.

Each in a process forked from a warm one, with augmentation, dropout and loader workers where it
has them; tests/faults kill launchers and their ranks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from faults.kit import PATIENCE_S, Forked
from ranks import run_ranks
from tiny import fork_workers

# Shortest runs that pass several checkpoints, some of them in the midst of an epoch.
WORDS: dict[str, str] = {
    "image": "--num-gpus 1 --epochs 2 --batch-size 30 --checkpoint-frequency 7",
    "video": "--num-gpus 1 --epochs 2 --batch-size 8 --videos 10 --frame-size 16 --width 2 "
    "--num-workers 2 --memory-gib 0 --checkpoint-frequency 4",
    "speech": "--num-gpus 1 --max-steps 14 --batch-size 2 --checkpoint-frequency 3",
    "transformer": "--num-gpus 1 --max-steps 60 --batch-size 2 --width 16 --layers 1 --heads 2 "
    "--dropout 0.1 --sequence-length 16 --checkpoint-frequency 8",
    "ppo": "--num-gpus 1 --num-envs 6 --rollout-steps 15 --num-episodes 60 --assets 3 "
    "--market-days 200 --episode-days 20 --window 3 --features 8 --hidden 8 --batch-size 3 "
    "--checkpoint-frequency 9",
}
# A fixed interval of the log: where it follows the clock, sums of losses are rounded elsewhere.
ALIKE = "--device cpu --log-every 5 --tensorboard false --progress off --keep-last 2"
CLOCKS = {"steps_per_s", "collect_s", "update_s"}


def command_line(words: list[str]) -> None:
    """`mgt WORDS`, with an exit code for every end but a good one."""
    from multi_gpu_training.cli import main

    fork_workers()
    sys.argv = ["mgt", *words]
    sys.orig_argv = [sys.executable, *sys.argv]
    try:
        main()
    except SystemExit as stop:
        if stop.code:
            raise


def checkpoints(folder: Path, recipe: str) -> list[Path]:
    found = (folder / "runs" / recipe / "it" / "checkpoints").glob("step-*/manifest.json")
    return sorted(path.parent for path in found)


def kept(folder: Path, recipe: str) -> tuple[dict[str, bytes], Any]:
    """The bytes of the last weights and optimizer state, and the whole history."""
    last = checkpoints(folder, recipe)[-1]
    history = json.loads((last / "state.json").read_text())["state"]["replicated"]["progress"]
    plain = [
        {part: {k: v for k, v in epoch[part].items() if k not in CLOCKS} for part in epoch}
        for epoch in history["history"]
    ]
    names = ("model.safetensors", "optimizer.safetensors")
    return {name: (last / name).read_bytes() for name in names}, [last.name, plain]


def cut_short(words: list[str], folder: Path, recipe: str) -> Path:
    """Where a run was killed after a checkpoint and before its end."""
    for trial in range(5):
        where = folder / f"cut-{trial}"
        run = Forked(command_line, words, cwd=where)
        deadline = time.monotonic() + PATIENCE_S
        while not checkpoints(where, recipe):
            assert not run.ended and time.monotonic() < deadline, run
            time.sleep(0.002)
        os.killpg(run.pid, signal.SIGKILL)
        if run.end_of_run() == 128 + signal.SIGKILL:
            return where
    raise AssertionError("was done before it could be killed, five times")


@pytest.mark.timeout(4 * PATIENCE_S)
@pytest.mark.parametrize("recipe", list(WORDS))
def test_a_killed_recipe_goes_on_to_the_bit(tmp_path: Path, recipe: str) -> None:
    needed = {"ppo": "gymnasium", "transformer": "transformers"}.get(recipe, "torch")
    if find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    words = ["train", recipe, *WORDS[recipe].split(), *ALIKE.split(), "--run-name", "it"]
    cut = cut_short(words, tmp_path, recipe)
    saved = [path.name for path in checkpoints(cut, recipe)]
    resumed = Forked(command_line, [*words, "--resume", "auto"], cwd=cut)
    whole = tmp_path / "whole"
    run_ranks(1, command_line, [*words, "--save-dir", str(whole / "runs")])
    assert resumed.end_of_run() == 0, resumed
    weights, history = kept(whole, recipe)
    ours, seen = kept(cut, recipe)
    assert history[0] not in saved, "killed too late to show anything"
    assert seen == history
    assert [name for name in weights if ours[name] != weights[name]] == []
