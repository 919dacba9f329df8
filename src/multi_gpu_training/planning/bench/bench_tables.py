"""The tables of `mgt bench`: modes side by side, samples per GPU, precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from multi_gpu_training.config_fields import TrainingMode
from multi_gpu_training.measure import memory_model
from multi_gpu_training.measure.case import (
    SHORT,
    Case,
    CaseResult,
    Failure,
    Measure,
    interleaved,
    percentile,
    together,
)
from multi_gpu_training.planning.bench import result_table as show
from multi_gpu_training.planning.bench.result_table import Column, ResultTable, Row

DDP = TrainingMode.DISTRIBUTED_DATA_PARALLEL
SILENT = "without exchange"
NEAR_BEST = 0.95
PARTS = (4, 2, 3, 5)  # of a batch, where it is taken in parts
FP32: dict[str, Any] = {"use_mixed_precision": False, "allow_tf32": False}
MIXED: dict[str, Any] = {"use_mixed_precision": True}


# Single, DP and DDP


def compare_modes(
    measure: Measure,
    ranks: int,
    modes: Sequence[TrainingMode] = (TrainingMode.SINGLE, TrainingMode.DATA_PARALLEL, DDP),
    repeats: int = 1,
    unit: str = "GPU",
) -> ResultTable:
    """Measure each mode on `ranks` ranks, and DDP once more without its exchange."""
    cases = [_mode_case(mode, ranks, unit) for mode in modes]
    silent = [
        replace(case, name=f"{case.name} {SILENT}", silent=True)
        for case in cases
        if case.mode is DDP
    ]
    found = interleaved(measure, [*cases, *silent], repeats)
    parts = {name: together(repeated) for name, repeated in found.items()}
    rows = [parts[case.name].row() for case in cases]
    for case, row, speedup in zip(cases, rows, show.speedups(rows), strict=True):
        row["speedup"] = speedup
        row |= _exposed(parts[case.name], parts.get(f"{case.name} {SILENT}"))
    base = next((row for row in rows if row["samples_per_s"]), None)
    doubts = show.mark_doubts(rows, base)
    return ResultTable(
        kind="modes",
        title=f"One model, {show.counted(ranks, unit)}",
        columns=[
            Column("", show.case_name),
            Column(f"batch per {unit}", lambda row: show.number(row["per_rank_batch"])),
            Column("global batch", lambda row: show.number(row["global_batch"])),
            show.SAMPLES,
            Column("speed", lambda row: show.doubted(show.ratio(row["speedup"]), row)),
            show.STEP,
            show.SPREAD,
            show.MEMORY,
            Column("waits for exchange", _waiting),
            show.GRAPH,
        ],
        rows=rows,
        bars=[show.SAMPLES_BAR, show.STEP_BAR, show.PEAK_BAR],
        notes=[*_mode_notes(rows, unit), *doubts],
    )


def _mode_case(mode: TrainingMode, ranks: int, unit: str) -> Case:
    alone = mode is TrainingMode.SINGLE or (mode is TrainingMode.DATA_PARALLEL and unit != "GPU")
    copies = 1 if alone else ranks
    return Case(f"{SHORT[mode]}, {show.counted(copies, unit)}", mode, copies)


def _exposed(part: CaseResult, silent: CaseResult | None) -> dict[str, Any]:
    """How long a step waits for the exchange of gradients: the step less the same step without
    it; where that was not measured, what DDP's own clock says."""
    nothing: dict[str, Any] = {"exposed_s": None, "exposed_by": None, "exposed_noise_s": None}
    if not part.ok or part.case.mode is not DDP:
        return nothing
    if silent is not None and silent.ok:
        apart = part.step_s - silent.step_s
        # A quarter of the steps lies on either side: what is smaller is not told apart.
        noise = max(
            (percentile(m.step_times_s, 75) - percentile(m.step_times_s, 25)) / 2
            for m in (part, silent)
        )
        return {
            "exposed_s": max(0.0, apart),
            "exposed_by": "the step less the step without exchange",
            "exposed_noise_s": noise,
        }
    logged = part.facts.get("ddp_logger") or {}
    if "avg_backward_comm_time" in logged:
        overlap = logged.get("avg_backward_compute_comm_overlap_time", 0.0)
        waits = max(0.0, logged["avg_backward_comm_time"] - overlap)
        return nothing | {"exposed_s": waits, "exposed_by": "DDP's logger"}
    return nothing


