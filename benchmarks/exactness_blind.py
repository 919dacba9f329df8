"""Trainings written from the documentation and the losses' code, blind to the other cases."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
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
    values,
)
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
)

from multi_gpu_training import Callback

GROUP = "Blind set"
here = functools.partial(case, GROUP)


def in_order(data: Any, epochs: int = 2, batch: int = BATCH) -> Iterator[tuple[int, Any]]:
    """What a DataLoader without shuffling gives, epoch after epoch."""
    for epoch in range(epochs):
        for x in DataLoader(data, batch_size=batch):
            yield epoch, x


def step_by_hand(model: nn.Module, optimizer: Any, loss: Tensor, clip: float | None = None) -> None:
    optimizer.zero_grad()
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


# Gradients and hooks


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return -ctx.strength * grads[0], None


class Adversarial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 8)
        self.label, self.domain = nn.Linear(8, CLASSES), nn.Linear(8, 2)
        self.strength = 0.1

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.label(h), self.domain(Reverse.apply(h, self.strength))


@here("gradient reversal whose strength a callback raises each epoch")
def _(trial: Trial) -> Outcome:
    data = TensorDataset(*classes(trial.dtype).tensors, integers(2, SAMPLES, seed=3))
    model = seeded(Adversarial, trial.dtype)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        label, domain = model(batch[0])
        return F.cross_entropy(label, batch[1]) + F.cross_entropy(domain, batch[2])

    if trial.by_hand:

        def harder(epoch: int) -> None:
            model.strength += 0.3

        return plain_loop(
            model,
            lambda e: DataLoader(data, batch_size=BATCH),
            loss,
            sgd(model.parameters()),
            after_epoch=harder,
        )

    class Harder(Callback):
        def on_epoch_end(self, run: Any, epoch: int, metrics: Any) -> None:
            model.strength += 0.3

    manager = trial.manager(global_batch_size=BATCH)
    result = manager.fit(model, data, loss_fn=loss, optimizer=sgd, callbacks=[Harder()])
    return outcome(model, **history(result))


@here("a full backward hook that clips what goes into a layer per sample")
def _(trial: Trial) -> Outcome:
    model = mlp(trial.dtype)

    def hook(module: nn.Module, grad_in: Any, grad_out: Any) -> Any:
        # Gradients per sample depend on the batch size through the mean: scale-free, so normalise.
        g = grad_in[0]
        return (g * torch.sign(g.sum(1, keepdim=True)),)

    model[2].register_full_backward_hook(hook)
    return trial.train(model, classes(trial.dtype), cross_entropy, adamw)


@here("the optimizer steps in hooks that run inside backward")
def _(trial: Trial) -> Outcome:
    model = mlp(trial.dtype)
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

    def fused(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(fused)
    return trial.train(
        model,
        classes(trial.dtype),
        cross_entropy,
        lambda ps: torch.optim.SGD(ps, lr=0.0),
    )


@here("gradient centralisation in the optimizer's pre hook, weights clamped in its post hook")
def _(trial: Trial) -> Outcome:
    model = mlp(trial.dtype)

    def make(parameters: Any) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

        def centre(opt: Any, args: Any, kwargs: Any) -> None:
            for p in model.parameters():
                if p.grad is not None and p.ndim > 1:
                    p.grad.sub_(p.grad.mean(1, keepdim=True))

        def clamp(opt: Any, args: Any, kwargs: Any) -> None:
            with torch.no_grad():
                for p in model.parameters():
                    p.clamp_(-0.5, 0.5)

        optimizer.register_step_pre_hook(centre)
        optimizer.register_step_post_hook(clamp)
        return optimizer

    return trial.train(model, classes(trial.dtype), cross_entropy, make)


@here("a callback that changes the gradients in on_optimizer, then clipping")
def _(trial: Trial) -> Outcome:
    model = mlp(trial.dtype)
    data = classes(trial.dtype)

    def decay() -> None:
        for p in model.parameters():
            p.grad.add_(p.detach(), alpha=0.05)

    if trial.by_hand:
        optimizer = adamw(model.parameters())
        for _, batch in in_order(data):
            optimizer.zero_grad()
            cross_entropy(model, batch).backward()
            decay()
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
        return outcome(model)

    class Decay(Callback):
        def on_optimizer(self, run: Any) -> None:
            decay()

    trial.manager(global_batch_size=BATCH, max_grad_norm=0.3).fit(
        model, data, loss_fn=cross_entropy, optimizer=adamw, callbacks=[Decay()]
    )
    return outcome(model)


@here("FixMatch: pseudo labels under no_grad, masked by confidence, mean over all")
def _(trial: Trial) -> Outcome:
    x, y = classes(trial.dtype).tensors
    data = TensorDataset(x, x + 0.1 * numbers(SAMPLES, FEATURES, seed=4).to(trial.dtype), y)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        weak, strong, label = batch
        with torch.no_grad():
            model.eval()
            sure, guess = model(weak).softmax(1).max(1)
            model.train()
        each = F.cross_entropy(model(strong), guess, reduction="none") * (sure > 0.4)
        return F.cross_entropy(model(weak), label) + each.mean()

    return trial.train(mlp(trial.dtype), data, loss, adamw, epochs=3)


# Losses


@here("a weight that carries a gradient", refusal=True)
def _(trial: Trial) -> Outcome:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.gate = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.score(x), self.gate(x).sigmoid()[:, 0]

    def loss(model: nn.Module, batch: Any) -> Any:
        scores, gate = model(batch[0])
        each = F.cross_entropy(scores, batch[1], reduction="none")
        return (gate * each).sum() / gate.sum(), gate.sum()

    return trial.train(seeded(Gated, trial.dtype), classes(trial.dtype), loss, sgd)


class Focal(nn.CrossEntropyLoss):
    """Derived from torch's criterion for its arguments; the mean is over samples."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        each = F.cross_entropy(input, target, weight=self.weight, reduction="none")
        right = input.softmax(1).gather(1, target[:, None])[:, 0]
        return ((1 - right).square() * each).mean()


@here("focal loss derived from nn.CrossEntropyLoss, with class weights")
def _(trial: Trial) -> Outcome:
    weight = torch.tensor([0.2, 1.0, 5.0], dtype=trial.dtype)
    return trial.train(mlp(trial.dtype), classes(trial.dtype), Focal(weight), sgd)


class Ignoring(nn.Module):
    """The user's own criterion around torch's, which ignores a label."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.entropy = nn.CrossEntropyLoss(**how)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.entropy(output / 0.7, target)


def divided(criterion: nn.Module, divisor: Any) -> Any:
    """By hand: the criterion, and what its mean is divided by."""
    return lambda model, b: (criterion(model(b[0]), b[1]), float(divisor(b[1])))


@here("own criterion around nn.CrossEntropyLoss(ignore_index=0)")
def _(trial: Trial) -> Outcome:
    ours = Ignoring(ignore_index=0)
    by_hand = divided(ours, lambda y: (y != 0).sum())
    return trial.train(mlp(trial.dtype), classes(trial.dtype), by_hand, sgd, ours=ours)


@here("own criterion around nn.CrossEntropyLoss with class weights, accumulation")
def _(trial: Trial) -> Outcome:
    weight = torch.tensor([0.2, 1.0, 5.0], dtype=trial.dtype)
    ours = Ignoring(weight=weight)
    by_hand = divided(ours, lambda y: weight[y].sum())
    return trial.train(
        mlp(trial.dtype), classes(trial.dtype), by_hand, sgd, ours=ours, accumulate=2
    )


class Warmer(nn.CrossEntropyLoss):
    """Derived from torch's criterion, whose mean it keeps."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input / 2, target)


