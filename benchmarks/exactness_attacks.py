"""Cases of exactness.py, written to break it: learned criteria, odd models, losses, data, loops."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from exactness_data import drawn, through
from exactness_trial import (
    BATCH,
    CLASSES,
    FEATURES,
    SAMPLES,
    Items,
    Outcome,
    Trial,
    adamw,
    case,
    classes,
    cross_entropy,
    history,
    integers,
    mlp,
    numbers,
    outcome,
    plain_loop,
    seeded,
    sgd,
    squares,
    values,
)
from torch import Tensor, nn, optim
from torch.nn.utils import parametrizations, parametrize
from torch.optim import lr_scheduler as rates
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    StackDataset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from multi_gpu_training import Callback

# Criteria and parameters of the loss that are trained

LEARNED = "Losses that learn"


class ArcFace(nn.Module):
    """A margin on the angle between an embedding and the learned direction of its class."""

    def __init__(self, width: int = 4, kinds: int = 7) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(kinds, width))

    def forward(self, embedding: Tensor, label: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(embedding), F.normalize(self.weight)).clamp(-0.99, 0.99)
        turned = torch.cos(cosine.acos() + 0.2 * F.one_hot(label, cosine.shape[1]))
        return F.cross_entropy(4 * turned, label)


class Uncertainty(nn.Module):
    """Two tasks, each with a learned variance (Kendall et al.), of a model with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(2))

    def forward(self, output: Any, target: Tensor) -> Tensor:
        kinds, value = output
        first = F.cross_entropy(kinds, target)
        second = F.mse_loss(value[:, 0], target.to(value.dtype))
        parts = torch.stack([first, second])
        return (parts * (-self.log_variance).exp() + self.log_variance).sum()


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 8)
        self.kind, self.value = nn.Linear(8, CLASSES), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.kind(hidden), self.value(hidden)


class Centers(nn.Module):
    """Center loss, with the centers as parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.randn(CLASSES, CLASSES))

    def forward(self, features: Tensor, label: Tensor) -> Tensor:
        return ((features - self.centers[label]) ** 2).sum(1).mean()


class Projected(nn.Module):
    """A criterion with a BatchNorm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(CLASSES, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.net(output), target)


