"""The progress of a run: finished epochs, their metrics, the best one. Saved with the run."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.state_dicts import Later, WrittenList, json_text, pack

# best_metric_mode=auto decides by these words.
_SMALLER_IS_BETTER = {"loss", "error", "wer", "cer", "perplexity", "mse", "mae", "rmse"}


@dataclass(frozen=True)
class FitResult:
    """The result of a finished run."""

    metrics: dict[str, float]
    best: float | None
    steps: int
    folder: Path
    history: list[dict[str, dict[str, float]]] = field(default_factory=list)


class Progress:
    """`history[e]` holds {"train": {...}, "val": {...}} of finished epoch e."""

    def __init__(self, config: MultiGPUConfig) -> None:
        self.metric = config.best_metric or "loss"
        self.sets: tuple[str, ...] = ()  # names of the validation sets, if there are several
        self.epoch: int | None = None  # which the loop trains, or trained last; not saved
        self.validated_step = 0  # the latest one; after a stop, one that was due may be missing
        self._chosen = config.best_metric is not None
        self.mode = config.best_metric_mode
        self.patience = config.early_stopping_patience
        self.history: list[dict[str, dict[str, float]]] = []
        self.unfinished: dict[str, dict[str, float]] | None = None
        self.best: float | None = None
        self.best_epoch: int | None = None
        self._texts: list[tuple[dict[str, dict[str, float]], str]] = []

    @property
    def epochs_done(self) -> int:
        return len(self.history)

    @property
    def out_of_patience(self) -> bool:
        """Whether early stopping says to stop."""
        if self.patience is None or self.best_epoch is None:
            return False
        return self.epochs_done - 1 - self.best_epoch >= self.patience

    @property
    def last(self) -> dict[str, dict[str, float]]:
        """The latest metrics, even of an epoch that was cut short."""
        if self.unfinished is not None:
            return self.unfinished
        return self.history[-1] if self.history else {"train": {}, "val": {}}

    @property
    def newest(self) -> dict[str, float]:
        """The latest validation metrics, or those of training if nothing was validated."""
        return self.last["val"] or self.last["train"]

    def record_of(self, epoch: int | None) -> dict[str, dict[str, float]] | None:
        """The record of an epoch that was already trained, if any. None means the latest epoch."""
        if epoch is None:
            return self.last if self.history or self.unfinished else None
        return self.history[epoch] if epoch < self.epochs_done else self.unfinished

    def finish_epoch(
        self, train: dict[str, float], val: dict[str, float] | None, whole: bool = True
    ) -> bool:
        """Record an epoch; True if it is the best so far. An epoch cut short by max_steps does
        not count as finished: a resumed run continues inside it."""
        record = {"train": train, "val": val or {}}
        self.unfinished = None if whole else record
        if whole:
            self.history.append(record)
        return self.judge(val if val is not None else train, self.epochs_done - whole)

    def judge(self, metrics: dict[str, float], epoch: int | None = None) -> bool:
        """Whether these metrics, of `epoch` or of the current one, are the best so far."""
        value = metrics[self.find_metric(metrics)]
        better = not math.isnan(value) and (
            self.best is None
            or math.isnan(self.best)
            or (value < self.best if self.smaller_is_better else value > self.best)
        )
        if better:
            self.best, self.best_epoch = value, self.epochs_done if epoch is None else epoch
        return better

    def find_metric(self, metrics: dict[str, float]) -> str:
        """The name of the metric that decides the best checkpoint; raises if it does not exist."""
        if self.metric not in metrics and self.metric.removeprefix("val/") in metrics:
            self.metric = self.metric.removeprefix("val/")  # its name in the logs
        if not self._chosen and self.metric not in metrics and metrics:
            first = f"{self.sets[0]}/loss" if self.sets else ""
            self.metric = first if first in metrics else next(iter(metrics))
        if self.metric not in metrics:
            raise ConfigError(
                f"best_metric={self.metric!r} is not among the metrics of this run: "
                f"{', '.join(sorted(metrics))}; name one of them"
            )
        return self.metric

    def of_deciding_set(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics. With several validation sets, those of the deciding set are also included
        without the set's name."""
        prefix = f"{self.metric.partition('/')[0]}/"
        if prefix[:-1] not in self.sets:
            return metrics
        found = {k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix)}
        return {**metrics, **found}

    def score(self, metrics: dict[str, float]) -> dict[str, Any]:
        """The score of a checkpoint with these metrics, as recorded in its manifest."""
        return {
            "metric": self.metric,
            "value": metrics[self.metric],
            "smaller_is_better": self.smaller_is_better,
        }

    @property
    def smaller_is_better(self) -> bool:
        if self.mode != "auto":
            return self.mode == "min"
        name, _, rest = self.metric.partition("/")
        metric = rest if name in self.sets else self.metric  # ignore the name of the set
        words = re.split(r"[^a-z]+", metric.lower())  # "power" does not mean a WER
        return not _SMALLER_IS_BETTER.isdisjoint(words)

    def state_dict(self) -> dict[str, Any]:
        return {
            "history": self.history,
            "unfinished": self.unfinished,
            "best": self.best,
            "best_epoch": self.best_epoch,
            "validated_step": self.validated_step,
        }

    def state_to_save(self) -> dict[str, Any]:
        """`state_dict`, without revisiting every past epoch while training waits."""
        history = list(self.history)  # past epochs no longer change
        return {**self.state_dict(), "history": Later(lambda: self._written(history))}

    def _written(self, history: list[dict[str, dict[str, float]]]) -> WrittenList:
        """Serialise each epoch once: a run may have thousands, and save every second."""
        known = self._texts
        texts = [
            known[place][1]
            if place < len(known) and known[place][0] is record
            else json_text(pack(record, {}))
            for place, record in enumerate(history)
        ]
        self._texts = list(zip(history, texts, strict=True))
        return WrittenList(texts)

    def kept(self) -> Callable[[], None]:
        """Copy the progress in memory; calling the result restores it."""
        state = {**self.state_dict(), "history": list(self.history)}
        return lambda: self.load_state_dict(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history = list(state["history"])
        self.unfinished = state.get("unfinished")
        self.best = state["best"]
        self.best_epoch = state["best_epoch"]
        self.validated_step = state.get("validated_step", sys.maxsize)  # not in those of 0.1
