"""Every field of MultiGPUConfig has a test that shows what it does in a real training."""

from __future__ import annotations

import importlib

from multi_gpu_training import MultiGPUConfig

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
        "restart_window_s": "test_restart_window_s_forgets_older_restarts",
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
        "balance": "test_balance_gives_a_slow_rank_less",
        "share_weights": "test_share_weights_say_how_much_each_rank_computes",
    },
    "test_fields_speed": {
        "step_execution": "test_step_execution_eager_never_records",
        "fast_defaults": "test_fast_defaults_turn_everything_on_and_off",
        "channels_last": "test_channels_last_lays_out_the_weights_and_learns_the_same",
        "fused_optimizer": "test_fused_optimizer_is_one_kernel_where_it_was_left_open",
        "cudnn_benchmark": "test_cudnn_benchmark_is_on_where_asked_for",
        "data_on_gpu": "test_data_on_gpu_says_where_a_dataset_lives",
        "gpu_data_gb": "test_gpu_data_gb_bounds_the_memory_for_data",
    },
    "test_fields_arithmetic": {
        "use_mixed_precision": "test_use_mixed_precision_computes_in_16_bits",
        "mixed_precision_dtype": "test_mixed_precision_dtype_fp16_scales_the_loss",
        "allow_tf32": "test_allow_tf32_sets_products_and_convolutions",
        "max_grad_norm": "test_max_grad_norm_bounds_a_step",
        "max_grad_value": "test_max_grad_value_clamps_each_element_of_a_step",
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
        "warmup_max_share": "test_warmup_max_share_leaves_the_rest_of_a_short_run",
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
    "test_fields_sharding": {
        "fsdp_blocks": "test_fsdp_fields_say_what_is_gathered_when_and_in_which_type",
        "fsdp_copy_size": "test_fsdp_fields_say_what_is_gathered_when_and_in_which_type",
        "tensor_parallel": "test_fsdp_fields_say_what_is_gathered_when_and_in_which_type",
        "fsdp_reshard": "test_fsdp_fields_say_what_is_gathered_when_and_in_which_type",
        "fsdp_gather_dtype": "test_fsdp_fields_say_what_is_gathered_when_and_in_which_type",
    },
    "faults.test_signals": {
        "grace_s": "test_ctrl_c_twice_stops_now_and_grace_s_bounds_the_wait",
    },
    "faults.test_hangs": {
        "hang_timeout_s": "test_a_sleeping_and_a_stopped_rank_are_named_and_the_run_recovers",
    },
    "faults.test_policies_memory": {
        "on_out_of_memory": "test_on_out_of_memory_stop_ends_the_run",
    },
    "faults.test_policies": {
        "on_nonfinite": "test_on_nonfinite_skip_leaves_the_step_out_on_every_rank",
        "on_loss_spike": "test_on_loss_spike_says_what_happens",
        "on_divergence": "test_on_divergence_stops_or_goes_back_to_equal_replicas",
    },
    "test_fields_keeping": {
        "enable_fault_tolerance": "test_enable_fault_tolerance_saves_or_does_not",
        "checkpoint_frequency": "test_checkpoint_frequency_counts_steps",
        "keep_last": "test_keep_last_drops_older_checkpoints",
        "keep_best": "test_keep_best_keeps_the_best_of_all_epochs",
        "on_save_failure": "test_on_save_failure_says_whether_training_goes_on",
        "resume": "test_resume_goes_on_where_the_run_was",
        "resume_anyway": "test_resume_anyway_goes_on_with_another_seed",
        "best_metric": "test_best_metric_names_the_best_checkpoint",
        "best_metric_mode": "test_best_metric_mode_says_which_way_is_better",
        "early_stopping_patience": ("test_early_stopping_patience_ends_a_run_that_gets_no_better"),
        "save_dir": "test_save_dir_recipe_and_run_name_make_the_run_folder",
        "recipe": "test_save_dir_recipe_and_run_name_make_the_run_folder",
        "run_name": "test_save_dir_recipe_and_run_name_make_the_run_folder",
        "forecast": "test_forecast_is_kept_with_the_run",
        "log_every": "test_log_every_says_how_often_a_step_is_recorded",
        "tensorboard": "test_tensorboard_writes_curves",
        "progress": "test_progress_chooses_what_a_person_sees",
    },
    "checkpoint.test_write_queue": {
        "checkpoint_interval_s": (
            "test_training_never_waits_for_the_disk_and_the_last_state_is_saved"
        ),
    },
    "checkpoint.test_signature": {
        "signing_key_file": "test_a_run_with_a_key_resumes_only_from_what_it_signed",
    },
    "storage.test_object_storage": {
        "local_dir": (
            "test_local_dir_holds_the_copies_and_upload_every_shows_events_during_training"
        ),
        "upload_every": (
            "test_local_dir_holds_the_copies_and_upload_every_shows_events_during_training"
        ),
        "upload_wait_s": "test_upload_wait_s_bounds_the_end_of_a_run",
    },
    "test_fields_watching": {
        "profile_steps": "test_profile_steps_are_traced_on_the_ranks_named",
        "profile_ranks": "test_profile_steps_are_traced_on_the_ranks_named",
        "loggers": "test_loggers_write_where_they_are_asked_to",
        "logger_options": "test_logger_options_reach_the_logger_and_secrets_do_not",
        "validate_every": "test_validate_every_validates_inside_an_epoch",
        "validate_at_start": "test_validate_at_start_and_limit_val_batches_say_when_and_on_what",
        "limit_val_batches": "test_validate_at_start_and_limit_val_batches_say_when_and_on_what",
        "f1_average": "test_f1_average_says_what_f1_is",
        "ema_decay": "test_ema_decay_and_swa_average_the_weights",
        "swa_start": "test_ema_decay_and_swa_average_the_weights",
        "swa_every": "test_ema_decay_and_swa_average_the_weights",
        "monitor": "test_monitor_records_phases_and_devices",
        "monitor_interval_s": "test_monitor_interval_s_is_how_often_devices_are_read",
        "report": "test_report_is_written_at_the_end_of_a_run",
    },
}


def test_every_field_has_a_test_of_its_effect() -> None:
    shown = [field for tests in SHOWN_IN.values() for field in tests]
    assert sorted(shown) == sorted(MultiGPUConfig.model_fields)
    for module, tests in SHOWN_IN.items():
        there = importlib.import_module(module)
        missing = [test for test in tests.values() if not callable(getattr(there, test, None))]
        assert not missing, f"{module} has no {missing}"
