"""A run that is asked to end by a signal saves, exits, and goes on to the same bits.

Runs are stopped as real processes; whole ones and the rest of stopped ones train in warm ranks.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from processes import Program
from ranks import CONTEXT, run_ranks
from torch import Tensor, nn

from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager
from multi_gpu_training.checkpoint.integrity import damage
from multi_gpu_training.distributed.control import Boundary, Control
from multi_gpu_training.distributed.placement import place
from multi_gpu_training.training.stopping import Stopped

PATIENCE_S = 60  # for what takes a second on a quiet machine; benchmarks/preemption.py measures


class Slow(torch.utils.data.Dataset[Any]):
    """Samples that take `pause` seconds each; a file says that one was asked for."""

    def __init__(self, samples: int, pause: float = 0.0, asked: Path | None = None) -> None:
        self.inputs = torch.randn(samples, 16, generator=torch.Generator().manual_seed(1))
        self.pause, self.asked = pause, asked

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.asked is not None:
            self.asked.touch()
        time.sleep(self.pause)
        return self.inputs[index], index % 3


def train(
    folder: Path, name: str, pause: float = 0.0, val_pause: float = 0.0, **settings: Any
) -> tuple[int, list[Any]]:
    """Train to the end; steps and the bits of the weights."""
    defaults = {
        "device": "cpu",
        "save_dir": str(folder / "runs"),
        "run_name": name,
        "epochs": 2,
        "global_batch_size": 8,
        "checkpoint_frequency": 3,
        "tensorboard": False,
        "progress": "off",
        "resume": "auto",
    }
    hooks = settings.pop("callbacks", [])
    data = settings.pop("data", None) or Slow(64, pause)
    manager = MultiGPUTrainingManager(MultiGPUConfig(**{**defaults, **settings}))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 3))
    manager.fit(
        model,
        data,
        Slow(32, val_pause, folder / f"{name}-validates"),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-2),
        callbacks=hooks,
    )
    return manager.trainer.step, [p.detach().view(torch.int32).tolist() for p in model.parameters()]


def checkpoints(folder: Path, name: str) -> list[Path]:
    return sorted((folder / "runs" / "custom" / name / "checkpoints").glob("step-*"))


def assert_goes_on_to_the_same_bits(folder: Path, name: str, world: int) -> None:
    newest = checkpoints(folder, name)[-1]
    assert damage(newest) is None
    resumed = run_ranks(world, train, folder, name)
    assert resumed == run_ranks(world, train, folder, f"{name}-whole")


# Agreement


class Reached(Exception):
    pass


def stop_at(signalled: list[int], seed: int) -> int:
    """The boundary at which this rank stops, out of step with the others by chance."""
    placement = place(MultiGPUConfig(device="cpu"))
    control = Control(placement, grace_s=60)
    control.on_stop = lambda: _raise(Reached())
    chance = random.Random(seed * 10 + placement.dp_rank)
    when = random.Random(seed).randrange(1, 30)
    control.listen()
    try:
        for boundary in range(1, 10_000):
            time.sleep(chance.random() * 0.004)
            if boundary % 11 == 0:
                placement.barrier()
            if boundary == when and placement.dp_rank in signalled:
                os.kill(os.getpid(), chance.choice([signal.SIGTERM, signal.SIGUSR1]))
            control.arrive()
    except Reached:
        return control.passed
    finally:
        control.close()
    raise AssertionError("never stopped")


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("signalled", [[0], [2], [0, 1, 2]])
def test_ranks_that_are_apart_stop_at_one_boundary(signalled: list[int]) -> None:
    for seed in range(4):
        assert len(set(run_ranks(3, stop_at, signalled, seed))) == 1


def test_a_boundary_without_a_signal_costs_less_than_a_microsecond() -> None:
    def seconds() -> float:
        boundary, count = Boundary(), range(100_000)
        begun = time.perf_counter()
        for _ in count:
            boundary.passed += 1
            if boundary.held:
                boundary.halt()
        return (time.perf_counter() - begun) / len(count)

    assert min(seconds() for _ in range(5)) < 1e-6


# Loops of one's own


class SignalSelf(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, manager: Any, result: Any) -> None:
        step = result.step
        if step == self.step and manager.placement.dp_rank == manager.placement.dp_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def own_loop(
    folder: Path, name: str, stop: bool, number: signal.Signals = signal.SIGTERM
) -> tuple[Any, int, list[Any]]:
    """Ten steps of three micro-batches; the last rank gets a signal within the fourth."""
    config = MultiGPUConfig(
        device="cpu",
        save_dir=str(folder),
        run_name=name,
        gradient_accumulation_steps=3,
        tensorboard=False,
        progress="off",
        resume="auto",
    )
    manager = MultiGPUTrainingManager(config)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    manager.setup_training(model, torch.utils.data.TensorDataset(torch.ones(9, 4), torch.ones(9)))
    code = None
    try:
        while manager.trainer.step < 10:
            step, rank = manager.trainer.step, manager.placement.dp_rank
            for micro in range(3):
                if stop and step == 3 and micro == 1 and rank == manager.placement.dp_size - 1:
                    os.kill(os.getpid(), number)
                inputs = torch.full((2, 4), 1.0 + step + micro / 3 + rank / 5)
                manager.trainer.train_step([inputs, inputs.sum(1, keepdim=True)])
                time.sleep(0.05 if stop else 0)
    except Stopped as stopped:
        code = stopped.code
    if code is None:
        manager.finish()
    else:
        manager.control.close()
    return code, manager.trainer.step, [p.detach().tolist() for p in model.parameters()]


@pytest.mark.parametrize("world", [1, 2])
def test_a_loop_of_ones_own_stops_between_steps_and_goes_on(tmp_path: Path, world: int) -> None:
    stopped = run_ranks(world, own_loop, tmp_path, "stopped", True)
    assert {code for code, _, _ in stopped} == {143}
    (step,) = {step for _, step, _ in stopped}
    assert 4 <= step < 10
    resumed = run_ranks(world, own_loop, tmp_path, "stopped", False)
    assert resumed == run_ranks(world, own_loop, tmp_path, "whole", False)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_a_lost_terminal_and_sigquit_save_too(tmp_path: Path, number: signal.Signals) -> None:
    stopped = run_ranks(1, own_loop, tmp_path, "stopped", True, number)
    assert stopped[0][0] == 143
    assert list(tmp_path.glob("custom/stopped/checkpoints/step-*")), "nothing was saved"
    resumed = run_ranks(1, own_loop, tmp_path, "stopped", False)
    assert resumed == run_ranks(1, own_loop, tmp_path, "whole", False)


def stays_ignored(folder: Path) -> tuple[int | None, int]:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        code, step, _ = own_loop(folder, "nohup", True, signal.SIGHUP)
        return code, step
    finally:
        signal.signal(signal.SIGHUP, before)


def test_sighup_stays_ignored_under_nohup(tmp_path: Path) -> None:
    (code, _) = run_ranks(1, stays_ignored, tmp_path)[0]
    assert code is None


# Real processes


class Ranks:
    """`work` on each of some ranks, as processes that may end as they like."""

    def __init__(self, world: int, folder: Path, work: Callable[[], Any]) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.processes = [
            CONTEXT.Process(target=_as_rank, args=(rank, world, folder, work), daemon=False)
            for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    @property
    def err(self) -> str:
        return "".join(p.read_text() for p in sorted(self.folder.glob("err-*.txt")))

    def when(self, happened: Callable[[], Any]) -> Ranks:
        deadline = time.monotonic() + PATIENCE_S
        while not happened():
            assert time.monotonic() < deadline, f"did not happen\n{self.err}"
            assert all(p.is_alive() for p in self.processes), f"ended too early\n{self.err}"
            time.sleep(0.02)
        return self

    def send(self, number: signal.Signals, rank: int = 0) -> float:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)
        return time.monotonic()

    def codes(self) -> list[int | None]:
        deadline = time.monotonic() + PATIENCE_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _as_rank(rank: int, world: int, folder: Path, work: Callable[[], Any]) -> None:
    file = os.open(folder / f"err-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run in the background
    torch.set_num_threads(1)
    if world > 1:
        place_of = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
        os.environ |= {name: str(value) for name, value in place_of.items()}
        os.environ |= {"LOCAL_WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo"}
        store = f"file://{folder}/store"
        torch.distributed.init_process_group("gloo", store, rank=rank, world_size=world)
    work()


def test_one_rank_is_told_and_all_leave_a_wait_in_the_validation(tmp_path: Path) -> None:
    """With a worker that will not have its next sample for an hour."""
    work = functools.partial(train, tmp_path, "it", val_pause=3600, num_workers=1)
    with Ranks(2, tmp_path, work) as ranks:
        ranks.when((tmp_path / "it-validates").exists)
        time.sleep(random.uniform(0.0, 0.5))
        ranks.send(signal.SIGUSR1, rank=1)
        assert ranks.codes() == [143, 143], ranks.err
        assert "SIGUSR1: saved step 8" in ranks.err and "Traceback" not in ranks.err
    assert_goes_on_to_the_same_bits(tmp_path, "it", 2)


class Sleep(Callback):
    """For an hour, after a checkpoint is on the disk."""

    def on_step_end(self, manager: Any, result: Any) -> None:
        step = result.step
        if step == 5:
            manager.fault_tolerance.wait()
            Path(manager.config.save_dir, "sleeps").touch()
            time.sleep(3600)


def sleeper(folder: Path, grace_s: float) -> Ranks:
    work = functools.partial(train, folder, "it", grace_s=grace_s, callbacks=[Sleep()])
    return Ranks(1, folder, work)


def test_ctrl_c_twice_stops_now_and_grace_s_bounds_the_wait(tmp_path: Path) -> None:
    with sleeper(tmp_path / "one", 3600) as twice, sleeper(tmp_path / "two", 1) as late:
        late.when((tmp_path / "two" / "runs" / "sleeps").exists).send(signal.SIGTERM)
        twice.when((tmp_path / "one" / "runs" / "sleeps").exists).send(signal.SIGINT)
        twice.when(lambda: "once more stops now" in twice.err)
        time.sleep(0.2)
        twice.send(signal.SIGINT)
        assert twice.codes() == [130], twice.err
        assert late.codes() == [143], late.err
        assert "not done within grace_s=1 s" in late.err
    for folder in (tmp_path / "one", tmp_path / "two"):
        (kept,) = checkpoints(folder, "it")
        assert kept.name == "step-00000003" and damage(kept) is None


def not_yet(folder: Path) -> None:
    MultiGPUTrainingManager(MultiGPUConfig(device="cpu", save_dir=str(folder)))
    (folder / "ready").touch()
    time.sleep(3600)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_the_first_step_ends_the_run(
    tmp_path: Path, number: signal.Signals
) -> None:
    with Ranks(1, tmp_path, functools.partial(not_yet, tmp_path)) as ranks:
        ranks.when((tmp_path / "ready").exists).send(number)
        # A shell shows 143 for either.
        assert ranks.codes() in ([143], [-signal.SIGTERM]), ranks.err


class EndsTheWait(Slow):
    """A signal comes while the loop waits for a sample of the fifth step."""

    asked_for = 0

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.asked_for += 1
        if self.asked_for == 36:
            signal.raise_signal(signal.SIGTERM)
            time.sleep(PATIENCE_S)
        return super().__getitem__(index)


def test_a_signal_while_a_batch_is_awaited_loses_no_place_in_the_data(tmp_path: Path) -> None:
    whole = train(tmp_path, "whole")
    with pytest.raises(SystemExit):
        train(tmp_path, "it", data=EndsTheWait(64))
    assert checkpoints(tmp_path, "it")[-1].name == "step-00000004"
    assert train(tmp_path, "it") == whole


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from faults.test_signals import train
train(Path({folder!r}), {name!r}, {pause}, num_workers={workers})
"""


