"""What the ranks of `mgt check` do together: sum known values, time messages, train three steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

ROUND_S = 0.05  # about how long one round of the same message takes
LONGEST_S = 1.0  # a message that takes longer is the last
STEPS = 3
PER_RANK_BATCH = 8


@dataclass(frozen=True)
class Rank:
    """`wire` is where a tensor lies that is exchanged: gloo goes through host memory."""

    rank: int
    ranks: int
    device: torch.device
    wire: torch.device

    def sum(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def exchange_values(me: Rank) -> dict[str, Any]:
    """How many elements of some sums are wrong: whole numbers that float32 holds exactly."""
    wrong = 0
    for length in (1, 1000, 2**20 + 3):
        pattern = torch.arange(length, device=me.wire) % 16
        found = me.sum((pattern * (me.rank + 1)).to(torch.float32))
        wanted = pattern * (me.ranks * (me.ranks + 1) // 2)
        wrong += int((found != wanted).sum())
    total = int(me.sum(torch.tensor([wrong], dtype=torch.int64, device=me.wire)))
    return {"wrong": wrong, "wrong_anywhere": total}


def measure_curve(me: Rank, sizes: Sequence[int], begin: Callable[[int], None]) -> dict[str, Any]:
    """Seconds that an all-reduce takes, by its bytes; the slowest rank's, median of rounds."""
    curve: list[tuple[int, float]] = []
    guess = ROUND_S
    for size in sizes:
        begin(size)
        data = torch.zeros(size // 4, dtype=torch.float32, device=me.wire)
        me.sum(data)
        repeats = max(2, min(20, int(ROUND_S / guess)))
        rounds = []
        for _ in range(3):
            me.sum(torch.zeros(1, device=me.wire))
            me.synchronize()
            begun = time.perf_counter()
            for _ in range(repeats):
                me.sum(data)
            me.synchronize()
            rounds.append((time.perf_counter() - begun) / repeats)
        # All ranks go on by the same number, or they would wait for each other for ever.
        guess = _slowest(statistics.median(rounds), me)
        curve.append((size, guess))
        if guess > LONGEST_S:
            break
    return {"curve": curve}


def _slowest(seconds: float, me: Rank) -> float:
    value = torch.tensor([seconds], dtype=torch.float64, device=me.wire)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def train(me: Rank) -> dict[str, Any]:
    """Some steps of DDP against the same steps on all samples in this process alone."""
    model = _small_model().to(me.device)
    gpu = [me.device] if me.device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=gpu)
    inputs, targets = _samples(PER_RANK_BATCH * me.ranks)
    share = slice(PER_RANK_BATCH * me.rank, PER_RANK_BATCH * (me.rank + 1))
    mine = inputs[share].to(me.device), targets[share].to(me.device)
    alone = _small_model()
    for _ in range(STEPS):
        _step(wrapped, *mine)
        _step(alone, inputs, targets)
    found = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
    wanted = torch.cat([p.detach().flatten() for p in alone.parameters()])
    apart = float((found - wanted).norm() / wanted.norm())
    # NaN is larger than every limit, and JSON has no word for it.
    return {
        "steps": STEPS,
        "apart": apart if apart == apart else 1e9,
        "replicas_differ": _spread(found, me) != 0.0,
    }


def _spread(weights: Tensor, me: Rank) -> float:
    """The largest difference of a weight between two ranks; equal replicas give 0."""
    high, low = weights.clone().to(me.wire), weights.clone().to(me.wire)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    return float((high - low).max())


def _small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def _samples(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 16, generator=generator), torch.randn(count, 4, generator=generator)


def _step(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """Plain gradient descent: building an optimizer of torch's takes seconds."""
    for parameter in model.parameters():
        parameter.grad = None
    nn.functional.mse_loss(model(inputs), targets).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.1)
