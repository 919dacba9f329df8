"""What to measure in a training, and how that reaches the user's script.

`mgt bench`, `estimate`, `check` and `verify` start the user's own script, or a recipe, in child
processes. The only way into a script is the environment: MGT_MEASURE names a file with a
`MeasureRequest`. The manager asks `requested()` once and gets a `Measurement`, which adapts the
config and adds callbacks.
"""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from torch import nn

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.config_fields import TrainingMode
from multi_gpu_training.data.feeding import BatchSizes, Loader, ValLoaders, batch_sizes
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.safe_files import write_atomically
from multi_gpu_training.training.callbacks import Callback, CallbackList, Run
from multi_gpu_training.training.trainer import MultiGPUTrainer

VARIABLE = "MGT_MEASURE"
ASKED = "asked.json"  # what the user's own config says; it is there once a manager was made
SIZES = "sizes.json"  # the batch of the training; it is there once training was set up
ASKED_FIELDS = (
    "epochs",
    "max_steps",
    "batch_size",
    "global_batch_size",
    "gradient_accumulation_steps",
    "num_workers",
    "keep_last",
    "sync_bn",
)
OWN_BACKWARD = "a loop with its own backward (manager.prepare)"  # why a request is refused
# Two names of the same setting: a case that sets one drops the user's other.
SYNONYMS = {
    "batch_size": ("global_batch_size",),
    "global_batch_size": ("batch_size", "gradient_accumulation_steps"),
    "bucket_cap_mb": ("reduce_bucket_size",),
    "fp16_compression": ("use_fp16_allreduce",),
    "use_mixed_precision": ("mixed_precision_dtype",),
}


@dataclass(frozen=True)
class MeasureRequest:
    """One training to measure.

    kind: the module of this package that measures it.
    settings: fields of MultiGPUConfig that replace the user's.
    silent: gradients stay on their rank, which shows what exchanging them costs.
    every: steps between two readings of the clock, for steps so short that a reading counts.
    double: train in float64.
    sample_noise: random numbers drawn in the loss belong to samples, not to ranks.
    as_is: keep the script's own batch size, workers and dataset.
    least_batch: the smallest global batch, so that every number of ranks can share it.
    batches: of each manager of the script, by its number, where it runs on one rank: own_batch,
        which the script gives a rank, and total, the global batch.
    probe: the micro-batch to split as several ranks split it: manager, step, micro, parts.
    round: what a round of federated training needs (federated_round.py).
    """

    kind: str
    out: str
    ranks: int
    steps: int
    mode: str = TrainingMode.DISTRIBUTED_DATA_PARALLEL.value
    warmup: int | None = None
    device: str = "auto"
    device_ids: list[int] | None = None
    share_gpu: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    silent: bool = False
    every: int = 1
    double: bool = False
    sample_noise: bool = False
    as_is: bool = False
    least_batch: int = 1
    batches: dict[str, dict[str, int | None]] = field(default_factory=dict)
    probe: dict[str, Any] | None = None
    round: dict[str, Any] | None = None

    def save(self) -> str:
        """Write the request to its folder; the result belongs into MGT_MEASURE."""
        path = Path(self.out) / "request.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(self)))  # ranks may save the same request at once
        return str(path)


