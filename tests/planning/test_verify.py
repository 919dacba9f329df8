"""`mgt verify` names the cause of a difference, and raises no false alarm."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from multi_gpu_training.measure.batch_rows import row_hashes, row_leaves, same_rows, take_rows
from multi_gpu_training.measure.script_runner import MeasureError
from multi_gpu_training.measure.split_probe import SplitProbe
from multi_gpu_training.measure.tensor_sketch import combined, difference, sketch
from multi_gpu_training.planning import verify as verification
from multi_gpu_training.planning.verify import VerifyReport, recorded_run, verify
from multi_gpu_training.planning.verify.mismatch import differs
from multi_gpu_training.planning.verify.rank_server import RankServers, preload

Verified = Callable[..., VerifyReport]

START = """
from types import SimpleNamespace
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager

torch.manual_seed(3)
x, y = torch.randn(80, 6), torch.randint(0, 3, (80,))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=10, epochs=4))
RANK, WORLD = manager.placement.dp_rank, manager.placement.dp_size
data = TensorDataset(x, y)
net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
sgd = lambda p: torch.optim.SGD(p, lr=0.05)
adamw = lambda p: torch.optim.AdamW(p, lr=1e-4)
"""


@pytest.fixture
def verified(rank_servers: RankServers, tmp_path: Path) -> Callable[..., VerifyReport]:
    def verified(script: str, ranks: tuple[int, ...] = (2,)) -> VerifyReport:
        path = tmp_path / "script.py"
        path.write_text(START + script)
        servers = rank_servers if max(ranks) <= len(rank_servers.processes) else None
        return verify([str(path)], ranks, 6, "cpu", lambda text: None, servers)

    return verified


BUGS = {
    "loss divided by the world size": (
        "manager.fit(net, data, optimizer=adamw,"
        " loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1]) / WORLD)",
        "the loss is divided by the number of ranks",
    ),
    "clipping per rank": (
        "class Clip(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, w): return w.view_as(w)\n"
        "    @staticmethod\n"
        "    def backward(ctx, g): return g * min(1.0, 1e-4 / float(g.norm() + 1e-12))\n"
        "def loss_fn(m, b):\n"
        "    h = torch.tanh(F.linear(b[0], Clip.apply(m[0].weight), m[0].bias))\n"
        "    return F.cross_entropy(m[2](h), b[1])\n"
        "manager.fit(net, data, optimizer=sgd, loss_fn=loss_fn)",
        "gradients are clipped per rank",
    ),
    "data per rank": (
        "manager.fit(net, TensorDataset(x[RANK::WORLD], y[RANK::WORLD]), optimizer=sgd)",
        "data per rank",
    ),
    "data drawn without a seed": (
        "torch.seed()\nmanager.fit(net, TensorDataset(torch.randn(80, 6), y), optimizer=sgd)",
        "not the same on every rank: on rank 1 tensor 0 has other values than on rank 0",
    ),
    "a parameter changed on one rank": (
        "class Reset(Callback):\n"
        "    def on_step_end(self, run, result):\n"
        "        if RANK == 1: nn.init.zeros_(run.model[2].bias)\n"
        "manager.fit(net, data, optimizer=sgd, callbacks=[Reset()])",
        "parameter 2.bias is changed after the step, in a callback on rank 1 alone",
    ),
    "a buffer of one rank": (
        "class Tracked(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.net = net; self.register_buffer('mean', torch.zeros(6))\n"
        "    def forward(self, x):\n"
        "        self.mean.lerp_(x.detach().mean(0), 0.1); return self.net(x)\n"
        "manager.fit(Tracked(), data, optimizer=sgd)",
        "buffer mean is not synchronised",
    ),
    "in-batch pairs": (
        "def pairs(m, b):\n"
        "    z = F.normalize(m(b[0]), dim=-1)\n"
        "    return F.cross_entropy(z @ z.T / 0.3, torch.arange(len(z)))\n"
        "manager.fit(net, data, loss_fn=pairs, optimizer=sgd)",
        "in-batch pairs",
    ),
    "a generator per process": (
        "g = torch.Generator().manual_seed(RANK)\n"
        "manager.fit(net, data, optimizer=sgd, loss_fn=lambda m, b: F.cross_entropy("
        "m(b[0] + torch.randn(b[0].shape, generator=g)), b[1]))",
        "draws from its own generator",
    ),
    "a ratio of sums whose divisor depends on the model": (
        "def dice(m, b):\n"
        "    p, t = m(b[0]).softmax(1), F.one_hot(b[1], 3)\n"
        "    return 1 - (p * t).sum() / (p.pow(2).sum() + t.sum())\n"
        "manager.fit(net, data, loss_fn=dice, optimizer=sgd)",
        "the loss is computed over the batch as a whole",
    ),
    "one gradient divided by the world size": (
        "net[0].weight.register_hook(lambda g: g / WORLD)\nmanager.fit(net, data, optimizer=sgd)",
        "the gradient of 0.weight is divided by the number of ranks",
    ),
    "values normalised by a rank's part of the batch": (
        "data = TensorDataset(x, torch.randn(80, 3) * 2 + 1)\n"
        "_, loader, _ = manager.setup_training(net, data, loss_fn=nn.MSELoss(), optimizer=sgd)\n"
        "for x, y in loader:\n"
        "    manager.trainer.train_step((x, (y - y.mean()) / y.std()))\n"
        "manager.finish()",
        "is scaled and shifted on each rank by statistics of its own part",
    ),
    "samples mixed in collate_fn": (
        "def collate(rows):\n"
        "    x = torch.stack([row[0] for row in rows]); return x + 3 * x.flip(0), x\n"
        "net = nn.Linear(6, 6)\n"
        "loader = DataLoader(data, batch_size=10, shuffle=True, collate_fn=collate)\n"
        "manager.fit(net, loader, loss_fn=nn.MSELoss(), optimizer=sgd)",
        "mixing in collate_fn",
    ),
    "BatchNorm with accumulation": (
        "manager.config.gradient_accumulation_steps = 2\n"
        "net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))\n"
        "manager.fit(net, data, optimizer=sgd)",
        "BatchNorm (1) normalises each rank's part alone",
    ),
    "a vocabulary in the order of a set": (
        "words = {word: place for place, word in enumerate({f'word {i}' for i in range(80)})}\n"
        "order = [words[f'word {i}'] for i in range(80)]\n"
        "manager.fit(net, TensorDataset(x[order], y[order]), optimizer=sgd)",
        "data per rank",
    ),
    "padding counted in the mean": (
        "def collate(rows):\n"
        "    x = nn.utils.rnn.pad_sequence([r[0].repeat(1 + int(r[1]), 1) for r in rows], True)\n"
        "    return x, x.sum(2)\n"
        "loader = DataLoader(TensorDataset(x, torch.arange(80) % 7), 10, collate_fn=collate)\n"
        "manager.fit(net, loader, optimizer=sgd,"
        " loss_fn=lambda m, b: (m(b[0]).mean(2) - b[1]).abs().mean())",
        "the loss counts the padding",
    ),
    "weights set by the first batch": (
        "class Shift(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        if not hasattr(self, 'ready'):\n"
        "            self.ready = True; self.bias.data.copy_(-x.detach().mean(0))\n"
        "        return super().forward(x)\n"
        "manager.fit(nn.Sequential(Shift(6, 6), net), data, optimizer=sgd)",
        "parameter 0.bias is changed during the forward",
    ),
    "the hardest third of a batch": (
        "def hardest(m, b):\n"
        "    each = F.cross_entropy(m(b[0]), b[1], reduction='none')\n"
        "    return each.topk(max(1, len(each) // 3)).values.mean()\n"
        "manager.fit(net, data, optimizer=sgd, loss_fn=hardest)",
        "computed over the batch as a whole",
    ),
    "a setting computed from the ranks": (
        "manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=10, epochs=4,"
        " max_grad_norm=0.01 * WORLD))\n"
        "manager.fit(net, data, optimizer=sgd)",
        "the setting max_grad_norm depends on the number of ranks: it is 0.02 on 2 ranks and 0.01",
    ),
    "a setting whose effect comes later": (
        "manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=10, epochs=4,"
        " max_steps=1000 // WORLD))\n"
        "manager.fit(net, data, optimizer=sgd)",
        "the setting max_steps depends on the number of ranks: it is 500 on 2 ranks and 1000",
    ),
    "a batch that the ranks do not divide": (
        "manager = MultiGPUTrainingManager(MultiGPUConfig(epochs=4))\n"
        "manager.fit(net, DataLoader(data, batch_size=9 // WORLD), optimizer=sgd)",
        "the script computes 4 samples for each of 2 ranks, and 9 for one rank alone",
    ),
    "batches of the loader cut to a size": (
        "_, loader, _ = manager.setup_training(net, data, optimizer=sgd)\n"
        "for x, y in loader:\n"
        "    manager.trainer.train_step((x[:3], y[:3]))\n"
        "manager.finish()",
        "cuts or collects the batches that the loader gives it: together the ranks train "
        "on 6 samples of a step, one rank alone on 3",
    ),
    "a batch drawn by each rank and shared out": (
        "manager.setup_training(net, optimizer=sgd)\n"
        "draw = torch.Generator().manual_seed(RANK)\n"
        "for _ in range(8):\n"
        "    rows = torch.randperm(80, generator=draw)[:10]\n"
        "    manager.trainer.train_step(manager.shard((x[rows], y[rows])))\n"
        "manager.finish()",
        "the script shuffles or draws its batches by rank",
    ),
    "a deviation over a part of one sample": (
        "manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=10, epochs=4,"
        " on_nonfinite='skip'))\n"
        "def spread(m, b):\n"
        "    out = m(b[0]); return F.cross_entropy(out, b[1]) + 0 * out.std(0).sum()\n"
        "manager.fit(net, data, optimizer=sgd, loss_fn=spread)",
        "the loss on rank 1 is NaN or infinite, for 1 samples",
    ),
    "a parameter changed on rank 0 alone": (
        "class Prune(Callback):\n"
        "    def on_step_end(self, run, result):\n"
        "        if RANK == 0 and WORLD > 1: nn.init.zeros_(run.model[2].bias)\n"
        "manager.fit(net, data, optimizer=sgd, callbacks=[Prune()])",
        "parameter 2.bias is changed after the step, in a callback on rank 0 alone",
    ),
    "a rate in the config scaled by the ranks": (
        "manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=10, epochs=4,"
        " lr_scaling='linear', learning_rate=1e-3 * WORLD))\n"
        "manager.fit(net, data)",
        "twice: lr_scaling=linear scales it for the batch already",
    ),
    "another optimizer on rank 1": (
        "manager.fit(net, data, optimizer=adamw if RANK else sgd)",
        "optimizer is set by each rank for itself (optimizer of parameter group 0 is AdamW",
    ),
    "a loss that takes a gradient itself": (
        "def loss_fn(m, b):\n"
        "    x = b[0].clone().requires_grad_(); out = m(x)\n"
        "    slope, = torch.autograd.grad(out.sum(), x, create_graph=True)\n"
        "    return F.cross_entropy(out, b[1]) + (slope.norm() - 1) ** 2\n"
        "manager.fit(net, data, optimizer=sgd, loss_fn=loss_fn)",
        "in-batch pairs",
    ),
    "rate scaled by the ranks": (
        "manager.fit(net, data, optimizer=lambda p: torch.optim.SGD(p, lr=1e-6 * WORLD))",
        "the rate is scaled by the number of ranks: 2e-06 on 2 ranks, 1e-06 on one",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_seeded_bug_fails_and_its_cause_is_named(verified: Verified, name: str) -> None:
    script, expected = BUGS[name]
    report = verified(script)
    assert report.problems and not report.passed
    causes = [line for line in report.problems if line.startswith("cause: ")]
    assert len(causes) == 1 and expected in causes[0], report.problems


def test_hooks_on_parameters_and_a_batch_divided_by_the_script_pass(verified: Verified) -> None:
    script = (
        "manager = MultiGPUTrainingManager(MultiGPUConfig(batch_size=12 // WORLD, epochs=4))\n"
        "for p in net.parameters():\n"
        "    p.register_hook(lambda g: g.clamp(-1e-3, 1e-3))\n"
        "class Attend(nn.Module):\n"
        "    def __init__(self): super().__init__(); self.net, self.attention_dropout = net, 0.3\n"
        "    def forward(self, x):\n"
        "        h = self.net(x)[:, None]\n"
        "        p = self.attention_dropout if self.training else 0.0\n"
        "        return F.scaled_dot_product_attention(h, h, h, dropout_p=p)[:, 0]\n"
        "manager.fit(Attend(), data, optimizer=sgd)"
    )
    report = verified(script)
    assert report.passed, (report.problems, report.notes)
    assert any("attention_dropout" in note for note in report.notes)
    assert report.by_hand is not None and report.by_hand < 1e-9


def test_a_second_training_starts_from_the_same_weights_and_random_numbers(
    verified: Verified,
) -> None:
    script = (
        "manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=20, epochs=1))\n"
        "manager.fit(net, data, optimizer=adamw)\n"
        "manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=20, epochs=2))\n"
        "deeper = nn.Sequential(net, nn.Linear(3, 3))\n"
        "manager.fit(deeper, data, optimizer=sgd)"
    )
    report = verified(script)
    assert report.passed, (report.problems, report.notes)
    assert not any("should it train again" in note for note in report.notes)
    wrong = verified(script[:-1] + ", loss_fn=lambda m, b: m(b[0]).mean() / WORLD)")
    assert any("divided by the number of ranks" in problem for problem in wrong.problems)


@pytest.mark.engines  # long; one correct script is among the quick tests of the command
def test_correct_scripts_pass(verified: Verified) -> None:
    scripts = {
        "casts, constants and states in float32, a criterion that learns": (
            "class Cell(nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__(); self.cell, self.out = nn.GRUCell(6, 8), nn.Linear(8, 3)\n"
            "        self.scale = torch.tensor([0.5])\n"
            "    def forward(self, x):\n"
            "        return self.out(self.cell(x.float(), torch.zeros(len(x), 8))) * self.scale\n"
            "class Scaled(nn.Module):\n"
            "    def __init__(self): super().__init__(); self.w = nn.Parameter(torch.ones(1))\n"
            "    def forward(self, out, target): return F.cross_entropy(out * self.w, target)\n"
            "manager.fit(Cell(), data, data, loss_fn=Scaled(), optimizer=adamw)"
        ),
        "a first step whose gradients cancel out": (
            "places = torch.zeros(3, 3)\n"
            "class Move(Callback):\n"
            "    def on_step_end(self, run, result): places.copy_(torch.eye(3))\n"
            "def loss_fn(m, b):\n"
            "    return F.cross_entropy(-torch.cdist(m(b[0]), places.to(b[0])), b[1])\n"
            "manager.fit(net, data, loss_fn=loss_fn, optimizer=sgd, callbacks=[Move()])"
        ),
        "weights divided by the ranks, quotients of masks": (
            "def loss_fn(m, b):\n"
            "    weight = 1.0 + (b[1] == 1)\n"
            "    each = F.cross_entropy(m(b[0]), b[1], reduction='none') * weight\n"
            "    return each.sum() / weight.sum(), weight.sum() / WORLD\n"
            "manager.fit(net, data, loss_fn=loss_fn, optimizer=sgd)"
        ),
        "padding that depends on the batch": (
            "rows = [torch.randint(1, 9, (2 + i % 5,)) for i in range(60)]\n"
            "def collate(samples):\n"
            "    return nn.utils.rnn.pad_sequence(samples, batch_first=True)\n"
            "class Bag(nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__(); self.emb = nn.Embedding(9, 4, padding_idx=0)\n"
            "    def forward(self, x): return self.emb(x).sum((1, 2))\n"
            "loader = DataLoader(rows, batch_size=10, shuffle=True, collate_fn=collate)\n"
            "manager.fit(Bag(), loader, loss_fn=lambda m, b: m(b).pow(2).mean(), optimizer=sgd)"
        ),
        "own batches, cut by rank, fewer steps than asked for, an optimizer that counts": (
            "class Slower(torch.optim.SGD):\n"
            "    count = 0\n"
            "    def step(self, closure=None):\n"
            "        self.count += 1\n"
            "        for p in net.parameters(): p.grad.div_(self.count)\n"
            "        super().step()\n"
            "manager.setup_training(net, data, optimizer=lambda p: Slower(p, lr=0.05))\n"
            "for part in torch.arange(50).split(10):\n"
            "    part = part[RANK::WORLD]\n"
            "    manager.trainer.train_step((x[part], y[part]))\n"
            "manager.finish()"
        ),
    }
    scripts["graphs, of which a batch has one tensor of nodes"] = (
        "rows = [(torch.randn(2 + i % 4, 3), torch.randn(2 + i % 4)) for i in range(54)]\n"
        "def collate(rows):\n"
        "    parts = [torch.cat(part) for part in zip(*rows)]\n"
        "    return SimpleNamespace(x=parts[0], y=parts[1], num_graphs=len(rows))\n"
        "loader = DataLoader(rows, batch_size=9, collate_fn=collate)\n"
        "manager.fit(nn.Linear(3, 1), loader, optimizer=sgd, loss_fn=lambda m, b: ("
        "F.mse_loss(m(b.x)[:, 0], b.y), torch.tensor(float(len(b.y)))))"
    )
    scripts["a gradient that is zero but for rounding, a layer unfrozen later"] = (
        "class Thaw(Callback):\n"
        "    def on_epoch_begin(self, run, epoch): run.model[0].requires_grad_(epoch > 0)\n"
        "net[0].requires_grad_(False)\n"
        "triplets = TensorDataset(*torch.randn(3, 24, 6))\n"
        "manager.fit(net, triplets, optimizer=sgd, callbacks=[Thaw()], "
        "loss_fn=lambda m, b: F.triplet_margin_loss(*map(m, b)))"
    )
    scripts["a first step in which nothing counts"] = (
        "keep = torch.arange(60) % 4 // 3 * 1.0\n"
        "keep[:20] = 0\n"
        "def loss_fn(m, b):\n"
        "    each = F.cross_entropy(m(b[0]), b[1], reduction='none') * b[2]\n"
        "    return each.sum() / b[2].sum().clamp(min=1), b[2].sum()\n"
        "loader = DataLoader(TensorDataset(x[:60], y[:60], keep), 10)\n"
        "manager.fit(net, loader, loss_fn=loss_fn, optimizer=adamw)"
    )
    for name, script in scripts.items():
        report = verified(script, (2, 3))
        assert report.passed, (name, report.problems, report.notes)
        assert report.conditions.double and report.own is not None
        if "zero but for rounding" not in name:  # whose relative distance says nothing
            assert all(outcome.gradients < 1e-12 for outcome in report.outcomes), name


@pytest.mark.parametrize(
    "loss",
    [
        "F.cross_entropy(m(F.dropout(b[0], 0.3)), b[1])",
        "F.nll_loss(F.gumbel_softmax(m(b[0])), b[1])",
        "F.cross_entropy(F.scaled_dot_product_attention("
        "*[m(b[0])[:, None]] * 3, dropout_p=0.5)[:, 0], b[1])",
    ],
    ids=["dropout", "inside a function of torch", "in attention"],
)
def test_noise_in_the_model_is_not_comparable_and_named(verified: Verified, loss: str) -> None:
    report = verified(f"manager.fit(net, data, optimizer=sgd, loss_fn=lambda m, b: {loss})")
    assert not report.passed and not report.problems
    assert report.not_comparable is not None and "draws random numbers" in report.not_comparable
    assert any("everything agrees" in line for line in report.notes)


def test_batches_that_grow_with_the_ranks_are_not_comparable(verified: Verified) -> None:
    script = (
        "manager.setup_training(net, data, optimizer=sgd)\n"
        "for part in torch.arange(80)[RANK::WORLD].split(5):\n"
        "    manager.trainer.train_step((x[part], y[part]))\n"
        "manager.finish()"
    )
    report = verified(script)
    assert report.not_comparable is not None
    assert "a step sees 10 samples on 2 ranks and 5 on one" in report.not_comparable


def test_a_diagnosis_that_raises_does_not_hide_the_finding(
    verified: Verified, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(verification, "diagnose", broken)
    report = verified(BUGS["loss divided by the world size"][0])
    assert "step 1: the loss is" in report.problems[0]
    assert "the diagnosis itself failed (KeyError('broken'))" in report.problems[1]


def test_an_early_end_shows_its_error_and_its_place(
    rank_servers: RankServers, tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text("\n\nraise ValueError('no such column: age')\n")
    with pytest.raises(MeasureError, match=r"no such column: age.*train.py:3"):
        verify([str(path)], (2,), 6, "cpu", lambda text: None, rank_servers)


def test_a_script_without_a_manager_is_told_what_to_use(
    rank_servers: RankServers, tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text("print('epoch 1: loss 0.3')\n")
    with pytest.raises(MeasureError, match="ended without a MultiGPUTrainingManager") as found:
        verify([str(path)], (2,), 6, "cpu", lambda text: None, rank_servers)
    assert "manager.fit" in str(found.value) and "loss 0.3" not in str(found.value)


def test_ranks_that_wait_for_each_other_are_ended_and_named(
    verified: Verified, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_run, "IDLE_S", 4.0)
    script = (
        "class Log(Callback):\n"
        "    def on_step_end(self, run, result):\n"
        "        if WORLD > 1 and RANK == 0: torch.distributed.barrier()\n"
        "manager.fit(net, data, optimizer=sgd, callbacks=[Log()])"
    )
    report = verified(script)
    assert any("control flow that depends on the rank" in line for line in report.problems)


def test_nan_against_a_number_differs() -> None:
    assert differs(math.nan, 1.0, 1e-3) and differs(1.0, math.nan, 1e-3)
    assert differs(math.inf, 1.0, 1e-3) and not differs(math.nan, math.nan, 1e-3)
    assert not differs(1.0, 1.0 + 1e-9, 1e-6)


def test_sketches_tell_how_far_tensors_are_apart() -> None:
    generator = torch.Generator().manual_seed(1)
    one = torch.randn(50, 70, generator=generator, dtype=torch.float64)
    other = one + 1e-6 * torch.randn(50, 70, generator=generator, dtype=torch.float64)
    exact = float((one - other).norm())
    assert 0.3 * exact < difference(sketch(one), sketch(other)) < 3 * exact
    assert difference(sketch(one), sketch(one.clone())) == 0.0
    both = combined([(0.25, sketch(one)), (0.75, sketch(other))])
    assert difference(both, sketch(0.25 * one + 0.75 * other)) < 1e-12
    nan = sketch(one * math.nan)
    assert math.isnan(difference(nan, sketch(one))) and difference(nan, nan) == 0.0


def test_sums_in_a_loss_and_batchnorm_beside_the_model_are_told_from_pairs() -> None:
    torch.manual_seed(0)
    model, teacher = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
    batch = torch.randn(12, 4)

    def split(loss_fn: Callable[..., Any]) -> dict[str, Any]:
        noise = torch.get_rng_state()
        probe = SplitProbe(model, loss_fn, batch, 12, [], noise, 1e-4)
        return probe.run([list(range(6)), list(range(6, 12))])

    sums = split(lambda m, x: m(x).square().mean() + 0.1 * m(x).abs().sum())
    assert sums["structure"] == "part sum"
    pairs = split(lambda m, x: torch.cdist(m(x), m(x)).mean())
    assert pairs["structure"] != "part sum" and "batchnorm_beside" not in pairs
    assert split(lambda m, x: (m(x) - teacher(x)).square().mean())["batchnorm_beside"]
    teacher.eval()
    assert split(lambda m, x: (m(x) - teacher(x)).square().mean())["structure"] == "mean"


def test_large_libraries_of_a_script_are_loaded_once_unless_it_sets_variables(
    tmp_path: Path,
) -> None:
    path = tmp_path / "train.py"
    path.write_text("import json\nimport scipy\nfrom scipy import linalg\nimport scipy_missing\n")
    assert preload(path) == ["scipy", "scipy"]
    path.write_text("import os\nos.environ['SCIPY_ARRAY_API'] = '1'\nimport scipy\n")
    assert preload(path) == []
    assert preload(tmp_path / "missing.py") == []


def test_samples_are_told_apart_by_content_whatever_the_structure() -> None:
    x, y = torch.randn(3, 4), torch.tensor([1, 2, 1])
    batch = {"x": x, "meta": [y, ["a", "b", "c"]], "time": torch.randn(5, 3)}
    whole = row_hashes(row_leaves(batch, 3), 3)
    assert len(set(whole)) == 3
    part = take_rows(batch, [2, 0], 3)
    assert part["meta"][1] == ["c", "a"] and part["time"].shape == (5, 2)
    assert row_hashes(row_leaves(part, 2), 2) == [whole[2], whole[0]]
    padded = torch.nn.functional.pad(x[0], (0, 2))
    assert same_rows(x[0], padded) and not same_rows(x[0], x[1])


@pytest.mark.engines
def test_a_sharded_training_is_compared_as_it_is(verified: Verified) -> None:
    script = (
        "manager = MultiGPUTrainingManager(MultiGPUConfig(training_mode='fsdp', epochs=4,"
        " global_batch_size=10, gradient_accumulation_steps=2, max_grad_norm=0.5))\n"
        "manager.fit(net, data, data, optimizer=adamw)\n"
        "assert WORLD == 1 or hasattr(net[0].weight, 'full_tensor')"
    )
    report = verified(script, (2, 3, 4))
    assert report.passed, report.problems
    assert [outcome.ranks for outcome in report.outcomes] == [2, 3, 4]
    assert max(outcome.gradients for outcome in report.outcomes) < 1e-12

    bug = "\nmanager.fit(net, data, optimizer=adamw, loss_fn=lambda m, b: m(b[0]).mean() / WORLD)"
    wrong = verified(script.partition("\n")[0] + bug)
    assert any("divided by the number of ranks" in problem for problem in wrong.problems)