@here("own criterion derived from nn.CrossEntropyLoss that calls it, with class weights")
def _(trial: Trial) -> Outcome:
    weight = torch.tensor([0.2, 1.0, 5.0], dtype=trial.dtype)
    ours = Warmer(weight)
    by_hand = divided(ours, lambda y: weight[y].sum())
    return trial.train(mlp(trial.dtype), classes(trial.dtype), by_hand, sgd, ours=ours)


@here("AdaptiveLogSoftmaxWithLoss as a part of the model")
def _(trial: Trial) -> Outcome:
    class Adaptive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(FEATURES, 8)
            self.head = nn.AdaptiveLogSoftmaxWithLoss(8, 20, [4, 10])

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(x)), y).loss

    data = TensorDataset(classes(trial.dtype).tensors[0], integers(20, SAMPLES))
    return trial.train(
        seeded(Adaptive, trial.dtype),
        data,
        lambda m, b: m(*b),
        adamw,
        find_unused_parameters=True,
    )


@here("a loss that returns (loss, {metrics}), as in Lightning", refusal=True)
def _(trial: Trial) -> Outcome:
    def loss(model: nn.Module, batch: Any) -> Any:
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]), {"accuracy": (out.argmax(1) == batch[1]).double()}

    if trial.by_hand:
        return Outcome({})
    return trial.train(mlp(trial.dtype), classes(trial.dtype), loss, sgd)


@here("a loss that returns (loss, outputs), as in a Hugging Face Trainer", refusal=True)
def _(trial: Trial) -> Outcome:
    def loss(model: nn.Module, batch: Any) -> Any:
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]), out

    if trial.by_hand:
        return Outcome({})
    return trial.train(mlp(trial.dtype), classes(trial.dtype), loss, sgd)


@here("a loss that returns a dict of losses", refusal=True)
def _(trial: Trial) -> Outcome:
    def loss(model: nn.Module, batch: Any) -> Any:
        return {"loss": F.cross_entropy(model(batch[0]), batch[1])}

    if trial.by_hand:
        return Outcome({})
    return trial.train(mlp(trial.dtype), classes(trial.dtype), loss, sgd)


@here("weights of both signs, all of one batch below zero")
def _(trial: Trial) -> Outcome:
    sign = numbers(SAMPLES, seed=12).sign().to(trial.dtype)
    sign[8:16] = -1
    data = TensorDataset(*classes(trial.dtype).tensors, sign + 0.3)

    def loss(model: nn.Module, batch: Any) -> Any:
        x, y, w = batch
        each = F.cross_entropy(model(x), y, reduction="none")
        return (each * w).sum() / w.sum(), w.sum()

    return trial.train(mlp(trial.dtype), data, loss, adamw, accumulate=2)


@here("a whole step whose weights are zero, then AdamW moves by its momentum")
def _(trial: Trial) -> Outcome:
    x, y = classes(trial.dtype).tensors
    keep = torch.ones(SAMPLES, dtype=trial.dtype)
    keep[8:16] = 0
    keep[0], keep[3] = 0, 0

    def loss(model: nn.Module, batch: Any) -> Any:
        x, y, k = batch
        each = F.cross_entropy(model(x), y, reduction="none") * k
        return each.sum() / k.sum().clamp(min=1), k.sum()

    return trial.train(mlp(trial.dtype), TensorDataset(x, y, keep), loss, adamw, epochs=3)


@here("weights as numpy numbers, float16 tensors and one-element tensors")
def _(trial: Trial) -> Outcome:
    x, y = classes(trial.dtype).tensors
    data = TensorDataset(x, y, 1.0 + integers(5, SAMPLES, seed=2))
    kinds = [
        lambda w: w.numpy().sum(),
        lambda w: w.sum().half(),
        lambda w: w.sum().view(1),
        lambda w: int(w.sum()),
    ]

    def loss(model: nn.Module, batch: Any) -> Any:
        x, y, w = batch
        each = F.cross_entropy(model(x), y, reduction="none")
        kind = kinds[int(w.sum()) % 4]
        return (each * w).sum() / w.sum(), kind(w)

    return trial.train(mlp(trial.dtype), data, loss, sgd, accumulate=2)


@here("L1 penalty on all weights in the loss, beside a token weight")
def _(trial: Trial) -> Outcome:
    data = TensorDataset(
        numbers(SAMPLES, 5, FEATURES).to(trial.dtype),
        integers(CLASSES, SAMPLES, 5),
        1 + integers(5, SAMPLES, seed=3),
    )

    def loss(model: nn.Module, batch: Any) -> Any:
        x, y, n = batch
        mask = torch.arange(5) < n[:, None]
        each = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
        mean = (each * mask.flatten()).sum() / mask.sum()
        return mean + 1e-2 * sum(p.abs().sum() for p in model.parameters()), mask.sum()

    return trial.train(mlp(trial.dtype), data, loss, adamw, accumulate=2)


# Optimizers


class Muon(torch.optim.Optimizer):
    """Newton-Schulz on matrices, sign steps on the rest, as users write it."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "buffer" not in state:
                    state["buffer"] = torch.zeros_like(p)
                buffer = state["buffer"].mul_(group["momentum"]).add_(p.grad)
                if p.ndim == 2:
                    x = buffer / (buffer.norm() + 1e-7)
                    for _ in range(3):
                        a = x @ x.T
                        x = 1.5 * x - 0.5 * a @ x
                    p.add_(x, alpha=-group["lr"])
                else:
                    p.add_(buffer.sign(), alpha=-0.1 * group["lr"])


class Lars(torch.optim.Optimizer):
    """Rates by the norms of weight and gradient."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    trust = p.norm() / (p.grad.norm() + 1e-6) if p.ndim > 1 else 1.0
                    p.add_(p.grad * trust, alpha=-group["lr"])


@here("Muon as users write it, shuffled")
def _(trial: Trial) -> Outcome:
    return trial.train(
        mlp(trial.dtype), classes(trial.dtype), cross_entropy, Muon, shuffle=True, clip=1.0
    )


@here("torch.optim.Muon and AdamW in one optimizer class of the user")
def _(trial: Trial) -> Outcome:
    class Both(torch.optim.Optimizer):
        def __init__(self, model: nn.Module) -> None:
            matrices = [p for p in model.parameters() if p.ndim == 2]
            others = [p for p in model.parameters() if p.ndim != 2]
            self.parts = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]
            super().__init__([*matrices, *others], {"lr": 0.02})
            self.param_groups = [g for part in self.parts for g in part.param_groups]

        def step(self, closure: Any = None) -> None:
            for part in self.parts:
                part.step()

    model = mlp(trial.dtype)
    return trial.train(
        model,
        classes(trial.dtype),
        cross_entropy,
        lambda ps: Both(model),
        scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    )


@here("an optimizer that has been stepped before the run")
def _(trial: Trial) -> Outcome:
    model = mlp(trial.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, y = classes(trial.dtype).tensors
    for _ in range(3):
        step_by_hand(model, optimizer, F.cross_entropy(model(x), y))
    if trial.by_hand:
        return plain_loop(
            model, lambda e: DataLoader(TensorDataset(x, y), BATCH), cross_entropy, optimizer
        )
    result = trial.manager(global_batch_size=BATCH).fit(
        model, TensorDataset(x, y), loss_fn=cross_entropy, optimizer=optimizer
    )
    return outcome(model, **history(result))


@here("SAM as an optimizer that needs a closure, given to fit", refusal=True)
def _(trial: Trial) -> Outcome:
    class Sam(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})
            self.base = torch.optim.SGD(self.param_groups, lr=0.1)

        def step(self, closure: Any) -> None:
            closure()
            self.base.step()

    if trial.by_hand:
        return Outcome({})
    return trial.train(mlp(trial.dtype), classes(trial.dtype), cross_entropy, Sam)


# Schedules and settings in flight


@here("OneCycleLR, which moves the momentum too")
def _(trial: Trial) -> Outcome:
    return trial.train(
        mlp(trial.dtype),
        classes(trial.dtype),
        cross_entropy,
        lambda ps: torch.optim.AdamW(ps, lr=0.01),
        scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=8),
    )


