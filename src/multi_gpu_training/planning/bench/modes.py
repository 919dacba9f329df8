"""The same training single, under DP and under DDP, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from multi_gpu_training.config import TrainingMode
from multi_gpu_training.planning.bench.case import (
    SHORT,
    Case,
    Measure,
    Measurement,
    interleaved,
    percentile,
    together,
)
from multi_gpu_training.planning.bench.report import (
    GRAPH,
    MEMORY,
    PEAK_BAR,
    SAMPLES,
    SAMPLES_BAR,
    SPREAD,
    STEP,
    STEP_BAR,
    Column,
    Report,
    Row,
    case_name,
    milliseconds,
    number,
    ratio,
)

DDP = TrainingMode.DISTRIBUTED_DATA_PARALLEL
SILENT = "without exchange"


def compare_modes(
    measure: Measure,
    ranks: int,
    modes: Sequence[TrainingMode] = tuple(TrainingMode),
    repeats: int = 1,
    unit: str = "GPU",
) -> Report:
    """Measure each mode on `ranks` ranks, and DDP once more without its exchange."""
    cases = [mode_case(mode, ranks, unit) for mode in modes]
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
        row |= exposed(part, parts.get(f"{part.case.name} {SILENT}"))
    return Report(
        kind="modes",
        title=f"One model, {ranks} {unit}{'s' if ranks > 1 else ''}",
        columns=columns(unit),
        rows=rows,
        bars=[
            SAMPLES_BAR,
            STEP_BAR,
            PEAK_BAR,
        ],
        notes=notes(rows, unit),
    )


def mode_case(mode: TrainingMode, ranks: int, unit: str = "GPU") -> Case:
    alone = mode is TrainingMode.SINGLE or (mode is TrainingMode.DATA_PARALLEL and unit != "GPU")
    copies = 1 if alone else ranks
    return Case(f"{SHORT[mode]}, {copies} {unit}{'s' if copies > 1 else ''}", mode, copies)


def exposed(part: Measurement, silent: Measurement | None) -> dict[str, Any]:
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


def columns(unit: str) -> list[Column]:
    return [
        Column("", case_name),
        Column(f"batch per {unit}", lambda row: number(row["per_rank_batch"])),
        Column("global batch", lambda row: number(row["global_batch"])),
        SAMPLES,
        Column("speed", lambda row: ratio(row["speedup"])),
        STEP,
        SPREAD,
        MEMORY,
        Column("waits for exchange", waiting),
        GRAPH,
    ]


def waiting(row: Row) -> str:
    value = row["exposed_s"]
    if value is None:
        return "-"
    noise = row["exposed_noise_s"]
    if noise is not None and value < noise:
        return f"< {milliseconds(noise)}"
    return f"{milliseconds(value)} ({value / row['step_p50_s']:.0%})"


def notes(rows: list[Row], unit: str) -> list[str]:
    found = []
    measured = [row for row in rows if row["samples_per_s"] is not None]
    if measured:
        first = measured[0]
        found.append(
            f"{first['device']}, {first['precision']}, {first['parameters']:,} parameters. The "
            f"batch per {unit} is the same in every case; speed is samples/s against the first."
        )
    for row in measured:
        on_gpu = row["device"] != "CPU"  # where there are no graphs to miss
        if on_gpu and row["not_a_graph_because"] and (row["graph_share"] or 0) < 0.95:
            found.append(
                f"{row['case']}: {row['graph_share']:.0%} of the steps ran as a graph "
                f"({row['execution']}): {row['not_a_graph_because']}"
            )
    if any(row["mode"] == TrainingMode.DATA_PARALLEL for row in measured) and unit != "GPU":
        found.append("DP needs GPUs: on the CPU it is one copy of the model.")
    found += [f"{row['case']}: {row['error']}" for row in rows if row["error"]]
    return found
