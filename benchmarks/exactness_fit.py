"""More trainings for exactness.py: criteria over structured outputs and targets, and batches whose
rows are no samples."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from exactness_trial import (
    FEATURES,
    SAMPLES,
    Items,
    Outcome,
    Trial,
    adamw,
    case,
    classes,
    integers,
    mlp,
    numbers,
    seeded,
    sgd,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

GROUP = "Criteria and batches of any form"
LENGTHS = [1 + (i * 5) % 7 for i in range(SAMPLES)]


def criterion(
    trial: Trial, model: nn.Module, data: Any, given: Any, weight: Any, **how: Any
) -> Outcome:
    """Trained with a criterion, which by hand has the weight that it divides by."""

    def by_hand(model: nn.Module, batch: Any) -> Any:
        return given(model(*batch[:-1]), batch[-1]), weight(batch[-1])

    return trial.train(model, data, by_hand, how.pop("optimizer", sgd), ours=given, **how)


def module(function: Any, **settings: Any) -> nn.Module:
    """A criterion as people write them: settings are attributes."""

    class Criterion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, value in settings.items():
                setattr(self, name, value)

        def forward(self, output: Any, target: Any) -> Any:
            return function(self, output, target)

    return Criterion()


class Segmenter(nn.Module):
    """Like those of torchvision: two heads, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.aux = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(2, 3, 1)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"out": self.out(inputs), "aux": self.aux(inputs)}


def pixels(trial: Trial) -> TensorDataset:
    labels = integers(3, SAMPLES, 5, 5)
    most = (torch.arange(SAMPLES)[:, None, None] % 4) - 1.5
    labels[numbers(SAMPLES, 5, 5, seed=4) > most] = 255
    return TensorDataset(numbers(SAMPLES, 2, 5, 5, dtype=trial.dtype), labels)


def tokens(classes: int, length: int, ignored: int) -> Items:
    def item(i: int) -> tuple[Tensor, Tensor]:
        labels = integers(classes - 1, length, seed=i + 60) + 1
        return integers(classes, length, seed=i), labels.where(
            torch.arange(length) < LENGTHS[i], torch.tensor(ignored)
        )

    return Items(SAMPLES, item)


def speller(trial: Trial, classes: int) -> nn.Module:
    return seeded(
        lambda: nn.Sequential(nn.Embedding(classes, 6), nn.Linear(6, classes)), trial.dtype
    )


@case(GROUP, "dict of two heads, a module with ignore_index, accumulation")
def _(trial: Trial) -> Outcome:
    entropy = nn.CrossEntropyLoss(ignore_index=255)
    given = module(
        lambda self, out, y: self.entropy(out["out"], y) + 0.4 * self.entropy(out["aux"], y),
        entropy=entropy,
    )
    model = seeded(Segmenter, trial.dtype)
    return criterion(trial, model, pixels(trial), given, lambda y: (y != 255).sum())


