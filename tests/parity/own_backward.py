"""Trainings with their own backward, each as a plain loop and as a loop of ours.

A case is a class with modules and optimizers; `take` computes one step on a batch. A plain loop
passes it `loss.backward`, ours `trainer.backward`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tiny import manager_for
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

SAMPLES, BATCH, STEPS = 10, 4, 7  # the last batch of an epoch has 2 samples: less than 3 ranks
Backward = Callable[..., Any]


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for into, out in pairwise(sizes):
        layers += [nn.Linear(into, out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


class Case:
    """data: a batch is the rows of these tensors. waits: the end of the block moves."""

    waits = False
    settings: dict[str, Any] = {}
    data: tuple[Tensor, ...]
    modules: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]

    def before(self) -> None:
        """Between two steps."""

    def take(self, batch: Any, backward: Backward) -> None:
        raise NotImplementedError

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for m in self.modules for p in m.state_dict().values()]


class Judge(nn.Module):
    """A discriminator with a layer that only some samples use, and one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.rare, self.never = mlp(2, 6, 1), nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        out = self.body(x)
        if bool(flag.any()):
            out = out + flag[:, None] * self.rare(x)
        return out


class GAN(Case):
    """Two losses for the discriminator, then the generator against what it has become."""

    def __init__(self) -> None:
        self.g, self.d = mlp(3, 6, 2), Judge()
        self.modules = [self.g, self.d]
        self.og = torch.optim.Adam(self.g.parameters(), lr=1e-2)
        self.od = torch.optim.AdamW(self.d.parameters(), lr=1e-2, weight_decay=0.1)
        self.optimizers = [self.og, self.od]
        flag = (torch.arange(SAMPLES) % 4 == 1).double()
        self.data = (numbers(SAMPLES, 2), numbers(SAMPLES, 3, seed=1), flag)

    def take(self, batch: Any, backward: Backward) -> None:
        real, z, flag = batch
        fake = self.g(z)
        self.od.zero_grad()
        backward(F.softplus(-self.d(real, flag)).mean(), self.od)
        backward(F.softplus(self.d(fake.detach(), flag)).mean(), self.od)
        self.od.step()
        self.og.zero_grad()
        backward(F.softplus(-self.d(fake, flag)).mean(), self.og)
        self.og.step()


