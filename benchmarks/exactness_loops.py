"""Cases of exactness.py: optimizers, schedules, loops and resuming."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from exactness_trial import (
    BATCH,
    CLASSES,
    FEATURES,
    SAMPLES,
    Outcome,
    Trial,
    adamw,
    case,
    classes,
    cross_entropy,
    default_dtype,
    history,
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
from torch.optim import lr_scheduler as rates
from torch.utils.data import DataLoader, Sampler, TensorDataset

from multi_gpu_training import Callback
from multi_gpu_training.data.order import ShuffledBatches

# Optimizers


class Lion(optim.Optimizer):
    """An optimizer of the user's own."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.add_(torch.tanh(100 * (0.9 * m + 0.1 * p.grad)), alpha=-group["lr"])
                m.lerp_(p.grad, 0.01)


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD, Nesterov, weight decay": lambda p: optim.SGD(
        p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2
    ),
    "SGD, dampening, maximize, foreach": lambda p: optim.SGD(
        p, lr=-0.01 + 0.02, momentum=0.5, dampening=0.1, maximize=True, foreach=True
    ),
    "Adam, amsgrad": lambda p: optim.Adam(p, lr=1e-2, amsgrad=True),
    "AdamW, fused": lambda p: optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW, rate as a tensor": lambda p: optim.AdamW(p, lr=torch.tensor(1e-2, dtype=torch.float64)),
    "RMSprop, centered, momentum": lambda p: optim.RMSprop(p, 1e-3, centered=True, momentum=0.5),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.05, lr_decay=0.1),
    "Adadelta": lambda p: optim.Adadelta(p),
    "NAdam": lambda p: optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: optim.RAdam(p, lr=1e-2),
    "Rprop": lambda p: optim.Rprop(p, lr=1e-2),
    "Adamax": lambda p: optim.Adamax(p, lr=1e-2),
    "ASGD": lambda p: optim.ASGD(p, lr=1e-2, t0=2),
    "Adafactor": lambda p: optim.Adafactor(p, lr=1e-2),
    "an own Optimizer class": Lion,
}


def optimizer_case(make: Callable[[Any], optim.Optimizer]) -> Callable[[Trial], Outcome]:
    def run(t: Trial) -> Outcome:
        return t.train(mlp(t.dtype), classes(t.dtype, 25), nn.CrossEntropyLoss(), make, epochs=4)

    return run


for name, make in OPTIMIZERS.items():
    case("Optimizers", name, float32=name in ("Adam, amsgrad", "Adagrad"))(optimizer_case(make))


@case("Optimizers", "Muon for matrices")
def muon(t: Trial) -> Outcome:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 9, bias=False), nn.Tanh(), nn.Linear(9, CLASSES, bias=False)
        )

    # Muon orthogonalises in bfloat16, which rounds a difference of 1e-16 to one of 1e-3 at times.
    def optimizer(parameters: Any) -> Any:
        return optim.Muon(parameters, lr=0.02, ns_steps=1)

    return t.train(seeded(build, t.dtype), classes(t.dtype), nn.CrossEntropyLoss(), optimizer)


@case("Optimizers", "four groups: rates, decay, betas")
def groups(t: Trial) -> Outcome:
    model = mlp(t.dtype)

    def optimizer(_: Any) -> Any:
        return optim.AdamW(
            [
                {"params": [model[0].weight], "lr": 1e-3, "weight_decay": 0.3},
                {"params": [model[0].bias], "lr": 5e-2, "weight_decay": 0.0},
                {"params": [model[2].weight], "betas": (0.5, 0.9)},
                {"params": [model[2].bias], "eps": 1e-4},
            ],
            lr=1e-2,
        )

    return t.train(model, classes(t.dtype), nn.CrossEntropyLoss(), optimizer, clip=0.3)


@case("Optimizers", "made by the user before fit, of some parameters, the others not frozen")
def partial(t: Trial) -> Outcome:
    model = mlp(t.dtype)
    made = optim.SGD(model[2].parameters(), lr=0.1)
    if t.by_hand:
        return t.train(model, classes(t.dtype), nn.CrossEntropyLoss(), lambda _: made)
    manager = t.manager(global_batch_size=BATCH)
    result = manager.fit(model, classes(t.dtype), loss_fn=nn.CrossEntropyLoss(), optimizer=made)
    return outcome(model, **history(result))


@case("Optimizers", "clipping by value in a hook before the optimizer's step")
def clip_value(t: Trial) -> Outcome:
    def optimizer(parameters: Any) -> Any:
        made = sgd(parameters)

        def clip(opt: Any, *_: Any) -> None:
            for group in opt.param_groups:
                nn.utils.clip_grad_value_(group["params"], 0.02)

        made.register_step_pre_hook(clip)
        return made

    return t.train(mlp(t.dtype), classes(t.dtype), nn.CrossEntropyLoss(), optimizer)


@case("Optimizers", "LBFGS", refusal=True)
def lbfgs(t: Trial) -> Outcome:
    if t.by_hand:
        return Outcome({})
    return t.train(mlp(t.dtype), classes(t.dtype), nn.CrossEntropyLoss(), optim.LBFGS)


@case("Optimizers", "a list of two optimizers", refusal=True)
def several(t: Trial) -> Outcome:
    model = mlp(t.dtype)
    if t.by_hand:
        return Outcome({})
    manager = t.manager(global_batch_size=BATCH)
    pair = [sgd(model[0].parameters()), adamw(model[2].parameters())]
    manager.fit(model, classes(t.dtype), loss_fn=nn.CrossEntropyLoss(), optimizer=pair)
    return outcome(model)


# Schedules

