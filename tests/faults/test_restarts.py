"""Ranks that are killed from outside, or fail by themselves: the run goes on, or says why not.

Real processes with the default restart settings.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import Program
from ranks import run_ranks

STEPS = 30
LONGEST_S = 150
BUSY = 4  # how many times longer than promised an end may take: other tests run beside these
SLOWEST_RECOVERY_S = 60  # on a busy machine; benchmarks/recovery.py measures it on a quiet one

TRAIN = """
import json, os, sys, time
from pathlib import Path

settings = json.loads(sys.argv[1])
what, at, pause = (settings.pop(key, None) for key in ("what", "at", "pause"))
with open("attempts.txt", "a") as file:
    file.write(os.environ.get("RANK", "launcher") + "\\n")
if what == "early" and "RANK" in os.environ:
    raise ValueError("a mistake before the first step")

import torch
from torch import nn
from torch.utils.data import TensorDataset

from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager
from multi_gpu_training.errors import DataError


class Steps(Callback):
    def on_step_end(self, manager, result):
        step = result.step
        identity = manager.placement.identity
        with open(f"steps-{identity.rank}.txt", "a") as file:
            file.write(f"{time.time()} {identity.attempt} {step}\\n")
        time.sleep(pause or 0)
        if identity.rank == 1 and step == at:
            if what == "memory":
                if identity.attempt == 0:
                    raise MemoryError("no memory left for now")
                return
            if what == "data":
                raise DataError("sample 7 has no label; give it one")
            raise ValueError("a mistake of the user")


config = MultiGPUConfig(device="cpu", batch_size=4, progress="off", tensorboard=False,
                        save_dir="runs", run_name="it", checkpoint_frequency=5,
                        world_size=2, **settings)
