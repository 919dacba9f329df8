"""Cases of exactness.py: losses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from exactness_trial import (
    CLASSES,
    FEATURES,
    SAMPLES,
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
    values,
)
from torch import Tensor, nn
from torch.utils.data import TensorDataset

GROUP = "Losses"


@case(GROUP, "no loss function given: cross entropy")
def default_classes(t: Trial) -> Outcome:
    loss = nn.CrossEntropyLoss() if t.by_hand else None
    return t.train(mlp(t.dtype), classes(t.dtype), loss, adamw)


@case(GROUP, "no loss function given: mean squared error of two values")
def default_values(t: Trial) -> Outcome:
    loss = nn.MSELoss() if t.by_hand else None
    return t.train(mlp(t.dtype, out=2), values(t.dtype, width=2), loss, adamw)


@case(GROUP, "sum as criterion", refusal=True)
def summed(t: Trial) -> Outcome:
    return t.train(mlp(t.dtype, out=1), values(t.dtype), nn.MSELoss(reduction="sum"), sgd)


@case(GROUP, "(mean, weight) with importance per sample, accumulation", float32=True)
def importance(t: Trial) -> Outcome:
    x, y = classes(t.dtype).tensors
    data = TensorDataset(x, numbers(SAMPLES, seed=4, dtype=t.dtype).abs() ** 3, y)

    def loss(model: nn.Module, batch: Any) -> Any:
        x, w, y = batch
        each = F.cross_entropy(model(x), y, reduction="none")
        return (each * w).sum() / w.sum(), w.sum()

    return t.train(mlp(t.dtype), data, loss, adamw, accumulate=3)


def weighted_entropy(weight: Tensor | None, ignore: int, smoothing: float) -> Any:
    """What cross entropy divides by, for the mean over an epoch."""

    def loss(model: nn.Module, batch: Any) -> Any:
        x, y = batch
        valid = y != ignore
        count = valid.sum() if weight is None else weight[y.where(valid, 0)].mul(valid).sum()
        mean = F.cross_entropy(
            model(x), y, weight=weight, ignore_index=ignore, label_smoothing=smoothing
        )
        return mean, count

    return loss


def entropy_case(t: Trial, weight: Any, ignore: int, smoothing: float, **how: Any) -> Outcome:
    x, y = classes(t.dtype).tensors
    if ignore != -100:
        y = y.clone()
        y[integers(2, SAMPLES, seed=6) == 0] = ignore
        y[8:12] = ignore  # on four ranks, two of them have nothing that counts
        y[12], y[24] = 1, 2
    weight = None if weight is None else torch.tensor(weight, dtype=t.dtype)
    loss = weighted_entropy(weight, ignore, smoothing)
    ours = nn.CrossEntropyLoss(weight, ignore_index=ignore, label_smoothing=smoothing)
    return t.train(mlp(t.dtype), TensorDataset(x, y), loss, sgd, ours=ours, **how)


@case(GROUP, "ignore_index=-1 for half of the labels")
def ignored(t: Trial) -> Outcome:
    return entropy_case(t, None, -1, 0.0)


@case(GROUP, "class weights, one of them 0, accumulation")
def class_weights(t: Trial) -> Outcome:
    return entropy_case(t, [0.0, 3.0, 0.5], -100, 0.0, accumulate=2)


@case(GROUP, "class weights, label smoothing and ignore_index together")
def smoothed(t: Trial) -> Outcome:
    return entropy_case(t, [0.2, 3.0, 0.5], -1, 0.1)


@case(GROUP, "cross entropy with probabilities as targets and class weights")
def soft_targets(t: Trial) -> Outcome:
    x, _ = classes(t.dtype).tensors
    data = TensorDataset(x, numbers(SAMPLES, CLASSES, seed=2, dtype=t.dtype).softmax(1))
    weight = torch.tensor([0.2, 3.0, 0.5], dtype=t.dtype)
    return t.train(mlp(t.dtype), data, nn.CrossEntropyLoss(weight), sgd)


@case(GROUP, "NLLLoss with weights after log_softmax")
def nll(t: Trial) -> Outcome:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.LogSoftmax(1))

    weight = torch.tensor([0.2, 3.0, 0.5], dtype=t.dtype)

    def loss(model: nn.Module, batch: Any) -> Any:
        return F.nll_loss(model(batch[0]), batch[1], weight), weight[batch[1]].sum()

    data = classes(t.dtype)
    return t.train(seeded(build, t.dtype), data, loss, sgd, ours=nn.NLLLoss(weight))


@case(GROUP, "MultiMarginLoss with class weights, which do not divide")
def margins(t: Trial) -> Outcome:
    weight = torch.tensor([0.2, 3.0, 0.5], dtype=t.dtype)
    return t.train(mlp(t.dtype), classes(t.dtype), nn.MultiMarginLoss(weight=weight), sgd)


@case(GROUP, "BCEWithLogitsLoss with pos_weight, several labels")
def binary(t: Trial) -> Outcome:
    x, _ = classes(t.dtype).tensors
    data = TensorDataset(x, integers(2, SAMPLES, 4).to(t.dtype))
    loss = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=t.dtype))
    return t.train(mlp(t.dtype, out=4), data, loss, adamw)


@case(GROUP, "KLDivLoss(reduction='batchmean')")
def batchmean(t: Trial) -> Outcome:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.LogSoftmax(1))

    x, _ = classes(t.dtype).tensors
    data = TensorDataset(x, numbers(SAMPLES, CLASSES, seed=2, dtype=t.dtype).softmax(1))
    return t.train(seeded(build, t.dtype), data, nn.KLDivLoss(reduction="batchmean"), sgd)


@case(GROUP, "CTC with uneven lengths, own loss")
def ctc(t: Trial) -> Outcome:
    frames, targets = numbers(SAMPLES, 10, FEATURES, dtype=t.dtype), integers(3, SAMPLES, 4) + 1
    lengths, wanted = 6 + integers(5, SAMPLES), 1 + integers(3, SAMPLES, seed=2)
    data = TensorDataset(frames, lengths, targets, wanted)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, lengths, y, wanted = batch
        return F.ctc_loss(model(x).log_softmax(2).transpose(0, 1), y, lengths, wanted)

    return t.train(mlp(t.dtype, out=4), data, loss, adamw)


# Distances do not feel the last bias.
@case(GROUP, "triplets: contrastive without pairs in the batch", left_out=("2.bias",))
def triplets(t: Trial) -> Outcome:
    data = TensorDataset(*(numbers(SAMPLES, FEATURES, seed=s, dtype=t.dtype) for s in (1, 2, 3)))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.triplet_margin_loss(*(model(part) for part in batch), margin=1.0)

    return t.train(mlp(t.dtype), data, loss, adamw)


class Focal(nn.Module):
    """As in many repositories: a module that is called like torch's criteria."""

    def __init__(self, gamma: float = 2.0) -> None:
        super().__init__()
        self.gamma = gamma

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        each = F.cross_entropy(logits, target, reduction="none")
        return ((1 - (-each).exp()) ** self.gamma * each).mean()


