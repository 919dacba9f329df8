"""MultiGPUConfig: the guide's blocks are valid, and every contradiction is named."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from ranks import run_ranks
from tiny import FEATURES, flat, fork_workers, manager_for, points, quiet, sgd
from torch import nn

from multi_gpu_training import ConfigError, MultiGPUConfig, MultiGPUTrainingManager, TrainingMode
from multi_gpu_training.setting_names import ALIASES, ELSEWHERE

# Every block of guide 003 that makes a config, as written there.
GUIDE = {
    "mixed precision": """config = MultiGPUConfig(
    use_mixed_precision=True,
    gradient_accumulation_steps=4
)""",
    "memory": """config = MultiGPUConfig(
    pin_memory=True,
    num_workers=4,
    prefetch_factor=2,
    persistent_workers=True
)""",
    "clipping": """config = MultiGPUConfig(
    gradient_accumulation_steps=4,
    max_grad_norm=1.0
)""",
    "fault tolerance": """config = MultiGPUConfig(
    enable_fault_tolerance=True,
    checkpoint_frequency=1000,
    recovery_timeout=300
)""",
    "data parallel": """config = MultiGPUConfig(
    training_mode=TrainingMode.DATA_PARALLEL,
    device_ids=[0, 1, 2, 3],
    use_mixed_precision=True,
    batch_size=32
)""",
    "distributed": """config = MultiGPUConfig(
    training_mode=TrainingMode.DISTRIBUTED_DATA_PARALLEL,
    world_size=8,
    rank=0,
    local_rank=0,
    backend="nccl"
)""",
    "advanced": """config = MultiGPUConfig(
    # Training mode
    training_mode=TrainingMode.DISTRIBUTED_DATA_PARALLEL,
    
    # Device configuration
    device_ids=[0, 1, 2, 3],
    world_size=4,
    rank=0,
    local_rank=0,
    
    # Performance optimization
    use_mixed_precision=True,
    gradient_accumulation_steps=4,
    max_grad_norm=1.0,
    find_unused_parameters=False,
    broadcast_buffers=True,
    
    # Memory management
    pin_memory=True,
    num_workers=4,
    prefetch_factor=2,
    persistent_workers=True,
    
    # Synchronization
    sync_bn=True,
    use_fp16_allreduce=True,
    fp16_compression=True,
    
    # Fault tolerance
    enable_fault_tolerance=True,
    checkpoint_frequency=1000,
    recovery_timeout=300,
    
    # Communication optimization
    use_gradient_as_bucket_view=True,
    reduce_bucket_size=25 * 1024 * 1024,  # 25MB
    bucket_cap_mb=25,
    static_graph=True
)""",
    "communication": """config = MultiGPUConfig(
    use_gradient_as_bucket_view=True,
    reduce_bucket_size=25 * 1024 * 1024,  # 25MB buckets
    bucket_cap_mb=25,
    static_graph=True  # Enable static graph optimization
)""",
    "memory optimization": """config = MultiGPUConfig(
    use_mixed_precision=True,
    gradient_accumulation_steps=4,
    pin_memory=True,
    num_workers=4
)""",
    "checkpointing": """config = MultiGPUConfig(
    enable_fault_tolerance=True,
    checkpoint_frequency=1000
)""",
    "transformers": "config = MultiGPUConfig(training_mode=TrainingMode.DATA_PARALLEL)",
    "balance": """config = MultiGPUConfig(
    broadcast_buffers=True,
    find_unused_parameters=False
)""",
    "development": """config = MultiGPUConfig(
    training_mode=TrainingMode.DATA_PARALLEL,
    device_ids=[0, 1],
    use_mixed_precision=True,
    batch_size=32,
    num_workers=2
)""",
    "production": """config = MultiGPUConfig(
    training_mode=TrainingMode.DISTRIBUTED_DATA_PARALLEL,
    world_size=8,
    use_mixed_precision=True,
    gradient_accumulation_steps=4,
    enable_fault_tolerance=True,
    checkpoint_frequency=1000
)""",
    "large model": """config = MultiGPUConfig(
    training_mode=TrainingMode.DISTRIBUTED_DATA_PARALLEL,
    use_mixed_precision=True,
    gradient_accumulation_steps=8,
    max_grad_norm=1.0,
    sync_bn=True,
    use_gradient_checkpointing=True
)""",
    "out of memory": """config = MultiGPUConfig(
    batch_size=16,  # Reduce from 32
    gradient_accumulation_steps=4,  # Increase effective batch size
    use_mixed_precision=True
)""",
    "slow": """config = MultiGPUConfig(
    num_workers=4,
    pin_memory=True,
    use_mixed_precision=True,
    use_gradient_as_bucket_view=True
)""",
    "communication errors": """config = MultiGPUConfig(
    backend="nccl",  # Use NCCL for GPU communication
    timeout=timedelta(minutes=30)
)""",
    "synchronization": """config = MultiGPUConfig(
    broadcast_buffers=True,
    find_unused_parameters=False,
    sync_bn=True  # For models with BatchNorm
)""",
    "tuning": """config = MultiGPUConfig()