SCHEDULES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "OneCycleLR with momentum, by step": (
        lambda o: rates.OneCycleLR(o, max_lr=0.2, total_steps=16),
        False,
    ),
    "CosineAnnealingWarmRestarts, by step": (
        lambda o: rates.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2),
        False,
    ),
    "CyclicLR, by step": (
        lambda o: rates.CyclicLR(o, 0.01, 0.2, step_size_up=3, mode="triangular2"),
        False,
    ),
    "LambdaLR, by step": (lambda o: rates.LambdaLR(o, lambda s: 1 / (1 + s)), False),
    "MultiStepLR, by epoch": (lambda o: rates.MultiStepLR(o, [1, 3], gamma=0.3), True),
    "ExponentialLR, by epoch": (lambda o: rates.ExponentialLR(o, 0.5), True),
    "ChainedScheduler, by step": (
        lambda o: rates.ChainedScheduler(
            [rates.ConstantLR(o, 0.3, 4), rates.PolynomialLR(o, 14, 2.0)]
        ),
        False,
    ),
    "SequentialLR: linear warm-up, cosine, by step": (
        lambda o: rates.SequentialLR(
            o, [rates.LinearLR(o, 0.1, 1.0, 5), rates.CosineAnnealingLR(o, 11)], [5]
        ),
        False,
    ),
}


def schedule_case(build: Callable[[Any], Any], by_epoch: bool) -> Callable[[Trial], Outcome]:
    def run(t: Trial) -> Outcome:
        return t.train(
            mlp(t.dtype), classes(t.dtype), nn.CrossEntropyLoss(), sgd,
            scheduler=build, by_epoch=by_epoch, epochs=4,
        )  # fmt: skip

    return run


for name, (build, by_epoch) in SCHEDULES.items():
    case("Schedules", name)(schedule_case(build, by_epoch))


def warm_cosine(o: Any) -> Any:
    return rates.SequentialLR(
        o, [rates.LinearLR(o, 0.1, 1.0, 5), rates.CosineAnnealingLR(o, 11)], [5]
    )


def prebuilt(t: Trial, build: Callable[[Any], Any], factor: float, **settings: Any) -> Outcome:
    """Optimizer and scheduler made before the manager sees them; by hand with the scaled rate."""
    model, data = mlp(t.dtype), classes(t.dtype)
    made = optim.SGD(model.parameters(), lr=0.05 * (factor if t.by_hand else 1.0), momentum=0.9)
    scheduler = build(made)
    if t.by_hand:
        loader = DataLoader(data, batch_size=BATCH)
        return plain_loop(
            model, lambda _: loader, cross_entropy, made, epochs=4, scheduler=scheduler
        )
    manager = t.manager(global_batch_size=BATCH, epochs=4, **settings)
    result = manager.fit(model, data, loss_fn=cross_entropy, optimizer=made, scheduler=scheduler)
    return outcome(model, **history(result))


@case("Schedules", "SequentialLR made before fit")
def sequential_prebuilt(t: Trial) -> Outcome:
    return prebuilt(t, warm_cosine, 1.0)


@case("Schedules", "SequentialLR made before fit, lr_scaling=linear", point=14)
def sequential_scaled(t: Trial) -> Outcome:
    return prebuilt(t, warm_cosine, 2.0, lr_scaling="linear", base_batch_size=4)


@case("Schedules", "LambdaLR made before fit, lr_scaling=sqrt")
def lambda_scaled(t: Trial) -> Outcome:
    return prebuilt(
        t, lambda o: rates.LambdaLR(o, lambda s: 0.9**s), 2.0, lr_scaling="sqrt", base_batch_size=2
    )


@case("Schedules", "ChainedScheduler made before fit, lr_scaling=linear")
def chained_scaled(t: Trial) -> Outcome:
    return prebuilt(
        t, SCHEDULES["ChainedScheduler, by step"][0], 2.0, lr_scaling="linear", base_batch_size=4
    )


@case("Schedules", "CosineAnnealingWarmRestarts made before fit, lr_scaling=linear")
def restarts_scaled(t: Trial) -> Outcome:
    return prebuilt(
        t, lambda o: rates.CosineAnnealingWarmRestarts(o, 3), 2.0,
        lr_scaling="linear", base_batch_size=4,
    )  # fmt: skip


@case("Schedules", "warm-up, cosine and linear scaling of the config")
def config_schedule(t: Trial) -> Outcome:
    model, data = mlp(t.dtype), classes(t.dtype)
    total, warm = 12, 3

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / (warm + 1)
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))

    if t.by_hand:
        optimizer = optim.SGD(model.parameters(), lr=0.1 * 2, momentum=0.9)
        scheduler = rates.LambdaLR(optimizer, factor)
        loader = DataLoader(data, batch_size=BATCH)
        return plain_loop(
            model, lambda _: loader, cross_entropy, optimizer, epochs=3, scheduler=scheduler
        )
    return t.train(
        model, data, nn.CrossEntropyLoss(), sgd, epochs=3, schedule="cosine", warmup_steps=warm,
        lr_scaling="linear", base_batch_size=4,
    )  # fmt: skip


@case("Schedules", "lr_scaling from the DataLoader's batch size", point=14)
def loader_scaling(t: Trial) -> Outcome:
    model, data = mlp(t.dtype), classes(t.dtype, 32)
    if t.by_hand:
        optimizer = optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        loader = DataLoader(data, batch_size=16)
        return plain_loop(model, lambda _: loader, cross_entropy, optimizer)
    manager = t.manager(global_batch_size=16, lr_scaling="linear")
    loader = DataLoader(data, batch_size=8)
    result = manager.fit(model, loader, loss_fn=cross_entropy, optimizer=sgd)
    return outcome(model, **history(result))


def by_epochs(t: Trial, change: Callable[[Any, int], None]) -> Outcome:
    """`change(optimizer, epoch)` before each epoch, in an own loop of train_epoch."""
    model, data = mlp(t.dtype), classes(t.dtype)
    if t.by_hand:
        optimizer = sgd(model.parameters())
        loader = DataLoader(data, batch_size=BATCH)
        change(optimizer, 0)
        found = plain_loop(
            model, lambda _: loader, cross_entropy, optimizer, epochs=3,
            after_epoch=lambda epoch: change(optimizer, epoch + 1),
        )  # fmt: skip
        return Outcome(found.tensors, found.numbers)
    manager = t.manager(global_batch_size=BATCH, epochs=3)
    _, loader, _ = manager.setup_training(model, data, loss_fn=cross_entropy, optimizer=sgd)
    numbers = {}
    for epoch in range(3):
        change(manager.optimizer, epoch)
        numbers[f"loss {epoch}"] = manager.train_epoch(loader, epoch)["loss"]
    manager.finish()
    return outcome(model, **numbers)


