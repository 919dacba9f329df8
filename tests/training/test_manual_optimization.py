"""Your own backward, your own batches, and the small helpers of own loops."""

from __future__ import annotations

import copy
import inspect
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import RankError, run_ranks
from tiny import FEATURES, flat, line, manager_for, points, sgd, squares
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from multi_gpu_training import Callback, ConfigError, MultiGPUTrainingManager
from multi_gpu_training.errors import DataError, ModelError, NonFiniteLossError
from multi_gpu_training.manager import SetupArguments

LENGTHS = [3, 1, 4, 2]  # tokens of each micro-batch


def tokens(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(LENGTHS[number % 4], FEATURES, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True)


def weigh(folder: Path) -> list[Tensor]:
    """Two steps of two micro-batches per rank, weighted by tokens; then what is refused."""
    manager = manager_for(folder)
    model = line().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trainer = manager.prepare(model, optimizer)
    ranks, rank = manager.placement.dp_size, manager.placement.dp_rank
    found = []
    for _ in range(2):
        with trainer.step():
            mine = [m for m in range(4) if m % ranks == rank]
            for place, micro in enumerate(mine):
                x, y = tokens(micro)
                last = place == len(mine) - 1
                loss = F.mse_loss(model(x), y)
                seen = trainer.backward(loss, weight=torch.tensor(len(x)), last=last)
            found.append(seen)  # the mean over all ranks and micro-batches
            found.append(model.weight.grad.clone())
    with pytest.raises(ModelError, match="outside `with trainer"):
        optimizer.step()
    with pytest.raises(ModelError, match="without trainer"), trainer.step():
        optimizer.step()
    with pytest.raises(ModelError, match="belongs inside `with"):
        trainer.backward(loss)
    with pytest.raises(ModelError, match="need setup_training"):
        manager.trainer.train_step(tokens(0))
    with pytest.raises(ModelError, match=r"call trainer\.backward\(loss, opt"), trainer.step():
        squares(model, list(tokens(0))).backward()
    for wrong in (-1, math.nan, "many", torch.ones(2)):
        with pytest.raises(ModelError, match="give a number, 0 or more"), trainer.step():
            trainer.backward(squares(model, list(tokens(0))), weight=wrong)
    for other in (model, 3, [model]):
        with pytest.raises(ModelError, match="give an optimizer that"), trainer.step():
            trainer.backward(squares(model, list(tokens(0))), other)
    with trainer.step():  # nothing counts, on any number of ranks: momentum moves all the same
        trainer.backward(squares(model, list(tokens(0))) * math.nan, weight=0)
    manager.finish()
    return [*found, flat(model)]


def test_token_weights_hold_over_ranks_and_micro_batches(tmp_path: Path) -> None:
    model = line().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x, y = (torch.cat(parts) for parts in zip(*map(tokens, range(4)), strict=True))
    expected = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        expected += [loss.detach(), model.weight.grad.clone()]
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    expected.append(flat(model))
    for ranks in (1, 2):
        for found in run_ranks(ranks, weigh, tmp_path / str(ranks)):
            for mine, theirs in zip(found, expected, strict=True):
                assert (mine - theirs).norm() <= 1e-12 * theirs.norm()


SIZES = [3, 1, 4]  # on two ranks, the second one has no sample of the second batch


def share_batches(folder: Path) -> Tensor:
    """`train_step` without a dataset, on batches that every rank makes alike."""
    manager = manager_for(folder)
    model, _, _ = manager.setup_training(line().double(), loss_fn=squares, optimizer=sgd)
    for number, size in enumerate(SIZES):
        x = points(number + 4, torch.float64).tensors[0][-size:]
        manager.trainer.train_step(manager.shard((x, x.sum(1, keepdim=True))))
    manager.finish()
    return flat(model)


def test_a_batch_that_all_ranks_make_alike_is_trained_once(tmp_path: Path) -> None:
    model = line().double()
    optimizer = sgd(model.parameters())
    for number, size in enumerate(SIZES):
        x = points(number + 4, torch.float64).tensors[0][-size:]
        optimizer.zero_grad()
        squares(model, [x, x.sum(1, keepdim=True)]).backward()
        optimizer.step()
    for found in run_ranks(2, share_batches, tmp_path):
        assert (found - flat(model)).norm() <= 1e-12 * flat(model).norm()


def order_of_arrival(folder: Path) -> tuple[float, float]:
    manager = manager_for(folder)
    with manager.main_process_first():
        begun = time.monotonic()
        time.sleep(0.05)
        ended = time.monotonic()
    return begun, ended


def test_the_main_process_goes_first(tmp_path: Path) -> None:
    (_, first_ended), (second_begun, _) = run_ranks(2, order_of_arrival, tmp_path)
    assert first_ended <= second_begun


def test_a_gradient_of_one_optimizer_never_reaches_another(tmp_path: Path) -> None:
    manager = manager_for(tmp_path)
    one, other = line(), line()
    trainer = manager.prepare(one, other, a := sgd(one.parameters()), sgd(other.parameters()))
    before = flat(other)
    with trainer.step():
        trainer.backward((one(torch.ones(2, FEATURES)) * other(torch.ones(2, FEATURES))).mean(), a)
        assert other.weight.grad is None
    manager.finish()
    assert torch.equal(flat(other), before)
    assert manager.step == 1


def bad_batch(manager: MultiGPUTrainingManager) -> Tensor:
    model = line()
    trainer = manager.prepare(model, optimizer := sgd(model.parameters()))
    before = flat(model)
    try:
        with trainer.step():
            trainer.backward(model(torch.full((2, FEATURES), math.inf)).mean(), optimizer)
    finally:
        manager.finish()
    return flat(model) - before


def test_a_nan_stops_a_loop_with_its_own_backward_or_is_skipped(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLossError, match=r"SGD \(optimizer 1\) is not finite in weight"):
        bad_batch(manager_for(tmp_path / "stop"))
    assert not bad_batch(manager_for(tmp_path / "skip", on_nonfinite="skip")).any()


def test_a_nan_that_the_loop_throws_away_stops_nothing(tmp_path: Path) -> None:
    """The loss that every rank sees tells; its gradients are dropped, and the log leaves it out."""
    model = line()
    manager = manager_for(tmp_path, log_every=2)
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = manager.prepare(model, optimizer)
    moved = []
    for step in range(4):
        before = flat(model)
        with trainer.step():
            inputs = torch.full((2, FEATURES), math.inf if step == 1 else 1.0)
            if not trainer.backward(model(inputs).mean()).isfinite():
                optimizer.zero_grad()
        moved.append(bool((flat(model) != before).any()))
    manager.finish()
    assert moved == [True, False, True, True]


class Sharp(torch.optim.Optimizer):
    """A SAM as one finds them: it shares its groups with the optimizer that it wraps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base.param_groups

    def second_step(self) -> None:
        self.base.step()
        self.zero_grad()


def by_hand_gradients(folder: Path, alike: bool) -> Tensor:
    """Reptile: towards where a copy has moved in three steps. Not alike: each rank by its rows."""
    manager = manager_for(folder)
    model = line().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    trainer = manager.prepare(model, optimizer)
    batch = list(points(4, torch.float64).tensors)
    for _ in range(2):
        copied = copy.deepcopy(model)
        inner = sgd(copied.parameters())
        for _ in range(3):
            inner.zero_grad()
            squares(copied, batch if alike else manager.shard(batch)).backward()
            inner.step()
        with trainer.step():
            for mine, moved in zip(model.parameters(), copied.parameters(), strict=True):
                mine.grad = (mine - moved).detach()
            optimizer.step()
    manager.finish()
    return flat(model)


def test_gradients_that_every_rank_sets_alike_move_the_weights(tmp_path: Path) -> None:
    (alone,) = run_ranks(1, by_hand_gradients, tmp_path / "1", True)
    for found in run_ranks(2, by_hand_gradients, tmp_path / "2", True):
        assert torch.equal(found, alone)
    with pytest.raises(RankError, match=r"p.grad was set by hand, and differs between ranks"):
        run_ranks(2, by_hand_gradients, tmp_path / "apart", False)


def test_an_optimizer_that_prepare_did_not_get_cannot_move_its_parameters(tmp_path: Path) -> None:
    x, y = points().tensors
    model = line()
    manager = manager_for(tmp_path / "other")
    trainer = manager.prepare(model, sgd(model.parameters()))
    other, elsewhere = torch.optim.Adam(model.parameters()), line()
    with trainer.step():
        trainer.backward(squares(model, [x, y]))
        squares(elsewhere, [x, y]).backward()
        sgd(elsewhere.parameters()).step()  # an inner loop on a copy
    with pytest.raises(ModelError, match=r"Adam.step\(\) would move .* SGD"), trainer.step():
        trainer.backward(squares(model, [x, y]))
        other.step()
    manager.finish()
    model, alone = line(), line()
    manager = manager_for(tmp_path / "wrapped")
    trainer = manager.prepare(model, optimizer := Sharp(model.parameters()))
    with trainer.step():
        trainer.backward(squares(model, [x, y]))
        optimizer.second_step()
    manager.finish()
    squares(alone, [x, y]).backward()
    sgd(alone.parameters()).step()
    assert torch.equal(flat(model), flat(alone))


def out_of_step(folder: Path, how: str) -> None:
    manager = manager_for(folder, global_batch_size=4)
    model = line().double()
    trainer = manager.prepare(model, sgd(model.parameters()), dataset=points(16, torch.float64))
    rank = manager.placement.dp_rank
    for number, batch in enumerate(manager.train_loader):
        if how == "left out before" and number == rank:
            continue
        for _ in range(1 + (how == "repeated" and rank)):
            with trainer.step(batch) as (x, y):
                if how != "left out" or number != rank:
                    trainer.backward(squares(model, [x, y]))


@pytest.mark.parametrize("how", ["left out", "left out before", "repeated"])
def test_ranks_that_decide_by_their_own_samples_are_told(tmp_path: Path, how: str) -> None:
    """Each leaves out as many as the other: without a word, gradients of two steps would add up."""
    with pytest.raises(RankError, match="different optimizers, steps or batches"):
        run_ranks(2, out_of_step, tmp_path, how)


LAST = 1  # rows of the last batch: two of three ranks have none


def odd_loops(folder: Path | None) -> dict[str, Tensor]:
    """Loops in which a rank without samples must still know what to do; None: in plain torch."""
    x, y = (part[: 8 + LAST] for part in points(16, torch.float64).tensors)
    more = torch.arange(6 * FEATURES, dtype=torch.float64).view(6, FEATURES).sin()
    found = {}

    def loop(name: str, body: Any) -> None:
        model = line().double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        if folder is None:
            for start in (0, 4, 8):
                optimizer.zero_grad()
                body(model, (x[start : start + 4], y[start : start + 4]), None, None)
                optimizer.step()
        else:
            manager = manager_for(folder, global_batch_size=4, shuffle=False)
            data = torch.utils.data.TensorDataset(x, y)
            trainer = manager.prepare(model, optimizer, dataset=data)
            for batch in manager.train_loader:
                body(model, batch, trainer, manager)
            manager.finish()
        found[name] = flat(model)

    def as_dict(model: nn.Module, batch: Any, trainer: Any, _: Any) -> None:
        """Batches in another form than the loader gives them."""
        given = {"target": batch[1], "inputs": batch[0].repeat(1, 2)[:, 2 : 2 + FEATURES]}
        if trainer is None:
            squares(model, [given["inputs"], given["target"]]).backward()
            return
        with trainer.step(given) as mine:
            trainer.backward(squares(model, [mine["inputs"], mine["target"]]))

    def two_sources(model: nn.Module, batch: Any, trainer: Any, manager: Any) -> None:
        """A loss on the loader's batch, and one on rows of another that every rank made alike."""
        if trainer is None:
            (squares(model, batch) + model(more).square().mean()).backward()
            return
        with trainer.step(batch) as mine:
            other = manager.shard(more)
            trainer.backward(model(other).square().mean(), weight=other)
            trainer.backward(squares(model, mine), weight=mine[0])

    def rare(model: nn.Module, batch: Any, trainer: Any, _: Any) -> None:
        """A rank that has nothing to say gives a zero without a graph."""
        if trainer is None:
            kept = batch[0][:, 0] < 0
            squares(model, [part[kept] for part in batch]).backward()
            return
        with trainer.step(batch) as mine:
            kept = mine[0][:, 0] < 0
            loss = squares(model, [part[kept] for part in mine]) if kept.any() else torch.zeros(())
            trainer.backward(loss, weight=int(kept.sum()))

    for body in (as_dict, two_sources, rare):
        loop(body.__name__, body)
    return found


def test_a_rank_without_samples_follows_whatever_the_loop_does(tmp_path: Path) -> None:
    expected = odd_loops(None)
    for ranks in (1, 3):
        for found in run_ranks(ranks, odd_loops, tmp_path / str(ranks)):
            for name, theirs in expected.items():
                assert (found[name] - theirs).norm() <= 1e-12 * theirs.norm(), (name, ranks)


class Lookahead(torch.optim.Optimizer):
    """As one finds them: without `super().__init__()`."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.steps = base, 0
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, base.state
        self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]

    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.steps += 1
        for slow, fast in zip(
            self.slow, (p for g in self.param_groups for p in g["params"]), strict=False
        ):
            if self.steps % 2 == 0:
                fast.data.copy_(slow.add_(fast.data - slow, alpha=0.5))


def grown_and_wrapped(folder: Path | None) -> Tensor:
    """A BatchNorm is added while a wrapped optimizer trains."""
    x, y = points(16, torch.float64).tensors
    model = nn.Sequential(line().double())
    optimizer = Lookahead(torch.optim.Adam(model.parameters(), lr=0.1))
    manager = trainer = None
    if folder is not None:
        manager = manager_for(folder, sync_bn=True)
        trainer = manager.prepare(model, optimizer)
    for number in range(5):
        if number == 2:
            model.append(nn.BatchNorm1d(1).double())
            optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.01})
        batch = [x[number : number + 7], y[number : number + 7]]
        if trainer is None:
            model.zero_grad()
            squares(model, batch).backward()
            optimizer.step()
        else:
            with trainer.step(manager.shard(batch)) as mine:
                trainer.backward(squares(model, mine))
    if manager is not None:
        manager.finish()
    return torch.cat([flat(model), *(b.flatten() for b in model.buffers())])


def test_layers_and_optimizers_of_any_kind_may_join(tmp_path: Path) -> None:
    expected = grown_and_wrapped(None)
    for ranks in (1, 3):
        for found in run_ranks(ranks, grown_and_wrapped, tmp_path / str(ranks)):
            assert (found - expected).norm() <= 1e-12 * expected.norm(), ranks


def of_two_batches(folder: Path, apart: bool) -> None:
    manager = manager_for(folder)
    model = line().double()
    trainer = manager.prepare(model, sgd(model.parameters()))
    x = points(16, torch.float64).tensors[0]
    with trainer.step():
        one, other = manager.shard(x[:7]), manager.shard(x[:2])
        if apart:
            trainer.backward(model(one).square().mean(), weight=len(one))
        else:
            trainer.backward(model(one).square().mean() + model(other).mean())


@pytest.mark.parametrize("apart", [False, True])
def test_a_weight_that_cannot_be_right_for_two_batches_is_refused(
    tmp_path: Path, apart: bool
) -> None:
    said = "number as its weight" if apart else "parts of batches of 7 and 2 samples"
    with pytest.raises(RankError, match=said):
        run_ranks(3, of_two_batches, tmp_path, apart)


def in_one_tuple(folder: Path, samples: int, inside: bool) -> Tensor:
    """Batches of a loader, each with rows of a second source."""
    manager = manager_for(folder, global_batch_size=6, shuffle=False)
    model = line().double()
    data, others = points(samples, torch.float64), points(9, torch.float64).tensors[0].flip(0)
    trainer = manager.prepare(model, sgd(model.parameters()), dataset=data)
    for batch in manager.train_loader:
        given = batch if inside else (batch, manager.shard(others))
        with trainer.step(given) as found:
            (x, y), u = (found, manager.shard(others)) if inside else found
            trainer.backward(squares(model, [x, y]), weight=x)
            trainer.backward(model(u).square().mean(), weight=u)
    manager.finish()
    return flat(model)


def test_a_stand_in_for_one_of_two_batches_does_not_hide_the_other(tmp_path: Path) -> None:
    """The loader's last batch has two samples for three ranks: given as one, the second source's
    rows were left out on the rank without any."""
    for samples, inside in ((12, False), (8, True)):
        (alone,) = run_ranks(1, in_one_tuple, tmp_path / "1", samples, inside)
        for found in run_ranks(3, in_one_tuple, tmp_path / "3", samples, inside):
            assert (found - alone).norm() <= 1e-12 * alone.norm()
    with pytest.raises(RankError, match=r"call manager\.shard inside the block"):
        run_ranks(3, in_one_tuple, tmp_path / "few", 8, False)


def test_what_needs_a_training_says_so_before_there_is_one(tmp_path: Path) -> None:
    manager = manager_for(tmp_path)
    calls = {
        "_training": lambda: manager.shard(tokens(0)),
        "loop": lambda: manager.evaluate(points()),
        "should_stop": lambda: manager.should_stop,
        "train_loader": lambda: manager.train_loader,
    }
    for name, call in calls.items():
        with pytest.raises(ConfigError, match=rf"manager.{name} needs a training, but none is"):
            call()
    assert not hasattr(manager, "train_loader")
    with pytest.raises(AttributeError, match="has no attribute 'trian_loader'"):
        manager.trian_loader  # noqa: B018


def test_what_prepare_cannot_train_is_refused(tmp_path: Path) -> None:
    model = line()
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ((model, sgd(model.parameters()), sgd(model.parameters())), {}, "holds 2 parameters of an"),
        ((model,), {}, "1 modules and 0 optimizers"),
        ((model, sgd(model.parameters()), points()), {}, "prepare got a TensorDataset"),
        ((model, sgd([torch.zeros(1, requires_grad=True)])), {}, "nn.Parameter"),
        (
            (model, sgd(model.parameters()), StepLR(sgd(line().parameters()), 2)),
            {},
            "prepare got a StepLR of an optimizer that it did not get",
        ),
        ((model, torch.optim.LBFGS(model.parameters())), {"max_grad_norm": 1.0}, "max_grad_norm"),
        ((model, sgd(model.parameters())), {"step_execution": "graph"}, "operation by operation"),
    ]
    for parts, settings, words in cases:
        with pytest.raises((ModelError, ConfigError), match=words):
            manager_for(tmp_path, **settings).prepare(*parts)


def test_gradients_that_did_not_come_from_the_trainer_are_refused(tmp_path: Path) -> None:
    x, y = points().tensors
    for number, fill in enumerate(("backward", "grad")):
        model = line()
        manager = manager_for(tmp_path / str(number))
        trainer = manager.prepare(model, sgd(model.parameters()))
        with (
            pytest.raises(ModelError, match=r"did not come from trainer\.backward"),
            trainer.step(),
        ):
            loss = F.mse_loss(model(x), y)
            if fill == "backward":
                loss.backward()
            else:
                grads = torch.autograd.grad(loss, [*model.parameters()])
                for parameter, grad in zip(model.parameters(), grads, strict=True):
                    parameter.grad = grad
        manager.finish()


def test_a_summed_loss_is_logged_per_sample_and_resumed_epochs_are_not_trained_again(
    tmp_path: Path,
) -> None:
    logged: list[float] = []

    class Log(Callback):
        def on_log(self, run: Any, metrics: Any, step: int) -> None:
            logged.append(metrics["loss"])

    def train(folder: Path, stops: int = 0, **settings: Any) -> Tensor:
        model = line()
        settings = {"enable_fault_tolerance": True, "run_name": "one", "log_every": 1, **settings}
        manager = manager_for(folder, global_batch_size=4, checkpoint_frequency=1, **settings)
        optimizer = sgd(model.parameters())
        trainer = manager.prepare(model, optimizer, dataset=points(10), callbacks=[Log()])
        for _ in range(trainer.epoch, 2):  # three steps each
            for batch in manager.train_loader:
                with trainer.step(batch) as (x, y):
                    error = F.mse_loss(model(x), y, reduction="sum")
                    trainer.backward(error, reduction="sum")
                if manager.step == stops:
                    manager.finish()
                    return flat(model)
                if manager.step == 1 and not stops:
                    assert logged[-1] == pytest.approx(error.item() / len(x), rel=1e-6)
        for wrong, words in (
            ({"reduction": "total"}, "give 'mean' or 'sum'"),
            ({"reduction": "sum", "weight": 3}, "a weight is what a mean was divided by"),
        ):
            with pytest.raises(ModelError, match=words), trainer.step():
                trainer.backward(model(x).sum(), **wrong)
        with pytest.raises(ModelError, match="a mean and a sum"), trainer.step():
            trainer.backward(model(x).mean(), last=False)
            trainer.backward(model(x).sum(), reduction="sum")
        assert manager.step == 6
        manager.finish()
        return flat(model)

    whole = train(tmp_path / "whole")
    train(tmp_path / "stopped", stops=4)
    assert torch.equal(train(tmp_path / "stopped", resume="auto"), whole)


def test_a_signal_saves_the_step_of_a_loop_with_its_own_backward(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"enable_fault_tolerance": True, "run_name": "one"}
    noise: list[float] = []

    def train(stop: bool, folder: Path = tmp_path / "stopped", **more: Any) -> Tensor:
        model = line()
        manager = manager_for(folder, **settings, **more)
        torch.manual_seed(4)  # before the resume brings back the generators
        trainer = manager.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
        try:
            while manager.step < 6:
                x = torch.randn(4, FEATURES)  # as nanoGPT draws its batches
                with trainer.step():
                    trainer.backward(F.mse_loss(F.dropout(model(x)), x.sum(1, keepdim=True)))
                    if stop and manager.step == 2:
                        os.kill(os.getpid(), signal.SIGTERM)
                        time.sleep(0.5)  # until the listening thread has heard of it
        finally:
            manager.finish()
        noise.append(float(torch.rand(())))
        return flat(model)

    with pytest.raises(SystemExit) as ended:
        train(stop=True)
    assert ended.value.code == 143
    resumed = train(stop=False, resume="auto")
    assert torch.equal(resumed, train(stop=False, folder=tmp_path / "whole"))
    assert noise[0] == noise[1]


def test_a_training_without_a_dataset_announces_no_epoch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logged: list[float] = []

    class Log(Callback):
        def on_log(self, run: Any, metrics: Any, step: int) -> None:
            logged.append(metrics["loss"])

    manager = manager_for(tmp_path, progress="lines", max_steps=3, log_every=1)
    manager.setup_training(line(), loss_fn=squares, optimizer=sgd, callbacks=[Log()])
    while not manager.should_stop:
        manager.trainer.train_step([torch.ones(2, FEATURES), torch.ones(2, 1)])
    manager.finish()
    said = capsys.readouterr().out
    assert "your own batches" in said
    assert "per epoch" not in said
    assert "samples per step" not in said
    assert manager.step == 3
    assert len(logged) == 3
    with pytest.raises(DataError, match="no dataset"):
        next(iter(manager.train_loader))
    with pytest.raises(DataError, match=r"manager\.prepare"):
        manager_for(tmp_path).fit(line(), None)


def test_the_search_for_a_rate_leaves_no_trace(tmp_path: Path) -> None:
    def train(folder: Path, search: bool) -> Tensor:
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)
        )
        manager = manager_for(folder, global_batch_size=4, schedule="cosine")
        _, loader, _ = manager.setup_training(
            model, points(), loss_fn=squares, optimizer=lambda p: torch.optim.Adam(p, lr=1e-2)
        )
        batches = iter(loader)
        manager.trainer.train_step(next(batches))
        manager.trainer.train_step(next(batches))
        if search:
            batches.close()  # type: ignore[attr-defined]
            loader.seek(0, 2)
            found = manager.find_learning_rate(1e-5, 10.0, steps=40)
            assert found.suggestion is not None
            assert 1e-5 < found.suggestion < 10
            assert found.losses[-1] > min(found.losses)
            batches = iter(loader)
        for batch in batches:
            manager.trainer.train_step(batch)
        manager.finish()
        return torch.cat([flat(model), torch.rand(3)])

    assert torch.equal(train(tmp_path / "a", True), train(tmp_path / "b", False))


def test_the_steps_of_an_epoch_are_known_before_setup(tmp_path: Path) -> None:
    for data, steps in [
        (points(10), 3),
        (DataLoader(points(10), batch_size=4, drop_last=True), 2),
        (DataLoader(points(10), batch_size=3), 4),
    ]:
        settings = {} if isinstance(data, DataLoader) else {"batch_size": 4}
        manager = manager_for(tmp_path, **settings)
        assert manager.steps_per_epoch(data) == steps
        manager.setup_training(line(), data, loss_fn=squares)
        assert manager.steps_per_epoch() == manager.train_loader.steps == steps
        manager.finish()


def test_fit_names_the_arguments_of_setup_training() -> None:
    parameters = inspect.signature(MultiGPUTrainingManager.setup_training).parameters.values()
    keywords = {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert set(SetupArguments.__annotations__) == keywords