config.use_mixed_precision = True
config.batch_size = optimal_batch_size
config.gradient_accumulation_steps = 4
config.pin_memory = True
config.num_workers = 4
config.use_gradient_as_bucket_view = True
config.static_graph = True""",
}
KNOWN = {
    "MultiGPUConfig": MultiGPUConfig,
    "TrainingMode": TrainingMode,
    "timedelta": timedelta,
    "optimal_batch_size": 64,
}


@pytest.mark.parametrize("name", GUIDE)
def test_the_guides_configs_are_valid_as_written(name: str) -> None:
    names: dict[str, Any] = dict(KNOWN)
    exec(GUIDE[name], names)
    names["config"].check()


def train_advanced(folder: Path) -> tuple[list[float], torch.Tensor]:
    """The guide's Advanced block with all its switches, on the ranks and CPUs that are here."""
    fork_workers()
    names: dict[str, Any] = dict(KNOWN)
    exec(GUIDE["advanced"], names)
    settings = {key: getattr(names["config"], key) for key in names["config"].model_fields_set}
    here = {"device_ids": None, "world_size": None, "rank": None, "local_rank": None}
    settings |= {**here, "num_workers": 1, "batch_size": 2}
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    result = manager_for(folder, **settings, epochs=4).fit(model, points(24), optimizer=sgd)
    return [epoch["train"]["loss"] for epoch in result.history], flat(model)


def test_the_guides_advanced_block_trains(tmp_path: Path) -> None:
    (losses, ours), (same, theirs) = run_ranks(2, train_advanced, tmp_path)
    assert losses == same and torch.equal(ours, theirs)
    assert losses[-1] < losses[0]


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"training_mode": "single", "world_size": 3}, "is one process; drop world_size=3"),
    ({"training_mode": "data_parallel", "sync_bn": True}, "DataParallel cannot do it"),
    ({"training_mode": "single", "device_ids": [0, 1]}, "single uses one GPU"),
    ({"device": "cpu", "device_ids": [0]}, "exclude each other"),
    ({"device": "cpu", "backend": "nccl"}, "backend=nccl needs GPUs"),
    ({"device_ids": [0, 0, 1]}, "repeats [0]"),
    ({"rank": 0}, "rank=0 needs world_size as well"),
    ({"rank": 2, "world_size": 2}, "rank=2 is outside world_size=2"),
    ({"global_batch_size": 2, "world_size": 3}, "use at least 3, or fewer ranks"),
    ({"reduce_bucket_size": 2**20, "bucket_cap_mb": 2}, "is 1 MB but bucket_cap_mb=2"),
    ({"use_fp16_allreduce": True, "fp16_compression": False}, "mean the same"),
    ({"prefetch_factor": 2}, "prefetch_factor=2 needs num_workers"),
    ({"persistent_workers": True}, "persistent_workers=true needs num_workers"),
    ({"warmup_epochs": 1, "warmup_steps": 5}, "both set the warm-up"),
    (
        {"mixed_precision_dtype": "fp16", "use_mixed_precision": False},
        "does nothing with use_mixed_precision=false",
    ),
]


