"""A run that was restarted, resumed or went on with other ranks is judged by what it is now."""

from __future__ import annotations

from pathlib import Path

from recorded import Folder, healthy

from multi_gpu_training.monitoring.report.figures import figures
from multi_gpu_training.monitoring.report.run_record import read_run
from multi_gpu_training.monitoring.report.verdict import judge


def crashed(path: Path, at: float = 5.0) -> Folder:
    folder = Folder(path, 2)
    folder.start()
    folder.log(40, at=at - 1)
    folder.end(50, at=at, error="ValueError: no")
    return folder


def test_a_run_that_healed_itself_is_finished(tmp_path: Path) -> None:
    folder = crashed(tmp_path / "run")
    folder.start(step=40, at=8.0, attempt=1)
    folder.end(90, at=12.0)
    run = read_run(folder.path)
    assert run.state == "finished" and run.last_step == 90
    assert [e["event"] for e in run.notable] == ["run_end", "restart", "run_end"]


def test_a_crash_that_came_again_after_a_resume_is_told_again(tmp_path: Path) -> None:
    folder = crashed(tmp_path / "run")
    folder.start(step=40, at=30.0)
    folder.end(50, at=33.0, error="ValueError: no")
    run = read_run(folder.path)
    assert run.state == "failed"
    assert [e["event"] for e in run.notable] == ["run_end", "resume", "run_end"]


def test_resuming_what_is_complete_leaves_it_finished(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run", 2)
    folder.start()
    folder.end(50, at=5.0)
    folder.start(step=50, at=30.0)
    folder.end(50, at=30.5)
    run = read_run(folder.path)
    assert run.state == "finished"
    assert [e["event"] for e in run.notable] == ["run_end", "resume", "run_end"]


def test_the_latest_start_of_a_run_is_what_failed(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run", 2)
    folder.start()
    folder.end(50, at=5.0)
    folder.start(step=50, at=30.0)
    folder.end(60, at=33.0, error="ValueError: no")
    assert read_run(folder.path).state == "failed"


def test_the_pause_before_a_resume_is_not_training_time(tmp_path: Path) -> None:
    folder = crashed(tmp_path / "run", at=5.0)
    for rank in range(2):  # written before the rank says that it begins
        folder.add(rank, "log", 99.0, level="info", message="resumed from step-40")
    folder.start(step=40, at=100.0)
    folder.end(90, at=103.0)
    assert figures(read_run(folder.path)).elapsed_s == 8.0


def shrunk(path: Path, attempt: int) -> Folder:
    """Three ranks of which the last was slow, then two that are well."""
    folder = Folder(path, 3)
    folder.start(cores=[0, 1], machine_cores=2)
    folder.log(20, at=2.0, samples_per_s=100.0)
    folder.time_steps([healthy(), healthy(), healthy(forward=60.0)], steps=20)
    folder.ranks = 2
    folder.start(step=20, at=50.0, attempt=attempt)
    for step in range(40, 101, 20):
        folder.log(step, at=50.0 + step / 10, attempt=attempt, samples_per_s=640.0)
    folder.time_steps([healthy(), healthy()], first=21, steps=60)
    folder.end(100, at=60.0)
    return folder


def test_ranks_that_are_gone_are_not_judged(tmp_path: Path) -> None:
    for attempt in (0, 1):  # resumed on fewer, or restarted on the ones that were left
        run = read_run(shrunk(tmp_path / f"run{attempt}", attempt).path)
        assert (run.world_size, run.ranks, sorted(run.facts)) == (2, [0, 1], [0, 1])
        assert run.samples[0].steps.min() == 21 and sorted(run.samples) == [0, 1]
        verdict = judge(run)
        assert verdict.kind == "none"
        assert verdict.notes == [
            "ranks were 3 before, 2 at last: speed and verdict are of the time with 2"
        ]
        assert run.state == "finished" and figures(run).samples_per_s == 640.0


def test_ranks_that_joined_are_judged_from_then_on(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run", 1)
    folder.start()
    folder.time_steps([healthy(input=50.0)], steps=20)
    folder.end(20, at=5.0)
    folder.ranks = 2
    folder.start(step=20, at=50.0)
    folder.time_steps([healthy(), healthy()], first=21, steps=60)
    folder.end(80, at=60.0)
    run = read_run(folder.path)
    assert (run.world_size, judge(run).kind, run.state) == (2, "none", "finished")