def _waiting(row: Row) -> str:
    value = row["exposed_s"]
    if value is None:
        return "-"
    noise = row["exposed_noise_s"]
    if noise is not None and value < noise:
        return f"< {show.milliseconds(noise)}"
    return f"{show.milliseconds(value)} ({value / row['step_p50_s']:.0%})"


def _same_batch(rows: list[Row], unit: str) -> str:
    """What is the same in every case, so that people know what the speeds compare."""
    if len({row["per_rank_batch"] for row in rows}) == 1:
        return f"The batch per {unit} is the same in every case"
    if len({row["global_batch"] for row in rows}) == 1:
        return f"The global batch is the same in every case, shared out over each {unit}"
    return f"The batch per {unit} and the global batch differ between the cases"


def _mode_notes(rows: list[Row], unit: str) -> list[str]:
    found = []
    measured = [row for row in rows if row["samples_per_s"] is not None]
    if measured:
        first = measured[0]
        found.append(
            f"{first['device']}, {first['precision']}, {first['parameters']:,} parameters. "
            f"{_same_batch(measured, unit)}; speed is samples/s against the first."
        )
    for row in measured:
        on_gpu = row["device"] != "CPU"  # which has no graphs to miss
        if on_gpu and row["not_a_graph_because"] and (row["graph_share"] or 0) < 0.95:
            found.append(
                f"{row['case']}: {row['graph_share']:.0%} of the steps ran as a graph "
                f"({row['execution']}): {row['not_a_graph_because']}"
            )
    if any(row["mode"] == TrainingMode.DATA_PARALLEL for row in measured) and unit != "GPU":
        found.append("DP needs GPUs: on the CPU it is one copy of the model.")
    found += [f"{row['case']}: {row['error']}" for row in rows if row["error"]]
    return found


# Samples per GPU


def compare_batch_sizes(
    measure: Measure,
    mode: TrainingMode,
    ranks: int,
    sizes: Sequence[int],
    repeats: int = 1,
    unit: str = "GPU",
) -> ResultTable:
    """Measure each size per rank, from the smallest on; beyond the first that does not fit, none
    is tried."""
    rows: list[Row] = []
    too_large: int | None = None
    for size in sorted(set(sizes)):
        case = Case(f"batch {size}", mode, ranks, {"batch_size": size})
        # What is larger needs more memory still: a try would only cost minutes.
        if too_large is None:
            part = together(interleaved(measure, [case], repeats)[case.name])
        else:
            reason = f"not tried: {too_large} was out of memory"
            part = CaseResult(case, failure=Failure.OUT_OF_MEMORY, error=reason)
        if part.out_of_memory and too_large is None:
            too_large = size
        total = part.facts.get("global_batch", size * ranks)
        rows.append({**part.row(), "batch_size": size, "total_batch": total})
    for row, speedup in zip(rows, show.speedups(rows), strict=True):
        row["relative_speed"] = speedup
    doubts = show.mark_doubts(rows)
    report = ResultTable(
        kind="batch sizes",
        title=f"Samples per {unit}, {show.counted(ranks, unit)}",
        columns=[
            Column(f"per-{unit} batch", lambda row: show.number(row["batch_size"])),
            Column("total batch", lambda row: show.number(row["total_batch"])),
            Column(f"memory/{unit}", _fitting),
            Column("training speed", _relative_speed),
            show.SAMPLES,
            show.STEP,
            show.SPREAD,
            show.GRAPH,
        ],
        rows=rows,
        bars=[show.SAMPLES_BAR, show.PEAK_BAR],
    )
    _recommend(report, unit)
    report.notes += doubts
    return report


def _fitting(row: Row) -> str:
    error = row["error"] or ""
    if error and not row["out_of_memory"]:
        return f"failed: {error.splitlines()[0]}"
    if error.startswith("not tried"):
        return "not tried"
    return "out of memory" if row["out_of_memory"] else show.memory(row["peak_bytes"])


def _relative_speed(row: Row) -> str:
    value = row["relative_speed"]
    if value == 1:
        return "baseline"
    return show.ratio(value) + (" faster" if value is not None and value > 1 else "")


