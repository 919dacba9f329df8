"""PerformanceMonitor, as guide 003 uses it, and over the folder of a run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from recorded import Folder

from multi_gpu_training import PerformanceMonitor
from multi_gpu_training.errors import MultiGPUError
from multi_gpu_training.monitoring.device import STALL_S, StallWatch

KEYS = {"training_time", "throughput", "memory_usage", "gpu_utilization", "loss_history"}


def test_the_block_of_guide_003(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses, batch_size, num_gpus = [torch.tensor(3.0, requires_grad=True), 2.0, 1.0], 32, 4
    monitor = PerformanceMonitor(interval_s=0.01)
    monitor.start_monitoring()
    for loss in losses:
        time.sleep(0.02)
        monitor.record_metrics(loss, batch_size, num_gpus)
    summary = monitor.get_summary()
    print(f"Throughput: {summary['avg_throughput']:.2f} samples/sec")
    print(f"Memory Usage: {summary['max_memory_usage']:.2f} GB")
    monitor.plot_metrics(tmp_path / "training_metrics.png")
    monitor.stop_monitoring()
    assert summary.keys() >= KEYS
    assert summary["loss_history"] == [3.0, 2.0, 1.0] and summary["samples"] == 3 * 128
    # Three steps of at least 20 ms.
    assert 0 < summary["avg_throughput"] <= 384 / 0.06
    assert summary["throughput"] == pytest.approx(summary["avg_throughput"])
    assert 0 < summary["memory_usage"] <= summary["max_memory_usage"]
    assert (tmp_path / "training_metrics.png").read_bytes().startswith(b"\x89PNG")
    assert "samples/sec" in capsys.readouterr().out


def test_starting_again_forgets_and_stopping_ends_the_thread() -> None:
    monitor = PerformanceMonitor(interval_s=0.01)
    monitor.start_monitoring()
    monitor.record_metrics(1.0, 8)
    monitor.start_monitoring()
    assert monitor.get_summary()["loss_history"] == []
    assert monitor._thread is not None
    thread = monitor._thread
    monitor.stop_monitoring()
    assert not thread.is_alive()
    assert monitor.get_summary()["avg_throughput"] == 0.0


def test_calls_in_the_wrong_order_say_what_to_do(tmp_path: Path) -> None:
    monitor = PerformanceMonitor()
    with pytest.raises(MultiGPUError, match="start_monitoring"):
        monitor.record_metrics(1.0, 8, 1)
    with pytest.raises(MultiGPUError, match="start_monitoring"):
        monitor.get_summary()
    with pytest.raises(MultiGPUError, match="record_metrics"):
        monitor.plot_metrics(tmp_path / "x.png")


def test_a_run_that_was_recorded_can_be_summed_up(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run", 2)
    folder.start()
    for step in (20, 40, 60):
        folder.log(step, at=step / 10, samples_per_s=100.0 * step)
    folder.add(1, "device", 3.0, memory_bytes=2**30, peak_bytes=2**31, gpu_utilization=80.0)
    monitor = PerformanceMonitor(run=folder.path)
    summary = monitor.get_summary()
    # How many samples an epoch has is not known here.
    assert summary["samples"] is None
    assert summary["throughput"] == 6000.0 and summary["avg_throughput"] == 5000.0
    assert summary["max_memory_usage"] == 2.0 and summary["gpu_utilization"] == 80.0
    assert summary["steps"] == 60 and len(summary["loss_history"]) == 3
    assert monitor.plot_metrics(tmp_path / "plot.png").exists()
    with pytest.raises(MultiGPUError, match="without run="):
        monitor.start_monitoring()


def test_a_short_run_has_its_figures_too(tmp_path: Path) -> None:
    """15 steps, none of them logged: two epochs of 7 steps of 64, the last batch short, and one
    step; after a pause of 90 s."""
    folder = Folder(tmp_path / "run", 2)
    known = {"epoch_samples": 400, "epoch_steps": 7}
    folder.start(**known)
    folder.add(0, "epoch", 1.0, epoch=0, step=7, train={"loss": 2.0}, val=None)
    folder.end(7, at=1.0)
    folder.start(step=7, at=91.0, **known)
    folder.add(0, "epoch", 92.0, epoch=1, step=14, train={"loss": 1.0}, val=None)
    folder.end(15, at=92.5)
    summary = PerformanceMonitor(run=folder.path).get_summary()
    assert (summary["training_time"], summary["steps"], summary["samples"]) == (2.5, 15, 864)
    assert summary["avg_throughput"] == summary["throughput"] == pytest.approx(864 / 2.5)
    assert summary["loss_history"] == [2.0, 1.0]
    assert summary["memory_usage"] is None  # nobody read it


@pytest.mark.parametrize("loss", [None, "x", torch.ones(3), [1.0]])
def test_a_loss_that_is_no_number_is_refused_at_once(loss: object) -> None:
    monitor = PerformanceMonitor()
    monitor.start_monitoring()
    with pytest.raises(MultiGPUError, match="cannot take loss="):
        monitor.record_metrics(loss, 8)
    with pytest.raises(MultiGPUError, match="batch_size='8'"):
        monitor.record_metrics(1.0, "8")  # type: ignore[arg-type]
    monitor.stop_monitoring()
    assert monitor.get_summary()["loss_history"] == []


def test_a_stall_is_noticed_once() -> None:
    watch = StallWatch()
    assert watch.look(1, 0.0) is None and watch.look(101, 10.0) is None
    assert watch.look(101, 10.0 + STALL_S - 1) is None
    assert watch.look(101, 10.0 + STALL_S) == {"step": 101, "waited_s": STALL_S}
    assert watch.look(101, 500.0) is None  # told already
    assert watch.look(102, 501.0) is None and watch.look(None, 900.0) is None
    assert watch.look(102, 2000.0) is None  # between two epochs nobody steps
