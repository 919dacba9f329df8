"""Cases of exactness.py: loops that call backward themselves, with any number of optimizers.

Each loop is written once. By hand it runs with `Plain`, which says in plain torch what the methods
of `manager.prepare`'s trainer mean on one process.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from exactness_trial import Outcome, Trial, case, integers, numbers, outcome, seeded
from torch import Tensor, nn, optim
from torch.func import functional_call, grad, vmap
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import TensorDataset

from multi_gpu_training.data.order import ShuffledBatches

OWN = "Loops with their own backward"
SIZE = 8
Body = Callable[[Any, Any], Any]


class Plain:
    """One process: a loss is differentiated for the parameters of its optimizer, and the end of a
    block moves every optimizer that has gradients and has not moved."""

    def __init__(
        self, data: TensorDataset | None, optimizers: list[optim.Optimizer], shuffle: bool
    ):
        self.data, self.optimizers, self.shuffle = data, optimizers, shuffle
        self.epoch = 0
        self.parts: list[tuple[Tensor, float]] = []

    @property
    def train_loader(self) -> Iterator[Any]:
        assert self.data is not None
        order, self.epoch = ShuffledBatches(len(self.data), SIZE, self.shuffle), self.epoch + 1
        return (list(self.data[batch]) for batch in order.batches(0, self.epoch - 1))

    @contextmanager
    def step(self, batch: Any = None) -> Iterator[Any]:
        parts = batch.values() if isinstance(batch, dict) else batch
        self.samples = 1 if batch is None else len(next(iter(parts)))
        moved: set[int] = set()
        hooks = [
            one.register_step_post_hook(lambda one, *_: moved.add(id(one)))
            for one in self.optimizers
        ]
        yield batch
        for one in self.optimizers:
            held = [p for group in one.param_groups for p in group["params"]]
            if id(one) not in moved and any(p.grad is not None for p in held):
                one.step()
            for p in held:
                p.grad = None
        for hook in hooks:
            hook.remove()

    def backward(self, loss: Tensor, optimizer: Any = None, **how: Any) -> Tensor:
        weight = how.get("weight", self.samples)
        weight = len(weight) if isinstance(weight, Tensor) and weight.ndim else float(weight)
        chosen = self.optimizers if optimizer is None else [optimizer]
        held = [p for one in chosen for group in one.param_groups for p in group["params"]]
        loss.backward(inputs=[p for p in held if p.requires_grad])
        return loss.detach()

    def shard(self, batch: Any) -> Any:
        return batch

    def finish(self) -> None:
        pass


def train(
    t: Trial,
    modules: list[nn.Module],
    optimizers: list[Any],
    body: Body,
    data: TensorDataset | None = None,
    passes: int = 2,
    shuffle: bool = False,
    **settings: Any,
) -> Outcome:
    """body(trainer, batch) for every batch of the dataset; without one, body(trainer, number).
    Compared are also the losses that it returns."""
    losses: list[Any] = []
    if t.by_hand:
        manager = trainer = Plain(data, optimizers, shuffle)
    else:
        manager = t.manager(global_batch_size=SIZE, shuffle=shuffle, **settings)
        trainer = manager.prepare(*modules, *optimizers, dataset=data)
        trainer.shard = manager.shard
    for _ in range(passes):
        for batch in range(4) if data is None else manager.train_loader:
            losses.append(body(trainer, batch))
    manager.finish()
    found = {f"loss {i}": float(loss) for i, loss in enumerate(losses) if loss is not None}
    return outcome(*modules, **found)


def net(t: Trial, *sizes: int, seed: int = 1, norm: bool = False) -> nn.Sequential:
    def build() -> nn.Module:
        layers: list[nn.Module] = []
        for into, out in itertools.pairwise(sizes[:-1]):
            layers += [nn.Linear(into, out, bias=not norm)]
            layers += [nn.BatchNorm1d(out), nn.Tanh()] if norm else [nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(*sizes[-2:]))

    found = seeded(build, t.dtype, seed)
    assert isinstance(found, nn.Sequential)
    return found


def rows(t: Trial, *widths: int, samples: int = 26) -> TensorDataset:
    made = (numbers(samples, width, seed=3 + i) for i, width in enumerate(widths))
    return TensorDataset(*(part.to(t.dtype) for part in made))


def labelled(t: Trial, samples: int = 25) -> TensorDataset:
    """The last batch has one sample."""
    return TensorDataset(numbers(samples, 6).to(t.dtype), integers(3, samples))


def adam(*modules: nn.Module, lr: float = 1e-2) -> optim.Optimizer:
    return optim.Adam([p for module in modules for p in module.parameters()], lr=lr)


def follow(target: nn.Module, source: nn.Module) -> None:
    with torch.no_grad():
        for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)


@case(OWN, "GAN, BatchNorm in the generator and its moving average, sync_bn", float32=True)
def averaged_gan(t: Trial) -> Outcome:
    g, d = net(t, 3, 8, 4, norm=True), net(t, 4, 8, 1, seed=2)
    average = copy.deepcopy(g).eval()
    of_g, of_d = optim.RMSprop(g.parameters(), 1e-3), optim.RMSprop(d.parameters(), 1e-3)

    def body(trainer: Any, batch: Any) -> Any:
        with trainer.step(batch) as (real, z):
            fake = g(z)
            trainer.backward((d(real) - 1).square().mean(), of_d)
            trainer.backward(d(fake.detach()).square().mean(), of_d)
            of_d.step()
            loss = trainer.backward((d(fake) - 1).square().mean(), of_g)
            of_g.step()
            follow(average, g)
            for mine, theirs in zip(average.buffers(), g.buffers(), strict=True):
                mine.copy_(theirs)
        return loss

    return train(t, [g, d, average], [of_g, of_d], body, rows(t, 4, 3), sync_bn=True)


@case(OWN, "WGAN-GP, the generator in every third step", left_out=("1.2.bias",))
def penalised_gan(t: Trial) -> Outcome:
    g, d = net(t, 3, 8, 4), net(t, 4, 8, 1, seed=2)
    of_g, of_d = adam(g), adam(d)
    turns = itertools.count(1)

    def body(trainer: Any, batch: Any) -> Any:
        with trainer.step(batch) as (real, z, u):
            fake = g(z).detach()
            mix = (u.sigmoid() * real + (1 - u.sigmoid()) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(d(mix).sum(), mix, create_graph=True)
            loss = d(fake).mean() - d(real).mean() + (slope.norm(dim=1) - 1).square().mean()
            found = trainer.backward(loss, of_d)
            of_d.step()
            if next(turns) % 3 == 0:
                trainer.backward(-d(g(z)).mean(), of_g)
        return found

    return train(t, [g, d], [of_g, of_d], body, rows(t, 4, 3, 1))


@case(OWN, "hinge GAN, spectral norm, two blocks per batch")
def hinge_gan(t: Trial) -> Outcome:
    g = net(t, 3, 8, 4)
    d = net(t, 4, 8, 1, seed=2)
    torch.manual_seed(3)
    for layer in (d[0], d[2]):
        spectral_norm(layer)
    of_g, of_d = adam(g), adam(d)

    def body(trainer: Any, batch: Any) -> Any:
        with trainer.step(batch) as (real, z):
            hinge = F.relu(1 - d(real)).mean() + F.relu(1 + d(g(z).detach())).mean()
            loss = trainer.backward(hinge, of_d)
        with trainer.step(batch) as (_, z):
            trainer.backward(-d(g(z)).mean(), of_g)
        return loss

    return train(t, [g, d], [of_g, of_d], body, rows(t, 4, 3))


@case(OWN, "SAC: twin critics, targets, a temperature outside of all modules")
def soft_actor_critic(t: Trial) -> Outcome:
    actor, critic = net(t, 4, 8, 2), net(t, 6, 8, 2, seed=2)
    target = copy.deepcopy(critic).requires_grad_(False)
    alpha = nn.Parameter(torch.zeros(1, dtype=t.dtype))
    of_a, of_c, of_t = adam(actor), adam(critic), optim.Adam([alpha], 1e-2)

    def body(trainer: Any, batch: Any) -> Any:
        with trainer.step(batch) as (s, a, r, after, e):
            with torch.no_grad():
                value = target(torch.cat([after, actor(after)], 1)).amin(1, keepdim=True)
                wanted = r + 0.9 * (value - alpha.exp() * e[:, :1])
            trainer.backward((critic(torch.cat([s, a], 1)) - wanted).square().mean(), of_c)
            of_c.step()
            chosen = actor(s) + 0.1 * e
            value = critic(torch.cat([s, chosen], 1)).amin(1)
            loss = (alpha.exp().detach() * chosen.sum(1) - value).mean()
            found = trainer.backward(loss, of_a)
            of_a.step()
            trainer.backward(-(alpha.exp() * (chosen.detach() - 1)).mean(), of_t)
            of_t.step()
            follow(target, critic)
        return found

    data = rows(t, 4, 2, 1, 4, 2)
    return train(t, [actor, critic, target], [of_a, of_c, of_t], body, data)


@case(OWN, "MoCo: keys of the whole batch, a queue, shards of the queries")
def queued_keys(t: Trial) -> Outcome:
    query = net(t, 6, 8, 5)
    key = copy.deepcopy(query).requires_grad_(False)
    queue = [F.normalize(numbers(12, 5, seed=9), dim=1).to(t.dtype)]
    optimizer = optim.SGD(query.parameters(), 0.05, momentum=0.9)

    def body(trainer: Any, number: int) -> Any:
        follow(key, query)
        one, other = (numbers(6, 6, seed=number + at).to(t.dtype) for at in (0, 30))
        with torch.no_grad():
            keys = F.normalize(key(other), dim=1)
        with trainer.step(trainer.shard((one, keys))) as (mine, theirs):
            z = F.normalize(query(mine), dim=1)
            logits = torch.cat([(z * theirs).sum(1, keepdim=True), z @ queue[0].T], 1) / 0.2
            right = torch.zeros(len(z), dtype=torch.int64)
            loss = trainer.backward(F.cross_entropy(logits, right))
        queue[0] = torch.cat([queue[0][6:], keys])
        return loss

    return train(t, [query, key], [optimizer], body)


@case(OWN, "Reptile: the outer gradient set by hand, alike on every rank")
def reptile(t: Trial) -> Outcome:
    model = net(t, 6, 8, 1)
    optimizer = adam(model)

    def body(trainer: Any, number: int) -> None:
        fast = copy.deepcopy(model)
        inner = optim.SGD(fast.parameters(), 0.1)
        for _ in range(3):
            inner.zero_grad()
            fast(numbers(9, 6, seed=number).to(t.dtype)).square().mean().backward()
            inner.step()
        with trainer.step():
            for mine, moved in zip(model.parameters(), fast.parameters(), strict=True):
                mine.grad = (mine - moved).detach()
            optimizer.step()

    return train(t, [model], [optimizer], body)


class SAM(optim.Optimizer):
    """As everyone copies it: its groups are those of the optimizer that it wraps."""

    def __init__(self, params: Any, rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho})
        self.base = optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def move(self, there: bool) -> None:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            if there:
                self.state[p]["old"] = p.clone()
                p.add_(p.grad * self.param_groups[0]["rho"] / norm)
            else:
                p.copy_(self.state[p]["old"])
        if not there:
            self.base.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError


@case(OWN, "SAM, two steps of its own")
def sharpness(t: Trial) -> Outcome:
    model = net(t, 6, 12, 3)
    optimizer = SAM(model.parameters())

    def body(trainer: Any, batch: Any) -> Any:
        with trainer.step(batch) as (x, y):
            for there in (True, False):
                loss = trainer.backward(F.cross_entropy(model(x), y))
                optimizer.move(there)
        return loss

    return train(t, [model], [optimizer], body, labelled(t))


@case(OWN, "PCGrad: gradients of two losses, projected on each other")
def projected(t: Trial) -> Outcome:
    model = net(t, 6, 12, 3)
    optimizer, held = adam(model), list(model.parameters())

    def body(trainer: Any, batch: Any) -> Any:
        with trainer.step(batch) as (x, y):
            found = []
            for loss in (F.cross_entropy(model(x), y), model(x).square().mean()):
                optimizer.zero_grad()
                total = trainer.backward(loss)
                found.append([p.grad.clone() for p in held])  # type: ignore[union-attr]
            dot = sum((a * b).sum() for a, b in zip(*found, strict=True))
            size = sum(b.square().sum() for b in found[1])
            for p, a, b in zip(held, *found, strict=True):
                p.grad = a + b - torch.clamp(dot / size, max=0) * b  # type: ignore[call-overload]
            optimizer.step()
        return total

    return train(t, [model], [optimizer], body, labelled(t))


@case(OWN, "truncated backpropagation in time, states carried, a short last chunk")
def truncated(t: Trial) -> Outcome:
    rnn = seeded(lambda: nn.LSTM(3, 6, batch_first=True), t.dtype)
    head = net(t, 6, 4)
    optimizer = optim.SGD([*rnn.parameters(), *head.parameters()], 0.3)
    x, y = numbers(7, 11, 3).to(t.dtype), integers(4, 7, 11)
    kept: list[Any] = [None]

    def body(trainer: Any, number: int) -> Any:
        at = slice(number % 3 * 4, number % 3 * 4 + 4)
        with trainer.step(trainer.shard((x[:, at], y[:, at]))) as (mine, wanted):
            out, state = rnn(mine, kept[0] if number % 3 else None)
            kept[0] = tuple(part.detach() for part in state)
            loss = trainer.backward(F.cross_entropy(head(out).transpose(1, 2), wanted))
            nn.utils.clip_grad_norm_([*rnn.parameters(), *head.parameters()], 0.25)
        return loss

    return train(t, [rnn, head], [optimizer], body)


@case(OWN, "labelled batches of the loader beside shards of unlabelled ones, 1 labelled at the end")
def two_sources(t: Trial) -> Outcome:
    model = net(t, 6, 12, 3)
    optimizer = adam(model)
    more = numbers(11, 6, seed=20).to(t.dtype)

    def body(trainer: Any, batch: Any) -> Any:
        with trainer.step(batch) as (x, y):
            (mine,) = trainer.shard((more,))
            trainer.backward(F.cross_entropy(model(x), y), weight=x)
            return trainer.backward(model(mine).softmax(1).square().mean(), weight=mine)

    return train(t, [model], [optimizer], body, labelled(t))


@case(OWN, "two means of batches of other sizes in one loss", refused_on_ranks=True)
def two_means(t: Trial) -> Outcome:
    model = net(t, 6, 12, 3)
    more = numbers(11, 6, seed=20).to(t.dtype)

    def body(trainer: Any, batch: Any) -> Any:
        with trainer.step(batch) as (x, y):
            (mine,) = trainer.shard((more,))
            loss = F.cross_entropy(model(x), y) + model(mine).square().mean()
            return trainer.backward(loss)

    return train(t, [model], [adam(model)], body, labelled(t))


def normalise(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad /= parameter.grad.norm() + 1e-3


@case(OWN, "hooks on gradients that clamp and normalise")
def hooked(t: Trial) -> Outcome:
    model = net(t, 6, 12, 3)
    model[0].weight.register_hook(lambda found: found.clamp(-0.02, 0.02))
    model[2].weight.register_post_accumulate_grad_hook(normalise)

    def body(trainer: Any, batch: Any) -> Any:
        with trainer.step(batch) as (x, y):
            trainer.backward(model(x).square().mean())
            return trainer.backward(F.cross_entropy(model(x), y))

    return train(t, [model], [adam(model)], body, labelled(t))


@case(OWN, "a batch with NaN, whose gradient the loop throws away")
def thrown_away(t: Trial) -> Outcome:
    model = net(t, 6, 12, 3)
    optimizer, data = adam(model), labelled(t)
    data.tensors[0][9] = float("nan")

    def body(trainer: Any, batch: Any) -> Any:
        with trainer.step(batch) as (x, y):
            loss = trainer.backward(F.cross_entropy(model(x), y))
            if loss.isfinite():
                optimizer.step()
                return loss
            optimizer.zero_grad()
        return None

    return train(t, [model], [optimizer], body, data)


@case(OWN, "a step in which no sample counts, Adam")
def nothing_counts(t: Trial) -> Outcome:
    model = net(t, 6, 12, 3)
    counts = (torch.arange(25) // SIZE != 1).to(t.dtype)

    def body(trainer: Any, batch: Any) -> Any:
        with trainer.step(batch) as (x, y, mask):
            losses = F.cross_entropy(model(x), y, reduction="none") * mask
            return trainer.backward(losses.sum() / mask.sum().clamp(min=1), weight=mask.sum())

    return train(
        t, [model], [adam(model)], body, TensorDataset(*labelled(t).tensors, counts), passes=3
    )


@case(OWN, "batches in another form, 1 sample in the last step")
def another_form(t: Trial) -> Outcome:
    model = net(t, 12, 8, 3)

    def body(trainer: Any, batch: Any) -> Any:
        x, y = batch
        with trainer.step({"inputs": x.repeat(1, 2), "labels": y}) as given:
            return trainer.backward(F.cross_entropy(model(given["inputs"]), given["labels"]))

    return train(t, [model], [adam(model)], body, labelled(t))


@case(OWN, "a BatchNorm added in the middle, sync_bn")
def grown(t: Trial) -> Outcome:
    model = net(t, 6, 12, 3)
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    turns = itertools.count()

    def body(trainer: Any, batch: Any) -> Any:
        if next(turns) == 2:
            model.append(nn.BatchNorm1d(3).to(t.dtype))
            optimizer.add_param_group({"params": model[-1].parameters()})
        with trainer.step(batch) as (x, y):
            return trainer.backward(F.cross_entropy(model(x), y))

    return train(t, [model], [optimizer], body, labelled(t, 24), sync_bn=True)


@case(OWN, "between steps: whole batches through BatchNorm in train mode, sync_bn")
def between_steps(t: Trial) -> Outcome:
    model = net(t, 6, 12, 3, norm=True)

    def body(trainer: Any, number: int) -> Any:
        x = numbers(9, 6, seed=number).to(t.dtype)
        with torch.no_grad():
            wanted = model(x).softmax(1)
        with trainer.step(trainer.shard((x, wanted))) as (mine, soft):
            return trainer.backward(F.mse_loss(model(mine), soft))

    return train(t, [model], [adam(model)], body, sync_bn=True)


@case(OWN, "DP-SGD: gradients per sample, clipped, as a surrogate loss")
def private(t: Trial) -> Outcome:
    model = net(t, 6, 12, 3)

    def one(weights: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    def body(trainer: Any, batch: Any) -> Any:
        with trainer.step(batch) as (x, y):
            weights = {name: p.detach() for name, p in model.named_parameters()}
            found = vmap(grad(one), (None, 0, 0))(weights, x, y)
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in found.values()]).norm(dim=0)
            scale = (0.5 / norms).clamp(max=1)
            means = {name: torch.tensordot(scale, g, 1) / len(x) for name, g in found.items()}
            trainer.backward(
                torch.stack([(p * means[n]).sum() for n, p in model.named_parameters()]).sum()
            )

    return train(t, [model], [optim.SGD(model.parameters(), 0.5)], body, labelled(t))


@case(OWN, "a second optimizer that prepare did not get", refusal=True)
def stranger(t: Trial) -> Outcome:
    model = net(t, 6, 12, 3)
    other = optim.SGD(model.parameters(), 0.1)

    def body(trainer: Any, batch: Any) -> Any:
        with trainer.step(batch) as (x, y):
            trainer.backward(F.cross_entropy(model(x), y))
            other.step()

    return train(t, [model], [adam(model)], body, labelled(t))


@case(OWN, "steps that a rank leaves out by its own samples", refused_on_ranks=True)
def left_out(t: Trial) -> Outcome:
    model, data = net(t, 6, 12, 3), labelled(t)
    data.tensors[0][0] = float("nan")

    def body(trainer: Any, batch: Any) -> Any:
        with trainer.step(batch) as (x, y):
            loss = F.cross_entropy(model(x), y)
            if loss.isfinite():
                trainer.backward(loss)

    return train(t, [model], [adam(model)], body, data)
