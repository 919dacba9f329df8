"""Several runs side by side: what was set differently, and what it gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from multi_gpu_training.monitoring.report.figures import Figures
from multi_gpu_training.monitoring.report.run_record import RunRecord
from multi_gpu_training.monitoring.report.sentences import duration
from multi_gpu_training.monitoring.report.wording import STATES, metric, number, size

UNINTERESTING = ("run_name", "save_dir", "local_dir", "resume")


def names(runs: Sequence[RunRecord]) -> list[str]:
    """A short name for each run, of its own."""
    short = [run.path.name for run in runs]
    if len(set(short)) == len(short):
        return short
    long = [run.name for run in runs]
    return long if len(set(long)) == len(long) else [str(run.path) for run in runs]


def table(runs: Sequence[RunRecord], found: Sequence[Figures]) -> tuple[list[str], list[list[str]]]:
    """Title and rows of the comparison. Speed is against the first run that has one; efficiency is
    speed-up over how many times as many ranks."""
    base = next((i for i, f in enumerate(found) if f.samples_per_s), None)
    metrics = sorted({name for f in found for name in f.metrics})
    title = ["run", "state", "mode", "ranks", "batch", "samples/s", "speed-up", "efficiency"]
    part = "val " if all(f.val for f in found if f.metrics) else ""
    title += ["step", "peak memory", "MFU", *(f"{part}{name}" for name in metrics)]
    rows = []
    for name, run, f in zip(names(runs), runs, found, strict=True):
        speedup, efficiency = "-", "-"
        if base is not None and f.samples_per_s and (first := found[base].samples_per_s):
            times = f.samples_per_s / first
            speedup = f"{times:.2f}x"
            efficiency = f"{times * runs[base].world_size / run.world_size:.0%}"
        facts = run.facts.get(run.ranks[0], {})
        rows.append(
            [
                name,
                STATES[run.state].partition(":")[0],
                str(run.config.get("training_mode", "-")),
                str(run.world_size),
                str(facts.get("global_batch", run.config.get("global_batch_size") or "-")),
                number(f.samples_per_s) or "-",
                speedup,
                efficiency,
                duration(f.step_s) if f.step_s else "-",
                size(f.peak_bytes) or "-",
                "-" if f.mfu is None else f"{f.mfu:.1%}",
                *("-" if m not in f.metrics else metric(m, f.metrics[m]) for m in metrics),
            ]
        )
    keep = [i for i, head in enumerate(title) if i < 8 or any(row[i] != "-" for row in rows)]
    return [title[i] for i in keep], [[row[i] for i in keep] for row in rows]


def differences(runs: Sequence[RunRecord]) -> list[list[str]]:
    """A row a setting that is not the same in all runs."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    rows = []
    for key in keys:
        values = [_written(run.config.get(key)) for run in runs]
        if len(set(values)) > 1 and key not in UNINTERESTING:
            rows.append([key, *values])
    for key in ("gpus", "packages", "host", "python", "cuda"):
        values = [_written(run.environment.get(key)) for run in runs]
        if len(set(values)) > 1:
            rows.append([key, *values])
    return rows


def _written(value: Any) -> str:
    return "-" if value is None else str(value)
