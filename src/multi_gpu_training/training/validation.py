"""Validation by epochs or by steps: when it is due, and what the latest one found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Any

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.feeding import ValLoaders
from multi_gpu_training.distributed.control import Control
from multi_gpu_training.distributed.progress_slot import Phase, note_phase
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.training.callbacks import CallbackList
from multi_gpu_training.training.evaluation import Evaluator, named_sets, prefixed
from multi_gpu_training.training.loss import LossFn, SupervisedLoss
from multi_gpu_training.training.progress import Progress
from multi_gpu_training.training.step_state import StepState
from multi_gpu_training.training.stopping import validation_batches


@dataclass
class Validation:
    """Evaluates the validation data. Every rank must make the same calls."""

    config: MultiGPUConfig
    state: StepState
    callbacks: CallbackList
    progress: Progress
    control: Control
    loader: ValLoaders | None
    evaluator: Evaluator
    track: Callable[[str, Iterable[Any], int | None], Iterable[Any]]  # shows a bar of batches
    warn: Callable[[str], None]
    _latest: tuple[int, dict[str, float]] | None = None  # between steps: the step, the metrics

    def is_due(self, step: int) -> bool:
        """Whether to validate between this step and the next, inside an epoch."""
        every = self.config.validate_every
        due = every is not None and step % every == 0
        return due and not self.state.at_end_of_epoch

    @property
    def due_at_start(self) -> bool:
        """Whether to validate the untrained model."""
        first = self.state.step == 0 and self._latest is None
        return self.loader is not None and self.config.validate_at_start and first

    @property
    def was_missed(self) -> bool:
        """Whether a signal or a fault cut off a validation that was due at this step."""
        step = self.state.step
        return step > 0 and self.progress.validated_step < step and self.is_due(step)

    def between_steps(self) -> dict[str, float]:
        """Validate without closing an epoch, and tell the callbacks."""
        assert self.loader is not None
        metrics, step = self.measure(self.loader), self.state.step
        self.progress.find_metric(metrics)  # catches a wrong best_metric now, not after an epoch
        self._latest, self.progress.validated_step = (step, metrics), step
        for call in self.callbacks.on_validation:
            call(metrics)
        return metrics

    def found_here(self, loader: Iterable[Any]) -> dict[str, float] | None:
        """What the loader gave at this step already, if it did: a stream or max_steps may end an
        epoch exactly where a validation was due."""
        if self._latest is None or self._latest[0] != self.state.step or loader is not self.loader:
            return None
        return self._latest[1]

    def forget(self) -> None:
        """After a rollback: what was found belongs to weights that are gone."""
        self._latest = None

    def measure(self, loader: Iterable[Any]) -> dict[str, float]:
        """Evaluate one or several validation sets. Ranks can stop after each."""
        note_phase(Phase.VALIDATION)
        metrics: dict[str, float] = {}
        sets = self.loader if isinstance(self.loader, dict) else {}
        # A user may validate one of several sets; its metrics keep its name.
        one_of_them = {name: one for name, one in sets.items() if one is loader}
        for name, batches in (one_of_them or named_sets(loader)).items():
            title = f"Validation {name}".rstrip()
            length = len(batches) if isinstance(batches, Sized) else None
            shown = self.track(title, validation_batches(batches, self.control), length)
            found = self.evaluator.metrics_of(shown)
            if not found:
                which = f" on {name!r}" if name else ""
                raise ConfigError(
                    f"the validation{which} gave no metric: its data are empty, or eval_fn adds "
                    "nothing; give it at least one sample and one metric, or leave it out of "
                    "val_dataset"
                )
            metrics |= prefixed(name, found)
        spoilt = [f"val/{name} is {value}" for name, value in metrics.items() if value != value]
        if spoilt:
            self.warn(
                f"step {self.state.step}: {', '.join(spoilt)}; such a validation is never the "
                "best. Check the data and the metric for a division by zero"
            )
        return metrics


def check_sets(config: MultiGPUConfig, sets: list[str], val_dataset: Any) -> None:
    """What the config asks of a validation needs one, and names must be usable in a log."""
    for field in ("validate_every", "limit_val_batches", "validate_at_start"):
        asked = getattr(config, field)
        if val_dataset is None and asked:
            raise ConfigError(
                f"{field}={asked}, but there is no val_dataset; give one, or drop {field}"
            )
    if isinstance(val_dataset, Mapping) and not val_dataset:
        raise ConfigError("val_dataset={} holds no set; give one by name, or leave it out")
    odd = [name for name in sets if not name or "/" in name or name != name.strip()]
    if odd:
        raise ConfigError(
            f"val_dataset has a set named {odd[0]!r}, and metrics are called val/NAME/loss; give "
            "it a name without slashes and outer spaces"
        )


def check_metric(config: MultiGPUConfig, loss_fn: LossFn, eval_fn: Any, sets: list[str]) -> None:
    """A set that does not exist, or a metric that the built-in evaluation never gives, is an error
    before training."""
    known = ["accuracy", "f1", "loss"]
    if config.best_metric is None:
        return
    asked = metric = config.best_metric
    if sets:
        name, _, metric = asked.removeprefix("val/").partition("/")
        if name not in sets or not metric:
            raise ConfigError(
                f"best_metric={asked!r} names no validation set; there are {', '.join(sets)}: "
                f"write for example best_metric={sets[0]}/{asked if '/' not in asked else 'loss'}"
            )
    elif eval_fn is None:
        metric = asked.removeprefix("val/")
    if eval_fn is None and isinstance(loss_fn, SupervisedLoss) and metric not in known:
        raise ConfigError(
            f"best_metric={asked!r} is unknown; without an eval_fn there are {', '.join(known)}"
        )
