"""Where a run takes place: mode, devices, ranks, and what the launcher is told."""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Program
from ranks import CONTEXT, run_ranks
from tiny import FEATURES, line, manager_for, points, quiet, sgd
from torch import Tensor, nn

from multi_gpu_training import MultiGPUConfig
from multi_gpu_training.distributed import placement
from multi_gpu_training.errors import ConfigError, LaunchError
from multi_gpu_training.launch import launcher
from multi_gpu_training.launch.engine import Hosts

TESTS = Path(__file__).parent


def train_wrapped(folder: Path, mode: str) -> tuple[str, int]:
    manager = manager_for(folder, training_mode=mode, batch_size=4)
    result = manager.fit(line(), points(), optimizer=sgd)
    return type(manager.trainer.wrapped).__name__, result.steps


def test_training_mode_chooses_how_the_model_is_copied(tmp_path: Path) -> None:
    assert run_ranks(1, train_wrapped, tmp_path, "single") == [("StepModule", 4)]
    for name in ("data_parallel", "dp"):
        assert run_ranks(1, train_wrapped, tmp_path, name) == [("DataParallel", 4)]
    for name in ("distributed_data_parallel", "ddp"):
        assert run_ranks(2, train_wrapped, tmp_path, name) == [("Replicas", 2)] * 2


def refused_mode(folder: Path, mode: str) -> str:
    try:
        manager_for(folder, training_mode=mode)
    except ConfigError as error:
        return str(error)
    return ""


def test_training_mode_of_one_process_refuses_several_ranks(tmp_path: Path) -> None:
    for said in run_ranks(2, refused_mode, tmp_path, "single"):
        assert "a launcher started 2" in said


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets torch report GPUs that are not there; nothing is computed on them."""

    def pretend(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    return pretend


def device(folder: Path, **settings: Any) -> str:
    config = quiet(folder, **{"training_mode": "single", "device": "auto", **settings})
    return str(placement.place(config).device)


def test_device_chooses_cpu_or_gpu(tmp_path: Path, gpus: Any) -> None:
    gpus(2)
    assert device(tmp_path) == device(tmp_path, device="cuda") == "cuda:0"
    assert device(tmp_path, device="cpu") == "cpu"
    gpus(0)
    assert device(tmp_path) == "cpu"
    with pytest.raises(ConfigError, match="device=cuda was asked for"):
        device(tmp_path, device="cuda")


def test_device_ids_name_the_gpus(tmp_path: Path, gpus: Any) -> None:
    gpus(4)
    assert device(tmp_path, device_ids=[3]) == "cuda:3"
    with pytest.raises(ConfigError, match=r"\[7\] not there"):
        device(tmp_path, device_ids=[7])


def test_device_ids_without_a_gpu_are_told(tmp_path: Path, capsys: Any) -> None:
    asked = {"training_mode": "single", "device": "auto", "device_ids": [0], "progress": "lines"}
    manager = manager_for(tmp_path, **asked)
    manager.fit(line(), points(), optimizer=sgd)
    said = capsys.readouterr().out
    if torch.cuda.is_available():
        assert "torch sees no GPU" not in said
    else:
        assert "device_ids=[0]: torch sees no GPU, so this trains on the CPU" in said


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The device and the arguments with which a rank that is started by hand asks to join."""
    asked: dict[str, Any] = {}

    def init(backend: str, **arguments: Any) -> None:
        asked.update(arguments, backend=backend)
        raise RuntimeError("nobody is there")

    def join(folder: Path, **settings: Any) -> dict[str, Any]:
        asked.clear()
        config = quiet(folder, device="auto", **settings)
        chosen = placement._device(config, placement.claimed_identity(config))
        with pytest.raises(LaunchError, match="nobody is there"):
            placement.place(config)
        return {**asked, "device": str(chosen)}

    store = torch.distributed.HashStore()
    monkeypatch.setattr(placement.meeting_place, "join_store", lambda *_, **__: store)
    monkeypatch.setattr(placement.dist, "init_process_group", init)
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return join