@case(GROUP, "a user's nn.Module as criterion", float32=True)
def own_criterion(t: Trial) -> Outcome:
    return t.train(mlp(t.dtype), classes(t.dtype), Focal(), adamw, accumulate=2)


class LearnedScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(2))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        each = (output - target) ** 2 * (-self.log_variance).exp() + self.log_variance
        return each.mean()


@case(GROUP, "a criterion with parameters that are trained too")
def learned_criterion(t: Trial) -> Outcome:
    model, criterion = mlp(t.dtype, out=2), seeded(LearnedScale, t.dtype)
    data = values(t.dtype, width=2)

    def optimizer(_: Any) -> Any:
        return torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)

    found = t.train(model, data, criterion, optimizer)
    found.tensors["criterion"] = criterion.log_variance.detach().clone()
    return found


@case(GROUP, "a criterion with parameters inside the model")
def criterion_inside(t: Trial) -> Outcome:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.criterion = mlp(t.dtype, out=2), LearnedScale()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.criterion(self.net(x), y)

    return t.train(seeded(Both, t.dtype), values(t.dtype, width=2), lambda m, b: m(*b), sgd)


@case(GROUP, "a loss that is a tuple only where something is masked", point=5)
def sometimes_tuple(t: Trial) -> Outcome:
    x, y = values(t.dtype, 32).tensors
    valid = torch.ones(32, dtype=t.dtype)
    valid[8:16:3] = 0  # the second of four steps, so on some ranks and not on others
    data = TensorDataset(x, valid, y)

    def loss(model: nn.Module, batch: Any) -> Any:
        x, valid, y = batch
        each = (model(x) - y)[:, 0] ** 2
        if t.by_hand or not bool(valid.all()):
            return (each * valid).sum() / valid.sum(), valid.sum()
        return each.mean()

    return t.train(mlp(t.dtype, out=1), data, loss, sgd)


