"""One truth per figure: wherever a run's time, step and rate are shown, they are the same."""

from __future__ import annotations

import io
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from processes import Said, mgt_here
from recorded import Folder
from rich.console import Console
from test_verdicts import healthy
from tiny import line, manager_for, points, sgd, squares

from multi_gpu_training import PerformanceMonitor
from multi_gpu_training.monitoring.report import write_report
from multi_gpu_training.monitoring.report.run_record import read_run
from multi_gpu_training.monitoring.report.sentences import duration
from multi_gpu_training.monitoring.report.terminal import show
from multi_gpu_training.monitoring.report.verdict import judge
from multi_gpu_training.monitoring.report.wording import number


def shown_by(path: Path, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO())
    show([read_run(path)], console)
    found: str = console.file.getvalue()  # type: ignore[attr-defined]
    return found.partition("╮\n")[2]  # below the name of the run


def events_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (path / "events/rank-0.jsonl").read_text().splitlines()]


def test_time_step_and_rate_are_the_same_in_all_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = manager_for(tmp_path, progress="lines", epochs=3, log_every=10, batch_size=4)
    fitted = manager.fit(line(), points(400), loss_fn=squares, optimizer=sgd)
    printed = capsys.readouterr().out
    said: Said = mgt_here(monkeypatch, capsys, "report", fitted.folder, "--json", "--no-html")
    [figures] = json.loads(said.out)
    time, step, rate = (figures[name] for name in ("elapsed_s", "step_s", "samples_per_s"))
    words = {"time": duration(time), "step": duration(step), "samples/s": number(rate)}

    # The summary that the run ends with.
    summary = dict(re.findall(r"│ (time|step|samples/s) +│ ([^│]+?) +│", printed))
    assert summary == words
    # The report, in the terminal and as a page, and its verdict.
    page = write_report([fitted.folder]).read_text()
    text = shown_by(fitted.folder, 200)
    for name, value in words.items():
        assert f"{name}: {value}" in text
        assert f"<b>{value}</b><span>{name}</span>" in page
    assert f"A step of {words['step']}, rank by rank" in text
    # The events: the run's end, and the rates that the figure is the median of.
    events = events_of(fitted.folder)
    [end] = [event for event in events if event["event"] == "run_end"]
    assert end["elapsed_s"] == pytest.approx(time, abs=0.02)
    rates = {event["step"]: event["samples_per_s"] for event in events if event["event"] == "step"}
    assert min(rates.values()) <= rate <= max(rates.values())
    assert rate == pytest.approx(4 / step)
    # The bar, or the line in its place, shows the rate that was recorded for its step.
    [(position, bar)] = re.findall(r"Epoch 1/3 (\d+)/100 .* ([\d.,]+) samples/s", printed)
    assert bar == number(rates[int(position)])
    # And what Python is told.
    assert PerformanceMonitor(run=fitted.folder).get_summary()["training_time"] == time


def test_the_verdict_speaks_of_the_step_that_the_report_shows(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run", 2)
    folder.start()
    folder.time_steps([healthy(), healthy()])  # 23 ms each, and longer for being timed
    for step in range(10, 41, 10):
        folder.log(step, samples_per_s=3200.0)  # of 64 samples: 20 ms
    assert judge(read_run(folder.path)).headline.startswith("nothing stands out: of a 20 ms step")
    shown = shown_by(folder.path)
    assert "step: 20 ms" in shown and "A step of 20 ms, rank by rank" in shown
    row = next(line for line in shown.splitlines() if line.startswith("│ rank 0"))
    spent = [float(cell) for cell in row.split("│")[2:-2]]
    assert sum(spent) == pytest.approx(20.0, abs=0.1)


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")]
)
def test_a_run_that_somebody_stops_has_not_failed(
    tmp_path: Path, number: signal.Signals, name: str
) -> None:
    manager = manager_for(tmp_path, epochs=100, enable_fault_tolerance=True)

    def stop(model: Any, batch: Any) -> Any:
        if manager.step == 5:
            signal.raise_signal(number)
        return squares(model, batch)

    with pytest.raises(SystemExit):
        manager.fit(line(), points(), loss_fn=stop, optimizer=sgd)
    run = read_run(manager.folder)
    assert run.state == "stopped"
    assert "state: stopped" in shown_by(manager.folder)
    assert "failed" not in shown_by(manager.folder)
    assert f"by {name} after step" in shown_by(manager.folder)


def test_an_exchange_that_takes_much_of_a_step_stands_out(tmp_path: Path) -> None:
    folder = Folder(
        tmp_path / "run",
        2,
    )
    folder.start(gradient_bytes=20_000_000)
    # 41 % of a step, and no slower than the network allows: no defect, but no "nothing" either.
    folder.time_steps([healthy(), healthy()], transfer=0.0145)
    verdict = judge(read_run(folder.path))
    assert verdict.causes == []
    assert verdict.headline.startswith("no rank is slow, but exchanging gradients costs much of it")
    assert "41% exchanging gradients" in verdict.headline
    assert "gradient_accumulation_steps make exchanges rarer" in verdict.headline


def test_the_exchange_of_sync_bn_is_named_and_not_made_rarer_by_accumulation(
    tmp_path: Path,
) -> None:
    folder = Folder(tmp_path / "run", 2, sync_bn=True)
    folder.start(gradient_bytes=20_000_000)
    folder.time_steps([healthy(), healthy()], transfer=0.0145)
    said = judge(read_run(folder.path)).headline
    assert "exchanging gradients and BatchNorm's statistics (sync_bn) costs much of it" in said
    assert "gradient_accumulation_steps only those of gradients" in said


def test_a_rank_is_called_slowest_only_where_it_is(tmp_path: Path) -> None:
    even, uneven = Folder(tmp_path / "even", 3), Folder(tmp_path / "uneven", 3)
    for folder in (even, uneven):
        folder.start()
    even.time_steps([healthy() for _ in range(3)], noise=0.05)
    uneven.time_steps([healthy(), healthy(forward=12.0), healthy()])
    assert "slowest" not in shown_by(even.path)
    assert 'class="slowest"' not in write_report([even.path]).read_text()
    assert "rank 1 slowest" in shown_by(uneven.path)
    assert 'class="slowest"' in write_report([uneven.path]).read_text()