class WithModel(nn.Module):
    """A loss of model and batch that is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(model(x) * self.temperature, y)


def learned(
    t: Trial,
    model: nn.Module,
    criterion: nn.Module,
    data: Any,
    *,
    loss: Any = None,
    optimizer: Any = None,
    ours: Any = "instance",
    clip: float | None = None,
    epochs: int = 2,
    **settings: Any,
) -> Outcome:
    """Model and criterion by hand in one module, or the criterion given to fit."""
    both = nn.ModuleList([model, criterion])
    make = optimizer or sgd
    called = loss or (lambda m, b: criterion(m(b[0]), b[1]))
    if t.by_hand:
        made = make(both.parameters())
        loader = DataLoader(data, batch_size=BATCH)

        def compute(_: nn.Module, batch: Any) -> Any:
            return called(model, batch)

        plain = plain_loop(both, lambda _: loader, compute, made, epochs=epochs, clip=clip)
        return Outcome(outcome(model, criterion).tensors, plain.numbers)
    manager = t.manager(global_batch_size=BATCH, epochs=epochs, max_grad_norm=clip, **settings)
    given = {"instance": lambda: make(both.parameters()), "function": lambda: make}
    result = manager.fit(
        model, data, loss_fn=criterion if loss is None else loss,
        optimizer=given[ours]() if ours else None,
    )  # fmt: skip
    return outcome(model, criterion, **history(result))


@case(LEARNED, "ArcFace as criterion, its weight by a function of the parameters", float32=True)
def arcface(t: Trial) -> Outcome:
    x, _ = classes(t.dtype).tensors
    data = TensorDataset(x, integers(7, SAMPLES))
    model = mlp(t.dtype, out=4)
    return learned(t, model, seeded(ArcFace, t.dtype), data, ours="function", clip=0.5)


@case(LEARNED, "uncertainty weighting of two outputs, groups of a given optimizer")
def uncertainty(t: Trial) -> Outcome:
    model, criterion = seeded(TwoHeads, t.dtype), seeded(Uncertainty, t.dtype)

    def make(_: Any) -> Any:
        groups = [{"params": model.parameters()}, {"params": criterion.parameters(), "lr": 0.3}]
        return optim.SGD(groups, lr=0.05, momentum=0.9)

    return learned(t, model, criterion, classes(t.dtype, 25), optimizer=make)


@case(LEARNED, "center loss and cross entropy in a function, centers from its closure")
def center_loss(t: Trial) -> Outcome:
    model, criterion = mlp(t.dtype), seeded(Centers, t.dtype)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        features = model(batch[0])
        return F.cross_entropy(features, batch[1]) + 0.1 * criterion(features, batch[1])

    return learned(t, model, criterion, classes(t.dtype, 25), loss=loss, optimizer=adamw, clip=0.3)


@case(LEARNED, "a learned temperature: one loose parameter in a closure")
def temperature(t: Trial) -> Outcome:
    model = mlp(t.dtype)
    scale = nn.Parameter(torch.ones((), dtype=t.dtype))
    holder = nn.Module()
    holder.register_parameter("scale", scale)

    def loss(model: nn.Module, batch: Any, scale: Any = scale) -> Tensor:
        return F.cross_entropy(model(batch[0]) * scale.exp(), batch[1])

    return learned(t, model, holder, classes(t.dtype, 25), loss=loss, optimizer=adamw)


@case(LEARNED, "a criterion with parameters, no optimizer given")
def learned_default(t: Trial) -> Outcome:
    model, criterion = mlp(t.dtype, out=4), seeded(ArcFace, t.dtype)
    x, _ = classes(t.dtype).tensors

    def make(p: Any) -> Any:
        return optim.AdamW(p, lr=0.01, weight_decay=0.1)

    data = TensorDataset(x, integers(7, SAMPLES))
    return learned(
        t, model, criterion, data, optimizer=make, ours=None, learning_rate=0.01, weight_decay=0.1
    )


@case(LEARNED, "an unfrozen network as criterion that the optimizer does not hold, clipping")
def perceptual(t: Trial) -> Outcome:
    class Perceptual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 2))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return F.l1_loss(self.net(output), self.net(target))

    model, criterion, data = mlp(t.dtype, out=1), seeded(Perceptual, t.dtype), values(t.dtype, 25)
    made = sgd(model.parameters())
    return t.train(model, data, criterion, lambda _: made, clip=0.1)


@case(LEARNED, "a loss of model and batch that is a module with a parameter")
def module_loss(t: Trial) -> Outcome:
    criterion = seeded(WithModel, t.dtype)
    loss = None if not t.by_hand else (lambda m, b: criterion(m, b))
    return learned(t, mlp(t.dtype), criterion, classes(t.dtype), loss=loss, ours="function")


# A bias before BatchNorm has no gradient but rounding.
@case(LEARNED, "a criterion with a BatchNorm, sync_bn", left_out=("net.0.bias", "2.bias"))
def projected(t: Trial) -> Outcome:
    data = classes(t.dtype, 24)
    return learned(t, mlp(t.dtype), seeded(Projected, t.dtype), data, sync_bn=True)


@case(LEARNED, "a criterion with parameters, find_unused_parameters, 1 sample in the last step")
def learned_tail(t: Trial) -> Outcome:
    model, criterion = seeded(TwoHeads, t.dtype), seeded(Uncertainty, t.dtype)
    return learned(
        t, model, criterion, classes(t.dtype, 25), optimizer=adamw, find_unused_parameters=True
    )


def learned_resumed(begin: bool) -> Callable[[Trial], Outcome]:
    def run(t: Trial) -> Outcome:
        model, criterion = mlp(t.dtype, out=4), seeded(ArcFace, t.dtype)
        x, _ = classes(t.dtype).tensors
        data = TensorDataset(x, integers(7, SAMPLES))
        if t.by_hand:
            found = learned(t, model, criterion, data, optimizer=adamw, epochs=3)
            return Outcome(found.tensors)
        manager = t.manager(
            epochs=3, run_name="run", enable_fault_tolerance=True, global_batch_size=BATCH,
            resume=None if begin else "auto", max_steps=6 if begin else None,
        )  # fmt: skip
        manager.fit(model, data, loss_fn=criterion, optimizer=adamw)
        return outcome(model, criterion)

    return run


case(
    LEARNED,
    "a criterion with parameters, resumed on another number of ranks",
    begun_elsewhere=learned_resumed(True),
)(learned_resumed(False))


# Models

MODELS = "Models, more"


def model_case(
    name: str,
    build: Callable[[], nn.Module],
    data: Callable[[torch.dtype], Any] = classes,
    loss: Any = cross_entropy,
    optimizer: Any = adamw,
    case_options: dict[str, Any] | None = None,
    **how: Any,
) -> None:
    def run(t: Trial) -> Outcome:
        return t.train(seeded(build, t.dtype), data(t.dtype), loss, optimizer, **how)

    case(MODELS, name, **(case_options or {}))(run)


BOTH = {"float32": True}


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


def parametrized() -> nn.Module:
    net = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, CLASSES))
    parametrizations.orthogonal(net[0])
    parametrize.register_parametrization(net[2], "weight", Symmetric())
    return net


model_case("orthogonal and symmetric parametrizations, clipping", parametrized, clip=0.5)


def spectral() -> nn.Module:
    net = nn.Sequential(nn.Linear(FEATURES, 9), nn.ELU(), nn.Linear(9, CLASSES))
    parametrizations.spectral_norm(net[0])
    parametrizations.weight_norm(net[2])
    return net


model_case(
    "spectral_norm and weight_norm as parametrizations, accumulation", spectral, accumulate=2
)


@dataclasses.dataclass
class Found:
    logits: Tensor
    hidden: Tensor
    name: str = "found"


class Pair(NamedTuple):
    logits: Tensor
    penalty: Tensor


class GivesDataclass(nn.Module):
    kind: Any = Found

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(FEATURES, 7), nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Any:
        hidden = F.gelu(self.a(x))
        return self.kind(self.b(hidden), (hidden**2).mean(1))


class GivesPair(GivesDataclass):
    kind = Pair


def of_dataclass(model: nn.Module, batch: Any) -> Tensor:
    found = model(batch[0])
    return (
        F.cross_entropy(found.logits, batch[1]) + 0.1 * found[1].mean()
        if isinstance(found, tuple)
        else F.cross_entropy(found.logits, batch[1]) + 0.1 * found.hidden.mean()
    )


model_case("output is a dataclass", GivesDataclass, loss=of_dataclass)
model_case("output is a named tuple, one of it a penalty", GivesPair, loss=of_dataclass)


def sentences(dtype: torch.dtype) -> TensorDataset:
    tokens, lengths = integers(11, SAMPLES, 9) + 1, 2 + integers(8, SAMPLES, seed=3)
    places = torch.arange(9)
    tokens = tokens.masked_fill(places[None] >= lengths[:, None], 0)
    return TensorDataset(tokens, tokens.roll(-1, 1))


class Encoder(nn.Module):
    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.embed = nn.Embedding(12, 8, padding_idx=0)
        self.register_buffer("place", torch.randn(9, 8), persistent=False)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = None
        if self.causal:
            mask = torch.ones(9, 9, dtype=torch.bool).triu(1)
        hidden = self.embed(tokens) + self.place
        return self.head(self.body(hidden, mask=mask, src_key_padding_mask=tokens == 0))


def token_loss(model: nn.Module, batch: Any) -> Any:
    tokens, wanted = batch
    logits = model(tokens).flatten(0, 1)
    mean = F.cross_entropy(logits, wanted.flatten(), ignore_index=0, label_smoothing=0.1)
    return mean, (wanted != 0).sum()


KEYS = {"left_out": ("in_proj_bias",)}  # the key's bias has no gradient but rounding
model_case(
    "TransformerEncoder with padding mask, label smoothing over tokens",
    Encoder, sentences, token_loss, sgd, KEYS | BOTH,
)  # fmt: skip
model_case(
    "causal TransformerEncoder, padding_idx, cosine, accumulation",
    functools.partial(Encoder, True), sentences, token_loss, sgd, KEYS, accumulate=3,
    scheduler=lambda o: rates.CosineAnnealingLR(o, 8),
)  # fmt: skip


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.net = nn.Transformer(8, 2, 1, 1, 12, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(9, dtype=self.embed.weight.dtype)
        given = self.embed(tokens)
        return self.net(given, given.flip(1), tgt_mask=causal) @ self.embed.weight.T


model_case("encoder-decoder with tied output", Seq2Seq, sentences, token_loss, sgd, KEYS)


class BiLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6, padding_idx=0)
        self.rnn = nn.LSTM(6, 7, proj_size=4, bidirectional=True, batch_first=True)
        self.head = nn.Linear(8, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = (tokens != 0).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], True, total_length=9)
        return self.head(hidden)


model_case(
    "bidirectional LSTM with projections, packed", BiLstm, sentences, token_loss, adamw, BOTH
)


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.start = nn.GRUCell(2, 5), nn.Parameter(torch.zeros(5))
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state = self.start.expand(len(x), 5)
        for part in x.split(2, 1):
            state = self.cell(part, state)
        return self.head(state)


model_case("GRUCell in a Python loop with a learned first state", Cells, clip=0.2, shuffle=True)


class Lora(nn.Module):
    """A frozen layer with a trained low-rank part beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.base.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.zeros(CLASSES, 2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.base[:2](x)
        return self.base[2](hidden) + hidden @ self.a.T @ self.b.T


def trained_only(parameters: Any) -> Any:
    return optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2)


