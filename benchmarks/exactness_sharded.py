"""Trainings whose parameters are split over the ranks, written to break it.

Optimizers that look at more than one element at a time, losses that use the weights themselves,
and models whose parameters are of odd shapes or used in odd places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch.nn.utils.parametrizations as parametrizations
from exactness_trial import (
    BATCH,
    CLASSES,
    FEATURES,
    SAMPLES,
    Outcome,
    Trial,
    case,
    history,
    integers,
    numbers,
)
from torch import Tensor, nn, optim
from torch.utils.data import TensorDataset

from multi_gpu_training.data.order import ShuffledBatches

GROUP = "Sharded"
TOKENS, LENGTH = 13, 7
Model = Callable[[], nn.Module]
Optimizer = Callable[[Any], optim.Optimizer]


def sgd(parameters: Any) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.05)


def adamw(parameters: Any) -> optim.Optimizer:
    return optim.AdamW(parameters, lr=0.01)


def rows() -> TensorDataset:
    return TensorDataset(numbers(SAMPLES, FEATURES), integers(CLASSES, SAMPLES))


def texts() -> TensorDataset:
    return TensorDataset(integers(TOKENS, SAMPLES, LENGTH), integers(CLASSES, SAMPLES))


def class_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def train(
    trial: Trial,
    model: Model,
    loss: Any = class_loss,
    optimizer: Optimizer = sgd,
    data: Callable[[], TensorDataset] = rows,
    clip: float | None = None,
    clamp: float | None = None,
    **settings: Any,
) -> Outcome:
    torch.manual_seed(1)
    built, samples = model().double(), data()
    moved = optimizer(built.parameters())
    if trial.by_hand:
        losses = {}
        for epoch in range(2):
            total = 0.0
            for numbers_of_batch in ShuffledBatches(SAMPLES, BATCH, False).batches(0, epoch):
                batch = [t[list(numbers_of_batch)] for t in samples.tensors]
                moved.zero_grad()
                given = loss(built, batch)
                mean = given[0] if isinstance(given, tuple) else given
                mean.backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(built.parameters(), clip)
                if clamp is not None:
                    nn.utils.clip_grad_value_(built.parameters(), clamp)
                moved.step()
                total += float(mean.detach()) * len(batch[0])
            losses[f"loss {epoch}"] = total / SAMPLES
        return Outcome({k: v.detach().clone() for k, v in built.state_dict().items()}, losses)
    settings = {"training_mode": "fsdp", "global_batch_size": BATCH, **settings}
    manager = trial.manager(max_grad_norm=clip, max_grad_value=clamp, **settings)
    result = manager.fit(built, samples, loss_fn=loss, optimizer=moved)
    state = {k: v.detach().clone() for k, v in manager.trainer.full_state().items()}
    return Outcome(state, history(result))


def add(name: str, how: dict[str, Any] | None = None, **given: Any) -> None:
    """One case in a line: what `train` gets, and what is expected of it."""
    case(GROUP, f"sharded: {name}", **(how or {}))(lambda trial: train(trial, **given))


class Block(nn.Module):
    def __init__(self, width: int = FEATURES) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# Optimizers

REFUSED = {"refused_on_ranks": True}
for optimizer_name, made in {
    "SGD with Nesterov": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "Adam, amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW, not foreach": lambda p: optim.AdamW(p, lr=0.01, foreach=False),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: optim.RAdam(p, lr=0.01),
    "RMSprop, centered": lambda p: optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "Adagrad, whose state is made at once": lambda p: optim.Adagrad(p, lr=0.05),
    "Adadelta": lambda p: optim.Adadelta(p, lr=1.0),
    "Adamax": lambda p: optim.Adamax(p, lr=0.01),
    "ASGD": lambda p: optim.ASGD(p, lr=0.05, t0=2),
}.items():
    add(optimizer_name, model=Net, optimizer=made)
for whole_name in ("Rprop", "Adafactor"):
    kind = getattr(optim, whole_name)
    add(whole_name, REFUSED, model=Net, optimizer=lambda p, kind=kind: kind(p, lr=0.01))


class Own(optim.Optimizer):
    """Moves every parameter along `direction`."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.direction(p, p.grad), alpha=-group["lr"])

    def direction(self, p: Tensor, grad: Tensor) -> Tensor:
        raise NotImplementedError


