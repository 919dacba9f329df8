"""What a mean was divided by is found, or asked for; a loss that is no such mean is named."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from tiny import FEATURES, flat, line, manager_for, points, sgd
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from multi_gpu_training import Callback
from multi_gpu_training.errors import DataError, ModelError, MultiGPUError
from multi_gpu_training.training.criterion_divisor import adds_up_on, find_divisor
from multi_gpu_training.training.loss import FunctionCriterion

CLASSES = 3
LossFn = Callable[[nn.Module, list[Tensor]], Any]


def classes(samples: int = 22) -> TensorDataset:
    inputs = points(samples, torch.float64).tensors[0]
    return TensorDataset(inputs, torch.arange(samples) * torch.arange(samples) % CLASSES)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(FEATURES, CLASSES).double()


def by_hand(loss_fn: LossFn) -> Tensor:
    model, tensors = net(), classes().tensors
    optimizer = sgd(model.parameters())
    for _ in range(2):
        for start in range(0, 22, 8):
            optimizer.zero_grad()
            loss_fn(model, [tensor[start : start + 8] for tensor in tensors]).backward()
            optimizer.step()
    return flat(model)


def fit(folder: Path, loss_fn: Any, **settings: Any) -> Tensor:
    model = net()
    how = {"global_batch_size": 8, "shuffle": False, "epochs": 2, **settings}
    manager_for(folder, **how).fit(model, classes(), loss_fn=loss_fn, optimizer=sgd)
    return flat(model)


# Criteria


class Tempered(nn.Module):
    """Divides by the labels, or the weights of their classes, that count."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.entropy = nn.CrossEntropyLoss(**how)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.entropy(output / 0.7, target)


class Focal(nn.CrossEntropyLoss):
    """Divides by the samples, whatever its class weights are."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        each = F.cross_entropy(input, target, weight=self.weight, reduction="none")
        return (each * (1 - input.softmax(1).gather(1, target[:, None])[:, 0])).mean()


class Warmer(nn.CrossEntropyLoss):
    """Divides by what its base class divides by."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input / 2, target)


class OwnWeights(nn.Module):
    """Keeps its class weights in a plain attribute."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.class_weights = weight

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        weight = self.class_weights
        if output.dtype == torch.float64 != weight.dtype:
            raise RuntimeError("expected scalar type Double but found Float")
        return F.cross_entropy(output, target, weight=weight)


def criterion(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    weight = torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64)

    def weighted(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target, weight=weight)

    return {
        "function with weights": lambda: weighted,
        "function ignoring": lambda: lambda out, y: F.cross_entropy(out, y, ignore_index=1),
        "own weights": lambda: OwnWeights(weight),
        "ignoring": lambda: Tempered(ignore_index=1),
        "weighted": lambda: Tempered(weight=weight),
        "focal": lambda: Focal(weight),
        "warmer": lambda: Warmer(weight),
    }[name]()


NAMES = (
    *("ignoring", "weighted", "focal", "warmer"),
    *("function with weights", "function ignoring", "own weights"),
)


def fit_criteria(folder: Path, accumulation: int) -> list[Tensor]:
    how = {"gradient_accumulation_steps": accumulation}
    return [fit(folder / name, criterion(name), **how) for name in NAMES]


def test_what_a_users_criterion_divides_by_is_found_out(tmp_path: Path) -> None:
    parts = [*run_ranks(3, fit_criteria, tmp_path, 1), fit_criteria(tmp_path / "one", 2)]
    for number, name in enumerate(NAMES):
        made = criterion(name)
        expected = by_hand(lambda model, batch, c=made: c(model(batch[0]), batch[1]))
        for found in parts:
            torch.testing.assert_close(found[number], expected, rtol=1e-12, atol=1e-12)


# Criteria of any form: what each divides its mean by


def words(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def two_heads(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    return sum(F.cross_entropy(out, target, ignore_index=255) for out in outputs.values())  # type: ignore[return-value]


def masked(output: Tensor, target: dict[str, Tensor]) -> Tensor:
    return ((output - target["y"]).square() * target["mask"]).sum() / target["mask"].sum()


def where_known(output: Tensor, target: Tensor) -> Tensor:
    known = ~target.isnan()
    return F.mse_loss(output[known], target[known])


def positive(output: Tensor, target: Tensor) -> Tensor:
    return F.l1_loss(output[target > 0], target[target > 0])


def present(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output[target >= 0], target[target >= 0])


def listed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, weight=torch.tensor([0.5, 1.0, 4.0]).to(output))


class Learned(nn.Module):
    """Holds a parameter, and a label that does not count under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.pad = nn.Parameter(torch.ones(())), 1

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        each = F.cross_entropy(output * self.scale, target, reduction="none")
        counts = (target != self.pad).to(each)
        return (each * counts).sum() / counts.sum()


