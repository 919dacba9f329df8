"""Trials of a search on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import SOURCE, quick_nodes, ray_nodes

pytest.importorskip("optuna", reason="optuna is not installed (extra: search)")

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.search import search
from multi_gpu_training.search.settings import read_settings

SCRIPT = """
import sys
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.utils.data import TensorDataset

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

node = next(one.pid for one in psutil.Process().parents() if one.name() == "raylet")
config = MultiGPUConfig(
    device="cpu", epochs=2, monitor=False, tensorboard=False, report=False, batch_size=4
)
manager = MultiGPUTrainingManager(config)
torch.manual_seed(0)
x = torch.randn(16, 2)
data = TensorDataset(x, x.sum(1, keepdim=True))
manager.fit(nn.Linear(2, 1), data, data, loss_fn=nn.MSELoss())
Path(sys.argv[1], manager.config.run_name).write_text(str(node))
"""


def test_engines_that_a_search_cannot_use_are_refused() -> None:
    common = {"target": "image", "params": {"learning_rate": "1e-4..1e-1:log"}}
    for given, words in (
        ({"engine": "slurm"}, "would outlive a search"),
        ({"engine": "ray"}, "--parallel"),
        ({"engine": "spark"}, "local or ray"),
        ({"ray_address": "auto"}, "belongs to --engine ray"),
        ({"engine": "ray", "parallel": 2, "target": ""}, "a function is none"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_settings({**common, **given}).check()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two raylets with room for one rank each."""
    pytest.importorskip("ray")
    quick_nodes()
    with ray_nodes(2, 1) as found:
        yield found


@pytest.mark.engines
@pytest.mark.timeout(1800)
def test_trials_are_spread_over_two_ray_nodes(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", SOURCE)
    (tmp_path / "train.py").write_text(SCRIPT)
    nodes = tmp_path / "nodes"
    nodes.mkdir()
    found = search(
        str(tmp_path / "train.py"), {"learning_rate": "1e-3..1e-1:log"}, trials=4, parallel=2,
        folder=tmp_path / "study", words=[str(nodes)], device="cpu", engine="ray",
        ray_address=cluster.address,
    )  # fmt: skip
    assert [one.state for one in found.trials] == ["complete"] * 4
    places = [path.read_text() for path in sorted(nodes.iterdir())]
    assert len(places) == 4 and len(set(places)) == 2