model_case(
    "LoRA beside a frozen network", Lora, optimizer=trained_only, case_options=BOTH, clip=0.1
)


def bias_only() -> nn.Module:
    net = nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, CLASSES))
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return net


model_case("only biases are trained, accumulation", bias_only, optimizer=trained_only, accumulate=2)


class Prompt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = Encoder().requires_grad_(False)
        self.frozen.eval()
        self.prompt = nn.Parameter(0.1 * torch.randn(9, 8))

    def train(self, mode: bool = True) -> Prompt:
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.frozen.embed(tokens) + self.prompt
        return self.frozen.head(self.frozen.body(hidden))


model_case("prompt tuning: a frozen transformer kept in eval mode", Prompt, sentences, token_loss,
           trained_only)  # fmt: skip


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grads[0] * 0.5  # not the true derivative


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -0.3 * grads[0]


class Odd(nn.Module):
    """Autograd functions, tensor hooks, backward hooks, a hypernetwork, odd parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 5)
        self.maker = nn.Linear(3, 5 * CLASSES)
        self.code = nn.Parameter(torch.randn(3))
        self.turned = nn.Parameter(torch.randn(5, FEATURES).t())  # not contiguous
        self.scale = nn.Parameter(torch.ones(()))
        self.none = nn.Parameter(torch.zeros(0, 4))
        self.domain = nn.Linear(5, 1)
        self.body.register_full_backward_hook(lambda m, i, o: tuple(g and None for g in ()) or None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = Cube.apply(torch.tanh(self.body(x) + x @ self.turned)) * self.scale
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad * 0.7)
        head = self.maker(self.code).view(CLASSES, 5)
        return F.linear(hidden, head) + self.none.sum(), self.domain(Reversal.apply(hidden))


def odd_loss(model: nn.Module, batch: Any) -> Tensor:
    logits, domain = model(batch[0])
    return F.cross_entropy(logits, batch[1]) + F.softplus(domain).mean()


model_case("hypernetwork, autograd functions, tensor hooks, strided and empty parameters", Odd,
           loss=odd_loss, optimizer=sgd)  # fmt: skip


class Flow(nn.Module):
    """A coupling layer and its log-determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = x.new_zeros(len(x))
        for net in self.nets:
            a, b = x.chunk(2, 1)
            shift, scale = net(a).chunk(2, 1)
            scale = torch.tanh(scale)
            x, total = torch.cat([b * scale.exp() + shift, a], 1), total + scale.sum(1)
        return x, total


def likelihood(model: nn.Module, batch: Any) -> Tensor:
    z, total = model(batch[0])
    return (0.5 * (z**2).sum(1) - total).mean()


model_case("normalizing flow, AdamW with amsgrad", Flow, loss=likelihood,
           optimizer=lambda p: optim.AdamW(p, 1e-2, amsgrad=True), shuffle=True)  # fmt: skip


class Codebook(nn.Module):
    """VQ-VAE with codes that are trained by gradient, straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = nn.Linear(FEATURES, 4), nn.Linear(4, FEATURES)
        self.codes = nn.Embedding(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.enc(x)
        nearest = torch.cdist(z, self.codes.weight).argmin(1)
        code = self.codes(nearest)
        apart = (z.detach() - code) ** 2 + 0.25 * (z - code.detach()) ** 2
        return self.dec(z + (code - z).detach()), apart.mean(1)


def reconstruct(model: nn.Module, batch: Any) -> Tensor:
    found, apart = model(batch[0])
    return F.mse_loss(found, batch[0]) + apart.mean()


model_case("VQ-VAE, straight-through codes", Codebook, loss=reconstruct, optimizer=sgd)


class Tasks(nn.Module):
    """A head per task; each sample uses that of its own task."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 6)
        self.heads = nn.ModuleDict({str(i): nn.Linear(6, 1) for i in range(4)})

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        found = hidden.new_zeros(len(x))
        for name, head in self.heads.items():
            mine = task == int(name)
            if bool(mine.any()):
                found = found.masked_scatter(mine, head(hidden[mine])[:, 0])
        return found


def tasks(dtype: torch.dtype) -> TensorDataset:
    x, y = values(dtype).tensors
    return TensorDataset(x, integers(3, SAMPLES, seed=5), y[:, 0])  # no sample has task 3


model_case("a head per task, one never used, find_unused_parameters, AdamW", Tasks, tasks,
           nn.MSELoss(), find_unused_parameters=True)  # fmt: skip


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        stacked = {
            name: torch.stack([dict(m.named_parameters())[name] for m in self.members])
            for name in ("weight", "bias")
        }
        one = self.members[0]
        call = torch.func.vmap(lambda p: torch.func.functional_call(one, p, (x,)))
        return call(stacked).mean(0)


model_case("ensemble by vmap over functional_call", Ensemble)


def sensitivity(model: nn.Module, batch: Any) -> Tensor:
    """Per-sample input gradients by torch.func."""
    x, y = batch
    params = dict(model.named_parameters())

    def one(x: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, (x[None],))[0, 0]

    slopes = torch.func.vmap(torch.func.grad(one))(x)
    return F.mse_loss(model(x), y) + 0.1 * (slopes**2).sum(1).mean()


