"""Trainings at the edges: each on any number of ranks, and by hand in one process.

Every case is a function of (folder, by_hand) that returns tensors by name. All are in float64 and
take their data in order, so that a plain loop sees the same global batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tiny import manager_for
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from multi_gpu_training import Callback
from multi_gpu_training.errors import CheckpointError, ModelError

SAMPLES, FEATURES, BATCH = 26, 6, 8  # the last batch has two samples
EPOCHS = 2
CHANGES = 3, 5  # after these steps, what a case changes while it trains
Result = dict[str, Tensor]
Case = Callable[[Path, bool], Result]


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True), torch.arange(SAMPLES))


def batches() -> Iterator[list[Tensor]]:
    tensors = data().tensors
    for _ in range(EPOCHS):
        for start in range(0, SAMPLES, BATCH):
            yield [tensor[start : start + BATCH] for tensor in tensors]


def settings(**more: Any) -> dict[str, Any]:
    return {"global_batch_size": BATCH, "shuffle": False, "epochs": EPOCHS, **more}


def result(model: nn.Module) -> Result:
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    plain = {n: torch.view_as_real(v) if v.is_complex() else v for n, v in state.items()}
    return {name: value for name, value in plain.items() if value.dtype != torch.int64}


def fit_or_loop(
    folder: Path,
    by_hand: bool,
    model: nn.Module,
    loss_fn: Any,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    between: Callable[[nn.Module, torch.optim.Optimizer, int], None] | None = None,
    clip: float | None = None,
    **more: Any,
) -> Result:
    """Train with `fit`, or with the loop that everyone writes; `between` is called after steps."""
    if by_hand:
        moved = optimizer([p for p in model.parameters() if p.requires_grad])
        for step, batch in enumerate(batches(), 1):
            moved.zero_grad()
            loss = loss_fn(model, batch)
            (loss[0] if isinstance(loss, tuple) else loss).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            moved.step()
            if between is not None:
                between(model, moved, step)
        return result(model)

    class Between(Callback):
        def on_step_end(self, run: Any, found: Any) -> None:
            if between is not None:
                between(model, run.optimizer, found.step)

    manager = manager_for(folder, **settings(max_grad_norm=clip, **more))
    manager.fit(model, data(), loss_fn=loss_fn, optimizer=optimizer, callbacks=[Between()])
    return result(manager.model)


def mlp(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(FEATURES, 8), *middle, nn.Tanh(), nn.Linear(8, 1)]
    return nn.Sequential(*layers).double()


def squares(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


# The cases


def gan(folder: Path, by_hand: bool, norm: bool = False) -> Result:
    """Two trainings in one process; each generator step leaves gradients in the critic."""
    # Without a bias before BatchNorm, whose gradient is nothing but rounding.
    generator, critic = mlp(*[nn.BatchNorm1d(8).double()] * norm), mlp()
    if norm:
        generator[0].bias = None
    for layer in (critic[0], generator[-1]):
        nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(5))

    def fake(batch: list[Tensor]) -> Tensor:
        return batch[0] * generator(batch[0])

    def critic_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return model(fake(batch).detach()).mean() - model(batch[0] + batch[1]).mean()

    def generator_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return -critic(batch[0] * model(batch[0])).mean()

    if by_hand:
        pairs = [(critic, critic_loss), (generator, generator_loss)]
        optimizers = [adamw(model.parameters()) for model, _ in pairs]
        for batch in batches():
            for (model, loss_fn), optimizer in zip(pairs, optimizers, strict=True):
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()
    else:
        names = "critic", "generator"
        managers = [manager_for(folder / name, **settings(sync_bn=norm)) for name in names]
        _, critics, _ = managers[0].setup_training(
            critic, data(), loss_fn=critic_loss, optimizer=adamw
        )
        _, generators, _ = managers[1].setup_training(
            generator, data(), loss_fn=generator_loss, optimizer=adamw
        )
        for _ in range(EPOCHS):
            for ours, theirs in zip(critics, generators, strict=True):
                managers[0].trainer.train_step(ours)
                managers[1].trainer.train_step(theirs)
        for manager in reversed(managers):
            manager.finish()
    return {
        f"{n}.{k}": v for n, m in (("g", generator), ("d", critic)) for k, v in result(m).items()
    }


def gan_with_batchnorm(folder: Path, by_hand: bool) -> Result:
    """The critic's loss calls the generator, whose ranks talk, also where they have no sample."""
    return gan(folder, by_hand, norm=True)


