from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from processes import quickly
from ranks import end_pools

os.environ.setdefault("OMP_NUM_THREADS", "1")


def avoid_forbidden_instructions() -> None:
    """Some sandboxes announce Intel's AMX and then forbid it: oneDNN's first bf16 matrix product
    would end pytest with SIGILL. A child process tries it, where AMX is announced at all."""
    if "amx_tile" not in Path("/proc/cpuinfo").read_text() or "ONEDNN_MAX_CPU_ISA" in os.environ:
        return
    if "PYTEST_XDIST_WORKER" in os.environ:  # whoever started this worker has tried it
        return
    product = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"
    if subprocess.run([sys.executable, "-c", product]).returncode == -signal.SIGILL:
        print("AMX is forbidden on this machine: oneDNN is told to do without")
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"


avoid_forbidden_instructions()
# A shell lets what it starts with & ignore the first two, nohup the last.
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes are numbered, not shown: packed ones hold the time, and workers must agree on names."""
    return argname if isinstance(val, bytes) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    end_pools()
    left = [
        child
        for child in psutil.Process().children(recursive=True)
        if child.is_running()
        and child.status() != psutil.STATUS_ZOMBIE
        and "forkserver" not in " ".join(child.cmdline())
        and "resource_tracker" not in " ".join(child.cmdline())
        and "compile_worker" not in " ".join(child.cmdline())  # torch.compile's own pool
    ]
    assert not left, f"processes left behind: {left}"


@pytest.fixture(scope="session")
def rank_servers() -> Iterator[Any]:
    """Processes that fork the ranks of `mgt verify`, for all tests: seconds less for each."""
    from multi_gpu_training.planning.verify.rank_server import RankServers

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", quickly()["PYTHONPATH"])
        servers = RankServers(3)
    with servers:
        yield servers


@pytest.fixture(autouse=True)
def no_variable_is_leaked() -> Iterator[None]:
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = {key for key in after.keys() | before.keys() if after.get(key) != before.get(key)}
    changed.discard("PYTEST_CURRENT_TEST")
    for key in changed:
        os.environ.pop(key, None)
        if key in before:
            os.environ[key] = before[key]
    # torch sets these by itself when first used.
    changed -= {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "KINETO_LOG_LEVEL"}
    changed.discard("TRITON_PTXAS_PATH")
    # and scikit-learn these.
    changed -= {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
    assert not changed, f"environment variables changed by the test: {sorted(changed)}"