def plain_mlp(out: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 9), nn.Tanh(), nn.Linear(9, out))


model_case(
    "penalty on per-sample gradients by torch.func.vmap", plain_mlp, values, sensitivity, sgd
)


def pinn(model: nn.Module, batch: Any) -> Tensor:
    """A differential equation in the loss: second derivatives with respect to the input."""
    x = batch[0].detach().requires_grad_(True)
    u = model(x)
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return ((second.sum(1) + u[:, 0]) ** 2).mean() + F.mse_loss(u, batch[1])


model_case("physics-informed: second derivatives in the loss", plain_mlp, values, pinn, sgd, BOTH)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.SiLU()) for _ in range(4)))
        self.norm, self.head = nn.GroupNorm(2, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint_sequential(self.body, 2, x, use_reentrant=False)
        return self.head(checkpoint(self.norm, x, use_reentrant=False))


model_case("checkpoint_sequential and GroupNorm under checkpoint, accumulation", Checkpointed,
           accumulate=2)  # fmt: skip


class Pixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 8, 3, 2, 1)
        self.depth = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.GroupNorm(2, 8), nn.SiLU()
        )
        self.gate = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Sigmoid())
        self.up = nn.Sequential(nn.Conv2d(8, 12, 1), nn.PixelShuffle(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.depth(self.down(x))
        return self.up(hidden * self.gate(hidden.mean((2, 3), keepdim=True))).contiguous()


def pictures(dtype: torch.dtype) -> TensorDataset:
    wanted = integers(3, SAMPLES, 6, 6)
    wanted[integers(4, SAMPLES, 6, 6, seed=2) == 0] = 255
    return TensorDataset(numbers(SAMPLES, 1, 6, 6, dtype=dtype), wanted)


def segmentation(model: nn.Module, batch: Any) -> Any:
    weight = torch.tensor([0.2, 1.0, 3.0], dtype=batch[0].dtype)
    mean = F.cross_entropy(model(batch[0]), batch[1], weight, ignore_index=255)
    valid = batch[1] != 255
    return mean, weight[batch[1].where(valid, 0)].mul(valid).sum()


def segmentation_case(t: Trial) -> Outcome:
    weight = torch.tensor([0.2, 1.0, 3.0], dtype=t.dtype)
    ours = nn.CrossEntropyLoss(weight, ignore_index=255)
    model = seeded(Pixels, t.dtype).to(memory_format=torch.channels_last)
    return t.train(model, pictures(t.dtype), segmentation, sgd, ours=ours)


# Not with InstanceNorm: for one sample in channels_last, torch 2.13 computes a wrong gradient.
case(
    MODELS, "segmentation in channels_last, class weights and ignore_index as criterion",
)(segmentation_case)  # fmt: skip


class Sets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 5))
        self.query = nn.Parameter(torch.randn(5))
        self.outer = nn.Linear(5, 1)

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        hidden = self.inner(x)
        score = (hidden @ self.query).masked_fill(~there, -torch.inf).softmax(1)
        return self.outer((score[..., None] * hidden).sum(1))


def ragged(dtype: torch.dtype) -> Any:
    sizes, all_numbers = 1 + integers(5, SAMPLES), numbers(SAMPLES, 5, 3, dtype=dtype)
    return Items(SAMPLES, lambda i: (all_numbers[i, : sizes[i]], all_numbers[i].sum()))


def pad(items: list[Any]) -> Any:
    width = max(len(x) for x, _ in items)
    x = torch.stack([F.pad(x, (0, 0, 0, width - len(x))) for x, _ in items])
    there = torch.tensor([[i < len(x) for i in range(width)] for x, _ in items])
    return x, there, torch.stack([y for _, y in items])[:, None]


model_case("sets of several sizes, padded by collate, attention pooling", Sets, ragged,
           nn.SmoothL1Loss(beta=0.3), collate=pad)  # fmt: skip


class Density(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(FEATURES, 9)

    def forward(self, x: Tensor) -> Any:
        a, b, c = self.net(x).chunk(3, 1)
        mixture = torch.distributions.Categorical(logits=a)
        parts = torch.distributions.Normal(b, F.softplus(c) + 0.1)
        return torch.distributions.MixtureSameFamily(mixture, parts)


model_case("mixture density network that returns a distribution", Density, values,
           lambda m, b: -m(b[0]).log_prob(b[1][:, 0]).mean())  # fmt: skip


class Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(12, 5, mode="max", padding_idx=0)
        self.words = nn.Embedding(12, 5, padding_idx=0, scale_grad_by_freq=False)
        self.head = nn.Bilinear(5, 5, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.bags(tokens), self.words(tokens).mean(1))


def documents(dtype: torch.dtype) -> TensorDataset:
    return TensorDataset(sentences(dtype).tensors[0], integers(CLASSES, SAMPLES))


model_case("EmbeddingBag(mode=max), padding_idx, Bilinear", Single, documents)


class Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 8)
        self.soft = nn.AdaptiveLogSoftmaxWithLoss(8, 12, [3, 7], div_value=2.0)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.soft(torch.tanh(self.body(x)), y)


def many_classes(dtype: torch.dtype) -> TensorDataset:
    return TensorDataset(numbers(SAMPLES, FEATURES, dtype=dtype), integers(12, SAMPLES))


model_case("AdaptiveLogSoftmaxWithLoss inside the model, clusters unused on some ranks", Adaptive,
           many_classes, lambda m, b: m(*b).loss, find_unused_parameters=True)  # fmt: skip


@case(
    MODELS, "Embedding(max_norm), whose forward changes weights by the batch", refused_on_ranks=True
)
def max_norm(t: Trial) -> Outcome:
    class Capped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(12, 5, max_norm=0.5), nn.Linear(5, CLASSES)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.words(tokens).mean(1))

    return t.train(seeded(Capped, t.dtype), documents(t.dtype), cross_entropy, sgd)


@case(
    MODELS,
    "Embedding(scale_grad_by_freq), which counts the words of the batch",
    refused_on_ranks=True,
)
def by_frequency(t: Trial) -> Outcome:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(12, 5, scale_grad_by_freq=True)
            self.head = nn.Linear(5, CLASSES)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.words(tokens).mean(1))

    return t.train(seeded(Counted, t.dtype), documents(t.dtype), cross_entropy, sgd)


