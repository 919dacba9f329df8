"""Other names of settings: those that we accept, and those of other libraries, which we answer."""

from __future__ import annotations

# Accepted in config files and on the command line.
ALIASES = {
    "lr": "learning_rate",
    "grad_accum_steps": "gradient_accumulation_steps",
    "gpu_ids": "device_ids",
    "num_gpus": "world_size",
    "multi_gpu": "training_mode",
    "sync_batchnorm": "sync_bn",
    "warmup": "warmup_steps",
}

# Lightning, Accelerate, the Hugging Face Trainer, DeepSpeed, timm. They may count or scale
# otherwise: named in the error, not accepted.
ELSEWHERE = {
    "accelerator": "device",
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "amp": "use_mixed_precision",
    "bf16": "mixed_precision_dtype",
    "ckpt_path": "resume",
    "clip_grad": "max_grad_norm",
    "clip_grad_norm": "max_grad_norm",
    "clip_grad_norm_": "max_grad_norm",
    "clip_grad_value": "max_grad_value",
    "cudnn_deterministic": "deterministic",
    "dataloader_num_workers": "num_workers",
    "dataloader_pin_memory": "pin_memory",
    "ddp_find_unused_parameters": "find_unused_parameters",
    "default_root_dir": "save_dir",
    "devices": "world_size",
    "eval_steps": "validate_every",
    "fp16": "mixed_precision_dtype",
    "gpus": "world_size",
    "grad_accum": "gradient_accumulation_steps",
    "grad_clip": "max_grad_norm",
    "grad_clip_norm": "max_grad_norm",
    "gradient_checkpointing": "use_gradient_checkpointing",
    "gradient_clip": "max_grad_norm",
    "gradient_clip_norm": "max_grad_norm",
    "gradient_clip_val": "max_grad_norm",
    "gradient_clipping": "max_grad_norm",
    "log_every_n_steps": "log_every",
    "log_with": "loggers",
    "logging_steps": "log_every",
    "lr_scheduler": "schedule",
    "lr_scheduler_type": "schedule",
    "max_epochs": "epochs",
    "metric_for_best_model": "best_metric",
    "mixed_precision": "mixed_precision_dtype",
    "no_cuda": "device",
    "nproc_per_node": "world_size",
    "num_epochs": "epochs",
    "num_processes": "world_size",
    "num_train_epochs": "epochs",
    "output_dir": "save_dir",
    "patience": "early_stopping_patience",
    "per_device_train_batch_size": "batch_size",
    "precision": "mixed_precision_dtype",
    "project_dir": "save_dir",
    "report_to": "loggers",
    "resume_from_checkpoint": "resume",
    "save_steps": "checkpoint_frequency",
    "save_total_limit": "keep_last",
    "strategy": "training_mode",
    "total_batch_size": "global_batch_size",
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "batch_size",
    "use_cpu": "device",
    "val_check_interval": "validate_every",
    "wd": "weight_decay",
    "workers": "num_workers",
}


def setting_meant(key: str) -> str | None:
    """The setting that a name of another spelling or library stands for."""
    return ALIASES.get(key) or ELSEWHERE.get(key)
