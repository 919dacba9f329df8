"""A run on two nodes, each a network namespace with an address and a disk of its own.

Further cases, with times: benchmarks/nodes.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from node_run import TRAIN, Run
from nodes import Network, firewall, why_not
from ranks import run_ranks

STEPS = 300
EVENTS = "runs/custom/it/events/rank-0.jsonl"


def undisturbed(folder: Path) -> None:
    """The same run on one rank, with the global batch of two."""
    settings = {"epochs": STEPS // 10, "pause": 0.0, "global_batch_size": 8, "world_size": 1}
    before, words = Path.cwd(), sys.argv
    os.chdir(folder)
    sys.argv = ["train.py", json.dumps(settings)]
    try:
        exec(compile(TRAIN, "train.py", "exec"), {"__name__": "__main__"})
    finally:
        os.chdir(before)
        sys.argv = words


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    pairs = [(torch.tensor(one[name]), torch.tensor(other[name])) for name in one]
    return max(float((a - b).norm() / a.norm()) for a, b in pairs)


@pytest.mark.timeout(400)
def test_two_nodes_wait_for_each_other_and_one_goes_on_when_the_other_leaves(
    tmp_path: Path,
) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with Network() as network:
        run = Run(network, epochs=STEPS // 10, pause=0.3)
        first, second = network.nodes
        run.start(first)
        run.start(second)
        run.reach(7, world=2)
        first.kill()  # the one that leads; the other cannot know that it is not cut off
        far = run.newest()
        shutil.rmtree(first.disk / "runs")
        run.start(first)
        run.reach(far + 1, world=2)
        assert not [line for line in run.lines() if line["world"] == 1], "one of two trained alone"
        assert "node 0 (10.77.0.1) is gone; node 1 (10.77.0.2) leads" in second.said
        os.kill(second.launcher, signal.SIGTERM)  # leads now, and hands over
        run.reach(run.newest() + 1, world=1)
        run.hurry()
        assert run.end() == [0, 143], network.said()
        assert run.newest() == STEPS
        assert "node 1 (10.77.0.2) has left; node 0 (10.77.0.1) leads" in first.said
        assert "was sent from rank 0's disk" in (second.disk / EVENTS).read_text()
        # A checkpoint every five steps; one may not have been complete.
        assert run.repeated() <= 10
        orders, weights = run.orders(), run.weights()
    run_ranks(1, undisturbed, tmp_path)
    alone = [json.loads(line) for line in (tmp_path / "steps.txt").read_text().splitlines()]
    assert orders == {line["step"]: {tuple(sorted(line["samples"]))} for line in alone}
    # Another number of ranks adds up in another order.
    assert difference(json.loads((tmp_path / "weights.json").read_text()), weights) < 1e-5


@pytest.mark.engines
@pytest.mark.timeout(900)
def test_random_cuts_between_three_nodes_never_let_two_parts_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reason = why_not() or (None if firewall() else "nft is not installed")
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import partitions

    reference = partitions.undisturbed(14, 12)
    for seed in (1, 3):
        row = partitions.perform(seed, 14, 0.3, shared=False, witness=None)
        assert row["ok"] and not row["overlaps"], row
        if row["trained_to_the_end"]:
            partitions.compare(row, reference)
            assert row["same"], row