manager = MultiGPUTrainingManager(config)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
x = torch.randn(80, 4, generator=torch.Generator().manual_seed(7))
manager.fit(model, TensorDataset(x, x.sum(1, keepdim=True)), callbacks=[Steps()],
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
bits = [p.detach().flatten().view(torch.int32).tolist() for p in model.parameters()]
Path(f"weights-{manager.placement.identity.rank}.json").write_text(json.dumps(bits))
"""


class Run:
    """`python train.py` with two ranks, in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        launcher: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "train.py").write_text(TRAIN)
        # Every epoch is ten steps.
        command = [*launcher, "train.py", json.dumps({"epochs": STEPS // 10, **settings})]
        self.program = Program(*command, cwd=folder, env=env)

    def steps(self, rank: int = 0) -> list[tuple[float, int, int]]:
        """When, in which attempt, which step: each step that was made."""
        file = self.folder / f"steps-{rank}.txt"
        lines = file.read_text().splitlines() if file.exists() else []
        rows = [line.split() for line in lines if line.count(" ") == 2]
        return [(float(when), int(attempt), int(step)) for when, attempt, step in rows]

    def reach(self, step: int, attempt: int = 0) -> Run:
        self.program.when(
            lambda: any(row[1] >= attempt and row[2] >= step for row in self.steps()), LONGEST_S
        )
        return self

    def ranks(self) -> dict[int, psutil.Process]:
        direct = psutil.Process(self.program.pid).children()
        return {int(p.environ()["RANK"]): p for p in direct if "RANK" in p.environ()}

    def kill(self, rank: int) -> float:
        """`kill -9` from outside; when."""
        os.kill(self.ranks()[rank].pid, signal.SIGKILL)
        return time.time()

    @property
    def weights(self) -> list[Any]:
        return [json.loads((self.folder / f"weights-{r}.json").read_text()) for r in (0, 1)]

    @property
    def attempts(self) -> int:
        # A rank may be ended before it has written its line.
        lines = (self.folder / "attempts.txt").read_text().split()
        return max(lines.count("0"), lines.count("1"))


STARTS: dict[str, dict[str, Any]] = {
    "killed": {"pause": 0.1},
    "thrice": {"at": 12},
    "bad input": {"at": 12, "what": "data"},
    "early": {"what": "early"},
    "first step": {"at": 1},
    "memory in the first step": {"at": 1, "what": "memory"},
    "launcher": {
        "pause": 0.1,
        "launcher": ("-m", "multi_gpu_training", "run", "--num-gpus", "2"),
    },
    "torchrun": {
        "pause": 0.1,
        "launcher": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    },
}


def free_port() -> str:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Run]]:
    """Runs by name, each started once, when first asked for."""
    folder = tmp_path_factory.mktemp("restarts")
    started: dict[str, Run] = {}

    def get(name: str) -> Run:
        if name not in started:
            env = {"MASTER_PORT": free_port()} if name == "launcher" else {}
            started[name] = Run(folder / name.replace(" ", "-"), env=env, **STARTS[name])
        return started[name]

    try:
        yield get
    finally:
        for run in started.values():
            run.program.close()


def undisturbed(folder: Path) -> Any:
    """The weights of a rank of the same training, to the bit."""
    before = Path.cwd()
    os.chdir(folder)
    sys.argv = ["train.py", json.dumps({"epochs": STEPS // 10})]
    space: dict[str, Any] = {"__name__": "__main__"}
    try:
        exec(compile(TRAIN, "train.py", "exec"), space)
    finally:
        os.chdir(before)
    return space["bits"]


def kill_and_wait(run: Run, victim: int) -> None:
    """Kill a rank in the midst of training; the others are ended and all train again in time."""
    survivor = run.ranks()[1 - victim]
    killed = run.kill(victim)
    psutil.wait_procs([survivor], timeout=BUSY * 2)
    noticed = time.time() - killed
    assert noticed < BUSY * 2, f"the other rank was ended after {noticed:.2f} s only"
    run.reach(1, attempt=1)
    again = next(when for when, attempt, _ in run.steps() if attempt >= 1) - killed
    print(f"the other rank ended after {noticed:.2f} s, training again after {again:.2f} s")
    assert again < SLOWEST_RECOVERY_S


@pytest.mark.slow
@pytest.mark.timeout(LONGEST_S)
def test_a_killed_rank_is_made_good_by_default_and_to_the_last_bit(
    runs: Callable[[str], Run], tmp_path: Path
) -> None:
    run = runs("killed").reach(13)
    kill_and_wait(run, victim=1)
    assert run.program.end_of_run(LONGEST_S) == 0, run.program
    assert run.weights == run_ranks(2, undisturbed, tmp_path)
    steps = run.steps()
    first = next(step for _, attempt, step in steps if attempt == 1)
    last = max(step for _, attempt, step in steps if attempt == 0)
    # A checkpoint every five steps; the newest may not have been on the disk yet.
    assert last - 2 * 5 <= first <= last + 1
    assert re.search(r"rank 1 on \S+, step \d+ was ended by SIGKILL", run.program.err)
    assert "restarting every rank from the newest checkpoint (1 of 3" in run.program.err
    assert run.program.nothing_left(within_s=BUSY), run.program.alive()


@pytest.mark.slow
@pytest.mark.timeout(LONGEST_S)
def test_the_same_fault_three_times_stops_with_a_diagnosis(runs: Callable[[str], Run]) -> None:
    run = runs("thrice")
    assert run.program.end_of_run(LONGEST_S) == 1, run.program
    said = run.program.err
    assert "rank 1 failed three times at step 12 with ValueError: a mistake of the user" in said
    assert run.attempts == 3
    assert "step 12" in said.rstrip().splitlines()[-1], "the traceback comes last"
    assert run.program.nothing_left(within_s=BUSY), run.program.alive()


@pytest.mark.slow
@pytest.mark.timeout(LONGEST_S)
@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("bad input", 2, "sample 7 has no label"),
        ("early", 1, "ValueError: a mistake before the first step"),
        ("first step", 1, "ValueError: a mistake of the user"),
    ],
)
def test_what_a_restart_cannot_mend_is_not_restarted(
    runs: Callable[[str], Run], name: str, code: int, says: str
) -> None:
    run = runs(name)
    assert run.program.end_of_run(LONGEST_S) == code, run.program
    assert says in run.program.err and "restarting" not in run.program.err
    assert run.attempts == 1
    assert run.program.nothing_left(within_s=BUSY), run.program.alive()


@pytest.mark.slow
@pytest.mark.timeout(LONGEST_S)
def test_an_error_of_the_machine_in_the_first_step_is_restarted(
    runs: Callable[[str], Run],
) -> None:
    run = runs("memory in the first step")
    assert run.program.end_of_run(LONGEST_S) == 0, run.program
    assert run.attempts == 2 and "MemoryError: no memory left" in run.program.err


@pytest.mark.slow
@pytest.mark.timeout(LONGEST_S)
def test_a_traceback_shows_the_users_lines_and_counts_the_others(
    runs: Callable[[str], Run],
) -> None:
    run = runs("first step")
    assert run.program.end_of_run(LONGEST_S) == 1, run.program
    said = run.program.err
    assert 'raise ValueError("a mistake of the user")' in said and "manager.fit(" in said
    assert "training/loop.py" not in said and "MGT_DEBUG=1 shows them" in said


@pytest.mark.slow
@pytest.mark.timeout(LONGEST_S)
def test_a_launcher_killed_after_a_restart_leaves_no_rank(
    runs: Callable[[str], Run],
) -> None:
    # Started by `mgt run`, which learns from the ranks that the run may be restarted, and on a
    # port of the user's choice, which must be free for the second attempt too.
    run = runs("launcher").reach(7)
    kill_and_wait(run, victim=0)
    run.program.send(signal.SIGKILL)
    assert run.program.nothing_left(within_s=3 * BUSY), run.program.alive()


@pytest.mark.slow
@pytest.mark.timeout(LONGEST_S)
def test_a_killed_torchrun_leaves_no_rank(runs: Callable[[str], Run]) -> None:
    run = runs("torchrun").reach(3)
    os.kill(run.ranks()[0].pid, signal.SIGSTOP)  # also none that can do nothing itself
    run.program.send(signal.SIGKILL)
    assert run.program.nothing_left(within_s=3 * BUSY), run.program.alive()
