"""Ranks from a notebook cell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny import line, manager_for, points, sgd

from multi_gpu_training import MultiGPUError, notebook_launch
from multi_gpu_training.monitoring.console import Console

# An interactive session as a notebook is one: functions live in a __main__ without a file.
SESSION = """
import os, sys, builtins
{before}
from multi_gpu_training import notebook_launch

factor = 3
class Answer:
    def __init__(self, value):
        self.value = value
def work(x):
    return Answer((x * factor, os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"]))
def fails():
    raise ValueError("my mistake")
{cells}
"""


def session(cells: str, before: str = "") -> subprocess.CompletedProcess[str]:
    code = SESSION.format(cells=cells, before=before)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False
    )


def test_functions_of_a_session_run_on_two_ranks_twice_and_after_an_exception() -> None:
    pytest.importorskip("cloudpickle")
    done = session(
        """
print(notebook_launch(work, 2, (7,)).value)
try:
    notebook_launch(fails, 2)
except Exception as error:
    print(type(error).__name__, "my mistake" in str(error), len(sys.path) > 0)
print(notebook_launch(lambda: factor, 1), os.environ.get("OMP_NUM_THREADS"))
""",
        'os.environ.pop("OMP_NUM_THREADS", None)',
    )
    first, second, third = done.stdout.splitlines()
    assert first.startswith("(21, '2', ")
    assert second == "RankFailure True True"
    assert third == "3 None"


def test_without_cloudpickle_a_function_of_a_cell_is_refused_with_the_remedy() -> None:
    done = session(
        """
try:
    notebook_launch(work, 2, (7,))
except Exception as error:
    print(error)
import time
print(notebook_launch(os.getppid, 1) == os.getpid())
""",
        'sys.modules["cloudpickle"] = None',
    )
    said, importable = done.stdout.splitlines()
    assert re.match("work is defined in a notebook cell.*pip install cloudpickle", said)
    assert importable == "True"


def test_what_cannot_be_sent_is_named() -> None:
    pytest.importorskip("cloudpickle")
    lock = threading.Lock()

    def holds_a_lock() -> None:
        assert lock

    with pytest.raises(MultiGPUError, match="holds_a_lock uses something that cannot be sent"):
        notebook_launch(holds_a_lock, 2)
    import torch

    here = torch.zeros(2, device="meta")  # as on a GPU: not in host memory
    with pytest.raises(MultiGPUError, match=r"a tensor of shape \(2,\) on meta.*\.cpu\(\)"):
        notebook_launch(lambda: here, 2)


def test_a_rank_under_a_kernel_shows_lines_not_a_bar(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A kernel sets FORCE_COLOR for its children, whose output is a pipe."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert Console().style == "lines"
    manager = manager_for(tmp_path, progress="auto", epochs=2)
    manager.fit(line(), points(), optimizer=sgd)
    shown = capfd.readouterr().out
    assert "Epoch 2/2 - train loss" in shown
    assert "\r" not in shown


# A real kernel


class Kernel:
    """A Jupyter kernel and what its cells show."""

    def __init__(self) -> None:
        from jupyter_client.manager import KernelManager

        self.manager = KernelManager(kernel_name="python3")
        # A kernel that finds itself in a test does not show what its children print.
        kept = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
        self.manager.start_kernel(env=kept)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.shown: list[dict[str, Any]] = []

    def run(self, code: str, interrupt_on: str | None = None) -> tuple[str, str]:
        """Run a cell; returns what it printed, and the name of its error. Interrupts it when it
        prints `interrupt_on`."""
        printed: list[str] = []
        error: list[str] = []
        self.shown = []

        def see(message: dict[str, Any]) -> None:
            kind, content = message["header"]["msg_type"], message["content"]
            if kind == "stream":
                printed.append(content["text"])
                if interrupt_on is not None and interrupt_on in content["text"]:
                    self.manager.interrupt_kernel()
            elif kind == "error":
                error.append(f"{content['ename']}: {content['evalue']}")
            elif kind == "display_data":
                self.shown.append(content["data"])

        self.client.execute_interactive(code, output_hook=see, timeout=200)
        return "".join(printed), "".join(error)

    @property
    def children(self) -> list[psutil.Process]:
        found = psutil.Process(self.manager.provisioner.pid).children(recursive=True)
        return [child for child in found if "resource_tracker" not in " ".join(child.cmdline())]


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    pytest.importorskip("ipykernel")
    pytest.importorskip("cloudpickle")
    started = Kernel()
    yield started
    started.client.stop_channels()
    started.manager.shutdown_kernel(now=True)


TRAINING = """
import os, time, torch
from torch.utils.data import TensorDataset
from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager, notebook_launch

def config(**settings):
    return MultiGPUConfig(device="cpu", save_dir=FOLDER, epochs=2, tensorboard=False, **settings)

def train(samples):
    x = torch.randn(samples, 4)
    manager = MultiGPUTrainingManager(config())
    result = manager.fit(torch.nn.Linear(4, 1), TensorDataset(x, x.sum(1, keepdim=True)))
    return result.steps, manager.config.world_size, os.environ["WORLD_SIZE"]

def fails():
    raise ValueError("my mistake")

def waits():
    print("rank", os.environ["RANK"], "waits")
    time.sleep(100)
"""


@pytest.mark.engines
@pytest.mark.timeout(600)  # six launches, each of which imports torch on two ranks
def test_two_ranks_from_a_real_notebook_twice_after_an_exception_and_after_ctrl_c(
    kernel: Kernel, tmp_path: Path
) -> None:
    kernel.run(f"FOLDER = {str(tmp_path)!r}" + TRAINING)
    for _ in range(2):
        shown, error = kernel.run("print(notebook_launch(train, 2, (64,)))")
        assert error == ""
        assert "Epoch 2/2 - train loss" in shown
        assert "\r" not in shown
        assert "(2, None, '2')" in shown, shown
    shown, error = kernel.run("notebook_launch(fails, 2)")
    assert error.startswith("RankFailure")
    assert "my mistake" in error
    assert kernel.children == []
    shown, error = kernel.run("notebook_launch(waits, 2)", interrupt_on="rank 0 waits")
    assert error.startswith("KeyboardInterrupt")
    assert "Traceback" not in shown
    assert kernel.children == []
    shown, error = kernel.run("print(notebook_launch(lambda: torch.zeros(2) + 1, 2))")
    assert (shown, error) == ("tensor([1., 1.])\n", "")
    assert kernel.children == []


@pytest.mark.engines
def test_a_kernel_that_is_killed_leaves_no_rank(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run(f"FOLDER = {str(tmp_path)!r}" + TRAINING)
    kernel.client.execute("notebook_launch(waits, 2)")
    deadline = time.monotonic() + 60
    while len(kernel.children) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    ranks = kernel.children
    assert len(ranks) >= 2
    psutil.Process(kernel.manager.provisioner.pid).kill()
    _, alive = psutil.wait_procs(ranks, timeout=60)  # while they start, too
    assert alive == []


@pytest.mark.engines
def test_a_bar_in_the_notebook_itself_is_a_widget(kernel: Kernel, tmp_path: Path) -> None:
    pytest.importorskip("ipywidgets")
    kernel.run(f"FOLDER = {str(tmp_path)!r}" + TRAINING)
    fit = """
x = torch.randn(64, 4)
manager = MultiGPUTrainingManager(config(training_mode="single", progress=PROGRESS))
manager.fit(torch.nn.Linear(4, 1), TensorDataset(x, x.sum(1, keepdim=True)))
None"""
    shown, error = kernel.run(fit.replace("PROGRESS", '"auto"'))
    assert error == ""
    assert any("application/vnd.jupyter.widget-view+json" in data for data in kernel.shown)
    assert "\r" not in shown
    shown, error = kernel.run(fit.replace("PROGRESS", '"lines"'))
    assert error == ""
    assert "Epoch 2/2 - train loss" in shown
    assert kernel.shown == []