def test_local_rank_chooses_the_gpu_of_a_rank(tmp_path: Path, gpus: Any, joined: Any) -> None:
    gpus(4)
    asked = joined(tmp_path, rank=5, world_size=8, local_rank=1)
    assert (asked["device"], asked["rank"], asked["world_size"]) == ("cuda:1", 5, 8)
    asked = joined(tmp_path, rank=5, world_size=8, local_rank=1, device_ids=[3, 2])
    assert asked["device"] == "cuda:2"
    with pytest.raises(ConfigError, match="start fewer ranks, or set share_gpu=true"):
        joined(tmp_path, rank=5, world_size=8)


def test_share_gpu_puts_several_ranks_on_one(tmp_path: Path, gpus: Any, joined: Any) -> None:
    gpus(1)
    asked = joined(tmp_path, rank=1, world_size=2, share_gpu=True)
    assert (asked["device"], asked["backend"]) == ("cuda:0", "gloo")
    with pytest.raises(ConfigError, match="share_gpu"):
        joined(tmp_path, rank=1, world_size=2)
    with pytest.raises(ConfigError, match="NCCL refuses two ranks on one GPU"):
        joined(tmp_path, rank=1, world_size=2, share_gpu=True, backend="nccl")


def test_backend_is_what_the_ranks_talk_through(tmp_path: Path, gpus: Any, joined: Any) -> None:
    gpus(2)
    ranks = {"rank": 0, "world_size": 2}
    assert joined(tmp_path, **ranks)["backend"] == "nccl"
    assert joined(tmp_path, **ranks, backend="gloo")["backend"] == "gloo"
    gpus(0)
    assert joined(tmp_path, **ranks)["backend"] == "gloo"
    with pytest.raises(ConfigError, match="backend=nccl needs GPUs"):
        joined(tmp_path, **ranks, backend="nccl")


def test_timeout_is_given_to_the_group(tmp_path: Path, joined: Any) -> None:
    ranks = {"rank": 0, "world_size": 2}
    assert joined(tmp_path, **ranks)["timeout"] == timedelta(minutes=30)
    assert joined(tmp_path, **ranks, timeout=90)["timeout"] == timedelta(seconds=90)


def test_rank_on_another_machine_does_not_listen_on_loopback(
    tmp_path: Path, joined: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match="mgt cluster token"):
        placement.place(quiet(tmp_path, rank=8, local_rank=0, world_size=16))
    monkeypatch.setenv("MGT_CLUSTER_TOKEN", "t" * 40)
    joined(tmp_path, rank=8, local_rank=0, world_size=16)
    assert os.environ.get("GLOO_SOCKET_IFNAME") != "lo"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def join_by_hand(folder: Path, rank: int, port: int, timeout_s: float, pipe: Connection) -> None:
    """A process of a user who starts each rank by hand. Rank 1 leaves rank 0 waiting."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    pipe.send("ready")
    pipe.recv()
    manager = manager_for(folder, rank=rank, world_size=2, timeout=timeout_s)
    here = manager.placement
    total = float(here.sum(torch.tensor([rank + 1.0])))
    said, waited = "", 0.0
    if rank == 0:
        started = time.monotonic()
        try:
            here.barrier()
        except RuntimeError as error:
            said, waited = str(error), time.monotonic() - started
    pipe.send((here.identity.rank, here.dp_size, total, said, waited))
    pipe.recv()
    os._exit(0)


def by_hand(folder: Path, timeout_s: float) -> list[Any]:
    """What each of two processes that were started by hand reports."""
    port = free_port()
    pipes, processes = [], []
    for rank in range(2):
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=join_by_hand, args=(folder, rank, port, timeout_s, theirs))
        process.start()
        pipes.append(ours)
        processes.append(process)
    try:
        for pipe in pipes:
            assert pipe.poll(60) and pipe.recv() == "ready"
        for pipe in pipes:
            pipe.send("go")
        answers = []
        for pipe in pipes:
            assert pipe.poll(60), "a rank fell silent"
            answers.append(pipe.recv())
        return answers
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_rank_joins_by_hand_and_timeout_ends_a_wait(tmp_path: Path) -> None:
    first, second = by_hand(tmp_path, 4.0)
    assert first[:3] == (0, 2, 3.0) and second[:3] == (1, 2, 3.0)
    assert "Timed out" in first[3] or "timed out" in first[3].lower()
    assert 3.5 < first[4] < 20


SCRIPT = """
import json, os, signal, sys
from pathlib import Path