@case("Schedules", "rate set in the own loop before each epoch", point=15)
def own_rate(t: Trial) -> Outcome:
    def change(optimizer: Any, epoch: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.2 / (1 + epoch)

    return by_epochs(t, change)


@case("Schedules", "momentum and weight decay set in the own loop")
def own_momentum(t: Trial) -> Outcome:
    def change(optimizer: Any, epoch: int) -> None:
        optimizer.param_groups[0]["momentum"] = 0.3 * epoch
        optimizer.param_groups[0]["weight_decay"] = 0.1 * epoch

    return by_epochs(t, change)


class Halve(Callback):
    def on_epoch_begin(self, run: Any, epoch: int) -> None:
        run.optimizer.param_groups[0]["lr"] = 0.2 / 2**epoch


@case("Schedules", "rate set by a callback at the start of each epoch", point=15)
def callback_rate(t: Trial) -> Outcome:
    return with_callback(t, Halve(), lambda o, e: o.param_groups[0].update(lr=0.2 / 2**e))


class Slower(Callback):
    def on_step_begin(self, run: Any, step: int) -> None:
        run.optimizer.param_groups[0]["lr"] = 0.1 / step


@case("Schedules", "rate set by a callback before each step", point=15)
def callback_step_rate(t: Trial) -> Outcome:
    model, data = mlp(t.dtype), classes(t.dtype)
    if t.by_hand:
        optimizer = sgd(model.parameters())
        schedule = rates.LambdaLR(optimizer, lambda s: 1 / (1 + s))
        loader = DataLoader(data, batch_size=BATCH)
        return plain_loop(
            model, lambda _: loader, cross_entropy, optimizer, epochs=3, scheduler=schedule
        )
    manager = t.manager(global_batch_size=BATCH, epochs=3)
    result = manager.fit(model, data, loss_fn=cross_entropy, optimizer=sgd, callbacks=[Slower()])
    return outcome(model, **history(result))


def with_callback(t: Trial, callback: Callback, change: Callable[[Any, int], Any]) -> Outcome:
    if t.by_hand:
        return by_epochs(t, change)
    model = mlp(t.dtype)
    manager = t.manager(global_batch_size=BATCH, epochs=3)
    result = manager.fit(
        model, classes(t.dtype), loss_fn=cross_entropy, optimizer=sgd, callbacks=[callback]
    )
    return outcome(model, **history(result))


# Loops

LOOPS = "Loops"


def shuffled(data: Any, epoch: int) -> Iterator[Any]:
    for batch in ShuffledBatches(len(data), BATCH).batches(0, epoch):
        yield data[batch]


def own_loop(
    t: Trial,
    train: Callable[[Any, Any], None],
    loss: Any = cross_entropy,
    model: nn.Module | None = None,
    data: Any = None,
    optimizer: Any = sgd,
    epochs: int = 3,
    **settings: Any,
) -> Outcome:
    """`train(manager, loader)` once per epoch; by hand a plain loop over shuffled batches."""
    model = mlp(t.dtype) if model is None else model
    data = classes(t.dtype, 25) if data is None else data
    if t.by_hand:
        made = optimizer(model.parameters())
        found = plain_loop(model, lambda e: shuffled(data, e), loss, made, epochs=epochs)
        return Outcome(found.tensors)
    manager = t.manager(shuffle=True, epochs=epochs, **{"global_batch_size": BATCH, **settings})
    _, loader, _ = manager.setup_training(model, data, loss_fn=loss, optimizer=optimizer)
    for _ in range(epochs):
        train(manager, loader)
    manager.finish()
    return outcome(model)


@case(LOOPS, "own loop: train_step(batch)", float32=True)
def steps(t: Trial) -> Outcome:
    def train(manager: Any, loader: Any) -> None:
        for batch in loader:
            manager.trainer.train_step(batch)

    return own_loop(t, train)


@case(LOOPS, "own loop: for x, y in loader", point=4)
def unpacked(t: Trial) -> Outcome:
    def train(manager: Any, loader: Any) -> None:
        for x, y in loader:
            manager.trainer.train_step((x, y))

    return own_loop(t, train)


@case(LOOPS, "own loop: for x, y in loader, batch_size and global_batch_size", point=4)
def unpacked_sizes(t: Trial) -> Outcome:
    def train(manager: Any, loader: Any) -> None:
        for x, y in loader:
            manager.trainer.train_step((x, y))

    return own_loop(t, train, batch_size=2)


@case(LOOPS, "own loop: batch changed in place before the step")
def changed(t: Trial) -> Outcome:
    def train(manager: Any, loader: Any) -> None:
        for batch in loader:
            batch[0] = batch[0] * 2
            batch[0].add_(1)
            manager.trainer.train_step(batch)

    def by_hand(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0] * 2 + 1), batch[1])

    return own_loop(t, train, by_hand if t.by_hand else cross_entropy)


@case(LOOPS, "own loop: next(iterator) and start again at its end")
def endless(t: Trial) -> Outcome:
    def train(manager: Any, loader: Any) -> None:
        if manager.step:
            return
        batches = iter(loader)
        for _ in range(12):
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(loader)
                batch = next(batches)
            manager.trainer.train_step(batch)

    return own_loop(t, train)


@case(LOOPS, "own loop: break after two steps of every epoch", point=8)
def broken_off(t: Trial) -> Outcome:
    model, data = mlp(t.dtype), classes(t.dtype)
    if t.by_hand:
        made = sgd(model.parameters())
        found = plain_loop(
            model, lambda e: list(shuffled(data, e))[:2], cross_entropy, made, epochs=3
        )
        return Outcome(found.tensors)

    def train(manager: Any, loader: Any) -> None:
        for number, batch in enumerate(loader):
            if number == 2:
                break
            manager.trainer.train_step(batch)

    return own_loop(t, train, model=model, data=data)


