"""`mgt check` with really broken things: each is named with its remedy, none hangs for long."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from processes import Program

from multi_gpu_training.planning.check import disk, network_check, rank_trial
from multi_gpu_training.planning.check.check_report import CheckReport, Finding, Level
from multi_gpu_training.planning.check.checkup import Checkup
from multi_gpu_training.planning.check.registry import CheckOptions
from multi_gpu_training.planning.check.topology import MeetingPoint, Team, free_port
from multi_gpu_training.planning.check.watched_process import Watched, watch

GRACE_S = 60  # for a busy machine; what counts is that each ends by itself


def fails(findings: list[Finding]) -> dict[str, Finding]:
    found = {one.topic: one for one in findings if one.level is Level.FAIL}
    assert all(one.remedy for one in found.values())
    return found


@contextmanager
def listener(talk: bytes | None = None) -> Iterator[int]:
    """A program that holds a port, and answers whoever comes with `talk`."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        guests = []

        def serve() -> None:
            while True:
                try:
                    guest, _ = server.accept()
                    guests.append(guest)
                    if talk is not None:
                        guest.sendall(talk)
                except OSError:
                    return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    thread.join(5)
    for guest in guests:
        guest.close()


def own_mounts(script: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script with file systems of its own, which end with it."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"]).returncode:
        pytest.skip("cannot mount file systems here (needs root)")
    return subprocess.run(
        ["unshare", "-m", "sh", "-e", "-c", script],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=4 * GRACE_S,
    )


def test_everything_broken_at_once_is_named_line_by_line(tmp_path: Path) -> None:
    script = f"""
        mkdir small
        mount -t tmpfs -o size=16m tmpfs /dev/shm
        mount -t tmpfs -o size=1m tmpfs small
        head -c 2m /dev/zero > small/filler || true
        ulimit -n 64
        exec {sys.executable} -m multi_gpu_training check --json --save-dir small/runs
    """
    with listener() as port:
        ran = own_mounts(
            script,
            tmp_path,
            WORLD_SIZE="2",
            MASTER_ADDR="nowhere.invalid",
            MASTER_PORT=str(port),
            CUDA_VISIBLE_DEVICES="97",
            OMP_NUM_THREADS="many",
        )
    assert ran.returncode == 1, ran.stderr
    report = json.loads(ran.stdout)
    found = fails([Finding.from_plain(raw) for raw in report["findings"]])
    assert not report["ready"]
    assert "16 MB free of 16 MB" in found["/dev/shm"].text
    assert "--shm-size" in found["/dev/shm"].remedy
    assert "64 open files" in found["open files"].text
    assert "OMP_NUM_THREADS=many" in found["OMP threads"].text
    assert "small/runs: it is full, 0 MB free" in found["disk"].text
    assert "--save-dir" in found["disk"].remedy
    assert "WORLD_SIZE=2 but no RANK" in found["launcher"].text
    assert "nowhere.invalid does not resolve" in found["MASTER_ADDR"].text
    assert f"{port} is taken by process {os.getpid()}" in found["port"].text
    assert "CUDA_VISIBLE_DEVICES=97" in found["visible GPUs"].text
    # All the same the ranks on this machine were tried, and they are well.
    assert {raw["topic"] for raw in report["findings"] if raw["level"] == "pass"} >= {
        "all-reduce",
        "training step",
    }


def test_a_read_only_run_folder_is_named(tmp_path: Path) -> None:
    script = f"""
        mkdir fixed
        mount -t tmpfs -o ro tmpfs fixed
        {sys.executable} - <<'END'
from pathlib import Path
from multi_gpu_training.planning.check import disk
found = disk.judge(disk.measure(Path("fixed/runs"), 30), Path("fixed/runs"), 30)
print(found.level, found.text, found.remedy)
END
    """
    said = own_mounts(script, tmp_path).stdout
    assert said.startswith("fail fixed/runs: it is read-only: Read-only file system"), said
    assert "--save-dir" in said


def test_a_file_where_the_run_folder_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("no folder")
    place = tmp_path / "runs" / "mine"
    found = fails([disk.judge(disk.measure(place, GRACE_S), place, GRACE_S)])
    assert "Not a directory" in found["disk"].text
    good = tmp_path / "other" / "runs"
    line = disk.judge(disk.measure(good, GRACE_S), good, GRACE_S)
    assert line.facts["bytes_per_s"] > 0
    assert not good.parent.exists()  # no trace is left


