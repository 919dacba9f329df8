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
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import Program

from multi_gpu_training.distributed.identity import from_environment
from multi_gpu_training.distributed.sockets import resolved
from multi_gpu_training.errors import ConfigError, LaunchError

LONGEST_S = 400
BUSY = 4  # how many times longer than promised an end may take: other tests run beside these
MGT = ("-m", "multi_gpu_training")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
OLD_LAUNCH = ("-W", "ignore", "-m", "torch.distributed.launch", "--nproc_per_node", "2")

TRAIN = '''
"""A training as a user writes it. It says what it got, and may be told to go wrong."""
import argparse, json, os, sys, time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager


class Points(Dataset):
    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.x[index].sum(0, keepdim=True)


class Noting(Callback):
    def __init__(self, out, rank, fail_at, pause):
        self.file, self.rank = Path(out) / f"step-{rank}", rank
        self.fail_at, self.pause = fail_at, pause

    def on_step_end(self, manager, result):
        step = result.step
        self.file.touch()
        time.sleep(self.pause)
        if self.fail_at == step and self.rank == 1:
            raise ValueError("a mistake of the user")


def train(out, settings, fail_at=0, pause=0.0):
    manager = MultiGPUTrainingManager(
        MultiGPUConfig(
            **{"device": "cpu", "batch_size": 4, "epochs": 2, "tensorboard": False,
               "enable_fault_tolerance": False, "save_dir": out, **settings}
        )
    )
    rank = manager.placement.rank
    torch.manual_seed(rank)  # every rank must get rank 0's weights all the same
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(22, 4, generator=torch.Generator().manual_seed(7))
    manager.fit(
        model, Points(x),
        callbacks=[Noting(out, rank, fail_at, pause)],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    answer = {
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
        "port": os.environ.get("MASTER_PORT"),
        "ranks": manager.placement.dp_size,
        "arguments": sys.argv[1:],
    }
    (Path(out) / f"rank-{rank}.json").write_text(json.dumps(answer))
    return rank, manager.placement.world_size


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--local-rank", type=int)
    parser.add_argument("--fail-at", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("out")
    parser.add_argument("settings", type=json.loads)
    given = parser.parse_args()
    train(given.out, given.settings, given.fail_at, given.pause)
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
import multiprocessing, os, pathlib, signal, sys, time
rank, what = int(os.environ["RANK"]), sys.argv[1]
if what in ("work", "stubborn"):
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
if what == "work":  # the child goes on not to listen
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
pathlib.Path(f"started-{rank}").touch()
while not pathlib.Path("started-0").exists():
    time.sleep(0.02)
if what == "exit" and rank == 1:
    sys.exit(3)
if what == "silent failure" and rank == 1:
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
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Any]]]:
    """All that the selected tests need, started beside each other while they wait."""
    folder = write_scripts(tmp_path_factory.mktemp("ways") / "scripts")
    params = [getattr(item, "callspec", None) for item in request.session.items]
    asked = {p.params[key] for p in params if p for key in ("way", "program") if key in p.params}
    started: list[Program] = []

    def start_one(name: str) -> Program:
        program = ENDINGS[name](write_scripts(tmp_path_factory.mktemp(name) / "scripts"))
        started.append(program)
        return program

    with ThreadPoolExecutor(4) as starters:
        jobs: dict[str, Future[Any]] = {}
        if asked & WAYS.keys():
            jobs |= {way: starters.submit(start, way, folder) for way in WAYS}
        jobs |= {name: starters.submit(start_one, name) for name in ENDINGS if name in asked}
        try:
            yield jobs
        finally:
            starters.shutdown(cancel_futures=True)
            for program in started:
                program.close()


@pytest.fixture
def program(request: pytest.FixtureRequest, fleet: dict[str, Future[Any]]) -> Iterator[Program]:
    with fleet[request.param].result(timeout=LONGEST_S) as found:
        yield found


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


@pytest.mark.timeout(LONGEST_S)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_start_a_script_gives_the_same_weights(
    way: str, fleet: dict[str, Future[Ended]], alone: list[float]
) -> None:
    ended = fleet[way].result(timeout=LONGEST_S)
    assert set(ended.codes) == {0}, ended.shown
    assert [answer["ranks"] for answer in ended.answers] == [2, 2], ended.shown
    assert ended.weights[0] == ended.weights[1]
    # One process adds the same gradients in another order: float32 rounds at 6e-8.
    assert ended.weights[0] == pytest.approx(alone, rel=1e-5, abs=1e-6)
    assert ended.weights[0] == fleet["torchrun"].result(timeout=LONGEST_S).weights[0]
    assert "Traceback" not in ended.shown
    assert ended.out.count("Epoch 2/2") == 1, "rank 0 alone reports"
    if way in PORT_GIVEN:
        assert {a["port"] for a in ended.answers} == {ended.answers[0]["asked"]["MASTER_PORT"]}
    if way == "old_launch":
        assert [a["arguments"][0] for a in ended.answers] == ["--local-rank=0", "--local-rank=1"]
    if way == "function":
        assert "rank 0 gave (0, 2)" in ended.out
    if way == "plain":
        ports = {ended.answers[0]["port"], fleet["module"].result(LONGEST_S).answers[0]["port"]}
        assert len(ports) == 2 and "29500" not in ports, "two runs at once share no port"


# Ending early


def training(folder: Path, *launcher: object, fail_at: int = 0, **settings: Any) -> Program:
    """A training that goes on for ever, each rank with a loader worker, in its second step."""
    endless = {"epochs": 10**6, "num_workers": 1, "persistent_workers": True, "progress": "off"}
    flags = [f"--fail-at={fail_at}", "--pause=0.2"]
    program = Program(
        *(*launcher, "train.py", *flags, folder, json.dumps(endless | settings)), cwd=folder
    )
    return program.when(lambda: all((folder / f"step-{rank}").exists() for rank in (0, 1)))


def light(folder: Path, what: str) -> Program:
    program = Program(*MGT, "run", "--num-gpus", 2, "light.py", what, cwd=folder)
    return program.when(lambda: all((folder / f"started-{rank}").exists() for rank in (0, 1)))


def recipe(folder: Path) -> Program:
    command = [*OLD_LAUNCH, "--master-port", free_port(), *MGT, "train", "image"]
    settings = ["max_steps=2", "tensorboard=false", "enable_fault_tolerance=false"]
    return Program(*command, *settings, "--save-dir", folder / "runs", cwd=folder)


def process_1(folder: Path) -> Program:
    """As in a container; only root may make one."""
    command = [sys.executable, *MGT, "run", "--num-gpus=2", "light.py", "thread"]
    if os.geteuid() == 0:
        command = ["unshare", "--pid", "--fork", "--mount-proc", *command]
    return Program("-c", f"import os; os.execvp({command[0]!r}, {command})", cwd=folder)


ENDINGS: dict[str, Callable[[Path], Program]] = {
    "recipe": recipe,
    "training": lambda folder: training(folder, world_size=2),
    "run of a training": lambda folder: training(folder, *MGT, "run", "--num-gpus", 2),
    "failing training": lambda folder: training(folder, *MGT, "run", "--num-gpus", 2, fail_at=2),
    "training to be shot at": lambda folder: training(folder, world_size=2),
    "training to be shot at again": lambda folder: training(folder, world_size=2),
    "work": lambda folder: light(folder, "work"),
    "stubborn": lambda folder: light(folder, "stubborn"),
    "stubborn to be shot at": lambda folder: light(folder, "stubborn"),
    "silent failure": lambda folder: light(folder, "silent failure"),
    "exit": lambda folder: light(folder, "exit"),
    "process 1": process_1,
}


def given(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("program", [name], indirect=True)


def ranks_of(program: Program) -> dict[int, psutil.Process]:
    direct = psutil.Process(program.pid).children()
    return {int(p.environ()["RANK"]): p for p in direct if "RANK" in p.environ()}


@given("recipe")
def test_the_old_launcher_starts_a_recipe(program: Program) -> None:
    assert program.end_of_run() == 0, program
    assert "2 ranks (gloo)" in program.out
    assert program.out.count("Epoch 1/20") == 1


@given("training")
def test_ctrl_c_saves_and_ends_ranks_and_loader_workers(program: Program) -> None:
    program.when(lambda: len(program.children()) >= 4)  # two ranks, two workers
    program.send(signal.SIGINT)
    assert program.end_of_run(10 * BUSY) == 130  # it saves first
    assert program.nothing_left(within_s=0.5 * BUSY), program.alive()
    assert "Traceback" not in program.err, program.err


@given("work")
def test_ctrl_c_in_a_terminal_ends_all_that_mgt_run_started(program: Program) -> None:
    assert len(program.children()) == 4
    program.send_to_group(signal.SIGINT)
    assert program.end_of_run(5 * BUSY) == 130
    assert program.nothing_left(within_s=0.5 * BUSY), program.alive()
    assert "Traceback" not in program.err, program.err


@given("stubborn")
def test_sigterm_ends_even_ranks_that_do_not_listen(program: Program) -> None:
    program.send(signal.SIGTERM)
    assert program.end_of_run(6 * BUSY) == 143
    assert program.nothing_left(within_s=0.5 * BUSY), program.alive()
    assert "Traceback" not in program.err, program.err


@given("run of a training")
def test_ranks_die_with_a_launcher_that_was_killed(program: Program) -> None:
    ranks = list(ranks_of(program).values())
    assert len(ranks) == 2
    program.send(signal.SIGKILL)
    psutil.wait_procs(ranks, timeout=3 * BUSY)
    assert not [rank for rank in ranks if rank in program.alive()]
    # A loader worker looks for its rank every 5 s.
    assert program.nothing_left(within_s=8 * BUSY), program.alive()


@given("failing training")
def test_a_failing_rank_has_the_last_word(program: Program) -> None:
    assert program.end_of_run(8 * BUSY) == 1
    assert program.nothing_left(within_s=BUSY), program.alive()
    lines = program.err.rstrip().splitlines()
    assert program.err.count("Traceback") == 1, program.err
    assert "train.py" in program.err
    assert lines[-2].endswith("ValueError: a mistake of the user"), program.err
    assert "rank 1" in lines[-1] and socket.gethostname() in lines[-1], program.err
    assert "step 2" in lines[-1], program.err


@given("training to be shot at")
def test_a_rank_that_was_killed_is_named_with_the_signal(program: Program) -> None:
    ranks_of(program)[1].kill()
    assert program.end_of_run(8 * BUSY) == 1
    cause, code = program.err.rstrip().splitlines()[-2:]
    assert "rank 1" in cause and "SIGKILL" in cause, program.err
    assert "MGT601" in code, program.err
    assert "Traceback" not in program.err, program.err
    assert program.nothing_left(within_s=BUSY), program.alive()


@given("training to be shot at again")
def test_a_rank_that_the_cpu_stopped_is_told_how_to_avoid_the_instruction(program: Program) -> None:
    ranks_of(program)[1].send_signal(signal.SIGILL)
    assert program.end_of_run(8 * BUSY) == 1
    assert "SIGILL" in program.err and "set ONEDNN_MAX_CPU_ISA=" in program.err, program.err


@given("silent failure")
def test_the_first_failure_is_shown_while_others_still_compute(program: Program) -> None:
    assert program.end_of_run(8 * BUSY) == 1
    assert "ValueError: the mistake that came first" in program.err, program.err
    assert "SIGTERM" not in program.err, program.err
    assert program.nothing_left(within_s=BUSY)


@given("stubborn to be shot at")
def test_a_failure_ends_ranks_that_do_not_listen_and_what_ranks_started(program: Program) -> None:
    ranks_of(program)[1].kill()
    assert program.end_of_run(8 * BUSY) == 1
    assert program.nothing_left(within_s=0.5 * BUSY), program.alive()
    assert "rank 1" in program.err and "SIGKILL" in program.err, program.err


@given("exit")
def test_the_exit_code_of_a_script_is_the_exit_code_of_the_run(program: Program) -> None:
    assert program.end_of_run(8 * BUSY) == 3, program
    assert "Traceback" not in program.err, program.err
    assert "rank 1" in program.err


@given("process 1")
def test_threads_may_finish_in_ranks_whose_launcher_is_process_1(program: Program) -> None:
    assert program.end_of_run(60) == 0, program
    for rank in (0, 1):
        assert f"rank {rank} finished its work" in program.out, program


@pytest.mark.parametrize(
    ("name", "value"),
    [("WORLD_SIZE", "0"), ("WORLD_SIZE", "-1"), ("RANK", "-1"), ("RANK", "9" * 5000)]
    + [("LOCAL_WORLD_SIZE", "0"), ("LOCAL_RANK", "-2"), ("RANK", "abc"), ("RANK", "1")],
    ids=lambda value: value[:20],
)
def test_numbers_of_ranks_that_cannot_be_are_named(name: str, value: str) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", name: value}
    with pytest.raises(ConfigError, match=f"the environment has {name}=") as error:
        from_environment(env)
    assert len(str(error.value)) < 700


def test_an_address_that_no_name_can_be_is_named() -> None:
    for host in ("x" * 300, "a\0b", "nowhere.invalid"):
        with pytest.raises(LaunchError, match="--master-addr"):
            resolved(host)
