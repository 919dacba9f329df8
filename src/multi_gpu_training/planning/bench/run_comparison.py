"""Results of several trainings side by side: `comparison_report`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.monitoring.report.figures import figures
from multi_gpu_training.monitoring.report.run_record import event_files, read_run
from multi_gpu_training.planning.bench import result_table as show
from multi_gpu_training.planning.bench.result_table import Column, ResultTable, Row

# Under which names results come, and in which unit ours is.
THROUGHPUT = ("samples_per_s", "avg_throughput", "throughput", "samples_per_second")
GIGABYTES = ("max_memory_usage", "memory_usage", "memory_usage_gb", "gpu_memory_gb")
RANKS = ("ranks", "num_gpus", "gpus", "world_size")
BATCH = ("per_rank_batch", "batch_size")
MODE = ("mode", "training_mode")
STEP = ("step_p50_s", "avg_step_time", "step_time_s")


def comparison_report(
    results: ResultTable | Mapping[str, Any] | Iterable[Any],
    *,
    out: Path | str | None = None,
    title: str = "Comparison",
) -> ResultTable:
    """Throughput, memory and quality of several trainings, as a table, JSON and a picture.

    `results` maps a name to each result, or is a list of results that name themselves: run
    folders, what `fit` returned, summaries (mappings with `throughput`, `memory_usage` in GB,
    `num_gpus`, `batch_size`, ...), or a `bench.json`. Speed is against the first. With `out`,
    OUT/comparison.json, .md and .png are written.
    """
    rows = list(_rows(results))
    if not rows:
        raise ConfigError(
            "comparison_report got no results; give a mapping from names to results, or a list "
            "of run folders"
        )
    _relate(rows)
    known = sorted({name for row in rows for name in row["metrics"]})
    report = ResultTable(
        kind="comparison",
        title=title,
        columns=[
            Column("", show.case_name),
            Column("training mode", lambda row: str(row["mode"] or "-")),
            Column("GPUs", lambda row: show.number(row["ranks"])),
            Column("batch size", lambda row: show.number(row["per_rank_batch"])),
            show.SAMPLES,
            Column("speedup", lambda row: show.ratio(row["speedup"])),
            Column("efficiency", lambda row: show.share(row["efficiency"])),
            show.MEMORY,
            *(Column(name, _metric(name)) for name in known),
        ],
        rows=rows,
        bars=[show.SAMPLES_BAR, show.PEAK_BAR],
        notes=_notes(rows),
    )
    if out is not None:
        report.save(out, "comparison")
    return report


def _rows(results: ResultTable | Mapping[str, Any] | Iterable[Any]) -> Iterable[Row]:
    if isinstance(results, ResultTable):
        yield from (_from_summary(str(row["case"]), row) for row in results.rows)
    elif isinstance(results, Mapping):
        for name, value in results.items():
            yield from _from_any(str(name), value)
    elif isinstance(results, (str, Path)):
        yield from _from_any(None, results)
    else:
        for index, value in enumerate(results):
            name = value.get("case") if isinstance(value, Mapping) else None
            unnamed = f"run {index + 1}" if isinstance(value, Mapping) else None
            yield from _from_any(name or unnamed, value)


def _from_any(name: str | None, value: Any) -> Iterable[Row]:
    place = getattr(value, "folder", value)  # what `fit` returns knows its folder
    if isinstance(value, ResultTable):
        yield from _rows(value)
    elif isinstance(value, Mapping):
        yield _from_summary(name or "run", value)
    elif isinstance(place, (str, Path)) and Path(place).suffix == ".json":
        for row in _bench_file(Path(place)):
            yield _from_summary(str(row["case"]), row)
    elif isinstance(place, (str, Path)):
        yield _from_folder(name, Path(place))
    else:
        raise ConfigError(
            f"comparison_report cannot read {name or 'a result'}, a {type(value).__name__}; give "
            "run folders, results of fit, mappings with throughput and memory_usage, or bench.json"
        )


def _from_summary(name: str, value: Mapping[str, Any]) -> Row:
    gigabytes = _first(value, GIGABYTES)
    peak = value.get("peak_bytes")
    if peak is None and gigabytes is not None:
        peak = float(gigabytes) * 2**30  # some summaries count in GB
    metrics = value.get("metrics")
    if metrics is None:
        metrics = {k: value[k] for k in ("loss", "accuracy", "f1") if _is_number(value.get(k))}
        history = value.get("loss_history")
        if history and "loss" not in metrics:
            metrics["loss"] = history[-1]
    mode = _first(value, MODE)
    return {
        "case": name,
        "mode": None if mode is None else str(getattr(mode, "value", mode)),
        "ranks": _first(value, RANKS),
        "per_rank_batch": _first(value, BATCH),
        "samples_per_s": _first(value, THROUGHPUT),
        "step_p50_s": _first(value, STEP),
        "peak_bytes": peak,
        "training_time_s": value.get("training_time"),
        "metrics": {key: float(number) for key, number in metrics.items()},
        "error": value.get("error"),
        "out_of_memory": bool(value.get("out_of_memory")),
    }


def _from_folder(name: str | None, folder: Path) -> Row:
    """A run's folder: its settings, and the figures that its report shows."""
    if not event_files(folder):
        raise ConfigError(
            f"{folder} is not a run folder: it has no events/rank-*.jsonl; give what a run "
            "prints as its folder, runs/RECIPE/NAME",
            code="MGT104",
        )
    run = read_run(folder)
    found = figures(run)
    return {
        "case": name or run.name,
        "mode": run.config.get("training_mode"),
        "ranks": run.world_size,
        "per_rank_batch": run.config.get("batch_size"),
        "samples_per_s": found.samples_per_s,
        "step_p50_s": found.step_s,
        "peak_bytes": found.peak_bytes,
        "training_time_s": found.elapsed_s,
        "metrics": found.metrics,
        "folder": str(folder),
        "error": None,
        "out_of_memory": False,
    }


def _bench_file(path: Path) -> list[Row]:
    try:
        rows: list[Row] = json.loads(path.read_text())["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} cannot be read as results of `mgt bench` ({type(error).__name__}: {error}); "
            "give its bench.json"
        ) from None
    return rows


def _relate(rows: list[Row]) -> None:
    ranks = next((row["ranks"] for row in rows if row["samples_per_s"]), None)
    for row, speedup in zip(rows, show.speedups(rows), strict=True):
        row["speedup"], row["efficiency"] = speedup, None
        if speedup is not None and ranks and row["ranks"]:
            row["efficiency"] = speedup * ranks / row["ranks"]


def _notes(rows: Sequence[Row]) -> list[str]:
    fast = [row for row in rows if row["samples_per_s"]]
    notes = []
    if len(fast) > 1:
        best = max(fast, key=lambda row: float(row["samples_per_s"]))
        notes.append(f"Fastest: {best['case']}, {best['speedup']:.2f}x {fast[0]['case']}.")
    light = [row for row in rows if row["peak_bytes"]]
    if len(light) > 1:
        least = min(light, key=lambda row: float(row["peak_bytes"]))
        notes.append(f"Least memory: {least['case']}.")
    return notes


def _metric(name: str) -> Any:
    def show(row: Row) -> str:
        value = row["metrics"].get(name)
        return "-" if value is None else f"{value:.4f}"

    return show


def _first(value: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((value[name] for name in names if value.get(name) is not None), None)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
