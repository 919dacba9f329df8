"""What was measured and forecast, in words."""

from __future__ import annotations

from statistics import median

from multi_gpu_training.planning.bench.case import percentile
from multi_gpu_training.planning.bench.report import memory, milliseconds, number
from multi_gpu_training.planning.estimate.memory import largest_batch
from multi_gpu_training.planning.forecast.profile import StepProfile


def measured_lines(profile: StepProfile) -> list[str]:
    """What was measured, in sentences."""
    times = profile.step_times_s
    low, middle, high = (percentile(times, p) for p in (10, 50, 90))
    rate = profile.per_rank_batch * profile.accumulation / median(times)
    lines = [
        f"{profile.device}, {profile.precision}: batch {profile.per_rank_batch}"
        + (f" x {profile.accumulation} micro-batches" if profile.accumulation > 1 else "")
        + f", step {milliseconds(middle)} (10 % - 90 %: {milliseconds(low)} - "
        f"{milliseconds(high)}), {number(rate)} samples/s, run as {profile.execution}",
        f"forward {milliseconds(profile.forward_s)}, backward {milliseconds(profile.backward_s)}, "
        f"optimizer {milliseconds(profile.optimizer_s)}",
        f"{len(profile.buckets)} bucket{'s' if len(profile.buckets) != 1 else ''} of gradients, "
        f"{size(profile.gradient_bytes)}: "
        + ", ".join(
            f"{size(bucket.size_bytes)} after {milliseconds(bucket.ready_s)}"
            for bucket in profile.buckets[:6]
        )
        + (" ..." if len(profile.buckets) > 6 else ""),
    ]
    if profile.data_on_device:
        lines.append("the data lie on the GPU: nothing is loaded")
    elif profile.loader_rates:
        rates = ", ".join(
            f"{workers}: {number(found)}" for workers, found in sorted(profile.loader_rates.items())
        )
        lines.append(f"samples/s that are read, by workers: {rates}")
    if profile.memory:
        points = ", ".join(f"{p.per_rank_batch}: {memory(p.peak_bytes)}" for p in profile.memory)
        fitting = largest_batch(profile)
        lines.append(
            f"peak memory by batch: {points}"
            + (f"; up to {number(fitting)} fit" if fitting is not None else "")
        )
    if profile.power_w is not None:
        lines.append(f"{profile.power_w:.0f} W while training")
    return lines


# How values are shown


def size(count: float) -> str:
    return f"{count / 2**20:.1f} MB" if count >= 2**20 else f"{count / 2**10:.0f} kB"


def times(value: float) -> str:
    """As guide 002 shows it: `1.9x`."""
    return f"{value:.2f}x" if value < 10 and value != round(value) else f"{value:,.1f}x"


def duration(seconds: float | None) -> str:
    """As guide 002 shows it: `10.2 minutes`."""
    if seconds is None:
        return "-"
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:,.1f} days"
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} hours"
    if seconds >= 60:
        return f"{seconds / 60:.1f} minutes"
    return f"{seconds:.1f} seconds" if seconds >= 1 else f"{seconds:.2g} seconds"


def hours(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def money(value: float | None, currency: str) -> str:
    if value is None:
        return "-"
    sign = {"USD": "$", "EUR": "€", "": ""}.get(currency, f"{currency} ")
    return f"{sign}{value:,.2f}" if value >= 0.005 or value == 0 else f"{sign}{value:.2g}"
