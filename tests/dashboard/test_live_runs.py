"""The dashboard's view of runs stays right while they write, die, resume and disappear."""

from __future__ import annotations

import io
import json
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from processes import mgt_here
from recorded import Folder, healthy
from rich.console import Console
from typer.testing import CliRunner

from multi_gpu_training.checkpoint.run_lock import RunLock
from multi_gpu_training.cli.app import app
from multi_gpu_training.dashboard.live_runs import QUIET_S, LiveRun, LiveRuns
from multi_gpu_training.dashboard.run_view import compared, detail, summary
from multi_gpu_training.dashboard.terminal_view import TopScreen
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.monitoring.event_crc import with_crc
from multi_gpu_training.monitoring.event_segments import close_segment, merge_segments
from multi_gpu_training.monitoring.report.figures import figures
from multi_gpu_training.monitoring.report.lines import EventTail
from multi_gpu_training.monitoring.report.run_record import read_run
from multi_gpu_training.monitoring.report.terminal import show
from multi_gpu_training.monitoring.run_requests import FOLDER, Inbox
from multi_gpu_training.storage.event_mirror import EventMirror
from multi_gpu_training.storage.remote_folder import RemoteFolder

LINE = {"v": 2, "run": "a", "attempt": 0, "rank": 0, "world_size": 2, "time": 1.79e9}


def of(run: Any, *names: str) -> list[Any]:
    return [getattr(run, name) for name in names]


class Watched:
    """A folder of runs, looked at by a clock of its own."""

    def __init__(self, root: Path) -> None:
        self.runs, self.now = LiveRuns([str(root)]), 100.0

    def later(self, seconds: float = 1.0) -> dict[str, LiveRun]:
        self.now += seconds
        self.runs.poll(self.now)
        return {run.name: run for run in self.runs.runs.values()}


def claim_host(folder: Folder, host: str) -> None:
    (folder.path / "environment.json").write_text(json.dumps({"host": host, "gpus": []}))


def test_what_is_read_bit_by_bit_is_what_is_read_at_once(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "r" / "one")
    watched = Watched(tmp_path)
    file = folder.path / "events" / "rank-0.jsonl"
    for step in range(1, 31):
        if step == 1:
            folder.start()
        folder.log(step, at=step)
        if step == 10:  # a torn line: half of it now, the rest below
            line = with_crc(json.dumps({"v": 2, "event": "step", "step": 11, "loss": 7.0}))
            file.write_bytes(file.read_bytes() + line[:30])
        run = watched.later()["r/one"]
        if step == 10:
            assert run.record is not None
            assert "rank 0: the last line is torn, it was left out" in run.record.problems
            file.write_bytes(file.read_bytes() + line[30:] + b"\n")
        if step == 15:  # the file is closed and a new one begun, as long runs do
            close_segment(file)
        if step == 20:
            close_segment(file)
            close_segment(folder.path / "events" / "rank-1.jsonl")
        if step == 25:
            merge_segments(file)
        at_once, live = read_run(folder.path), watched.later()["r/one"].record
        assert live is not None
        assert live.steps == at_once.steps
        assert of(live, "state", "last_step", "ranks", "notable", "problems") == of(
            at_once, "state", "last_step", "ranks", "notable", "problems"
        )
    # A file that somebody cut or replaced is read from its beginning.
    file.write_bytes(b"")
    folder.log(31, at=31)
    assert watched.later()["r/one"].record.steps == read_run(folder.path).steps  # type: ignore[union-attr]
    assert EventTail(file, True).read().count


