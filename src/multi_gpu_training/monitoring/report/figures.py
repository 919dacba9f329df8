"""The figures of a run: speed, memory, use of the device, and what was forecast."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from multi_gpu_training.monitoring.report.attribution import side_by_side
from multi_gpu_training.monitoring.report.event_schema import is_number
from multi_gpu_training.monitoring.report.run_record import RunRecord


@dataclass
class Figures:
    """None is not known."""

    samples: int | None = None
    samples_per_s: float | None = None
    step_s: float | None = None
    elapsed_s: float | None = None
    peak_bytes: float | None = None
    gpu_utilization: float | None = None
    power_w: float | None = None
    mfu: float | None = None
    train: dict[str, float] = field(default_factory=dict)  # metrics of the last epoch
    val: dict[str, float] = field(default_factory=dict)
    forecast: dict[str, Any] | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """Those that say how good the model is: of validation, where there is one."""
        return self.val or self.train


def figures(run: RunRecord) -> Figures:
    # The first interval holds the start: compilation, autotuning, filling caches.
    rates = run.rates()
    rate = median(rates[1:] or rates) if rates else None
    facts = run.facts.get(run.ranks[0], {})
    batch = float(facts["global_batch"]) if is_number(facts.get("global_batch")) else None
    steps = side_by_side(run)
    step_s = batch / rate if rate and batch else steps.mean_loaded_step if steps else None
    if rate is None and step_s and batch:
        rate = batch / step_s
    last = run.epochs[-1] if run.epochs else {}
    return Figures(
        samples=_samples(run, facts),
        samples_per_s=rate,
        step_s=step_s,
        elapsed_s=run.trained_s or None,
        peak_bytes=max(readings(run, "peak_bytes"), default=None),
        gpu_utilization=_mean(readings(run, "gpu_utilization")),
        power_w=_mean(readings(run, "power_w")),
        mfu=_mfu(run, step_s),
        train=_numbers(last.get("train")),
        val=_numbers(last.get("val")),
        forecast=_forecast(run, rate, step_s, batch),
    )


def _numbers(values: Any) -> dict[str, float]:
    given = values if isinstance(values, dict) else {}
    return {name: float(value) for name, value in given.items() if is_number(value)}


def readings(run: RunRecord, name: str) -> list[float]:
    """All readings of the devices of all ranks."""
    return [
        float(reading[name])
        for device in run.devices.values()
        for reading in device
        if is_number(reading.get(name))
    ]


def _mean(values: list[float]) -> float | None:
    return mean(values) if values else None


def _mfu(run: RunRecord, step_s: float | None) -> float | None:
    """Part of the GPUs' peak that the model's own matrix products use."""
    used = []
    for rank, work in run.work.items():
        facts = run.facts.get(rank, {})
        peak, flops = facts.get("peak_flops"), work.get("flops")
        if facts.get("device_uuid") and peak and flops and step_s:
            used.append(float(flops) / (float(peak) * step_s))
    return _mean(used)


def _samples(run: RunRecord, facts: dict[str, Any]) -> int | None:
    """Samples that moved the weights; the last batch of an epoch may be a short one."""
    batch, samples, steps = (
        facts.get(name) for name in ("global_batch", "epoch_samples", "epoch_steps")
    )
    if not isinstance(batch, int) or not isinstance(samples, int) or not isinstance(steps, int):
        return None
    epochs, rest = divmod(run.last_step, max(steps, 1))
    return epochs * samples + rest * batch


def _forecast(
    run: RunRecord, rate: float | None, step_s: float | None, batch: float | None
) -> dict[str, Any] | None:
    """What was forecast for so many GPUs, beside what came. Steps of another batch are other
    steps: then only samples are compared, and the band is left out."""
    table = run.forecast.get("gpus", run.forecast)
    found = table.get(str(run.world_size)) if isinstance(table, dict) else None
    if not isinstance(found, dict):
        return None
    foreseen = found.get("global_batch")
    differs = is_number(foreseen) and batch is not None and foreseen != batch
    actual = {"samples_per_s": rate} if differs else {"samples_per_s": rate, "step_time_s": step_s}
    expected = {name: found[name] for name in actual if is_number(found.get(name))}
    limits = [float(found[key]) for key in ("low", "high") if is_number(found.get(key))]
    band = (min(limits), max(limits)) if len(limits) == 2 and not differs else None
    # The band is of the figure that lies in it.
    name = next((n for n in expected if band and band[0] <= expected[n] <= band[1]), None)
    name, band = (name, band) if name else (next(iter(expected), None), None)
    if name is None:
        return None
    came = actual[name]
    return {
        "figure": name,
        "expected": expected[name],
        "actual": came,
        "low": band[0] if band else None,
        "high": band[1] if band else None,
        "off": came / expected[name] - 1 if came is not None and expected[name] else None,
        "inside": band is not None and came is not None and band[0] <= came <= band[1],
        "batches": (foreseen, batch) if differs else None,
    }