@case(LOOPS, "own loop: a pass over the loader without training first")
def looked_at(t: Trial) -> Outcome:
    def train(manager: Any, loader: Any) -> None:
        if not manager.step:
            seen = sum(len(batch[0]) for batch in loader)
            assert seen > 0
        for batch in loader:
            manager.trainer.train_step(batch)

    # The look was epoch 0, as with a DataLoader that shuffles anew each time.
    model, data = mlp(t.dtype), classes(t.dtype, 25)
    if t.by_hand:
        made = sgd(model.parameters())
        found = plain_loop(model, lambda e: shuffled(data, e + 1), cross_entropy, made, epochs=3)
        return Outcome(found.tensors)
    return own_loop(t, train, model=model, data=data)


@case(LOOPS, "own loop: another backward between the steps", point=2)
def foreign_backward(t: Trial) -> Outcome:
    x, y = classes(t.dtype).tensors
    model = mlp(t.dtype)

    def train(manager: Any, loader: Any) -> None:
        for batch in loader:
            manager.trainer.train_step(batch)
            F.cross_entropy(manager.model(x[:3]), y[:3]).backward()  # how large is it?
            assert manager.model[0].weight.grad.norm() > 0

    return own_loop(t, train, model=model)


@case(LOOPS, "own loop: input gradients (adversarial samples) by another backward", point=2)
def adversarial(t: Trial) -> Outcome:
    """FGSM: samples are moved along the gradient of the loss before the model trains on them."""

    def moved(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_(True)
        F.cross_entropy(model(x), y, reduction="sum").backward()
        return (x + 0.1 * x.grad.sign()).detach()

    model, data = mlp(t.dtype), classes(t.dtype, 24)
    if t.by_hand:
        optimizer = sgd(model.parameters())
        for epoch in range(3):
            for x, y in shuffled(data, epoch):
                x = moved(model, x, y)
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        return outcome(model)

    def train(manager: Any, loader: Any) -> None:
        for batch in loader:
            batch[0] = moved(manager.model, *batch)
            manager.trainer.train_step(batch)

    return own_loop(t, train, model=model, data=data)


@case(LOOPS, "own loop: torch.randint between the steps", point=20)
def between(t: Trial) -> Outcome:
    model, data = mlp(t.dtype), classes(t.dtype, 24)
    torch.manual_seed(3)
    if t.by_hand:
        optimizer = sgd(model.parameters())
        for epoch in range(3):
            for x, y in shuffled(data, epoch):
                x = x.roll(int(torch.randint(FEATURES, ())), 1)
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        return outcome(model)

    def train(manager: Any, loader: Any) -> None:
        for batch in loader:
            batch[0] = batch[0].roll(int(torch.randint(FEATURES, ())), 1)
            manager.trainer.train_step(batch)

    torch.manual_seed(3)
    return own_loop(t, train, model=model, data=data)


@case(LOOPS, "own loop: labelled batches zipped with unlabelled ones")
def zipped(t: Trial) -> Outcome:
    extra = DataLoader(TensorDataset(numbers(40, FEATURES, seed=5, dtype=t.dtype)), batch_size=5)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        (x, y), (more,) = batch
        spread = model(more).softmax(1)
        return F.cross_entropy(model(x), y) - 0.1 * (spread * spread.log()).sum(1).mean()

    model, data = mlp(t.dtype), classes(t.dtype, 25)
    if t.by_hand:
        optimizer = sgd(model.parameters())
        for epoch in range(3):
            for batch in zip(shuffled(data, epoch), extra, strict=False):
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()
        return outcome(model)

    def train(manager: Any, loader: Any) -> None:
        for batch in zip(loader, extra, strict=False):
            manager.trainer.train_step(batch)

    return own_loop(t, train, loss, model, data)


@case(LOOPS, "own batches: each rank brings another number of samples")
def own_batches(t: Trial) -> Outcome:
    model, data = mlp(t.dtype), classes(t.dtype, 40)
    x, y = data.tensors
    if t.by_hand:
        loader = DataLoader(data, batch_size=10)
        found = plain_loop(model, lambda _: loader, cross_entropy, sgd(model.parameters()))
        return Outcome(found.tensors)
    manager = t.manager(global_batch_size=10)
    manager.setup_training(model, data, loss_fn=cross_entropy, optimizer=sgd)
    ends = {1: [10], 2: [7, 10], 3: [1, 8, 10], 4: [4, 5, 8, 10]}[t.world]
    begin = [0, *ends][t.rank]
    for _ in range(2):
        for start in range(0, 40, 10):
            mine = slice(start + begin, start + ends[t.rank])
            manager.trainer.train_step((x[mine], y[mine]))
    manager.finish()
    return outcome(model)


@case(LOOPS, "own batches: accumulation, a weight per batch")
def own_accumulated(t: Trial) -> Outcome:
    model, data = mlp(t.dtype, out=1), values(t.dtype, 24)
    x, y = data.tensors
    w = numbers(24, 1, seed=3, dtype=t.dtype).abs()

    def loss(model: nn.Module, batch: Any) -> Any:
        x, w, y = batch
        return (w * (model(x) - y) ** 2).sum() / w.sum(), w.sum()

    if t.by_hand:
        loader = DataLoader(TensorDataset(x, w, y), batch_size=12)
        found = plain_loop(model, lambda _: loader, loss, adamw(model.parameters()), epochs=3)
        return Outcome(found.tensors)
    manager = t.manager(gradient_accumulation_steps=3, batch_size=4)
    manager.setup_training(model, data, loss_fn=loss, optimizer=adamw)
    for _ in range(3):
        for start in range(0, 24, 4):
            mine = torch.arange(start, start + 4).tensor_split(t.world)[t.rank]
            manager.trainer.train_step((x[mine], w[mine], y[mine]))
    manager.finish()
    return outcome(model)


@case(LOOPS, "own loop: train_epoch and validate_epoch, metrics of both", float32=True)
def epochs(t: Trial) -> Outcome:
    model, data, held = mlp(t.dtype), classes(t.dtype), classes(t.dtype, 13)
    if t.by_hand:
        found = t.train(model, data, nn.CrossEntropyLoss(), adamw)
        with torch.no_grad():
            found.numbers["validation"] = float(cross_entropy(model, held.tensors))
        return found
    manager = t.manager(global_batch_size=BATCH)
    _, loader, val_loader = manager.setup_training(
        model, data, held, loss_fn=nn.CrossEntropyLoss(), optimizer=adamw
    )
    numbers = {}
    for epoch in range(2):
        numbers[f"loss {epoch}"] = manager.train_epoch(loader, epoch)["loss"]
        numbers["validation"] = manager.validate_epoch(val_loader)["loss"]
    manager.finish()
    return outcome(model, **numbers)


class Average(Callback):
    def __init__(self, model: nn.Module) -> None:
        self.kept = {name: p.detach().clone() for name, p in model.named_parameters()}

    def on_step_end(self, run: Any, result: Any) -> None:
        for name, p in run.model.named_parameters():
            self.kept[name].lerp_(p.detach(), 0.2)


@case(LOOPS, "moving average of the weights by a callback")
def moving_average(t: Trial) -> Outcome:
    model, data = mlp(t.dtype), classes(t.dtype)
    average = Average(model)
    if t.by_hand:
        optimizer = adamw(model.parameters())
        for _ in range(2):
            for batch in DataLoader(data, batch_size=BATCH):
                optimizer.zero_grad()
                cross_entropy(model, batch).backward()
                optimizer.step()
                for name, p in model.named_parameters():
                    average.kept[name].lerp_(p.detach(), 0.2)
    else:
        manager = t.manager(global_batch_size=BATCH)
        manager.fit(model, data, loss_fn=cross_entropy, optimizer=adamw, callbacks=[average])
    return Outcome({f"average {name}": value for name, value in average.kept.items()})


class Distract(Callback):
    """A backward after each step, as code that measures gradient norms does."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def on_step_end(self, run: Any, result: Any) -> None:
        cross_entropy(run.model, self.batch).backward()


@case(LOOPS, "a backward in a callback, accumulation", point=2)
def distracted(t: Trial) -> Outcome:
    data = classes(t.dtype)
    more = {} if t.by_hand else {"fit": {"callbacks": [Distract(data[:4])]}}
    return t.train(mlp(t.dtype), data, nn.CrossEntropyLoss(), adamw, accumulate=2, **more)


@case(LOOPS, "a layer and its group added in the middle", point=3)
def added_group(t: Trial) -> Outcome:
    model, data = mlp(t.dtype), classes(t.dtype)
    model[0].requires_grad_(False)

    def optimizer(_: Any) -> Any:
        return optim.AdamW(model[2].parameters(), lr=1e-2)

    def thaw(made: Any) -> None:
        model[0].requires_grad_(True)
        made.add_param_group({"params": list(model[0].parameters()), "lr": 3e-3})

    if t.by_hand:
        made = optimizer(None)
        loader = DataLoader(data, batch_size=BATCH)

        def after(epoch: int) -> None:
            if epoch == 0:
                thaw(made)

        return plain_loop(
            model, lambda _: loader, cross_entropy, made, epochs=3, after_epoch=after, clip=0.2
        )
    manager = t.manager(global_batch_size=BATCH, epochs=3, max_grad_norm=0.2)
    _, loader, _ = manager.setup_training(model, data, loss_fn=cross_entropy, optimizer=optimizer)
    numbers = {}
    for epoch in range(3):
        if epoch == 1:
            thaw(manager.optimizer)
        numbers[f"loss {epoch}"] = manager.train_epoch(loader, epoch)["loss"]
    manager.finish()
    return outcome(model, **numbers)


@case(LOOPS, "clipping by norm, accumulation, short tail", float32=True)
def clipped(t: Trial) -> Outcome:
    return t.train(
        mlp(t.dtype), classes(t.dtype, 27), nn.CrossEntropyLoss(), sgd, clip=0.05, accumulate=3
    )


def gan(t: Trial, generator: nn.Module, critic: nn.Module, **settings: Any) -> Outcome:
    real = numbers(SAMPLES, 2, seed=2, dtype=t.dtype) * 0.3 + 1
    data = TensorDataset(real, numbers(SAMPLES, 3, seed=3, dtype=t.dtype))

    def critic_loss(model: nn.Module, batch: Any) -> Tensor:
        real, noise = batch
        good, bad = model(real), model(generator(noise).detach())
        return F.softplus(-good).mean() + F.softplus(bad).mean()

    def generator_loss(model: nn.Module, batch: Any) -> Tensor:
        return F.softplus(-critic(model(batch[1]))).mean()

    if t.by_hand:
        first, second = adamw(critic.parameters()), adamw(generator.parameters())
        for _ in range(3):
            for batch in DataLoader(data, batch_size=BATCH):
                first.zero_grad()
                critic_loss(critic, batch).backward()
                first.step()
                second.zero_grad()
                generator_loss(generator, batch).backward()
                second.step()
        return outcome(generator, critic)
    judge = t.manager(global_batch_size=BATCH, run_name="critic", **settings)
    maker = t.manager(global_batch_size=BATCH, run_name="generator", **settings)
    _, loader, _ = judge.setup_training(critic, data, loss_fn=critic_loss, optimizer=adamw)
    maker.setup_training(generator, data, loss_fn=generator_loss, optimizer=adamw)
    for _ in range(3):
        for batch in loader:
            judge.trainer.train_step(batch)
            maker.trainer.train_step(batch)
    judge.finish()
    maker.finish()
    return outcome(generator, critic)


def small(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


@case(LOOPS, "GAN with two managers", point=2, float32=True)
def gan_plain(t: Trial) -> Outcome:
    return gan(t, seeded(lambda: small(3, 2), t.dtype), seeded(lambda: small(2, 1), t.dtype, 2))


@case(LOOPS, "GAN with two managers, a generator with BatchNorm, sync_bn", point=2)
def gan_batchnorm(t: Trial) -> Outcome:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))

    # Without a bias before it, which BatchNorm takes away and Adam makes large.
    generator = seeded(build, t.dtype)
    generator[0].bias = None
    return gan(t, generator, seeded(lambda: small(2, 1), t.dtype, 2), sync_bn=True)


@case(LOOPS, "pretraining and fine-tuning: one encoder, two managers after one another")
def two_stages(t: Trial) -> Outcome:
    x, y = classes(t.dtype).tensors
    encoder = seeded(lambda: nn.Linear(FEATURES, 5), t.dtype)
    first = nn.Sequential(encoder, nn.Tanh(), seeded(lambda: nn.Linear(5, FEATURES), t.dtype, 2))
    second = nn.Sequential(encoder, nn.Tanh(), seeded(lambda: nn.Linear(5, CLASSES), t.dtype, 3))
    t.train(first, TensorDataset(x, x), nn.MSELoss(), adamw, run_name="first")
    return t.train(second, TensorDataset(x, y), nn.CrossEntropyLoss(), adamw, run_name="second")


@case(LOOPS, "max_steps in the middle of the second epoch")
def stopped(t: Trial) -> Outcome:
    model, data = mlp(t.dtype), classes(t.dtype)
    if t.by_hand:
        made = adamw(model.parameters())
        loader = list(DataLoader(data, batch_size=BATCH))
        found = plain_loop(model, lambda e: loader[: 4 if e == 0 else 2], cross_entropy, made)
        return Outcome(found.tensors)
    manager = t.manager(global_batch_size=BATCH, max_steps=6, epochs=5)
    manager.fit(model, data, loss_fn=cross_entropy, optimizer=adamw)
    return outcome(model)


@case(LOOPS, "early stopping after validations without progress")
def early(t: Trial) -> Outcome:
    model, data, held = mlp(t.dtype), classes(t.dtype), classes(t.dtype, 12)

    def wild(parameters: Any) -> Any:
        return optim.SGD(parameters, lr=2.5)

    if t.by_hand:
        optimizer, best, bad, done = wild(model.parameters()), math.inf, 0, 0
        while done < 30 and bad < 2:
            done += 1
            for batch in DataLoader(data, batch_size=BATCH):
                optimizer.zero_grad()
                cross_entropy(model, batch).backward()
                optimizer.step()
            with torch.no_grad():
                loss = float(cross_entropy(model, held.tensors))
            best, bad = (loss, 0) if loss < best else (best, bad + 1)
        return outcome(model, epochs=done, validation=loss)
    manager = t.manager(global_batch_size=BATCH, epochs=30, early_stopping_patience=2)
    result = manager.fit(model, data, held, loss_fn=nn.CrossEntropyLoss(), optimizer=wild)
    return outcome(model, epochs=len(result.history), validation=result.metrics["loss"])


@case(LOOPS, "validation every two steps with BatchNorm, sync_bn")
def inner_validation(t: Trial) -> Outcome:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES)
        )

    model, data, held = seeded(build, t.dtype), classes(t.dtype), classes(t.dtype, 12)
    if t.by_hand:
        return t.train(model, data, nn.CrossEntropyLoss(), sgd)
    manager = t.manager(global_batch_size=BATCH, sync_bn=True, validate_every=2)
    result = manager.fit(model, data, held, loss_fn=nn.CrossEntropyLoss(), optimizer=sgd)
    return outcome(model, **history(result))


@case(LOOPS, "torch.set_default_dtype(float64)", point=21)
def wide_default(t: Trial) -> Outcome:
    with default_dtype(torch.float64):
        return t.train(
            mlp(torch.float64), classes(torch.float64), nn.CrossEntropyLoss(), adamw, clip=0.3
        )


@case(LOOPS, "torch.set_default_dtype(float64), own loop, (mean, weight)", point=21)
def wide_default_steps(t: Trial) -> Outcome:
    def loss(model: nn.Module, batch: Any) -> Any:
        return cross_entropy(model, batch), torch.tensor(float(len(batch[1])))

    def train(manager: Any, loader: Any) -> None:
        for batch in loader:
            manager.trainer.train_step(batch)

    with default_dtype(torch.float64):
        return own_loop(
            t, train, loss, mlp(torch.float64), classes(torch.float64, 25), optimizer=adamw
        )


@case(LOOPS, "unequal shares: share_weights")
def unequal(t: Trial) -> Outcome:
    weights = {1: None, 2: [3, 1], 3: [1, 5, 2], 4: [4, 1, 1, 3]}[t.world]
    return t.train(
        mlp(t.dtype), classes(t.dtype, 25), nn.CrossEntropyLoss(), adamw,
        **({} if t.by_hand else {"share_weights": weights}),
    )  # fmt: skip


@case(LOOPS, "augment: flips and noise per sample", against_one=True)
def augmented(t: Trial) -> Outcome:
    def augment(batch: Any, random: Any) -> Any:
        x, y = batch
        flip = random.uniform(1) < 0.5
        return torch.where(flip, x.flip(1), x) + 0.1 * random.normal(FEATURES).to(x.dtype), y

    return t.train(
        mlp(t.dtype), classes(t.dtype, 25), nn.CrossEntropyLoss(), adamw, shuffle=True,
        fit={"augment": augment},
    )  # fmt: skip


class ClampGradients(Callback):
    def on_optimizer(self, run: Any) -> None:
        nn.utils.clip_grad_value_(run.model.parameters(), 0.02)


@case(LOOPS, "clipping by value in on_optimizer, (mean, weight)")
def clamped(t: Trial) -> Outcome:
    x, y = values(t.dtype, 25).tensors
    data = TensorDataset(x, numbers(25, 1, seed=3, dtype=t.dtype).abs(), y)

    def loss(model: nn.Module, batch: Any) -> Any:
        x, w, y = batch
        return (w * (model(x) - y) ** 2).sum() / w.sum(), w.sum()

    def optimizer(parameters: Any) -> Any:
        made = sgd(parameters)
        if t.by_hand:
            made.register_step_pre_hook(
                lambda o, *_: nn.utils.clip_grad_value_(o.param_groups[0]["params"], 0.02)
            )
        return made

    more = {} if t.by_hand else {"fit": {"callbacks": [ClampGradients()]}}
    return t.train(mlp(t.dtype, out=1), data, loss, optimizer, **more)


@case(LOOPS, "own loop: the user steps a scheduler", point=15)
def own_scheduler(t: Trial) -> Outcome:
    model, data = mlp(t.dtype), classes(t.dtype, 25)
    made = sgd(model.parameters())
    scheduler = rates.OneCycleLR(made, 0.3, total_steps=13)
    if t.by_hand:
        found = plain_loop(
            model, lambda e: shuffled(data, e), cross_entropy, made, epochs=3, scheduler=scheduler
        )
        return Outcome(found.tensors)

    def train(manager: Any, loader: Any) -> None:
        for batch in loader:
            if manager.trainer.train_step(batch).moved:
                scheduler.step()

    return own_loop(t, train, model=model, data=data, optimizer=made)


@case(LOOPS, "own loop: for x, y in loader, accumulation with a short tail", point=4)
def unpacked_accumulated(t: Trial) -> Outcome:
    def train(manager: Any, loader: Any) -> None:
        for x, y in loader:
            manager.trainer.train_step((x, y))

    return own_loop(t, train, data=classes(t.dtype, 25), gradient_accumulation_steps=2)


class Annealed:
    """The weight of a penalty follows the number of calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        return cross_entropy(model, batch) + 0.02 * self.calls * model[0].weight.pow(2).sum()


@case(LOOPS, "a loss that counts its calls, 1 sample in the last step")
def annealed(t: Trial) -> Outcome:
    return t.train(mlp(t.dtype), classes(t.dtype, 25), Annealed(), sgd)


class Anneal(Callback):
    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def on_step_end(self, run: Any, result: Any) -> None:
        self.weight += 0.02


@case(LOOPS, "a penalty that a callback raises after each step")
def annealed_by_callback(t: Trial) -> Outcome:
    weight = torch.tensor(0.02, dtype=t.dtype)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch) + weight * model[0].weight.pow(2).sum()

    def optimizer(parameters: Any) -> Any:
        made = sgd(parameters)
        if t.by_hand:
            made.register_step_post_hook(lambda *_: weight.add_(0.02))
        return made

    more = {} if t.by_hand else {"fit": {"callbacks": [Anneal(weight)]}}
    return t.train(mlp(t.dtype), classes(t.dtype, 25), loss, optimizer, **more)