class Lamb(Own):
    def direction(self, p: Tensor, grad: Tensor) -> Tensor:
        moment = self.state[p].setdefault("moment", torch.zeros_like(p))
        moment.lerp_(grad, 0.1)
        update = moment + 0.01 * p
        return update * (p.norm() / (update.norm() + 1e-9))


class LarsByNumbers(Own):
    def direction(self, p: Tensor, grad: Tensor) -> Tensor:
        return grad * (p.norm().item() / (float(grad.norm()) + 1e-9))


class LarsOfData(Own):
    def direction(self, p: Tensor, grad: Tensor) -> Tensor:
        return grad.data * (p.data.norm(2) / (grad.data.norm(2) + 1e-9))


class CentredColumns(Own):
    def direction(self, p: Tensor, grad: Tensor) -> Tensor:
        return grad if grad.ndim < 2 else grad - grad.mean(dim=1, keepdim=True)


class CentredRows(Own):
    def direction(self, p: Tensor, grad: Tensor) -> Tensor:
        return grad if grad.ndim < 2 else grad - grad.mean(dim=0, keepdim=True)


class Lion(Own):
    def direction(self, p: Tensor, grad: Tensor) -> Tensor:
        moment = self.state[p].setdefault("moment", torch.zeros_like(p))
        moment.lerp_(grad, 0.01)
        return (0.9 * moment + 0.1 * grad).sign()


class ByDeviation(Own):
    def direction(self, p: Tensor, grad: Tensor) -> Tensor:
        return grad / (grad.std() + 1e-8)


class SkipsLargeOnes(Own):
    def direction(self, p: Tensor, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad) if bool((grad.abs() > 0.3).any()) else grad


class NoiseOfItsOwn(Own):
    def direction(self, p: Tensor, grad: Tensor) -> Tensor:
        return grad + 0.1 * numbers(*p.shape)


for kind in (
    *(Lamb, LarsByNumbers, LarsOfData, CentredColumns, CentredRows, Lion),
    *(ByDeviation, SkipsLargeOnes),
):
    add(f"own optimizer, {kind.__name__}", model=Net, optimizer=kind)
add("own optimizer, NoiseOfItsOwn", REFUSED, model=Net, optimizer=NoiseOfItsOwn)

# Losses


def penalty(part: Callable[[nn.Module], Tensor]) -> Callable[[nn.Module, Any], Tensor]:
    return lambda model, batch: class_loss(model, batch) + 1e-2 * part(model)


def of_slopes(model: nn.Module, batch: Any) -> Tensor:
    inputs = batch[0].detach().clone().requires_grad_()
    scores = model(inputs)
    (slope,) = torch.autograd.grad(scores.logsumexp(1).sum(), inputs, create_graph=True)
    return F.cross_entropy(scores, batch[1]) + 0.1 * slope.square().sum(1).mean()


def scaled_by_a_norm(model: nn.Module, batch: Any) -> Tensor:
    return class_loss(model, batch) * float(model.blocks[0].up.weight.detach().norm())


def consistent(model: nn.Module, batch: Any) -> Tensor:
    with torch.no_grad():
        before = model(batch[0])
    return class_loss(model, batch) + 0.3 * (model(1.1 * batch[0]) - before).square().mean()


def by_functional_call(model: nn.Module, batch: Any) -> Tensor:
    named = dict(model.named_parameters())
    return F.cross_entropy(torch.func.functional_call(model, named, (batch[0],)), batch[1])


def all_squared(model: nn.Module) -> Tensor:
    return sum((p.square().sum() for p in model.parameters()), torch.zeros(()))


def as_a_vector(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).square().sum()


def of_a_block(model: nn.Module) -> Tensor:
    return model.blocks[0].up.weight.norm()


def orthogonality(model: nn.Module) -> Tensor:
    weight = model.blocks[1].up.weight
    return (weight.T @ weight - torch.eye(FEATURES, dtype=weight.dtype)).square().sum()


