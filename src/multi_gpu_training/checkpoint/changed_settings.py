"""What changed between the run that saved a checkpoint and the run that resumes it.

What can be applied is applied, so that the run trains with what it prints. What would make it
another training (other samples, other noise, another optimizer) is refused, unless the user says
`resume_anyway`. Either way one table shows it.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from multi_gpu_training.checkpoint.snapshot import Snapshot
from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.training.learning_rate import BroughtScheduler, Schedule

APPLIED, REFUSED, RECORDED = "applied", "refused", "only recorded"

# Fields of the config by what a change of them means for a resumed run.
MAKE_ANOTHER_TRAINING = {
    "seed": "other samples in another order, other noise",
    "shuffle": "other samples in another order",
    "steps_per_epoch": "another place in the stream",
}
_TAKE_EFFECT = """
    epochs max_steps max_grad_norm max_grad_value lr_scaling base_batch_size warmup_epochs
    warmup_steps schedule schedule_step_epochs schedule_gamma scheduler_unit batch_size
    gradient_accumulation_steps use_mixed_precision mixed_precision_dtype allow_tf32
    use_gradient_checkpointing sync_bn deterministic broadcast_buffers use_fp16_allreduce
    fp16_compression training_mode best_metric best_metric_mode early_stopping_patience
    ema_decay swa_start swa_every on_nonfinite on_loss_spike on_divergence"""
TAKE_EFFECT = set(_TAKE_EFFECT.split())
OF_THE_OPTIMIZER = ("learning_rate", "weight_decay")
# All others say where a run trains, how fast, what is kept and shown: not what is trained.

_SHAPE_THE_RATE = {"learning_rate", "learning rate", "lr_scaling", "base_batch_size", "epochs"}
_SHAPE_THE_RATE |= {"max_steps", "schedule", "schedule_step_epochs", "schedule_gamma", "samples"}
_SHAPE_THE_RATE |= {"warmup_epochs", "warmup_steps", "scheduler", "global batch"}

# Of a parameter group: set by schedules, or a matter of speed.
_NOT_HYPERPARAMETERS = {"params", "lr", "initial_lr", "lr_scale_factor"}
_NOT_HYPERPARAMETERS |= {"fused", "foreach", "capturable", "differentiable"}
_RATES = {"base_lrs", "_last_lr"}  # of a scheduler: they follow the optimizer's
_WHOLE = 64 * 2**20  # bytes of tensors that are hashed whole; of larger ones some rows
_ROWS = 4096


@dataclass(frozen=True)
class Change:
    """One setting: what it was, what it is, and what becomes of it."""

    name: str
    then: Any
    now: Any
    effect: str
    why: str = ""

    def row(self) -> list[str]:
        effect = f"{self.effect}: {self.why}" if self.why else self.effect
        return [self.name, _short(self.then), _short(self.now), effect]


def may_resume_anyway(config: MultiGPUConfig) -> bool:
    return config.resume_anyway or os.environ.get("MGT_RESUME_ANYWAY", "0") not in ("", "0")


class RunDescription:
    """What a run is made of, as its checkpoints record it and a resumed run compares it.

    Made right after the optimizer and the schedule: later, training changes their values.
    """

    def __init__(
        self,
        config: MultiGPUConfig,
        options: Mapping[str, Any],
        optimizer: Optimizer,
        schedule: Schedule,
        loader: Any,
        global_batch: int,
        restarted: bool = False,
    ) -> None:
        self._config = config
        self._restarted = restarted
        self._schedule = schedule
        self._renew_rate = False
        state = copy.deepcopy(_plain_state(schedule.state_dict()))
        brought = isinstance(schedule, BroughtScheduler)  # else the config says it all
        self.facts: dict[str, Any] = {
            "options": dict(options),
            "optimizer": type(optimizer).__name__,
            "groups": [_hyperparameters(group) for group in optimizer.param_groups],
            "rates": _rates(state, optimizer.param_groups),
            "schedule": _kind(schedule),
            "schedule_state": state if brought else {},
            "data": describe_data(loader),
            "global_batch": global_batch,
        }
        self._fresh_schedule = copy.deepcopy(schedule.state_dict())

    def adapt(self, snapshot: Snapshot, fresh_optimizer: Any) -> tuple[Snapshot, list[Change]]:
        """The snapshot as it would be with the settings of now, and what that changed in it.

        Raises a ConfigError that lists all changes if one of them must not be made.
        """
        saved = self._facts_of(snapshot)
        changes = list(self._changes(saved, snapshot.state["config"]))
        refused = [change for change in changes if change.effect == REFUSED]
        if refused and not may_resume_anyway(self._config):
            raise ConfigError(
                f"step {snapshot.step} was saved by a run with other settings:\n"
                + table(changes)
                + "\nResume with those settings, or start a new run; --resume-anyway "
                "(resume_anyway=true, MGT_RESUME_ANYWAY=1) continues as a different training",
                code="MGT703",
            )
        if not changes:
            return snapshot, []
        trainer = dict(snapshot.state["trainer"])
        optimizer: Any = snapshot.optimizer
        if any(change.name == "optimizer" for change in changes):
            optimizer = fresh_optimizer
        elif len(saved["groups"]) == len(optimizer["groups"]) == len(self.facts["groups"]):
            groups = [self._group(i, group, saved) for i, group in enumerate(optimizer["groups"])]
            optimizer = {**optimizer, "groups": groups}
        self._renew_rate = not _SHAPE_THE_RATE.isdisjoint(change.name for change in changes)
        brought = isinstance(self._schedule, BroughtScheduler)
        if brought or self._renew_rate:  # else a rate that the user set in mid-run stays
            rates = [group["lr"] for group in snapshot.optimizer["groups"]]
            trainer["schedule"] = self._schedule_state(saved, trainer["schedule"], rates)
        shown = [replace(c, effect=APPLIED) if c.effect == REFUSED else c for c in changes]
        adapted = replace(
            snapshot, optimizer=optimizer, state={**snapshot.state, "trainer": trainer}
        )
        return adapted, shown

    def settle(self, step: int) -> None:
        """After a changed state was loaded: the rate of the next step, as the schedule has it."""
        if self._renew_rate and not isinstance(self._schedule, BroughtScheduler):
            self._schedule.after_step(step)  # ours are functions of the step

    # Comparing

    def _facts_of(self, snapshot: Snapshot) -> dict[str, Any]:
        """What a checkpoint says it was made with. Those of version 0.1 say little; what they do
        not say counts as unchanged."""
        found = snapshot.state.get("made_with")
        if found is not None:
            return dict(found)
        groups, state = snapshot.optimizer["groups"], snapshot.state["trainer"]["schedule"]
        mine, then = self.facts["groups"], snapshot.state["config"].get("weight_decay")
        keys = [{k for k in group if k not in _NOT_HYPERPARAMETERS} for group in groups]
        same_kind = len(keys) == len(mine) and all(
            set(own) <= had and own.get("decoupled_weight_decay") == g.get("decoupled_weight_decay")
            for own, had, g in zip(mine, keys, groups, strict=True)
        )
        guessed = [dict(own) for own in mine]
        for own, group in zip(guessed, groups, strict=False):
            if same_kind and group.get("weight_decay") == then:
                own["weight_decay"] = then
        return {
            **self.facts,
            "options": snapshot.facts.get("options") or self.facts["options"],
            "optimizer": self.facts["optimizer"] if same_kind else "another optimizer",
            "groups": guessed,
            "rates": _rates(state, groups),
        }

    def _changes(self, saved: dict[str, Any], config: Mapping[str, Any]) -> Iterator[Change]:
        now, mine = self._config.plain(), self.facts
        for name, why in MAKE_ANOTHER_TRAINING.items():
            if name in config and config[name] != now[name]:
                yield Change(name, config[name], now[name], REFUSED, why)
        yield from self._data_changes(saved["data"], mine["data"])
        if saved["optimizer"] != mine["optimizer"]:
            why = "its state does not fit another optimizer; anyway: it starts from scratch"
            yield Change("optimizer", saved["optimizer"], mine["optimizer"], REFUSED, why)
        else:
            yield from self._optimizer_changes(saved, config, now)
        if saved["schedule"] != mine["schedule"]:
            why = "it cannot continue where the old one was; anyway: it starts from scratch"
            yield Change("scheduler", saved["schedule"], mine["schedule"], REFUSED, why)
        else:
            then = dict(_leaves(saved["schedule_state"]))
            for place, value in _leaves(mine["schedule_state"]):
                if place[-1] not in _RATES and then.get(place, value) != value:
                    yield Change(_spelled(place), then[place], value, APPLIED)
        for name in sorted(TAKE_EFFECT):
            if name in config and config[name] != now[name]:
                why = "the global batch stays" if name == "batch_size" else ""
                yield Change(name, config[name], now[name], APPLIED, why)
        if saved["global_batch"] != mine["global_batch"]:
            yield Change("global batch", saved["global_batch"], mine["global_batch"], APPLIED)
        had, have = saved["options"], mine["options"]
        for name in sorted({*had, *have}):
            if had.get(name) != have.get(name):
                yield Change(name, had.get(name), have.get(name), APPLIED)

    def _data_changes(self, then: dict[str, Any], now: dict[str, Any]) -> Iterator[Change]:
        if None not in (then["samples"], now["samples"]) and then["samples"] != now["samples"]:
            why = "samples would be lost or repeated"
            yield Change("samples", then["samples"], now["samples"], REFUSED, why)
        elif None not in (then["content"], now["content"]) and then["content"] != now["content"]:
            why = "other data of the same length"
            # Nobody changed anything where a launcher starts the same script again: it draws its
            # data without a seed, and refusing would only end the run.
            effect = RECORDED if self._restarted else REFUSED
            yield Change("dataset", then["content"][:8], now["content"][:8], effect, why)
        if then["kind"] != now["kind"]:
            yield Change("dataset class", then["kind"], now["kind"], RECORDED)

    def _optimizer_changes(
        self, saved: dict[str, Any], config: Mapping[str, Any], now: dict[str, Any]
    ) -> Iterator[Change]:
        """Rates and hyperparameters, under the config's name where it is the config's."""
        mine, named = self.facts, set()
        if saved["rates"] != mine["rates"]:
            asked = "learning_rate" in config and config["learning_rate"] != now["learning_rate"]
            pair = (config["learning_rate"], now["learning_rate"])
            then, new = pair if asked else (_one(saved["rates"]), _one(mine["rates"]))
            named.add("learning_rate")
            yield Change("learning_rate" if asked else "learning rate", then, new, APPLIED)
        keys = sorted({key for group in mine["groups"] for key in group})
        for key in keys:
            then = [group.get(key) for group in saved["groups"]]
            new = [group.get(key) for group in mine["groups"]]
            if then != new:
                named.add(key)
                yield Change(key, _one(then), _one(new), APPLIED)
        for name in OF_THE_OPTIMIZER:
            if name not in named and name in config and config[name] != now[name]:
                why = "your optimizer or its schedule does not use it"
                yield Change(name, config[name], now[name], RECORDED, why)

    # Applying

    def _group(self, number: int, group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
        """A saved parameter group with the values of now where they differ from then."""
        mine, then = self.facts["groups"][number], saved["groups"][number]
        changed = {k: v for k, v in mine.items() if then.get(k) != v}
        rate = _ratio(self.facts["rates"], saved["rates"], number)
        scaled = {k: group[k] * rate for k in ("lr", "initial_lr") if k in group and rate != 1.0}
        return {**group, **changed, **scaled}

    def _schedule_state(
        self, saved: dict[str, Any], state: dict[str, Any], rates: Sequence[float]
    ) -> dict[str, Any]:
        """What the schedule goes on with; `rates` are the optimizer's, as they were saved."""
        if saved["schedule"] != self.facts["schedule"]:
            return copy.deepcopy(self._fresh_schedule)
        if "peaks" in state:
            # Without what the schedule has written so far: `settle` has it write anew. A peak that
            # the user set in mid-run keeps its relation to the others.
            now, then = self.facts["rates"], saved["rates"]
            peaks, written = list(state["peaks"]), state.get("written", [])
            for i, rate in enumerate(rates):  # one that the user set after the last step
                if i < min(len(peaks), len(written)) and rate != written[i]:
                    peaks[i] = rate / (state.get("factor") or 1.0)
            peaks = [
                now[i] if i < len(now) and peak in then[i : i + 1] else peak * _ratio(now, then, i)
                for i, peak in enumerate(peaks)
            ]
            return {"peaks": peaks}
        found = copy.deepcopy(state)
        then = dict(_leaves(saved["schedule_state"]))
        for place, value in _leaves(self.facts["schedule_state"]):
            if place[-1] in _RATES:
                continue
            if then.get(place, value) != value:
                _put(found, place, value)
        for place, value in list(_leaves(found)):
            if place[-1] in _RATES and isinstance(value, list | tuple):
                ratios = [_ratio(self.facts["rates"], saved["rates"], i) for i in range(len(value))]
                _put(found, place, [v * r for v, r in zip(value, ratios, strict=True)])
        return found


