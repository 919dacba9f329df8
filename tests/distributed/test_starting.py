"""One script, every way to start its ranks, and every way a run may end early.

These are real processes: a start costs seconds, so all ways of starting run beside each other
(which also shows that runs at once never collide) and each start answers several questions.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import Program

MGT = ("-m", "multi_gpu_training")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
OLD_LAUNCH = ("-W", "ignore", "-m", "torch.distributed.launch", "--nproc_per_node", "2")

TRAIN = '''
"""A training as a user writes it. It says what it got, and may be told to go wrong."""
import argparse, json, os, sys, time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from multi_gpu_training import Hook, MultiGPUConfig, MultiGPUTrainingManager


class Noting(Hook):
    def __init__(self, out, rank, fail_at):
        self.file, self.rank, self.fail_at = Path(out) / f"step-{rank}", rank, fail_at

    def on_step_end(self, manager, step):
        self.file.write_text(str(step))
        if self.fail_at == step and self.rank == 1:
            raise ValueError("a mistake of the user")


def train(out, settings, fail_at=0):
    manager = MultiGPUTrainingManager(
        MultiGPUConfig(
            **{"device": "cpu", "batch_size": 4, "epochs": 2, "tensorboard": False,
               "enable_fault_tolerance": False, "save_dir": out, **settings}
        )
    )
    rank = manager.placement.identity.rank
    torch.manual_seed(rank)  # every rank must get rank 0's weights all the same
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(22, 4, generator=torch.Generator().manual_seed(7))
    manager.fit(
        model, TensorDataset(x, x.sum(1, keepdim=True)), hooks=[Noting(out, rank, fail_at)],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    answer = {
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
        "port": os.environ.get("MASTER_PORT"),
        "ranks": manager.placement.dp_size,
        "arguments": sys.argv[1:],
    }
    (Path(out) / f"rank-{rank}.json").write_text(json.dumps(answer))
    return rank, manager.placement.dp_size


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--local-rank", type=int)
    parser.add_argument("--fail-at", type=int, default=0)
    parser.add_argument("out")
    parser.add_argument("settings", type=json.loads)
    given = parser.parse_args()
    train(given.out, given.settings, given.fail_at)
'''

START = """
import json, sys
from train import train
from multi_gpu_training import launch_distributed_training

if __name__ == "__main__":
    print("rank 0 gave", launch_distributed_training(
        train, num_gpus=2, args=(sys.argv[1], json.loads(sys.argv[2]))))
"""

# Ranks without torch start at once: enough where only starting and ending matters.
LIGHT = """
import multiprocessing, os, pathlib, sys, time
rank, what = int(os.environ["RANK"]), sys.argv[1]
if what == "work":
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
pathlib.Path(f"started-{rank}").touch()
if what == "stubborn":
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if what == "exit" and rank == 1:
    sys.exit(3)
if what == "silent failure" and rank == 1:
    time.sleep(0.3)
    raise ValueError("the mistake that came first")
if what == "thread":
    from concurrent.futures import ThreadPoolExecutor
    work = lambda: (time.sleep(0.3), print(f"rank {rank} finished its work", flush=True))
    ThreadPoolExecutor(1).submit(work)
    sys.exit(0)