@here("CosineAnnealingWarmRestarts that the user steps with fractions of epochs, not given to us")
def _(trial: Trial) -> Outcome:
    model, data = mlp(trial.dtype), classes(trial.dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 1, 2)
    if trial.by_hand:
        for i, (_, batch) in enumerate(in_order(data, 3)):
            step_by_hand(model, optimizer, cross_entropy(model, batch))
            schedule.step((i + 1) / 4)
        return outcome(model)
    manager = trial.manager(global_batch_size=BATCH, epochs=3)
    model, loader, _ = manager.setup_training(
        model, data, loss_fn=cross_entropy, optimizer=optimizer
    )
    i = 0
    for _ in range(3):
        for batch in loader:
            manager.trainer.train_step(batch)
            i += 1
            schedule.step(i / 4)
    manager.finish()
    return outcome(model)


@here("ReduceLROnPlateau on the mean training loss, stepped by the user's own loop over epochs")
def _(trial: Trial) -> Outcome:
    model, data = mlp(trial.dtype), classes(trial.dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
    if trial.by_hand:
        for _ in range(5):
            total = 0.0
            for _, batch in in_order(data, 1):
                loss = cross_entropy(model, batch)
                step_by_hand(model, optimizer, loss)
                total += float(loss.detach()) * len(batch[0])
            plateau.step(total / SAMPLES)
        return outcome(model, rate=optimizer.param_groups[0]["lr"])
    manager = trial.manager(global_batch_size=BATCH, epochs=5)
    model, loader, _ = manager.setup_training(
        model, data, loss_fn=cross_entropy, optimizer=optimizer
    )
    for epoch in range(5):
        plateau.step(manager.train_epoch(loader, epoch)["loss"])
    rate = manager.optimizer.param_groups[0]["lr"]
    manager.finish()
    return outcome(model, rate=rate)


@here("a callback changes weight decay, betas and one group's rate between epochs, with cosine")
def _(trial: Trial) -> Outcome:
    model, data = mlp(trial.dtype), classes(trial.dtype)
    halves = [[*model[0].parameters()], [*model[2].parameters()]]
    optimizer = torch.optim.AdamW([{"params": h} for h in halves], lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda s: 1.0, lambda s: 0.9**s])

    def change(optimizer: Any, epoch: int) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.2
        optimizer.param_groups[1]["betas"] = (0.8, 0.9)
        optimizer.param_groups[1]["eps"] = 1e-4

    if trial.by_hand:
        return plain_loop(
            model,
            lambda e: DataLoader(data, BATCH),
            cross_entropy,
            optimizer,
            epochs=3,
            scheduler=schedule,
            after_epoch=lambda e: change(optimizer, e),
        )

    class Change(Callback):
        def on_epoch_end(self, run: Any, epoch: int, metrics: Any) -> None:
            change(run.optimizer, epoch)

    result = trial.manager(global_batch_size=BATCH, epochs=3).fit(
        model,
        data,
        loss_fn=cross_entropy,
        optimizer=optimizer,
        scheduler=schedule,
        callbacks=[Change()],
    )
    return outcome(model, **history(result))


@here("two halves trained in turn: a callback switches requires_grad each step")
def _(trial: Trial) -> Outcome:
    model, data = mlp(trial.dtype), classes(trial.dtype)

    def turn(step: int) -> None:
        model[0].requires_grad_(step % 2 == 0)
        model[2].requires_grad_(step % 2 == 1)

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if trial.by_hand:
        for i, (_, batch) in enumerate(in_order(data)):
            turn(i)
            step_by_hand(model, optimizer, cross_entropy(model, batch), 0.3)
        return outcome(model)

    class Turn(Callback):
        def on_step_begin(self, run: Any, step: int) -> None:
            turn(run.step)

    trial.manager(global_batch_size=BATCH, max_grad_norm=0.3).fit(
        model, data, loss_fn=cross_entropy, optimizer=optimizer, callbacks=[Turn()]
    )
    return outcome(model)


@here("a head replaced between epochs, its parameters added as a group")
def _(trial: Trial) -> Outcome:
    model, data = mlp(trial.dtype), classes(trial.dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def replace(optimizer: Any) -> None:
        torch.manual_seed(77)
        model[2] = nn.Linear(12, CLASSES).to(trial.dtype)
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.03})

    if trial.by_hand:

        def after(epoch: int) -> None:
            if epoch == 0:
                replace(optimizer)

        return plain_loop(
            model,
            lambda e: DataLoader(data, BATCH),
            cross_entropy,
            optimizer,
            epochs=3,
            after_epoch=after,
        )

    class Replace(Callback):
        def on_epoch_end(self, run: Any, epoch: int, metrics: Any) -> None:
            if epoch == 0:
                replace(run.optimizer)

    result = trial.manager(global_batch_size=BATCH, epochs=3).fit(
        model, data, loss_fn=cross_entropy, optimizer=optimizer, callbacks=[Replace()]
    )
    return outcome(model, **history(result))


@here("weights projected to a norm ball in on_step_end, dropout probability set to 0 by a callback")
def _(trial: Trial) -> Outcome:
    model = seeded(
        lambda: nn.Sequential(
            nn.Linear(FEATURES, 12), nn.Dropout(0.5), nn.Tanh(), nn.Linear(12, CLASSES)
        ),
        trial.dtype,
    )
    data = classes(trial.dtype)

    def project() -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_((0.7 / p.norm()).clamp(max=1.0))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    if trial.by_hand:
        model[1].p = 0.0
        for _, batch in in_order(data):
            step_by_hand(model, optimizer, cross_entropy(model, batch))
            project()
        return outcome(model)

    class Project(Callback):
        def on_setup(self, run: Any) -> None:
            model[1].p = 0.0

        def on_step_end(self, run: Any, result: Any) -> None:
            project()

    trial.manager(global_batch_size=BATCH).fit(
        model, data, loss_fn=cross_entropy, optimizer=optimizer, callbacks=[Project()]
    )
    return outcome(model)


@here("AveragedModel of torch.optim.swa_utils with SWALR and update_bn at the end")
def _(trial: Trial) -> Outcome:
    from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))

    model, data = seeded(build, trial.dtype), classes(trial.dtype, 24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = AveragedModel(model)
    schedule = SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)

    if trial.by_hand:

        def after(epoch: int) -> None:
            average.update_parameters(model)
            schedule.step()

        plain_loop(
            model,
            lambda e: DataLoader(data, BATCH),
            cross_entropy,
            optimizer,
            epochs=3,
            after_epoch=after,
        )
    else:

        class Swa(Callback):
            def on_epoch_end(self, run: Any, epoch: int, metrics: Any) -> None:
                average.update_parameters(model)
                schedule.step()

        trial.manager(global_batch_size=BATCH, epochs=3, sync_bn=True).fit(
            model, data, loss_fn=cross_entropy, optimizer=optimizer, callbacks=[Swa()]
        )
    update_bn(DataLoader(data, BATCH), average)
    found = outcome(model)
    for n, v in average.module.state_dict().items():
        found.tensors["average." + n] = v.clone()
    return found


