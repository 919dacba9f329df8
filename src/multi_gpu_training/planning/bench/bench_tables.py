"""The tables of `mgt bench`: modes side by side, samples per GPU, precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from multi_gpu_training.config import TrainingMode
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
from multi_gpu_training.measure.memory_model import (
    SAFETY_MARGIN,
    FitVerdict,
    MemoryModel,
    MemoryPoint,
    available_bytes,
)
from multi_gpu_training.planning.bench.result_table import (
    GRAPH,
    MEMORY,
    PEAK_BAR,
    SAMPLES,
    SAMPLES_BAR,
    SPREAD,
    STEP,
    STEP_BAR,
    Column,
    ResultTable,
    Row,
    case_name,
    memory,
    milliseconds,
    number,
    ratio,
)

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
    modes: Sequence[TrainingMode] = tuple(TrainingMode),
    repeats: int = 1,
    unit: str = "GPU",
) -> ResultTable:
    """Measure each mode on `ranks` ranks, and DDP once more without its exchange."""
    cases = [_mode_case(mode, ranks, unit) for mode in modes]
    asked = list(cases)
    for case in cases:
        if case.mode is DDP:
            asked.append(replace(case, name=f"{case.name} {SILENT}", silent=True))
    parts = {name: together(found) for name, found in interleaved(measure, asked, repeats).items()}
    found = [parts[case.name] for case in cases]
    rows = [part.row() for part in found]
    base = next((part for part in found if part.ok), None)
    for part, row in zip(found, rows, strict=True):
        row["speedup"] = part.samples_per_s / base.samples_per_s if part.ok and base else None
        row |= _exposed(part, parts.get(f"{part.case.name} {SILENT}"))
    return ResultTable(
        kind="modes",
        title=f"One model, {ranks} {unit}{'s' if ranks > 1 else ''}",
        columns=_mode_columns(unit),
        rows=rows,
        bars=[
            SAMPLES_BAR,
            STEP_BAR,
            PEAK_BAR,
        ],
        notes=_mode_notes(rows, unit),
    )


def _mode_case(mode: TrainingMode, ranks: int, unit: str = "GPU") -> Case:
    alone = mode is TrainingMode.SINGLE or (mode is TrainingMode.DATA_PARALLEL and unit != "GPU")
    copies = 1 if alone else ranks
    return Case(f"{SHORT[mode]}, {copies} {unit}{'s' if copies > 1 else ''}", mode, copies)


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


def _mode_columns(unit: str) -> list[Column]:
    return [
        Column("", case_name),
        Column(f"batch per {unit}", lambda row: number(row["per_rank_batch"])),
        Column("global batch", lambda row: number(row["global_batch"])),
        SAMPLES,
        Column("speed", lambda row: ratio(row["speedup"])),
        STEP,
        SPREAD,
        MEMORY,
        Column("waits for exchange", _waiting),
        GRAPH,
    ]


def _waiting(row: Row) -> str:
    value = row["exposed_s"]
    if value is None:
        return "-"
    noise = row["exposed_noise_s"]
    if noise is not None and value < noise:
        return f"< {milliseconds(noise)}"
    return f"{milliseconds(value)} ({value / row['step_p50_s']:.0%})"


def _mode_notes(rows: list[Row], unit: str) -> list[str]:
    found = []
    measured = [row for row in rows if row["samples_per_s"] is not None]
    if measured:
        first = measured[0]
        found.append(
            f"{first['device']}, {first['precision']}, {first['parameters']:,} parameters. The "
            f"batch per {unit} is the same in every case; speed is samples/s against the first."
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
    found: dict[int, CaseResult] = {}
    too_large: int | None = None
    for size in sorted(set(sizes)):
        case = Case(f"batch {size}", mode, ranks, {"batch_size": size})
        if too_large is not None:
            reason = f"not tried: {too_large} was out of memory"
            found[size] = CaseResult(case, failure=Failure.OUT_OF_MEMORY, error=reason)
            continue
        found[size] = together(interleaved(measure, [case], repeats)[case.name])
        if found[size].out_of_memory:
            too_large = size
    rows = [_batch_row(size, part, found, ranks) for size, part in found.items()]
    report = ResultTable(
        kind="batch sizes",
        title=f"Samples per {unit}, {ranks} {unit}{'s' if ranks > 1 else ''}",
        columns=[
            Column(f"per-{unit} batch", lambda row: number(row["batch_size"])),
            Column("total batch", lambda row: number(row["total_batch"])),
            Column(f"memory/{unit}", _fitting),
            Column("training speed", _relative_speed),
            SAMPLES,
            STEP,
            SPREAD,
            GRAPH,
        ],
        rows=rows,
        bars=[SAMPLES_BAR, PEAK_BAR],
    )
    _recommend(report, unit)
    return report


def _batch_row(size: int, part: CaseResult, found: dict[int, CaseResult], ranks: int) -> Row:
    base = next((other for other in found.values() if other.ok), None)
    relative = part.samples_per_s / base.samples_per_s if part.ok and base else None
    total = part.facts.get("global_batch", size * ranks)
    return {**part.row(), "batch_size": size, "total_batch": total, "relative_speed": relative}


def _fitting(row: Row) -> str:
    if row["error"] and not row["out_of_memory"]:
        return f"failed: {row['error'].splitlines()[0]}"
    if row["error"] and row["error"].startswith("not tried"):
        return "not tried"
    return "out of memory" if row["out_of_memory"] else memory(row["peak_bytes"])


def _relative_speed(row: Row) -> str:
    value = row["relative_speed"]
    if value is None:
        return "-"
    if value == 1:
        return "baseline"
    return f"{value:.2f}x {'faster' if value > 1 else 'slower'}" if value > 1 else f"{value:.2f}x"


def _recommend(report: ResultTable, unit: str) -> None:
    """The smallest size that is about as fast as the fastest: more buys nothing, and smaller steps
    learn more from the same samples."""
    good = [row for row in report.rows if row["samples_per_s"] is not None]
    if not good:
        report.notes.append("No size could be measured.")
        report.notes += [f"{row['case']}: {row['error']}" for row in report.rows]
        return
    fits = [row for row in good if _verdict(row) is FitVerdict.FITS]
    if not fits:
        fits = good[:1]
    best = max(row["samples_per_s"] for row in fits)
    chosen = next(row for row in fits if row["samples_per_s"] >= NEAR_BEST * best)
    report.recommended = {"batch_size": chosen["batch_size"]}
    speed, peak = f"{chosen['samples_per_s']:,.0f} samples/s", memory(chosen["peak_bytes"])
    report.notes.append(
        f"Recommended: batch_size={chosen['batch_size']} per {unit} ({speed}, {peak}), the "
        f"smallest within {1 - NEAR_BEST:.0%} of the fastest that leaves {SAFETY_MARGIN:.0%} of "
        f"the memory free. Each step then takes {chosen['total_batch']:,} samples; choose the "
        "learning rate for that (lr_scaling)."
    )


def _verdict(row: Row) -> FitVerdict:
    """Whether a size that was trained leaves enough memory free."""
    room = available_bytes(row)
    point = MemoryPoint(row["batch_size"], row["peak_bytes"], row["reserved_bytes"])
    model = MemoryModel.from_points([point])
    if room is None or model is None:
        return FitVerdict.FITS
    return model.verdict(point.per_rank_batch, room)


# Precision


def compare_precisions(
    measure: Measure, mode: TrainingMode, ranks: int, repeats: int = 1, unit: str = "GPU"
) -> ResultTable:
    """All cases take the same global batch; with accumulation it is taken in parts."""
    probe = measure(Case("FP32", mode, ranks, FP32))
    cases = [Case("FP32", mode, ranks, FP32), Case("mixed precision", mode, ranks, MIXED)]
    parts = 1
    if probe.ok:
        batch, before = probe.facts["per_rank_batch"], probe.facts["accumulation"]
        parts = next((part for part in PARTS if batch % part == 0), 1)
        if parts > 1:
            settings = {
                **MIXED,
                "batch_size": batch // parts,
                "gradient_accumulation_steps": before * parts,
            }
            name = f"mixed precision + accumulation {before * parts}"
            cases.append(Case(name, mode, ranks, settings))
    found = interleaved(measure, cases, repeats, begun=[probe])
    rows = [together(found[case.name]).row() for case in cases]
    base = rows[0]
    for row in rows:
        known = row["samples_per_s"] is not None and base["samples_per_s"] is not None
        row["speedup"] = row["samples_per_s"] / base["samples_per_s"] if known else None
        row["memory_ratio"] = row["peak_bytes"] / base["peak_bytes"] if known else None
    report = ResultTable(
        kind="precision",
        title=f"Precision, {ranks} {unit}{'s' if ranks > 1 else ''}",
        columns=[
            Column("configuration", case_name),
            Column("arithmetic", lambda row: row["precision"] or "-"),
            MEMORY,
            Column("of FP32's", lambda row: ratio(row["memory_ratio"])),
            Column("speedup", lambda row: ratio(row["speedup"])),
            SAMPLES,
            Column(f"batch per {unit}", lambda row: number(row["per_rank_batch"])),
            Column("global batch", lambda row: number(row["global_batch"])),
            STEP,
            SPREAD,
            GRAPH,
        ],
        rows=rows,
        bars=[SAMPLES_BAR, PEAK_BAR],
    )
    if probe.ok and parts == 1:
        report.notes.append(
            f"No row with accumulation: the batch of {probe.facts['per_rank_batch']} cannot be "
            "taken in equal parts; try --batch-size 32."
        )
    report.notes += [f"{row['case']}: {row['error']}" for row in rows if row["error"]]
    return report