class WassersteinGAN(Case):
    """A gradient penalty, two critic steps per generator step, a scheduler."""

    def __init__(self) -> None:
        self.g, self.d = mlp(3, 6, 2), mlp(2, 6, 1)
        self.modules = [self.g, self.d]
        self.og = torch.optim.RMSprop(self.g.parameters(), lr=1e-3)
        self.od = torch.optim.RMSprop(self.d.parameters(), lr=1e-3)
        self.optimizers = [self.og, self.od]
        self.schedulers = [StepLR(self.od, 2, 0.5)]
        self.data = (numbers(SAMPLES, 2), numbers(SAMPLES, 3, seed=1), numbers(SAMPLES, seed=2))

    def take(self, batch: Any, backward: Backward) -> None:
        real, z, u = batch
        for _ in range(2):
            fake = self.g(z).detach()
            mix = u.sigmoid()[:, None]
            between = (mix * real + (1 - mix) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(self.d(between).sum(), between, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            self.od.zero_grad()
            backward(self.d(fake).mean() - self.d(real).mean() + 10 * penalty, self.od)
            self.od.step()
        self.og.zero_grad()
        backward(-self.d(self.g(z)).mean(), self.og)
        self.og.step()
        self.schedulers[0].step()


class ActorCritic(Case):
    """SAC's three optimizers: twin critics with targets, an actor, a temperature of its own."""

    def __init__(self) -> None:
        self.actor, self.critic = mlp(3, 6, 1), mlp(4, 6, 2)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        self.alpha = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.modules = [self.actor, self.critic, self.target]
        self.oc = torch.optim.Adam(self.critic.parameters(), lr=1e-2)
        self.oa = torch.optim.Adam(self.actor.parameters(), lr=1e-2)
        self.ot = torch.optim.Adam([self.alpha], lr=1e-2)
        self.optimizers = [self.oc, self.oa, self.ot]
        shapes = [(SAMPLES, 3), (SAMPLES, 1), (SAMPLES, 3), (SAMPLES, 1)]
        self.data = tuple(numbers(*shape, seed=i) for i, shape in enumerate(shapes))

    def take(self, batch: Any, backward: Backward) -> None:
        state, action, after, noise = batch
        with torch.no_grad():
            value = self.target(torch.cat([after, self.actor(after)], 1)).amin(1, keepdim=True)
            wanted = noise + 0.9 * (value - self.alpha.exp() * noise)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        found = self.critic(torch.cat([state, action], 1))
        backward((found - wanted).square().sum(1).mean(), self.oc)
        self.oc.step()
        chosen = self.actor(state) + 0.1 * noise
        value = self.critic(torch.cat([state, chosen], 1)).amin(1)
        backward((self.alpha.exp().detach() * chosen.squeeze(1) - value).mean(), self.oa)
        self.oa.step()
        backward(-(self.alpha.exp() * (chosen.detach() - 1)).mean(), self.ot)
        self.ot.step()
        with torch.no_grad():
            for mine, theirs in zip(
                self.target.parameters(), self.critic.parameters(), strict=True
            ):
                mine.lerp_(theirs, 0.1)

    def weights(self) -> list[Tensor]:
        return [*super().weights(), self.alpha.detach().clone()]


class LineSearch(Case):
    """LBFGS, whose line search compares losses that all ranks must see alike."""

    def __init__(self) -> None:
        self.model = mlp(3, 6, 1)
        self.modules = [self.model]
        self.optimizer = torch.optim.LBFGS(
            self.model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe"
        )
        self.optimizers = [self.optimizer]
        self.data = (numbers(SAMPLES, 3), numbers(SAMPLES, 1, seed=1))

    def take(self, batch: Any, backward: Backward) -> None:
        x, y = batch

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = F.mse_loss(self.model(x), y)
            backward(loss, self.optimizer)
            return loss

        self.optimizer.step(closure)


class Accumulation(Case):
    """Micro-batches of a loader, clipped as a whole, moved by the last block of a step."""

    waits = True
    settings = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3}

    def __init__(self) -> None:
        self.modules = [mlp(3, 6, 1)]
        self.optimizers = [torch.optim.Adam(self.modules[0].parameters(), lr=1e-2)]
        self.data = (numbers(SAMPLES, 3), numbers(SAMPLES, 1, seed=1))

    def take(self, batch: Any, backward: Backward) -> None:
        loss = F.mse_loss(self.modules[0](batch[0]), batch[1])
        backward(loss, self.optimizers[0], weight=len(batch[0]))  # a stand-in has a row, too


class SummedLosses(Case):
    """A loss summed over the batch, in two parts of which one may be empty, beside a mean."""

    def __init__(self) -> None:
        self.modules = [mlp(3, 6, 1)]
        self.optimizers = [torch.optim.SGD(self.modules[0].parameters(), lr=1e-2)]
        self.data = (numbers(SAMPLES, 3), numbers(SAMPLES, 1, seed=1))

    def take(self, batch: Any, backward: Backward) -> None:
        (model,), (optimizer,) = self.modules, self.optimizers
        optimizer.zero_grad()
        for last, (x, y) in enumerate(([part[:1] for part in batch], [part[1:] for part in batch])):
            loss = F.mse_loss(model(x), y, reduction="sum")
            backward(loss, optimizer, reduction="sum", last=bool(last))
        backward(model(batch[0]).square().mean(), optimizer)
        optimizer.step()


class NormalisedGAN(Case):
    """BatchNorm over uneven shares: the backward of one rank's loss runs through the others."""

    settings = {"sync_bn": True}

    def __init__(self) -> None:
        parts = [nn.Linear(3, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)]
        self.g, self.d = nn.Sequential(*parts), mlp(2, 6, 1)
        self.modules = [self.g, self.d]
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in self.modules]
        self.data = (numbers(SAMPLES, 2), numbers(SAMPLES, 3, seed=1))

    def take(self, batch: Any, backward: Backward) -> None:
        real, z = batch
        of_g, of_d = self.optimizers
        fake = self.g(z)
        of_d.zero_grad()
        backward(F.softplus(-self.d(real)).mean() + F.softplus(self.d(fake.detach())).mean(), of_d)
        of_d.step()
        of_g.zero_grad()
        backward(F.softplus(-self.d(fake)).mean(), of_g)
        of_g.step()

    def weights(self) -> list[Tensor]:
        return [value for value in super().weights() if value.is_floating_point()]


class SelfLabelled(Case):
    """The net in train mode, on all samples at once, says between two steps what to learn: every
    rank computes the same batch, which the running statistics count once."""

    settings = {"sync_bn": True}

    def __init__(self) -> None:
        parts = [nn.Linear(3, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)]
        self.modules = [nn.Sequential(*parts)]
        self.optimizers = [torch.optim.SGD(self.modules[0].parameters(), lr=0.1)]
        self.data = (numbers(SAMPLES, 3), numbers(SAMPLES, 1, seed=1))

    def before(self) -> None:
        with torch.no_grad():
            self.modules[0](self.data[0])

    def take(self, batch: Any, backward: Backward) -> None:
        (model,), (optimizer,) = self.modules, self.optimizers
        optimizer.zero_grad()
        backward(F.mse_loss(model(batch[0]), batch[1]), optimizer)
        optimizer.step()

    def weights(self) -> list[Tensor]:
        return [value for value in super().weights() if value.is_floating_point()]