# Losses

LOSSES = "Losses, more"
SIGNS = "signs"


def signs(dtype: torch.dtype, width: int = 4) -> TensorDataset:
    return TensorDataset(
        numbers(SAMPLES, FEATURES, dtype=dtype), (2 * integers(2, SAMPLES, width) - 1).to(dtype)
    )


def positive(dtype: torch.dtype) -> TensorDataset:
    return TensorDataset(numbers(SAMPLES, FEATURES, dtype=dtype), integers(5, SAMPLES, 4).to(dtype))


def kinds(dtype: torch.dtype) -> TensorDataset:
    wanted = integers(5, SAMPLES, 4) - 1
    return TensorDataset(numbers(SAMPLES, FEATURES, dtype=dtype), wanted)


CRITERIA: dict[str, tuple[nn.Module, Callable[[torch.dtype], Any]]] = {
    "PoissonNLLLoss": (nn.PoissonNLLLoss(), positive),
    "HuberLoss": (nn.HuberLoss(delta=0.4), signs),
    "SoftMarginLoss": (nn.SoftMarginLoss(), signs),
    "HingeEmbeddingLoss": (nn.HingeEmbeddingLoss(), signs),
    "MultiLabelSoftMarginLoss": (nn.MultiLabelSoftMarginLoss(), lambda d: positive(d)),
    "MultiLabelMarginLoss": (nn.MultiLabelMarginLoss(), kinds),
    "L1Loss": (nn.L1Loss(), signs),
}


def criterion_case(loss: nn.Module, data: Callable[[torch.dtype], Any]) -> Any:
    return lambda t: t.train(mlp(t.dtype, out=4), data(t.dtype), loss, sgd, accumulate=2)


for name, (loss, data) in CRITERIA.items():
    case(LOSSES, f"{name} as criterion, accumulation")(criterion_case(loss, data))


def quantile(model: nn.Module, batch: Any) -> Tensor:
    off = batch[1] - model(batch[0])
    levels = torch.tensor([0.1, 0.5, 0.9, 0.99], dtype=off.dtype)
    return torch.maximum(levels * off, (levels - 1) * off).sum(1).mean()


def listwise(model: nn.Module, batch: Any) -> Tensor:
    return -(batch[1].softmax(1) * model(batch[0]).log_softmax(1)).sum(1).mean()


def dice(model: nn.Module, batch: Any) -> Tensor:
    a, b = model(batch[0]).sigmoid(), (batch[1] > 0).to(batch[0].dtype)
    return (1 - (2 * (a * b).sum(1) + 1) / (a.sum(1) + b.sum(1) + 1)).mean()


def distilled(model: nn.Module, batch: Any) -> Tensor:
    own = model(batch[0])
    soft = F.kl_div((own / 2).log_softmax(1), (batch[1] / 2).softmax(1), reduction="batchmean")
    return 0.3 * F.cross_entropy(own, batch[1].argmax(1)) + 4 * 0.7 * soft


def unreduced(model: nn.Module, batch: Any) -> Any:
    each = F.mse_loss(model(batch[0]), batch[1], reduction="none").mean(1)
    weight = batch[0][:, 0].abs() + 0.1
    return (each * weight).sum() / weight.sum(), weight.sum()


def by_sum(model: nn.Module, batch: Any) -> Any:
    return F.mse_loss(model(batch[0]), batch[1], reduction="sum") / len(batch[0])


def gaussian(model: nn.Module, batch: Any) -> Tensor:
    mean, log = model(batch[0]).chunk(2, 1)
    return F.gaussian_nll_loss(mean, batch[1][:, :2], log.exp() + 0.1, full=True)


def in_double(model: nn.Module, batch: Any) -> Tensor:
    return ((model(batch[0]).double() - batch[1].double()) ** 2).mean()


def policy(model: nn.Module, batch: Any) -> Any:
    """PPO's clipped objective with entropy, over steps that were not padding."""
    logits, there = model(batch[0]), batch[0][:, 0] > -0.8
    action, advantage = batch[1].argmax(1), batch[1].sum(1)
    found = torch.distributions.Categorical(logits=logits)
    ratio = (found.log_prob(action) + 1.3).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    each = -gain - 0.01 * found.entropy()
    return (each * there).sum() / there.sum(), there.sum()


FUNCTIONS: dict[str, Any] = {
    "quantile loss of four levels": quantile,
    "listwise ranking within each sample": listwise,
    "dice per sample": dice,
    "distillation: batchmean and cross entropy": distilled,
    "reduction='none' with weights per sample": unreduced,
    "reduction='sum' divided by the samples": by_sum,
    "GaussianNLLLoss of two outputs": gaussian,
    "loss in float64 of any model": in_double,
    "PPO objective over steps that count": policy,
}


def function_case(loss: Any) -> Any:
    def run(t: Trial) -> Outcome:
        model, data = mlp(t.dtype, out=4), TensorDataset(*signs(t.dtype).tensors)
        targets = data.tensors[1] * numbers(SAMPLES, 4, seed=3, dtype=t.dtype)
        return t.train(model, TensorDataset(data.tensors[0], targets), loss, adamw, clip=0.4)

    return run


for name, loss in FUNCTIONS.items():
    case(LOSSES, name, float32=name.startswith(("quant", "PPO")))(function_case(loss))


@case(LOSSES, "DPO: pairs of sentences against a frozen reference", float32=True)
def dpo(t: Trial) -> Outcome:
    model, reference = seeded(BiLstm, t.dtype), seeded(BiLstm, t.dtype, 5).requires_grad_(False)
    chosen, rejected = sentences(t.dtype).tensors[0], integers(11, SAMPLES, 9, seed=4) + 1

    def said(net: nn.Module, tokens: Tensor) -> Tensor:
        each = net(tokens)[:, :-1].log_softmax(2).gather(2, tokens[:, 1:, None])[..., 0]
        return (each * (tokens[:, 1:] != 0)).sum(1)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        won, lost = (said(model, part) - said(reference, part).detach() for part in batch)
        return -F.logsigmoid(0.5 * (won - lost)).mean()

    return t.train(model, TensorDataset(chosen, rejected), loss, adamw)


