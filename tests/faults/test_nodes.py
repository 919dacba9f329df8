"""A run on two nodes, each a network namespace with an address and a disk of its own.

Further cases, with times: benchmarks/nodes.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from node_run import TRAIN, Run
from nodes import Network, why_not
from processes import Program

STEPS = 300
LONGEST_S = 200


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """The same run on one rank, with the global batch of two, undisturbed."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "train.py").write_text(TRAIN)
    settings = {"epochs": STEPS // 10, "pause": 0.0, "global_batch_size": 8, "world_size": 1}
    with Program("train.py", json.dumps(settings), cwd=folder) as program:
        program.folder = folder  # type: ignore[attr-defined]
        yield program


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    pairs = [(torch.tensor(one[name]), torch.tensor(other[name])) for name in one]
    return max(float((a - b).norm() / a.norm()) for a, b in pairs)


@pytest.mark.timeout(400)
def test_a_run_outlives_either_of_its_nodes_and_takes_them_back(reference: Program) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with Network() as network:
        run = Run(network, epochs=STEPS // 10, pause=0.06)
        first, second = network.nodes
        run.start(first)
        run.start(second)
        run.reach(7, world=2)
        second.kill()
        run.reach(run.newest() + 1, world=1)
        run.start(second)  # without the checkpoints that were written since
        run.reach(run.newest() + 6, world=2)
        first.kill()  # the one that leads
        assert run.end([second]) == [0], network.said()
        assert run.newest() == STEPS
        assert "node 0 (10.77.0.1) ended; node 1 (10.77.0.2) leads" in second.said
        assert "was sent from rank 0's disk" in first.said
        assert reference.end_of_run(LONGEST_S) == 0
        folder: Path = reference.folder  # type: ignore[attr-defined]
        alone = [json.loads(line) for line in (folder / "steps.txt").read_text().splitlines()]
        expected = {line["step"]: {tuple(sorted(line["samples"]))} for line in alone}
        assert run.orders() == expected
        assert difference(json.loads((folder / "weights.json").read_text()), run.weights()) < 1e-5
        # A checkpoint every five steps; one may not have been complete.
        assert run.repeated() <= 10