@here("EMA with a changing decay through AveragedModel.multi_avg_fn, saved in states")
def _(trial: Trial) -> Outcome:
    from torch.optim.swa_utils import AveragedModel

    model, data = mlp(trial.dtype), classes(trial.dtype)

    def average_of(old: Tensor, new: Tensor, count: Any) -> Tensor:
        decay = min(0.9, (1 + int(count)) / (10 + int(count)))
        return decay * old + (1 - decay) * new

    average = AveragedModel(model, avg_fn=average_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if trial.by_hand:
        for _, batch in in_order(data):
            step_by_hand(model, optimizer, cross_entropy(model, batch))
            average.update_parameters(model)
    else:

        class Ema(Callback):
            def on_step_end(self, run: Any, result: Any) -> None:
                average.update_parameters(run.model)

        trial.manager(global_batch_size=BATCH).fit(
            model,
            data,
            loss_fn=cross_entropy,
            optimizer=optimizer,
            callbacks=[Ema()],
            states={"ema": average},
        )
    found = outcome(model)
    for n, v in average.module.state_dict().items():
        found.tensors["average." + n] = v.clone()
    return found


# Data


class Growing(Dataset[Any]):
    """A curriculum: easy samples first, all of them later."""

    def __init__(self, base: Any, size: int) -> None:
        self.base, self.size = base, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Any:
        return self.base[i]


@here("a dataset that a callback makes longer after each epoch", refusal=True)
def _(trial: Trial) -> Outcome:
    model, data = mlp(trial.dtype), Growing(classes(trial.dtype), 10)

    def grow(epoch: int) -> None:
        data.size = min(SAMPLES, data.size + 8)

    if trial.by_hand:
        return plain_loop(
            model,
            lambda e: DataLoader(data, BATCH),
            cross_entropy,
            sgd(model.parameters()),
            epochs=3,
            after_epoch=grow,
        )

    class Grow(Callback):
        def on_epoch_end(self, run: Any, epoch: int, metrics: Any) -> None:
            grow(epoch)

    result = trial.manager(global_batch_size=BATCH, epochs=3).fit(
        model, data, loss_fn=cross_entropy, optimizer=sgd, callbacks=[Grow()]
    )
    return outcome(model, **history(result))


class Noisy(Dataset[Any]):
    """Labels that a method relabels between epochs."""

    def __init__(self, data: TensorDataset) -> None:
        self.x, self.y = data.tensors[0], data.tensors[1].clone()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


@here("labels corrected between epochs by the model's own predictions, a worker")
def _(trial: Trial) -> Outcome:
    model, data = mlp(trial.dtype), Noisy(classes(trial.dtype))

    def relabel() -> None:
        with torch.no_grad():
            sure, guess = model(data.x).softmax(1).max(1)
        data.y = torch.where(sure > 0.45, guess, data.y)

    if trial.by_hand:
        return plain_loop(
            model,
            lambda e: DataLoader(data, BATCH),
            cross_entropy,
            sgd(model.parameters()),
            epochs=3,
            after_epoch=lambda e: relabel(),
        )

    class Relabel(Callback):
        def on_epoch_end(self, run: Any, epoch: int, metrics: Any) -> None:
            relabel()

    result = trial.manager(global_batch_size=BATCH, epochs=3).fit(
        model,
        DataLoader(data, BATCH, num_workers=1),
        loss_fn=cross_entropy,
        optimizer=sgd,
        callbacks=[Relabel()],
    )
    return outcome(model, **history(result))


@here("labels of a TensorDataset changed in place by a callback after an epoch")
def _(trial: Trial) -> Outcome:
    model, data = mlp(trial.dtype), classes(trial.dtype)

    def relabel() -> None:
        data.tensors[1].copy_((data.tensors[1] + 1) % CLASSES)
        data.tensors[1][::5] = -100  # and some count no more

    def by_hand(model: nn.Module, batch: Any) -> Any:
        return cross_entropy(model, batch), float((batch[1] != -100).sum())

    if trial.by_hand:
        return plain_loop(
            model,
            lambda e: DataLoader(data, BATCH),
            by_hand,
            sgd(model.parameters()),
            epochs=3,
            after_epoch=lambda e: relabel(),
        )

    class Relabel(Callback):
        def on_epoch_end(self, run: Any, epoch: int, metrics: Any) -> None:
            relabel()

    result = trial.manager(global_batch_size=BATCH, epochs=3).fit(
        model, data, loss_fn=nn.CrossEntropyLoss(), optimizer=sgd, callbacks=[Relabel()]
    )
    return outcome(model, **history(result))


@here("a sampler that yields (index, size): multi-scale crops")
def _(trial: Trial) -> Outcome:
    images = numbers(SAMPLES, 1, 8, 8).to(trial.dtype)
    y = integers(CLASSES, SAMPLES)

    class Scales(Dataset[Any]):
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, key: Any) -> Any:
            i, size = key
            return images[i, :, :size, :size], y[i]

    class Pairs(Sampler[Any]):
        def __iter__(self) -> Iterator[Any]:
            for start in range(0, SAMPLES, BATCH):
                size = 6 + start // BATCH % 3
                yield [(i, size) for i in range(start, min(start + BATCH, SAMPLES))]

        def __len__(self) -> int:
            return math.ceil(SAMPLES / BATCH)

    model = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES)
        ),
        trial.dtype,
    )
    loader = DataLoader(Scales(), batch_sampler=Pairs())
    if trial.by_hand:
        return plain_loop(model, lambda e: loader, cross_entropy, sgd(model.parameters()))
    result = trial.manager().fit(model, loader, loss_fn=cross_entropy, optimizer=sgd)
    return outcome(model, **history(result))


@here("a dataset that fetches whole batches (__getitems__) and refuses single items")
def _(trial: Trial) -> Outcome:
    x, y = classes(trial.dtype).tensors

    class Fetching(Dataset[Any]):
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, i: int) -> Any:
            raise NotImplementedError("fetch batches")

        def __getitems__(self, indices: list[int]) -> Any:
            return [(x[i], y[i]) for i in indices]

    model = mlp(trial.dtype)
    loader = DataLoader(Fetching(), BATCH)
    if trial.by_hand:
        return plain_loop(model, lambda e: loader, cross_entropy, sgd(model.parameters()))
    result = trial.manager(global_batch_size=BATCH).fit(
        model, loader, loss_fn=cross_entropy, optimizer=sgd
    )
    return outcome(model, **history(result))