PENALTIES = {
    "of all weights": all_squared,
    "of one vector": as_a_vector,
    "of a block": of_a_block,
    "of orthogonality": orthogonality,
}
for penalty_name, part in PENALTIES.items():
    add(f"penalty {penalty_name}", REFUSED, model=Net, loss=penalty(part))
    whole = {"model": Net, "loss": penalty(part), "fsdp_blocks": []}
    add(f"penalty {penalty_name}, fsdp_blocks=[]", **whole)
add("penalty of the head", model=Net, loss=penalty(lambda model: model.head.weight.norm()))
others = ["blocks.1", "blocks.2"]
add("penalty of a block, others named", model=Net, loss=penalty(of_a_block), fsdp_blocks=others)
add("gradient penalty", REFUSED, model=Net, loss=of_slopes)
add("gradient penalty, fsdp_blocks=[]", model=Net, loss=of_slopes, fsdp_blocks=[])
add("loss times a norm read as a number", model=Net, loss=scaled_by_a_norm)
add("a forward without gradients in the loss", model=Net, loss=consistent, optimizer=adamw)
add("functional_call", model=Net, loss=by_functional_call)

# Models


class Chain(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer() for _ in range(3)])
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def square() -> nn.Linear:
    return nn.Linear(FEATURES, FEATURES)


for form in (
    parametrizations.weight_norm,
    parametrizations.spectral_norm,
    parametrizations.orthogonal,
):
    add(form.__name__, model=lambda form=form: Chain(lambda: form(square())))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 5, padding_idx=0)
        self.lstm = nn.LSTM(5, 7, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(14, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0].mean(1))


class Encoder(nn.Module):
    """Positions of one row, and a class token without rows of its own."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(TOKENS, 8)
        self.places = nn.Parameter(0.1 * torch.randn(1, LENGTH, 8))
        self.token = nn.Parameter(0.1 * torch.randn(8))
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(x) + self.places).mean(1) + self.token)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 8)
        self.blocks = nn.ModuleList([Block(8) for _ in range(2)])
        self.output = nn.Linear(8, TOKENS, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.output(x)


class OddShapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.one = nn.Parameter(torch.tensor(1.3)), nn.Parameter(torch.ones(1))
        self.row = nn.Parameter(torch.randn(1, FEATURES))
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(3, FEATURES)) for _ in range(3)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(FEATURES, 2, 3))})
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for p in self.listed:
            x = x + 0.3 * torch.tanh(x @ p.T) @ p
        x = x + 0.3 * torch.einsum("bi,ijk,bj->bi", x, self.named["a"], x[:, :2])
        return self.head((x * self.row + self.one) * self.scale)


class OneBlockTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = Block()
        self.blocks = nn.ModuleList([shared, shared, Block()])
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ReadsABlock(Net):
    """Uses a block's weight outside that block."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.blocks[0].up.weight.detach().norm()


class HeadTwice(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ torch.softmax(self.head.weight @ self.head.weight.T, -1)


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)


def next_token(model: nn.Module, batch: Any) -> Tensor:
    scores = model(batch[0])[:, :-1]
    return F.cross_entropy(scores.flatten(0, 1), batch[0][:, 1:].flatten())


# Attention is blind to a bias that all keys share: its gradient is rounding, which Adam enlarges.
KEYS = {"left_out": ("in_proj_bias",)}
add("LSTM, padding_idx", model=Recurrent, data=texts, optimizer=adamw)
add("transformer, clipped norm", KEYS, model=Encoder, data=texts, optimizer=adamw, clip=0.5)
add("transformer, clamped", KEYS, model=Encoder, data=texts, optimizer=adamw, clamp=0.01)
add("tied embeddings", model=Tied, data=texts, loss=next_token, optimizer=adamw)
add("parameters of odd shapes, clipped", model=OddShapes, clip=0.3)
add("one block under two names", model=OneBlockTwice)
add("a block's weight read outside it", REFUSED, model=ReadsABlock)
add("the head's weight used twice", model=HeadTwice)
add(
    "a frozen block",
    model=Frozen,
    optimizer=lambda p: adamw([one for one in p if one.requires_grad]),
)
add("blocks kept whole until their backward", model=Net, optimizer=adamw, fsdp_reshard=False)