def test_an_address_of_another_machine_is_no_place_for_rank_0() -> None:
    # 192.0.2.0/24 is for documentation: no machine has it.
    there = MeetingPoint("192.0.2.1", 29500, here=True)
    found = fails(list(network_check.judge(there, {})))
    assert "not this machine" in found["MASTER_ADDR"].text


def test_what_hangs_is_killed_at_its_limit() -> None:
    program = Watched("http.server", {})  # serves for ever and says nothing that we understand
    program.lines.append({"stage": "copy"})
    begun = time.monotonic()
    try:
        watch([program], 0.2)
        assert program.timed_out
    finally:
        program.kill()
    assert time.monotonic() - begun < GRACE_S
    assert program.process.returncode == -9


def team(first: int, port: int, limit_s: float) -> Team:
    return Team(first, 1, 2, 2, "127.0.0.1", port, ["cpu"], "gloo", limit_s)


def tried(ours: Team) -> dict[str, Finding]:
    members = rank_trial.try_out(ours, {})
    rank_trial.dismiss(members)
    return fails(list(rank_trial.judge(ours, members)))


def test_a_program_that_speaks_nonsense_is_told_from_a_rank() -> None:
    with listener(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        (found,) = tried(team(1, port, 5.0)).values()
    assert f"a program answers at 127.0.0.1:{port}, but not as rank 0" in found.text
    assert "MASTER_PORT" in found.remedy


def test_a_peer_that_comes_and_hangs_is_named() -> None:
    """Rank 1 says hello and then nothing: rank 0 waits for it when they join, not for ever."""
    from torch.distributed import PrefixStore, TCPStore

    ours = team(0, free_port(), 4.0)
    kept: list[Any] = []

    def peer() -> None:
        patience = timedelta(seconds=GRACE_S)
        store = TCPStore("127.0.0.1", ours.port, is_master=False, timeout=patience)
        kept.append(store)
        hello = {"host": "node-2", "pid": 1, "backend": "gloo", "facts": {}}
        PrefixStore(f"mgt-check/{ours.run_id}", store).set("hello/1", json.dumps(hello))

    thread = threading.Thread(target=peer)
    thread.start()
    begun = time.monotonic()
    found = tried(ours)
    thread.join()
    assert time.monotonic() - begun < ours.limit_s + GRACE_S
    (one,) = found.values()
    assert one.facts["behind"] == [1] and "a hang: rank 1 (process 1 on node-2)" in one.text
    assert "within" not in one.text and "for 4 s (--timeout)" in one.text


def test_a_peer_that_never_comes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a launcher starts it: rank 0 of two, alone."""
    env = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    report = CheckReport()
    options = CheckOptions(device="cpu", save_dir=tmp_path, timeout_s=2.0)
    checkup = Checkup(options, report, os.environ)
    checkup.run()
    assert checkup.speaks and checkup.finish() == 1
    found = fails(report.findings)
    assert "rank 1 of 2 did not come" in found["meeting"].text
    assert "within 2 s" in found["meeting"].text


def test_two_machines_under_torchrun_are_both_checked(tmp_path: Path) -> None:
    """Two agents of torchrun on this machine; the second's run folder cannot be written."""
    (tmp_path / "file").write_text("")
    port = free_port()

    def node(rank: int, save_dir: str) -> Program:
        return Program(
            *("-m", "torch.distributed.run", "--nnodes", 2, "--node-rank", rank),
            *("--nproc-per-node", 1, "--master-addr", "127.0.0.1", "--master-port", port),
            *("-m", "multi_gpu_training", "check", "--device", "cpu", "--save-dir", save_dir),
            cwd=tmp_path / f"node-{rank}",
            env={"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "MGT_INSECURE_NETWORK": "1"},
        )

    with node(0, "runs") as first, node(1, str(tmp_path / "file")) as second:
        assert first.end_of_run(4 * GRACE_S) == 1
        assert second.end_of_run(GRACE_S) == 1
        assert "2 ranks on 2 machines met" in first.out
        assert "(rank 1): " in first.out and "Not ready to train: disk" in first.out
        assert second.out == ""
        assert first.nothing_left(GRACE_S) and second.nothing_left(GRACE_S)
