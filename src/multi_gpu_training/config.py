"""What a run is: every setting, its default, and which settings contradict each other."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.redaction import redact
from multi_gpu_training.safe_output import brief
from multi_gpu_training.schedules import SCHEDULES
from multi_gpu_training.setting_names import setting_meant
from multi_gpu_training.step_ranges import chosen_ranks, step_spans

# Beyond these a number is a slip of the finger, and something overflows hours later.
PositiveInt = Annotated[int, Field(gt=0, le=2**53)]
NaturalInt = Annotated[int, Field(ge=0, le=2**53)]
RankNumber = Annotated[int, Field(ge=0, lt=2**20)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
LONGEST_PATH = 4000  # bytes; Linux allows 4096
# What pydantic calls a name that is not a setting.
_UNKNOWN = ("extra_forbidden", "no_such_attribute")
# What to do about a value that is out of range, where the range alone does not say it.
_REMEDIES = {
    "limit_val_batches": "give the number of batches, or leave it out to validate on every sample",
    "validate_every": "give a number of steps, or leave it out to validate after each epoch only",
    "ema_decay": "0.999 and 0.9999 are usual; leave it out to use the trained weights as they are",
    "swa_start": "give the step of the first average, or leave it out",
    "swa_every": "give a number of steps, or leave it out to average once per epoch",
}
LONGEST_NAME = 200  # bytes; file systems allow 255, and temporary copies add a suffix


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


class MultiGPUConfig(BaseModel):
    """One training run.

    Fields are checked one by one when they are set, and against each other when the config is
    built and again when a manager takes it; all problems are reported together.
    """

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
        min_length=1,
        description="classes or names of modules that are gathered together; default: the model's "
        "repeated blocks",
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

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            names = list(type(self).model_fields)
            raise _refusal(error, names) from None
        self.check()

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            names = list(type(self).model_fields)
            raise _refusal(error, names) from None

    @property
    def chooses_mode(self) -> bool:
        """Whether training_mode=auto still waits for the model to be known."""
        return self.training_mode is TrainingMode.AUTO

    @property
    def exchange_timeout(self) -> timedelta:
        """`timeout`; where it was left open, long enough for a hang to be reported first."""
        if "timeout" in self.model_fields_set or self.hang_timeout_s is None:
            return self.timeout
        return max(self.timeout, timedelta(seconds=min(20 * self.hang_timeout_s, 1e6)))

    @property
    def allowed_restarts(self) -> int:
        """`max_restarts`; unless it was given, 0 without checkpoints to restart from."""
        asked = "max_restarts" in self.model_fields_set
        return self.max_restarts if asked or self.enable_fault_tolerance else 0

    @property
    def local_save_dir(self) -> Path:
        """The folder of the runs on this machine; with a URL, that of their local copies."""
        return self.local_copy_of(self.save_dir) if is_url(self.save_dir) else Path(self.save_dir)

    def local_copy_of(self, url: str) -> Path:
        """The folder of the local copy of what lies at `url`."""
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        root = Path(self.local_dir or Path(cache, "multi-gpu-training", "runs"))
        words = re.sub("[^A-Za-z0-9]+", "-", url).strip("-")[:60]
        return root / f"{words}-{hashlib.sha256(url.encode()).hexdigest()[:10]}"

    def check(self) -> None:
        """Raise one ConfigError with every pair of settings that contradict each other."""
        problems = list(self._contradictions())
        if problems:
            raise ConfigError(problems)

    def _contradictions(self) -> Iterator[str]:
        yield from self._contradictions_of_place()
        yield from self._contradictions_of_exchange()
        yield from self._contradictions_of_training()

    def _contradictions_of_place(self) -> Iterator[str]:
        """Mode, devices, ranks and how much each computes."""
        mode = self.training_mode
        distributed = mode.has_ranks
        if not distributed and (self.world_size or 1) > 1:
            yield (
                f"training_mode={mode.value} is one process; drop world_size={self.world_size} "
                "or use distributed_data_parallel"
            )
        if not distributed and self.sync_bn and mode is TrainingMode.DATA_PARALLEL:
            yield "sync_bn=true needs distributed_data_parallel; DataParallel cannot do it"
        if not distributed and (self.share_weights or self.balance in ("measured", "dynamic")):
            asked = "share_weights" if self.share_weights else f"balance={self.balance}"
            yield f"{asked} needs distributed_data_parallel; {mode.value} is one process"
        if mode is TrainingMode.FULLY_SHARDED:
            yield from self._sharding_contradictions()
        else:
            fields = type(self).model_fields
            ours = "" if mode is TrainingMode.AUTO else "fsdp_"
            useless = [
                name
                for name in sorted(self.model_fields_set)
                if name == "tensor_parallel" or (ours and name.startswith(ours))
                if getattr(self, name) != fields[name].default
            ]
            if useless:
                yield f"{', '.join(useless)}: only for training_mode=fully_sharded; drop it"
        if self.share_weights and self.balance != "auto":
            yield (
                f"share_weights={self.share_weights} and balance={self.balance} both say how "
                "batches are shared out; give one"
            )
        if self.share_weights and self.world_size not in (None, len(self.share_weights)):
            yield (
                f"share_weights={self.share_weights} are for {len(self.share_weights)} ranks, but "
                f"world_size={self.world_size}; give one per rank, or drop them"
            )
        if mode is TrainingMode.SINGLE and self.device_ids and len(self.device_ids) > 1:
            yield f"training_mode=single uses one GPU; device_ids={self.device_ids} names several"
        if self.device == "cpu" and self.device_ids:
            yield f"device=cpu and device_ids={self.device_ids} exclude each other; drop one"
        if self.device == "cpu" and self.backend == "nccl":
            yield "backend=nccl needs GPUs; use backend=gloo with device=cpu"
        if self.device in ("mps", "xpu"):
            yield from self._beyond_one_device()
        if distributed and self.device_ids and not self.share_gpu:
            repeated = sorted({i for i in self.device_ids if self.device_ids.count(i) > 1})
            if repeated:
                yield (
                    f"device_ids={self.device_ids} repeats {repeated}; name each GPU once, "
                    "or set share_gpu=true to test several ranks on one GPU"
                )
        if self.rank is not None and self.world_size is None:
            yield f"rank={self.rank} needs world_size as well"
        if self.rank is not None and self.world_size is not None and self.rank >= self.world_size:
            yield (f"rank={self.rank} is outside world_size={self.world_size}; ranks count from 0")
        if self.global_batch_size and self.world_size and self.global_batch_size < self.world_size:
            yield (
                f"global_batch_size={self.global_batch_size} is smaller than "
                f"world_size={self.world_size}; use at least {self.world_size}, or fewer ranks"
            )

    def _contradictions_of_exchange(self) -> Iterator[str]:
        given = self.model_fields_set
        if {"reduce_bucket_size", "bucket_cap_mb"} <= given and self.reduce_bucket_size:
            megabytes = self.reduce_bucket_size / 2**20
            if abs(megabytes - self.bucket_cap_mb) > 1e-6 * self.bucket_cap_mb:
                yield (
                    f"reduce_bucket_size={self.reduce_bucket_size} bytes is {megabytes:g} MB but "
                    f"bucket_cap_mb={self.bucket_cap_mb:g}; give one of them, or equal values"
                )
        if {
            "use_fp16_allreduce",
            "fp16_compression",
        } <= given and self.use_fp16_allreduce != self.fp16_compression:
            yield (
                f"use_fp16_allreduce={self.use_fp16_allreduce} and "
                f"fp16_compression={self.fp16_compression} mean the same; set one of them"
            )
        if "timeout" in given and (self.hang_timeout_s or 0) >= self.timeout.total_seconds():
            yield (
                f"timeout={self.timeout.total_seconds():g} s ends an exchange before "
                f"hang_timeout_s={self.hang_timeout_s:g} can name who holds it up; raise timeout, "
                "or lower hang_timeout_s"
            )

    def _contradictions_of_training(self) -> Iterator[str]:
        """Data, learning rate, averages, precision, and where runs are kept."""
        if self.local_dir is not None and not any(map(is_url, (self.save_dir, self.resume or ""))):
            yield (
                f"local_dir={self.local_dir} does nothing without a URL as save_dir; drop it, or "
                "give the folder as save_dir"
            )
        if self.num_workers == 0:
            if self.prefetch_factor is not None:
                yield (
                    f"prefetch_factor={self.prefetch_factor} needs num_workers of at least 1; "
                    "without workers nothing is prefetched"
                )
            if self.persistent_workers:
                yield "persistent_workers=true needs num_workers of at least 1"
        if self.warmup_epochs and self.warmup_steps:
            yield (
                f"warmup_epochs={self.warmup_epochs:g} and warmup_steps={self.warmup_steps} "
                "both set the warm-up; use only one"
            )
        if self.ema_decay is not None and self.swa_start is not None:
            yield (
                f"ema_decay={self.ema_decay:g} and swa_start={self.swa_start} are two ways to "
                "average the weights; give one"
            )
        for name, first in (("swa_start", self.swa_start), ("profile_steps", self._first_traced)):
            if first is not None and self.max_steps is not None and first > self.max_steps:
                yield (
                    f"{name}={getattr(self, name)} begins after max_steps={self.max_steps}, so "
                    "nothing would come of it; choose earlier steps, or drop it"
                )
        if self.deterministic and self.cudnn_benchmark:
            yield (
                "deterministic=true and cudnn_benchmark=true contradict each other: what is "
                "fastest differs between runs; drop one of them"
            )
        if not self.enable_fault_tolerance:
            for name in ("on_nonfinite", "on_loss_spike", "on_divergence"):
                if getattr(self, name) == "rollback":
                    yield (
                        f"{name}=rollback needs checkpoints to go back to; drop "
                        "enable_fault_tolerance=false, or choose another reaction"
                    )
        if self.swa_every is not None and self.swa_start is None:
            yield (
                f"swa_every={self.swa_every} does nothing without swa_start, the step of the first "
                "average; give it, or drop swa_every"
            )
        if self.mixed_precision_dtype != "auto" and self.use_mixed_precision is False:
            yield (
                f"mixed_precision_dtype={self.mixed_precision_dtype} does nothing with "
                "use_mixed_precision=false; drop one of them"
            )

    @property
    def _first_traced(self) -> int | None:
        return None if self.profile_steps is None else step_spans(self.profile_steps)[0][0]

    def _beyond_one_device(self) -> Iterator[str]:
        """What `mps` and `xpu` cannot do here: they are one device, without CUDA graphs."""
        asked = f"device={self.device}"
        if (self.world_size or 1) > 1:
            yield (
                f"{asked} trains on one device, but world_size={self.world_size}; use one rank, or "
                "device=cpu to try several"
            )
        if self.training_mode in (TrainingMode.DATA_PARALLEL, TrainingMode.FULLY_SHARDED):
            yield f"{asked} is one device; use training_mode=single"
        if self.device_ids and self.device == "mps":
            yield f"{asked} has no numbered devices; drop device_ids={self.device_ids}"
        if self.backend == "nccl":
            yield f"backend=nccl is for NVIDIA and AMD GPUs; drop it with {asked}"
        if self.step_execution == "graph":
            yield f"step_execution=graph records CUDA graphs, which {asked} has not; use eager"
        if self.data_on_gpu:
            yield f"data_on_gpu=true is for CUDA; drop it with {asked}"

    def _sharding_contradictions(self) -> Iterator[str]:
        """What fully sharded training cannot do."""
        mode = "training_mode=fully_sharded"
        if self.compress_gradients:
            yield f"{mode} sends gradients as they are; drop fp16_compression"
        if self.static_graph:
            yield f"static_graph=true is for distributed_data_parallel; {mode} has no such graph"
        if self.balance in ("measured", "dynamic"):
            yield (
                f"balance={self.balance} measures ranks one by one, and under {mode} no rank "
                "computes alone; give share_weights"
            )
        if self.mixed_precision_dtype == "fp16":
            yield f"mixed_precision_dtype=fp16 needs loss scaling, which {mode} lacks; use bf16"
        if self.ema_decay is not None or self.swa_start is not None:
            yield f"ema_decay and swa_start average whole weights, and {mode} has none; drop them"
        if self.share_gpu:
            yield f"share_gpu=true: gloo crashes on the GPU tensors of {mode}; use device=cpu"
        for name in ("fsdp_copy_size", "share_weights"):
            if getattr(self, name) is not None and self.tensor_parallel > 1:
                yield f"{name} and tensor_parallel cannot be combined; drop one of them"
        if self.fsdp_gather_dtype is not None and self.use_mixed_precision is not True:
            yield (
                f"fsdp_gather_dtype={self.fsdp_gather_dtype} needs use_mixed_precision=true: "
                "without it everything is computed in the type of the parameters"
            )

    @property
    def compress_gradients(self) -> bool:
        return self.use_fp16_allreduce or self.fp16_compression

    @property
    def bucket_bytes(self) -> int:
        return self.reduce_bucket_size or int(self.bucket_cap_mb * 2**20)

    def plain(self) -> dict[str, Any]:
        """Every field as plain values, ready for YAML or JSON."""
        values = self.model_dump(mode="python")
        values["training_mode"] = self.training_mode.value
        values["timeout"] = self.timeout.total_seconds()
        # Synonyms agree, so that what was written can be read back.
        values["use_fp16_allreduce"] = values["fp16_compression"] = self.compress_gradients
        values["bucket_cap_mb"] = self.bucket_bytes / 2**20
        return values


def name_problem(name: str) -> str | None:
    """What keeps `name` from naming one folder inside another; None if nothing does.

    Names that come from other machines go through this as well: whoever sends them must not
    choose where files are written.
    """
    if not name:
        return "a run needs a name of at least one character"
    if "/" in name or "\\" in name:
        return "a run's name is one folder, without / or \\; use save_dir for the folder above it"
    if name.startswith("."):
        return "a run's name must not start with a dot"
    if not name.isprintable():
        return "a run's name must not contain control characters"
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        return "a run's name must be text in UTF-8"
    if length > LONGEST_NAME:
        return f"a run's name has at most {LONGEST_NAME} bytes"
    return None


def path_problem(path: str) -> str | None:
    """What keeps `path` from being one that a file system can have; None if nothing does."""
    try:
        raw = path.encode()  # not os.fsencode: it is written into files of text
    except UnicodeEncodeError:
        return "it is not text in UTF-8; rename what it names"
    if not raw:
        return "a path needs at least one character"
    if b"\0" in raw:
        return "it holds a NUL character, which no path can have"
    if len(raw) > LONGEST_PATH or any(len(part) > 255 for part in raw.split(b"/")):
        return f"it is too long: 255 bytes per name and {LONGEST_PATH} in all at most"
    return None


def is_url(text: str) -> bool:
    """Whether a setting names a place in object storage rather than a folder."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def url_problem(text: str) -> str | None:
    """What keeps `text` from being a folder or a URL that runs can be kept at."""
    if "::" in text and "://" in text:
        return "use a plain URL like s3://bucket/runs, without ::"
    if not is_url(text):
        cut = re.match(r"(s3|gs|gcs|az|abfs|file|memory):(?!//)", text)
        return f"a URL begins with {cut[1]}://" if cut else None
    scheme, _, rest = text.partition("://")
    if "?" in text or "#" in text:
        return "use a plain URL like s3://bucket/runs, without ? or #"
    if ":" in rest.partition("/")[0].partition("@")[0] and "@" in rest.partition("/")[0]:
        return (
            "a password in a URL would be written into files; take it out, and give it through the "
            "environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) or a file of the provider"
        )
    if scheme == "file" and not rest.startswith("/"):
        return "file:// needs a whole path: file:///mnt/runs"
    return None if rest.strip("/") else f"name a place below {scheme}://"


def unknown_key(key: str, known: list[str]) -> str:
    meant = setting_meant(key)
    close = [meant] if meant in known else difflib.get_close_matches(key[:200], known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "`mgt config-schema` lists every key"
    return f"unknown key {brief(key)}; {hint}"


def _refusal(error: ValidationError, known: list[str]) -> ConfigError:
    details = error.errors()
    unknown = any(detail["type"] in _UNKNOWN for detail in details)
    problems = [_describe(detail, known) for detail in details]
    return ConfigError(problems, code="MGT102" if unknown else None)


def _describe(detail: ErrorDetails, known: list[str]) -> str:
    name = ".".join(str(part) for part in detail["loc"])
    if detail["type"] in _UNKNOWN:
        return unknown_key(name, known)
    problem = detail["msg"].removeprefix("Value error, ")
    remedy = f"; {_REMEDIES[name]}" if name in _REMEDIES else ""
    shown = redact(brief(detail["input"]))
    return f"{name[:200]}={shown}: {problem[0].lower()}{problem[1:]}{remedy}"
