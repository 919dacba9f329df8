"""One case of exactness.py: the same training written as a plain loop and with this package.

A case is a function of a `Trial`. It builds model, data and loss once, and then trains them in one
of two ways: `trial.by_hand` asks for the loop that somebody would write in plain PyTorch on one
process, otherwise it is trained with the public names of the package on this rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager
from multi_gpu_training.data.order import ShuffledBatches

SAMPLES, FEATURES, CLASSES, BATCH = 26, 6, 3, 8


@dataclass
class Outcome:
    """What a training ends with: every tensor of the model, and the losses on the way."""

    tensors: dict[str, Tensor]
    numbers: dict[str, float] = field(default_factory=dict)


def outcome(*models: nn.Module, **numbers: float) -> Outcome:
    tensors = {}
    for i, model in enumerate(models):
        prefix = f"{i}." if len(models) > 1 else ""
        for name, value in model.state_dict().items():
            # A model compiled by the user has its names in the state under `_orig_mod.`.
            plain = name.replace("_orig_mod.", "")
            tensors[prefix + plain] = value.detach().clone()
    return Outcome(tensors, {name: float(value) for name, value in numbers.items()})


@dataclass(frozen=True)
class Case:
    """
    left_out: parts of names of tensors that are not compared, because in exact arithmetic their
        gradient is zero (what rounding leaves is made large by Adam), or the docs say they differ.
    against_one: compared with one rank of the package, where a plain loop draws other numbers.
    float32: also in float32. only: in this type alone.
    refusal: an error of the package before training is the right answer. refused_on_ranks: on
        more than one rank.
    begun_elsewhere: another function that the next number of ranks runs first, in the same folder.
    """

    name: str
    group: str
    run: Callable[[Trial], Outcome]
    float32: bool = False
    only: str | None = None
    left_out: tuple[str, ...] = ()
    against_one: bool = False
    refusal: bool = False
    refused_on_ranks: bool = False
    begun_elsewhere: Callable[[Trial], Outcome] | None = None
    point: int | None = None


CASES: dict[str, Case] = {}


def case(group: str, name: str, **how: Any) -> Callable[[Any], Any]:
    def register(run: Callable[[Trial], Outcome]) -> Callable[[Trial], Outcome]:
        if name in CASES:
            raise ValueError(f"there are two cases named {name!r}")
        CASES[name] = Case(name, group, run, **how)
        return run

    return register


LossFn = Callable[[nn.Module, Any], Any]


@dataclass
class Trial:
    dtype: torch.dtype
    by_hand: bool
    folder: Path
    rank: int = 0
    world: int = 1

    def manager(self, **settings: Any) -> MultiGPUTrainingManager:
        """A manager that says and writes as little as possible."""
        defaults = {
            "device": "cpu",
            "progress": "off",
            "tensorboard": False,
            "save_dir": str(self.folder),
            "epochs": 2,
            "enable_fault_tolerance": False,
            "shuffle": False,
            "monitor": False,
            "report": False,
        }
        return MultiGPUTrainingManager(MultiGPUConfig(**{**defaults, **settings}))

    def train(
        self,
        model: nn.Module,
        data: Any,
        loss: Any,
        optimizer: Callable[[Any], torch.optim.Optimizer],
        *,
        batch: int = BATCH,
        epochs: int = 2,
        shuffle: bool = False,
        accumulate: int = 1,
        clip: float | None = None,
        scheduler: Callable[[Any], Any] | None = None,
        by_epoch: bool = False,
        collate: Callable[[list[Any]], Any] = default_collate,
        ours: Any = None,
        loader: dict[str, Any] | None = None,
        fit: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Outcome:
        """Both ways, for trainings that only differ in model, data, loss and settings.

        loss: a criterion or a function (model, batch) -> mean or (mean, weight). ours: what to
        give to `fit` as loss_fn where it is not the same. loader: arguments of the DataLoader.
        """
        if self.by_hand:
            order = ShuffledBatches(len(data), batch, shuffle)
            made = optimizer(model.parameters())
            return plain_loop(
                model,
                lambda epoch: (collate([data[i] for i in b]) for b in order.batches(0, epoch)),
                as_function(loss),
                made,
                epochs=epochs,
                micro=-(-batch // accumulate) if accumulate > 1 else None,
                clip=clip,
                scheduler=scheduler(made) if scheduler else None,
                by_epoch=by_epoch,
            )
        settings.setdefault("global_batch_size", batch)
        manager = self.manager(
            epochs=epochs,
            shuffle=shuffle,
            gradient_accumulation_steps=accumulate,
            max_grad_norm=clip,
            scheduler_unit="epoch" if by_epoch else "step",
            **settings,
        )
        given = data
        if loader is not None or collate is not default_collate:
            given = DataLoader(
                data, batch_size=batch, shuffle=shuffle, collate_fn=collate, **(loader or {})
            )
        result = manager.fit(
            model,
            given,
            loss_fn=loss if ours is None else ours,
            optimizer=optimizer,
            scheduler=scheduler,
            **(fit or {}),
        )
        return outcome(model, **history(result))


def history(result: Any) -> dict[str, float]:
    return {f"loss {e}": record["train"]["loss"] for e, record in enumerate(result.history)}


def as_function(loss: Any) -> LossFn:
    """A criterion as a function of model and batch; None: the model's own loss."""
    if loss is None:
        return lambda model, batch: model(**batch).loss
    if isinstance(loss, nn.Module):
        return lambda model, batch: loss(model(*batch[:-1]), batch[-1])
    return loss  # type: ignore[no-any-return]