def start(folder: Path, launcher: tuple[object, ...], name: str, pause: float) -> Program:
    tests = str(Path(__file__).parent.parent)
    text = SCRIPT.format(paths=[tests], folder=str(folder), name=name, pause=pause, workers=1)
    (folder / f"{name}.py").write_text(text)
    return Program("-m", *launcher, f"{name}.py", cwd=folder)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sigterm_to_a_launcher_saves_and_the_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """To ours, and to PyTorch's own, which ends with a code of its own."""
    ours = ("multi_gpu_training", "run", "--num-gpus", 2)
    stock = ("torch.distributed.run", "--nproc-per-node", 2, "--standalone")
    with (
        start(tmp_path, ours, "ours", 0.2) as one,  # long enough to be met by the signal
        start(tmp_path, stock, "stock", 0.2) as other,
    ):
        for name, program in (("ours", one), ("stock", other)):
            program.when(lambda name=name: checkpoints(tmp_path, name), 2 * PATIENCE_S)
            time.sleep(random.uniform(0.0, 0.3))
            program.send(signal.SIGTERM)
        assert one.end_of_run(PATIENCE_S) == 143, one
        assert other.end_of_run(PATIENCE_S) == 1, other
        for program in (one, other):
            assert "SIGTERM: saved step" in program.err, program
            assert program.nothing_left(within_s=10), program.alive()
        assert "Traceback" not in one.err
    for name in ("ours", "stock"):
        assert_goes_on_to_the_same_bits(tmp_path, name, 2)


def test_a_rank_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    """A launcher that ends the others with SIGTERM must not wait for grace_s."""
    work = functools.partial(train, tmp_path, "it", pause=0.05)
    with Ranks(2, tmp_path, work) as ranks:
        ranks.when(lambda: checkpoints(tmp_path, "it"))
        ranks.send(signal.SIGKILL, rank=1)
        psutil.wait_procs([psutil.Process(ranks.processes[1].pid)], timeout=1)
        sent = ranks.send(signal.SIGTERM)
        ranks.processes[0].join(PATIENCE_S)
        assert ranks.processes[0].exitcode not in (0, None), ranks.err
        assert time.monotonic() - sent < 25
