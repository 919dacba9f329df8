"""Output that goes away must never stop a training: no reader, no space, no stdout at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from processes import quickly

TRAIN = """
from pathlib import Path
import sys
sys.path.insert(0, {tests!r})
from tiny import line, points, quiet, sgd, squares
from multi_gpu_training import MultiGPUTrainingManager

config = quiet(Path("."), epochs=4, progress={progress!r}, run_name="run", log_every=1,
               enable_fault_tolerance=True, world_size={ranks})
manager = MultiGPUTrainingManager(config)
for number in range(200):
    print("a line of the user's own", number, flush=True)
manager.fit(line, points(), loss_fn=squares, optimizer=sgd)
print("the end of the script", flush=True)
Path("done").touch()
"""


def run(folder: Path, redirection: str, progress: str = "lines", ranks: int = 1) -> int:
    script = folder / "train.py"
    tests = str(Path(__file__).parent)
    script.write_text(TRAIN.format(tests=tests, progress=progress, ranks=ranks))
    command = f"set -o pipefail; {sys.executable} train.py {redirection}"
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=quickly(), timeout=180
    ).returncode


def finished(folder: Path) -> bool:
    saved = folder / "custom" / "run" / "checkpoints" / "best"
    return (folder / "done").exists() and saved.exists()


@pytest.mark.parametrize(
    ("redirection", "progress"),
    [
        ("| head -n 2", "bar"),
        ("2>&1 | head -n 2", "lines"),
        (">&- 2>&-", "lines"),
        ("> /dev/full 2>&1", "bar"),
    ],
)
def test_training_ends_well_without_output(tmp_path: Path, redirection: str, progress: str) -> None:
    assert run(tmp_path, redirection, progress) == 0
    assert finished(tmp_path)


def test_several_ranks_end_well_without_a_reader(tmp_path: Path) -> None:
    assert run(tmp_path, "2>&1 | head -n 2", ranks=2) == 0
    assert finished(tmp_path)


def test_the_command_line_ends_well_without_a_reader(tmp_path: Path) -> None:
    train = "-m multi_gpu_training train image --epochs 1 --num-gpus 1 --save-dir . --run-name run"
    command = f"set -o pipefail; {sys.executable} {train} | head -n 1"
    ended = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=quickly(), timeout=180)
    assert ended.returncode == 0
    assert (tmp_path / "image" / "run" / "checkpoints" / "best").exists()


def test_clean_keeps_the_runs() -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    clean = makefile[makefile.index("\nclean:") :]
    assert "runs" not in clean