class HookedGradients(Case):
    """Hooks of the user's that do something else to a sum of gradients than to its parts."""

    def __init__(self) -> None:
        self.modules = [mlp(3, 6, 1)]
        self.optimizers = [torch.optim.Adam(self.modules[0].parameters(), lr=1e-2)]
        self.data = (numbers(SAMPLES, 3), numbers(SAMPLES, 1, seed=1))
        first, *_, last = self.modules[0].parameters()
        first.register_hook(lambda grad: grad.clamp(-0.02, 0.02))
        last.register_post_accumulate_grad_hook(normalise)

    def take(self, batch: Any, backward: Backward) -> None:
        (model,), (optimizer,) = self.modules, self.optimizers
        optimizer.zero_grad()
        backward(F.mse_loss(model(batch[0]), batch[1]), optimizer)
        backward(model(batch[0]).square().mean(), optimizer)
        optimizer.step()


def normalise(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad /= parameter.grad.norm() + 1e-3


class MaskedLosses(Case):
    """Steps in which nothing counts for a net: its optimizer moves by momentum all the same."""

    def __init__(self) -> None:
        self.modules = [mlp(3, 6, 1), mlp(3, 6, 1)]
        self.optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in self.modules]
        counts = (torch.arange(SAMPLES)[:, None] // BATCH != torch.tensor([1, 2])).double()
        self.data = (numbers(SAMPLES, 3), numbers(SAMPLES, seed=1), counts)

    def take(self, batch: Any, backward: Backward) -> None:
        x, y, counts = batch
        for model, optimizer, mask in zip(self.modules, self.optimizers, counts.T, strict=True):
            errors = (model(x).squeeze(1) - y).square()
            optimizer.zero_grad()
            loss = (errors * mask).sum() / mask.sum().clamp(min=1)
            backward(loss, optimizer, weight=mask.sum())
            optimizer.step()


CASES = [GAN, WassersteinGAN, ActorCritic, LineSearch, Accumulation, SummedLosses, NormalisedGAN]
CASES += [SelfLabelled, HookedGradients, MaskedLosses]


def build(kind: type[Case]) -> Case:
    torch.manual_seed(3)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return kind()
    finally:
        torch.set_default_dtype(default)


def plain(kind: type[Case]) -> list[Tensor]:
    """The case in one process, by torch alone."""
    case = build(kind)
    starts = [start for _ in range(STEPS) for start in range(0, SAMPLES, BATCH)][:STEPS]

    def backward(loss: Tensor, optimizer: torch.optim.Optimizer, **_: Any) -> None:
        loss.backward()

    for start in starts:
        case.before()
        case.take([part[start : start + BATCH] for part in case.data], backward)
        if case.waits:
            nn.utils.clip_grad_norm_(case.modules[0].parameters(), 0.3)
            case.optimizers[0].step()
            case.optimizers[0].zero_grad()
    return case.weights()


def by_dataset(folder: Path, kind: type[Case], stops: int | None, **settings: Any) -> list[Tensor]:
    """The same through the loader of a dataset; `stops`: save and leave after that step."""
    case = build(kind)
    settings = {"global_batch_size": BATCH, "epochs": STEPS, **case.settings, **settings}
    manager = manager_for(folder, shuffle=False, max_steps=STEPS, **settings)
    trainer = manager.prepare(
        *case.modules,
        *case.optimizers,
        *getattr(case, "schedulers", ()),
        dataset=torch.utils.data.TensorDataset(*case.data),
    )
    while not manager.should_stop and manager.step != stops:
        for batch in manager.train_loader:
            case.before()
            with trainer.step(batch) as mine:
                case.take(mine, trainer.backward)
            if manager.step == stops:
                manager.save_checkpoint()  # before `break`, which would end the epoch
            if manager.should_stop or manager.step == stops:
                break
    manager.finish()
    return case.weights()


def by_hand(folder: Path, kind: type[Case], stops: int | None, **settings: Any) -> list[Tensor]:
    """The same without a dataset: every rank makes the whole batch, and takes its rows."""
    case, order = build(kind), torch.Generator().manual_seed(5)
    manager = manager_for(folder, **{**case.settings, **settings})
    trainer = manager.prepare(
        *case.modules,
        *case.optimizers,
        *getattr(case, "schedulers", ()),
        states={"order": order},
    )
    for step in range(manager.step, stops or STEPS):
        drawn = torch.randperm(SAMPLES, generator=order)  # only to be taken up by a resume
        start = step % 3 * BATCH
        case.before()
        with trainer.step(manager.shard([part[start : start + BATCH] for part in case.data])) as b:
            case.take(b, trainer.backward)
    if stops is not None:
        manager.save_checkpoint()
    manager.finish()
    return [*case.weights(), drawn.double()]


def every_case(folder: Path) -> dict[str, Any]:
    """Of every case: trained in one go, and stopped and resumed; by a loader and by hand."""
    found: dict[str, Any] = {}
    for number, kind in enumerate(CASES):
        train = (by_dataset, by_hand)[number % 2]
        whole = train(folder / kind.__name__ / "whole", kind, None)
        parts = folder / kind.__name__ / "parts"
        kept = {"enable_fault_tolerance": True, "run_name": "one"}
        train(parts, kind, 2 + number % 5, **kept)
        again = train(parts, kind, None, resume="auto", **kept)
        found[kind.__name__] = whole, again
    return found