from tiny import line, points, quiet, sgd
from multi_gpu_training import Callback, MultiGPUTrainingManager

settings = json.loads(sys.argv[1])
dies_at = settings.pop("dies_at", [])  # a step for each attempt


class Steps(Callback):
    def __init__(self):
        self.steps = []

    def on_step_end(self, run, result):
        self.note(run, result.step)

    def note(self, manager, step):
        identity = manager.placement.identity
        if dies_at[identity.attempt :][:1] == [step] and identity.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps.append(step)


hook = Steps()
manager = MultiGPUTrainingManager(quiet("runs", batch_size=2, epochs=2, **settings))
hook.note(manager, 0)
manager.fit(line(), points(), optimizer=sgd, callbacks=[hook])
here = manager.placement
facts = {"rank": here.identity.rank, "of": here.dp_size, "attempt": here.identity.attempt,
         "steps": hook.steps[1:], "device": str(here.device), "backend": here.backend}
Path(f"rank-{here.identity.rank}.json").write_text(json.dumps(facts))
"""


def run_script(folder: Path, **settings: Any) -> tuple[int, str, list[dict[str, Any]]]:
    """`python train.py` as a user starts it: exit code, stderr, what the ranks wrote."""
    (folder / "train.py").write_text(SCRIPT)
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    command = ["train.py", json.dumps(settings)]
    with Program(*command, cwd=folder, env={"PYTHONPATH": path}) as program:
        code, said = program.end_of_run(200), program.err
    facts = [json.loads(file.read_text()) for file in sorted(folder.glob("rank-*.json"))]
    return code, said, facts


# As guide 003 writes it: a plain `python train.py` with rank=0 starts all of them.
TWO = {"world_size": 2, "rank": 0, "local_rank": 0}


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, list[dict[str, Any]]]:
    saving = {"enable_fault_tolerance": True, "checkpoint_frequency": 1}
    folder = tmp_path_factory.mktemp("restarted")
    # Any restart is out of so short a window before the next.
    limits = {"max_restarts": 1, "restart_window_s": 0.01}
    return run_script(folder, **TWO, **saving, **limits, dies_at=[3, 5])


@pytest.mark.slow
def test_world_size_starts_that_many_ranks(restarted: Any) -> None:
    code, said, facts = restarted
    assert code == 0, said
    assert [(f["rank"], f["of"]) for f in facts] == [(0, 2), (1, 2)]


@pytest.mark.slow
def test_max_restarts_outlives_a_rank_that_is_killed(restarted: Any, tmp_path: Path) -> None:
    code, said, facts = restarted
    assert code == 0, said
    assert [(f["attempt"], f["steps"][-1]) for f in facts] == [(2, 8), (2, 8)]
    code, said, facts = run_script(tmp_path, **TWO, dies_at=[0], max_restarts=0)
    assert code == 1 and facts == []
    assert "rank 1" in said and "SIGKILL" in said


@pytest.mark.slow
def test_max_restarts_goes_on_where_the_run_was(restarted: Any) -> None:
    # Killed after step 5 moved the weights and before it was saved.
    assert [f["steps"] for f in restarted[2]] == [[5, 6, 7, 8]] * 2


@pytest.mark.slow
def test_restart_window_s_forgets_older_restarts(restarted: Any) -> None:
    code, said, _ = restarted
    assert code == 0 and said.count("(1 of 1 within 0.01 s)") == 2, said


def wait_for_others(port: int, seconds: float, pipe: Connection) -> None:
    """The second of two machines, whose first never comes."""
    launcher.own_command = lambda: ["train.py"]
    config = MultiGPUConfig(world_size=2, device="cpu", recovery_timeout=seconds)
    started = time.monotonic()
    kind = said = ""
    try:
        launcher.start_ranks_if_needed(config, Hosts(2, 1, "127.0.0.1", port))
    except BaseException as error:
        kind, said = type(error).__name__, str(error)
    pipe.send((time.monotonic() - started, kind, said))
    os._exit(0)


@pytest.fixture(scope="module")
def alone() -> tuple[float, str, str]:
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=wait_for_others, args=(free_port(), 1.0, theirs))
    process.start()
    try:
        assert ours.poll(60), "recovery_timeout=1 has no effect"
        found: tuple[float, str, str] = ours.recv()
        return found
    finally:
        process.kill()
        process.join()


def test_recovery_timeout_ends_the_search_for_other_machines(alone: Any) -> None:
    waited, _, said = alone
    assert 1.0 <= waited < 30
    assert "127.0.0.1" in said


def test_recovery_timeout_says_what_to_do(alone: Any) -> None:
    _, kind, said = alone
    assert kind == "LaunchError" and "recovery_timeout" in said


class Sizes(nn.Module):
    """Notes how many samples each copy of it gets, and where."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(FEATURES, 1)
        self.seen: list[tuple[str, int]] = []  # shared by the copies that DataParallel makes

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.append((str(inputs.device), len(inputs)))
        return self.line(inputs)