@case(LOSSES, "CTC weighted by target lengths, zero_infinity, some impossible")
def ctc_weighted(t: Trial) -> Outcome:
    frames, targets = numbers(SAMPLES, 6, FEATURES, dtype=t.dtype), integers(3, SAMPLES, 5) + 1
    lengths, wanted = 2 + integers(5, SAMPLES), 1 + integers(5, SAMPLES, seed=2)
    data = TensorDataset(frames, lengths, targets, wanted)

    def loss(model: nn.Module, batch: Any) -> Any:
        x, lengths, y, wanted = batch
        log = model(x).log_softmax(2).transpose(0, 1)
        total = F.ctc_loss(log, y, lengths, wanted, reduction="sum", zero_infinity=True)
        return total / wanted.sum(), wanted.sum()

    return t.train(mlp(t.dtype, out=4), data, loss, adamw)


# Data

DATA = "Samplers and loaders, more"


@case(DATA, "BatchSampler over a WeightedRandomSampler with a generator")
def weighted_batches(t: Trial) -> Outcome:
    data, generator = classes(t.dtype), torch.Generator().manual_seed(3)
    sampler = WeightedRandomSampler(torch.rand(SAMPLES) + 0.1, 29, generator=generator)
    loader = DataLoader(data, batch_sampler=BatchSampler(sampler, BATCH, False))
    return through(t, loader, drawn(sampler, data, generator=generator))


class ByLength(Sampler[list[int]]):
    """Batches of similar lengths, in another order in each epoch; their sizes differ."""

    def __init__(self, lengths: Tensor, most: int) -> None:
        self.lengths, self.most, self.epoch = lengths, most, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def batches(self) -> list[list[int]]:
        found: list[list[int]] = [[]]
        for i in self.lengths.argsort(stable=True).tolist():
            if (len(found[-1]) + 1) * int(self.lengths[i]) > self.most:
                found.append([])
            found[-1].append(i)
        return [found[i] for i in np.random.RandomState(self.epoch).permutation(len(found))]

    def __len__(self) -> int:
        return len(self.batches())

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches())


@case(DATA, "batches of similar length up to a number of tokens, set_epoch", float32=True)
def length_buckets(t: Trial) -> Outcome:
    data = sentences(t.dtype)
    sampler = ByLength((data.tensors[0] != 0).sum(1), 28)

    def batches(epoch: int) -> Iterator[Any]:
        sampler.set_epoch(epoch)
        for batch in sampler.batches():
            yield default_collate([data[i] for i in batch])

    return through(
        t, DataLoader(data, batch_sampler=sampler), batches, seeded(BiLstm, t.dtype), token_loss,
        adamw, global_batch_size=None,
    )  # fmt: skip


class PerClass(Sampler[list[int]]):
    """Two samples of each class in every batch."""

    def __init__(self, labels: Tensor) -> None:
        self.rows = [(labels == kind).nonzero()[:, 0].tolist() for kind in range(CLASSES)]

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        for i in range(5):
            yield [row[(2 * i + j) % len(row)] for row in self.rows for j in range(2)]


@case(DATA, "a batch sampler of two samples per class")
def per_class(t: Trial) -> Outcome:
    data = classes(t.dtype)
    loader = DataLoader(data, batch_sampler=PerClass(data.tensors[1]))
    return through(t, loader, lambda _: loader, global_batch_size=None)


class Fetched(Dataset[Any]):
    """A dataset that is asked for many samples at once."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> Any:
        return self.data[i]

    def __getitems__(self, numbers: list[int]) -> Any:
        return [self.data[i] for i in numbers]


class Rows(IterableDataset[Any]):
    def __init__(self, data: Any, start: int, end: int) -> None:
        self.data, self.start, self.end = data, start, end

    def __iter__(self) -> Iterator[Any]:
        return (self.data[i] for i in range(self.start, self.end))


def fetched(t: Trial, kind: str) -> Outcome:
    base = classes(t.dtype, 27)
    x, y = base.tensors
    data: Any = {
        "getitems": lambda: Fetched(base),
        "stacked": lambda: StackDataset(x, y),
        "chained": lambda: ChainDataset([Rows(base, 0, 10), Rows(base, 10, 27)]),
        "joined": lambda: Fetched(base) + ConcatDataset([base]),
        "numpy": lambda: Items(27, lambda i: (x[i].numpy(), int(y[i]))),
        "none": lambda: base,
    }[kind]()

    def with_none(items: list[Any]) -> Any:
        a, b = default_collate(items)
        return a, None, b

    given = DataLoader(data, batch_size=BATCH, collate_fn=with_none if kind == "none" else None)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[-1])

    return through(t, given, lambda _: given, loss=loss, optimizer=adamw)


for name, text in {
    "getitems": "a dataset with __getitems__",
    "stacked": "StackDataset",
    "chained": "ChainDataset of two streams",
    "joined": "the sum of two datasets",
    "numpy": "samples of numpy arrays and Python numbers",
    "none": "a batch with None in the middle",
}.items():
    case(DATA, text)(functools.partial(lambda kind, t: fetched(t, kind), name))


@case(DATA, "global batch of 1: fewer samples than ranks", refused_on_ranks=True)
def one_by_one(t: Trial) -> Outcome:
    data = classes(t.dtype, 7)
    return t.train(mlp(t.dtype), data, nn.CrossEntropyLoss(), adamw, batch=1, shuffle=True)


@case(DATA, "a dataset of one sample, three epochs")
def one_sample(t: Trial) -> Outcome:
    return t.train(mlp(t.dtype), classes(t.dtype, 1), nn.CrossEntropyLoss(), sgd, epochs=3)


@case(DATA, "bags of words as sparse tensors")
def sparse_inputs(t: Trial) -> Outcome:
    x, y = numbers(SAMPLES, FEATURES, dtype=t.dtype), integers(CLASSES, SAMPLES)
    x = x * (x > 0.5)

    def collate(items: list[Any]) -> Any:
        a, b = default_collate(items)
        return a.to_sparse(), b

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(x, self.weight) + self.bias

    model, data = seeded(Linear, t.dtype), TensorDataset(x, y)
    return t.train(model, data, nn.CrossEntropyLoss(), sgd, collate=collate)


@case(DATA, "keyword batches: collate to a dict, the model called with **inputs")
def keywords(t: Trial) -> Outcome:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(t.dtype)

        def forward(self, *, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
            return {"logits": self.net(x) * scale[:, None]}

    base = classes(t.dtype)
    scale = numbers(SAMPLES, seed=2, dtype=t.dtype)
    data = Items(SAMPLES, lambda i: {"x": base[i][0], "scale": scale[i], "y": base[i][1]})

    def loss(model: nn.Module, batch: Any) -> Tensor:
        batch = dict(batch)
        target = batch.pop("y")
        return F.cross_entropy(model(**batch)["logits"], target)

    return t.train(seeded(Named, t.dtype), data, loss, adamw, shuffle=True)


# Optimizers and schedules

OPTIMIZERS = "Optimizers, more"


class Lookahead(optim.Optimizer):
    """An optimizer around another one, with slow weights."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        self.fast = optim.SGD(params, lr=0.1)
        super().__init__(params, {"lr": 0.1})
        self.param_groups = self.fast.param_groups
        self.count = 0
        self.slow = [p.detach().clone() for p in params]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.fast.step()
        self.count += 1
        if self.count % 3 == 0:
            for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
                slow.lerp_(p, 0.5)
                p.copy_(slow)