def chosen_steps(
    t: Trial, take: Callable[[list[Any]], list[Any]], train: Any, **how: Any
) -> Outcome:
    """An own loop that trains on some batches of each epoch; `take` says which, by hand."""
    model, data = mlp(t.dtype), classes(t.dtype, 25)
    if t.by_hand:
        made = sgd(model.parameters())
        found = plain_loop(
            model, lambda e: take(list(shuffled(data, e))), cross_entropy, made, epochs=3
        )
        return Outcome(found.tensors)
    return own_loop(t, train, model=model, data=data, **how)


@case(LOOPS, "own loop: itertools.islice(loader, 2)", point=8)
def sliced(t: Trial) -> Outcome:
    def train(manager: Any, loader: Any) -> None:
        for batch in itertools.islice(loader, 2):
            manager.trainer.train_step(batch)

    return chosen_steps(t, lambda batches: batches[:2], train)


@case(LOOPS, "own loop: break with two loader workers", point=8)
def broken_off_workers(t: Trial) -> Outcome:
    model = mlp(t.dtype)
    data = classes(t.dtype, 25)

    class Plain(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 25

        def __getitem__(self, index: int) -> Any:
            return data[index]

    if t.by_hand:
        return chosen_steps(t, lambda batches: batches[:2], None)
    manager = t.manager(global_batch_size=BATCH, epochs=3)
    loader = DataLoader(Plain(), batch_size=BATCH, shuffle=True, num_workers=2)
    _, batches, _ = manager.setup_training(model, loader, loss_fn=cross_entropy, optimizer=sgd)
    for _ in range(3):
        for number, batch in enumerate(batches):
            if number == 2:
                break
            manager.trainer.train_step(batch)
    manager.finish()
    return outcome(model)


@case(LOOPS, "own loop: every second batch left out")
def left_out_batches(t: Trial) -> Outcome:
    def train(manager: Any, loader: Any) -> None:
        for number, batch in enumerate(loader):
            if number % 2 == 0:
                manager.trainer.train_step(batch)

    return chosen_steps(t, lambda batches: batches[::2], train)


@case(LOOPS, "own loop: two steps on each batch")
def twice(t: Trial) -> Outcome:
    def train(manager: Any, loader: Any) -> None:
        for batch in loader:
            manager.trainer.train_step(batch)
            manager.trainer.train_step(batch)

    return chosen_steps(t, lambda batches: [b for b in batches for _ in range(2)], train)


@case(LOOPS, "own loop: batches kept in a list and trained in reverse")
def reversed_steps(t: Trial) -> Outcome:
    def train(manager: Any, loader: Any) -> None:
        for batch in reversed(list(loader)):
            manager.trainer.train_step(batch)

    return chosen_steps(t, lambda batches: batches[::-1], train)


@case(LOOPS, "own loop: norm of the gradient before clipping, evaluate() after each epoch")
def reported_norm(t: Trial) -> Outcome:
    model, data, held = mlp(t.dtype), classes(t.dtype, 25), classes(t.dtype, 11)
    found: dict[str, float] = {}
    if t.by_hand:
        optimizer = sgd(model.parameters())
        for epoch in range(2):
            for batch in shuffled(data, epoch):
                optimizer.zero_grad()
                cross_entropy(model, batch).backward()
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
            with torch.no_grad():
                found[f"held {epoch}"] = float(cross_entropy(model, held.tensors))
            found[f"norm {epoch}"] = float(norm)
        return outcome(model, **found)
    manager = t.manager(global_batch_size=BATCH, shuffle=True, max_grad_norm=0.1)
    _, loader, val_loader = manager.setup_training(
        model, data, held, loss_fn=cross_entropy, optimizer=sgd
    )
    for epoch in range(2):
        for batch in loader:
            result = manager.trainer.train_step(batch)
        found[f"held {epoch}"] = manager.evaluate(val_loader)["loss"]
        found[f"norm {epoch}"] = float(result.grad_norm)
    manager.finish()
    return outcome(model, **found)


@case(LOOPS, "own loop: for x, y in loader, both time-major", point=13)
def unpacked_time_major(t: Trial) -> Outcome:
    return time_major(t)


@case(LOOPS, "own loop: time-major batches of the user, batch_size_fn", point=13)
def own_time_major(t: Trial) -> Outcome:
    return time_major(t, batch_size_fn=lambda batch: batch[0].shape[1])


def time_major(t: Trial, **given: Any) -> Outcome:
    """Tensors of shape (time, samples, features), of which 25 samples make an epoch."""
    x, y = numbers(25, 5, FEATURES, dtype=t.dtype), numbers(25, 5, 1, seed=4, dtype=t.dtype)
    model = mlp(t.dtype, out=1)

    def collate(samples: list[Any]) -> Any:
        return tuple(torch.stack(parts, 1) for parts in zip(*samples, strict=True))

    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH, collate_fn=collate)
    if t.by_hand:
        made = sgd(model.parameters())
        return Outcome(plain_loop(model, lambda _: loader, squares, made).tensors)
    manager = t.manager(global_batch_size=BATCH)
    _, batches, _ = manager.setup_training(model, loader, loss_fn=squares, optimizer=sgd, **given)
    for _ in range(2):
        for a, b in batches:
            manager.trainer.train_step((a.clone(), b.clone()) if given else (a, b))
    manager.finish()
    return outcome(model)


