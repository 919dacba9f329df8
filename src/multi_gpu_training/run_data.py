"""The data of one run: this rank's loaders, how a global batch is made up, and the loss on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.feeding import (
    Data,
    Loader,
    ValData,
    ValLoaders,
    is_named,
    training_loader,
    validation_loader,
)
from multi_gpu_training.data.generators import has_seeded_generator
from multi_gpu_training.data.loader import ShareLoader
from multi_gpu_training.data.stream import StreamLoader
from multi_gpu_training.measure.balance import Balance
from multi_gpu_training.measure.request import Measurement
from multi_gpu_training.setup_arguments import Given
from multi_gpu_training.training.evaluation import choose_eval_fn
from multi_gpu_training.training.loss import SupervisedLoss, choose_loss
from multi_gpu_training.training.progress import Progress
from multi_gpu_training.training.step_state import StepState
from multi_gpu_training.training.validation import check_metric, check_sets


class RunData:
    """Built once, on every rank; `loaders_for` makes further loaders later."""

    def __init__(
        self,
        given: Given,
        state: StepState,
        balance: Balance,
        progress: Progress,
        measurement: Measurement | None,
        say: Callable[[str], None],
    ) -> None:
        self.config, self.placement = state.config, state.placement
        self.state, self.balance = state, balance
        config, dataset, val_dataset = self.config, given.dataset, given.val_dataset
        if measurement is not None:
            dataset, val_dataset = _shortened(measurement, given, config)
        self.loss_fn = choose_loss(given.loss_fn)
        if isinstance(self.loss_fn, SupervisedLoss) and given.augment is None:
            self.loss_fn.look_at(dataset)  # labels that `augment` changes are looked at per batch
        self.eval_fn = choose_eval_fn(given.eval_fn, self.placement.dp_size)
        sets = list(val_dataset) if is_named(val_dataset) else []
        progress.sets = tuple(sets)
        check_sets(config, sets, val_dataset)
        check_metric(config, self.loss_fn, self.eval_fn, sets)
        replicas = state.strategy.replicas
        count = self.state.batch_size_fn = given.batch_size_fn
        self.train_loader, self.sizes = training_loader(
            dataset, config, self.placement, replicas, count
        )
        if isinstance(self.train_loader, StreamLoader):
            for told in self.train_loader.describe():
                say(told)
        elif isinstance(dataset, DataLoader) and has_seeded_generator(dataset):
            say(
                f"data order: set by seed={config.seed} and the epoch; the seed of the "
                "DataLoader's or sampler's own generator is ignored"
            )
        limit = config.limit_val_batches
        self.val_loader: ValLoaders | None = None
        if val_dataset is not None:
            self.val_loader = self.loaders_for(val_dataset, limit=limit)
        self.state.loader, self.state.augment = self.train_loader, given.augment
        if isinstance(self.loss_fn, SupervisedLoss):
            if given.augment is None and isinstance(self.train_loader, ShareLoader):
                self.train_loader.before_pass = partial(self.loss_fn.look_at, dataset)
            parts = self.placement.dp_size * replicas * config.gradient_accumulation_steps
            self.loss_fn.has_parts = parts > 1

    def loaders_for(self, data: Any, what: str = "validation", **how: Any) -> Any:
        """This rank's shares of a dataset or DataLoader, or of several by name; anything else
        gives batches already. Collective."""
        if is_named(data):
            named = {name: (part, f"{what} set {name!r} of type") for name, part in data.items()}
            return {name: self._shares(part, purpose=p, **how) for name, (part, p) in named.items()}
        return self._shares(data, purpose=f"{what} dataset", **how)

    def _shares(self, data: Any, **how: Any) -> Loader:
        count, size = self.state.batch_size_fn, self.sizes
        loader = validation_loader(
            data, self.config, self.placement, size, self.train_loader, count, **how
        )
        if self.balance.weights is not None:
            loader.set_shares(weights=self.balance.weights)
        return loader


def _shortened(
    measurement: Measurement, given: Given, config: MultiGPUConfig
) -> tuple[Data | None, ValData | None]:
    """As much of the training and validation data as a measurement looks at."""
    batch = config.global_batch_size or config.batch_size
    shorten, val_dataset = measurement.shorten, given.val_dataset
    if is_named(val_dataset):
        short = {name: shorten(part, batch) for name, part in val_dataset.items()}
        return shorten(given.dataset, batch), short
    return shorten(given.dataset, batch), shorten(val_dataset, batch)