def test_states_follow_what_this_process_sees_whatever_the_clocks_say(tmp_path: Path) -> None:
    here = Folder(tmp_path / "r" / "here")
    away = Folder(tmp_path / "r" / "away")
    claim_host(here, socket.gethostname())
    watched = Watched(tmp_path)
    ages = -1e7, +1e7  # seconds: the clocks of these machines are months off
    for folder, age in ((here, ages[0]), (away, ages[1])):
        folder.start(at=age)
        folder.log(1, at=age + 1)
    lock = RunLock(here.path)
    there = watched.later()
    assert (there["r/here"].state, there["r/away"].state) == ("running", "quiet")
    # Another machine's run that writes is running, though its lock cannot be seen from here.
    away.log(2, at=ages[1] + 2)
    assert watched.later()["r/away"].state == "running"
    assert watched.later(QUIET_S - 5)["r/away"].state == "running"
    assert watched.later(10)["r/away"].state == "killed"
    # Killed on this machine: the lock is free at once, and no file has changed.
    assert watched.later()["r/here"].state == "running"
    lock.release()
    assert watched.later()["r/here"].state == "killed"
    # Resumed: running again, then at its end.
    lock = RunLock(here.path)
    here.start(step=1, at=ages[0] + 50)
    assert watched.later()["r/here"].state == "running"
    here.end(9, at=ages[0] + 60)
    lock.release()
    run = watched.later()["r/here"]
    assert (run.state, summary(run, watched.now)["step"]) == ("finished", 9)
    shutil.rmtree(here.path)
    assert list(watched.later()) == ["r/away"]
    (away.path / "events" / "rank-0.jsonl").unlink()
    (away.path / "events" / "rank-1.jsonl").unlink()
    gone = watched.later()["r/away"]
    assert gone.state == "unreadable" and "no events" in str(summary(gone, 0.0)["problem"])


def test_progress_speed_and_remaining_time_come_from_the_events(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "r" / "run", epochs=4, max_steps=300)
    folder.start(epoch_steps=100, epoch_samples=6400)
    for step in range(20, 201, 20):
        folder.log(step, at=step / 2)
    folder.time_steps([{"forward": 4.0, "input": 1.0}, {"forward": 8.0}])
    folder.add(0, "device", gpu_utilization=87.0, gpu_memory_bytes=2e9, peak_bytes=3e9)
    folder.add(0, "checkpoint", at=60.0, step=100, bytes=5_000_000, stall_s=0.2)
    folder.add(1, "fault", at=61.0, step=101, kind="nonfinite", action="skip", message="a NaN")
    (folder.path / "forecast.json").write_text(
        json.dumps({"gpus": {"2": {"samples_per_s": 600.0, "low": 500.0, "high": 700.0}}})
    )
    with_lock = RunLock(folder.path)
    run = Watched(tmp_path).later()["r/run"]
    told = detail(run, 0.0)
    with_lock.release()
    assert (told["step"], told["total"], told["progress"]) == (200, 300, 200 / 300)
    assert told["remaining_s"] == pytest.approx(50.0)
    assert told["samples_per_s"] == 640.0
    assert told["forecast"]["expected"] == 600.0 and "inside the band" in told["forecast"]["text"]
    first, second = told["rank_rows"]
    assert (first["gpu_use"], first["memory"], second["gpu_use"]) == (0.87, 2e9, None)
    assert second["phases"]["forward"] == pytest.approx(8.0) and second["slowest"]
    assert told["checkpoints"][0]["step"] == 100 and told["checkpoints"][0]["size"] == "4.8 MB"
    assert told["faults"][0]["kind"] == "nonfinite" and told["faults"][0]["text"] == "a NaN"
    curve = told["curves"]["train"]
    assert curve["step"][-1] == 200 and curve["time"][-1] == 100.0
    assert curve["samples"][-1] == 200 * 64
    json.dumps(told, allow_nan=False)


def test_runs_are_compared_by_results_and_by_settings_that_differ(tmp_path: Path) -> None:
    for name, rate in (("a", 0.1), ("b", 0.2)):
        folder = Folder(tmp_path / name, learning_rate=rate)
        folder.start()
        folder.log(5)
        folder.end(5)
    told = compared(list(Watched(tmp_path).later().values()))
    assert told["names"] == ["a", "b"]
    assert told["settings"] == [["learning_rate", "0.1", "0.2"]]


