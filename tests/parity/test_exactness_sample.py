"""A few of the trainings of benchmarks/exactness.py, which compares all of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from ranks import run_ranks

FOLDER = str(Path(__file__).parents[2] / "benchmarks")

SAMPLE = [
    "experts without work, accumulation",
    "gradient penalty through BatchNorm, sync_bn",
    "a loss that is a tuple only where something is masked",
    "own batch sampler of varying sizes",
    "SequentialLR made before fit, lr_scaling=linear",
    "own loop: break after two steps of every epoch",
    "GAN with two managers",
]


def load() -> tuple[Any, dict[str, Any]]:
    """The script, without its folder on the path of what runs after: it has a faults.py, too."""
    sys.path.insert(0, FOLDER)
    try:
        import exactness

        return exactness, exactness.load_cases()
    finally:
        sys.path[:] = [path for path in sys.path if path != FOLDER]


def answers(names: list[str], folder: Path, by_hand: bool, rank_count: int) -> dict[str, Any]:
    """What this rank ends with in each case."""
    exactness, cases = load()
    rank = int(os.environ.get("RANK", "0")) if rank_count > 1 else 0
    world = exactness.HAND if by_hand else rank_count
    return {
        name: exactness.answer(cases[name], "float64", folder / str(i), rank, world, False)
        for i, name in enumerate(names)
    }


def test_plain_loops_and_one_to_four_ranks_end_with_the_same_weights(tmp_path: Path) -> None:
    exactness, cases = load()
    plain = run_ranks(1, answers, SAMPLE, tmp_path / "plain", True, 1)[0]
    for world in (1, 2, 3, 4):
        ranks = run_ranks(world, answers, SAMPLE, tmp_path / str(world), False, world)
        for name in SAMPLE:
            found = [rank[name] for rank in ranks]
            cell, note, well = exactness.judge(cases[name], "float64", plain[name], found)
            assert well, f"{name}, {world} ranks: {cell} {note}"


def test_a_difference_a_refusal_and_a_hang_are_told_apart() -> None:
    import numpy as np

    exactness, cases = load()
    case = next(iter(cases.values()))
    plain = exactness.Answer({"w": np.ones(3)}, {"loss": 1.0})
    near = exactness.Answer({"w": np.ones(3) * (1 + 1e-14)}, {"loss": 1.0})
    far = exactness.Answer({"w": np.ones(3)}, {"loss": 1.01})
    nan = exactness.Answer({"w": np.full(3, np.nan)}, {"loss": 1.0})
    refused = exactness.Answer(kind="refused", text="say no")
    hang = exactness.Answer(kind="hang")
    judged = {
        "near": exactness.judge(case, "float64", plain, [near, near]),
        "far": exactness.judge(case, "float64", plain, [near, far]),
        "nan": exactness.judge(case, "float64", plain, [nan]),
        "refused": exactness.judge(case, "float64", plain, [refused, refused]),
        "hang": exactness.judge(case, "float64", plain, [near, hang]),
    }
    assert [name for name, (_, _, well) in judged.items() if well] == ["near"]
    assert judged["far"][1] == "1.0e-02 in loss, not on rank 0"
    assert judged["refused"][0] == "refused" and "say no" in judged["refused"][1]
    assert judged["hang"][0] == "hang"