time.sleep(600)
"""


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_scripts(folder: Path) -> Path:
    (folder / "pkg").mkdir(parents=True)
    for name, text in (
        ("train.py", TRAIN),
        ("pkg/train.py", TRAIN),
        ("pkg/__init__.py", ""),
        ("start.py", START),
        ("light.py", LIGHT),
    ):
        (folder / name).write_text(text)
    return folder


# Starting


@dataclass
class Ended:
    codes: list[int]
    answers: list[dict[str, Any]]
    out: str
    shown: str

    @property
    def weights(self) -> list[list[float]]:
        return [answer["weights"] for answer in self.answers]


def plain(out: Path) -> list[list[object]]:
    # rank=0 without MASTER_ADDR says nothing about whom to join: both ranks are started.
    settings = {"world_size": 2, "rank": 0, "local_rank": 0}
    return [["train.py", out, json.dumps(settings)]]


def module(out: Path) -> list[list[object]]:
    return [["-m", "pkg.train", out, '{"world_size": 2}']]


def mgt_run(out: Path) -> list[list[object]]:
    return [[*MGT, "run", "--num-gpus", "2", "train.py", out, '{"world_size": 2}']]


def torchrun(out: Path) -> list[list[object]]:
    return [[*TORCHRUN, "train.py", out, '{"world_size": 2}']]


def old_launch(out: Path) -> list[list[object]]:
    return [[*OLD_LAUNCH, "--master-port", free_port(), "train.py", out, "{}"]]


def function(out: Path) -> list[list[object]]:
    return [["start.py", out, "{}"]]


def by_hand(out: Path) -> list[list[object]]:
    return [
        ["train.py", out, json.dumps({"world_size": 2, "rank": rank, "local_rank": rank})]
        for rank in range(2)
    ]


def two_nodes(out: Path) -> list[list[object]]:
    hosts = ["--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", free_port()]
    return [
        [*MGT, "run", *hosts, "--node-rank", node, "--num-gpus", 1, "train.py", out, "{}"]
        for node in range(2)
    ]


WAYS: dict[str, Callable[[Path], list[list[object]]]] = {
    way.__name__: way
    for way in (plain, mgt_run, torchrun, old_launch, function, module, by_hand, two_nodes)
}
PORT_GIVEN = ("mgt_run", "by_hand")


def start(way: str, folder: Path) -> Ended:
    out = folder / way
    out.mkdir()
    env = {}
    if way in PORT_GIVEN:
        env["MASTER_PORT"] = str(free_port())
    if way == "by_hand":
        env["MASTER_ADDR"] = "127.0.0.1"
    if way == "two_nodes":
        env["GLOO_SOCKET_IFNAME"] = "lo"  # the name of this machine need not have an address
    with ExitStack() as programs:
        started = [
            programs.enter_context(Program(*command, cwd=folder, env=env))
            for command in WAYS[way](out)
        ]
        codes = [program.end_of_run(300) for program in started]
        files = sorted(out.glob("rank-*.json"))
        answers = [json.loads(file.read_text()) | {"asked": env} for file in files]
        shown = "\n".join(map(str, started))
        return Ended(codes, answers, "".join(program.out for program in started), shown)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Ended]]]:
    folder = write_scripts(tmp_path_factory.mktemp("ways") / "scripts")
    with ThreadPoolExecutor(4) as starters:
        yield {way: starters.submit(start, way, folder) for way in WAYS}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """What the script learns in one process, without any ranks."""
    folder = tmp_path_factory.mktemp("alone")
    space: dict[str, Any] = {"__name__": "train"}
    exec(compile(TRAIN, "train.py", "exec"), space)
    settings = {"training_mode": "single", "global_batch_size": 8, "progress": "off"}
    hook = sys.excepthook
    space["train"](str(folder), settings)
    sys.excepthook = hook
    answer: dict[str, Any] = json.loads((folder / "rank-0.json").read_text())
    return list(answer["weights"])


@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_start_a_script_gives_the_same_weights(
    way: str, started: dict[str, Future[Ended]], alone: list[float]
) -> None:
    ended = started[way].result(timeout=390)
    assert set(ended.codes) == {0}, ended.shown
    assert [answer["ranks"] for answer in ended.answers] == [2, 2], ended.shown
    assert ended.weights[0] == ended.weights[1]
    # One process adds the same gradients in another order: float32 rounds at 6e-8.
    assert ended.weights[0] == pytest.approx(alone, rel=1e-5, abs=1e-6)
    assert ended.weights[0] == started["torchrun"].result(timeout=390).weights[0]
    assert "Traceback" not in ended.shown
    assert ended.out.count("Epoch 2/2") == 1, "rank 0 alone reports"


@pytest.mark.timeout(400)
def test_launchers_pass_on_arguments_ports_and_results(started: dict[str, Future[Ended]]) -> None:
    for way in PORT_GIVEN:
        ended = started[way].result(timeout=390)
        assert {a["port"] for a in ended.answers} == {ended.answers[0]["asked"]["MASTER_PORT"]}
    free = {started[way].result(timeout=390).answers[0]["port"] for way in ("plain", "module")}
    assert len(free) == 2 and "29500" not in free, "two runs at once share no port"
    ended = started["old_launch"].result(timeout=390)
    assert [a["arguments"][0] for a in ended.answers] == ["--local-rank=0", "--local-rank=1"]
    assert "rank 0 gave (0, 2)" in started["function"].result(timeout=390).out


def test_the_old_launcher_starts_a_recipe(tmp_path: Path) -> None:
    command = [*OLD_LAUNCH, "--master-port", free_port(), *MGT, "train", "image"]
    settings = ["max_steps=2", "tensorboard=false", "enable_fault_tolerance=false"]
    with Program(*command, *settings, "--save-dir", tmp_path / "runs", cwd=tmp_path) as program:
        assert program.end_of_run() == 0, program
        assert "2 ranks (gloo)" in program.out
        assert program.out.count("Epoch 1/20") == 1


# Ending early


def start_training(folder: Path, *launcher: object, **settings: Any) -> Program:
    """A training that goes on for ever, each rank with a loader worker, past its second step."""
    write_scripts(folder)
    fail_at = settings.pop("fail_at", 0)
    endless = {"epochs": 10**6, "num_workers": 1, "persistent_workers": True, "progress": "off"}
    program = Program(
        *launcher,
        *("train.py", f"--fail-at={fail_at}", folder, json.dumps(endless | settings)),
        cwd=folder,
    )
    try:
        program.wait_for(lambda: all(_step(folder, rank) >= min(2, fail_at or 2) for rank in (0, 1)))
    except BaseException:
        program.__exit__()
        raise
    return program


def start_light(folder: Path, what: str, *flags: object) -> Program:
    write_scripts(folder)
    program = Program(*MGT, "run", "--num-gpus", 2, *flags, "light.py", what, cwd=folder)
    try:
        program.wait_for(lambda: all((folder / f"started-{rank}").exists() for rank in (0, 1)))
    except BaseException:
        program.__exit__()
        raise
    return program


def _step(folder: Path, rank: int) -> int:
    file = folder / f"step-{rank}"
    text = file.read_text() if file.exists() else ""
    return int(text or 0)


def ranks_of(program: Program) -> dict[int, psutil.Process]:
    direct = psutil.Process(program.pid).children()
    return {int(p.environ()["RANK"]): p for p in direct if "RANK" in p.environ()}


def test_ctrl_c_ends_ranks_and_loader_workers_within_5_seconds(tmp_path: Path) -> None:
    with start_training(tmp_path, world_size=2) as program:
        program.wait_for(lambda: len(program.children()) >= 4)  # two ranks, two workers
        sent = program.send(signal.SIGINT)
        assert program.end_of_run(10) == 130
        assert program.nothing_left(within_s=0.5), program.alive()
        assert time.monotonic() - sent < 5
        assert "Traceback" not in program.err, program.err


def test_ctrl_c_in_a_terminal_ends_all_that_mgt_run_started(tmp_path: Path) -> None:
    with start_light(tmp_path, "work") as program:
        sent = program.send_to_group(signal.SIGINT)
        assert program.end_of_run(10) == 130
        assert program.nothing_left(within_s=0.5), program.alive()
        assert time.monotonic() - sent < 5
        assert "Traceback" not in program.err, program.err


def test_sigterm_ends_even_ranks_that_do_not_listen(tmp_path: Path) -> None:
    with start_light(tmp_path, "stubborn") as program:
        time.sleep(0.3)  # until they have stopped listening
        sent = program.send(signal.SIGTERM)
        assert program.end_of_run(20) == 143
        assert program.nothing_left(within_s=0.5), program.alive()
        assert time.monotonic() - sent < 6
        assert "Traceback" not in program.err, program.err


def test_ranks_die_with_a_launcher_that_was_killed(tmp_path: Path) -> None:
    with start_training(tmp_path, *MGT, "run", "--num-gpus", 2) as program:
        ranks = list(ranks_of(program).values())
        assert len(ranks) == 2
        program.send(signal.SIGKILL)
        psutil.wait_procs(ranks, timeout=3)
        assert not [rank for rank in ranks if rank in program.alive()]
        # A loader worker looks for its rank every 5 s.
        assert program.nothing_left(within_s=8), program.alive()


def test_a_failing_rank_has_the_last_word(tmp_path: Path) -> None:
    with start_training(tmp_path, *MGT, "run", "--num-gpus", 2, fail_at=2) as program:
        assert program.end_of_run(20) == 1
        assert program.nothing_left(within_s=8), program.alive()
        lines = program.err.rstrip().splitlines()
        assert program.err.count("Traceback") == 1, program.err
        assert "train.py" in program.err
        assert lines[-2].endswith("ValueError: a mistake of the user"), program.err
        assert "rank 1" in lines[-1] and socket.gethostname() in lines[-1], program.err
        assert "step 2" in lines[-1], program.err


def test_a_rank_that_was_killed_is_named_with_the_signal(tmp_path: Path) -> None:
    with start_training(tmp_path, world_size=2) as program:
        killed = time.monotonic()
        ranks_of(program)[1].kill()
        assert program.end_of_run(20) == 1
        assert time.monotonic() - killed < 8
        assert "rank 1" in program.err and "SIGKILL" in program.err, program.err
        assert program.err.rstrip().splitlines()[-1].count("rank 1"), program.err
        assert program.nothing_left(within_s=8), program.alive()


def test_the_first_failure_is_shown_while_others_still_compute(tmp_path: Path) -> None:
    with start_light(tmp_path, "silent failure") as program:
        assert program.end_of_run(20) == 1
        assert "ValueError: the mistake that came first" in program.err, program.err
        assert "SIGTERM" not in program.err, program.err
        assert program.nothing_left()


def test_a_failure_does_not_wait_for_ranks_that_do_not_listen(tmp_path: Path) -> None:
    with start_light(tmp_path, "stubborn") as program:
        time.sleep(0.3)
        killed = time.monotonic()
        ranks_of(program)[1].kill()
        assert program.end_of_run(40) == 1
        assert time.monotonic() - killed < 8
        assert "rank 1" in program.err and "SIGKILL" in program.err, program.err
        assert program.nothing_left()


def test_what_a_failing_rank_started_ends_with_it(tmp_path: Path) -> None:
    with start_light(tmp_path, "work") as program:
        ranks_of(program)[1].kill()
        assert program.end_of_run(20) == 1
        assert program.nothing_left(within_s=1), program.alive()


def test_the_exit_code_of_a_script_is_the_exit_code_of_the_run(tmp_path: Path) -> None:
    with start_light(tmp_path, "exit") as program:
        assert program.end_of_run(20) == 3, program
        assert "Traceback" not in program.err, program.err
        assert "rank 1" in program.err


def test_threads_of_a_rank_may_finish_their_work(tmp_path: Path) -> None:
    with start_light(tmp_path, "thread") as program:
        assert program.end_of_run(20) == 0, program
        for rank in (0, 1):
            assert f"rank {rank} finished its work" in program.out, program


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may be process 1 of a namespace")
def test_a_launcher_may_be_process_1_of_a_container(tmp_path: Path) -> None:
    write_scripts(tmp_path)
    inside = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable]
    code = f"import os; os.execvp('unshare', {[*inside, *MGT, 'run', 'light.py', 'exit']!r})"
    with Program("-c", code, cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""}) as program:
        program.wait_for((tmp_path / "started-0").exists, within_s=60)


def test_a_busy_port_is_an_error_at_once(tmp_path: Path) -> None:
    write_scripts(tmp_path)
    with closing(socket.socket()) as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        flag = Program(*MGT, "run", "--num-gpus=2", "--master-port", port, "light.py", cwd=tmp_path)
        variable = Program(
            *("train.py", tmp_path, '{"world_size": 2}'), cwd=tmp_path, env={"MASTER_PORT": port}
        )
        with flag, variable:
            for program in (flag, variable):
                assert program.end_of_run(60) == 2, program
                assert f"port {port}" in program.err and "in use" in program.err, program
                assert "--master-port" in program.err
                assert "Traceback" not in program.err, program
    assert not (tmp_path / "started-0").exists()