def critic_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    x = x.detach().requires_grad_(True)
    score = model(x)
    (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return F.mse_loss(score, y) + 0.5 * ((slope.norm(dim=1) - 1) ** 2).mean()


@case(GROUP, "gradient penalty (double backward)")
def penalty(t: Trial) -> Outcome:
    return t.train(mlp(t.dtype, out=1), values(t.dtype), critic_loss, sgd)


@case(GROUP, "gradient penalty through BatchNorm, sync_bn", point=7)
def penalty_batchnorm(t: Trial) -> Outcome:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 10), nn.BatchNorm1d(10), nn.Softplus(), nn.Linear(10, 1)
        )

    return t.train(
        seeded(build, t.dtype), values(t.dtype), critic_loss, sgd, sync_bn=True, epochs=1
    )


@case(GROUP, "regulariser in the loss, (mean, weight), accumulation with a short tail")
def regularised(t: Trial) -> Outcome:
    return weighted_squares(t, 1 + integers(4, 27, 1))


@case(GROUP, "(mean, weight) where all weights of a share are 0")
def weightless_share(t: Trial) -> Outcome:
    weight = 1 + integers(4, 27, 1)
    weight[8:13] = 0
    return weighted_squares(t, weight)


def weighted_squares(t: Trial, weight: Tensor) -> Outcome:
    x, y = values(t.dtype, 27).tensors
    data = TensorDataset(x, weight.to(t.dtype), y)

    def loss(model: nn.Module, batch: Any) -> Any:
        x, w, y = batch
        mean = (w * (model(x) - y) ** 2).sum() / w.sum()
        return mean + 1e-2 * sum((p**2).sum() for p in model.parameters()), w.sum()

    accumulate = 1 if bool((weight == 0).any()) else 3
    return t.train(mlp(t.dtype, out=1), data, loss, adamw, accumulate=accumulate)


@case(GROUP, "L1 regulariser in a plain mean")
def lasso(t: Trial) -> Outcome:
    def loss(model: nn.Module, batch: Any) -> Any:
        return F.mse_loss(model(batch[0]), batch[1]) + 1e-3 * model[0].weight.abs().sum()

    return t.train(mlp(t.dtype, out=1), values(t.dtype, 25), loss, sgd)


@case(GROUP, "loss of shape (1,), as some models give it")
def one_element(t: Trial) -> Outcome:
    def loss(model: nn.Module, batch: Any) -> Any:
        return F.mse_loss(model(batch[0]), batch[1]).reshape(1)

    return t.train(mlp(t.dtype, out=1), values(t.dtype), loss, sgd)


