"""What can be set: every field of a run's config, its default and the values it takes."""

from __future__ import annotations

import os
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from multi_gpu_training.run_places import is_url, name_problem, path_problem, url_problem
from multi_gpu_training.schedules import SCHEDULES
from multi_gpu_training.step_ranges import chosen_ranks, step_spans

# Beyond these a number is a slip of the finger, and something overflows hours later.
PositiveInt = Annotated[int, Field(gt=0, le=2**53)]
NaturalInt = Annotated[int, Field(ge=0, le=2**53)]
RankNumber = Annotated[int, Field(ge=0, lt=2**20)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]


class TrainingMode(StrEnum):
    SINGLE = "single"
    DATA_PARALLEL = "data_parallel"
    DISTRIBUTED_DATA_PARALLEL = "distributed_data_parallel"
    FULLY_SHARDED = "fully_sharded"
    AUTO = "auto"  # single, distributed_data_parallel or fully_sharded, once the model is known

    @classmethod
    def _missing_(cls, value: object) -> TrainingMode | None:
        short = {
            "dp": cls.DATA_PARALLEL,
            "ddp": cls.DISTRIBUTED_DATA_PARALLEL,
            "fsdp": cls.FULLY_SHARDED,
        }
        return short.get(str(value))

    @property
    def has_ranks(self) -> bool:
        """Whether it is one process per GPU, rather than one process."""
        return self not in (TrainingMode.SINGLE, TrainingMode.DATA_PARALLEL)


def truth_for_number(cls: type[BaseModel], value: Any, info: ValidationInfo) -> Any:
    """Refuse true and false where a number is wanted: YAML reads `yes`, `no`, `on` and `off` so."""
    found = _kinds_of(cls.model_fields[str(info.field_name)].annotation)
    if found & {int, float, timedelta} and not found & {bool, Any, object}:
        items = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(item, bool) for item in items):
            raise PydanticCustomError(
                "number",
                "input should be a number; in YAML yes, no, on and off are true and false",
            )
    return value


def _kinds_of(annotation: Any) -> set[Any]:
    """Every type that an annotation names."""
    return {annotation}.union(*map(_kinds_of, get_args(annotation)))