class Rising(Sampler[int]):
    """More samples in every epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return min(SAMPLES, 10 + 8 * self.epoch)


@here("a sampler with more samples in every epoch (curriculum)")
def _(trial: Trial) -> Outcome:
    model, sampler = mlp(trial.dtype), Rising()
    loader = DataLoader(classes(trial.dtype), BATCH, sampler=sampler)
    if trial.by_hand:

        def batches(epoch: int) -> Any:
            sampler.set_epoch(epoch)
            return loader

        return plain_loop(model, batches, cross_entropy, sgd(model.parameters()), epochs=3)
    result = trial.manager(global_batch_size=BATCH, epochs=3).fit(
        model, loader, loss_fn=cross_entropy, optimizer=sgd
    )
    return outcome(model, **history(result))


@here("five crops flattened into the batch by collate, their scores averaged per sample")
def _(trial: Trial) -> Outcome:
    crops, y = numbers(SAMPLES, 5, FEATURES).to(trial.dtype), integers(CLASSES, SAMPLES)
    data = TensorDataset(crops, y)

    def collate(items: list[Any]) -> Any:
        return torch.cat([c for c, _ in items]), torch.stack([label for _, label in items])

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x).view(len(y), 5, -1).mean(1), y)

    model = mlp(trial.dtype)
    if trial.by_hand:
        return plain_loop_counting(
            model, data, loss, sgd(model.parameters()), collate, lambda b: len(b[1])
        )
    return trial.train(model, data, loss, sgd, collate=collate)


def plain_loop_counting(
    model: nn.Module, data: Any, loss: Any, optimizer: Any, collate: Any, count: Any
) -> Outcome:
    """As plain_loop, where the samples of a batch have to be counted by the case."""
    return plain_loop(
        model,
        lambda e: DataLoader(data, BATCH, collate_fn=collate),
        lambda m, b: (loss(m, b), float(count(b))),
        optimizer,
    )


@here("stateful LSTM over contiguous text: states go from batch to batch (TBPTT)")
def _(trial: Trial) -> Outcome:
    lanes, steps, length = 12, 4, 5
    text = integers(15, lanes, steps * length + 1)
    order = [(lane, s) for s in range(steps) for lane in range(lanes)]
    data = Items(
        len(order),
        lambda i: text[order[i][0], order[i][1] * length : (order[i][1] + 1) * length + 1],
    )

    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn = nn.Embedding(15, 6), nn.LSTM(6, 8, batch_first=True)
            self.head = nn.Linear(8, 15)
            self.state: Any = None

        def forward(self, x: Tensor) -> Tensor:
            out, state = self.rnn(self.embed(x), self.state)
            self.state = tuple(s.detach() for s in state)
            return self.head(out)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:])

    return trial.train(seeded(Stateful, trial.dtype), data, loss, sgd, batch=lanes)


# Own loops


@here("a look at next(iter(loader)) before the loop")
def _(trial: Trial) -> Outcome:
    model, data = mlp(trial.dtype), classes(trial.dtype)
    if trial.by_hand:
        optimizer = sgd(model.parameters())
        for _, batch in in_order(data):
            step_by_hand(model, optimizer, cross_entropy(model, batch))
        return outcome(model)
    manager = trial.manager(global_batch_size=BATCH)
    model, loader, _ = manager.setup_training(model, data, loss_fn=cross_entropy, optimizer=sgd)
    next(iter(loader))
    for _ in range(2):
        for batch in loader:
            manager.trainer.train_step(batch)
    manager.finish()
    return outcome(model)


@here("zip of the loader with an endless plain DataLoader of unlabelled samples")
def _(trial: Trial) -> Outcome:
    model, data = mlp(trial.dtype), classes(trial.dtype)
    unlabelled = TensorDataset(numbers(12, FEATURES, seed=21).to(trial.dtype))

    def endless() -> Iterator[Any]:
        while True:
            yield from DataLoader(unlabelled, 4)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        (x, y), (u,) = batch
        p = model(u).softmax(1)
        return F.cross_entropy(model(x), y) - 0.1 * (p * p.log()).sum(1).mean()

    if trial.by_hand:
        optimizer = sgd(model.parameters())
        for _ in range(2):
            for batch in zip(DataLoader(data, BATCH), endless(), strict=False):
                step_by_hand(model, optimizer, loss(model, batch))
        return outcome(model)
    manager = trial.manager(global_batch_size=BATCH)
    model, loader, _ = manager.setup_training(model, data, loss_fn=loss, optimizer=sgd)
    for _ in range(2):
        for batch in zip(loader, endless(), strict=False):
            manager.trainer.train_step(batch)
    manager.finish()
    return outcome(model)


@here(
    "evaluation of the raw model between steps in eval mode, back by model.train()",
    left_out=("0.bias",),
)
def _(trial: Trial) -> Outcome:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))

    model, data = seeded(build, trial.dtype), classes(trial.dtype, 24)
    numbers_: dict[str, float] = {}

    def look(model: nn.Module, i: int) -> None:
        model.eval()
        with torch.no_grad():
            numbers_[f"look {i}"] = float(cross_entropy(model, data.tensors))
        model.train()

    if trial.by_hand:
        optimizer = sgd(model.parameters())
        for i, (_, batch) in enumerate(in_order(data)):
            step_by_hand(model, optimizer, cross_entropy(model, batch))
            look(model, i)
        return outcome(model, **numbers_)
    manager = trial.manager(global_batch_size=BATCH, sync_bn=True)
    model, loader, _ = manager.setup_training(model, data, loss_fn=cross_entropy, optimizer=sgd)
    i = 0
    for _ in range(2):
        for batch in loader:
            manager.trainer.train_step(batch)
            look(model, i)
            i += 1
    manager.finish()
    return outcome(model, **numbers_)


@here("two managers one after the other: a teacher, then a student that learns from it")
def _(trial: Trial) -> Outcome:
    teacher, student = mlp(trial.dtype), mlp(trial.dtype, hidden=4)
    data = classes(trial.dtype)

    def distil(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            soft = teacher(batch[0]).softmax(1)
        return F.cross_entropy(model(batch[0]), soft)

    for model, loss in ((teacher, cross_entropy), (student, distil)):
        if trial.by_hand:
            plain_loop(model, lambda e: DataLoader(data, BATCH), loss, adamw(model.parameters()))
        else:
            trial.manager(global_batch_size=BATCH).fit(model, data, loss_fn=loss, optimizer=adamw)
    return outcome(teacher, student)


# Own backward


@here("SAM in the user's own backward: two gradients per step, batch norm kept")
def _(trial: Trial) -> Outcome:
    model, data = mlp(trial.dtype), classes(trial.dtype)
    optimizer = sgd(model.parameters())

    def climb() -> list[Tensor]:
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        steps = []
        with torch.no_grad():
            for p in model.parameters():
                e = p.grad * (0.1 / norm)
                p.add_(e)
                steps.append(e)
        optimizer.zero_grad()
        return steps

    def back(steps: list[Tensor]) -> None:
        with torch.no_grad():
            for p, e in zip(model.parameters(), steps, strict=True):
                p.sub_(e)

    if trial.by_hand:
        for _, batch in in_order(data):
            optimizer.zero_grad()
            cross_entropy(model, batch).backward()
            steps = climb()
            cross_entropy(model, batch).backward()
            back(steps)
            optimizer.step()
        return outcome(model)
    manager = trial.manager(global_batch_size=BATCH)
    trainer = manager.prepare(model, optimizer, dataset=data)
    for _ in range(2):
        for batch in manager.train_loader:
            with trainer.step(batch) as b:
                trainer.backward(cross_entropy(model, b), optimizer=optimizer)
                steps = climb()
                trainer.backward(cross_entropy(model, b), optimizer=optimizer)
                back(steps)
                optimizer.step()
    manager.finish()
    return outcome(model)


@here("PCGrad: gradients of two tasks are projected off each other")
def _(trial: Trial) -> Outcome:
    x, y = classes(trial.dtype).tensors
    data = TensorDataset(x, y, values(trial.dtype).tensors[1])
    model = mlp(trial.dtype, out=CLASSES + 1)
    optimizer = adamw(model.parameters())

    def tasks(batch: Any) -> list[Tensor]:
        return [
            F.cross_entropy(model(batch[0])[:, 1:], batch[1]),
            F.mse_loss(model(batch[0])[:, :1], batch[2]),
        ]

    def project(a: list[Tensor], b: list[Tensor]) -> None:
        dot = sum((i * j).sum() for i, j in zip(a, b, strict=True))
        if dot < 0:
            square = sum((j * j).sum() for j in b)
            a = [i - dot / square * j for i, j in zip(a, b, strict=True)]
        for p, i, j in zip(model.parameters(), a, b, strict=True):
            p.grad = i + j

    if trial.by_hand:
        for _, batch in in_order(data):
            grads = []
            for loss in tasks(batch):
                optimizer.zero_grad()
                loss.backward()
                grads.append([p.grad.clone() for p in model.parameters()])
            project(*grads)
            optimizer.step()
        return outcome(model)
    manager = trial.manager(global_batch_size=BATCH)
    trainer = manager.prepare(model, optimizer, dataset=data)
    for _ in range(2):
        for batch in manager.train_loader:
            with trainer.step(batch) as b:
                grads = []
                for loss in tasks(b):
                    optimizer.zero_grad()
                    trainer.backward(loss)
                    grads.append([p.grad.clone() for p in model.parameters()])
                project(*grads)
    manager.finish()
    return outcome(model)


@here("autograd.grad for the step, written into .grad by the user's own loop", refusal=True)
def _(trial: Trial) -> Outcome:
    model, data = mlp(trial.dtype), classes(trial.dtype)
    optimizer = sgd(model.parameters())

    def fill(loss: Tensor) -> None:
        for p, g in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            p.grad = g

    if trial.by_hand:
        for _, batch in in_order(data):
            fill(cross_entropy(model, batch))
            optimizer.step()
        return outcome(model)
    manager = trial.manager(global_batch_size=BATCH)
    trainer = manager.prepare(model, optimizer, dataset=data)
    for _ in range(2):
        for batch in manager.train_loader:
            with trainer.step(batch) as b:
                fill(cross_entropy(model, b))
    manager.finish()
    return outcome(model)


@here("encoder and decoder with one optimizer each, one loss, clipping each, step schedules")
def _(trial: Trial) -> Outcome:
    data = TensorDataset(classes(trial.dtype).tensors[0])
    encoder = seeded(lambda: nn.Linear(FEATURES, 3), trial.dtype)
    decoder = seeded(lambda: nn.Linear(3, FEATURES), trial.dtype, 2)
    optimizers = [adamw(encoder.parameters()), sgd(decoder.parameters())]
    schedules = [torch.optim.lr_scheduler.StepLR(o, 3, 0.5) for o in optimizers]

    def loss(batch: Any) -> Tensor:
        x = batch[0]
        return F.mse_loss(decoder(torch.tanh(encoder(x))), x)

    if trial.by_hand:
        for _, batch in in_order(data):
            for o in optimizers:
                o.zero_grad()
            loss(batch).backward()
            for m, o in zip((encoder, decoder), optimizers, strict=True):
                nn.utils.clip_grad_norm_(m.parameters(), 0.1)
                o.step()
            for s in schedules:
                s.step()
        return outcome(encoder, decoder)
    manager = trial.manager(global_batch_size=BATCH, max_grad_norm=0.1)
    trainer = manager.prepare(encoder, decoder, *optimizers, *schedules, dataset=data)
    for _ in range(2):
        for batch in manager.train_loader:
            with trainer.step(batch) as b:
                trainer.backward(loss(b))
            for s in schedules:
                s.step()
    manager.finish()
    return outcome(encoder, decoder)


# Validation


@here(
    "default validation: class weights and an ignored label, several sets, one smaller than ranks"
)
def _(trial: Trial) -> Outcome:
    x, y = classes(trial.dtype).tensors
    y = y.clone()
    y[1::5] = -100
    data, small = TensorDataset(x, y), TensorDataset(x[:2], y[2:4])
    weight = torch.tensor([0.2, 1.0, 5.0], dtype=trial.dtype)
    criterion = nn.CrossEntropyLoss(weight)
    model = mlp(trial.dtype)

    def by_hand(model: nn.Module, batch: Any) -> Any:
        counted = weight[batch[1].clamp(min=0)] * (batch[1] >= 0)
        return criterion(model(batch[0]), batch[1]), float(counted.sum())

    if trial.by_hand:
        found = plain_loop(
            model, lambda e: DataLoader(data, BATCH), by_hand, sgd(model.parameters())
        )
        with torch.no_grad():
            for name, part in (("all", data), ("small", small)):
                out, label = model(part.tensors[0]), part.tensors[1]
                found.numbers[f"{name}/loss"] = float(criterion(out, label))
                keep = label >= 0
                found.numbers[f"{name}/accuracy"] = float(
                    (out.argmax(1) == label)[keep].double().mean()
                )
        return found
    result = trial.manager(global_batch_size=BATCH).fit(
        model, data, {"all": data, "small": small}, loss_fn=criterion, optimizer=sgd
    )
    kept = {k: v for k, v in result.metrics.items() if k.endswith(("/loss", "/accuracy"))}
    return outcome(model, **history(result), **kept)


@here("eval_fn with a weighted metric over a validation DataLoader with a sampler and drop_last")
def _(trial: Trial) -> Outcome:
    model, data = mlp(trial.dtype), classes(trial.dtype)
    loader = DataLoader(
        data,
        4,
        sampler=SubsetRandomSampler(range(3, 22), torch.Generator().manual_seed(2)),
        drop_last=False,
    )

    def eval_fn(model: nn.Module, batch: Any, metrics: Any) -> None:
        x, y = batch
        each = F.cross_entropy(model(x), y, reduction="none")
        metrics.add("loss", each.sum(), len(y))
        metrics.add("hard", (each * (y + 1)).sum(), (y + 1).sum())

    if trial.by_hand:
        found = plain_loop(
            model, lambda e: DataLoader(data, BATCH), cross_entropy, sgd(model.parameters())
        )
        with torch.no_grad():
            x, y = data[list(range(3, 22))]
            each = F.cross_entropy(model(x), y, reduction="none")
            found.numbers["loss"] = float(each.mean())
            found.numbers["hard"] = float((each * (y + 1)).sum() / (y + 1).sum())
        return found
    result = trial.manager(global_batch_size=BATCH).fit(
        model, data, loader, loss_fn=cross_entropy, optimizer=sgd, eval_fn=eval_fn
    )
    kept = {k: result.metrics[k] for k in ("loss", "hard")}
    return outcome(model, **history(result), **kept)


@here("predictions over a stream-like loader with a sampler, and evaluate() after the run")
def _(trial: Trial) -> Outcome:
    model, data = mlp(trial.dtype), classes(trial.dtype)
    some = DataLoader(data, 5, sampler=[4, 4, 17, 2, 25, 0, 9])
    if trial.by_hand:
        found = plain_loop(
            model, lambda e: DataLoader(data, BATCH), cross_entropy, sgd(model.parameters())
        )
        with torch.no_grad():
            x, y = data[[4, 4, 17, 2, 25, 0, 9]]
            found.tensors["predicted"] = model(x)
            found.numbers["after"] = float(F.cross_entropy(model(x), y))
        return found
    manager = trial.manager(global_batch_size=BATCH)
    result = manager.fit(model, data, loss_fn=nn.CrossEntropyLoss(), optimizer=sgd)
    found = outcome(model, **history(result), after=manager.evaluate(some)["loss"])
    found.tensors["predicted"] = manager.predict(some)
    return found


# Models and modules


@here("functional batch norm in the user's own module, sync_bn", refused_on_ranks=True)
def _(trial: Trial) -> Outcome:
    class OwnNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.bias = nn.Parameter(torch.zeros(8))
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("var", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(
                x, self.mean, self.var, self.weight, self.bias, training=self.training
            )

    model = seeded(
        lambda: nn.Sequential(nn.Linear(FEATURES, 8), OwnNorm(), nn.Linear(8, CLASSES)),
        trial.dtype,
    )
    return trial.train(model, classes(trial.dtype, 24), cross_entropy, sgd, sync_bn=True)


@here("a scripted model (torch.jit.script)")
def _(trial: Trial) -> Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.jit.script(mlp(trial.dtype))
    return trial.train(model, classes(trial.dtype), cross_entropy, adamw)


@here("a model traced to an fx graph, BatchNorm in it, sync_bn", left_out=("0.bias",))
def _(trial: Trial) -> Outcome:
    model = seeded(
        lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)),
        trial.dtype,
    )
    return trial.train(
        torch.fx.symbolic_trace(model),
        classes(trial.dtype, 24),
        cross_entropy,
        sgd,
        sync_bn=True,
    )


# Hugging Face


# In exact arithmetic their gradients are zero: a softmax does not see them.
NO_GRADIENT = ("key.bias", "k_proj.bias")


def tiny(kind: str, config: str, **more: Any) -> nn.Module:
    import transformers

    torch.manual_seed(1)
    settings = {
        "vocab_size": 40,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 32,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "classifier_dropout": 0.0,
    }
    made = getattr(transformers, config)(**{**settings, **more})
    return getattr(transformers, kind)(made)


def sentences(samples: int = SAMPLES) -> dict[str, Tensor]:
    length = 3 + integers(8, samples, seed=3)
    mask = (torch.arange(10) < length[:, None]).long()
    return {"input_ids": integers(40, samples, 10), "attention_mask": mask}


def rows(columns: dict[str, Tensor]) -> Items:
    count = len(next(iter(columns.values())))
    return Items(count, lambda i: {name: value[i] for name, value in columns.items()})


def own_loss(weigh: Any = None) -> Any:
    def loss(model: nn.Module, batch: Any) -> Any:
        mean = model(**batch).loss
        return mean if weigh is None else (mean, float(weigh(batch)))

    return loss


def hugging_face(trial: Trial, model: nn.Module, data: Any, weigh: Any = None) -> Outcome:
    """With the model's own loss, and no loss function given to fit."""
    if trial.by_hand:
        optimizer = adamw(model.parameters())
        return plain_loop(model, lambda e: DataLoader(data, BATCH), own_loss(weigh), optimizer)
    result = trial.manager(global_batch_size=BATCH, find_unused_parameters=True).fit(
        model, data, optimizer=adamw
    )
    return outcome(model, **history(result))


