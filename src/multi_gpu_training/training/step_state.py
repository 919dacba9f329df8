"""The state of a training: everything a step reads and changes, in one small object.

Runners, comparison, rollback, the NaN guard and out-of-memory recovery receive this instead of the
trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from multi_gpu_training.accelerator import device_generators
from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.batch import (
    alike,
    as_collated,
    tensors_of,
    to_device,
    with_a_row,
)
from multi_gpu_training.data.feeding import Loader
from multi_gpu_training.data.order import Share, derive_seed, step_seed
from multi_gpu_training.data.randomness import SampleRandom
from multi_gpu_training.data.resident import ResidentBatch
from multi_gpu_training.data.sample_count import BatchSizeFn, sample_count
from multi_gpu_training.distributed.batchnorm import ATTENDANCE
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.distributed.progress_slot import BETWEEN_STEPS, note_phase
from multi_gpu_training.errors import DataError, ModelError
from multi_gpu_training.training.callbacks import CallbackList
from multi_gpu_training.training.learning_rate import Rates, Schedule
from multi_gpu_training.training.loss import SupervisedLoss
from multi_gpu_training.training.metrics import MetricsCollector
from multi_gpu_training.training.model_modes import ModelModes
from multi_gpu_training.training.precision import Precision
from multi_gpu_training.training.step import MicroResult, StepModule, StepResult
from multi_gpu_training.training.strategy import Strategy

# Changes a training batch on the device: augment(batch, random) -> batch.
Augment = Callable[[Any, SampleRandom], Any]

_is_trained = attrgetter("requires_grad")


class StepState:
    """The state of one training, and the small operations on it that every kind of step shares.

    step, epoch, position: optimizer steps so far, and the position in the data of the next one.
    micro: micro-batches computed in the current step. given: those passed to `train_step`, which
        are fewer if out-of-memory recovery splits them.
    replayed: steps that ran as a CUDA graph.
    weighted: whether a loss of the current step had a weight other than its sample count.
    unweighted: samples of that step whose loss had no such weight.
    moving: the optimizer is moving the weights right now.
    extra_tensors: device state besides model and optimizer that a rollback must restore.
    parameters: those being trained. The user may freeze, unfreeze and add some between steps.
    """

    def __init__(self, config: MultiGPUConfig, placement: Placement, strategy: Strategy) -> None:
        self.config = config
        self.placement = placement
        self.strategy = strategy
        self.precision = Precision(config, placement.device, bool(config.use_mixed_precision))
        self.metrics = MetricsCollector()
        self.callbacks = CallbackList()
        self.attendance = ATTENDANCE
        self.step = self.epoch = self.position = 0
        self.micro = self.calls_in_step = self.replayed = 0
        self.weighted, self.unweighted = False, 0
        self.moving = False
        self.extra_tensors: list[Tensor] = []
        self.model: nn.Module
        self.modes = ModelModes()
        self.step_module: StepModule
        self.parameters: list[nn.Parameter]
        self._frozen: list[nn.Parameter] = []
        self._groups: list[list[Tensor]] = []
        self.optimizer: Optimizer
        self.rates: Rates
        self.schedule: Schedule
        self.loader: Loader | None = None
        self.augment: Augment | None = None
        self.batch_size_fn: BatchSizeFn | None = None
        self.transform: Callable[[Any], Any] | None = None  # of a batch, right before the loss
        # Called once, with the first batch as the data gave it and as the loss gets it.
        self.first_batch: Callable[[Any, Any], None] | None = None
        self._noise_base: int | None = None
        self._generators: list[Any] = [torch.default_generator]
        self._borrowed: dict[Any, tuple[int, int] | Tensor] = {}
        self.replays_draw_noise = True  # whether recorded steps draw random numbers on the device
        # Called at the end of a micro-batch, before the user's generators are restored.
        self.watch_noise: Callable[[], None] | None = None
        self._epoch_key = EpochKey(placement.device)

    @property
    def at_end_of_epoch(self) -> bool:
        """Whether the next step is of another epoch. Never, where its length is unknown."""
        total = None if self.loader is None else self.loader.steps
        return total is not None and self.position >= total

    # Which parameters are trained

    @property
    def trained(self) -> nn.Module:
        """The model, plus a criterion or parameters of the loss that are trained as well."""
        return self.step_module.trained

    def find_parameters(self) -> None:
        """Find which parameters are trained now, and which of them the optimizer moves."""
        every = list(self.trained.parameters())
        self.parameters = [p for p in every if p.requires_grad]
        self._frozen = [p for p in every if not p.requires_grad]
        optimizer = vars(self).get("optimizer")
        groups = [] if optimizer is None else optimizer.param_groups
        self._groups = [list(group["params"]) for group in groups]

    def parameters_changed(self) -> bool:
        """Whether the user froze, unfroze or added parameters since the last check.

        Called before every step, recorded ones included, so it walks over flat lists rather than
        the model's modules.
        """
        if not all(map(_is_trained, self.parameters)) or any(map(_is_trained, self._frozen)):
            return True
        groups, known = self.optimizer.param_groups, self._groups
        return len(groups) != len(known) or not all(
            len(group["params"]) == len(kept) and all(map(is_, group["params"], kept))
            for group, kept in zip(groups, known, strict=True)
        )

    @contextmanager
    def parameters_as_before(self) -> Iterator[bool]:
        """Undo such a change inside a `with` block; False if the model itself now has other
        parameters."""
        every = list(self.trained.parameters())
        flags = [p.requires_grad for p in every]
        groups = list(self.optimizer.param_groups)
        lists = [list(group["params"]) for group in groups]
        known = {id(p) for p in (*self.parameters, *self._frozen)}
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        for parameter in self._frozen:
            parameter.requires_grad_(False)
        del self.optimizer.param_groups[len(self._groups) :]
        for group, kept in zip(self.optimizer.param_groups, self._groups, strict=False):
            group["params"][:] = kept
        try:
            yield known == {id(p) for p in every}
        finally:
            self.optimizer.param_groups[:] = groups
            for group, params in zip(groups, lists, strict=True):
                group["params"][:] = params
            for parameter, flag in zip(every, flags, strict=True):
                parameter.requires_grad_(flag)

    def take_new_parameters(self) -> None:
        """Adopt the parameters now trained. Every rank must have changed the same; collective."""
        before, known = self.parameters, {id(p) for p in (*self.parameters, *self._frozen)}
        self.strategy.take_layers()
        self.find_parameters()
        names = [name for name, p in self.trained.named_parameters() if p.requires_grad]
        for rank, theirs in enumerate(self.placement.gather_json(names)):
            if theirs != names:
                mine, other = set(names) - set(theirs), set(theirs) - set(names)
                raise ModelError(
                    f"before step {self.step + 1} ranks train different parameters: only rank "
                    f"{self.placement.dp_rank} {sorted(mine)[:3]}, only rank {rank} "
                    f"{sorted(other)[:3]}; freeze and unfreeze the same parameters on every rank",
                    code="MGT606",
                )
        if not names:
            raise ModelError(f"before step {self.step + 1} every parameter was frozen")
        known |= {id(p) for p in self.trained.parameters()}
        strangers = [p for group in self._groups for p in group if id(p) not in known]
        if strangers:
            raise ModelError(
                f"before step {self.step + 1} the optimizer got {len(strangers)} parameters that "
                "are not the model's: ranks would not exchange their gradients; make what they "
                "belong to a part of the model"
            )
        if len(before) != len(self.parameters) or not all(map(is_, before, self.parameters)):
            self.strategy.take_parameters()

    # Before a micro-batch is computed

    def seed_noise(self, on_host: bool = True) -> None:
        """Dropout and other noise depend on (seed, step, micro-batch, rank), not on history.

        This seeds the process-wide generators, so `give_back_generators` must follow; otherwise
        random numbers the user draws between steps would repeat. on_host: false for a replay,
        which draws none on the host.
        """
        if self._noise_base is None:
            rank = self.placement.dp_rank
            self._noise_base = derive_seed(self.config.seed, rank, 0)
            device = self.placement.device
            if len(self._generators) == 1:
                self._generators += device_generators(device)
        seed = step_seed(self._noise_base, self.step, self.micro)
        if on_host:
            generator = self._generators[0]
            self._borrowed.setdefault(generator, generator.get_state())
            generator.manual_seed(seed)
        elif not self.replays_draw_noise:
            return
        for generator in self._generators[1:]:
            # Two numbers are its whole state, and are cheaper to read than `get_state`.
            if generator not in self._borrowed:
                cuda = isinstance(generator, torch.Generator)
                self._borrowed[generator] = (
                    (generator.initial_seed(), generator.get_offset())
                    if cuda
                    else generator.get_state()
                )
            generator.manual_seed(seed)

    def give_back_generators(self) -> None:
        """Let the user's random numbers continue from where they were before `seed_noise`."""
        if self.watch_noise is not None:
            self.watch_noise()
        if not self._borrowed:
            return
        for generator, before in self._borrowed.items():
            if isinstance(before, Tensor):
                generator.set_state(before)
            else:
                generator.manual_seed(before[0])
                generator.set_offset(before[1])
        self._borrowed.clear()

    def abandon_step(self) -> None:
        """Drop the current step: the next micro-batch is the first of another one."""
        self.drop_gradients()
        self.strategy.forget_step()
        self.give_back_generators()
        self.micro = self.calls_in_step = 0

    def own_share(self, batch: Any) -> Share:
        """The share of a batch made by the user: every `gradient_accumulation_steps` of them form
        a step."""
        return Share(
            epoch=self.epoch,
            position=self.position,
            indices=(),
            count=self.count_samples(batch),
            window_count=0,  # unknown here: exchanged along with the gradients
            first=self.calls_in_step == 0,
            last=self.calls_in_step + 1 >= self.config.gradient_accumulation_steps,
            key=self.step,
        )

    def count_samples(self, batch: Any) -> int:
        """Samples in a batch made by the user."""
        try:
            return sample_count(batch, self.batch_size_fn)
        except DataError:
            # With one rank and one micro-batch per step there is nothing to weight against.
            if self.placement.dp_size > 1 or self.config.gradient_accumulation_steps > 1:
                raise
            return next((t.shape[0] for t in tensors_of(batch) if t.ndim), 1)

    def stand_in(self, share: Share, given: Any = None) -> Any:
        """Samples as the loss gets them, for an empty share, so that model and loss run anyway.
        given: the batch without a sample, in the form in which the loop passes its batches."""
        assert self.loader is not None
        batch, count = self.loader.stand_in(share)
        if count == 1 and not alike(given, batch):
            batch = to_device(with_a_row(given, tensors_of(batch)), self.placement.device)
        self._epoch_key.set(share.sample_seed)
        numbers = torch.zeros(count, dtype=torch.int64, device=self.placement.device)
        return self.prepare(batch, numbers)

    def settling_batch(self, batch: Any, share: Share) -> Any:
        """A batch as the loss gets it, for `Strategy.settle`."""
        if share.count == 0 and self.loader is not None:
            return self.stand_in(share)
        return self.prepare(batch, self.sample_numbers(batch, share))

    def expect_any_label(self) -> None:
        """The user's own batches may have other labels than the dataset that was inspected."""
        loss_fn = self.step_module.loss_fn
        if isinstance(loss_fn, SupervisedLoss):
            loss_fn.every_label_counts = False

    def sample_numbers(self, batch: Any, share: Share) -> Tensor | None:
        """The numbers of a batch's samples, which key the randomness of `augment`."""
        if self.augment is None:
            return None
        if not share.sample_seed:  # the user's own batch: keyed by its position
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
        given = batch = as_collated(materialize(batch))
        if self.augment is not None and samples is not None:
            with torch.no_grad():
                batch = self.augment(batch, SampleRandom(samples, self._epoch_key.tensor))
        if self.first_batch is not None:
            look, self.first_batch = self.first_batch, None
            look(given, batch)
        return batch if self.transform is None else self.transform(batch)

    # After a micro-batch was computed

    def note(self, result: MicroResult, share: Share) -> None:
        """Add a micro-batch to the metrics."""
        if share.count:
            weight = share.count if result.weight is None else result.weight
            self.metrics.add_mean(result.mean, weight, result.metrics)

    def advance(
        self, loss: Tensor, norm: Tensor | None, share: Share, shared: bool = False
    ) -> StepResult:
        """Count a computed micro-batch; after the last one of a step, also count the step.

        shared: the next micro-batch writes its loss to the same memory.
        """
        self.give_back_generators()
        note_phase(BETWEEN_STEPS)
        if not share.last:
            self.micro += 1
            return StepResult(loss, self.step, False, None, shared)
        self.micro = 0
        self.step += 1
        self.epoch, self.position = share.epoch, share.position + 1
        self.schedule.after_step(self.step)
        return StepResult(loss, self.step, True, norm, shared)

    def steps_left(self) -> int | None:
        """Optimizer steps until the run ends; None if unknown."""
        total = None if self.loader is None else self.loader.steps
        ends = [] if total is None else [total * self.config.epochs]
        ends += [] if self.config.max_steps is None else [self.config.max_steps]
        return min(ends) - self.step if ends else None

    def drop_gradients(self) -> None:
        """Clear the gradients of the trained parameters, whatever left them there."""
        for parameter in self.parameters:
            parameter.grad = None
        self.step_module.tally.grad = None


class EpochKey:
    """The key of an epoch's randomness, on the device, where recorded steps read it."""

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros((), dtype=torch.int64, device=device)
        self._value = 0

    def set(self, value: int) -> None:
        if value != self._value:
            self._value = value
            self.tensor.fill_(value)


def materialize(batch: Any) -> Any:
    """The batch itself, gathered if it is so far only a list of positions on the device."""
    return batch.gather(batch.index) if isinstance(batch, ResidentBatch) else batch