def plain_loop(
    model: nn.Module,
    batches: Callable[[int], Iterable[Any]],
    loss: LossFn,
    optimizer: torch.optim.Optimizer,
    *,
    epochs: int = 2,
    micro: int | None = None,
    clip: float | None = None,
    scheduler: Any = None,
    by_epoch: bool = False,
    after_epoch: Callable[[int], None] | None = None,
) -> Outcome:
    """The loop of every tutorial; `micro`: accumulate gradients over parts of so many samples."""
    numbers = {}
    for epoch in range(epochs):
        total = count = 0.0
        for batch in batches(epoch):
            optimizer.zero_grad()
            parts = [batch] if micro is None or micro >= samples_in(batch) else [*cut(batch, micro)]
            # What a part weighs must be known before its backward: a copy of the model tells.
            whole = sum(_pair(loss(copy.deepcopy(model), part), part)[1] for part in parts[1:])
            for number, part in enumerate(parts):
                mean, weight = _pair(loss(model, part), part)
                if number == 0:
                    whole += weight
                (mean if len(parts) == 1 else mean * (weight / whole)).backward()
                total, count = total + float(mean.detach()) * weight, count + weight
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if scheduler is not None and not by_epoch:
                scheduler.step()
        if scheduler is not None and by_epoch:
            scheduler.step()
        if after_epoch is not None:
            after_epoch(epoch)
        numbers[f"loss {epoch}"] = total / count
    return outcome(model, **numbers)


def _pair(result: Any, batch: Any) -> tuple[Tensor, float]:
    if isinstance(result, tuple):
        return result[0], float(result[1])
    return result, float(samples_in(batch))


def samples_in(batch: Any) -> int:
    if isinstance(batch, dict):
        return samples_in(next(iter(batch.values())))
    return len(batch) if isinstance(batch, Tensor) else len(batch[0])


def cut(batch: Any, size: int) -> Iterator[Any]:
    for start in range(0, samples_in(batch), size):
        if isinstance(batch, dict):
            yield {key: value[start : start + size] for key, value in batch.items()}
        else:
            yield [value[start : start + size] for value in batch]


# Small parts that many cases use


def numbers(*shape: int, seed: int = 7, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def integers(high: int, *shape: int, seed: int = 8) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def classes(dtype: torch.dtype, samples: int = SAMPLES) -> TensorDataset:
    inputs = numbers(samples, FEATURES)
    targets = inputs @ numbers(FEATURES, CLASSES, seed=9)
    return TensorDataset(inputs.to(dtype), targets.argmax(1))


def values(dtype: torch.dtype, samples: int = SAMPLES, width: int = 1) -> TensorDataset:
    inputs = numbers(samples, FEATURES)
    targets = torch.sin(inputs @ numbers(FEATURES, width, seed=9))
    return TensorDataset(inputs.to(dtype), targets.to(dtype))


def seeded(build: Callable[[], nn.Module], dtype: torch.dtype, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return build().to(dtype)


def mlp(dtype: torch.dtype, out: int = CLASSES, hidden: int = 12) -> nn.Module:
    return seeded(
        lambda: nn.Sequential(nn.Linear(FEATURES, hidden), nn.Tanh(), nn.Linear(hidden, out)),
        dtype,
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def cross_entropy(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def squares(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


class Items(Dataset[Any]):
    """A dataset of anything, by a function of the index."""

    def __init__(self, samples: int, item: Callable[[int], Any]) -> None:
        self.samples = samples
        self.item = item

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