def test_runs_at_a_url_are_shown_as_far_as_they_are_uploaded_and_nothing_is_asked_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = Folder(tmp_path / "disk" / "image" / "far")
    folder.start()
    folder.log(5)
    url = f"file://{tmp_path}/store"
    remote = RemoteFolder(f"{url}/image/far")
    mirror = EventMirror(remote, folder.path / "events", 0)
    mirror.upload()
    remote.write("config.yaml", b"epochs: 3\n")
    runs = LiveRuns([url])
    for step in (5, 10):
        runs.poll_remote()
        runs.poll(0.0)
        (run,) = runs.runs.values()
        told = summary(run, 0.0)
        assert (told["name"], told["step"], told["can_act"]) == ("image/far", step, False)
        folder.log(10)
        mirror.upload()
    # It has no lease, but was seen to write.
    assert told["state"] == "running" and told["path"] == f"{url}/image/far"


def test_hostile_names_and_texts_are_cut_and_harmless(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\x1b[2J"
    folder = Folder(tmp_path / "r" / "<img src=x onerror=alert(1)>\x1b[31m", ranks=1)
    folder.start()
    folder.log(3, **{evil: 1.0, "m" * 100_000: 2.0, "nan": "nan"})
    folder.add(0, "log", level="warning", message=evil * 2_000)
    folder.end(3, error=f"RuntimeError: {evil}")
    with (folder.path / "events" / "rank-0.jsonl").open("a") as file:
        file.write("x" * 10_000_000 + "\n")
    runs = LiveRuns([str(tmp_path)])
    runs.poll()
    (run,) = runs.runs.values()
    told = detail(run, 0.0)
    text = json.dumps(told, allow_nan=False)
    assert len(text) < 50_000 and "\\u001b" not in text
    assert "<script>alert(1)</script>\\x1b[2J" in told["curves"]["train"]["values"]
    assert told["state"] == "failed" and told["error"].startswith("RuntimeError: <script>")
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    console.print(TopScreen(runs).render(40))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[2J" not in shown and "\x1b[31m\x1b" not in shown and "<img src=x" in shown


def test_top_prints_once_where_there_is_no_terminal_and_asks_before_it_acts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Folder(tmp_path / "runs" / "r" / "run")
    folder.start()
    folder.log(5)
    printed = mgt_here(monkeypatch, capsys, "top", tmp_path / "runs")
    assert printed.code == 0 and "r/run" in printed.out and "rank" in printed.out
    (tmp_path / "empty").mkdir()
    assert "no runs below" in mgt_here(monkeypatch, capsys, "top", tmp_path / "empty").out
    with_lock = RunLock(folder.path)
    runs = LiveRuns([str(tmp_path / "runs")])
    runs.poll()
    screen = TopScreen(runs)
    for key in "xnly\x1b":  # asked and answered no; a rate that is not given
        screen.press(key)
    assert not (folder.path / FOLDER).exists()
    inbox = Inbox(folder.path)
    for key in "syl0.5\r":
        screen.press(key)
    asked = [json.loads(inbox.next() or "{}") for _ in range(2)]
    assert [(a["action"], a["value"]) for a in asked] == [("save", None), ("set_lr", 0.5)]
    assert asked[0]["by"] == "mgt top" and inbox.next() is None
    with_lock.release()
    runs.poll()
    screen.press("s")
    assert "nothing to ask" in screen.message
    screen.press("q")
    assert not screen.open


@pytest.mark.parametrize("width", [80, 100, 200])
def test_top_shows_each_rank_whole_in_terminals_of_any_width(tmp_path: Path, width: int) -> None:
    folder = Folder(tmp_path / "runs" / "r" / "run")
    folder.start()
    folder.time_steps([{"forward": 2.0, "backward": 4.0}] * 2, steps=20)
    folder.log(20)
    runs = LiveRuns([str(tmp_path / "runs")])
    runs.poll()
    console = Console(file=io.StringIO(), width=width)
    console.print(TopScreen(runs).render(40))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    ranks = [row for row in shown.splitlines() if "ffff" in row]
    assert [row.strip("│ ")[0] for row in ranks] == ["0", "1"]
    assert "f=forward b=backward" in shown and "…" not in shown


def test_a_dashboard_for_others_needs_a_token_that_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = mgt_here(monkeypatch, capsys, "dashboard", tmp_path, "--host", "0.0.0.0", "--port", "-1")
    assert said.code == 2 and "anyone who reaches this port could stop your runs" in said.err
    assert "--port -1: use 0 to 65535" in said.err
    said = mgt_here(monkeypatch, capsys, "dashboard", tmp_path, "--port", "-1", "--token", "short")
    assert said.code == 2 and "--token has 5 characters; use at least 12" in said.err


def test_a_place_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root, problem in (
        (str(tmp_path / "gone"), "is not there yet"),
        (str(tmp_path / "file"), "is not a folder"),
        ("ftp://nowhere.invalid/x", "ftp://nowhere.invalid/x: "),
    ):
        runs = LiveRuns([root])
        runs.poll_remote()
        runs.poll()
        assert len(runs.problems) == 1 and problem in runs.problems[0]
    said = CliRunner().invoke(app, ["top", "a\0b", "--once"])
    assert isinstance(said.exception, ConfigError) and "NUL" in str(said.exception)
    for token in ("short", " " * 20, "a b c d e f g h i j", "\0" * 20):
        said = CliRunner().invoke(app, ["dashboard", str(tmp_path), "--token", token])
        assert isinstance(said.exception, ConfigError) and "--token" in str(said.exception)


def test_the_loss_is_that_of_the_last_epoch_where_it_ended_later(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    short, long = Folder(tmp_path / "r" / "short"), Folder(tmp_path / "r" / "long")
    for folder in (short, long):
        folder.start()
    long.log(10, at=1, loss=1.79)
    for folder in (short, long):
        folder.add(0, "epoch", 2.0, step=12, epoch=0, train={"loss": 0.4008}, val=None)
    assert [summary(run, 3.0)["loss"] for run in watched.later().values()] == [0.4008, 0.4008]
    long.log(20, at=3, loss=0.3)
    assert {summary(run, 4.0)["loss"] for run in watched.later().values()} == {0.4008, 0.3}


def _watch(runs: LiveRuns, seen: list[tuple[set[str], int | None]]) -> None:
    """Note what is listed, whenever that changes, until all runs are read."""
    version = 0
    while runs.reading != 0:
        if runs.version != version:
            version = runs.version
            seen.append(({run.name for run in runs.runs.values()}, runs.reading))
        time.sleep(0.001)


def test_short_runs_are_listed_before_the_longest_is_read(tmp_path: Path) -> None:
    for name in ("a-long", "b", "c"):
        folder = Folder(tmp_path / "r" / name)
        folder.start()
        folder.log(5)
    note = json.dumps({**LINE, "event": "note", "text": "x" * 1000}) + "\n"
    with (tmp_path / "r" / "a-long" / "events" / "rank-0.jsonl").open("a") as file:
        file.write(note * 9000)
    runs = LiveRuns([str(tmp_path)])
    assert runs.reading is None and not runs.runs  # not "there are no runs"
    seen: list[tuple[set[str], int | None]] = []
    watcher = threading.Thread(target=lambda: _watch(runs, seen))
    watcher.start()
    runs.poll(1.0)
    watcher.join()
    assert seen[0] == ({"r/b", "r/c"}, 1)
    assert len(runs.runs) == 3 and runs.reading == 0
    before = runs.version
    runs.poll(2.0)
    assert runs.version == before


def test_list_detail_and_report_tell_the_same_figures(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "r" / "run")
    folder.start(epoch_steps=40, epoch_samples=2560)
    folder.time_steps([healthy(), healthy(queued=9.0)])
    for step, rate in ((10, 100.0), (20, 3200.0), (30, 3200.0), (40, 1600.0)):
        folder.log(step, at=step / 40, samples_per_s=rate, loss=0.5)
    metrics = {"loss": 0.001234, "accuracy": 0.75}
    folder.add(0, "epoch", 1.0, step=40, epoch=0, train={"loss": 0.25}, val=metrics)
    lock = RunLock(folder.path)
    [run] = Watched(tmp_path).later().values()
    assert summary(run, 200.0)["samples_per_s"] == 2400.0  # of late, while it runs
    lock.release()
    folder.end(40)
    [run] = Watched(tmp_path).later().values()
    record = read_run(folder.path)
    shown = dict(detail(run, 200.0)["tiles"])
    assert summary(run, 200.0)["samples_per_s"] == figures(record).samples_per_s == 3200.0
    assert shown["samples/s"] == "3,200" and shown["step"] == "20 ms"
    assert shown["train loss"] == "0.2500" and shown["val accuracy"] == "75.00%"
    assert shown["val loss"] == "0.001234"
    # Of each rank the same milliseconds as the report, which add up to the step.
    console = Console(file=io.StringIO(), width=160)
    show([record], console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    for row in detail(run, 200.0)["rank_rows"]:
        assert sum(row["phases"].values()) == pytest.approx(20.0, rel=0.05)
        for ms in row["phases"].values():
            assert not ms or f"{ms:.2f}" in printed


def test_a_fault_of_all_ranks_and_a_stop_are_told_once(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "r" / "run")
    folder.start()
    message = "step 5: the gradient is not finite\n  rank 1: the loss is nan"
    for rank in (0, 1):
        folder.add(rank, "fault", 1.0, step=5, kind="nonfinite", action="skip", message=message)
        folder.add(rank, "log", 1.0, step=5, level="warning", message=message)
    folder.add(1, "fault", 2.0, step=7, kind="loader", action="restart", message="a worker died")
    folder.add(1, "stopped", 3.0, step=9, signal="SIGTERM", problem=None, save_s=0.1)
    folder.add(0, "stopped", 3.1, step=9, signal="mgt top", problem=None, save_s=0.25)
    folder.end(9, at=3.2, stopped="SIGTERM", error="stopped")
    [run] = Watched(tmp_path).later().values()
    told = detail(run, 200.0)
    assert [row[1:] for row in told["events"]] == [
        ["stopped", "by mgt top after step 9, saved in 250 ms"],
        ["fault", "rank 1, loader, restart: a worker died"],
        ["fault", "ranks 0, 1, nonfinite, skip: step 5: the gradient is not finite"],
    ]
    assert [(f["ranks"], f["text"]) for f in told["faults"]] == [
        ("1", "a worker died"),
        ("0, 1", message),
    ]
    assert run.state == "stopped"
    # Read again, nothing is told twice.
    folder.log(10, at=4.0)
    watched = Watched(tmp_path)
    for _ in range(2):
        [run] = watched.later().values()
        assert len(detail(run, 200.0)["faults"]) == 2


def test_top_says_what_became_of_a_request(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "runs" / "r" / "run")
    folder.start()
    folder.log(5)
    lock = RunLock(folder.path)
    runs = LiveRuns([str(tmp_path / "runs")])
    runs.poll()
    screen = TopScreen(runs)
    console = Console(file=io.StringIO(), width=80)
    screen.press("s")
    screen.press("y")
    console.print(screen.render(40))
    assert "asked r/run to save" in screen.message
    asked = {"action": "save", "by": "mgt top", "done": True, "outcome": "step 6 is being saved"}
    for rank in (0, 1):
        folder.add(rank, "request", 1.0, step=6, value=None, **asked)
    runs.poll()
    console.print(screen.render(40))
    assert screen.message == "r/run: mgt top: save at step 6: step 6 is being saved"
    lock.release()
    foot = console.file.getvalue().splitlines()[-2:]  # type: ignore[attr-defined]
    assert "m memory snapshot" in " ".join(foot)
    assert not any(line.endswith(("  m", "  s", "stop after")) for line in foot)
