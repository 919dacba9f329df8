"""Runs on a real Slurm of three nodes on this machine: same result, and they resume by themselves.

Further faults, at random instants: benchmarks/slurm_faults.py.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, why_not
from slurm_run import SlurmRun, local_run, same_order, worst

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]
EPOCHS, PAUSE_S = 30, 0.1  # 5 steps each


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no Slurm can be started here: {reason}")
    with SlurmCluster(gpus=2) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def whole(slurm: SlurmCluster) -> None:
    slurm.mend()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> SlurmRun:
    """Four ranks on this machine, without Slurm."""
    return local_run(tmp_path_factory.mktemp("reference") / "run", EPOCHS)


def test_two_nodes_compute_what_one_machine_computes(
    slurm: SlurmCluster, reference: SlurmRun, tmp_path: Path
) -> None:
    with SlurmRun(slurm, tmp_path, EPOCHS, 0.0) as run:
        run.submit("--nodes", "2", "--time", "30:00")
        assert run.finish() == 0, run.said()
        assert "4 ranks" in run.said()  # the log was followed
        assert worst(run.weights(), reference.weights()) < 1e-12
        assert same_order(run, reference)


def test_a_run_survives_requeue_signal_and_a_lost_node_bit_for_bit(
    slurm: SlurmCluster, reference: SlurmRun, tmp_path: Path
) -> None:
    with SlurmRun(slurm, tmp_path, EPOCHS, PAUSE_S) as run:
        run.submit("--nodes", "2")
        run.after(0, 10)
        slurm.run("scontrol", "requeue", run.job)
        run.after(1, 20)
        slurm.run("scancel", "--signal=USR1", run.job)
        run.after(2, 30)
        lost = run.allocated()[-1]
        slurm.kill_node(lost)
        run.after(3)
        assert lost not in run.allocated()  # the spare has taken its place
        assert run.finish() == 0, run.said()
        assert worst(run.weights(), reference.weights()) == 0.0
        assert same_order(run, reference)


def test_without_a_spare_one_node_goes_on_with_the_same_samples(
    slurm: SlurmCluster, reference: SlurmRun, tmp_path: Path
) -> None:
    slurm.run("scontrol", "update", "nodename=n3", "state=drain", "reason=test")
    with SlurmRun(slurm, tmp_path, EPOCHS, PAUSE_S) as run:
        run.submit("--nodes", "1:2")
        run.after(0, 10)
        assert run.allocated() == [1, 2]
        slurm.kill_node(2)
        run.after(1)
        assert run.finish() == 0, run.said()
        assert {line["world"] for line in run.lines() if line["attempt"] >= 1000} == {2}
        assert worst(run.weights(), reference.weights()) < 1e-12
        assert same_order(run, reference)


def test_ranks_that_slurm_lost_sight_of_stop_before_the_new_attempt_trains(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    with SlurmRun(slurm, tmp_path, EPOCHS * 10, PAUSE_S) as run:
        run.submit("--nodes", "1")
        run.after(0, 10)
        lost = run.allocated()[0]
        slurm.orphan(lost)  # the batch script and the ranks run on
        began = run.after(1)
        late = [x for x in run.lines() if x["attempt"] < 1000 and x["time"] > began]
        assert not late and run.newest() > 10
        assert run.allocated() != [lost]
        assert run.finish() == 0, run.said()


def test_a_node_on_which_nothing_starts_is_left_out_of_the_next_attempt(
    slurm: SlurmCluster, reference: SlurmRun, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$(hostname)" = n2 ] && exit 1\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "setup.sh").write_text(f"export MGT_PYTHON={python}\n")
    with SlurmRun(slurm, tmp_path / "run", EPOCHS, 0.0) as run:
        flags = ["--recovery-timeout", "20", "--setup-file", str(tmp_path / "setup.sh")]
        run.submit("--nodes", "2", *flags)
        assert run.finish() == 0, run.said()
        assert "n2 cannot run a process" in run.said()
        assert slurm.job(run.job)["ExcNodeList"] == "n2"
        assert worst(run.weights(), reference.weights()) == 0.0


def test_a_preempted_run_saves_and_comes_back(
    slurm: SlurmCluster, reference: SlurmRun, tmp_path: Path
) -> None:
    with SlurmRun(slurm, tmp_path, EPOCHS, PAUSE_S) as run:
        run.submit("--nodes", "2", "--partition", "low", "--time", "30:00")
        run.after(0, 10)
        slurm.run("sbatch", "-p", "main", "-N3", "--exclusive", "-o", "/dev/null", "--wrap", "true")
        run.after(1)
        assert run.finish() == 0, run.said()
        assert "SIGTERM: saved step" in run.said()
        assert worst(run.weights(), reference.weights()) == 0.0


def test_nodes_of_two_kinds_and_gpus_bound_to_tasks_train_together(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    with SlurmRun(slurm, tmp_path / "het", 4, 0.0) as run:
        run.submit("--nodes", "1", "--gpus-per-node", "1", "--het", "nodes=1,gpus-per-node=2")
        assert run.finish() == 0, run.said()
        assert {line["world"] for line in run.lines()} == {3}
    with SlurmRun(slurm, tmp_path / "bound", 4, 0.0) as run:
        run.submit("--nodes", "2", "--gpus-per-node", "2", "--gpus-per-task", "1")
        assert run.finish() == 0, run.said()
        assert {line["world"] for line in run.lines()} == {4}


def test_ctrl_c_cancels_the_job_and_a_closed_terminal_does_not(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    with SlurmRun(slurm, tmp_path / "one", EPOCHS * 10, PAUSE_S) as run:
        run.submit("--nodes", "1")
        run.after(0, 2)
        run.send(signal.SIGHUP)
        run.when(lambda: run.code is not None, 60, "the end of following")
        assert slurm.job(run.job)["JobState"] == "RUNNING"
        assert "continues without this terminal" in run.said()
    with SlurmRun(slurm, tmp_path / "two", EPOCHS * 10, PAUSE_S) as run:
        run.submit("--nodes", "1")
        run.after(0, 2)
        run.send(signal.SIGINT)
        run.when(lambda: run.code is not None, 120, "the end of following")
        assert run.code == 130
        assert slurm.job(run.job)["JobState"] in ("CANCELLED", "COMPLETING")
        assert "SIGTERM: saved step" in run.said()


def test_the_token_is_seen_by_nobody_else(slurm: SlurmCluster, tmp_path: Path) -> None:
    with SlurmRun(slurm, tmp_path, EPOCHS * 10, PAUSE_S) as run:
        run.submit("--nodes", "2")
        run.after(0, 2)
        pids = [pid for node in (1, 2, 3) for pid in slurm.pids(node)]
        environments = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in pids]
        tokens = {
            word.partition(b"=")[2]
            for words in environments
            for word in words
            if word.startswith(b"MGT_CLUSTER_TOKEN=")
        }
        assert len(tokens) == 1 and len(token := tokens.pop()) == 64
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids]
        assert not any(token in line for line in lines)
        for folder in (tmp_path, slurm.folder):
            for path in folder.rglob("*"):
                if path.is_file() and path.stat().st_mode & 0o077 and os.access(path, os.R_OK):
                    assert token not in path.read_bytes(), path
