"""The engine for Ray: what it says before anything runs, and runs on a cluster of raylets."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import Program, Said, mgt_here
from ray_nodes import SOURCE, RayRun, add_node, quick_nodes, ray_nodes

from multi_gpu_training.launch.ray_cluster.actor_ranks import ActorRanks
from multi_gpu_training.launch.ray_cluster.rank_actor import RankLook, Site
from multi_gpu_training.launch.ray_cluster.ray_engine import ranks_that_fit

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: pip install -c constraints.txt -e '.[ray]'",
)
PATIENCE_S = 300


@pytest.fixture
def mgt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Any]:
    """`mgt run ... train.py`, in this process, without Ray."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    Path("train.py").touch()

    def call(*words: object) -> Said:
        return mgt_here(monkeypatch, capsys, "run", *words, "train.py")

    return call


def test_a_run_on_ray_without_the_extra_names_it(mgt: Any) -> None:
    said = mgt("--engine", "ray", "--nnodes", 2)
    assert said.code == 2
    assert "pip install 'multi-gpu-training[ray]'" in said.err


def test_a_check_of_an_engine_names_what_it_lacks(
    mgt: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, code, text in (
        (("ray", "--nnodes", 2), 1, "pip install 'multi-gpu-training[ray]'"),
        (("elastic",), 2, "--engine elastic needs --nnodes N"),
        (("local", "--nnodes", 2, "--master-addr", "10.0.0.1"), 2, "is for one machine"),
        (("lokal",), 2, "use one of torchrun, elastic, local"),
    ):
        said = mgt_here(monkeypatch, capsys, "check", "--engine", *words)
        assert said.code == code, said
        assert text in " ".join((said.out + said.err).split()), said


def test_a_wrong_address_is_told_at_once_with_the_right_form(mgt: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for address, remedy in {
        "10.0.0.1": "use auto, or HOST:PORT such as 10.0.0.1:6379",
        "head:70000": "use auto, or HOST:PORT such as 10.0.0.1:6379",
        "ray://head:10001": "ray job submit",
        f"127.0.0.1:{port}": "nothing answers there (",
    }.items():
        said = mgt("--engine", "ray", "--ray-address", address)
        assert said.code in (1, 2) and "--ray-address" in said.err and address in said.err, said
        assert remedy in said.err and "Traceback" not in said.err, said


def test_options_of_ray_are_checked_together_and_refused_by_other_engines(mgt: Any) -> None:
    said = mgt("--engine", "ray", "--ray-options", "cpus_per_rank=two,working_dir=none,shm=1")
    assert said.code == 2
    assert "'cpus_per_rank=two': use" in said.err and "'shm=1': use" in said.err
    assert "working_dir=none'" not in said.err
    said = mgt("--ray-address", "auto")
    assert said.code == 2 and "--ray-address does not belong to the engine" in said.err


@pytest.mark.parametrize(
    ("wanted", "rank", "ranks"),
    [
        (1, {"CPU": 1, "GPU": 1}, 8),
        (2, {"CPU": 1, "GPU": 1}, 4),  # the smaller of the two
        (3, {"CPU": 1, "GPU": 1}, 4),  # a third may come later; it needs as many
        (2, {"CPU": 20, "GPU": 1}, 3),
        (2, {"CPU": 2}, 32),
        (1, {"CPU": 200}, 0),
    ],
)
def test_without_a_number_a_node_gets_as_many_ranks_as_the_clusters_nodes_have_room_for(
    wanted: int, rank: dict[str, float], ranks: int
) -> None:
    head, small, large = {"CPU": 4.0}, {"CPU": 64.0, "GPU": 4.0}, {"CPU": 128.0, "GPU": 8.0}
    assert ranks_that_fit([head, small, large], wanted, rank) == ranks


class Answers:
    """A Ray whose one actor gives these answers, one after another; errors are raised."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        kinds = ("RayError", "RayActorError", "ObjectLostError", "GetTimeoutError")
        self.exceptions = types.SimpleNamespace(
            RayError=(base := type("RayError", (Exception,), {})),
            **{kind: type(kind, (base,), {}) for kind in (*kinds[1:], "ActorDiedError")},
        )
        self.look = self.end = self.send = self

    def remote(self, *_: object) -> object:
        return object()

    def wait(self, calls: list[object], **_: object) -> tuple[list[object], list[object]]:
        return calls, []

    def get(self, _: object, timeout: float | None = None) -> Any:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, str):
            raise getattr(self.exceptions, answer)
        return answer

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": "n", "Alive": False}]

    def kill(self, _: object) -> None:
        pass


def ranks_of(
    ray: Answers, monkeypatch: pytest.MonkeyPatch, folder: Path, lease_s: float
) -> ActorRanks:
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", ray.exceptions)
    monkeypatch.setattr("multi_gpu_training.launch.ray_cluster.actor_ranks.LEASE_S", lease_s)
    return ActorRanks([ray], [Site("n", "10.0.0.2", "host", (), True, "", {}, ())], folder)


@pytest.mark.parametrize("lost", ["ObjectLostError", "GetTimeoutError", "RayActorError"])
def test_an_answer_that_is_lost_with_its_node_is_not_the_end_of_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lost: str
) -> None:
    look = RankLook(None, "S", b"", b"", b"", b"", False, {})
    ranks = ranks_of(Answers(look, lost, look, lost), monkeypatch, tmp_path, 0.5)
    assert [ranks.codes()[0] for _ in range(3)] == [None] * 3  # it may only be out of reach
    deadline = time.monotonic() + 30
    while ranks.codes()[0] is None:
        assert time.monotonic() < deadline
    assert ranks.lost == {0: True}


def test_ranks_out_of_reach_count_as_running_until_their_lease_is_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ranks = ranks_of(Answers("ObjectLostError"), monkeypatch, tmp_path, 1.0)
    began = time.monotonic()
    ranks.end(signal.SIGTERM)
    assert time.monotonic() - began >= 1.0 and ranks.lost == {0: True}


# On a real cluster


@pytest.fixture(scope="module")
def quick() -> None:
    """Ray's settings for these tests, which it reads from the environment when it is imported."""
    quick_nodes()
    importlib.import_module("ray.cluster_utils")


@pytest.fixture(scope="module")
def cluster(quick: None) -> Iterator[Any]:
    """Two raylets with room for two ranks each."""
    with ray_nodes(2, 2) as found:
        yield found


def apart(found: Any, expected: Any) -> float:
    if isinstance(expected, list):
        return max(apart(a, b) for a, b in zip(found, expected, strict=True))
    return abs(float(found) - float(expected))


@pytest.mark.engines
@needs_ray
@pytest.mark.timeout(1800)
def test_ranks_on_ray_compute_what_local_ones_do_and_survive_a_lost_node_and_a_killed_actor(
    cluster: Any, tmp_path: Path
) -> None:
    (tmp_path / "hurry").touch()
    local = RayRun(tmp_path, "local", 80)
    with local.start("--num-gpus", 4) as program:
        assert program.end_of_run(PATIENCE_S) == 0, program
    (tmp_path / "hurry").unlink()
    run = RayRun(tmp_path, "ray", 80, pause=0.5)
    flags = ("--engine", "ray", "--ray-address", cluster.address, "--num-gpus", 2)
    flags += ("--nnodes", "1:2", "--max-restarts", 9)
    with run.start(*flags) as program:
        # Half of the ranks die with their node; the rest go on with the same batches.
        program.when(lambda: run.reached(6), PATIENCE_S)
        assert {line["world"] for line in run.steps} == {4}
        node = min(cluster.worker_nodes, key=lambda n: n.unique_id)
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        ours = program.alive()
        mine = [p for p in raylet.children(recursive=True) if p in ours]
        cluster.worker_nodes.discard(node)
        raylet.kill()
        assert mine and not psutil.wait_procs(mine, timeout=10)[1], "ranks outlive their raylet"
        program.when(lambda: run.reached(8, attempt=1), PATIENCE_S)
        assert run.steps[-1]["world"] == 2
        assert "the Ray node was lost" in program.err
        # A node that comes back takes part again.
        add_node(cluster, 2)
        program.when(lambda: run.reached(9, attempt=2), PATIENCE_S)
        assert run.steps[-1]["world"] == 4
        # An actor that is killed takes its rank with it; all start again.
        rank = psutil.Process(run.steps[-1]["pid"])
        rank.parent().kill()
        program.when(lambda: run.reached(10, attempt=3), PATIENCE_S)
        assert "the Ray actor was killed" in program.err
        (tmp_path / "hurry").touch()
        assert program.end_of_run(PATIENCE_S) == 0, program
        assert "trained to the end" in program.out
        assert program.nothing_left(10)
    assert run.samples() == local.samples()
    assert max(apart(run.weights[k], v) for k, v in local.weights.items()) < 1e-12
    assert not list(tmp_path.glob(".mgt-ray-*"))  # by which the driver tells who shares its disk


@pytest.mark.engines
@needs_ray
@pytest.mark.timeout(1200)
def test_a_check_of_ray_runs_on_its_nodes(cluster: Any, tmp_path: Path) -> None:
    words = ("check", "--engine", "ray", "--ray-address", cluster.address, "--nnodes", 2)
    words += ("--device", "cpu", "--timeout", 240)
    env = {"PYTHONPATH": SOURCE}
    with Program("-m", "multi_gpu_training", *words, cwd=tmp_path, env=env) as program:
        assert program.end_of_run(PATIENCE_S * 2) == 0, program
    assert "2 ranks on each node need 2 CPU" in " ".join(program.out.split())
    assert "4 ranks" in program.out  # of the check on the nodes


@pytest.mark.engines
@needs_ray
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("quick")
def test_a_run_inside_a_ray_job_ends_well_and_takes_its_ranks_from_the_cluster(
    tmp_path: Path,
) -> None:
    """On one raylet: several on one machine share, and delete, each other's working folders."""
    from ray.cluster_utils import Cluster

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "job").mkdir()
    run = RayRun(tmp_path / "job", "job", 3)
    script = tmp_path / "job" / "train.py"
    kept = tmp_path / "kept"
    kept.mkdir()
    script.write_text(script.read_text().replace('save_dir="runs"', f'save_dir="{kept}"'))
    script.write_text(script.read_text().replace('Path(f"weights', f'Path(f"{kept}/weights'))
    variables = {"PYTHONPATH": SOURCE, "MGT_TEST_NAME": "job"}
    cluster = Cluster()
    try:
        cluster.add_node(
            num_cpus=2,
            object_store_memory=80 * 2**20,
            include_dashboard=True,
            dashboard_port=port,
        )
        done = subprocess.run(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "job", "submit"),
                *("--address", f"http://127.0.0.1:{port}", "--working-dir", str(script.parent)),
                *("--runtime-env-json", json.dumps({"env_vars": variables}), "--"),
                *(sys.executable, "-m", "multi_gpu_training", "run", "--engine", "ray"),
                *("train.py", run.settings),
            ],
            capture_output=True,
            text=True,
            timeout=900,
        )
    finally:
        cluster.shutdown()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks on each Ray node" in done.stdout and "trained to the end" in done.stdout
    assert (kept / "weights-job.json").exists()


