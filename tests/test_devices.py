"""Devices that are not here: mps and xpu by pretended answers of torch, macOS by taking away what
it lacks. Nothing of this has run on such a machine."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import line, manager_for, points, sgd
from torch import nn
from torch.utils.data import TensorDataset

from multi_gpu_training import (
    ConfigError,
    MultiGPUConfig,
    MultiGPUError,
    ShardedStream,
    accelerator,
    print_gpu_info,
)
from multi_gpu_training.cli.train_command import TrainFlags, resolve
from multi_gpu_training.distributed.identity import Identity
from multi_gpu_training.distributed.placement import claimed_identity, place
from multi_gpu_training.torch_internals import DispatchMode


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """machine("mps") has that accelerator and no other."""

    def pretend(*kinds: str) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in kinds)
        monkeypatch.setattr(torch.xpu, "is_available", lambda: "xpu" in kinds)
        monkeypatch.setattr(torch.xpu, "set_device", lambda device: None)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in kinds)

    return pretend


def test_auto_takes_the_accelerator_that_is_there(machine: Any) -> None:
    for kinds, device in (
        (("mps",), "mps"),
        (("xpu",), "xpu:0"),
        ((), "cpu"),
    ):
        machine(*kinds)
        assert str(place(MultiGPUConfig()).device) == device
    machine("xpu")
    assert str(place(MultiGPUConfig(device="xpu", device_ids=[1])).device) == "xpu:1"
    machine("mps")
    assert str(place(MultiGPUConfig(device="cpu")).device) == "cpu"


def test_a_recipe_trains_as_one_rank_where_there_is_one_device(machine: Any) -> None:
    for device in ("auto", "mps"):
        machine("mps")
        flags = TrainFlags("image", None, {"device": device}, {}, [])
        assert resolve(flags)[1].world_size == 1
    machine()
    assert resolve(TrainFlags("image", None, {}, {}, []))[1].world_size == 2


def test_several_ranks_without_a_gpu_for_each_compute_on_the_cpu(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from multi_gpu_training.distributed import placement

    machine("mps")
    joined: list[torch.device] = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(placement, "_join", lambda config, identity, device: joined.append(device))
    assert isinstance(claimed_identity(MultiGPUConfig()), Identity)
    place(MultiGPUConfig())
    assert [str(device) for device in joined] == ["cpu"]
    with pytest.raises(ConfigError, match=r"device=mps trains on one device.*2 ranks"):
        place(MultiGPUConfig(device="mps"))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("mps", "built without MPS: it is for Macs with Apple GPUs; use device=cpu"),
        ("xpu", "torch sees no Intel GPU.*use device=cpu"),
        ("cuda", "torch sees no GPU; use device=cpu"),
    ],
)
def test_a_device_that_is_missing_is_refused_with_what_there_is(
    machine: Any, asked: str, said: str
) -> None:
    machine()
    with pytest.raises(ConfigError, match=said):
        place(MultiGPUConfig(device=asked))


@pytest.mark.parametrize(
    "settings",
    [
        {"world_size": 2},
        {"training_mode": "dp"},
        {"device_ids": [0]},
        {"backend": "nccl"},
        {"step_execution": "graph"},
        {"data_on_gpu": True},
    ],
)
def test_what_only_cuda_can_is_refused_beside_mps(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"device=mps|mps"):
        MultiGPUConfig(device="mps", **settings)


class Doubles(DispatchMode):
    """Notes operations that make a float64 tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(one, torch.Tensor) and one.dtype is torch.float64:
                self.found.add(str(func))
        return result


def test_a_step_makes_no_float64_where_the_device_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU pretends to be such a device: a step of every kind of weight and metric."""
    monkeypatch.setattr(accelerator, "NO_FLOAT64", {"mps", "cpu"})
    labels = TensorDataset(torch.randn(16, 4), torch.randint(3, (16,)))

    def tokens(model: nn.Module, batch: Any) -> Any:
        loss = model(batch[0]).square().mean()
        return loss, 5, {"extra": (loss.detach(), 2)}

    for model, data, how in (
        (line(), points(), {}),
        (nn.Linear(4, 3), labels, {}),
        (line(), points(), {"loss_fn": tokens}),
    ):
        manager = manager_for(tmp_path, fast_defaults=False)
        manager.setup_training(model, data, data, optimizer=sgd, **how)
        with Doubles() as seen:
            for batch in manager.train_loader:
                manager.trainer.train_step(batch)
        assert seen.found == set()
        assert manager.validate_epoch()["loss"] > 0
        manager.finish()
    with pytest.raises(MultiGPUError, match=r"no float64, and 2 tensors.*model\.float\(\)"):
        manager_for(tmp_path).setup_training(line().double(), points(), optimizer=sgd)


def test_the_noise_of_an_accelerator_is_seeded_and_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator()
    for kind in ("mps", "xpu"):
        module = getattr(torch, kind)
        monkeypatch.setattr(module, "get_rng_state", generator.get_state)
        monkeypatch.setattr(module, "set_rng_state", generator.set_state)
        monkeypatch.setattr(module, "manual_seed", generator.manual_seed)
        (ours,) = accelerator.device_generators(torch.device(kind))
        before = ours.get_state()
        ours.manual_seed(3)
        drawn = torch.rand(2, generator=generator)
        ours.manual_seed(3)
        assert torch.equal(drawn, torch.rand(2, generator=generator))
        ours.set_state(before)
        assert torch.equal(generator.get_state(), before)


def test_info_names_the_accelerator(machine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    machine("mps")
    print_gpu_info()
    assert "Apple GPU: one process trains on it (device=mps)" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")
def test_what_spawned_workers_cannot_get_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers are spawned on macOS, and get the dataset pickled."""
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda: "spawn")
    context = multiprocessing.get_context("spawn")
    monkeypatch.setattr(multiprocessing, "Process", context.Process)
    monkeypatch.setattr(torch.multiprocessing, "Process", context.Process)
    stream = ShardedStream(range(4), lambda shard: [shard] * 4, lengths=[4] * 4)
    manager = manager_for(tmp_path, num_workers=1)
    with pytest.raises(MultiGPUError, match=r"num_workers=1: the dataset.*lambda.*num_workers=0"):
        manager.fit(line(), stream, optimizer=sgd)


