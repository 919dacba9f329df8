"""`PerformanceMonitor`: throughput, memory and use of the device, of a loop or of a run."""

from __future__ import annotations

import operator
import threading
import time
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from multi_gpu_training.errors import ConfigError, MultiGPUError
from multi_gpu_training.extras import install, installed
from multi_gpu_training.monitoring.device import DeviceReader
from multi_gpu_training.monitoring.report.charts import Series
from multi_gpu_training.monitoring.report.event_schema import is_number
from multi_gpu_training.monitoring.report.figures import figures, readings
from multi_gpu_training.monitoring.report.picture import device_panel, draw, logged_panel
from multi_gpu_training.monitoring.report.run_record import read_run

GIGABYTE = 2**30


class PerformanceMonitor:
    """Measures your own training loop:

        monitor = PerformanceMonitor()
        monitor.start_monitoring()
        for ...:
            monitor.record_metrics(loss, batch_size, num_gpus)   # after each step
        summary = monitor.get_summary()
        monitor.plot_metrics("training_metrics.png")

    or reads what a run has recorded: `PerformanceMonitor(run="runs/image/first")`. A thread reads
    the device every `interval_s`; recording a loss does not wait for the GPU.
    """

    def __init__(self, run: Path | str | None = None, interval_s: float = 0.5) -> None:
        if not interval_s > 0:
            raise ConfigError(f"interval_s={interval_s!r}: give seconds above 0")
        self._run = None if run is None else read_run(run)
        self._interval_s = interval_s
        self._began: float | None = None
        self._ended: float | None = None
        self._times: list[float] = []
        self._samples: list[int] = []
        self._losses: list[Any] = []
        self._readings: list[tuple[float, dict[str, float]]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start_monitoring(self) -> None:
        """Start measuring; forget what was recorded before."""
        if self._run is not None:
            raise MultiGPUError(
                "this PerformanceMonitor reads a run's folder; make one without run= to measure"
            )
        self.stop_monitoring()
        self._times, self._samples, self._losses, self._readings = [], [], [], []
        self._ended = None
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        self._reader = DeviceReader(device)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, args=(self._stop,), name="performance-monitor", daemon=True
        )
        self._began = time.perf_counter()
        self._thread.start()

    def stop_monitoring(self) -> None:
        """End the measurement; `get_summary` does not need it."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
            self._ended = time.perf_counter()

    def record_metrics(self, loss: Any, batch_size: int, num_gpus: int = 1) -> None:
        """Record a finished step: its loss (a number or a one-element tensor), the samples per GPU,
        and how many GPUs took part."""
        if self._began is None:
            raise MultiGPUError("record_metrics before start_monitoring; call that first")
        if not _is_one_number(loss):
            raise MultiGPUError(
                f"record_metrics cannot take loss={_described(loss)}: give one number, or a tensor "
                "of one; loss.mean() makes it one"
            )
        try:
            samples = operator.index(batch_size) * operator.index(num_gpus)
        except TypeError:
            samples = -1
        if samples < 0 or num_gpus < 1:
            raise MultiGPUError(
                f"record_metrics cannot take batch_size={batch_size!r}, num_gpus={num_gpus!r}: "
                "give whole numbers, of at least 0 and 1"
            )
        self._times.append(time.perf_counter())
        self._samples.append(samples)
        self._losses.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)

    def get_summary(self) -> dict[str, Any]:
        """training_time (s), throughput and avg_throughput (samples/s: of the latest steps, and of
        all), memory_usage and max_memory_usage (GB), gpu_utilization (%; 0 without a GPU),
        loss_history, samples and steps.

        For a run, these come from its events: training_time leaves out pauses before a resume;
        loss_history holds logged losses, or one value per epoch if none was logged. None means
        unknown. If the number of samples is unknown, avg_throughput is the median of the log.
        """
        return self._summary_of_run() if self._run is not None else self._summary_of_loop()

    def plot_metrics(self, path: Path | str = "training_metrics.png") -> Path:
        """Draw loss, throughput, memory and use of the GPU."""
        path = Path(path)
        if not installed("matplotlib"):
            raise MultiGPUError(f"{path} needs matplotlib; run {install('plots')}", code="MGT105")
        if self._run is not None:
            from multi_gpu_training.monitoring.report.picture import draw_run

            draw_run(self._run, path)
            return path
        if not self._times:
            raise MultiGPUError("nothing to plot: no step was recorded; call record_metrics")
        began = self._began or 0.0
        steps = np.arange(1, len(self._times) + 1, dtype=np.float64)
        spacing = np.diff(np.array([began, *self._times]))
        rate = np.array(self._samples) / np.maximum(spacing, 1e-9)
        panels = [
            logged_panel("loss", [Series("loss", steps, np.array(self._history()))]),
            logged_panel("samples_per_s", [Series("samples/s", steps, rate)]),
        ]
        read = self._read()
        taken = np.array([at - began for at, _ in read])
        for key, title, unit, factor in (
            ("memory_bytes", "Memory", "GB", 1 / GIGABYTE),
            ("gpu_utilization", "GPU use", "%", 1.0),
        ):
            values = np.array([r.get(key, np.nan) * factor for _, r in read])
            if np.isfinite(values).any():
                panels.append(device_panel(title, unit, [Series(title, taken, values)]))
        draw(panels, path, "Training metrics")
        return path

    def _watch(self, stop: threading.Event) -> None:
        while not stop.wait(self._interval_s):
            self._readings.append((time.perf_counter(), self._reader.read()))

    def _read(self) -> list[tuple[float, dict[str, float]]]:
        """The readings so far, with one of now while the loop is being watched."""
        if self._thread is not None or not self._readings:
            self._readings.append((time.perf_counter(), self._reader.read()))
        return list(self._readings)

    def _history(self) -> list[float]:
        return [float(loss) for loss in self._losses]

    def _summary_of_loop(self) -> dict[str, Any]:
        if self._began is None:
            raise MultiGPUError("get_summary before start_monitoring; call that first")
        read = [reading for _, reading in self._read()]
        ended = self._times[-1] if self._times else self._ended or time.perf_counter()
        elapsed = max(ended - self._began, 1e-9)
        samples = sum(self._samples)
        latest = min(10, len(self._times))
        since = self._times[-latest - 1] if latest < len(self._times) else self._began
        recent = sum(self._samples[len(self._samples) - latest :]) / max(ended - since, 1e-9)
        use = [r["gpu_utilization"] for r in read if "gpu_utilization" in r]
        return {
            "training_time": elapsed,
            "throughput": recent if samples else 0.0,
            "avg_throughput": samples / elapsed,
            "memory_usage": read[-1]["memory_bytes"] / GIGABYTE,
            "max_memory_usage": max(r["peak_bytes"] for r in read) / GIGABYTE,
            "gpu_utilization": mean(use) if use else 0.0,
            "loss_history": self._history(),
            "samples": samples,
            "steps": len(self._times),
        }

    def _summary_of_run(self) -> dict[str, Any]:
        run = self._run
        assert run is not None
        found = figures(run)
        rates = run.rates()
        memory = readings(run, "memory_bytes")
        mean_rate = found.samples_per_s
        if found.samples and found.elapsed_s:
            mean_rate = found.samples / found.elapsed_s
        by_epoch = [(epoch.get("train") or {}).get("loss") for epoch in run.epochs]
        return {
            "training_time": found.elapsed_s,
            "throughput": rates[-1] if rates else mean_rate,
            "avg_throughput": mean_rate,
            "memory_usage": memory[-1] / GIGABYTE if memory else None,
            "max_memory_usage": found.peak_bytes / GIGABYTE if found.peak_bytes else None,
            "gpu_utilization": found.gpu_utilization or 0.0,
            "loss_history": run.column("loss") or [v for v in by_epoch if is_number(v)],
            "samples": found.samples,
            "steps": run.last_step,
        }


def _is_one_number(loss: Any) -> bool:
    if isinstance(loss, torch.Tensor):
        return loss.numel() == 1  # its value may still be on its way on the device
    try:
        float(loss)
    except (TypeError, ValueError):
        return False
    return not isinstance(loss, (str, bytes))


def _described(loss: Any) -> str:
    shape = getattr(loss, "shape", None)
    return repr(loss)[:60] if shape is None else f"{type(loss).__name__} of shape {tuple(shape)}"
