"""A run on two nodes, each a network namespace with an address and a disk of its own.

Further cases, with times: benchmarks/nodes.py.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from node_run import TRAIN, Run
from nodes import Network, why_not
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
def test_a_run_outlives_either_of_its_nodes_and_takes_them_back(tmp_path: Path) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with Network() as network:
        run = Run(network, epochs=STEPS // 10, pause=0.3)
        first, second = network.nodes
        run.start(first)
        run.start(second)
        run.reach(7, world=2)
        second.kill()
        run.reach(run.newest() + 1, world=1)
        run.start(second)  # without the checkpoints that were written since
        run.reach(run.newest() + 1, world=2)
        first.kill()  # the one that leads
        run.hurry()
        assert run.end([second]) == [0], network.said()
        assert run.newest() == STEPS
        assert "node 0 (10.77.0.1) ended; node 1 (10.77.0.2) leads" in second.said
        assert "was sent from rank 0's disk" in (first.disk / EVENTS).read_text()
        # A checkpoint every five steps; one may not have been complete.
        assert run.repeated() <= 10
        orders, weights = run.orders(), run.weights()
    run_ranks(1, undisturbed, tmp_path)
    alone = [json.loads(line) for line in (tmp_path / "steps.txt").read_text().splitlines()]
    assert orders == {line["step"]: {tuple(sorted(line["samples"]))} for line in alone}
    # Another number of ranks adds up in another order.
    assert difference(json.loads((tmp_path / "weights.json").read_text()), weights) < 1e-5