@case(GROUP, "(mean, weight, metrics): accuracy beside the loss")
def with_metrics(t: Trial) -> Outcome:
    def loss(model: nn.Module, batch: Any) -> Any:
        x, y = batch
        logits = model(x)
        right = (logits.argmax(1) == y).sum()
        return F.cross_entropy(logits, y), None, {"accuracy": (right, len(y))}

    def by_hand(model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1])

    return t.train(mlp(t.dtype), classes(t.dtype), by_hand, adamw, ours=loss)


@case(GROUP, "augment that masks labels", point=9)
def masking_augment(t: Trial) -> Outcome:
    x, y = classes(t.dtype).tensors
    hidden = x[:, 0] > 0.3

    def augment(batch: Any, random: Any) -> Any:
        x, y = batch
        return x, y.masked_fill(x[:, 0] > 0.3, -100)

    if t.by_hand:
        data = TensorDataset(x, y.masked_fill(hidden, -100))
        return t.train(mlp(t.dtype), data, weighted_entropy(None, -100, 0.0), sgd)
    data = TensorDataset(x, y)
    return t.train(mlp(t.dtype), data, nn.CrossEntropyLoss(), sgd, fit={"augment": augment})


@case(GROUP, "two heads: a classification and a regression loss")
def two_heads(t: Trial) -> Outcome:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(FEATURES, 8)
            self.kind, self.value = nn.Linear(8, CLASSES), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            hidden = torch.tanh(self.body(x))
            return {"kind": self.kind(hidden), "value": self.value(hidden)}

    x, y = classes(t.dtype).tensors
    data = TensorDataset(x, y, numbers(SAMPLES, 1, seed=3, dtype=t.dtype))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, kind, value = batch
        found = model(x)
        return F.cross_entropy(found["kind"], kind) + 0.3 * F.l1_loss(found["value"], value)

    return t.train(seeded(Heads, t.dtype), data, loss, adamw, clip=0.5, shuffle=True)


@case(GROUP, "a whole step in which nothing counts, mean over clamp(count, 1), AdamW")
def masked_step(t: Trial) -> Outcome:
    x, y = values(t.dtype, 32).tensors
    valid = (torch.arange(32) % 3 > 0).to(t.dtype)
    valid[8:16] = 0
    data = TensorDataset(x, valid, y)

    def loss(model: nn.Module, batch: Any) -> Any:
        x, valid, y = batch
        return ((model(x) - y)[:, 0] ** 2 * valid).sum() / valid.sum().clamp(min=1), valid.sum()

    return t.train(mlp(t.dtype, out=1), data, loss, adamw)


@case(GROUP, "(mean, weight) as Python numbers, clipping, accumulation")
def python_weight(t: Trial) -> Outcome:
    x, y = classes(t.dtype, 25).tensors
    data = TensorDataset(x, torch.arange(25) % 4 + 1, y)

    def loss(model: nn.Module, batch: Any) -> Any:
        x, times, y = batch
        each = F.cross_entropy(model(x), y, reduction="none")
        count = int(times.sum())
        return (each * times).sum() / count, count

    return t.train(mlp(t.dtype), data, loss, sgd, clip=0.1, accumulate=2)


@case(GROUP, "a step with an infinite loss left out: on_nonfinite=skip")
def skipped(t: Trial) -> Outcome:
    x, y = values(t.dtype, 32).tensors
    x = x.clone()
    x[9, 0] = float("inf")
    data = TensorDataset(x, y)
    model = mlp(t.dtype, out=1)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0] * 1.0), batch[1] * (1 + 0 * batch[0][:, :1]))

    if t.by_hand:
        optimizer = adamw(model.parameters())
        for start in (0, 8, 16, 24) * 2:
            value = loss(model, data[start : start + 8])
            if bool(value.isfinite()):
                optimizer.zero_grad()
                value.backward()
                optimizer.step()
        return Outcome({name: p.detach().clone() for name, p in model.state_dict().items()})
    found = t.train(model, data, loss, adamw, on_nonfinite="skip")
    return Outcome(found.tensors)