class KeepSmall(Callback):
    def on_step_end(self, run: Any, result: Any) -> None:
        with torch.no_grad():
            for p in run.model.parameters():
                p.clamp_(-0.3, 0.3)


@case(LOOPS, "weights clamped by a callback after each step (WGAN)")
def clamped_weights(t: Trial) -> Outcome:
    def optimizer(parameters: Any) -> Any:
        made = sgd(parameters)

        def clamp(o: Any, *_: Any) -> None:
            with torch.no_grad():
                for p in o.param_groups[0]["params"]:
                    p.clamp_(-0.3, 0.3)

        if t.by_hand:
            made.register_step_post_hook(clamp)
        return made

    more = {} if t.by_hand else {"fit": {"callbacks": [KeepSmall()]}}
    return t.train(mlp(t.dtype), classes(t.dtype), nn.CrossEntropyLoss(), optimizer, **more)


# Resuming on another number of ranks


class Uneven(Sampler[list[int]]):
    sizes = (5, 1, 9, 3, 8)

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for size in self.sizes:
            yield list(range(start, start + size))
            start += size


def resumable(kind: str, begin: bool) -> Callable[[Trial], Outcome]:
    """A training of twelve steps that begins with the first six on another number of ranks."""

    def run(t: Trial) -> Outcome:
        model, data = mlp(t.dtype), classes(t.dtype)
        settings: dict[str, Any] = {"global_batch_size": BATCH}
        given: Any = data
        batches: Any = lambda e: shuffled(data, e)  # noqa: E731
        if kind == "batch sampler":
            given = DataLoader(data, batch_sampler=Uneven())
            batches = lambda e: given  # noqa: E731
            settings = {}
        if kind == "batchnorm":
            model = seeded(
                lambda: nn.Sequential(
                    nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES)
                ),
                t.dtype,
            )
            settings |= {"sync_bn": True}
        optimizer = sgd if kind == "batchnorm" else adamw

        def scheduler(o: Any) -> Any:
            return warm_cosine(o)

        if t.by_hand:
            made = optimizer(model.parameters())
            return plain_loop(
                model, batches, cross_entropy, made, epochs=3, scheduler=scheduler(made)
            )
        manager = t.manager(
            epochs=3, shuffle=True, run_name="run", enable_fault_tolerance=True,
            max_steps=6 if begin else None, resume=None if begin else "auto", **settings,
        )  # fmt: skip
        result = manager.fit(
            model, given, loss_fn=cross_entropy, optimizer=optimizer, scheduler=scheduler
        )
        return outcome(model, **({} if begin else history(result)))

    return run