@here("BERT for tokens, -100 at padding, no loss function given", left_out=NO_GRADIENT)
def _(trial: Trial) -> Outcome:
    columns = sentences()
    labels = integers(3, SAMPLES, 10, seed=5).masked_fill(columns["attention_mask"] == 0, -100)
    model = tiny("BertForTokenClassification", "BertConfig", num_labels=3).to(trial.dtype)
    return hugging_face(
        trial, model, rows({**columns, "labels": labels}), lambda b: (b["labels"] >= 0).sum()
    )


@here("BERT for sequences with some labels of -100, no loss function given", left_out=NO_GRADIENT)
def _(trial: Trial) -> Outcome:
    columns = sentences()
    labels = integers(3, SAMPLES, seed=5)
    labels[::3] = -100
    model = tiny(
        "BertForSequenceClassification",
        "BertConfig",
        num_labels=3,
        problem_type="single_label_classification",
    ).to(trial.dtype)
    return hugging_face(
        trial, model, rows({**columns, "labels": labels}), lambda b: (b["labels"] >= 0).sum()
    )


@here(
    "BERT for questions, all answers inside, no loss function given",
    left_out=(*NO_GRADIENT, "qa_outputs.bias", "output.LayerNorm.bias"),
)
def _(trial: Trial) -> Outcome:
    model = tiny("BertForQuestionAnswering", "BertConfig").to(trial.dtype)
    where = {
        "start_positions": integers(10, SAMPLES, seed=5),
        "end_positions": integers(10, SAMPLES, seed=6),
    }
    return hugging_face(trial, model, rows({**sentences(), **where}))


