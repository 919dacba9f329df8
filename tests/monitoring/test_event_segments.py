"""Events of long runs: files stay bounded by their rule, and readers see all of them in order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from multi_gpu_training.monitoring import event_segments, events
from multi_gpu_training.monitoring.event_segments import segments
from multi_gpu_training.monitoring.events import EventFile
from multi_gpu_training.monitoring.report.run_record import read_run

SMALL = 16 * 1024


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (events, event_segments):
        monkeypatch.setattr(module, "SEGMENT_BYTES", SMALL)


def record(run: Path, rank: int, first: int, last: int, ranks: int = 1, attempt: int = 0) -> None:
    path = run / "events" / f"rank-{rank}.jsonl"
    file = EventFile(path, run="it", attempt=attempt, rank=rank, world_size=ranks)
    file.write("rank", step=first - 1, global_batch=4, device="cpu")
    for step in range(first, last + 1):
        file.write("step", step=step, loss=1.0 / step, samples_per_s=10.0)
        file.write("device", memory_bytes=5, peak_bytes=6)
    file.close()


def test_event_files_of_a_long_run_stay_bounded_and_its_report_knows_its_end(
    small: None, tmp_path: Path
) -> None:
    run = tmp_path / "custom" / "it"
    for rank in range(2):
        for start in range(10):  # each goes back by 100 steps
            record(run, rank, 900 * start + 1, 900 * start + 1000, 2, start)
    written = 2 * 10 * 2000
    found = segments(run / "events" / "rank-0.jsonl")
    lengths = [segment.length for segment in found]
    assert all(lengths.count(length) <= 2 for length in lengths)
    assert lengths == sorted(lengths, reverse=True) and lengths[0] >= 8
    assert [s.first for s in found[1:]] == [s.last + 1 for s in found[:-1]]
    sizes = [file.stat().st_size for file in (run / "events").iterdir()]
    assert max(sizes) <= SMALL * 1.6 and sum(sizes) < written * 60
    told = read_run(run)
    assert told.last_step == 9100 and told.ranks == [0, 1]
    steps = [event["step"] for event in told.steps]
    assert steps == sorted(set(steps)) and steps[-1] == 9100
    assert steps[-50:] == list(range(9051, 9101))  # dense near the end
    assert sum(event["event"] == "restart" for event in told.notable) == 9  # none is lost
    assert any("thinned" in problem for problem in told.problems)
    assert not any("damaged" in problem for problem in told.problems)


def test_ranks_keep_the_same_steps_though_their_files_differ(small: None, tmp_path: Path) -> None:
    kept = []
    for rank, extra in ((0, 0), (1, 3)):
        path = tmp_path / "events" / f"rank-{rank}.jsonl"
        file = EventFile(path, run="it", attempt=0, rank=rank, world_size=2)
        for step in range(1, 4000):
            file.write("phases", step=step, step_s=0.1)
            for _ in range(extra):
                file.write("device", memory_bytes=5)
        file.close()
        first = segments(path)[0].path.read_text().splitlines()
        told = [json.loads(text) for text in first]
        kept.append({event["step"] for event in told if event["event"] == "phases"})
    assert len(kept[0]) > 5 and kept[1] and kept[1] <= set(range(4000))
    last = min(max(kept[0]), max(kept[1]))
    early = [{step for step in each if step <= last} for each in kept]
    assert early[0] <= early[1] or early[1] <= early[0]


def test_a_crash_while_segments_are_closed_or_merged_loses_and_repeats_nothing(
    small: None, tmp_path: Path
) -> None:
    run = tmp_path / "custom" / "it"
    record(run, 0, 1, 30)
    current = run / "events" / "rank-0.jsonl"
    raw = current.read_bytes()
    # Killed after the rename: there is no current file.
    current.rename(current.with_name("rank-0.000001.jsonl"))
    assert [e["step"] for e in read_run(run).steps] == list(range(1, 31))
    # Killed before what was merged was removed: it counts once.
    (current.with_name("rank-0.000001-000002.jsonl")).write_bytes(raw)
    (current.with_name("rank-0.000002.jsonl")).write_bytes(raw)
    record(run, 0, 31, 40, attempt=1)
    told = read_run(run)
    assert [e["step"] for e in told.steps] == list(range(1, 41))
    assert len([e for e in told.notable if e["event"] == "restart"]) == 1


def test_a_line_that_a_full_disk_cut_does_not_spoil_the_next_start(tmp_path: Path) -> None:
    run = tmp_path / "custom" / "it"
    record(run, 0, 1, 5)
    with (run / "events" / "rank-0.jsonl").open("ab") as file:
        file.write(b'{"v": 2, "run": "it", "att')
    record(run, 0, 6, 9, attempt=1)
    told = read_run(run)
    assert [e["step"] for e in told.steps] == list(range(1, 10))
    assert "rank 0: a damaged line was left out" in told.problems


def test_a_run_folder_with_one_long_file_of_an_older_version_is_read_in_little_memory(
    tmp_path: Path,
) -> None:
    import resource

    (tmp_path / "events").mkdir()
    head = '{"v": 1, "rank": 0, "world_size": 1, "time": 1.7e9, "event": "step", "step": '
    with (tmp_path / "events" / "rank-0.jsonl").open("w") as file:
        for first in range(0, 800_000, 8000):
            file.write("".join(f'{head}{s}, "loss": 0.5}}\n' for s in range(first, first + 8000)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told = read_run(tmp_path)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert told.last_step == 799_999 and 10_000 < len(told.steps) < 45_000
    assert grown < 80 * 1024  # of a file of 85 MB