class Lars(optim.Optimizer):
    """A rate per layer by the norms of weight and gradient, gradients centred."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                grad = p.grad - p.grad.mean() if p.ndim > 1 else p.grad
                trust = 0.1 * p.norm() / (grad.norm() + 1e-3)
                p.sub_(group["lr"] * trust * grad)


MORE_OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "Lookahead around SGD": Lookahead,
    "LARS with centred gradients": Lars,
    "Adam, maximize, single tensors": lambda p: optim.Adam(p, 1e-3, maximize=True, foreach=False),
    "SGD, fused": lambda p: optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "Adagrad, fused, initial value": lambda p: optim.Adagrad(
        p, 0.05, initial_accumulator_value=0.1, fused=True
    ),
    "NAdam, decoupled decay": lambda p: optim.NAdam(
        p, 1e-2, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "RAdam, decoupled decay, foreach": lambda p: optim.RAdam(
        p, 1e-2, weight_decay=0.1, decoupled_weight_decay=True, foreach=True
    ),
    "RMSprop, decay, single tensors": lambda p: optim.RMSprop(
        p, 1e-3, weight_decay=0.1, foreach=False
    ),
    "Rprop, single tensors": lambda p: optim.Rprop(p, 1e-3, etas=(0.4, 1.3), foreach=False),
    "AdamW, betas as tensors of a group without decay": lambda p: optim.AdamW(
        [{"params": list(p), "weight_decay": 0.0}], lr=1e-2, betas=(0.8, 0.95)
    ),
}


def optimizer_case(make: Any) -> Any:
    def run(t: Trial) -> Outcome:
        return t.train(
            mlp(t.dtype), classes(t.dtype, 25), nn.CrossEntropyLoss(), make, epochs=3, accumulate=2
        )

    return run


for name, make in MORE_OPTIMIZERS.items():
    case(OPTIMIZERS, name, float32="fused" in name)(optimizer_case(make))

MORE_SCHEDULES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "PolynomialLR, by step": (lambda o: rates.PolynomialLR(o, 12, 2.0), False),
    "MultiplicativeLR, by epoch": (lambda o: rates.MultiplicativeLR(o, lambda e: 0.7), True),
    "StepLR, by step": (lambda o: rates.StepLR(o, 3, 0.5), False),
    "CosineAnnealingLR shorter than the run": (lambda o: rates.CosineAnnealingLR(o, 5), False),
    "ConstantLR, by epoch": (lambda o: rates.ConstantLR(o, 0.2, 2), True),
    "LambdaLR, one factor per group": (
        lambda o: rates.LambdaLR(o, [lambda s: 0.9**s]),
        False,
    ),
    "SWALR, by epoch": (lambda o: torch.optim.swa_utils.SWALR(o, 0.01, 2), True),
}


def schedule_case(build: Any, by_epoch: bool) -> Any:
    def run(t: Trial) -> Outcome:
        return t.train(
            mlp(t.dtype), classes(t.dtype, 25), nn.CrossEntropyLoss(), sgd, scheduler=build,
            by_epoch=by_epoch, epochs=4,
        )  # fmt: skip

    return run


for name, (build, by_epoch) in MORE_SCHEDULES.items():
    case(OPTIMIZERS, name)(schedule_case(build, by_epoch))

# Loops

LOOPS = "Loops, more"


class Kept(nn.Module):
    """BatchNorm frozen as in many detection models: by a train() that puts it back."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.net = nn.BatchNorm1d(FEATURES), plain_mlp(CLASSES)

    def train(self, mode: bool = True) -> Kept:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.norm(x))


@case(LOOPS, "BatchNorm that the model's own train() keeps in eval mode, never called by the user")
def kept_norm(t: Trial) -> Outcome:
    model = seeded(Kept, t.dtype)
    if t.by_hand:
        model.train()
    return t.train(model, classes(t.dtype, 25), nn.CrossEntropyLoss(), adamw)


@case(LOOPS, "clipping by value of the config, accumulation with a remainder", float32=True)
def clip_value(t: Trial) -> Outcome:
    model, data = mlp(t.dtype), classes(t.dtype, 21)
    if t.by_hand:
        made = adamw(model.parameters())
        made.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(model.parameters(), 0.02))
        return t.train(model, data, nn.CrossEntropyLoss(), lambda _: made, accumulate=3)
    return t.train(model, data, nn.CrossEntropyLoss(), adamw, accumulate=3, max_grad_value=0.02)


@case(LOOPS, "layers frozen, unfrozen and frozen again by epoch, momentum")
def thawed(t: Trial) -> Outcome:
    model, data = mlp(t.dtype), classes(t.dtype)

    def turn(epoch: int) -> None:
        model[0].requires_grad_(epoch % 2 == 1)

    class Thaw(Callback):
        def on_epoch_begin(self, run: Any, epoch: int) -> None:
            turn(epoch)

    made = sgd(model.parameters())
    turn(0)
    if t.by_hand:
        loader = DataLoader(data, batch_size=BATCH)
        return plain_loop(
            model, lambda _: loader, cross_entropy, made, epochs=4,
            after_epoch=lambda epoch: turn(epoch + 1),
        )  # fmt: skip
    manager = t.manager(global_batch_size=BATCH, epochs=4)
    result = manager.fit(model, data, loss_fn=cross_entropy, optimizer=made, callbacks=[Thaw()])
    return outcome(model, **history(result))