class MeasuredRun(Run, Protocol):
    """What a measurement may ask of a run; the manager is one."""

    trainer: MultiGPUTrainer
    callbacks: CallbackList
    train_loader: Loader
    val_loader: ValLoaders | None
    sizes: BatchSizes
    loss_fn: Any

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Metrics of the model as it is, over all ranks."""


class Measurement:
    """What a request does to a run. Each kind overrides what it needs."""

    looks_into_steps = True  # so a loop with its own backward is refused
    reproducible = False  # whether arithmetic must repeat itself bit for bit
    drops: tuple[str, ...] = ()  # settings of the user that are left out

    def __init__(self, request: MeasureRequest) -> None:
        self.request = request

    def check_own_backward(self, optimizers: int) -> None:
        """Raise where a loop that calls backward itself, with so many optimizers, cannot be
        measured."""
        if self.looks_into_steps:
            raise ConfigError(
                "mgt verify, bench, check and estimate measure fit, train_epoch and train_step; "
                f"they cannot look into {OWN_BACKWARD}. With one loss and one optimizer, use "
                "train_step; otherwise run it with --num-gpus 1 and 2, and compare what they log"
            )

    def adapt(self, config: MultiGPUConfig) -> MultiGPUConfig:
        """The user's config as this measurement needs it; what the user asked for is noted."""
        note_asked(config, self.request.out)
        kept = config.model_fields_set - set(self.drops)
        given = {name: getattr(config, name) for name in kept}
        given |= placed(config, self.request) | self.changes(config)
        if len(given.get("share_weights") or ()) != given["world_size"]:
            given.pop("share_weights", None)  # meant for another number of ranks
        if given["training_mode"] is not TrainingMode.FULLY_SHARDED:
            given = {name: value for name, value in given.items() if name[:5] != "fsdp_"}
        for name in self.request.settings:
            for other in SYNONYMS.get(name, ()):
                given.pop(other, None)
        return MultiGPUConfig(**{**given, **self.request.settings})

    def changes(self, config: MultiGPUConfig) -> dict[str, Any]:
        """Settings that this kind of measurement replaces."""
        return {}

    def shorten(self, dataset: Any, global_batch: int) -> Any:
        """The part of a dataset that this measurement trains on."""
        return dataset

    def prepare(self, model: nn.Module) -> None:
        """Change the model as it was built, before it is placed."""

    def callbacks(self, run: MeasuredRun) -> list[Callback]:
        """Everything is set up and training is about to start: what listens from now on."""
        if run.placement.is_main:
            # Before the first step, which a batch that does not fit would end.
            Path(self.request.out, SIZES).write_text(json.dumps(asdict(run.sizes)))
        return []


def request_of_this_process() -> MeasureRequest | None:
    """What the command that started this process wants measured; None in an ordinary run."""
    path = os.environ.get(VARIABLE)
    return MeasureRequest(**json.loads(Path(path).read_text())) if path else None


def requested() -> Measurement | None:
    """The measurement that this process was started for; None in an ordinary run."""
    request = request_of_this_process()
    if request is None:
        return None
    module = importlib.import_module(f"multi_gpu_training.measure.{request.kind}")
    return cast(Measurement, module.MEASUREMENT(request))


def placed(config: MultiGPUConfig, request: MeasureRequest) -> dict[str, Any]:
    """Settings that put a training where the request wants it, and let it leave no trace."""
    several = TrainingMode(request.mode).has_ranks
    return {
        "training_mode": TrainingMode(request.mode),
        "world_size": request.ranks if several else None,
        "rank": None,
        "local_rank": None,
        "device_ids": request.device_ids,
        "device": request.device,
        "share_gpu": request.share_gpu,
        "backend": None,
        "max_steps": None,
        "resume": None,
        "forecast": None,
        "enable_fault_tolerance": False,
        "tensorboard": False,
        "loggers": [],
        "logger_options": {},
        "monitor": False,
        "progress": "off",
        "save_dir": str(Path(request.out) / "runs"),
        "local_dir": None,
        "max_restarts": 0,
    }


def note_asked(config: MultiGPUConfig, folder: str) -> None:
    """Write down what the user's own config says, before a measurement changes it."""
    found = {name: getattr(config, name) for name in ASKED_FIELDS}
    found["epochs_given"] = "epochs" in config.model_fields_set
    found["per_rank_batch"] = batch_sizes(config, 1).per_rank
    found["compressed"] = config.compress_gradients
    if config.lr_scaling != "none":
        found["base_batch_size"] = config.base_batch_size or config.batch_size
    Path(folder, ASKED).write_text(json.dumps(found))
