"""Where a training stands: what a step reads and changes, in one small object.

Runners, comparison, rollback, the NaN guard and out-of-memory recovery get this and not the
trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.batch import tensors_of
from multi_gpu_training.data.feeding import Loader
from multi_gpu_training.data.order import Share, derive_seed, step_seed
from multi_gpu_training.data.randomness import SampleRandom
from multi_gpu_training.data.resident import ResidentBatch
from multi_gpu_training.data.sample_count import BatchSizeFn, sample_count
from multi_gpu_training.distributed.batchnorm import Attendance
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.distributed.progress_slot import OWN_CODE, note_phase
from multi_gpu_training.errors import DataError
from multi_gpu_training.training.callbacks import CallbackList
from multi_gpu_training.training.learning_rate import Rates, Schedule
from multi_gpu_training.training.loss import SupervisedLoss
from multi_gpu_training.training.metrics import MetricsCollector
from multi_gpu_training.training.precision import Precision
from multi_gpu_training.training.step import MicroResult, StepModule, StepResult
from multi_gpu_training.training.strategy import Strategy

# Changes a training batch on the device: augment(batch, random) -> batch.
Augment = Callable[[Any, SampleRandom], Any]


class StepState:
    """The state of one training, and the small operations on it that every kind of step shares.

    step, epoch, position: optimizer steps so far, and the place in the data of the next one.
    micro: micro-batches computed of the step under way. given: those that `train_step` was given,
        which are fewer where out-of-memory recovery cuts them into parts.
    replayed: steps that ran as a CUDA graph.
    weighted: whether losses come with weights other than sample counts; None: not known yet.
    moving: the optimizer is moving the weights right now.
    extra_tensors: state on the device beside model and optimizer that a rollback must restore.
    """

    def __init__(self, config: MultiGPUConfig, placement: Placement, strategy: Strategy) -> None:
        self.config = config
        self.placement = placement
        self.strategy = strategy
        self.precision = Precision(config, placement.device, bool(config.use_mixed_precision))
        self.metrics = MetricsCollector()
        self.callbacks = CallbackList()
        self.attendance = Attendance()
        self.step = self.epoch = self.position = 0
        self.micro = self.given = self.replayed = 0
        self.weighted: bool | None = None
        self.moving = False
        self.extra_tensors: list[Tensor] = []
        self.model: nn.Module
        self.step_module: StepModule
        self.parameters: list[nn.Parameter]
        self.optimizer: Optimizer
        self.rates: Rates
        self.schedule: Schedule
        self.loader: Loader | None = None
        self.augment: Augment | None = None
        self.batch_size_fn: BatchSizeFn | None = None
        self.transform: Callable[[Any], Any] | None = None  # of a batch, right before the loss
        self.noise_stream = 0  # another number draws other noise for the same steps
        self._noise_base: int | None = None
        self._epoch_key = EpochKey(placement.device)

    # Before a micro-batch is computed

    def seed_noise(self) -> None:
        """Dropout and other noise depend on (seed, step, micro-batch, rank), not on history."""
        if self._noise_base is None:
            rank = self.placement.dp_rank
            self._noise_base = derive_seed(self.config.seed, rank, self.noise_stream)
        seed = step_seed(self._noise_base, self.step, self.micro)
        torch.default_generator.manual_seed(seed)
        if self.placement.device.type == "cuda":
            torch.cuda.default_generators[self.placement.device.index or 0].manual_seed(seed)

    def abandon_step(self) -> None:
        """Give up the step under way: the next micro-batch is the first of another one."""
        self.drop_gradients()
        self.micro = self.given = 0

    def own_share(self, batch: Any) -> Share:
        """The share of a batch that the user made: every `gradient_accumulation_steps` of them
        form a step."""
        return Share(
            epoch=self.epoch,
            position=self.position,
            indices=(),
            count=self.count_samples(batch),
            window_count=0,  # unknown here: the ranks learn it with the gradients
            first=self.given == 0,
            last=self.given + 1 >= self.config.gradient_accumulation_steps,
            key=self.step,
        )

    def count_samples(self, batch: Any) -> int:
        """Samples in a batch that the user made."""
        try:
            return sample_count(batch, self.batch_size_fn)
        except DataError:
            # A step that is one micro-batch of one rank weighs nothing against anything else.
            if self.placement.dp_size > 1 or self.config.gradient_accumulation_steps > 1:
                raise
            return next((t.shape[0] for t in tensors_of(batch) if t.ndim), 1)

    def stand_in(self, share: Share) -> Any:
        """A sample as the loss gets it, for an empty share whose model must run all the same."""
        assert self.loader is not None
        batch = self.loader.stand_in(share)
        self._epoch_key.set(share.sample_seed)
        return self.prepare(batch, torch.zeros(1, dtype=torch.int64, device=self.placement.device))

    def settling_batch(self, batch: Any, share: Share) -> Any:
        """A batch as the loss gets it, to settle the strategy with."""
        if share.count == 0 and self.loader is not None:
            return self.stand_in(share)
        return self.prepare(batch, self.sample_numbers(batch, share))

    def expect_any_label(self) -> None:
        """The user's own batches may have other labels than the dataset that was looked at."""
        loss_fn = self.step_module.loss_fn
        if isinstance(loss_fn, SupervisedLoss):
            loss_fn.every_label_counts = False

    def sample_numbers(self, batch: Any, share: Share) -> Tensor | None:
        """The numbers of a batch's samples, which key the randomness of `augment`."""
        if self.augment is None:
            return None
        if not share.sample_seed:  # the user's own batch: keyed by its place
            self._epoch_key.set(derive_seed(self.config.seed, self.step, self.micro))
            start = self.placement.dp_rank * share.count
            return torch.arange(start, start + share.count, device=self.placement.device)
        self._epoch_key.set(share.sample_seed)
        if isinstance(batch, ResidentBatch):
            return batch.index
        numbers = torch.tensor(share.indices, dtype=torch.int64)
        return numbers.to(self.placement.device, non_blocking=True)

    def prepare(self, batch: Any, samples: Tensor | None) -> Any:
        """The batch as the loss function gets it: gathered, and augmented on the device."""
        batch = materialize(batch)
        if self.augment is not None and samples is not None:
            with torch.no_grad():
                batch = self.augment(batch, SampleRandom(samples, self._epoch_key.tensor))
        return batch if self.transform is None else self.transform(batch)

    # After it was computed

    def note(self, result: MicroResult, share: Share) -> None:
        """Add a micro-batch to the metrics."""
        if share.count:
            self.weighted = result.weight is not None
            weight = share.count if result.weight is None else result.weight
            self.metrics.add_mean(result.mean, weight, result.metrics)

    def advance(
        self, loss: Tensor, norm: Tensor | None, share: Share, shared: bool = False
    ) -> StepResult:
        """Count a micro-batch that was computed; after the last one of a step, the step.

        shared: the next micro-batch writes its loss to the same memory.
        """
        note_phase(OWN_CODE)
        if not share.last:
            self.micro += 1
            return StepResult(loss, self.step, False, None, shared)
        self.micro = 0
        self.step += 1
        self.epoch, self.position = share.epoch, share.position + 1
        self.schedule.after_step(self.step)
        return StepResult(loss, self.step, True, norm, shared)

    def steps_left(self) -> int | None:
        """Optimizer steps until the run ends; None where nobody knows."""
        total = None if self.loader is None else self.loader.steps
        ends = [] if total is None else [total * self.config.epochs]
        ends += [] if self.config.max_steps is None else [self.config.max_steps]
        return min(ends) - self.step if ends else None

    def drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self.step_module.tally.grad = None


class EpochKey:
    """What an epoch's randomness comes from, on the device: recorded steps read it there."""

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros((), dtype=torch.int64, device=device)
        self._value = 0

    def set(self, value: int) -> None:
        if value != self._value:
            self._value = value
            self.tensor.fill_(value)


def materialize(batch: Any) -> Any:
    """The batch itself; gathered, if so far it is only a list of places on the device."""
    return batch.gather(batch.index) if isinstance(batch, ResidentBatch) else batch
