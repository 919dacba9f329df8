"""What is known before a search runs: batches that do not fit, and its time and cost."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multi_gpu_training.config_fields import TrainingMode
from multi_gpu_training.data.feeding import batch_sizes
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.measure.case import Case
from multi_gpu_training.measure.memory_model import MemoryModel, MemoryPoint, available_bytes
from multi_gpu_training.measure.script_runner import ScriptRunner
from multi_gpu_training.search.run_search import Slots, as_yaml
from multi_gpu_training.search.settings import SearchSettings

BATCHES = ("batch_size", "global_batch_size")
# What changes nothing about the memory of a step. Anything else may: a batch is not judged then.
MEMORY_NEUTRAL = {
    *("learning_rate", "weight_decay", "lr_scaling", "base_batch_size", "warmup_epochs"),
    *("warmup_steps", "schedule", "schedule_step_epochs", "schedule_gamma", "max_grad_norm"),
    *("max_grad_value", "epochs", "max_steps", "augment", "flip"),
}


@dataclass(frozen=True)
class BatchLimit:
    """Refuses trials whose batch the memory model finds too large."""

    model: MemoryModel
    available: int
    per_rank_batch: Callable[[Mapping[str, Any]], int]

    def __call__(self, params: Mapping[str, Any]) -> str | None:
        batch = self.per_rank_batch(params)
        if self.model.fits(batch, self.available):
            return None
        need, there = self.model.needed(batch) / 2**30, self.available / 2**30
        return (
            f"{batch} samples per GPU do not fit: they need {need:.1f} GB of {there:.1f} GB, by "
            "the memory model; not started"
        )


def batch_check(
    settings: SearchSettings, slots: Slots, say: Callable[[str], None]
) -> Callable[[Mapping[str, Any]], str | None]:
    """Measure the memory of two batches where batch sizes are searched on GPUs."""
    names = {one.name for one in settings.space()}
    if not names & set(BATCHES) or not slots.gpus:
        return lambda params: None
    others = sorted(names - MEMORY_NEUTRAL - set(BATCHES))
    if others:
        say(
            f"batch sizes are not judged beforehand: {', '.join(others)} may change the memory of "
            "a step; a trial that runs out of memory is pruned"
        )
        return lambda params: None
    say("measuring the memory of two batch sizes, to leave out those that do not fit")
    with _runner(settings, steps=4) as runner:
        points, room = [], 0
        for size in (8, 16):
            case = Case(f"batch {size}", TrainingMode.SINGLE, 1, {"batch_size": size}, kind="meter")
            found = runner(case)
            if found.ok:
                facts = found.facts
                room = (available_bytes(facts) or 0) // settings.trials_per_gpu
                points.append(
                    MemoryPoint(
                        facts["per_rank_batch"], facts["peak_bytes"], facts["reserved_bytes"]
                    )
                )
    model = MemoryModel.from_points(points)
    if model is None or len(points) < 2 or not room:
        say("the memory could not be measured; a trial that runs out of memory is pruned")
        return lambda params: None
    return BatchLimit(model, room, lambda params: per_rank_batch(settings, slots.ranks, params))


def per_rank_batch(settings: SearchSettings, ranks: int, params: Mapping[str, Any]) -> int:
    """The samples that a rank takes at a time in this trial."""
    return batch_sizes(settings.trial_config(params), ranks).per_rank


def forecast_search(settings: SearchSettings, slots: Slots) -> list[str]:
    """Lines on the time and cost of the whole search, without pruning."""
    from multi_gpu_training.planning.estimate.profiling import profile_training
    from multi_gpu_training.planning.estimate.speedup import ONE_GPU
    from multi_gpu_training.planning.estimate.training_length import training_length
    from multi_gpu_training.planning.forecast import predict, price_per_gpu

    if settings.engine != "local":
        raise ConfigError(
            f"--forecast with --engine {settings.engine}: its nodes are not measured from here; "
            "run `mgt estimate` on one of them"
        )
    if settings.sampler == "pbt":
        raise ConfigError(
            "--forecast with --sampler pbt: generations wait for their slowest member, which is "
            "not foreseen; use `mgt estimate` on one training"
        )
    if slots.ranks > 1:
        raise ConfigError(
            f"--forecast with --gpus-per-trial {slots.ranks}: how fast they exchange gradients is "
            "not measured here; use `mgt estimate --interconnect NAME`, or one GPU per trial"
        )
    with _runner(settings, steps=30) as runner:
        profile = profile_training(runner, settings.target).profile
    length = training_length(profile)
    if length.epochs is None and length.samples is None:
        return [*length.notes, "so there is no forecast"]
    price = price_per_gpu(settings.price, source="given") if settings.price else None
    row = predict(
        profile, ONE_GPU, [1], epochs=length.epochs, samples=length.samples, price=price
    ).rows[0]
    assert row.training_s is not None
    trials = settings.trials
    if settings.sampler == "grid":
        trials = min(trials, settings.grid_size())
    trials += settings.repeat_best * settings.seeds
    # Trials that share a GPU are counted as if they took turns: how well they mix is not known.
    at_once = max(1, slots.count // settings.trials_per_gpu)
    rounds = -(-trials // at_once)
    lines = [
        f"one trial ({length.words}): {clock(row.training_s)} of training, without start-up and "
        f"validation, measured on {profile.device}",
        f"{trials} trials, {at_once} at a time: {clock(rounds * row.training_s)}; pruning "
        "makes it shorter, other models or batch sizes among the trials change it",
    ]
    if row.cost is not None:
        lines.append(f"cost: {trials * row.cost:,.2f} at {settings.price:g} per GPU and hour")
    return lines


def clock(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


@contextmanager
def _runner(settings: SearchSettings, steps: int) -> Iterator[ScriptRunner]:
    """A runner for a typical trial: the middle of every parameter."""
    with tempfile.TemporaryDirectory(prefix="mgt-search-") as scratch:
        command = [str(settings.trials_dir() / settings.target), *settings.words]
        if not settings.is_script:
            middle = {one.name: one.middle() for one in settings.space() if one.name not in BATCHES}
            config = Path(scratch) / "trial.yaml"
            config.write_text(as_yaml({"recipe": settings.target, **settings.settings, **middle}))
            command = ["-m", "multi_gpu_training", "train", str(config)]
        yield ScriptRunner(command, Path(scratch), steps, None, settings.device)
