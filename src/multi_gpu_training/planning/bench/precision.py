"""Memory and speed of float32, of mixed precision, and of mixed precision in smaller bites."""

from __future__ import annotations

from typing import Any

from multi_gpu_training.config import TrainingMode
from multi_gpu_training.planning.bench.case import Case, Measure, interleaved, together
from multi_gpu_training.planning.bench.report import (
    GRAPH,
    MEMORY,
    PEAK_BAR,
    SAMPLES,
    SAMPLES_BAR,
    SPREAD,
    STEP,
    Column,
    Report,
    case_name,
    number,
    ratio,
)

PARTS = (4, 2, 3, 5)
FP32: dict[str, Any] = {"use_mixed_precision": False, "allow_tf32": False}
MIXED: dict[str, Any] = {"use_mixed_precision": True}


def compare_precisions(
    measure: Measure, mode: TrainingMode, ranks: int, repeats: int = 1, unit: str = "GPU"
) -> Report:
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
    report = Report(
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
