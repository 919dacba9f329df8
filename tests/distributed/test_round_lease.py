"""Ranks train and publish only as long as their launcher lets them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import line, manager_for, points, squares

from multi_gpu_training import Callback
from multi_gpu_training.distributed import round_lease
from multi_gpu_training.distributed.round_lease import RoundLease, now

LONGEST_S = 60.0


@pytest.fixture
def lease(tmp_path: Path) -> Iterator[RoundLease]:
    found = RoundLease(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(round_lease, "_deadline", None)
        round_lease.keep(tmp_path)
        yield found


def until(happened: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_rank_whose_lease_is_over_begins_no_step_and_publishes_no_checkpoint(
    lease: RoundLease, tmp_path: Path
) -> None:
    class Steps(Callback):
        done = 0

        def on_step_end(self, manager: Any, result: Any) -> None:
            self.done = result.step
            if result.step == 3:  # the machine sleeps here, and wakes up after the deadline
                lease.extend(now() - 1.0)

    steps = Steps()
    settings = {"enable_fault_tolerance": True, "checkpoint_frequency": 3, "batch_size": 4}
    manager = manager_for(tmp_path, run_name="it", **settings)
    published = tmp_path / "custom" / "it" / "checkpoints" / "step-00000003"

    def fit() -> None:
        manager.fit(line(), points(16), loss_fn=squares, callbacks=[steps])

    thread = threading.Thread(target=fit)
    lease.extend(now() + LONGEST_S)
    thread.start()
    until(lambda: steps.done == 3)
    time.sleep(0.5)
    assert steps.done == 3 and not published.exists()
    lease.extend(now() + LONGEST_S)
    thread.join(LONGEST_S)
    assert steps.done == 4 and published.exists()


def test_a_rank_without_such_a_launcher_is_bound_by_nothing(tmp_path: Path) -> None:
    round_lease.keep(tmp_path)
    assert round_lease.holds() and not round_lease.bound()
