"""What a run is: its settings, what follows from them, and which of them contradict each other."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from multi_gpu_training.config_fields import ConfigFields, TrainingMode
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.redaction import redact
from multi_gpu_training.run_places import is_url
from multi_gpu_training.safe_output import brief
from multi_gpu_training.setting_names import setting_meant
from multi_gpu_training.step_ranges import step_spans

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


class MultiGPUConfig(ConfigFields):
    """One training run.

    Fields are checked one by one when they are set, and against each other when the config is
    built and again when a manager takes it; all problems are reported together.
    """

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
