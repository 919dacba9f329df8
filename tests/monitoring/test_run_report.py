"""`mgt report` reads any run's folder: finished, crashed, still going, damaged, or several."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from recorded import Folder, healthy
from rich.console import Console
from typer.testing import CliRunner

from multi_gpu_training.checkpoint.run_lock import RunLock
from multi_gpu_training.cli.app import app
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.monitoring.report import write_report
from multi_gpu_training.monitoring.report.figures import figures
from multi_gpu_training.monitoring.report.html import page
from multi_gpu_training.monitoring.report.lines import thinned
from multi_gpu_training.monitoring.report.run_record import read_run
from multi_gpu_training.monitoring.report.terminal import show
from multi_gpu_training.monitoring.report.verdict import judge


def whole_run(path: Path, ranks: int = 2, rate: float = 640.0, **config: object) -> Folder:
    folder = Folder(path, ranks, **config)
    folder.start()
    for step in range(20, 101, 20):
        folder.log(step, at=step / 10, samples_per_s=rate)
    folder.time_steps([healthy(input=30.0 * (rank == 1)) for rank in range(ranks)])
    folder.add(0, "epoch", 9.0, epoch=0, step=100, train={"loss": 0.1}, val={"accuracy": 0.9})
    folder.add(0, "device", 5.0, memory_bytes=2**30, peak_bytes=2**31, cpu_percent=90.0)
    folder.add(0, "checkpoint", 9.5, step=100, bytes=2**20, stall_s=0.01, waited_s=0.0)
    folder.end(100)
    return folder


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects what a browser would fetch."""

    VOID = {"meta", "br", "path", "rect", "circle", "polyline", "polygon"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.words = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href")]
        if tag not in self.VOID or (tag == "rect" and self.get_starttag_text()[-2] != "/"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in self.VOID, tag

    def handle_data(self, data: str) -> None:
        self.words += data + " "


def test_the_page_needs_nothing_but_itself_and_says_everything(tmp_path: Path) -> None:
    folder = whole_run(tmp_path / "image" / "first", num_workers=3)
    path = write_report([folder.path])
    assert path == folder.path / "report.html" and (folder.path / "metrics.png").stat().st_size
    text = path.read_text()
    shown = Page(text)
    assert shown.fetched == [] and "http" not in text and "url(" not in text
    words = re.sub(r"\s+", " ", shown.words)
    for expected in (
        "image/first",
        "Rank 1 waits 30 ms per step for data; rank 0 waits for rank 1; fix its loader and gain",
        "640 samples/s",
        "2.0 GB peak memory",
        "90.00% val accuracy",
        "step 100 saved (1.0 MB of tensors), training paused for 10.0 ms",
        "num_workers 3",
    ):
        assert expected in words, expected
    assert text.count('class="slowest"') == 2  # in the bars and in the heat map
    assert 'class="heat"' in text


def test_what_a_run_writes_cannot_break_the_page(tmp_path: Path) -> None:
    folder = whole_run(tmp_path / "image" / "<b>run", note="</script><script>alert(1)</script>")
    folder.add(0, "log", 3.0, level="warning", message="<img src=x> & more")
    shown = Page(page([read_run(folder.path)]))
    assert shown.fetched == []
    assert "<img src=x> & more" in shown.words and "<b>run" in shown.words


def test_a_torn_last_line_and_a_missing_rank_are_told(tmp_path: Path) -> None:
    folder = whole_run(tmp_path / "run", ranks=3)
    (folder.path / "events" / "rank-2.jsonl").unlink()
    with (folder.path / "events" / "rank-0.jsonl").open("a") as file:
        file.write('{"v": 1, "event": "step", "step": 120, "lo')
    run = read_run(folder.path)
    assert run.problems == [
        "no events of rank 2: its file is missing or empty",
        "rank 0: the last line is torn, it was left out",
    ]
    assert run.last_step == 100 and judge(run).kind == "data"
    (folder.path / "events" / "rank-0.jsonl").unlink()
    assert read_run(folder.path).column("loss")[-1] == 0.01  # the next rank knows it as well


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    folder = whole_run(tmp_path / "run")
    path = folder.path / "events" / "rank-0.jsonl"
    path.write_text("garbage\n\x00\x00\x00\n" + path.read_text())
    other = folder.path / "events" / "rank-1.jsonl"
    lines = other.read_text().splitlines()
    lines[5] = lines[5][:50]
    other.write_text("\n".join(lines) + "\n")
    run = read_run(folder.path)
    assert "rank 0: 2 damaged lines were left out" in run.problems
    assert "rank 1: a damaged line was left out" in run.problems
    assert run.last_step == 100


def test_a_config_that_is_no_text_is_as_good_as_none(tmp_path: Path) -> None:
    folder = whole_run(tmp_path / "run")
    bomb = b"a: &a [1, 1]\nb: &b [*a, *a]\nc: [*b, *b]\n"
    for content in (b"\xff\xfe: : [", b"[" * 100_000, b"- " * 100_000, bomb):
        (folder.path / "config.yaml").write_bytes(content)
        run = read_run(folder.path)
        assert run.config == {}
        assert any("config.yaml" in problem for problem in run.problems)


def test_a_file_in_the_place_of_another_is_named(tmp_path: Path) -> None:
    run = whole_run(tmp_path / "run").path
    (run / "forecast.json").write_text('{"gpus": {"1": {"samples_per_s": 100.0}}}')
    assert not read_run(run).problems
    forecast, machine = run / "forecast.json", run / "environment.json"
    texts = forecast.read_text(), machine.read_text()
    machine.write_text(texts[0])
    forecast.write_text(texts[1])
    assert read_run(run).problems == [
        "environment.json is not a description of the machine: it has no `host`",
        "forecast.json is not a forecast: it has no `gpus`",
    ]


def test_steps_that_were_computed_again_count_once(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run", 2)
    folder.start()
    for step in (20, 40, 60):
        folder.log(step, loss=5.0)
    folder.time_steps([healthy(), healthy()], steps=60)
    folder.start(step=30, at=8.0, attempt=1)
    folder.log(40, at=9.0, attempt=1, loss=4.0)
    run = read_run(folder.path)
    assert [(e["step"], e["loss"]) for e in run.steps] == [(20, 5.0), (40, 4.0)]
    assert run.samples[1].steps.max() == 30
    [restart] = [e for e in run.notable if e["event"] == "restart"]
    assert (restart["attempt"], restart["step"]) == (1, 30)
    assert "attempt 1, on 2 ranks from step 30" in page([run])


def test_steps_count_once_where_starts_are_not_recorded(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run", 1)
    for attempt, step in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3)):
        folder.log(step, attempt=attempt, loss=float(10 * attempt + step))
    assert read_run(folder.path).column("loss") == [1.0, 12.0, 13.0]


def test_the_end_of_a_run_is_told_apart(tmp_path: Path) -> None:
    done = whole_run(tmp_path / "done")
    assert read_run(done.path).state == "finished"
    failed = Folder(tmp_path / "failed", 1)
    failed.start()
    failed.end(3, error="ValueError: no")
    assert read_run(failed.path).state == "failed"
    killed = Folder(tmp_path / "killed", 1)
    killed.start()
    killed.log(20)
    assert read_run(killed.path).state == "ended without a word"
    lock = RunLock(killed.path)
    try:
        assert read_run(killed.path).state == "running"
    finally:
        lock.release()
    resumed = whole_run(tmp_path / "resumed")
    resumed.start(step=100, at=20.0)  # begun again after its end
    assert read_run(resumed.path).state == "ended without a word"


def test_a_folder_that_is_no_run_is_an_error_that_helps(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_run(tmp_path / "nowhere")
    whole_run(tmp_path / "image" / "first")
    with pytest.raises(ConfigError, match=r"not a run folder.*did you mean .*image/first\?"):
        read_run(tmp_path)
    (tmp_path / "empty" / "events").mkdir(parents=True)
    (tmp_path / "empty" / "events" / "rank-0.jsonl").touch()
    with pytest.raises(ConfigError, match="no event in them"):
        read_run(tmp_path / "empty")


def test_the_command_shows_and_writes(tmp_path: Path) -> None:
    folder = whole_run(tmp_path / "image" / "first")
    out = tmp_path / "elsewhere" / "page.html"
    done = CliRunner().invoke(app, ["report", str(folder.path), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "rank 1 waits 30 ms per step for data; rank 0 waits for rank 1" in done.output
    assert "rank 1 slowest" in done.output and "own time, step" in done.output
    assert out.exists() and not (folder.path / "report.html").exists()
    done = CliRunner().invoke(app, ["report", str(folder.path), "--json", "--no-html"])
    [summary] = json.loads(done.output)
    assert summary["verdict"] == "data" and summary["causes"][0]["ranks"] == [1]
    assert not (folder.path / "report.html").exists()


def test_several_runs_are_compared(tmp_path: Path) -> None:
    one = whole_run(tmp_path / "image" / "one", ranks=1, rate=400.0, batch_size=16)
    four = whole_run(tmp_path / "image" / "four", ranks=4, rate=1200.0, batch_size=32)
    out = tmp_path / "both.html"
    done = CliRunner().invoke(app, ["report", str(one.path), str(four.path), "--out", str(out)])
    assert done.exit_code == 0, done.output
    words = re.sub(r"\s+", " ", Page(out.read_text()).words)
    assert "four finished distributed_data_parallel 4 128 1,200 3.00x 75%" in words
    assert "batch_size 16 32" in words and "num_workers 0 0" not in words.split("Settings")[0]
    assert "3.00x" in done.output and "Set differently" in done.output


@pytest.mark.parametrize(
    ("forecast", "words"),
    [
        (
            {"2": {"samples_per_s": 800.0, "low": 700.0, "high": 900.0, "step_time_s": 0.08}},
            "forecast 800 samples/s, actual 640 samples/s (-20%); outside the band 700 samples/s "
            "to 900 samples/s",
        ),
        (
            {"gpus": {"2": {"samples_per_s": 640.0, "step_time_s": 0.1, "low": 0.08, "high": 0.2}}},
            "forecast 100 ms per step, actual 100 ms per step (+0%); inside the band 80 ms per "
            "step to 200 ms per step",
        ),
        (
            {
                "2": {"samples_per_s": 800.0, "step_time_s": 0.1, "low": 0.1, "high": 0.2}
                | {"global_batch": 32}
            },
            "forecast 800 samples/s, actual 640 samples/s (-20%); the forecast was for a global "
            "batch of 32, the run&#x27;s is 64",
        ),
        ({"4": {"samples_per_s": 800.0}}, None),
        ({"2": "nonsense"}, None),
    ],
)
def test_a_forecast_is_held_against_the_run(
    tmp_path: Path, forecast: dict[str, object], words: str | None
) -> None:
    folder = whole_run(tmp_path / "run")
    (folder.path / "forecast.json").write_text(json.dumps(forecast))
    text = page([read_run(folder.path)])
    assert (words in text) if words else ("Forecast" not in text)


def test_mfu_is_of_the_gpus_peak(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run", 2)
    folder.start(device_uuid=("GPU-a", "GPU-b"), device="cuda:0", peak_flops=1e12)
    for step in (20, 40, 60):
        folder.log(step)  # 64 samples a step at 640 a second: 0.1 s
    for rank in range(2):
        folder.add(rank, "work", step=5, operations=10, flops=4e10)
        folder.add(rank, "device", 3.0, gpu_utilization=50.0, power_w=300.0, peak_bytes=1.0)
    found = figures(read_run(folder.path))
    assert found.mfu == pytest.approx(0.4)
    assert (found.gpu_utilization, found.power_w) == (50.0, 300.0)


def test_a_long_list_is_thinned_evenly_and_keeps_its_end() -> None:
    kept = thinned(list(range(1000, 2003)), 10)
    assert len(kept) <= 12 and kept[0] == 1000 and kept[-1] == 2002
    assert thinned([], 10) == [] and thinned([5], 10) == [5]


@pytest.mark.parametrize("width", [80, 100, 200])
@pytest.mark.parametrize("count", [2, 5])
def test_runs_side_by_side_break_no_word_in_any_terminal(
    tmp_path: Path, width: int, count: int
) -> None:
    for number in range(count):
        whole_run(tmp_path / "image" / f"run-{number}", learning_rate=number)
    console = Console(file=io.StringIO(), width=width)
    show([read_run(path) for path in sorted((tmp_path / "image").iterdir())], console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, printed.splitlines())) <= width
    assert "…" not in printed
    compared = printed.partition("Set differently")[0]
    for whole in ("distributed_data_parallel", "samples/s", "efficiency", "val accuracy", "90.00%"):
        assert whole in compared
    # And each figure of the phases is whole.
    rows = [line for line in printed.splitlines() if "slowest" in line and "." in line]
    assert len(rows) == count and all(len(re.findall(r"\d+\.\d\d\b", row)) >= 7 for row in rows)
