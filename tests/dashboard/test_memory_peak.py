"""A snapshot of the allocator says which line held most of the memory at the peak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from recorded import Folder

from multi_gpu_training.monitoring.console import Console
from multi_gpu_training.monitoring.events import EventFile, StructuredLogger
from multi_gpu_training.monitoring.memory_snapshot import MOST_OOM, MemoryWatch, held_at_peak
from multi_gpu_training.monitoring.memory_view import BEFORE
from multi_gpu_training.monitoring.report.html import page
from multi_gpu_training.monitoring.report.run_record import read_run
from multi_gpu_training.training.callbacks import CallbackList

MB = 2**20


def frame(name: str, line: int, file: str = "/home/me/train.py") -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


def event(action: str, address: int, size: int, *frames: dict[str, Any]) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "frames": list(frames)}


LIBRARY = frame("conv2d", 7, "/site-packages/torch/nn/functional.py")
ATTENTION, LOSS = (LIBRARY, frame("forward", 41)), (LIBRARY, frame("<script>", 90))


def snapshot() -> dict[str, Any]:
    """Weights that were there before; then attention holds 600 MB and the loss 100 MB at the peak,
    of which the attention's are freed again; at the end only weights and the loss are left."""
    weights = {"state": "active_allocated", "size": 200 * MB, "address": 1, "frames": []}
    loss = {"state": "active_allocated", "size": 100 * MB, "address": 400, "frames": list(LOSS)}
    free = {"state": "inactive", "size": 600 * MB, "address": 500, "frames": []}
    trace = [
        event("alloc", 300, 300 * MB, *ATTENTION),
        event("alloc", 350, 300 * MB, *ATTENTION),
        event("alloc", 400, 100 * MB, *LOSS),
        event("free_requested", 300, 300 * MB, LIBRARY),
        event("free_completed", 300, 300 * MB, LIBRARY),
        event("free_completed", 350, 300 * MB, LIBRARY),
        event("segment_alloc", 900, 10 * MB),
    ]
    segment = {"device": 0, "address": 1, "total_size": 900 * MB, "blocks": [weights, loss, free]}
    return {"segments": [segment], "device_traces": [trace]}


def test_the_peak_is_found_behind_what_was_freed_since() -> None:
    peak = held_at_peak(snapshot(), 0, "asked for", 12)
    assert (peak.bytes, peak.reserved) == (900 * MB, 900 * MB)
    assert [(h.bytes // MB, h.blocks, h.line) for h in peak.holders] == [
        (600, 2, "/home/me/train.py:41 forward"),
        (200, 1, BEFORE),
        (100, 1, "/home/me/train.py:90 <script>"),
    ]
    assert peak.holders[0].stack[0].endswith("functional.py:7 conv2d")
    assert "0.88 GB at the peak (asked for, step 12), of which 0.59 GB from" in peak.headline()
    # Without stacks, as in a run that did not note them, the sizes are still right.
    bare = held_at_peak({**snapshot(), "device_traces": []}, 0, "out of memory", 3)
    assert bare.bytes == 300 * MB
    assert held_at_peak({}, 0, "out of memory", 3).bytes == 0


def test_a_run_out_of_memory_leaves_in_its_report_who_held_it(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "r" / "run", ranks=1)
    folder.start()
    folder.log(5)
    events = EventFile(folder.path / "events" / "rank-0.jsonl", run="run", rank=0, world_size=1)
    logger = StructuredLogger(Console(style="off"), events)
    watch = MemoryWatch(
        torch.device("cpu"), folder.path, 0, logger, CallbackList(None), False, lambda: 5, snapshot
    )
    for _ in range(MOST_OOM + 2):  # it runs out again and again
        watch.ran_out()
    events.close()
    assert len(list((folder.path / "memory").glob("rank-0.oom-*.json"))) == MOST_OOM
    (folder.path / "memory" / "rank-1.json").write_text('{"why": "nonsense"}')
    run = read_run(folder.path)
    assert "memory/rank-1.json cannot be read: it is not a memory snapshot" in run.problems
    text = page([run])
    assert "Memory at its peak" in text and "/home/me/train.py:41 forward" in text
    assert "&lt;script&gt;" in text and "600.0 MB" in text