# macOS

MACOS = """
import os, signal, sys, socket, select, resource, mmap, builtins, ctypes, multiprocessing, pathlib
import importlib, pkgutil, sysconfig

def import_all():
    import multi_gpu_training
    names = [module.name for module in pkgutil.iter_modules(multi_gpu_training.__path__)]
    for name in names:
        # All but __main__ need extras.
        if name not in ("__main__", "dashboard", "federated", "recipes", "serving"):
            module = importlib.import_module(f"multi_gpu_training.{name}")
            inside = getattr(module, "__path__", ())
            for inner in pkgutil.walk_packages(inside, module.__name__ + "."):
                importlib.import_module(inner.name)

# Once as it is, so that the libraries are loaded: they know a real macOS themselves.
import_all()
sysconfig.get_config_vars()
import torch.utils.tensorboard, matplotlib.pyplot
for name in [name for name in sys.modules if name.startswith("multi_gpu_training")]:
    del sys.modules[name]

for module, names in {
    os: "sched_getaffinity posix_fadvise waitid memfd_create eventfd pipe2 getrandom O_DIRECT "
        "O_TMPFILE pidfd_open POSIX_FADV_DONTNEED P_PID P_PIDFD",
    signal: "SIGRTMIN SIGRTMAX SIGPWR SIGSTKFLT sigtimedwait sigwaitinfo",
    socket: "AF_NETLINK SO_PEERCRED SO_MARK SOCK_CLOEXEC SOCK_NONBLOCK AF_PACKET",
    resource: "prlimit",
    mmap: "MADV_HUGEPAGE MADV_DONTFORK MADV_POPULATE_WRITE",
}.items():
    for name in names.split():
        vars(module).pop(name, None)

def missing(function):
    def call(path, *args, **kwargs):
        library = sys._getframe(1).f_globals.get("__name__", "").startswith("psutil")
        if str(path).startswith(("/proc", "/sys", "/dev/shm")) and not library:
            raise FileNotFoundError(2, "no such file", str(path))
        return function(path, *args, **kwargs)
    return call

builtins.open = missing(builtins.open)
os.open, os.stat, os.listdir, os.scandir = map(missing, (os.open, os.stat, os.listdir, os.scandir))
pathlib.Path.open = missing(pathlib.Path.open)
pathlib.Path.exists = (lambda exists: lambda path: not str(path).startswith(("/proc", "/sys"))
                       and exists(path))(pathlib.Path.exists)

class Library:
    def __getattr__(self, name):
        raise AttributeError(f"dlsym(RTLD_DEFAULT, {name}): symbol not found")

ctypes.CDLL = lambda *args, **kwargs: Library()
sys.platform = "darwin"
multiprocessing.set_start_method("spawn", force=True)
"""

IMPORT_ALL = """
import_all()
from multi_gpu_training.distributed.cleanup import die_with_parent
from multi_gpu_training.portability import exit_code, process_state, usable_cores
import subprocess, time
child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
deadline = time.monotonic() + 30
while exit_code(child.pid) is None and time.monotonic() < deadline:
    time.sleep(0.05)
print("child", exit_code(child.pid), exit_code(child.pid), len(usable_cores()) == os.cpu_count())
print("state", process_state(os.getpid()), repr(process_state(2**22 - 1)))
die_with_parent()
from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager
config = MultiGPUConfig(device="cpu", save_dir=sys.argv[1], epochs=2, checkpoint_frequency=1,
                        progress="off", run_name="mac")
x = torch.randn(32, 4)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
def train():
    manager = MultiGPUTrainingManager(config)
    return manager.fit(torch.nn.Linear(4, 1), data).steps
print("steps", train())
config.resume, config.epochs = "auto", 4
print("steps", train())
"""


def test_everything_imports_and_trains_without_what_macos_lacks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MACOS + IMPORT_ALL, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "child 7 7 True",
        "state R ''",
        "steps 2",
        "steps 4",
    ], done.stderr[-3000:]