@case(GROUP, "dict of two heads, a function that names 255 in an expression")
def _(trial: Trial) -> Outcome:
    def given(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
        losses = (F.cross_entropy(out, target, ignore_index=255) for out in outputs.values())
        return sum(losses)  # type: ignore[return-value]

    model = seeded(Segmenter, trial.dtype)
    return criterion(trial, model, pixels(trial), given, lambda y: (y != 255).sum())


@case(GROUP, "masked mean, the mask in a dict target")
def _(trial: Trial) -> Outcome:
    def item(i: int) -> Any:
        mask = (torch.arange(7) < LENGTHS[i]).to(trial.dtype)
        y = numbers(7, 1, seed=i + 50, dtype=trial.dtype)
        return numbers(7, FEATURES, seed=i, dtype=trial.dtype), {"y": y, "mask": mask}

    def given(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        each = (output - target["y"]).square()[..., 0]
        return (each * target["mask"]).sum() / target["mask"].sum()

    data = Items(SAMPLES, item)
    return criterion(trial, mlp(trial.dtype, out=1), data, given, lambda y: y["mask"].sum())


@case(GROUP, "labels and sample weights in a tuple target")
def _(trial: Trial) -> Outcome:
    x, y = classes(trial.dtype).tensors
    data = Items(SAMPLES, lambda i: (x[i], (y[i], x[i].abs().sum())))

    def given(output: Tensor, target: Any) -> Tensor:
        each = F.cross_entropy(output, target[0], reduction="none")
        return (each * target[1]).sum() / target[1].sum()

    return criterion(trial, mlp(trial.dtype), data, given, lambda y: y[1].sum())


@case(GROUP, "missing values as NaN")
def _(trial: Trial) -> Outcome:
    y = numbers(SAMPLES, 4, seed=5, dtype=trial.dtype)
    y[numbers(SAMPLES, 4, seed=6) > (torch.arange(SAMPLES)[:, None] % 5 - 2) * 0.5] = torch.nan
    data = TensorDataset(numbers(SAMPLES, FEATURES, dtype=trial.dtype), y)

    def given(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output[~target.isnan()], target[~target.isnan()])

    return criterion(trial, mlp(trial.dtype, 4), data, given, lambda y: (~y.isnan()).sum())


@case(GROUP, "missing labels as -1, binary cross entropy, no label on some ranks")
def _(trial: Trial) -> Outcome:
    y = (numbers(SAMPLES, 4, seed=5) > 0).to(trial.dtype)
    y[numbers(SAMPLES, 4, seed=6) > (torch.arange(SAMPLES)[:, None] % 5 - 2) * 0.5] = -1
    data = TensorDataset(numbers(SAMPLES, FEATURES, dtype=trial.dtype), y)

    def given(output: Tensor, target: Tensor) -> Tensor:
        known = target >= 0
        return F.binary_cross_entropy_with_logits(output[known], target[known])

    return criterion(trial, mlp(trial.dtype, 4), data, given, lambda y: (y >= 0).sum())


@case(GROUP, "as many words as classes, flattened in the criterion, accumulation")
def _(trial: Trial) -> Outcome:
    given = module(lambda self, out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()))
    data = tokens(8, 8, -100)
    model, count = speller(trial, 8), lambda y: (y >= 0).sum()
    return criterion(trial, model, data, given, count, accumulate=2)


@case(GROUP, "a mask from `pad`, an attribute of the criterion")
def _(trial: Trial) -> Outcome:
    def masked(self: Any, output: Tensor, target: Tensor) -> Tensor:
        each = F.cross_entropy(output.transpose(1, 2), target, reduction="none")
        return (each * (target != self.pad)).sum() / (target != self.pad).sum()

    given = module(masked, pad=0)
    return criterion(trial, speller(trial, 9), tokens(9, 8, 0), given, lambda y: (y > 0).sum())


@case(GROUP, "class weights in a list, beside a learned temperature")
def _(trial: Trial) -> Outcome:
    def weighted(self: Any, output: Tensor, target: Tensor) -> Tensor:
        weight = torch.tensor(self.listed, dtype=output.dtype)
        return F.cross_entropy(output * self.scale, target, weight=weight)

    scale = nn.Parameter(torch.ones((), dtype=trial.dtype))
    given, model = module(weighted, listed=[0.2, 0.5, 3.0], scale=scale), mlp(trial.dtype)
    both = [*model.parameters(), scale]
    listed = torch.tensor([0.2, 0.5, 3.0], dtype=trial.dtype)
    how = {"optimizer": lambda _: torch.optim.SGD(both, lr=0.1)}
    return criterion(trial, model, classes(trial.dtype), given, lambda y: listed[y].sum(), **how)


# Batches whose rows are no samples


class Graph(NamedTuple):
    nodes: Tensor
    edges: Tensor
    owner: Tensor
    labels: Tensor


def joined(samples: list[Any]) -> Graph:
    sizes = [len(x) for x, *_ in samples]
    starts = torch.tensor([0, *sizes[:-1]]).cumsum(0)
    edges = [e + start for (_, e, _), start in zip(samples, starts, strict=True)]
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    labels = torch.tensor([y for *_, y in samples])
    return Graph(torch.cat([x for x, *_ in samples]), torch.cat(edges, 1), owner, labels)


class GraphNet(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()

    def forward(self, graph: Graph) -> Tensor:
        found = self.body(graph.nodes).tanh()
        found = found.index_add(0, graph.edges[1], found[graph.edges[0]])
        found = self.norm(found).tanh()
        return self.head(found.new_zeros(len(graph.labels), 8).index_add(0, graph.owner, found))


def graphs(trial: Trial, norm: bool, **how: Any) -> Outcome:
    def item(i: int) -> Any:
        n = LENGTHS[i] + 1
        return numbers(n, FEATURES, seed=i, dtype=trial.dtype), integers(n, 2, 2 * n, seed=i), i % 3

    def loss(model: nn.Module, batch: Graph) -> Any:
        return F.cross_entropy(model(batch), batch.labels), len(batch.labels)

    model = seeded(functools.partial(GraphNet, norm), trial.dtype)
    return trial.train(model, Items(SAMPLES, item), loss, sgd, collate=joined, **how)


@case(GROUP, "graphs with uneven nodes behind BatchNorm, sync_bn")
def _(trial: Trial) -> Outcome:
    return graphs(trial, True, sync_bn=True)


@case(GROUP, "graphs with uneven nodes, clipping")
def _(trial: Trial) -> Outcome:
    return graphs(trial, False, clip=0.1)


@case(GROUP, "nested tensors")
def _(trial: Trial) -> Outcome:
    rows = [numbers(n, FEATURES, seed=i, dtype=trial.dtype) for i, n in enumerate(LENGTHS)]

    def collate(samples: list[Any]) -> Any:
        nested = torch.nested.nested_tensor([x for x, _ in samples], layout=torch.jagged)
        return torch.tensor([y for _, y in samples]), nested

    def loss(model: nn.Module, batch: Any) -> Tensor:
        means = torch.stack([row.mean(0) for row in model[0](batch[1]).unbind()])
        return F.cross_entropy(model[1:](means), batch[0])

    data = Items(SAMPLES, lambda i: (rows[i], i % 3))
    return trial.train(mlp(trial.dtype), data, loss, adamw, collate=collate)


@case(GROUP, "a layer recomputed twice, reentrant", refused_on_ranks=True)
def _(trial: Trial) -> Outcome:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = nn.Linear(FEATURES, 5), nn.Linear(5, 5)
            self.head = nn.Linear(5, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            found = self.first(inputs)
            for _ in range(2):
                found = checkpoint(self.layer, found, use_reentrant=True).tanh()
            return self.head(found)  # type: ignore[no-any-return]

    model = seeded(Twice, trial.dtype)
    return trial.train(model, classes(trial.dtype), nn.CrossEntropyLoss(), sgd)