@pytest.mark.parametrize(("settings", "said"), CONTRADICTIONS, ids=[s for _, s in CONTRADICTIONS])
def test_a_contradiction_is_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MultiGPUConfig(**settings)
    assert len(caught.value.problems) == 1
    assert said in caught.value.problems[0]


def test_settings_that_only_look_contradictory_are_accepted() -> None:
    MultiGPUConfig(device_ids=[0, 0], share_gpu=True)
    MultiGPUConfig(device_ids=[0, 0], training_mode="data_parallel")
    MultiGPUConfig(use_fp16_allreduce=True)
    MultiGPUConfig(reduce_bucket_size=100)
    MultiGPUConfig(bucket_cap_mb=25, reduce_bucket_size=25 * 2**20)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        MultiGPUConfig(
            training_mode="data_parallel", world_size=2, sync_bn=True, rank=2, prefetch_factor=2
        )
    assert len(caught.value.problems) == 4
    assert str(caught.value).startswith("This run cannot start:\n  - ")
    with pytest.raises(ConfigError) as caught:
        MultiGPUConfig(batch_size=0, learning_rate=-1, batchsize=3, backend="mpi", seed="x")
    problems = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 5
    assert "batch_size=0: input should be greater than 0" in problems
    assert "unknown key 'batchsize'; did you mean 'batch_size'?" in problems


def test_an_assigned_name_that_is_none_proposes_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown key 'batchsize'; did you mean 'batch_size'"):
        MultiGPUConfig().batchsize = 3  # type: ignore[attr-defined]


def test_fields_can_be_assigned() -> None:
    config = MultiGPUConfig(pin_memory=False)
    config.pin_memory = True
    config.batch_size = 7
    config.training_mode = "dp"  # type: ignore[assignment]
    config.timeout = 60  # type: ignore[assignment]
    assert (config.pin_memory, config.batch_size) == (True, 7)
    assert config.training_mode is TrainingMode.DATA_PARALLEL
    assert config.timeout == timedelta(minutes=1)


@pytest.mark.parametrize(
    ("field", "value"), [("batch_size", 0), ("backend", "mpi"), ("num_worker", 1), ("seed", None)]
)
def test_a_bad_assignment_is_refused_and_changes_nothing(field: str, value: Any) -> None:
    config = MultiGPUConfig()
    with pytest.raises(ConfigError, match=field):
        setattr(config, field, value)
    assert config == MultiGPUConfig()


def test_a_manager_checks_what_was_assigned(tmp_path: Path) -> None:
    config = quiet(tmp_path)
    config.prefetch_factor = 2  # may be followed by num_workers: no error yet
    with pytest.raises(ConfigError, match="needs num_workers"):
        MultiGPUTrainingManager(config)
    config.num_workers = 1
    MultiGPUTrainingManager(config)


@pytest.mark.parametrize(
    "settings",
    [
        {"timeout": 90, "training_mode": "dp"},
        {"use_fp16_allreduce": True},
        {"reduce_bucket_size": 2**20},
    ],
    ids=["mode", "fp16", "bucket"],
)
def test_a_config_can_be_read_back_from_its_run_folder(settings: dict[str, Any]) -> None:
    config = MultiGPUConfig(**settings)
    again = MultiGPUConfig(**yaml.safe_load(yaml.safe_dump(config.plain())))
    assert again.plain() == config.plain()
    assert again.compress_gradients == config.compress_gradients
    assert again.bucket_bytes == config.bucket_bytes


def test_names_of_other_libraries_lead_to_the_setting() -> None:
    for name, meant in (ALIASES | ELSEWHERE).items():
        assert meant in MultiGPUConfig.model_fields and name not in MultiGPUConfig.model_fields
        with pytest.raises(ConfigError, match=f"unknown key '{name}'; did you mean '{meant}'"):
            MultiGPUConfig(**{name: 1})