def backward_in_a_callback(folder: Path, by_hand: bool) -> Result:
    def probe(model: nn.Module, optimizer: Any, step: int) -> None:
        squares(model, next(batches())).backward()

    return fit_or_loop(folder, by_hand, mlp(), squares, sgd, between=probe)


def unfreeze(folder: Path, by_hand: bool) -> Result:
    """A frozen layer is trained from some step on, and another no longer."""
    torch.manual_seed(1)
    model = mlp(nn.Linear(8, 8).double())
    model[0].requires_grad_(False)

    def between(model: nn.Module, optimizer: Any, step: int) -> None:
        if step == CHANGES[0]:
            model[0].requires_grad_(True)
        if step == CHANGES[1]:
            model[1].requires_grad_(False)

    def all_of_them(_: Any) -> torch.optim.Optimizer:
        return sgd(model.parameters())

    return fit_or_loop(folder, by_hand, model, squares, all_of_them, between, clip=0.1)


def add_a_group(folder: Path, by_hand: bool) -> Result:
    """A layer is unfrozen and given to the optimizer while training."""
    model = mlp()
    model[0].requires_grad_(False)

    def between(model: nn.Module, optimizer: Any, step: int) -> None:
        if step == CHANGES[0]:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.2})

    return fit_or_loop(folder, by_hand, model, squares, sgd, between, clip=0.1)


def sometimes_weighted(folder: Path, by_hand: bool) -> Result:
    """A loss that returns a weight only for batches in which samples do not count equally."""

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Any:
        weight = torch.where(batch[2] % 5 == 3, 0.01, 1.0).double()
        losses = (model(batch[0]) - batch[1]).square().squeeze(1)
        if bool((weight == 1).all()):
            return losses.mean()
        return (losses * weight).sum() / weight.sum(), weight.sum()

    return fit_or_loop(folder, by_hand, mlp(), loss_fn, sgd, gradient_accumulation_steps=2)


class Experts(nn.Module):
    """Sends each sample to one of three experts; in the last batch, only to the second."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        # Without a bias, whose gradient before BatchNorm is nothing but rounding.
        self.experts = nn.ModuleList(nn.Linear(FEATURES, 8, bias=not norm) for _ in range(3))
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.head = nn.Linear(8, 1)
        self.double()

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        chosen = torch.where(number >= 24, 1, number % 2 * 2)
        hidden = x.new_zeros(len(x), 8)
        for place, expert in enumerate(self.experts):
            mine = chosen == place
            if mine.any():
                hidden = hidden.index_put((mine.nonzero().squeeze(1),), expert(x[mine]))
        return self.head(self.norm(hidden))


def idle_experts(folder: Path, by_hand: bool, norm: bool = False) -> Result:
    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        x = batch[0].clone().requires_grad_(True)
        output = model(x, batch[2])
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return F.mse_loss(output, batch[1]) + 0.1 * slope.square().sum(1).mean()

    more = {"find_unused_parameters": True, "sync_bn": norm}
    return fit_or_loop(folder, by_hand, Experts(norm), loss_fn, adamw, **more)


def idle_experts_behind_batchnorm(folder: Path, by_hand: bool) -> Result:
    return idle_experts(folder, by_hand, norm=True)


class ScaledNorm(nn.BatchNorm1d):
    """A user's BatchNorm with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 1.5 * super().forward(input).square()