class ConfigFields(BaseModel):
    """The fields of `MultiGPUConfig`, each checked by itself."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, use_enum_values=False)

    # Where it runs
    training_mode: TrainingMode = Field(
        TrainingMode.DISTRIBUTED_DATA_PARALLEL,
        description="distributed_data_parallel (DDP, a process per GPU), fully_sharded (FSDP2), "
        "data_parallel, single, or auto: choose by what fits into memory",
    )
    device: Literal["auto", "cpu", "cuda", "mps", "xpu"] = Field(
        "auto", description="auto: the first one available"
    )
    device_ids: list[Annotated[int, Field(ge=0, lt=2**15)]] | None = Field(
        None,
        min_length=1,
        max_length=2**15,
        description="GPUs to use, numbered as in CUDA_VISIBLE_DEVICES; default: all",
    )
    share_gpu: bool = Field(
        False, description="allow several ranks on one GPU (for tests, over gloo)"
    )
    world_size: Annotated[int, Field(gt=0, le=2**20)] | None = Field(
        None, description="number of ranks; default: one per GPU"
    )
    rank: RankNumber | None = Field(None, description="set it only if you start each rank by hand")
    local_rank: RankNumber | None = Field(
        None, description="rank on this machine; default: the same as rank"
    )
    backend: Literal["nccl", "gloo"] | None = Field(
        None, description="default: nccl with GPUs, else gloo"
    )
    timeout: timedelta = Field(
        timedelta(minutes=30),
        gt=timedelta(0),
        le=timedelta(seconds=1e9),
        description="how long a collective operation may take; seconds in YAML",
    )

    # How much at a time
    batch_size: PositiveInt = Field(32, description="samples per GPU and micro-batch")
    global_batch_size: PositiveInt | None = Field(
        None, description="samples per step over all ranks; stays the same on any number of GPUs"
    )
    gradient_accumulation_steps: PositiveInt = Field(1, description="micro-batches per step")
    epochs: PositiveInt = Field(10, description="passes over the data")
    max_steps: PositiveInt | None = Field(None, description="end the run after this many steps")
    steps_per_epoch: PositiveInt | None = Field(
        None, description="epoch length for a stream that has no length"
    )

    balance: Literal["auto", "equal", "measured", "dynamic"] = Field(
        "auto",
        description="how ranks share a batch: equal, measured (by speed and memory), dynamic "
        "(measured every epoch), or auto: measured if ranks have different GPUs, else "
        "equal",
    )
    share_weights: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] | None = Field(
        None,
        min_length=1,
        description="share of the batch per rank, such as [2, 1]; nothing is measured then",
    )

    # Speed
    step_execution: Literal["auto", "graph", "compile", "eager"] = Field(
        "auto",
        description="run a step as one CUDA graph, compiled, or operation by operation; auto: the "
        "fastest that is safe",
    )
    fast_defaults: bool = Field(
        True,
        description="turn on everything that is faster on a GPU unless you set it yourself; false: "
        "all of it off",
    )
    channels_last: bool | None = Field(
        None, description="use the channels-last memory layout for convolutions; default: on GPUs"
    )
    fused_optimizer: bool | None = Field(
        None, description="run Adam, AdamW and SGD as one kernel; default: on GPUs"
    )
    cudnn_benchmark: bool = Field(False, description="let cuDNN time its algorithms and pick one")

    # Arithmetic
    use_mixed_precision: bool | None = Field(
        None,
        description="compute in 16 bits; default: on GPUs with bf16, for convolutions, recurrent "
        "layers and models with a million parameters or more",
    )
    mixed_precision_dtype: Literal["auto", "bf16", "fp16"] = Field(
        "auto", description="auto: bf16 if the GPU has it, else fp16 with loss scaling"
    )
    allow_tf32: bool | None = Field(
        None, description="use TF32 for matrix products on Ampere and later; default: yes"
    )
    max_grad_norm: PositiveFloat | None = Field(
        None, description="clip the gradient of a step to this norm"
    )
    max_grad_value: PositiveFloat | None = Field(
        None, description="clamp each element of the gradient, after max_grad_norm"
    )
    use_gradient_checkpointing: bool = Field(
        False, description="recompute activations in backward: less memory, more time"
    )
    sync_bn: bool = Field(False, description="compute BatchNorm statistics over all ranks")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        0,
        description="seeds sample order, augmentation and noise; seed the initial weights yourself",
    )
    deterministic: bool = Field(
        False, description="use deterministic kernels; needed for identical bits on GPUs"
    )

    # Learning rate
    learning_rate: PositiveFloat = Field(1e-3, description="learning rate of the default AdamW")
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        1e-2, description="weight decay of the default AdamW"
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none", description="scale the learning rate by the global batch, or by its square root"
    )
    base_batch_size: PositiveInt | None = Field(
        None, description="the batch size that learning_rate was chosen for; default: batch_size"
    )
    warmup_epochs: Annotated[float, Field(ge=0, le=1e9)] = Field(
        0.0, description="warm-up in epochs; fractions are allowed"
    )
    warmup_steps: NaturalInt = Field(0, description="warm-up in steps, instead of warmup_epochs")
    warmup_max_share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0,
        description="largest part of the run that warm-up may take; 0.1 for a recipe's own warm-up",
    )
    schedule: str = Field(
        "constant",
        json_schema_extra={"enum": list(SCHEDULES)},
        description="cosine and linear fall to 0 at the end of the run",
    )
    schedule_step_epochs: PositiveInt = Field(
        30, description="schedule=step: epochs between two drops"
    )
    schedule_gamma: Annotated[float, Field(gt=0, le=1)] = Field(
        0.1, description="schedule=step: factor of each drop"
    )
    scheduler_unit: Literal["step", "epoch"] = Field(
        "step", description="whether your own scheduler counts steps or epochs"
    )

    # Averaged weights
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="keep an exponential moving average of the weights for validation and "
        "checkpoints",
    )
    swa_start: NaturalInt | None = Field(
        None, description="stochastic weight averaging (SWA): step at which averaging begins"
    )
    swa_every: PositiveInt | None = Field(
        None, description="steps between two weights that SWA averages; default: an epoch"
    )

    # DDP
    find_unused_parameters: bool = Field(
        False, description="allow parameters without a gradient; otherwise an error names them"
    )
    broadcast_buffers: bool = Field(True, description="send rank 0's buffers to the other ranks")
    use_gradient_as_bucket_view: bool = Field(
        True, description="let gradients share memory with the communication buckets"
    )
    bucket_cap_mb: Annotated[float, Field(gt=0, le=1e6)] = Field(
        25.0, description="size of a communication bucket"
    )
    reduce_bucket_size: PositiveInt | None = Field(None, description="bucket_cap_mb in bytes")
    static_graph: bool = Field(
        False, description="promise that every step uses the same parameters"
    )
    use_fp16_allreduce: bool = Field(False, description="the same as fp16_compression")
    fp16_compression: bool = Field(False, description="send gradients in 16 bits")
    consistency_check_every: NaturalInt = Field(
        500, description="steps between two comparisons of the replicas; 0: never"
    )

    # Sharding (training_mode=fully_sharded)
    fsdp_blocks: list[str] | None = Field(
        None,
        description="classes or names of modules that are gathered together; default: the model's "
        "repeated blocks; []: none, all parameters stay gathered for the whole step",
    )
    fsdp_reshard: bool = Field(
        True,
        description="free a block's parameters after its forward and gather them again in "
        "backward; false: faster, more memory",
    )
    fsdp_copy_size: Annotated[int, Field(gt=0, le=2**20)] | Literal["machine"] | None = Field(
        None,
        description="number of ranks that share one copy of the model, or machine (the ranks of "
        "one machine); default: all",
    )
    tensor_parallel: Annotated[int, Field(gt=0, le=2**10)] = Field(
        1,
        description="number of neighbouring ranks that compute each layer together, by the model's "
        "plan",
    )
    fsdp_gather_dtype: Literal["bf16"] | None = Field(
        None, description="with mixed precision, send parameters in 16 bits; default: as they are"
    )

    # Feeding
    num_workers: NaturalInt = Field(0, description="loader processes per rank")
    pin_memory: bool = Field(True, description="use pinned host memory, on GPUs")
    prefetch_factor: PositiveInt | None = Field(
        None, description="batches that each worker loads in advance; default: 2"
    )
    persistent_workers: bool = Field(False, description="keep workers alive between epochs")
    shuffle: bool = Field(
        True, description="draw a new order each epoch; a DataLoader keeps its own"
    )
    data_on_gpu: bool | None = Field(
        None, description="keep a TensorDataset on the GPU; default: if gpu_data_gb allows"
    )
    gpu_data_gb: PositiveFloat | None = Field(
        None, description="GPU memory that data may take; default: a quarter of the free memory"
    )

    # Keeping
    enable_fault_tolerance: bool = Field(True, description="write checkpoints and handle faults")
    checkpoint_frequency: PositiveInt = Field(1000, description="steps between checkpoints")
    checkpoint_interval_s: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] | None = (
        Field(
            None,
            description="least seconds between two background checkpoints; meanwhile the newest "
            "and the best wait in memory; default: 1 on a GPU, else 0",
        )
    )
    grace_s: Seconds = Field(
        30.0, description="seconds a run may take to save and exit after SIGTERM, SIGUSR1 or Ctrl-C"
    )
    hang_timeout_s: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="seconds without progress that count as a hang; default: 20 usual steps, at "
        "least 120",
    )
    max_restarts: NaturalInt = Field(
        3, description="how often ranks may restart after failures, within restart_window_s"
    )
    restart_window_s: Annotated[float, Field(gt=0)] = Field(
        3600.0, description="seconds after which a restart no longer counts"
    )
    recovery_timeout: Seconds = Field(
        300.0, description="seconds that ranks wait for each other at start-up and after a restart"
    )
    keep_last: PositiveInt = Field(
        3, description="how many of the newest intact checkpoints to keep"
    )
    keep_best: PositiveInt = Field(
        1, description="how many of the best checkpoints (by best_metric) to keep as well"
    )
    on_save_failure: Literal["continue", "stop"] = Field(
        "continue", description="what to do when a checkpoint cannot be written"
    )
    on_out_of_memory: Literal["split", "stop"] = Field(
        "split",
        description="when a step does not fit into memory: compute it in smaller parts, or stop",
    )
    on_nonfinite: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="when a gradient is NaN or infinite: stop with a diagnosis, skip the step, or "
        "go back to the last checkpoint and skip the batch",
    )
    on_loss_spike: Literal["ignore", "warn", "rollback", "stop"] = Field(
        "warn", description="when the logged loss jumps far above earlier ones"
    )
    on_divergence: Literal["stop", "rollback"] = Field(
        "stop", description="when replicas differ that should be equal"
    )
    resume: str | None = Field(None, description="auto, or a checkpoint's folder or URL")
    signing_key_file: str | None = Field(
        None,
        description="key file: sign checkpoints with it, and resume only from checkpoints signed "
        "with it",
    )
    resume_anyway: bool = Field(
        False,
        description="resume even though a changed setting (seed, data, optimizer) makes it a "
        "different training; MGT_RESUME_ANYWAY=1 does the same",
    )
    best_metric: str | None = Field(
        None, description="validation metric that picks the best checkpoint; default: loss"
    )
    best_metric_mode: Literal["auto", "min", "max"] = Field(
        "auto",
        description="whether small or large values are better; auto: small for losses and errors, "
        "large for everything else",
    )
    early_stopping_patience: PositiveInt | None = Field(
        None, description="end the run after this many epochs without a better best_metric"
    )

    # Watching
    save_dir: str = Field(
        "runs", validate_default=True, description="where runs are kept: a folder or a URL (s3://)"
    )
    local_dir: str | None = Field(
        None,
        description="if save_dir is a URL: where to keep local copies; default: below ~/.cache",
    )
    upload_every: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        30.0,
        description="if save_dir is a URL: seconds between uploads of events and other small files",
    )
    upload_wait_s: Annotated[float, Field(ge=0)] = Field(
        300.0,
        description="if save_dir is a URL: seconds that a run waits at its end for uploads",
    )
    recipe: str = Field("custom", description="subfolder of save_dir for this run")
    run_name: str | None = Field(
        None, description="name of the run's folder, without slashes; default: its start time"
    )
    forecast: str | None = Field(
        None, description="forecast.json of `mgt estimate`, to compare with in the report"
    )
    log_every: PositiveInt = Field(20, description="steps between log entries")
    tensorboard: bool = Field(
        True, description="write TensorBoard curves, if TensorBoard is installed"
    )
    loggers: list[str] = Field(
        [],
        description="where to send metrics, besides the run's events: csv, tensorboard, wandb, "
        "mlflow, trackio",
    )
    logger_options: dict[str, dict[str, Any]] = Field(
        {}, description="options by logger, such as {wandb: {project: mine, mode: online}}"
    )
    validate_every: PositiveInt | None = Field(
        None, description="steps between two validations inside an epoch; default: only at its end"
    )
    validate_at_start: bool = Field(False, description="validate once before the first step")
    limit_val_batches: PositiveInt | None = Field(
        None, description="validate on this many global batches of each set; default: on all"
    )
    f1_average: Literal["macro", "micro", "binary"] = Field(
        "macro",
        description="what `f1` averages over: classes (macro), samples (micro), or only class 1",
    )
    progress: Literal["auto", "bar", "lines", "off"] = Field(
        "auto", description="auto: a bar on a terminal, else lines; off: warnings and errors only"
    )
    monitor: bool = Field(
        True, description="record the phases of sampled steps and the use of the device"
    )
    monitor_interval_s: Seconds = Field(
        2.0, description="seconds between two readings of the device"
    )
    report: bool = Field(
        True, description="write report.html and metrics.png if training takes at least 10 s"
    )
    profile_steps: str | None = Field(
        None, description="steps to trace with torch.profiler, such as 20-24 or 20-24,200-202"
    )
    profile_ranks: str = Field("0", description="ranks to trace: 0 or 0,3, or all")

    _not_truth = field_validator("*", mode="before")(truth_for_number)

    @field_validator("schedule")
    @classmethod
    def _is_a_schedule(cls, value: str) -> str:
        if value not in SCHEDULES:
            raise ValueError(f"use one of {', '.join(SCHEDULES)}")
        return value

    @field_validator("profile_steps")
    @classmethod
    def _are_steps(cls, value: str | None) -> str | None:
        if value is not None:
            step_spans(value)
        return value

    @field_validator("profile_ranks", mode="before")
    @classmethod
    def _are_ranks(cls, value: Any) -> Any:
        chosen_ranks(str(value))
        return str(value)

    @field_validator("progress", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads a bare `off` as false

    @field_validator("save_dir", "resume", "forecast", "local_dir", "signing_key_file")
    @classmethod
    def _absolute(cls, value: str | None, info: ValidationInfo) -> str | None:
        """Paths are meant from where the config is made, whatever `os.chdir` does later."""
        if value is None or (info.field_name == "resume" and value == "auto"):
            return value
        problem = path_problem(value)
        if problem is not None:
            raise ValueError(problem)
        if info.field_name in ("save_dir", "resume"):
            problem = url_problem(value)
            if problem is not None:
                raise PydanticCustomError("url", "{problem}", {"problem": problem})
            if is_url(value):
                return value.rstrip("/")
        try:
            return os.path.abspath(os.path.expanduser(value))  # noqa: PTH100, PTH111 - as spelled
        except FileNotFoundError:
            raise PydanticCustomError(
                "gone", "the working directory was removed; change to one that exists"
            ) from None

    @field_validator("run_name", "recipe")
    @classmethod
    def _one_folder(cls, value: str | None) -> str | None:
        problem = None if value is None else name_problem(value)
        if problem is not None:
            raise PydanticCustomError("run_name", "{problem}", {"problem": problem})
        return value