for kind, text in {
    "shuffled": "resumed: shuffled, AdamW, SequentialLR",
    "batchnorm": "resumed: BatchNorm, sync_bn, momentum",
    "batch sampler": "resumed: own batch sampler of varying sizes",
}.items():
    case(
        "Resuming in the middle of an epoch on another number of ranks",
        text,
        begun_elsewhere=resumable(kind, True),
        point=18 if kind == "batch sampler" else None,
    )(resumable(kind, False))


@case(LOOPS, "squares of a single value through fit, model already on float64 data")
def scalar_regression(t: Trial) -> Outcome:
    return t.train(mlp(t.dtype, out=1), values(t.dtype, 25), squares, sgd, shuffle=True)


def resumed_steps(begin: bool) -> Callable[[Trial], Outcome]:
    """An own loop over batches that saves in the middle of its second epoch."""

    def run(t: Trial) -> Outcome:
        model, data = mlp(t.dtype), classes(t.dtype, 25)
        if t.by_hand:
            made = adamw(model.parameters())
            found = plain_loop(model, lambda e: shuffled(data, e), cross_entropy, made, epochs=3)
            return Outcome(found.tensors)
        manager = t.manager(
            epochs=3, shuffle=True, run_name="run", enable_fault_tolerance=True,
            global_batch_size=BATCH, resume=None if begin else "auto",
        )  # fmt: skip
        _, loader, _ = manager.setup_training(model, data, loss_fn=cross_entropy, optimizer=adamw)
        trainer = manager.trainer
        for _ in range(trainer.epoch, 3):
            for batch in loader:
                result = trainer.train_step(batch)
                if begin and result.step == 6:
                    manager.save_checkpoint()
                    manager.finish()
                    return outcome(model)
        manager.finish()
        return outcome(model)

    return run


case(
    "Resuming in the middle of an epoch on another number of ranks",
    "resumed: own loop over batches",
    begun_elsewhere=resumed_steps(True),
)(resumed_steps(False))