class TwoNames(nn.Module):
    """One BatchNorm under two names, used twice, a subclass, and a hook."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second = nn.Linear(FEATURES, 5), nn.Linear(5, 5)
        self.norm = self.again = nn.BatchNorm1d(5)
        self.scaled = ScaledNorm(5)
        self.head = nn.Linear(5, 1)
        self.scaled.register_forward_hook(lambda module, inputs, output: output + 0.25)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.second(self.norm(self.first(x)).tanh()))
        return self.head(self.scaled(x))


def gradient_penalty(folder: Path, by_hand: bool) -> Result:
    """The backward through BatchNorm is differentiated itself."""

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        x = batch[0].clone().requires_grad_(True)
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return F.mse_loss(output, batch[1]) + 0.1 * (slope.norm(dim=1) - 1).square().mean()

    return fit_or_loop(folder, by_hand, TwoNames(), loss_fn, sgd, sync_bn=True)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.words = nn.Embedding(12, 4, sparse=True)
        self.bag = nn.EmbeddingBag(9, 4, sparse=True)
        self.head = nn.Linear(4, 1)
        self.double()

    def forward(self, number: Tensor) -> Tensor:
        return self.head(self.words(number % 12) + self.bag((number % 9).unsqueeze(1)))


def sparse_gradients(folder: Path, by_hand: bool) -> Result:
    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Any:
        mean = F.mse_loss(model(batch[2]), batch[1])
        return mean, torch.tensor(len(batch[2]) * 2.0)

    def plain(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    # torch itself clips no sparse gradient: a limit that is never reached.
    clip = None if by_hand else 1e9
    more = {"find_unused_parameters": True}
    return fit_or_loop(folder, by_hand, Words(), loss_fn, plain, clip=clip, **more)


def shares_without_weight(folder: Path, by_hand: bool) -> Result:
    """A mean over so few samples that a rank's part of it is 0/0."""

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Any:
        weight = (batch[2] % 4 == 0).double()
        losses = (model(batch[0]) - batch[1]).square().squeeze(1)
        return (losses * weight).sum() / weight.sum(), weight.sum()

    return fit_or_loop(folder, by_hand, mlp(), loss_fn, sgd)


def another_head(folder: Path, by_hand: bool) -> Result:
    """A layer is replaced while training, and the new one given to the optimizer."""

    def between(model: nn.Module, optimizer: Any, step: int) -> None:
        if step == CHANGES[0]:
            torch.manual_seed(8)
            model[2] = nn.Linear(8, 1).double()  # type: ignore[operator]
            optimizer.add_param_group({"params": list(model[2].parameters())})  # type: ignore[index]

    return fit_or_loop(folder, by_hand, mlp(), squares, sgd, between)


def another_norm(folder: Path, by_hand: bool) -> Result:
    """A BatchNorm is added while training, where they are one over all ranks."""

    def between(model: nn.Module, optimizer: Any, step: int) -> None:
        if step == CHANGES[0]:
            model.append(nn.BatchNorm1d(1).double())  # type: ignore[operator]
            optimizer.add_param_group({"params": list(model[-1].parameters())})  # type: ignore[index]

    return fit_or_loop(folder, by_hand, mlp(), squares, sgd, between, sync_bn=True)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.weight = nn.Parameter(torch.randn(FEATURES, 4, dtype=torch.complex128))
        self.head = nn.Linear(4, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x.to(torch.complex128) @ self.weight).abs())


def complex_parameters(folder: Path, by_hand: bool) -> Result:
    return fit_or_loop(folder, by_hand, Complex(), squares, adamw, clip=0.5)


class Huber(nn.Module):
    """A user's criterion, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("width", torch.tensor(0.7, dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) / self.width).square().add(1).sqrt().mean()


def own_criterion(folder: Path, by_hand: bool) -> Result:
    criterion = Huber()

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return criterion(model(batch[0]), batch[1])  # type: ignore[no-any-return]

    if by_hand:
        return fit_or_loop(folder, by_hand, mlp(), loss_fn, sgd)
    manager = manager_for(folder, **settings())
    pairs = TensorDataset(*data().tensors[:2])
    manager.fit(mlp(), pairs, loss_fn=criterion, optimizer=sgd)
    return result(manager.model)


class Variances(nn.Module):
    """A user's criterion with parameters: a variance for each of two parts of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.logs = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        parts = torch.stack([(output - target).abs().mean(), (output - target).square().mean()])
        return (parts * (-self.logs).exp() + self.logs).sum()


def criterion_that_learns(folder: Path, by_hand: bool) -> Result:
    """Stopped and resumed; a parameter in a closure is trained as well."""
    model, criterion = mlp(), Variances()
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return criterion(model(batch[0]) * scale, batch[1])  # type: ignore[no-any-return]

    every = [*model.parameters(), *criterion.parameters(), scale]
    if by_hand:
        optimizer = adamw(every)
        for batch in batches():
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            nn.utils.clip_grad_norm_(every, 0.3)
            optimizer.step()
    else:
        for resume, steps in ((None, CHANGES[1]), ("auto", None)):
            with torch.no_grad():  # what a new process would begin with
                model.load_state_dict(mlp().state_dict())
                criterion.logs.zero_()
                scale.fill_(1.0)
            more = {"run_name": "run", "resume": resume, "max_steps": steps, "max_grad_norm": 0.3}
            manager = manager_for(folder, **settings(enable_fault_tolerance=True, **more))
            manager.fit(model, data(), loss_fn=loss_fn, optimizer=adamw(every))
    learned = {"logs": criterion.logs.detach().clone(), "scale": scale.detach().clone()}
    return result(model) | learned