@here(
    "BERT for questions, some answers cut off, no loss function given",
    left_out=(*NO_GRADIENT, "qa_outputs.bias", "output.LayerNorm.bias"),
)
def _(trial: Trial) -> Outcome:
    model = tiny("BertForQuestionAnswering", "BertConfig").to(trial.dtype)
    where = {
        "start_positions": integers(14, SAMPLES, seed=5),
        "end_positions": integers(14, SAMPLES, seed=5) % 14,
    }
    data = rows({**sentences(), **where})
    return hugging_face(trial, model, data, lambda b: (b["start_positions"] < 10).sum())


@here(
    "BERT for multiple choice, no loss function given",
    left_out=(*NO_GRADIENT, "classifier.bias"),
)
def _(trial: Trial) -> Outcome:
    model = tiny("BertForMultipleChoice", "BertConfig").to(trial.dtype)
    columns = {
        "input_ids": integers(40, SAMPLES, 3, 10),
        "labels": integers(3, SAMPLES, seed=6),
    }
    return hugging_face(trial, model, rows(columns))


@here("Segformer with ignored pixels (255), no loss function given", left_out=NO_GRADIENT)
def _(trial: Trial) -> Outcome:
    import transformers

    torch.manual_seed(1)
    config = transformers.SegformerConfig(
        num_encoder_blocks=1,
        depths=[1],
        sr_ratios=[1],
        hidden_sizes=[8],
        patch_sizes=[3],
        strides=[2],
        num_attention_heads=[1],
        mlp_ratios=[1],
        decoder_hidden_size=8,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
    )
    model = transformers.SegformerForSemanticSegmentation(config).to(trial.dtype)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0
            module.eval()
            module.train = lambda mode=True, norm=module: norm  # type: ignore[method-assign]
    labels = integers(3, SAMPLES, 8, 8, seed=5)
    labels[integers(2, SAMPLES, seed=9) == 0, :4] = 255
    columns = {"pixel_values": numbers(SAMPLES, 3, 8, 8).to(trial.dtype), "labels": labels}
    return hugging_face(
        trial, model, rows(columns), lambda b: ((b["labels"] >= 0) & (b["labels"] != 255)).sum()
    )


@here("wav2vec 2 with CTC: its loss is a sum over samples by default", refused_on_ranks=True)
def _(trial: Trial) -> Outcome:
    return _speech(trial, "sum")


@here(
    "wav2vec 2 with CTC, ctc_loss_reduction='mean', no loss function given",
    left_out=NO_GRADIENT,
    only="float32",
)
def _(trial: Trial) -> Outcome:
    return _speech(trial, "mean")


def _speech(trial: Trial, reduction: str) -> Outcome:
    model = tiny(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        conv_dim=[8],
        conv_kernel=[10],
        conv_stride=[5],
        num_feat_extract_layers=1,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        feat_extract_norm="layer",
        apply_spec_augment=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
        layerdrop=0.0,
        vocab_size=8,
        ctc_loss_reduction=reduction,
        pad_token_id=0,
    ).to(trial.dtype)
    labels = 1 + integers(7, SAMPLES, 4, seed=5)
    labels[torch.arange(4) >= (1 + integers(4, SAMPLES, seed=6))[:, None]] = -100
    columns = {"input_values": numbers(SAMPLES, 100).to(trial.dtype), "labels": labels}
    return hugging_face(trial, model, rows(columns))


# Resumed in the middle, begun on another number of ranks


def resumed(name: str, run: Any, **how: Any) -> None:
    case(
        "Blind set, resumed",
        name,
        begun_elsewhere=lambda trial: run(trial, begin=True),
        **how,
    )(lambda trial: run(trial, begin=False))


def half(trial: Trial, begin: bool, steps: int = 6, **settings: Any) -> Any:
    return trial.manager(
        **{
            "epochs": 3,
            "global_batch_size": BATCH,
            "run_name": "run",
            "enable_fault_tolerance": True,
            "max_steps": steps if begin else None,
            "resume": None if begin else "auto",
            **settings,
        }
    )


def everything_at_once(trial: Trial, begin: bool) -> Outcome:
    from torch.optim.swa_utils import AveragedModel

    model, data = mlp(trial.dtype), classes(trial.dtype)
    average = AveragedModel(model, avg_fn=lambda old, new, count: 0.8 * old + 0.2 * new)
    optimizer = Muon(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=14)
    if trial.by_hand:
        for _, batch in in_order(data, 3):
            step_by_hand(model, optimizer, cross_entropy(model, batch), 0.5)
            schedule.step()
            average.update_parameters(model)
    else:

        class Ema(Callback):
            def on_step_end(self, run: Any, result: Any) -> None:
                average.update_parameters(run.model)

        half(trial, begin, gradient_accumulation_steps=2, max_grad_norm=0.5).fit(
            model,
            data,
            loss_fn=cross_entropy,
            optimizer=optimizer,
            scheduler=schedule,
            callbacks=[Ema()],
            states={"average": average},
        )
    found = outcome(model)
    for n, v in average.state_dict().items():
        found.tensors["average." + n] = v.clone()
    return found


resumed("Muon, OneCycleLR, an average in states, accumulation, clipping", everything_at_once)


