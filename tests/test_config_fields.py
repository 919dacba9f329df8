"""MultiGPUConfig: every field has a test of its effect, every contradiction is named."""

from __future__ import annotations

import importlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from ranks import run_ranks
from tiny import FEATURES, flat, manager_for, points, quiet, sgd
from torch import nn

from multi_gpu_training import ConfigError, MultiGPUConfig, MultiGPUTrainingManager, TrainingMode

# Where the effect of each field is shown. A new field needs a line here, and a test that fails
# when the line that implements the field is taken away.
SHOWN_IN = {
    "test_fields_place": {
        "training_mode": "test_training_mode_chooses_how_the_model_is_copied",
        "device": "test_device_chooses_cpu_or_gpu",
        "device_ids": "test_device_ids_name_the_gpus",
        "share_gpu": "test_share_gpu_puts_several_ranks_on_one",
        "world_size": "test_world_size_starts_that_many_ranks",
        "rank": "test_rank_joins_by_hand_and_timeout_ends_a_wait",
        "local_rank": "test_local_rank_chooses_the_gpu_of_a_rank",
        "backend": "test_backend_is_what_the_ranks_talk_through",
        "timeout": "test_rank_joins_by_hand_and_timeout_ends_a_wait",
        "max_restarts": "test_max_restarts_outlives_a_rank_that_is_killed",
        "recovery_timeout": "test_recovery_timeout_ends_the_search_for_other_machines",
    },
    "test_fields_feeding": {
        "batch_size": "test_batch_size_is_what_a_rank_computes_at_a_time",
        "global_batch_size": "test_global_batch_size_is_kept_on_any_number_of_ranks",
        "gradient_accumulation_steps": "test_gradient_accumulation_steps_make_one_step",
        "epochs": "test_epochs_says_how_often_the_data_are_seen",
        "max_steps": "test_max_steps_ends_a_run_inside_an_epoch",
        "steps_per_epoch": "test_steps_per_epoch_gives_an_endless_stream_epochs",
        "num_workers": "test_num_workers_read_the_samples_in_processes_of_their_own",
        "pin_memory": "test_pin_memory_pins_what_is_copied_to_the_gpu",
        "prefetch_factor": "test_prefetch_factor_says_how_many_batches_are_read_ahead",
        "persistent_workers": "test_persistent_workers_stay_from_epoch_to_epoch",
        "shuffle": "test_shuffle_mixes_the_samples_anew_each_epoch",
    },
    "test_fields_arithmetic": {
        "use_mixed_precision": "test_use_mixed_precision_computes_in_16_bits",
        "mixed_precision_dtype": "test_mixed_precision_dtype_fp16_scales_the_loss",
        "allow_tf32": "test_allow_tf32_sets_products_and_convolutions",
        "max_grad_norm": "test_max_grad_norm_bounds_a_step",
        "use_gradient_checkpointing": (
            "test_use_gradient_checkpointing_keeps_less_and_learns_the_same"
        ),
        "sync_bn": "test_sync_bn_counts_the_samples_of_all_ranks",
        "seed": "test_seed_settles_the_order_and_the_noise",
        "deterministic": "test_deterministic_refuses_what_has_no_fixed_order",
    },
    "test_fields_rate": {
        "learning_rate": "test_learning_rate_is_that_of_the_default_optimizer",
        "weight_decay": "test_weight_decay_shrinks_the_weights",
        "lr_scaling": "test_lr_scaling_follows_the_global_batch",
        "base_batch_size": "test_base_batch_size_is_what_the_rate_was_chosen_for",
        "warmup_epochs": "test_warmup_epochs_count_in_epochs",
        "warmup_steps": "test_warmup_steps_raise_the_rate_evenly",
        "schedule": "test_schedule_shapes_the_rate",
        "schedule_step_epochs": "test_schedule_step_epochs_says_when_the_rate_drops",
        "schedule_gamma": "test_schedule_gamma_says_how_far_the_rate_drops",
        "scheduler_unit": "test_scheduler_unit_says_what_a_scheduler_counts",
    },
    "test_fields_ddp": {
        "find_unused_parameters": "test_find_unused_parameters_lets_a_spare_branch_rest",
        "broadcast_buffers": "test_broadcast_buffers_gives_every_rank_the_buffers_of_rank_0",
        "use_gradient_as_bucket_view": (
            "test_use_gradient_as_bucket_view_keeps_the_gradients_in_the_buckets"
        ),
        "bucket_cap_mb": "test_bucket_cap_mb_sets_the_size_of_the_buckets",
        "reduce_bucket_size": "test_reduce_bucket_size_is_the_same_in_bytes",
        "static_graph": "test_static_graph_trains_a_layer_that_is_recomputed_twice",
        "use_fp16_allreduce": "test_gradients_are_sent_in_half_the_bytes",
        "fp16_compression": "test_gradients_are_sent_in_half_the_bytes",
        "consistency_check_every": "test_consistency_check_every_finds_a_weight_that_differs",
    },
    "test_fields_keeping": {
        "enable_fault_tolerance": "test_enable_fault_tolerance_saves_or_does_not",
        "checkpoint_frequency": "test_checkpoint_frequency_counts_steps",
        "keep_last": "test_keep_last_drops_older_checkpoints",
        "resume": "test_resume_goes_on_where_the_run_was",
        "best_metric": "test_best_metric_names_the_best_checkpoint",
        "best_metric_mode": "test_best_metric_mode_says_which_way_is_better",
        "early_stopping_patience": ("test_early_stopping_patience_ends_a_run_that_gets_no_better"),
        "save_dir": "test_save_dir_recipe_and_run_name_make_the_run_folder",
        "recipe": "test_save_dir_recipe_and_run_name_make_the_run_folder",
        "run_name": "test_save_dir_recipe_and_run_name_make_the_run_folder",
        "log_every": "test_log_every_says_how_often_a_step_is_recorded",
        "tensorboard": "test_tensorboard_writes_curves",
        "progress": "test_progress_chooses_what_a_person_sees",
    },
}


def test_every_field_has_a_test_of_its_effect() -> None:
    shown = [field for tests in SHOWN_IN.values() for field in tests]
    assert sorted(shown) == sorted(MultiGPUConfig.model_fields)
    for module, tests in SHOWN_IN.items():
        there = importlib.import_module(module)
        missing = [test for test in tests.values() if not callable(getattr(there, test, None))]
        assert not missing, f"{module} has no {missing}"


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
    config = names["config"]
    config.check()
    assert MultiGPUConfig(**yaml.safe_load(yaml.safe_dump(config.plain()))) == config


def train_advanced(folder: Path) -> tuple[list[float], torch.Tensor]:
    """The guide's Advanced block with all its switches, on the ranks and CPUs that are here."""
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
    ({"mixed_precision_dtype": "fp16"}, "does nothing without use_mixed_precision=true"),
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
