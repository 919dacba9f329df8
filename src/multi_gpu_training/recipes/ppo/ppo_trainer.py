"""CLSTM-PPO on all ranks: collect a rollout, update the policy on it, and again.

initialize                 environments, policy, and the place of an earlier run
while there is more to do:
    collect                every rank steps the environments that it holds
    update                 passes of minibatches over the environments of all ranks
    report, save
evaluate
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.config_fields import TrainingMode
from multi_gpu_training.data.order import derive_seed
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.manager import MultiGPUTrainingManager
from multi_gpu_training.measure.balance import Counts
from multi_gpu_training.measure.request import request_of_this_process
from multi_gpu_training.recipes.ppo.environment import (
    ByEnvironment,
    gather_environments,
    take_environments,
)
from multi_gpu_training.recipes.ppo.environment_shares import EnvironmentShares
from multi_gpu_training.recipes.ppo.options import CONFIG_DEFAULTS, PPOOptions
from multi_gpu_training.recipes.ppo.policy import CLSTMPolicy
from multi_gpu_training.recipes.ppo.policy_evaluation import evaluate
from multi_gpu_training.recipes.ppo.ppo_pipeline import describe_policy
from multi_gpu_training.recipes.ppo.ppo_progress import Decay, PPOProgress
from multi_gpu_training.recipes.ppo.rollout import Collector, Finished, Rollout
from multi_gpu_training.recipes.ppo.update import PPOLoss, Update
from multi_gpu_training.recipes.ppo.worlds import World, build_world
from multi_gpu_training.recipes.resumed_options import resumed_options
from multi_gpu_training.training.callbacks import Callback
from multi_gpu_training.training.progress import FitResult
from multi_gpu_training.training.state_rollback import Counters, StateCopies

# What the seed of a run is combined with, so that its uses have nothing in common.
_ENVIRONMENTS, _NOISE, _ORDER = 1, 2, 3


class DistributedCLSTMPPOTrainer:
    """PPO with a CLSTM policy; what it computes does not depend on the number of ranks.

    trainer = DistributedCLSTMPPOTrainer(options=PPOOptions(env="CartPole-v1", hide=[1, 3]))
    trainer.initialize()
    result = trainer.train()
    """

    def __init__(
        self,
        config: MultiGPUConfig | None = None,
        options: PPOOptions | None = None,
        manager: MultiGPUTrainingManager | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.callbacks = callbacks
        self.options = options or PPOOptions()
        if manager is None:
            config = config or MultiGPUConfig(**CONFIG_DEFAULTS, recipe="ppo")
            check_config(config)
            manager = MultiGPUTrainingManager(config)
        else:
            check_config(manager.config)
        self.manager = manager
        self.config = manager.config
        # Environments are shared out here; the manager has no samples to measure with.
        manager.balance.config = self.config.model_copy(
            update={"balance": "equal", "share_weights": None}
        )
        if self.options.trades and self.options.execution is None:
            # As the resumed run did: up to version 0.1 orders were filled at the close just seen.
            had = resumed_options(self.config)
            execution = "next_open" if had is None else had.get("execution") or "close"
            self.options = self.options.model_copy(update={"execution": execution})
        manager.recipe_options = self.options.model_dump()
        for name in ("step_execution", "use_mixed_precision"):
            if name not in self.config.model_fields_set:
                setattr(self.config, name, CONFIG_DEFAULTS[name])
        self.placement = manager.placement
        request = request_of_this_process()
        self.verifying = request is not None and request.kind == "recorder"
        if self.verifying:
            self._shorten()
        self.progress = PPOProgress(self.options.num_envs)
        self.world: World
        self.collector: Collector
        self.update: Update

    def _shorten(self) -> None:
        """For `mgt verify`: a small rollout, which every rank collects whole, so that all of them
        share out one and the same; uneven minibatches."""
        few = min(self.options.num_envs, 10)
        short = min(self.options.steps, 24)
        self.options = self.options.model_copy(update={"num_envs": few, "rollout_steps": short})
        self.config.global_batch_size = min(few, 4)

    # Setting up

    def initialize(self) -> None:
        """Make environments and policy; with `resume`, go on where the run stood."""
        options, placement = self.options, self.placement
        total = options.num_envs
        self.shares = EnvironmentShares(total, placement, self.config)
        self._build_world()
        environments = self.world.environments
        torch.manual_seed(self.config.seed)  # the same policy on every rank
        policy = CLSTMPolicy(
            environments.observation_size,
            environments.actions,
            options.observed,
            options.features,
            options.hidden,
        )
        self.start = copy.deepcopy(policy)  # to see at the end whether training changed anything
        model, _, _ = self.manager.setup_training(
            policy,
            range(total),  # type: ignore[arg-type]
            loss_fn=PPOLoss(options.value_coef, options.entropy_coef, options.value_clip),
            optimizer=lambda parameters: torch.optim.Adam(
                parameters, lr=self.config.learning_rate, eps=1e-5, fused=True
            ),
            scheduler=lambda optimizer: Decay(optimizer, self._decay),
            callbacks=self.callbacks,
            states={"ppo": self.progress},
            description=describe_policy(policy, options),
        )
        assert isinstance(model, CLSTMPolicy)
        self.policy = model
        self.manager.loop.log.active = False  # an iteration is logged, not its steps
        order = derive_seed(self.config.seed, _ORDER)
        self.update = Update(
            self.manager, options, self.progress, self.held, order, endless=self.verifying
        )
        self._copies = StateCopies(self.manager.trainer.state)
        self.collector = Collector(environments, model, options.normalises, options.gamma)
        if self.progress.environments is not None:  # resumed
            found = self.shares.saved(self.progress.shares)
            self._deal(found or self.shares.counts, self.progress.environments)
        self.manager.console.line(self._describe())

    def _build_world(self) -> None:
        """The environments of this rank."""
        options, config = self.options, self.config
        self.held = self.shares.held
        # In verification every rank makes the same rollout, so that only the update can differ.
        self.stepped = range(options.num_envs) if self.verifying else self.held
        seed = derive_seed(config.seed, _ENVIRONMENTS)
        device = self.placement.device
        self.world = build_world(options, self.stepped, config.seed, seed, device)

    def _deal(self, counts: Counts, environments: Any) -> None:
        """Let rank r hold counts[r] of the environments, which stand as gathered."""
        if counts != self.shares.counts:
            self.shares.counts = counts
            self.world.environments.close()
            self._build_world()
            options, now = self.options, self.world.environments
            self.collector = Collector(now, self.policy, options.normalises, options.gamma)
            self.update = replace(self.update, held=self.held)
            shown = f"{', '.join(map(str, counts))} of {options.num_envs}"
            self.manager.console.line(f"environments per rank: {shown}, by measured speed")
            self.manager.logger.record("shares", step=self.manager.step, samples=list(counts))
        self.collector.load(take_environments(environments, self.stepped))
        self.collector.reward_scale = self.progress.apply_measures(self.policy)

    def _balance(self) -> None:
        """Move environments from slow ranks to fast ones, where that is worth it. Collective."""
        counts = self.shares.better(self._collect_s)
        if counts is not None:
            standing, held = self.collector.mark()(), list(self.shares.counts)
            self._deal(counts, gather_environments(standing, self.placement, held))

    def _describe(self) -> str:
        options = self.options
        aim = f"{options.num_episodes:,} episodes"
        if options.total_steps is not None:
            aim = f"{options.total_steps:,} steps"
        return (
            f"environments: {options.num_envs} of {self.world.description}\n"
            f"rollouts: {options.steps} steps of each, {self.config.epochs} passes of "
            f"{self.update.minibatches} minibatches over them, until {aim}"
        )

    # The loop

    def train(self) -> FitResult:
        """Train until enough episodes or steps are done, evaluate, and say what came out."""
        if not hasattr(self, "collector"):
            self.initialize()
        try:
            while self._rest() > 0 and not self.manager.should_stop:
                self._begin_iteration()
                started = time.perf_counter()
                rollout, finished = self._collect()
                collected = time.perf_counter()
                metrics = self.update(rollout, self.options.clip_range * self._decay())
                self._finish_iteration(metrics, finished, started, collected)
            self._evaluate()
        finally:
            self.manager.finish()
            self.world.environments.close()
        return self.manager.result()

    def _begin_iteration(self) -> None:
        """Rollouts are not saved: a signal in the midst of an iteration takes the run back to its
        begin, saves that, and the resumed run makes the iteration anew."""
        manager, trainer = self.manager, self.manager.trainer
        counters, passes = Counters.of(trainer.state), self.progress.passes
        standing = self.collector.mark()
        if trainer.step:
            self._copies.keep("begin")

        def leave() -> None:
            counters.restore(trainer.state)
            self.progress.passes = passes
            if trainer.step:
                self._copies.restore("begin")
            manager.loop.saving.stop(lambda: self._save_checkpoint(False, standing()))

        manager.control.on_stop = leave
        manager.control.arrive()

    def _rest(self) -> float:
        """The part of the run that is still to do: 1 at the beginning, 0 when it is done."""
        done, options = self.progress, self.options
        if options.total_steps is not None:
            return max(0.0, 1 - done.env_steps / options.total_steps)
        return max(0.0, 1 - done.episodes / options.num_episodes)

    def _decay(self) -> float:
        """What learning rate and clip range are multiplied by."""
        return self._rest() if self.options.decay == "linear" else 1.0

    def _collect(self) -> tuple[Rollout, Finished]:
        options = self.options
        seed = derive_seed(self.config.seed, _NOISE, self.progress.iteration)
        noise = self.policy.actions.noise(options.steps, options.num_envs, seed)
        noise = noise[:, self.stepped.start : self.stepped.stop]
        # Every rank takes the same number of steps: each is a place where all can stop.
        arrive = self.manager.control.arrive
        begun = time.perf_counter()
        rollout, finished = self.collector.collect(options.steps, noise, arrive)
        if self.shares.measures and self.placement.device.type == "cuda":
            torch.cuda.synchronize(self.placement.device)  # what is queued counts
        self._collect_s = time.perf_counter() - begun
        if self.verifying:
            rollout = rollout.take(slice(self.held.start, self.held.stop))
        return rollout, finished

    # After an update

    def _finish_iteration(
        self, metrics: dict[str, float], finished: Finished, started: float, collected: float
    ) -> None:
        manager, progress = self.manager, self.progress
        manager.trainer.check_loss(metrics, manager.folder)
        found = [e for part in self.placement.gather_json(finished.episodes()) for e in part]
        episodes = [(earned, length) for _, _, earned, length in sorted(found)]
        steps = self.options.num_envs * self.options.steps
        progress.add(steps, episodes)
        measured = self.collector.measured.items()
        progress.measure({name: self.placement.sum(sums) for name, sums in measured})
        self.collector.reward_scale = progress.apply_measures(self.policy)
        now = time.perf_counter()
        metrics = {
            "return": progress.mean_return,
            "episode_length": progress.mean_length,
            **metrics,
            "learning_rate": float(manager.trainer.optimizer.param_groups[0]["lr"]),
            "steps_per_s": steps / (now - started),
            "collect_s": collected - started,
            "update_s": now - collected,
        }
        step = manager.trainer.step
        # To the rest of the package an iteration is an epoch without validation.
        better = manager.progress.finish_epoch(metrics, None)
        counts = {"env_steps": progress.env_steps, "episodes": progress.episodes}
        shown = {**metrics, **counts}
        manager.logger.record(
            "epoch", epoch=progress.iteration - 1, step=step, train=shown, val=None
        )
        named = {f"train/{name}": float(value) for name, value in shown.items()}
        manager.records.loggers.log(named, progress.env_steps)
        progress.say(manager.console, metrics, last=self._rest() <= 0)
        every = self.config.consistency_check_every
        if every and progress.passed(step, every, "checked"):
            manager.trainer.check_replicas()
        for call in manager.callbacks.on_epoch_end:
            call(progress.iteration - 1, metrics)
        if self._rest() > 0:
            self._balance()
        if self.config.enable_fault_tolerance and (
            progress.passed(step, self.config.checkpoint_frequency, "saved") or self._rest() <= 0
        ):
            self._save_checkpoint(better, self.collector.mark()())

    def _save_checkpoint(self, best: bool, state: ByEnvironment) -> None:
        """Everything by environment, so that any number of ranks can go on."""
        held = list(self.shares.counts)
        self.progress.environments = gather_environments(state, self.placement, held)
        self.progress.shares = self.shares.state()
        self.manager.save_checkpoint(best)

    def _evaluate(self) -> None:
        manager = self.manager
        if not manager.progress.history:
            return
        metrics, lines = evaluate(
            self.policy, self.start, self.world, self.options, self.config.seed, self.placement
        )
        for line in lines:
            manager.console.line(line)
        manager.progress.history[-1]["val"] = metrics
        manager.logger.record("evaluation", step=manager.trainer.step, **metrics)
        named = {f"evaluation/{name}": float(value) for name, value in metrics.items()}
        manager.records.loggers.log(named, self.progress.env_steps)


def check_config(config: MultiGPUConfig) -> None:
    """Settings that mean nothing here are errors, not silence."""
    execution = config.step_execution
    wrong = {
        f"training_mode={config.training_mode.value}: PPO runs as ddp or single": (
            config.training_mode in (TrainingMode.DATA_PARALLEL, TrainingMode.FULLY_SHARDED)
        ),
        "schedule and warm-up count steps; PPO has decay=linear, by progress": (
            config.schedule != "constant" or config.warmup_steps or config.warmup_epochs
        ),
        "PPO uses every parameter in every step; drop static_graph and find_unused_parameters": (
            config.static_graph or config.find_unused_parameters
        ),
        f"step_execution={execution}: PPO's steps differ in shape; use eager": (
            execution in ("graph", "compile")
        ),
        f"num_workers={config.num_workers}: PPO loads no data; drop it": config.num_workers,
    }
    problems = [text for text, is_so in wrong.items() if is_so]
    if problems:
        raise ConfigError(problems)