NAN = float("nan")
LABELS = torch.tensor([0, 2, 2, 1])
FORMS: dict[str, tuple[Any, Any, Any, float]] = {
    # As many words as classes: which axis is which?
    "words": (words, torch.rand(2, 3, 3), torch.tensor([[0, 1, 2], [-100, -100, 1]]), 4),
    "heads": (
        two_heads,
        {"out": torch.rand(2, 4, 2), "aux": torch.rand(2, 4, 2)},
        torch.tensor([[0, 255], [3, 1]]),
        3,
    ),
    "mask": (
        masked,
        torch.rand(3, 2),
        {"y": torch.rand(3, 2), "mask": torch.tensor([[1.0, 0], [0, 0], [1, 0.5]])},
        2.5,
    ),
    "nan": (where_known, torch.rand(3, 2), torch.tensor([[NAN, 1], [NAN, NAN], [0, -1]]), 3),
    "positive": (positive, torch.rand(3), torch.tensor([2.0, 0, -1]), 1),
    "present": (present, torch.rand(3), torch.tensor([1.0, 0, -1]), 2),
    "listed": (listed, torch.rand(4, 3), LABELS, 9.5),
    "learned": (Learned(), torch.rand(4, 3), LABELS, 3),
    "a tuple": (
        lambda output, target: words(output[1], target),
        (None, torch.rand(4, 3)),
        LABELS,
        4,
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_divisor_of_a_criterion_of_any_form_is_found(name: str) -> None:
    criterion, output, target, expected = FORMS[name]
    module = criterion if isinstance(criterion, nn.Module) else FunctionCriterion(criterion)
    found = find_divisor(module, output, target)
    weight = found.weigh(output, target)
    assert found.adds_up
    assert (len(target) if weight is None else float(weight)) == pytest.approx(expected)


def twice_as_much(output: Tensor, target: Tensor) -> Tensor:
    """Divides by weights that nothing but its code tells."""
    weight = 1.0 + 2 * target
    each = F.cross_entropy(output, target, reduction="none")
    return (each * weight).sum() / weight.sum()


def rarely(output: Tensor, target: Tensor) -> Tensor:
    """A mean over samples in any synthetic batch: those are smaller."""
    counts = torch.where(output.detach().abs().sum(1) > 40, 3.0, 1.0)
    return (F.cross_entropy(output, target, reduction="none") * counts).sum() / counts.sum()


class Embedded(nn.Module):
    """Scores an embedding that is longer than there are classes."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.rand(3, 5))
        self.entropy = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 4.0]))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        scores = embeddings @ self.centres.T - F.one_hot(labels, 3)
        return self.entropy(scores, labels)  # type: ignore[no-any-return]


def test_the_divisor_of_a_criterion_over_embeddings_is_found() -> None:
    found = find_divisor(Embedded(), torch.rand(4, 5), LABELS)
    weight = found.weigh(torch.rand(4, 5), LABELS)
    assert weight is not None and float(weight) == pytest.approx(9.5)


def commitment(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Adds what the model has averaged over samples to a mean over labels."""
    return F.cross_entropy(outputs[0], target) + outputs[1]


def per_box(output: Tensor, target: list[Tensor]) -> Tensor:
    pairs = [*zip(output, target, strict=True)]
    return torch.stack([(o - t).abs().sum() for o, t in pairs]).sum() / sum(map(len, target))


def test_parts_of_a_batch_show_what_the_samples_alone_do_not() -> None:
    scores, mean = torch.rand(4, 3), torch.rand((), requires_grad=True)
    some = torch.tensor([0, -100, -100, 1])
    module = FunctionCriterion(commitment)
    weigh = find_divisor(module, (scores, mean), some).weigh
    assert not adds_up_on(module, weigh, (scores, mean), some)
    assert adds_up_on(module, weigh, (scores, mean), LABELS)
    boxes = [torch.rand(n, 3) for n in (1, 3, 2, 1)]
    module = FunctionCriterion(per_box)
    assert not adds_up_on(module, find_divisor(module, scores, boxes).weigh, scores, boxes)
    # The square root of zero has no gradient: nothing can be told, nor of a target without rows.
    rooted = FunctionCriterion(lambda output, target: (output - target).abs().sqrt().mean())
    assert adds_up_on(rooted, lambda *_: None, scores, scores * torch.tensor([1.0, 0.5, 0.2]))
    assert adds_up_on(module, lambda *_: None, scores, torch.rand(2, 3))


@pytest.mark.parametrize("criterion", [twice_as_much, rarely])
def test_a_weight_that_cannot_be_found_is_named(tmp_path: Path, criterion: Any) -> None:
    model = net()
    model.weight.data[0].mul_(100)
    manager = manager_for(tmp_path, global_batch_size=8, gradient_accumulation_steps=2)
    with pytest.warns(UserWarning, match=f"{criterion.__name__} is not a mean .* weight can be"):
        manager.fit(model, classes(), loss_fn=criterion, optimizer=sgd)


class RootMeanSquare(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output.softmax(1), F.one_hot(target, CLASSES).double()).sqrt()


class Counting(nn.Module):
    """A mean that keeps a number in Python: trying it out must not advance that."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(output, target)


def test_a_criterion_that_is_not_a_mean_is_named_where_a_batch_has_parts(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="RootMeanSquare is not a mean over samples or labels"):
        fit(tmp_path / "parts", RootMeanSquare(), gradient_accumulation_steps=2)
    counting = Counting()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(tmp_path / "whole", RootMeanSquare())
        fit(tmp_path / "mean", counting, gradient_accumulation_steps=2)
    assert counting.calls == 2 * (2 + 2 + 2)


def apart(output: Tensor, target: Tensor) -> Tensor:
    """Two means, of which the second is over nothing where no label is 0."""
    return F.cross_entropy(output, target) + output[target == 0].square().mean()


def fit_apart(folder: Path) -> str:
    manager = manager_for(folder, global_batch_size=2, shuffle=False)
    try:
        manager.fit(net(), classes(), loss_fn=apart, optimizer=sgd)
    except MultiGPUError as error:
        return str(error)
    return ""


def test_a_mean_that_is_nan_on_one_rank_is_explained(tmp_path: Path) -> None:
    for said in run_ranks(2, fit_apart, tmp_path):
        assert "is NaN on a rank that has none" in said


# What a loss function returns


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (lambda out: out.sigmoid().sum(), "the weight has a gradient"),
        (lambda out: {"accuracy": 1.0}, r"returned \(loss, dict\)"),
        (lambda out: out.detach(), r"a tensor of shape \(8, 3\)"),
    ],
    ids=["trained", "metrics", "outputs"],
)
def test_what_is_not_a_weight_is_refused_before_training(
    tmp_path: Path, second: Callable[[Tensor], Any], said: str
) -> None:
    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Any:
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]), second(out)

    with pytest.raises(ModelError, match=said):
        fit(tmp_path, loss_fn)


def signed(model: nn.Module, batch: list[Tensor]) -> Any:
    weights = torch.where(batch[1] == 1, 0.5, -2.0).double()
    each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return (each * weights).sum() / weights.sum(), weights.sum()


def fit_signed(folder: Path) -> Tensor:
    return fit(folder, signed)


def test_weights_below_zero_count_as_they_are(tmp_path: Path) -> None:
    expected = by_hand(lambda model, batch: signed(model, batch)[0])
    for found in run_ranks(2, fit_signed, tmp_path):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


# Models with a loss of their own


class Scoring(nn.Module):
    """Like a model of Hugging Face: it returns a loss and logits."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.kind = kind
        self.config = SimpleNamespace(semantic_loss_ignore_index=255)
        self.body = nn.Linear(FEATURES, CLASSES).double()

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:
        logits = self.body(inputs)
        if self.kind == "pixels":
            logits = logits.unsqueeze(-1).unsqueeze(-1).expand(-1, -1, 2, 3)
            loss = F.cross_entropy(logits, labels, ignore_index=255)
        elif self.kind == "sum":
            loss = F.cross_entropy(logits, labels, reduction="sum")
        elif self.kind == "two means":
            first = labels == 0
            other = logits[first].square().sum() / first.sum().clamp(min=1)
            loss = F.cross_entropy(logits, labels) + other
        else:
            loss = F.cross_entropy(logits, labels)
        return SimpleNamespace(loss=loss, logits=logits)


class Named(Dataset[dict[str, Tensor]]):
    def __init__(self, kind: str) -> None:
        self.inputs, labels = classes().tensors
        if kind == "pixels":
            labels = labels[:, None, None].repeat(1, 2, 3)
            labels[::3, 0] = 255
            labels[1::5] = 255
        if kind == "labels":
            labels = labels.clone()
            labels[::3] = -100
        self.labels = labels

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


def fit_own(folder: Path, kind: str) -> Tensor:
    model = Scoring(kind)
    manager = manager_for(folder, global_batch_size=8, shuffle=False, epochs=2)
    manager.fit(model, Named(kind), optimizer=sgd)
    return flat(model)


def fit_and_listen(folder: Path) -> tuple[list[Tensor], list[str]]:
    """The weights where labels are ignored; what is said where the loss is no mean."""
    weights, said = [fit_own(folder / kind, kind) for kind in ("labels", "pixels")], []
    for kind in ("labels", "sum", "two means"):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            try:
                fit_own(folder / f"{kind} again", kind)
            except ModelError as error:
                said.append(str(error))
                continue
        said.append(" ".join(str(w.message) for w in heard))
    return weights, said


def test_a_models_own_loss_is_weighed_by_its_labels_and_checked(tmp_path: Path) -> None:
    expected, alone = fit_and_listen(tmp_path / "one")
    assert not any("own loss" in said for said in alone)
    for weights, (mean, total, coupled) in run_ranks(3, fit_and_listen, tmp_path):
        for found, wanted in zip(weights, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        assert "own loss" not in mean
        assert "own loss of Scoring is a sum over the samples" in total
        assert "own loss of Scoring is not one mean" in coupled


class Alike(nn.Module):
    """A mean over entries that a mask names, whose samples all have one loss before training."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 1).double()
        nn.init.zeros_(self.body.weight)
        nn.init.zeros_(self.body.bias)

    def forward(self, inputs: Tensor, mask: Tensor, labels: list[Tensor]) -> Any:
        logits = self.body(inputs)
        each = F.binary_cross_entropy_with_logits(logits, torch.stack(labels), reduction="none")
        return SimpleNamespace(loss=(each * mask).sum() / mask.sum())


def test_a_models_own_loss_is_checked_where_all_samples_start_alike(tmp_path: Path) -> None:
    rows = [
        {"inputs": x, "mask": torch.tensor([1.0 + n % 3]), "labels": torch.tensor([n % 2.0])}
        for n, (x, _) in enumerate(points(16, torch.float64))
    ]

    def collate(samples: list[Any]) -> dict[str, Any]:
        stacked = {k: torch.stack([s[k] for s in samples]) for k in ("inputs", "mask")}
        return {**stacked, "labels": [s["labels"].double() for s in samples]}

    loader = DataLoader(rows, batch_size=8, collate_fn=collate)  # type: ignore[arg-type]
    manager = manager_for(tmp_path, gradient_accumulation_steps=2)
    with pytest.warns(UserWarning, match="own loss of Alike is not one mean"):
        manager.fit(Alike(), loader, optimizer=sgd)


def fit_a_sum_of_single_samples(folder: Path) -> str:
    manager = manager_for(folder, global_batch_size=2, max_steps=1)
    try:
        manager.fit(Scoring("sum"), Named("sum"), optimizer=sgd)
    except ModelError as error:
        return str(error)
    return ""


def test_a_sum_is_refused_where_each_rank_has_one_sample(tmp_path: Path) -> None:
    for said in run_ranks(2, fit_a_sum_of_single_samples, tmp_path):
        assert "own loss of Scoring is a sum over the samples" in said


# Data that change while they are used


def test_labels_written_into_a_dataset_between_epochs_count_as_they_are(tmp_path: Path) -> None:
    def ignore(labels: Tensor) -> None:
        labels[::3] = -100

    dataset, model = classes(), net()
    hand, weights = classes(), net()

    class Ignore(Callback):
        def on_epoch_end(self, run: Any, epoch: int, metrics: Any) -> None:
            ignore(dataset.tensors[1])

    settings = {"global_batch_size": 8, "gradient_accumulation_steps": 2, "shuffle": False}
    manager_for(tmp_path, epochs=2, **settings).fit(
        model, dataset, loss_fn=nn.CrossEntropyLoss(), optimizer=sgd, callbacks=[Ignore()]
    )
    optimizer = sgd(weights.parameters())
    for _ in range(2):
        for start in range(0, 22, 8):
            x, y = (tensor[start : start + 8] for tensor in hand.tensors)
            optimizer.zero_grad()
            F.cross_entropy(weights(x), y).backward()
            optimizer.step()
        ignore(hand.tensors[1])
    torch.testing.assert_close(flat(model), flat(weights), rtol=1e-12, atol=1e-12)


class Growing(Dataset[Any]):
    def __init__(self) -> None:
        self.size = 8

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return points(16)[index]


def test_a_dataset_that_grows_is_refused_where_its_new_samples_would_be_left_out(
    tmp_path: Path,
) -> None:
    dataset = Growing()

    class Grow(Callback):
        def on_epoch_end(self, run: Any, epoch: int, metrics: Any) -> None:
            dataset.size = 16

    with pytest.raises(DataError, match="had 8 samples when the run was set up, and has 16 now"):
        manager_for(tmp_path, epochs=2).fit(line(), dataset, optimizer=sgd, callbacks=[Grow()])


class Fetching(Dataset[Any]):
    """Fetches whole batches alone, as torch's loader asks for them."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [points()[index] for index in indices]


def test_a_dataset_may_fetch_batches_alone(tmp_path: Path) -> None:
    found = []
    for dataset in (Fetching(), points()):
        model = line()
        manager_for(tmp_path).fit(model, dataset, optimizer=sgd)
        found.append(flat(model))
    assert torch.equal(*found)


def test_class_weights_in_an_attribute_count_in_float32_too() -> None:
    weight = torch.tensor([0.2, 1.0, 5.0])
    target = torch.tensor([0, 2, 2])
    found = find_divisor(OwnWeights(weight), torch.zeros(3, CLASSES), target)
    assert found.weigh(torch.zeros(3, CLASSES), target).item() == pytest.approx(10.2)


class Entries(dict[str, Any]):
    """An output whose attributes are its entries: one that it lacks is a KeyError."""

    __getattr__ = dict.__getitem__


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(FEATURES, CLASSES).double()

    def forward(self, inputs: Tensor, labels: Tensor) -> Entries:
        return Entries(loss=F.cross_entropy(self.line(inputs), labels))


def test_an_output_may_raise_keyerror_for_what_it_lacks(tmp_path: Path) -> None:
    rows = [{"inputs": x, "labels": y} for x, y in classes()]
    run = manager_for(tmp_path).fit(OwnLoss(), rows, optimizer=sgd)  # a list is a dataset
    assert run.steps > 0
