"""How many samples a GPU should take at a time: speed and memory of each size."""

from __future__ import annotations

from collections.abc import Sequence

from multi_gpu_training.config import TrainingMode
from multi_gpu_training.planning.bench.case import Case, Measure, Measurement, interleaved, together
from multi_gpu_training.planning.bench.report import (
    GRAPH,
    PEAK_BAR,
    SAMPLES,
    SAMPLES_BAR,
    SPREAD,
    STEP,
    Column,
    Report,
    Row,
    memory,
    number,
)

NEAR_BEST = 0.95
FULL = 0.9  # of a GPU's memory: what is left is for fragmentation and longer batches


def compare_batch_sizes(
    measure: Measure,
    mode: TrainingMode,
    ranks: int,
    sizes: Sequence[int],
    repeats: int = 1,
    unit: str = "GPU",
) -> Report:
    """Measure each size per rank, from the smallest on; beyond the first that does not fit, none
    is tried."""
    found: dict[int, Measurement] = {}
    too_large: int | None = None
    for size in sorted(set(sizes)):
        case = Case(f"batch {size}", mode, ranks, {"batch_size": size})
        if too_large is not None:
            reason = f"not tried: {too_large} was out of memory"
            found[size] = Measurement(case, out_of_memory=True, error=reason)
            continue
        found[size] = together(interleaved(measure, [case], repeats)[case.name])
        if found[size].out_of_memory:
            too_large = size
    rows = [batch_row(size, part, found, ranks) for size, part in found.items()]
    report = Report(
        kind="batch sizes",
        title=f"Samples per {unit}, {ranks} {unit}{'s' if ranks > 1 else ''}",
        columns=[
            Column(f"per-{unit} batch", lambda row: number(row["batch_size"])),
            Column("total batch", lambda row: number(row["total_batch"])),
            Column(f"memory/{unit}", fitting),
            Column("training speed", speed),
            SAMPLES,
            STEP,
            SPREAD,
            GRAPH,
        ],
        rows=rows,
        bars=[SAMPLES_BAR, PEAK_BAR],
    )
    recommend(report, unit)
    return report


def batch_row(size: int, part: Measurement, found: dict[int, Measurement], ranks: int) -> Row:
    base = next((other for other in found.values() if other.ok), None)
    relative = part.samples_per_s / base.samples_per_s if part.ok and base else None
    total = part.facts.get("global_batch", size * ranks)
    return {**part.row(), "batch_size": size, "total_batch": total, "relative_speed": relative}


def fitting(row: Row) -> str:
    if row["error"] and not row["out_of_memory"]:
        return f"failed: {row['error'].splitlines()[0]}"
    if row["error"] and row["error"].startswith("not tried"):
        return "not tried"
    return "out of memory" if row["out_of_memory"] else memory(row["peak_bytes"])


def speed(row: Row) -> str:
    value = row["relative_speed"]
    if value is None:
        return "-"
    if value == 1:
        return "baseline"
    return f"{value:.2f}x {'faster' if value > 1 else 'slower'}" if value > 1 else f"{value:.2f}x"


def recommend(report: Report, unit: str) -> None:
    """The smallest size that is about as fast as the fastest: more buys nothing, and smaller steps
    learn more from the same samples."""
    good = [row for row in report.rows if row["samples_per_s"] is not None]
    if not good:
        report.notes.append("No size could be measured.")
        report.notes += [f"{row['case']}: {row['error']}" for row in report.rows]
        return
    fits = [
        row for row in good if not row["total_bytes"] or row["reserved_bytes"] < full_bytes(row)
    ]
    if not fits:
        fits = good[:1]
    best = max(row["samples_per_s"] for row in fits)
    chosen = next(row for row in fits if row["samples_per_s"] >= NEAR_BEST * best)
    report.recommended = {"batch_size": chosen["batch_size"]}
    report.notes.append(
        f"Recommended: batch_size={chosen['batch_size']} per {unit} "
        f"({chosen['samples_per_s']:,.0f} samples/s, {memory(chosen['peak_bytes'])}), the smallest "
        f"within {1 - NEAR_BEST:.0%} of the fastest that leaves {1 - FULL:.0%} of the memory free. "
        f"A step then takes {chosen['total_batch']:,} samples; choose the learning rate for that "
        "(lr_scaling)."
    )


def full_bytes(row: Row) -> float:
    return FULL * float(row["total_bytes"])
