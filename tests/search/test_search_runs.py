"""Trials as real runs: values reach a script, ranks do not matter, kills do not either."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("optuna", reason="optuna is not installed (extra: search)")

from multi_gpu_training.search import search
from multi_gpu_training.search.study import SearchError

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "search.py"
SCRIPT = """
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

config = MultiGPUConfig(device="cpu", epochs=1, monitor=False, tensorboard=False, report=False)
manager = MultiGPUTrainingManager(config)
model, data = nn.Linear(2, 1), TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
if sys.argv[1:] == ["own"]:
    manager.fit(model, data, data, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
if sys.argv[1:] == ["hang"]:
    import time

    time.sleep(600)
manager.fit(model, data, data)
"""


def script(folder: Path) -> str:
    path = folder / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_script_that_does_not_read_a_parameter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SearchError, match="makes its own optimizer and does not read"):
        search(
            script(tmp_path),
            {"learning_rate": "1e-3..1e-1:log"},
            folder=tmp_path / "study",
            words=["own"],
            trials=3,
            device="cpu",
        )


@pytest.mark.engines
def test_a_trial_that_hangs_is_ended_and_a_metric_that_nobody_logs_is_named(tmp_path: Path) -> None:
    rate = {"learning_rate": "1e-3..1e-1:log"}
    with pytest.raises(SearchError, match="--hang-timeout"):
        search(
            script(tmp_path),
            rate,
            folder=tmp_path / "hangs",
            words=["hang"],
            trials=1,
            device="cpu",
            hang_timeout=20.0,
        )
    with pytest.raises(SearchError, match=r"does not log it; it logs .*val/loss"):
        search(
            script(tmp_path),
            rate,
            folder=tmp_path / "names",
            metric="val/f1",
            trials=2,
            device="cpu",
        )


@pytest.mark.engines
def test_python_repeats_the_best_trial_and_leaves_a_report_as_the_command_does(
    tmp_path: Path,
) -> None:
    found = search(
        script(tmp_path),
        {"learning_rate": "1e-3..1e-1:log"},
        folder=tmp_path / "study",
        trials=1,
        device="cpu",
        repeat_best=1,
        seeds=2,
    )
    (repeated,) = found.repeats
    assert repeated.number == 0 and len(repeated.values) == 2 and not repeated.failed
    assert "Repeated with other seeds" in (tmp_path / "study" / "report.html").read_text()


@pytest.mark.engines
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("what", [("ranks", "--trials", "8"), ("kills", "--kills", "8")])
def test_the_campaigns_of_the_benchmark_keep_their_promise(
    what: tuple[str, ...], tmp_path: Path
) -> None:
    words = [sys.executable, str(BENCHMARK), *what, "--folder", str(tmp_path)]
    done = subprocess.run(words, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