def sparse_inputs(folder: Path, by_hand: bool) -> Result:
    weight = nn.Module()
    weight.register_parameter("w", nn.Parameter(torch.ones(FEATURES, 1, dtype=torch.float64)))

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        found = torch.sparse.mm(batch[0], model.get_parameter("w"))
        return F.mse_loss(found, batch[1])

    def collate(rows: list[Any]) -> Any:
        found = [torch.stack(part) for part in zip(*rows, strict=True)]
        return found[0].to_sparse(), *found[1:]

    if by_hand:
        return fit_or_loop(folder, by_hand, weight, loss_fn, sgd)
    loader = DataLoader(data(), batch_size=BATCH, collate_fn=collate)
    manager = manager_for(folder, **settings())
    manager.fit(weight, loader, loss_fn=loss_fn, optimizer=sgd)
    return result(weight)


def refused_on_ranks(folder: Path) -> list[str]:
    """What is said of embeddings whose result depends on which words a rank has, and of a
    criterion that learns beside a sharded model."""
    words = TensorDataset(torch.arange(16).reshape(8, 2) % 9, torch.ones(8, 1).double())
    said = []
    for option, mode, loss_fn in (
        ({"max_norm": 0.5}, "distributed_data_parallel", Variances()),
        ({"scale_grad_by_freq": True}, "distributed_data_parallel", Variances()),
        ({}, "fully_sharded", Variances()),
        ({}, "fully_sharded", Huber()),  # which has a buffer, and nothing to train
    ):
        layers = nn.Embedding(9, 4, **option), nn.Flatten(), nn.Linear(8, 1)
        manager = manager_for(folder, **settings(training_mode=mode))
        try:
            manager.fit(nn.Sequential(*layers).double(), words, loss_fn=loss_fn)
        except ModelError as error:
            said.append(str(error))
    return said


def compiled_by_the_user(folder: Path, by_hand: bool) -> Result:
    model = mlp(nn.BatchNorm1d(8).double())
    if by_hand:
        return fit_or_loop(folder, by_hand, model, squares, sgd)
    compiled = torch.compile(model, backend="eager")
    fit_or_loop(folder, by_hand, compiled, squares, sgd, sync_bn=True)
    return result(model)


def recomputed(folder: Path, by_hand: bool) -> Result:
    """Blocks that are computed again in backward, with buffers that each forward changes."""
    torch.manual_seed(9)
    spectral = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    blocks = [nn.Sequential(spectral, nn.BatchNorm1d(8, momentum=0.3), nn.Tanh())]
    model = nn.Sequential(nn.Linear(FEATURES, 8), *blocks, nn.Linear(8, 1)).double()
    more = {"use_gradient_checkpointing": True, "sync_bn": True}
    return fit_or_loop(folder, by_hand, model, squares, sgd, **more)


class Seen(nn.Module):
    """Counts its forwards in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = mlp()
        self.register_buffer("forwards", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return self.model(x)  # type: ignore[no-any-return]


def light_first_rank(folder: Path, by_hand: bool) -> Result:
    """Rank 0 is so slow that a short batch would leave nothing for it, and has the buffers."""
    more: dict[str, Any] = {"broadcast_buffers": True}
    if torch.distributed.is_initialized() and not by_hand:
        more["share_weights"] = [1.0] + [40.0] * (torch.distributed.get_world_size() - 1)
    return fit_or_loop(folder, by_hand, Seen(), squares, sgd, **more)


def rates_set_by_the_user(folder: Path, by_hand: bool) -> Result:
    def between(model: nn.Module, optimizer: Any, step: int) -> None:
        if step == CHANGES[0]:
            optimizer.param_groups[0]["lr"] = 0.013
        if step == CHANGES[1]:
            optimizer.param_groups[0]["lr"] *= 3

    return fit_or_loop(folder, by_hand, mlp(), squares, sgd, between)


def dice_between_steps(folder: Path, by_hand: bool) -> Result:
    """Random numbers of the user's own loop, drawn between steps."""
    torch.manual_seed(11)
    drawn: list[Tensor] = []

    def between(model: nn.Module, optimizer: Any, step: int) -> None:
        drawn.append(torch.rand(3, dtype=torch.float64))

    found = fit_or_loop(folder, by_hand, mlp(), squares, sgd, between)
    return found | {"drawn": torch.stack(drawn)}