@pytest.mark.gpu
def test_device_ids_are_the_copies_of_data_parallel_on_the_gpu(tmp_path: Path) -> None:
    for ids, copies in (([0], 1), ([0, 0], 2)):
        model = Sizes()
        settings = {"training_mode": "data_parallel", "device": "auto", "device_ids": ids}
        manager = manager_for(tmp_path, batch_size=4, **settings)
        manager.fit(model, points(), optimizer=sgd)
        assert model.seen == [("cuda:0", 4)] * 4
        assert manager.sizes.ranks == copies


@pytest.mark.gpu
def test_device_on_the_gpu(tmp_path: Path) -> None:
    for wanted, kind in (("auto", "cuda"), ("cuda", "cuda"), ("cpu", "cpu")):
        manager = manager_for(tmp_path, training_mode="single", device=wanted)
        manager.fit(model := line(), points(), optimizer=sgd)
        assert model.weight.device.type == kind


def backend_on_gpu(folder: Path, backend: str | None) -> tuple[str, float]:
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ.update(rendezvous)
    manager = manager_for(folder, rank=0, world_size=1, device="cuda", backend=backend)
    try:
        total = manager.placement.sum(torch.ones(1, device=manager.placement.device))
        return manager.placement.backend, float(total)
    finally:
        manager.placement.close()
        for name in rendezvous:
            del os.environ[name]


@pytest.mark.gpu
def test_backend_on_the_gpu(tmp_path: Path) -> None:
    assert run_ranks(1, backend_on_gpu, tmp_path, None) == [("nccl", 1.0)]
    assert run_ranks(1, backend_on_gpu, tmp_path, "gloo") == [("gloo", 1.0)]


@pytest.mark.gpu
@pytest.mark.slow
def test_share_gpu_on_the_gpu(tmp_path: Path) -> None:
    several = torch.cuda.device_count() + 1
    code, said, facts = run_script(tmp_path, device="cuda", world_size=several, share_gpu=True)
    assert code == 0, said
    assert facts[-1]["device"] == "cuda:0" and facts[-1]["backend"] == "gloo"
    code, said, _ = run_script(tmp_path, device="cuda", world_size=several)
    assert code != 0 and "share_gpu=true" in said
