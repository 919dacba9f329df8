"""Builds one training: records, checkpoints, data, model, resumed state, callbacks, loop.

`MultiGPUTrainingManager.setup_training` passes on the user's arguments; `Training.build` creates
everything, in order, from top to bottom.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import default_collate

from multi_gpu_training.checkpoint.changed_settings import RunDescription
from multi_gpu_training.checkpoint.file_layout import refuse_what_no_file_holds
from multi_gpu_training.checkpoint.model_description import (
    FORMAT,
    described_inputs,
    model_description,
)
from multi_gpu_training.checkpoint.write_queue import Save
from multi_gpu_training.config_file import storable
from multi_gpu_training.data.loader import wait_for_no_worker
from multi_gpu_training.data.own_batches import OwnBatches
from multi_gpu_training.data.resident import ResidentLoader
from multi_gpu_training.data.stream import StreamLoader
from multi_gpu_training.distributed.control import Control
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.faults.fault_tolerance import FaultToleranceManager
from multi_gpu_training.faults.policies import RESTART
from multi_gpu_training.measure.balance import Balance
from multi_gpu_training.measure.request import MeasuredRun, Measurement
from multi_gpu_training.monitoring.announce import LossAnnouncement, announce
from multi_gpu_training.monitoring.console import Console
from multi_gpu_training.monitoring.input_wait import InputWait
from multi_gpu_training.monitoring.loggers import (
    LoggedRun,
    Logger,
    chosen_loggers,
    open_loggers,
)
from multi_gpu_training.monitoring.memory_snapshot import MemoryWatch
from multi_gpu_training.monitoring.profiling.step_tracer import ProfileRequest, StepTracer
from multi_gpu_training.monitoring.progress_bar import NodeLines, ProgressBar, ProgressLines
from multi_gpu_training.monitoring.report.wording import metric
from multi_gpu_training.monitoring.requested_actions import RequestedActions
from multi_gpu_training.monitoring.run_events import RunEvents
from multi_gpu_training.monitoring.run_requests import Inbox
from multi_gpu_training.monitoring.sampling import StepSampler
from multi_gpu_training.monitoring.spikes import LossSpikes
from multi_gpu_training.monitoring.step_log import IntervalLog
from multi_gpu_training.run_data import RunData
from multi_gpu_training.run_records import open_records
from multi_gpu_training.run_resume import Resumption
from multi_gpu_training.safe_output import printable
from multi_gpu_training.setup_arguments import Given, build_model
from multi_gpu_training.training.averaged_weights import AveragedWeights
from multi_gpu_training.training.callbacks import TrainingFault
from multi_gpu_training.training.epoch_end import EpochEnd
from multi_gpu_training.training.evaluation import Evaluator
from multi_gpu_training.training.learning_rate import (
    Scaling,
    base_batch_size,
    choose_schedule,
    scale_rate,
)
from multi_gpu_training.training.loop import TrainingLoop
from multi_gpu_training.training.loss import SupervisedLoss
from multi_gpu_training.training.loss_parts import LossState, describe, parts_beside, trainable
from multi_gpu_training.training.manual_optimization import ManualTrainer
from multi_gpu_training.training.metrics import EpochSums, MetricsCollector
from multi_gpu_training.training.oom import drop_oom_hint, leave_oom_hint, take_oom_hint
from multi_gpu_training.training.optimizer import choose_optimizer
from multi_gpu_training.training.prepared_parts import FurtherOptimizers, stateful
from multi_gpu_training.training.progress import Progress
from multi_gpu_training.training.replica_check import ReplicaCheck
from multi_gpu_training.training.saving import Saving
from multi_gpu_training.training.stopping import Stopping
from multi_gpu_training.training.trainer import MultiGPUTrainer
from multi_gpu_training.training.validation import Validation


class Training:
    """The parts of one training.

    `build` makes them and `start` begins the run; every rank must call both. `close` releases
    folder, threads and signal handlers, as far as they were acquired.
    """

    def __init__(
        self,
        trainer: MultiGPUTrainer,
        console: Console,
        progress: Progress,
        balance: Balance,
        measurement: Measurement | None,
        recipe_options: Mapping[str, Any],
    ) -> None:
        self.trainer = trainer
        self.console = console
        self.progress = progress
        self.balance = balance
        self.measurement = measurement
        self.options: dict[str, Any] = json.loads(json.dumps(storable(recipe_options), default=str))
        self.config, self.placement, self.state = trainer.config, trainer.placement, trainer.state
        self.callbacks = trainer.state.callbacks
        self.epoch_metrics = MetricsCollector()
        self.manual: ManualTrainer | None = None
        self._taken = ExitStack()
        self.control = self._build_control()  # first: signals are given back last
        self.records = open_records(self.config, self.placement.world, console, recipe_options)
        self._taken.callback(trainer.execution.leave_stream)
        self._taken.callback(trainer.execution.close)
        self._taken.callback(self.records.close)
        self.logger, self.folder = self.records.logger, self.records.folder.path

    def build(self, given: Given) -> None:
        """Build everything up to the loop, and restore a checkpoint if there is one."""
        self.fault_tolerance = self._open_checkpoints(given.states)
        resumption = Resumption(
            self.config,
            self.state,
            self.progress,
            self.fault_tolerance,
            self.records,
            self.options,
            self.console.line,
        )
        checkpoint = resumption.find()
        self._build_data(given)  # loss_fn, eval_fn, train_loader, val_loader, sizes
        self._build_model(given)  # model, optimizer, schedule, averaged weights
        if checkpoint is not None:
            resumption.restore(checkpoint, self.train_loader, self.sizes.global_batch)
        self._settle_shares()
        self._open_loggers(given.loggers)
        asks = Inbox(self.folder).next if self.placement.world.is_main else no_request
        self.control.listen(asks)
        self.loop = self._build_loop(given)
        self.fault_tolerance.register("requested", self.requested)

    def start(self, run: MeasuredRun) -> None:
        """Once nothing is missing: allow steps to be recorded, and call the callbacks."""
        if self.measurement is not None:
            self.callbacks.extend(self.measurement.callbacks(run))
        self.trainer.execution.start()
        if self.manual is None:
            self.trainer.nan_guard.start()
        for call in self.callbacks.on_setup:
            call()

    def settle(self) -> None:
        """At the end of a run that went well: make sure of the last steps, log them, and wait for
        the last save. Collective."""
        trainer = self.trainer
        trainer.execution.verify()  # an own loop may end right after a recorded step
        trainer.strategy.sync_buffers()
        trainer.nan_guard.look(now=True)
        if self.manual is not None:
            self.manual.look()  # a NaN of the last few steps
        if self.config.consistency_check_every:
            trainer.check_replicas()
        self.loop.log.flush()
        self.fault_tolerance.settle()
        # Last: a save that is tried again still needs the trained weights.
        self.averaged.leave_in_model()

    def close(self, well: bool = False) -> None:
        """Release what was acquired. well: the run ended without an error."""
        if well:
            drop_oom_hint(self.folder)
            if self.records.folder.url is not None:
                with suppress(RuntimeError):  # a rank may have failed in its last callback
                    self.placement.barrier()  # one rank uploads the last events of all
        # After an error the launcher waits to start the ranks again, and what asked the run to
        # end gives it grace_s: what is not uploaded by then stays on the disk.
        wait_s = self.config.upload_wait_s
        self.records.upload_wait_s = wait_s if well else min(wait_s, self.control.time_left_s)
        self._taken.close()

    # Checkpoints and faults

    def _open_checkpoints(self, states: Mapping[str, Any]) -> FaultToleranceManager:
        """Save these with the run; (object, "per_rank") is a state that differs by rank."""
        folder = self.records.folder
        kept = FaultToleranceManager(
            self.config,
            self.placement,
            self.trainer,
            self.logger,
            folder.checkpoints,
            folder.hosts,
            self.trainer.rolling_back,
            self._checkpoint_is_safe,
        )
        self._taken.callback(kept.close)
        kept.on_fault.append(self._tell_fault)
        sums = EpochSums(self.epoch_metrics, self.state.metrics), "per_rank"
        own = {"progress": self.progress, "shares": self.balance, "epoch_metrics": sums}
        reserved = sorted(states.keys() & own.keys())
        if reserved:
            raise ConfigError(f"states={reserved}: the run itself uses these names; choose others")
        for name, item in {**own, **states}.items():
            kept.register(name, *stateful(name, item))
        return kept

    def _checkpoint_is_safe(self, save: Save) -> None:
        """On rank 0, between steps: the files of an earlier `save_checkpoint` are on the disk."""
        score = save.captured.manifest.get("score")
        if save.best and score is not None:
            validated = self.val_loader is not None or self.progress.last["val"]
            kind = "" if validated else "train "
            value = f"{kind}{score['metric']} {metric(score['metric'], score['value'])}"
            self.console.line(f"  saved best model: {save.path} ({value})")
        self.records.checkpoints_changed()
        for call in self.callbacks.on_checkpoint:
            call(save.path)

    def _tell_fault(self, fault: TrainingFault) -> None:
        if fault.kind == "out_of_memory" and fault.action == RESTART:
            leave_oom_hint(self.folder, self.trainer.oom)  # for the ranks that are started again
        for call in self.callbacks.on_fault:
            call(fault)

    def snapshot(self) -> Callable[[], None]:
        """For recorded steps that may be taken back: copy what steps change beside the trainer's
        own state. Calling the result puts it back."""
        metrics, states = self.epoch_metrics.kept(), self.fault_tolerance.run_state.kept()

        def put_back() -> None:
            self.epoch_metrics.put_back(metrics)
            states()

        return put_back

    # Data and model

    def _build_data(self, given: Given) -> None:
        data = self.data = RunData(
            given,
            self.state,
            self.balance,
            self.progress,
            self.measurement,
            self.console.line,
        )
        self.loss_fn, self.eval_fn, self.sizes = data.loss_fn, data.eval_fn, data.sizes
        self.train_loader, self.val_loader = data.train_loader, data.val_loader
        self.trainer.oom.whole = data.sizes.per_rank
        if isinstance(self.train_loader, StreamLoader):
            self.fault_tolerance.register("data_stream", self.train_loader)

    def _build_model(self, given: Given) -> None:
        """The model on its device, its optimizer and its schedule."""
        config, trainer, state, say = self.config, self.trainer, self.state, self.console.line
        model = build_model(given.model, config, trainer.strategy.builds_in_parts)
        if self.measurement is not None:
            self.measurement.prepare(model)
        described = model_description(given.model, given.description)
        self.fault_tolerance.run_state.model_description = described
        if "inputs" not in described and self._calls_the_model_itself(given):
            state.first_batch = self._describe_inputs
        if config.enable_fault_tolerance:
            refuse_what_no_file_holds(model)
        self.model = trainer.build(model, self.loss_fn, self.control, bool(given.optimizers))
        if given.optimizers:
            self._take_optimizers(given)
            return
        trainer.strategy.adopt(given.optimizer)
        of_loss = trainable(self.loss_fn, self.model)
        optimizer = choose_optimizer(given.optimizer, self.model, config, say, of_loss)
        self._train_loss(optimizer)
        note = trainer.take_optimizer(optimizer)
        if note:
            say(note)
        base = base_batch_size(config, given.dataset)
        scaling = scale_rate(state.optimizer, config, self.sizes.global_batch, base)
        state.schedule = choose_schedule(
            given.scheduler, state.optimizer, config, scaling, self.train_loader.steps
        )
        self._describe(scaling)

    def _calls_the_model_itself(self, given: Given) -> bool:
        """Whether what the model of a script takes can be told from a batch: samples of one form,
        stacked, all but the target."""
        feeding = getattr(self.train_loader, "feeding", None)
        return (
            self.config.recipe == "custom"
            and isinstance(self.loss_fn, SupervisedLoss)
            and not given.optimizers
            and feeding is not None
            and feeding.collate is default_collate
            and not feeding.items
        )

    def _describe_inputs(self, given: Any, batch: Any) -> None:
        inputs = described_inputs(self.state.model, given, batch)
        if inputs is not None:
            run_state = self.fault_tolerance.run_state
            described = {"format": FORMAT, **run_state.model_description, "inputs": inputs}
            run_state.model_description = described

    def _train_loss(self, optimizer: Optimizer) -> None:
        """Train what the optimizer holds beside the model, and save it with the run."""
        beside = parts_beside(self.loss_fn, self.model, optimizer)
        line = describe(self.loss_fn, self.model, beside)
        if line is not None:
            self.console.line(line)
        if beside is None:
            return
        if self.measurement is not None:
            self.measurement.prepare(beside)
        self.trainer.train_beside(beside)
        self.fault_tolerance.register("trained_loss", LossState(beside, self.model))

    def _take_optimizers(self, given: Given) -> None:
        """All optimizers of a loop that calls backward itself, each with the config's schedule."""
        config, state = self.config, self.state
        if given.schedulers and config.schedule != "constant":
            raise ConfigError(
                f"schedule={config.schedule} and {type(given.schedulers[0]).__name__} both set the "
                "learning rate; drop one of them"
            )
        optimizers = list(given.optimizers)
        self.manual = self.trainer.take_optimizers(optimizers, lambda: self.loop.saving.if_due())
        base, batch = base_batch_size(config, given.dataset), self.sizes.global_batch
        schedules = []
        for optimizer in optimizers:
            scaling = scale_rate(optimizer, config, batch, base)
            steps = self.train_loader.steps
            schedules.append(choose_schedule(None, optimizer, config, scaling, steps))
        state.schedule, *self.manual.schedules = schedules
        further = FurtherOptimizers(self.model, optimizers[1:], self.manual.schedules, config)
        self.fault_tolerance.register("further_optimizers", further)
        for number, scheduler in enumerate(given.schedulers):
            self.fault_tolerance.register(f"scheduler_{number}", scheduler)
        self._describe(scaling)
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        self.console.line(f"step: your own backward with {names}; not recorded as a CUDA graph")

    def _describe(self, scaling: Scaling) -> None:
        """Record what the run is made of, and say it."""
        config, state = self.config, self.state
        self.fault_tolerance.run_state.description = RunDescription(
            config,
            self.options,
            state.optimizer,
            state.schedule,
            self.train_loader,
            self.sizes.global_batch,
            restarted=self.placement.identity.attempt > 0,
        )
        say, loaders = self.console.line, (self.train_loader, self.val_loader)
        announce(say, config, state, self.sizes, *loaders, scaling, self.folder)
        self.averaged = AveragedWeights(config, state, self.train_loader.steps)
        self.fault_tolerance.run_state.model_to_save = self.averaged.in_checkpoint
        self.fault_tolerance.register("averaged_weights", self.averaged)
        if self.averaged.active:
            say(self.averaged.describe())

    def _settle_shares(self) -> None:
        """Decide how much each rank computes, and in how small parts."""
        oom = self.trainer.oom
        take_oom_hint(self.folder, oom, self.placement)
        if oom.parts > 1:
            self.console.line(oom.describe())
        if isinstance(self.train_loader, OwnBatches):
            return  # how large each rank's batches are is up to the loop that makes them
        loaders = self.train_loader, self.val_loader
        self.balance.settle(self.state, *loaders, self.logger, self.console.line)

    # The loop and what watches it

    def _build_control(self) -> Control:
        """What listens for signals, once it is started; before every step is a boundary."""
        control = Control(self.placement.world, self.config.grace_s)
        self._taken.callback(control.close)
        alive = weakref.ref(self)  # a manager that nobody finishes must be free to go

        def on_stop() -> None:
            found = alive()
            assert found is not None
            found.loop.saving.stop()

        def on_request(text: str) -> None:
            found = alive()
            assert found is not None
            found.requested(text)

        control.on_stop = self._on_stop = on_stop
        control.on_request = on_request
        control.on_leave = wait_for_no_worker
        return control

    def _open_loggers(self, given: Sequence[Logger]) -> None:
        """Those that the config names, and the user's. Only once the run is resumed: a logger may
        drop what will be logged again."""
        main, config = self.placement.is_main, self.config
        settings = storable({**config.plain(), **self.options})
        run = LoggedRun(
            self.folder,
            config,
            main,
            self.state.step,
            self.records.events,
            settings,
            is_stopping=lambda: self.control.asked is not None,
        )
        names = chosen_loggers(config, self.console.line)
        self.records.loggers.loggers += [*open_loggers(names, run), *(given if main else ())]

    def _build_loop(self, given: Given) -> TrainingLoop:
        config, trainer = self.config, self.trainer
        callbacks, progress = self.callbacks, self.progress
        log = self._add_callbacks(given)
        stopping = Stopping(config, progress, self.state)
        validation = Validation(
            config,
            self.state,
            callbacks,
            progress,
            self.control,
            self.val_loader,
            Evaluator(
                self.state,
                partial(trainer.execution.verify, spare=True),
                self.averaged,
                self.loss_fn,
                self.eval_fn,
            ),
            track=self.console.track,
            warn=self.logger.warning,
        )
        manifest = {
            "global_batch_size": self.sizes.global_batch or None,
            "steps_per_epoch": self.train_loader.steps,
            "options": self.options,
        }
        saving = Saving(
            config,
            trainer,
            callbacks,
            progress,
            self.fault_tolerance,
            log,
            self.control,
            manifest,
            record=self.logger.record,
            folder=self.folder,
        )
        self.requested = self._requested_actions(log, saving, stopping)
        return TrainingLoop(
            config,
            trainer,
            callbacks,
            progress,
            self.train_loader,
            validation,
            EpochEnd(config, trainer, callbacks, progress, saving, log, self.epoch_metrics),
            self.fault_tolerance,
            saving,
            stopping,
            log,
            self.control,
            renew_shares=self.balance.renew,
            folder=self.folder,
        )

    def _requested_actions(
        self, log: IntervalLog, saving: Saving, stopping: Stopping
    ) -> RequestedActions:
        """What does the requests that come while the run trains."""

        def saves() -> str | None:
            if not self.config.enable_fault_tolerance:
                return "enable_fault_tolerance is false: this run writes no checkpoints"
            if self.control.on_stop is not self._on_stop:
                return "this training saves between its iterations; use stop, which saves first"
            return None

        def rates() -> str | None:
            if self.manual is not None and self.manual.schedules:
                return "several optimizers move in turn; which of their rates is not said"
            return None

        return RequestedActions(
            self.state,
            log,
            self.logger,
            self.console.line,
            saving,
            stopping,
            self._memory.request,
            saves,
            rates,
        )

    def _memory_watch(self) -> MemoryWatch:
        """Says who holds the memory; from the start where an earlier attempt ran out of it."""
        rank, oom = self.placement.identity.rank, self.trainer.oom
        folder, device, state = self.folder, self.placement.device, self.state
        return MemoryWatch(
            device, folder, rank, self.logger, self.callbacks, oom.parts > 1, lambda: state.step
        )

    def _add_node_lines(self) -> None:
        """One rank of each further machine says where the run stands. Collective."""
        identity = self.placement.identity
        if not identity.on_several_hosts or self.config.progress == "off":
            return
        main_host = printable(str(self.placement.broadcast_json(identity.host)))[:80]
        first, count = identity.rank, identity.local_world_size
        if identity.local_rank == 0 and first > 0:
            ranks = f"ranks {first} to {first + count - 1}" if count > 1 else f"rank {first}"
            self.callbacks.add(NodeLines(identity.host, ranks, main_host))

    def _add_callbacks(self, given: Given) -> IntervalLog:
        """Add all callbacks of the run, in the order in which events reach them."""
        config, trainer, state, loader = self.config, self.trainer, self.state, self.train_loader
        console, logger, add = self.console, self.logger, self.callbacks.add
        resident = isinstance(loader, ResidentLoader)
        wait = InputWait(self.placement.device, resident, logger.info)
        spikes = LossSpikes(config.on_loss_spike, self.fault_tolerance.record_fault)
        self.fault_tolerance.register("loss_spikes", spikes)
        log = IntervalLog(
            config,
            state,
            trainer.collect_metrics,
            self.epoch_metrics,
            self.sizes.global_batch,
            wait,
            spikes,
            partial(trainer.check_loss, folder=self.folder),
        )
        if not resident:  # data on the device are never waited for
            add(wait)
        shown = ProgressBar if console.style == "bar" and console.main else ProgressLines
        add(shown(console, lambda: state.position, lambda: loader.steps))
        self._add_node_lines()
        self.run_events = RunEvents(config, state, trainer.execution, self.sizes, loader, logger)
        self._taken.callback(self.run_events.stop)
        add(self.run_events)
        own_loss = given.loss_fn is not None or self.manual is not None
        if isinstance(self.loss_fn, SupervisedLoss) and not own_loss:
            add(LossAnnouncement(self.loss_fn, self.callbacks))
        self.callbacks.extend(given.callbacks)
        if self.averaged.active:
            add(self.averaged)  # after what the user's callbacks do to the weights
        # What a callback of the user did to the weights is looked at in the same step.
        if config.consistency_check_every:
            every = config.consistency_check_every
            add(ReplicaCheck(trainer.check_replicas, every, self.state))
        add(self.records.loggers)
        if config.monitor and self.manual is None:  # its phases come in any order
            step_s = lambda: log.step_s  # noqa: E731
            add(StepSampler(state, trainer.execution, logger.record, wait, step_s))
        add(log)
        self._memory = self._memory_watch()
        traced = ProfileRequest.of(config)
        if traced is not None and self.placement.is_main:
            traced.tell(self.folder)
        if traced is not None and traced.includes(self.placement.identity.rank):
            add(StepTracer(traced, self.callbacks, logger))
        return log


def no_request() -> None:
    """Look for requests, on rank 0 only."""