@case(LOOPS, "AveragedModel kept by a callback and returned at the end")
def averaged(t: Trial) -> Outcome:
    model, data = mlp(t.dtype), classes(t.dtype)
    mean = AveragedModel(model, avg_fn=lambda a, b, n: 0.8 * a + 0.2 * b)

    class Average(Callback):
        def on_step_end(self, run: Any, result: Any) -> None:
            mean.update_parameters(model)

    if t.by_hand:
        made = adamw(model.parameters())
        made.register_step_post_hook(lambda *_: mean.update_parameters(model))
        t.train(model, data, nn.CrossEntropyLoss(), lambda _: made)
    else:
        t.train(model, data, nn.CrossEntropyLoss(), adamw, fit={"callbacks": [Average()]})
    return outcome(model, mean)


@case(LOOPS, "a weight in the loss that grows with the epoch (KL annealing)")
def annealed(t: Trial) -> Outcome:
    model, data, beta = mlp(t.dtype, out=1), values(t.dtype), {"now": 0.0}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        found = model(batch[0])
        return F.mse_loss(found, batch[1]) + beta["now"] * (found**2).mean()

    class Anneal(Callback):
        def on_epoch_begin(self, run: Any, epoch: int) -> None:
            beta["now"] = epoch / 3

    if t.by_hand:
        loader = DataLoader(data, batch_size=BATCH)
        return plain_loop(
            model, lambda _: loader, loss, sgd(model.parameters()), epochs=3,
            after_epoch=lambda epoch: beta.update(now=(epoch + 1) / 3),
        )  # fmt: skip
    return t.train(model, data, loss, sgd, epochs=3, fit={"callbacks": [Anneal()]})


@case(LOOPS, "fit twice: the same model on longer samples afterwards")
def twice_fitted(t: Trial) -> Outcome:
    model = seeded(lambda: nn.Sequential(nn.AdaptiveAvgPool1d(4), nn.Linear(4, 1)), t.dtype)
    stages = [numbers(20, 3, width, seed=width, dtype=t.dtype) for width in (6, 9)]
    for x in stages:
        t.train(model, TensorDataset(x, x.mean(2, keepdim=True)), squares, sgd)
    return outcome(model)


@case(LOOPS, "three folds, a manager and a model each")
def folds(t: Trial) -> Outcome:
    models, (x, y) = [mlp(t.dtype) for _ in range(3)], classes(t.dtype, 27).tensors
    for i, model in enumerate(models):
        keep = torch.arange(27) % 3 != i
        t.train(model, TensorDataset(x[keep], y[keep]), nn.CrossEntropyLoss(), adamw)
    return outcome(*models)


@case(LOOPS, "sharpness-aware minimization by own backward: two gradients per step")
def sam(t: Trial) -> Outcome:
    model, data = mlp(t.dtype), classes(t.dtype, 25)
    made = sgd(model.parameters())

    def climb(sign: float, steps: list[Tensor]) -> None:
        with torch.no_grad():
            for p, e in zip(model.parameters(), steps, strict=True):
                p.add_(e, alpha=sign)

    def ascent() -> list[Tensor]:
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        return [0.05 * p.grad / norm for p in model.parameters()]

    if t.by_hand:
        for _ in range(2):
            for batch in DataLoader(data, batch_size=BATCH):
                made.zero_grad()
                cross_entropy(model, batch).backward()
                steps = ascent()
                climb(1, steps)
                made.zero_grad()
                cross_entropy(model, batch).backward()
                climb(-1, steps)
                made.step()
        return outcome(model)
    manager = t.manager(global_batch_size=BATCH)
    trainer = manager.prepare(model, made, dataset=data)
    loader = manager.train_loader
    for _ in range(2):
        for batch in loader:
            with trainer.step(batch):
                made.zero_grad()
                trainer.backward(cross_entropy(model, batch))
                steps = ascent()
                climb(1, steps)
                made.zero_grad()
                trainer.backward(cross_entropy(model, batch))
                climb(-1, steps)
                made.step()
    manager.finish()
    return outcome(model)


@case(LOOPS, "own loop: a second model is trained by its own manager between the steps")
def interleaved(t: Trial) -> Outcome:
    pair, data = [mlp(t.dtype), seeded(plain_mlp, t.dtype)], [classes(t.dtype), values(t.dtype)]
    losses = [cross_entropy, squares]
    if t.by_hand:
        made = [sgd(model.parameters()) for model in pair]
        for _ in range(2):
            for batches in zip(*(DataLoader(d, batch_size=BATCH) for d in data), strict=True):
                for model, batch, loss, optimizer in zip(pair, batches, losses, made, strict=True):
                    optimizer.zero_grad()
                    loss(model, batch).backward()
                    optimizer.step()
        return outcome(*pair)
    managers = [t.manager(global_batch_size=BATCH, run_name=f"run{i}") for i in range(2)]
    loaders = [
        manager.setup_training(model, d, loss_fn=loss, optimizer=sgd)[1]
        for manager, model, d, loss in zip(managers, pair, data, losses, strict=True)
    ]
    for _ in range(2):
        for batches in zip(*loaders, strict=True):
            for manager, batch in zip(managers, batches, strict=True):
                manager.trainer.train_step(batch)
    for manager in managers:
        manager.finish()
    return outcome(*pair)


@case(LOOPS, "own loop: losses printed with .item(), a step skipped by a rule of all ranks")
def ruled(t: Trial) -> Outcome:
    model, data = mlp(t.dtype), classes(t.dtype)
    if t.by_hand:
        made = sgd(model.parameters())
        for _ in range(2):
            for number, batch in enumerate(DataLoader(data, batch_size=BATCH)):
                if number == 1:
                    continue
                made.zero_grad()
                cross_entropy(model, batch).backward()
                made.step()
        return outcome(model)
    manager = t.manager(global_batch_size=BATCH)
    _, loader, _ = manager.setup_training(model, data, loss_fn=cross_entropy, optimizer=sgd)
    for _ in range(2):
        for number, batch in enumerate(loader):
            if number != 1:
                manager.trainer.train_step(batch).loss.item()
    manager.finish()
    return outcome(model)
