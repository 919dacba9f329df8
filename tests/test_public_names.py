"""The names of guide 003, and its Python blocks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

import multi_gpu_training
from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager, TrainingMode

PUBLIC = {
    "ShardedStream",
    "notebook_launch",
    "ConfigError",
    "DataParallelTrainer",
    "DistributedDataParallelTrainer",
    "FaultToleranceManager",
    "FitResult",
    "FullyShardedTrainer",
    "LoadedModel",
    "Callback",
    "Hook",
    "MetricsCollector",
    "MultiGPUConfig",
    "MultiGPUError",
    "MultiGPUTrainer",
    "MultiGPUTrainingManager",
    "PerformanceMonitor",
    "SingleDeviceTrainer",
    "StepResult",
    "TrainingMode",
    "comparison_report",
    "estimate_training_speedup",
    "get_gpu_info",
    "launch_distributed_training",
    "load",
    "print_gpu_info",
    "print_training_speedup_estimates",
}


def test_the_public_names_are_these() -> None:
    assert set(multi_gpu_training.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(multi_gpu_training, name) is not None


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, multi_gpu_training; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


class CustomModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(100, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@pytest.fixture
def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(96, 100, generator=generator), torch.arange(96) % 10)


def quiet(folder: Path, **settings: object) -> MultiGPUConfig:
    return MultiGPUConfig(
        **{"progress": "off", "tensorboard": False, "save_dir": str(folder), **settings}
    )


def test_the_basic_block_of_guide_003(tmp_path: Path, dataset: TensorDataset) -> None:
    config = quiet(
        tmp_path,
        training_mode=TrainingMode.DATA_PARALLEL,
        device_ids=None if not torch.cuda.is_available() else [0],
        use_mixed_precision=True,
        batch_size=32,
    )
    manager = MultiGPUTrainingManager(config)
    model, train_loader, val_loader = manager.setup_training(
        CustomModel(), dataset, val_dataset=dataset
    )
    losses = []
    for epoch in range(3):
        train_metrics = manager.train_epoch(train_loader, epoch)
        val_metrics = manager.validate_epoch(val_loader)
        losses.append(train_metrics["loss"])
        assert {"loss", "accuracy", "f1"} <= val_metrics.keys()
    assert losses[-1] < losses[0]
    assert next(model.parameters()).device == manager.placement.device
    manager.finish()


def test_standard_components_of_pytorch_work_as_they_are(
    tmp_path: Path, dataset: TensorDataset
) -> None:
    model = CustomModel()
    optimizer = AdamW(model.parameters(), lr=1e-4)
    scheduler = CosineAnnealingLR(optimizer, T_max=6)
    manager = MultiGPUTrainingManager(quiet(tmp_path, epochs=2))
    manager.fit(model, dataset, optimizer=optimizer, scheduler=scheduler)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)


def test_an_error_of_a_step_is_recorded_and_raised(tmp_path: Path, dataset: TensorDataset) -> None:
    manager = MultiGPUTrainingManager(quiet(tmp_path))
    manager.setup_training(CustomModel(), dataset)
    with pytest.raises(RuntimeError):
        try:
            manager.trainer.train_step((torch.randn(4, 7), torch.zeros(4, dtype=torch.long)))
        except Exception as error:
            manager.logger.error(f"Training step failed: {error}")
            manager.fault_tolerance.handle_error(error)
    manager.finish()
    events = manager.run.events(0).read_text()
    assert '"level": "error"' in events and '"step": 0' in events


def test_the_logger_takes_fields(tmp_path: Path, dataset: TensorDataset, capsys: object) -> None:
    manager = MultiGPUTrainingManager(quiet(tmp_path, progress="lines"))
    manager.setup_training(CustomModel(), dataset)
    manager.logger.info("Training step completed", epoch=1, batch=7, loss=0.25, lr=1e-4)
    manager.finish()
    shown = capsys.readouterr().out  # type: ignore[attr-defined]
    assert "Training step completed  epoch=1  batch=7  loss=0.25  lr=0.0001" in shown
    assert '"message": "Training step completed", "epoch": 1' in manager.run.events(0).read_text()