def _recommend(report: ResultTable, unit: str) -> None:
    """The smallest size that is about as fast as the fastest: more buys nothing, and smaller steps
    learn more from the same samples."""
    good = [row for row in report.rows if row["samples_per_s"] is not None]
    if not good:
        report.notes.append("No size could be measured.")
        report.notes += [f"{row['case']}: {row['error']}" for row in report.rows]
        return
    fits = [row for row in good if _leaves_room(row)] or good[:1]
    best = max(row["samples_per_s"] for row in fits)
    chosen = next(row for row in fits if row["samples_per_s"] >= NEAR_BEST * best)
    report.recommended = {"batch_size": chosen["batch_size"]}
    speed, peak = f"{chosen['samples_per_s']:,.0f} samples/s", show.memory(chosen["peak_bytes"])
    free = f"{memory_model.SAFETY_MARGIN:.0%} of the memory free"
    report.notes.append(
        f"Recommended: batch_size={chosen['batch_size']} per {unit} ({speed}, {peak}), the "
        f"smallest within {1 - NEAR_BEST:.0%} of the fastest that leaves {free}. Each step then "
        f"takes {chosen['total_batch']:,} samples; choose the learning rate for that (lr_scaling)."
    )


def _leaves_room(row: Row) -> bool:
    """Whether a size that was trained leaves enough memory free, or nobody knows."""
    room, size = memory_model.available_bytes(row), row["batch_size"]
    point = memory_model.MemoryPoint(size, row["peak_bytes"], row["reserved_bytes"])
    model = memory_model.MemoryModel.from_points([point])
    if room is None or model is None:
        return True
    return model.verdict(size, room) is memory_model.FitVerdict.FITS


# Precision


def compare_precisions(
    measure: Measure, mode: TrainingMode, ranks: int, repeats: int = 1, unit: str = "GPU"
) -> ResultTable:
    """All cases take the same global batch; with accumulation it is taken in parts."""
    # The first case shows how large the batch is, before it can be cut into parts.
    probe = measure(Case("FP32", mode, ranks, FP32))
    cases = [Case("FP32", mode, ranks, FP32), Case("mixed precision", mode, ranks, MIXED)]
    parts = 1
    if probe.ok:
        batch, before = probe.facts["per_rank_batch"], probe.facts["accumulation"]
        parts = next((part for part in PARTS if batch % part == 0), 1)
        if parts > 1:
            accumulation = before * parts
            share = {"batch_size": batch // parts, "gradient_accumulation_steps": accumulation}
            name = f"mixed precision + accumulation {accumulation}"
            cases.append(Case(name, mode, ranks, {**MIXED, **share}))
    found = interleaved(measure, cases, repeats, begun=[probe])
    rows = [together(found[case.name]).row() for case in cases]
    base = rows[0]
    for row in rows:  # against FP32, or nothing where that failed
        known = row["samples_per_s"] is not None and base["samples_per_s"] is not None
        row["speedup"] = row["samples_per_s"] / base["samples_per_s"] if known else None
        row["memory_ratio"] = row["peak_bytes"] / base["peak_bytes"] if known else None
    doubts = show.mark_doubts(rows)
    report = ResultTable(
        kind="precision",
        title=f"Precision, {show.counted(ranks, unit)}",
        columns=[
            Column("configuration", show.case_name),
            Column("arithmetic", lambda row: row["precision"] or "-"),
            show.MEMORY,
            Column("of FP32's", lambda row: show.ratio(row["memory_ratio"])),
            Column("speedup", lambda row: show.ratio(row["speedup"])),
            show.SAMPLES,
            Column(f"batch per {unit}", lambda row: show.number(row["per_rank_batch"])),
            Column("global batch", lambda row: show.number(row["global_batch"])),
            show.STEP,
            show.SPREAD,
            show.GRAPH,
        ],
        rows=rows,
        bars=[show.SAMPLES_BAR, show.PEAK_BAR],
    )
    if probe.ok and parts == 1:
        report.notes.append(
            f"No row with accumulation: the batch of {probe.facts['per_rank_batch']} cannot be "
            "taken in equal parts; try --batch-size 32."
        )
    report.notes += [f"{row['case']}: {row['error']}" for row in rows if row["error"]]
    report.notes += doubts
    return report
