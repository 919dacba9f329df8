"""A federation on Flower's simulation engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs Flower, in an environment of its own")
pytest.importorskip("ray", reason="Flower's simulation engine needs Ray")


from multi_gpu_training.federated.flower_server import ROUNDS
from multi_gpu_training.safe_files import read_json

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
SCRIPT = Path(__file__).with_name("train_small_or_die.py")


def test_a_killed_client_is_left_out_in_one_line(tmp_path: Path) -> None:
    """In a process of its own: Ray must not stay in this one."""
    command = [sys.executable, "-m", "multi_gpu_training", "federated", "simulate", str(SCRIPT)]
    command += ["0.9", "10", "--clients", "3", "--rounds", "1", "--client-processes"]
    command += ["--device", "cpu", "--save-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    entry = read_json(tmp_path / ROUNDS, dict)
    assert entry["left_out"] == {"client 1": "training ended with signal 9"}
    assert sorted(entry["counted"]) == ["client 0", "client 2"]
    assert "left out client 1: training ended with signal 9" in done.stdout
    assert "Traceback" not in said and "ray::" not in said