@pytest.mark.engines
@needs_ray
@pytest.mark.timeout(1200)
def test_a_signal_saves_a_killed_driver_leaves_nothing_and_an_error_has_its_exit_code(
    cluster: Any, tmp_path: Path
) -> None:
    flags = ("--engine", "ray", "--ray-address", cluster.address, "--num-gpus", 2)
    run = RayRun(tmp_path, "ray", 100, pause=0.3)
    with run.start(*flags) as program:
        program.when(lambda: run.reached(2), PATIENCE_S)
        rank = next(p for p in program.alive() if p.pid == run.steps[-1]["pid"])
        shown = " ".join(word for p in program.alive() for word in p.cmdline())
        assert rank.environ()["MGT_CLUSTER_TOKEN"] not in shown
        program.send(signal.SIGTERM)
        assert program.end_of_run(PATIENCE_S) == 143, program
        assert "saved step" in program.out + program.err
        assert program.nothing_left(10)
    before = max(line["step"] for line in run.steps)
    with run.start(*flags) as program:
        program.when(lambda: run.reached(before + 2), PATIENCE_S)
        os.kill(program.pid, signal.SIGKILL)
        assert program.nothing_left(30)
    steps = [line["step"] for line in run.steps if line["rank"] == 0]
    assert steps == sorted(set(steps)), "it resumed where it had saved"
    broken = RayRun(tmp_path, "broken", 1)
    (tmp_path / "train.py").write_text("import sys; print('so far'); sys.exit(7)")
    with broken.start(*flags) as program:
        assert program.end_of_run(PATIENCE_S) == 7, program
        assert "so far" in program.out and "exited with 7" in program.err
        assert program.nothing_left(10)