def unfrozen_after_an_epoch(trial: Trial, begin: bool) -> Outcome:
    model, data = mlp(trial.dtype), classes(trial.dtype)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)

    def unfreeze(optimizer: Any, epoch: int) -> None:
        if epoch == 0:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.02})

    if trial.by_hand:
        return plain_loop(
            model,
            lambda e: DataLoader(data, BATCH),
            cross_entropy,
            optimizer,
            epochs=3,
            after_epoch=lambda e: unfreeze(optimizer, e),
        )

    class Unfreeze(Callback):
        def on_epoch_end(self, run: Any, epoch: int, metrics: Any) -> None:
            unfreeze(run.optimizer, epoch)

    result = half(trial, begin).fit(
        model, data, loss_fn=cross_entropy, optimizer=optimizer, callbacks=[Unfreeze()]
    )
    return outcome(model, **({} if begin else history(result)))


resumed(
    "a layer unfrozen after the first epoch, by add_param_group",
    unfrozen_after_an_epoch,
    refusal=True,
)


def unfrozen_in_the_group(trial: Trial, begin: bool) -> Outcome:
    model, data = mlp(trial.dtype), classes(trial.dtype)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def unfreeze(epoch: int) -> None:
        model[0].requires_grad_(True)

    if trial.by_hand:
        return plain_loop(
            model,
            lambda e: DataLoader(data, BATCH),
            cross_entropy,
            optimizer,
            epochs=3,
            after_epoch=unfreeze,
        )

    class Unfreeze(Callback):
        def on_epoch_end(self, run: Any, epoch: int, metrics: Any) -> None:
            unfreeze(epoch)

    result = half(trial, begin).fit(
        model, data, loss_fn=cross_entropy, optimizer=optimizer, callbacks=[Unfreeze()]
    )
    return outcome(model, **({} if begin else history(result)))


resumed("a layer unfrozen after the first epoch, always in the optimizer", unfrozen_in_the_group)


def settings_changed(trial: Trial, begin: bool) -> Outcome:
    model, data = mlp(trial.dtype), classes(trial.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def change(optimizer: Any, epoch: int) -> None:
        if epoch == 0:
            group = optimizer.param_groups[0]
            group["lr"], group["weight_decay"], group["betas"] = 0.003, 0.3, (0.8, 0.9)

    if trial.by_hand:
        return plain_loop(
            model,
            lambda e: DataLoader(data, BATCH),
            cross_entropy,
            optimizer,
            epochs=3,
            after_epoch=lambda e: change(optimizer, e),
        )

    class Change(Callback):
        def on_epoch_end(self, run: Any, epoch: int, metrics: Any) -> None:
            change(run.optimizer, epoch)

    result = half(trial, begin).fit(
        model, data, loss_fn=cross_entropy, optimizer=optimizer, callbacks=[Change()]
    )
    return outcome(model, **({} if begin else history(result)))


resumed("rate, decay and betas set by a callback after the first epoch", settings_changed)


def plateau_resumed(trial: Trial, begin: bool) -> Outcome:
    model, data = mlp(trial.dtype), classes(trial.dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
    criterion = nn.CrossEntropyLoss()
    if trial.by_hand:

        def after(epoch: int) -> None:
            with torch.no_grad():
                plateau.step(float(cross_entropy(model, data.tensors)))

        return plain_loop(
            model,
            lambda e: DataLoader(data, BATCH),
            cross_entropy,
            optimizer,
            epochs=4,
            after_epoch=after,
        )
    result = half(trial, begin, epochs=4).fit(
        model, data, data, loss_fn=criterion, optimizer=optimizer, scheduler=plateau
    )
    return outcome(model, **({} if begin else history(result)))


resumed("ReduceLROnPlateau by the validation loss", plateau_resumed)


def stepped_by_a_callback(trial: Trial, begin: bool) -> Outcome:
    """A schedule that is the callback's, not given to the manager, but kept in states."""
    model, data = mlp(trial.dtype), classes(trial.dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    if trial.by_hand:
        return plain_loop(
            model,
            lambda e: DataLoader(data, BATCH),
            cross_entropy,
            optimizer,
            epochs=3,
            scheduler=schedule,
        )

    class Step(Callback):
        def on_step_end(self, run: Any, result: Any) -> None:
            schedule.step()

    result = half(trial, begin).fit(
        model,
        data,
        loss_fn=cross_entropy,
        optimizer=optimizer,
        callbacks=[Step()],
        states={"schedule": schedule},
    )
    return outcome(model, **({} if begin else history(result)))


resumed("a schedule that a callback steps, kept in states", stepped_by_a_callback)


# Sharded


def sharded(name: str, **how: Any) -> Any:
    return case("Blind set, fsdp", name, **how)


def shard_and_train(
    trial: Trial,
    model: nn.Module,
    data: Any,
    loss: Any,
    optimizer: Any,
    ours: Any = None,
    callbacks: Sequence[Callback] = (),
    by_hand: Any = None,
    **settings: Any,
) -> Outcome:
    if trial.by_hand:
        clip = settings.get("max_grad_norm")
        made = optimizer(model.parameters())
        for _, batch in in_order(data):
            made.zero_grad()
            result = loss(model, batch)
            (result[0] if isinstance(result, tuple) else result).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            made.step()
            if by_hand is not None:
                by_hand(model)
        return outcome(model)
    manager = trial.manager(training_mode="fsdp", global_batch_size=BATCH, **settings)
    model, loader, _ = manager.setup_training(
        model, data, loss_fn=ours or loss, optimizer=optimizer, callbacks=list(callbacks)
    )
    for epoch in range(2):
        manager.train_epoch(loader, epoch)
    found = Outcome({n: v.detach().clone() for n, v in manager.trainer.full_state().items()})
    manager.finish()
    return found


def deep(trial: Trial, *middle: nn.Module) -> nn.Module:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 7), nn.Tanh(), *middle, nn.Linear(7, 7), nn.Tanh(),
            nn.Linear(7, CLASSES),
        )  # fmt: skip

    return seeded(build, trial.dtype)


@sharded("LARS as users write it, clipping")
def _(trial: Trial) -> Outcome:
    return shard_and_train(
        trial, deep(trial), classes(trial.dtype), cross_entropy, Lars, max_grad_norm=0.5
    )


@sharded("weights clamped by a callback after each step")
def _(trial: Trial) -> Outcome:
    def clamp(model: nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.3, 0.3)

    class Clamp(Callback):
        def on_step_end(self, run: Any, result: Any) -> None:
            clamp(run.model)

    return shard_and_train(
        trial,
        deep(trial),
        classes(trial.dtype),
        cross_entropy,
        sgd,
        callbacks=[Clamp()],
        by_hand=clamp,
    )


@sharded("weights projected to a norm by a callback after each step")
def _(trial: Trial) -> Outcome:
    def project(model: nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_((0.7 / p.norm()).clamp(max=1.0))

    class Project(Callback):
        def on_step_end(self, run: Any, result: Any) -> None:
            project(run.model)

    return shard_and_train(
        trial,
        deep(trial),
        classes(trial.dtype),
        cross_entropy,
        sgd,
        callbacks=[Project()],
        by_hand=project,
    )


@sharded("spectral norm by parametrization")
def _(trial: Trial) -> Outcome:
    model = deep(trial)
    nn.utils.parametrizations.spectral_norm(model[2])
    model.to(trial.dtype)
    return shard_and_train(trial, model, classes(trial.dtype), cross_entropy, sgd)


@sharded("weights read outside forward: tied by the loss (logits = h @ embedding.T)")
def _(trial: Trial) -> Outcome:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(CLASSES, 7)
            self.layers = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])
            self.first = nn.Linear(FEATURES, 7)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            for layer in self.layers:
                h = torch.tanh(layer(h))
            return h

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]) @ model.embed.weight.T, batch[1])

    return shard_and_train(trial, seeded(Body, trial.dtype), classes(trial.dtype), loss, sgd)