def table(changes: Sequence[Change]) -> str:
    """The changes as lines of text in columns."""
    rows = [["setting", "then", "now", "effect"], *(change.row() for change in changes)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join(["   ", *cells, row[3]]))
    return "\n".join(lines)


# Facts


def describe_data(loader: Any) -> dict[str, Any]:
    """The dataset of a loader: its class, its length, and a hash of its content where it has
    tensors to look at."""
    dataset = getattr(loader, "dataset", None)
    samples = getattr(getattr(loader, "source", None), "samples", None)
    if not isinstance(samples, int):
        try:
            samples = len(dataset)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            samples = None
    tensors = _tensors(dataset)
    return {
        "kind": type(dataset).__name__,
        "samples": samples,
        "content": _hash(tensors) if tensors else None,
    }


def _tensors(dataset: Any) -> list[Tensor]:
    if type(dataset) is TensorDataset:
        return list(dataset.tensors)
    if type(dataset) is Subset:
        inner = _tensors(dataset.dataset)
        return [*inner, torch.as_tensor(list(dataset.indices))] if inner else []
    if type(dataset) is ConcatDataset:
        parts = [_tensors(part) for part in dataset.datasets]
        return [tensor for part in parts for tensor in part] if all(parts) else []
    return []


def _hash(tensors: Sequence[Tensor]) -> str:
    found = hashlib.blake2b(digest_size=16)
    whole = sum(tensor.numel() * tensor.element_size() for tensor in tensors) <= _WHOLE
    for tensor in tensors:
        found.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        rows = tensor.detach()
        if not whole and len(rows) > _ROWS:
            rows = rows[torch.linspace(0, len(rows) - 1, _ROWS).long()]
        flat = rows.cpu().contiguous().flatten()
        if flat.numel():
            found.update(memoryview(flat.view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return found.hexdigest()


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    plain = {k: v for k, v in group.items() if k not in _NOT_HYPERPARAMETERS}
    return {k: float(v) if isinstance(v, Tensor) else v for k, v in plain.items()}


def _rates(schedule: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> list[float]:
    """The rates that a schedule starts from, one per parameter group."""
    if "peaks" in schedule:
        return [float(rate) for rate in schedule["peaks"]]
    return [float(group.get("initial_lr", group["lr"])) for group in groups]


def _kind(schedule: Schedule) -> str:
    inner = schedule.scheduler if isinstance(schedule, BroughtScheduler) else schedule
    return type(inner).__name__


def _ratio(now: Sequence[float], then: Sequence[float], number: int) -> float:
    if number >= min(len(now), len(then)) or not then[number]:
        return 1.0
    return now[number] / then[number]


# A scheduler's state: nested dicts and lists, of which single values are compared


def _plain_state(value: Any) -> Any:
    """Without what is not plain: functions, tensors, counters of torch's own."""
    if isinstance(value, Mapping):
        return {str(k): p for k, v in value.items() if (p := _plain_state(v)) is not None}
    if isinstance(value, list | tuple):
        return [_plain_state(item) for item in value]
    return value if isinstance(value, str | int | float | bool) else None


def _leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*place, key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for number, item in enumerate(value):
            yield from _leaves(item, (*place, number))
    elif place:
        yield place, value


def _put(value: Any, place: tuple[Any, ...], new: Any) -> None:
    for key in place[:-1]:
        value = value[key]
    value[place[-1]] = new


def _spelled(place: tuple[Any, ...]) -> str:
    return ".".join(str(part).lstrip("_") for part in place)


def _one(values: Sequence[Any]) -> Any:
    """The value of all groups, or the list where they differ."""
    return values[0] if values and all(value == values[0] for value in values) else list(values)


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
