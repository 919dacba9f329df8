"""A run goes on with another number of ranks: the same steps, and the same account of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from tiny import line, manager_for, points, sgd, squares

from multi_gpu_training import Callback

STEPS = 4  # an epoch of sixteen samples


class Stop(Exception):
    pass


class StopBefore(Callback):
    """Ends after a step was saved and before anything else."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, manager: Any, result: Any) -> None:
        step = result.step
        if step == self.step:
            manager.save_checkpoint()
            raise Stop


def history(folder: Path, stop: int | None, resume: str | None) -> Any:
    manager = manager_for(
        folder, run_name="it", epochs=2, global_batch_size=4, enable_fault_tolerance=True,
        resume=resume,
    )  # fmt: skip
    hooks = [] if stop is None else [StopBefore(stop)]
    try:
        result = manager.fit(line(), points(), loss_fn=squares, optimizer=sgd, callbacks=hooks)
    except Stop:
        return None
    return [epoch["train"] for epoch in result.history]


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2), (3, 2)], ids=str)
@pytest.mark.parametrize("stop", [STEPS - 1, STEPS], ids=["in the epoch", "at its end"])
def test_the_metrics_of_an_epoch_cover_what_ranks_did_that_are_gone(
    tmp_path: Path, ranks: tuple[int, int], stop: int
) -> None:
    expected = run_ranks(1, history, tmp_path / "whole", None, None)[0]
    run_ranks(ranks[0], history, tmp_path / "cut", stop, None)
    found = run_ranks(ranks[1], history, tmp_path / "cut", None, "auto")[0]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