def steps_in_which_nothing_counts(folder: Path, by_hand: bool) -> Result:
    """Momentum and weight decay move the weights all the same."""

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Any:
        counts = (batch[2] // BATCH != 1).double()
        losses = (model(batch[0]) - batch[1]).square().squeeze(1)
        return (losses * counts).sum() / counts.sum().clamp(min=1), counts.sum()

    return fit_or_loop(folder, by_hand, mlp(), loss_fn, adamw)


class Annealed(nn.Module):
    """Counts its forwards in Python and in a buffer, and multiplies by what it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.model = mlp()
        torch.nn.utils.parametrizations.spectral_norm(self.model[0])
        self.calls = 0
        self.register_buffer("counted", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.counted += 1
        return self.model(x) * (1 + 0.1 * self.calls)  # type: ignore[no-any-return]


def counted_in_python(folder: Path, by_hand: bool) -> Result:
    """Model and loss are called equally often on every rank, also on one without a sample."""
    calls: list[int] = []

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        calls.append(1)
        return squares(model, batch) / len(calls)

    return fit_or_loop(folder, by_hand, Annealed(), loss_fn, sgd)


class Fixed(nn.BatchNorm1d):
    """Never in train mode, as soon as anybody asks for it."""

    def train(self, mode: bool = True) -> Fixed:
        return super().train(False)


def eval_mode_in_part(folder: Path, by_hand: bool) -> Result:
    """A frozen part whose BatchNorm the user put into eval mode, and one that keeps itself there,
    with validations in between."""
    norms = nn.BatchNorm1d(8), nn.BatchNorm1d(8), Fixed(8)
    model = mlp(*(norm.double() for norm in norms))
    model[1].eval().requires_grad_(False)
    model[1].running_mean += 0.5
    model[0].bias = None

    def between(model: nn.Module, optimizer: Any, step: int) -> None:
        assert not model[1].training  # type: ignore[index]

    if by_hand:
        model[3].train()
        return fit_or_loop(folder, by_hand, model, squares, sgd, between)
    manager = manager_for(folder, **settings(sync_bn=True))
    manager.fit(model, data(), data(), loss_fn=squares, optimizer=sgd)
    assert model.training and not model[1].training
    return result(manager.model)


def gradients_clipped_by_value(folder: Path, by_hand: bool) -> Result:
    """A callback changes the gradients of a step whose loss has a weight."""
    limit = 0.01

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Any:
        weight = 1.0 + batch[2].double()
        losses = (model(batch[0]) - batch[1]).square().squeeze(1)
        return (losses * weight).sum() / weight.sum(), weight.sum()

    class Clips(Callback):
        def on_optimizer(self, run: Any) -> None:
            nn.utils.clip_grad_value_(run.model.parameters(), limit)

    model = mlp()
    if not by_hand:
        manager = manager_for(folder, **settings())
        manager.fit(model, data(), loss_fn=loss_fn, optimizer=sgd, callbacks=[Clips()])
        return result(model)

    def clipping(parameters: Any) -> torch.optim.Optimizer:
        optimizer = sgd(parameters)
        optimizer.register_step_pre_hook(
            lambda *_: nn.utils.clip_grad_value_(model.parameters(), limit)
        )
        return optimizer

    return fit_or_loop(folder, by_hand, model, loss_fn, clipping)


def mean_over_rows(folder: Path, by_hand: bool) -> Result:
    """KLDivLoss(reduction="batchmean") of distributions over 8 places and 2 rows per sample."""
    model = nn.Sequential(mlp()[0], nn.Unflatten(1, (2, 4)), nn.LogSoftmax(2))
    inputs = data().tensors[0]
    targets = TensorDataset(inputs, inputs.repeat(1, 2)[:, :8].unflatten(1, (2, 4)).softmax(2))
    criterion = nn.KLDivLoss(reduction="batchmean")
    if not by_hand:
        manager_for(folder, **settings()).fit(model, targets, loss_fn=criterion, optimizer=sgd)
        return result(model)

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        rows = targets.tensors[1][batch[2]]
        return criterion(model(batch[0]), rows)  # type: ignore[no-any-return]

    return fit_or_loop(folder, by_hand, model, loss_fn, sgd)


def zipped_batches(folder: Path, by_hand: bool) -> Result:
    """Batches of the loader beside batches of the user, of another size, that all ranks see."""
    model = mlp()
    unlabelled = data().tensors[0][3:8].cos()
    others = [(unlabelled, unlabelled.abs(), unlabelled.sum())] * 9

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return squares(model, batch[0]) + 0.1 * model(batch[1][0]).square().mean()

    if by_hand:
        optimizer = sgd(model.parameters())
        for batch in zip(batches(), others, strict=False):
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
        return result(model)
    manager = manager_for(folder, **settings())
    _, loader, _ = manager.setup_training(model, data(), loss_fn=loss_fn, optimizer=sgd)
    for _ in range(EPOCHS):
        for batch in zip(loader, others, strict=False):
            manager.trainer.train_step(batch)
    manager.finish()
    return result(model)


def hooks_on_gradients(folder: Path, by_hand: bool) -> Result:
    """Hooks that clamp, normalise and decay, with a loss that counts some samples twice."""
    model = mlp()
    for parameter in model[0].parameters():
        parameter.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    model[-1].weight.register_hook(lambda grad: grad / (grad.norm() + 1e-3))

    def decay(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.02, 0.02).add_(parameter.detach(), alpha=0.1)

    model[-1].bias.register_post_accumulate_grad_hook(decay)

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        weights = 1.0 + batch[2] % 2
        each = (model(batch[0]) - batch[1]).square().squeeze(1)
        return (each * weights).sum() / weights.sum(), weights.sum()

    return fit_or_loop(folder, by_hand, model, loss_fn, sgd)


def hooks_that_add_up(folder: Path, by_hand: bool) -> Result:
    """Hooks that scale and mask do the same to a sum; here one of micro-batches."""
    model = mlp()
    mask = torch.arange(FEATURES) % 2
    model[0].weight.register_hook(lambda grad: 0.5 * grad * mask)
    seen: list[float] = []
    model[-1].weight.register_hook(lambda grad: seen.append(float(grad.norm())))
    return fit_or_loop(folder, by_hand, model, squares, sgd, batch_size=1)


class Dropping(Dataset[Any]):
    """Every fifth sample is broken, and `left` leaves it out."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        inputs, target, number = data()[index]
        return None if index % 5 == 2 else (inputs, target, number)


def left(samples: list[Any]) -> Any:
    return default_collate([sample[:2] for sample in samples if sample is not None])


class Gaps(Dropping):
    """Whole shares of three ranks are broken; nothing but the batch says how many are left."""

    def __getitem__(self, index: int) -> Any:
        broken = index < 24 and index % 8 in (0, 1, 2, 4)
        return None if broken else data()[index]


class Columns(Dropping):
    """Gives ready batches, which the collate_fn passes on."""

    def __getitems__(self, indices: list[int]) -> Any:
        inputs, targets, _ = data().tensors
        return {"inputs": inputs[indices], "targets": targets[indices]}


def passed_on(batch: Any) -> Any:
    return batch


def whole_shares_left_out(folder: Path, by_hand: bool) -> Result:
    model = mlp()
    if not by_hand:
        # Two micro-batches of four make a step: each counts what is left of it.
        loader = DataLoader(Gaps(), batch_size=4, collate_fn=left)
        how = settings(gradient_accumulation_steps=2)
        manager_for(folder, **how).fit(model, loader, loss_fn=squares, optimizer=sgd)
        return result(model)
    optimizer = sgd(model.parameters())
    for _ in range(EPOCHS):
        for start in range(0, SAMPLES, BATCH):
            batch = left([Gaps()[i] for i in range(start, min(start + BATCH, SAMPLES))])
            optimizer.zero_grad()
            squares(model, batch).backward()
            optimizer.step()
    return result(model)


def ready_batches(folder: Path, by_hand: bool) -> Result:
    model = mlp()

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch[:2] if by_hand else (batch["inputs"], batch["targets"])
        return F.mse_loss(model(inputs), targets)

    if by_hand:
        return fit_or_loop(folder, by_hand, model, loss_fn, sgd)
    loader = DataLoader(Columns(), batch_size=BATCH, collate_fn=passed_on)
    manager_for(folder, **settings()).fit(model, loader, loss_fn=loss_fn, optimizer=sgd)
    return result(model)


def norm_converted_by_the_user(folder: Path, by_hand: bool) -> Result:
    """As scripts for DDP do it, and without sync_bn. No bias before BatchNorm: its gradient is
    rounding."""
    model = mlp(nn.BatchNorm1d(8).double())
    model[0].bias = None
    if not by_hand:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return fit_or_loop(folder, by_hand, model, squares, sgd)


class Branch(nn.Module):
    """A part of the model that only large inputs use: on the first rank none, in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.part = mlp(), nn.Linear(FEATURES, 1).double()

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.trunk(inputs)
        large = inputs.abs().amax(1) > 1.9
        return (
            found.index_add(0, large.nonzero()[:, 0], self.part(inputs[large]))
            if large.any()
            else found
        )


def branch_of_one_rank(folder: Path, find_unused: bool = False) -> Result:
    how = {"find_unused_parameters": find_unused}
    return fit_or_loop(folder, False, Branch(), squares, adamw, **how)


def branch_that_some_ranks_take(folder: Path, by_hand: bool) -> Result:
    if by_hand:
        return fit_or_loop(folder, True, Branch(), squares, adamw)
    return branch_of_one_rank(folder, True)


class Domains(nn.Module):
    """Every domain has a BatchNorm of its own, which only its samples pass."""

    def __init__(self) -> None:
        super().__init__()
        norms = [nn.BatchNorm1d(FEATURES).double() for _ in range(2)]
        self.norms, self.line = nn.ModuleList(norms), nn.Linear(FEATURES, 1).double()

    def forward(self, inputs: Tensor, domains: Tensor) -> Tensor:
        normal = torch.zeros_like(inputs)
        for domain in domains.unique():
            rows = (domains == domain).nonzero()[:, 0]
            normal = normal.index_add(0, rows, self.norms[int(domain)](inputs[rows]))
        found: Tensor = self.line(normal)
        return found


def norms_of_other_domains(folder: Path, alone: bool) -> None:
    """Both ranks call one BatchNorm: the first rank that of domain 0, the second the other. alone:
    the second calls both."""

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        place = batch[2] % BATCH
        domains = (place == BATCH - 1) if alone else place // (BATCH // 2)
        return F.mse_loss(model(batch[0], domains), batch[1])

    fit_or_loop(folder, False, Domains(), loss_fn, sgd, sync_bn=True, find_unused_parameters=True)


class Squares(nn.Module):
    """A criterion that says itself what it divided by."""

    def forward(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return (output - target).square().mean(), len(output)


def _broken_samples(folder: Path, by_hand: bool, criterion: nn.Module) -> Result:
    model = mlp()
    if not by_hand:
        manager = manager_for(folder, **settings())
        loader = DataLoader(Dropping(), batch_size=BATCH, collate_fn=left)
        manager.fit(model, loader, loss_fn=criterion, optimizer=sgd)
        return result(manager.model)
    optimizer = sgd(model.parameters())
    for _ in range(EPOCHS):
        for start in range(0, SAMPLES, BATCH):
            numbers = range(start, min(start + BATCH, SAMPLES))
            inputs, target = left([Dropping()[number] for number in numbers])
            optimizer.zero_grad()
            F.mse_loss(model(inputs), target).backward()
            optimizer.step()
    return result(model)


def samples_left_out(folder: Path, by_hand: bool) -> Result:
    return _broken_samples(folder, by_hand, nn.MSELoss())


def criterion_with_a_weight(folder: Path, by_hand: bool) -> Result:
    return _broken_samples(folder, by_hand, Squares())


class Lookahead(torch.optim.Optimizer):
    """As many write such a wrapper: without `super().__init__()`."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.base.step()


def wrapped_optimizer(folder: Path, by_hand: bool) -> Result:
    return fit_or_loop(folder, by_hand, mlp(), squares, lambda params: Lookahead(sgd(params)))


def hook_with_accumulation(folder: Path) -> str:
    model = mlp()
    model[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    try:
        fit_or_loop(folder, False, model, squares, sgd, batch_size=1)
    except ModelError as error:
        return str(error)
    return ""


def trained_with_checkpoints(folder: Path, fault_tolerance: bool) -> str:
    """How a training of complex weights ends at once."""
    seen: list[Tensor] = []

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        seen.append(batch[0])
        return squares(model, batch)

    try:
        fit_or_loop(
            folder, False, Complex(), loss_fn, adamw, enable_fault_tolerance=fault_tolerance
        )
    except CheckpointError as error:
        assert not seen
        return str(error)
    return ""


def with_schedulers(folder: Path) -> None:
    model = mlp()
    optimizer = sgd(model.parameters())
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
    manager = manager_for(folder, **settings())
    manager.fit(model, data(), loss_fn=squares, optimizer=optimizer, scheduler=schedulers)


class Graphs(nn.Module):
    """Uneven numbers of nodes per sample, and edges that count in them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = mlp()[0], nn.BatchNorm1d(8).double(), mlp()[2]

    def forward(self, nodes: Tensor, edges: Tensor, owner: Tensor, graphs: int) -> Tensor:
        found = self.body(nodes)
        found = self.norm(found.index_add(0, edges[1], found[edges[0]].tanh()))
        found = found.new_zeros(graphs, 8).index_add(0, owner, found.tanh())
        return self.head(found)  # type: ignore[no-any-return]


def joined(samples: list[Any]) -> tuple[Tensor, ...]:
    """One graph of several, as libraries for graphs collate them."""
    sizes = [int(number) % 4 + 1 for *_, number in samples]
    starts = torch.tensor([0, *sizes[:-1]]).cumsum(0)
    both = [*zip(sizes, samples, starts, strict=True)]
    nodes = [torch.outer(torch.arange(1.0, n + 1).double(), x) for n, (x, *_), _ in both]
    edges = [torch.arange(n) + start for n, _, start in both]
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    targets = torch.stack([y for _, y, _ in samples])
    return torch.cat(nodes), torch.stack([torch.cat(edges)] * 2).flip(1), owner, targets


def of_any_shape(
    folder: Path, by_hand: bool, model: nn.Module, collate: Any, loss_fn: Any
) -> Result:
    if by_hand:
        rows = [data()[i] for i in range(SAMPLES)]

        def collated(model: nn.Module, batch: list[Tensor]) -> Tensor:
            return loss_fn(model, collate([rows[i] for i in batch[2]]))  # type: ignore[no-any-return]

        return fit_or_loop(folder, True, model, collated, sgd)
    loader = DataLoader(data(), batch_size=BATCH, collate_fn=collate)
    manager = manager_for(folder, **settings(sync_bn=True))
    manager.fit(model, loader, loss_fn=loss_fn, optimizer=sgd)
    return result(model)


def graphs_behind_batchnorm(folder: Path, by_hand: bool) -> Result:
    """Rows of such a batch are no samples: a rank without any cannot cut one off."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(*batch[:3], len(batch[3])), batch[3])

    return of_any_shape(folder, by_hand, Graphs(), joined, loss_fn)


def nested_inputs(folder: Path, by_hand: bool) -> Result:
    def collate(samples: list[Any]) -> Any:
        rows = [x.repeat(int(number) % 4 + 1, 1) for x, _, number in samples]
        nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
        return nested, torch.stack([y for _, y, _ in samples])

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        means = torch.stack([row.tanh().mean(0) for row in batch[0].unbind()])
        return squares(model, [means, batch[1]])

    return of_any_shape(folder, by_hand, mlp(), collate, loss_fn)


class Reentrant(nn.Module):
    """One layer, recomputed twice in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.layer = mlp(), nn.Linear(FEATURES, FEATURES).double()
        self.first = nn.Linear(FEATURES, FEATURES).double()

    def forward(self, inputs: Tensor) -> Tensor:
        found = self.first(inputs)
        for _ in range(2):
            found = checkpoint(self.layer, found, use_reentrant=True)
        return self.trunk(found)  # type: ignore[no-any-return]


def recomputed_twice(folder: Path) -> None:
    fit_or_loop(folder, False, Reentrant(), squares, sgd)


CASES: list[Case] = [
    another_norm,
    graphs_behind_batchnorm,
    nested_inputs,
    hooks_on_gradients,
    hooks_that_add_up,
    samples_left_out,
    criterion_with_a_weight,
    whole_shares_left_out,
    ready_batches,
    norm_converted_by_the_user,
    branch_that_some_ranks_take,
    wrapped_optimizer,
    gan,
    backward_in_a_callback,
    unfreeze,
    add_a_group,
    sometimes_weighted,
    idle_experts,
    idle_experts_behind_batchnorm,
    gradient_penalty,
    sparse_gradients,
    shares_without_weight,
    another_head,
    complex_parameters,
    own_criterion,
    criterion_that_learns,
    sparse_inputs,
    compiled_by_the_user,
    recomputed,
    light_first_rank,
    rates_set_by_the_user,
    dice_between_steps,
    gan_with_batchnorm,
    steps_in_which_nothing_counts,
    counted_in_python,
    eval_mode_in_part,
    gradients_clipped_by_value,
    mean_over_rows,
    zipped_batches,
]


def train(folder: Path, name: str) -> Result:
    case = next(case for case in CASES if case.__name__ == name)
    return case(folder, False)
