"""Recorded steps must compute what eager steps compute, whatever the step reads.

On a machine without a GPU a stand-in plays the recorder: like a CUDA graph, it repeats what was
recorded with the Python values of that time, and does nothing else.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from recorder import HIDDEN, hidden, recording, set_hidden
from tiny import quiet
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from multi_gpu_training import Callback, MultiGPUTrainingManager
from multi_gpu_training.data import feeding
from multi_gpu_training.training.runner import (
    compile_switch,
    graph_cache,
    selection,
    verified_graph,
)
from multi_gpu_training.training.runner.graph_guards import Guards


class Knob:
    weight = 1.0

    def __init__(self) -> None:
        self.weight = 1.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Linear(6, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.body(x))))


def data(samples: int = 200) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(samples, 6, generator=generator), torch.arange(samples) % 3)


def train(
    folder: Path,
    recorded: bool,
    kind: str = "plain",
    fails: Callable[[int], str | None] = lambda rank: None,
    samples: int = 200,
    where: AbstractContextManager[None] | None = None,
    **settings: Any,
) -> tuple[dict[str, Tensor], Any, list[float]]:
    """Weights, what the execution says of itself, and the loss of each epoch."""
    knob = Knob()
    rank = int(os.environ.get("RANK", 0))

    class Change(Callback):
        """The curriculum: from step 45 on the weight grows, or it is another in a few steps."""

        def on_step_end(self, manager: Any, result: Any) -> None:
            step = result.step
            value = 1.0 if step < 45 else 1.0 + 0.5 * (step // 15)
            if kind == "seen" or (kind == "seen on one rank" and rank == 1):
                knob.weight = value
            if kind == "for a while":
                knob.weight = 3.0 if 50 <= step < 55 else 1.0
            if kind == "hidden":
                set_hidden(str(value))

        def on_step_begin(self, manager: Any, step: int) -> None:
            if kind == "hidden, by step":
                set_hidden("1" if step < 90 else "2.5")

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return loss * knob.weight * float(os.environ.get(HIDDEN, "1"))

    config = quiet(
        folder,
        step_execution="graph",
        **{"batch_size": 8, "epochs": 4, "schedule": "cosine", "max_grad_norm": 1.0, **settings},
    )
    with hidden(None):
        manager = MultiGPUTrainingManager(config)
        fit = {"loss_fn": loss_fn, "hooks": [Change()], "optimizer": sgd}
        # Without recordings, but with the rate in a float32 tensor, as recorded steps have it.
        with (
            recording(fails if recorded else lambda rank: "not wanted", [knob]),
            where or nullcontext(),
        ):
            manager.fit(Net(), data(samples), data(40), **fit)
    weights = {name: tensor.clone() for name, tensor in manager.model.state_dict().items()}
    history = [epoch["train"]["loss"] for epoch in manager.progress.history]
    return weights, manager.trainer.execution, history


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Not AdamW, which makes full steps of a gradient's rounding."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for name, tensor in a.items():
        torch.testing.assert_close(tensor, b[name], rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2}])
def test_recorded_steps_learn_what_eager_steps_learn(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    expected, _, losses = train(tmp_path / "eager", False, **settings)
    weights, run, found = train(tmp_path / "graph", True, **settings)
    same(expected, weights)
    assert found == pytest.approx(losses, rel=1e-5)
    assert run.mode == "graph"
    assert run.replayed > 0.85 * run.steps


@pytest.mark.parametrize("kind", ["seen", "for a while", "hidden"])
def test_no_stale_number_ends_up_in_the_weights(tmp_path: Path, kind: str) -> None:
    expected, _, losses = train(tmp_path / "eager", False, kind)
    weights, run, found = train(tmp_path / "graph", True, kind)
    same(expected, weights)
    assert found == pytest.approx(losses, rel=1e-4)
    assert run.mode == "eager"
    hidden_one = "differs from the recorded one"
    assert (hidden_one if kind == "hidden" else "knob.weight changed from 1.0") in run.reason


def test_wrong_steps_of_epochs_that_went_uncompared_are_taken_back_through_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs are shorter than a comparison takes: the step that tells is an epoch or two later."""
    monkeypatch.setattr(selection, "COMPARING", 1e-9)
    settings = {"enable_fault_tolerance": True, "epochs": 8}
    many, few = {"keep_last": 100, **settings}, {"keep_last": 2, **settings}
    expected, _, losses = train(tmp_path / "eager", False, "hidden, by step", **many)
    weights, run, found = train(tmp_path / "graph", True, "hidden, by step", **few)
    same(expected, weights)
    assert found == pytest.approx(losses, rel=1e-4)
    assert run.mode == "eager"
    faults = [event for event in events(tmp_path / "graph") if event["event"] == "fault"]
    assert [fault["kind"] for fault in faults] == ["recording"]
    saved = sorted(tmp_path.glob("graph/custom/*/checkpoints/step-*"))
    for path in saved:  # what is left holds no wrong step
        assert checkpoints_equal(path, tmp_path / "eager")


def events(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("custom/*/events/rank-0*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def checkpoints_equal(path: Path, other: Path) -> bool:
    from safetensors.torch import load_file

    (twin,) = other.glob(f"custom/*/checkpoints/{path.name}")
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (path, twin))
    return all(torch.allclose(mine[k], theirs[k], rtol=1e-6, atol=1e-7) for k in mine)


def test_what_cannot_be_recorded_is_trained_eagerly_and_named(tmp_path: Path) -> None:
    expected, _, _ = train(tmp_path / "eager", False)
    weights, run, _ = train(tmp_path / "graph", True, fails=lambda rank: "the moon is full")
    same(expected, weights)
    assert run.mode == "eager"
    assert "the moon is full" in run.reason


@contextmanager
def on_the_device() -> Iterator[None]:
    """Data that live on the device, as on a GPU: then steps follow from the global plan."""
    with mock.patch.object(feeding, "fits_on_gpu", lambda *_: True):
        yield


def on_ranks(
    folder: Path, recorded: bool, kind: str, failing: int | None, resident: bool = False
) -> Any:
    fails = {failing: "rank cannot"}
    where = on_the_device() if resident else None
    settings = {"batch_size": 4, "sync_bn": True, "samples": 203, "where": where}
    weights, run, losses = train(folder / str(recorded), recorded, kind, fails.get, **settings)
    return {k: v.tolist() for k, v in weights.items()}, run.mode, run.reason, run.replayed, losses


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize(
    ("kind", "failing"),
    [
        ("plain", None),
        ("seen on one rank", None),
        ("for a while", None),
        ("hidden", None),
        ("plain", 1),
    ],
)
def test_ranks_decide_alike(tmp_path: Path, kind: str, failing: int | None, resident: bool) -> None:
    """A rank that left the recording alone would wait for the others for ever. Epochs end with a
    batch of 3, of which the ranks have different shares."""
    expected = run_ranks(2, on_ranks, tmp_path, False, kind, None, resident)
    found = run_ranks(2, on_ranks, tmp_path, True, kind, failing, resident)
    for (weights, *_), (recorded, *_) in zip(expected, found, strict=True):
        for name, values in weights.items():
            torch.testing.assert_close(
                torch.tensor(recorded[name]), torch.tensor(values), rtol=1e-6, atol=1e-7
            )
    assert len({mode for _, mode, *_ in found}) == 1
    assert found[0][1] == ("graph" if (kind, failing) == ("plain", None) else "eager")
    assert len({replayed for *_, replayed, _ in found}) == 1
    if kind != "plain" and failing is None:
        assert "changed" in found[0][2] or "changes" in found[0][2]


def votes(folder: Path, kind: str, accumulation: int) -> list[int]:
    """Collectives per step that Python code asks for while steps are replayed."""
    counts: list[int] = []
    asked = 0

    class Count(Callback):
        def on_step_end(self, manager: Any, result: Any) -> None:
            nonlocal asked
            # Comparisons come after steps 28 and 92.
            if 30 <= result.step < 90:
                counts.append(asked)
                assert manager.trainer.execution.mode == "graph"
            asked = 0

    def counted(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal asked
            asked += 1
            return original(*args, **kwargs)

        return call

    # log_every is beyond the run: logging is where the ranks do talk.
    settings = {"batch_size": 2, "log_every": 1000, "gradient_accumulation_steps": accumulation}
    manager = MultiGPUTrainingManager(quiet(folder, step_execution="graph", **settings))
    fit = {"loss_fn": _own_loss, "optimizer": sgd, "callbacks": [Count()]}
    dataset = data(95 * 4 * accumulation)
    with ExitStack() as stack:
        for name in ("all_reduce", "all_gather", "broadcast"):
            call = counted(getattr(torch.distributed, name))
            stack.enter_context(mock.patch.object(torch.distributed, name, call))
        stack.enter_context(recording())
        if kind == "resident":
            stack.enter_context(on_the_device())
        if kind != "own":
            manager.fit(Net(), dataset, **fit)
            return counts
        manager.setup_training(Net(), dataset, **fit)
        for _ in range(95 * accumulation):
            manager.trainer.train_step((torch.randn(2, 6), torch.tensor([0, 1])))
        manager.finish()
    return counts


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(("kind", "most"), [("resident", 0), ("loaded", 1), ("own", 1)])
def test_ranks_vote_at_most_once_per_recorded_step(
    tmp_path: Path, kind: str, most: int, accumulation: int
) -> None:
    """Not at all where the shapes of a step follow from the plan that every rank knows."""
    for counts in run_ranks(2, votes, tmp_path, kind, accumulation):
        assert counts == [most] * 60


def own_loop(
    folder: Path, recorded: bool, seen: bool
) -> tuple[dict[str, Tensor], list[Tensor], Any]:
    knob = Knob()

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return loss * knob.weight * float(os.environ.get(HIDDEN, "1"))

    manager = MultiGPUTrainingManager(quiet(folder, step_execution="graph", batch_size=8))
    with hidden(None):
        with recording(lambda rank: None if recorded else "not wanted", [knob]):
            manager.setup_training(Net(), data(), loss_fn=loss_fn, optimizer=sgd)
        inputs, target = torch.empty(8, 6), torch.empty(8, dtype=torch.int64)
        losses = []
        generator = torch.Generator().manual_seed(5)
        for step in range(120):
            # The user fills the same memory again: a rollback must not read what came later.
            inputs.copy_(torch.randn(8, 6, generator=generator))
            target.copy_(torch.randint(3, (8,), generator=generator))
            if step == 100 and seen:
                knob.weight = 3.0
            elif step == 100:
                set_hidden("3")
            losses.append(manager.trainer.train_step((inputs, target)).loss)
        manager.trainer.execution.verify()
        run = manager.trainer.execution
        manager.finish()
    return dict(manager.model.state_dict()), losses, run


def test_the_users_own_loop_gets_its_losses_and_weights(tmp_path: Path) -> None:
    """Steps that are computed again would all see the newest value: a value that the step visibly
    reads is noticed before a step uses it."""
    expected, losses, _ = own_loop(tmp_path / "eager", False, seen=True)
    weights, found, run = own_loop(tmp_path / "graph", True, seen=True)
    assert [float(x) for x in found] == pytest.approx([float(x) for x in losses])
    assert "knob.weight changed from 1.0 to 3.0" in run.reason
    same(expected, weights)


def test_a_hidden_change_in_the_users_own_loop_is_found(tmp_path: Path) -> None:
    expected, losses, _ = own_loop(tmp_path / "eager", False, seen=False)
    weights, found, run = own_loop(tmp_path / "graph", True, seen=False)
    assert [float(x) for x in found[:100]] == pytest.approx([float(x) for x in losses[:100]])
    assert run.mode == "eager"
    assert "differs from the recorded one" in run.reason
    # The steps up to the last comparison stand. Those after it are computed again with today's
    # value of what nobody could see.
    assert set(weights) == set(expected)
    assert all(bool(torch.isfinite(t).all()) for t in weights.values())


def test_guards_see_what_code_reads() -> None:
    knob = Knob()
    settings = {"scale": 2.0}
    rows = [1.0, 2.0]
    scale = torch.tensor(1.0)

    class Loss:
        def __init__(self) -> None:
            self.calls = 0

        def helper(self) -> float:
            return self.factor

        factor = 1.0

        def __call__(self, model: nn.Module, batch: Any) -> Any:
            self.calls += 1
            return model(batch) * knob.weight * settings["scale"] * rows[0] * scale * self.helper()

    loss = Loss()
    loss.factor = 1.0
    changes: list[tuple[Callable[[], Any], str]] = [
        (lambda: setattr(knob, "weight", 0.5), "knob.weight"),
        (lambda: settings.update(scale=3.0), "settings['scale']"),
        (lambda: rows.__setitem__(0, 9.0), "rows[0]"),
        (lambda: scale.mul_(2), "scale (in place)"),
        (lambda: setattr(loss, "calls", 7), "Loss.calls"),
        (lambda: setattr(loss, "factor", 7.0), "Loss.factor"),
    ]
    for change, name in changes:
        guards = Guards([loss])
        assert guards.changed() is None
        change()
        assert name in str(guards.changed())


def test_guards_see_a_dropout_and_an_optimizer_that_are_turned() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    guards = Guards([model])
    guards.watch_settings(optimizer)
    optimizer.param_groups[0]["lr"] = 0.2
    assert guards.changed() is None
    optimizer.param_groups[0]["momentum"] = 0.6
    assert "momentum" in str(guards.changed())
    optimizer.param_groups[0]["momentum"] = 0.5
    model[1].p = 0.3
    assert "p changed from 0.1 to 0.3" in str(guards.changed())


class CompiledAtOnce:
    """Stands for the process that compiles beside the training: it has nothing to do."""

    problem: str | None = None
    done = True

    def __init__(self, *_: Any) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("pays_after_s", "mode"), [(0.0, "compile"), (1e9, "eager")])
def test_a_state_too_large_to_compare_is_compiled_where_the_run_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pays_after_s: float, mode: str
) -> None:
    monkeypatch.setattr(selection, "LARGEST_STATE", 0)
    monkeypatch.setattr(compile_switch, "PAYS_AFTER_S", pays_after_s)
    monkeypatch.setattr(compile_switch, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(compile_switch, "CompileAhead", CompiledAtOnce)
    monkeypatch.setattr(selection, "WORTH_IT", 1e9)  # however long it takes on this machine
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    ends = []
    for how in ("eager", "auto"):
        config = quiet(tmp_path / how, step_execution=how, batch_size=8)
        manager = MultiGPUTrainingManager(config)
        with recording() if how == "auto" else nullcontext():
            manager.fit(Net(), data(), optimizer=sgd)
        ends.append({name: tensor.clone() for name, tensor in manager.model.state_dict().items()})
    assert manager.trainer.execution.mode == mode
    same(*ends)


def test_filters_for_a_module_hold_for_warnings_in_watched_steps(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    def warning_loss(model: nn.Module, batch: Any) -> Tensor:
        warnings.warn_explicit("old", DeprecationWarning, str(torch.__file__), 1, "torch")
        warnings.warn("mine", RuntimeWarning, stacklevel=1)
        return F.cross_entropy(model(batch[0]), batch[1])

    warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
    warnings.filterwarnings("always", category=RuntimeWarning, module=__name__)
    manager = MultiGPUTrainingManager(quiet(tmp_path, step_execution="graph", batch_size=8))
    with recording():
        manager.fit(Net(), data(), loss_fn=warning_loss, optimizer=sgd, epochs=1)
    texts = {str(warning.message) for warning in recwarn}
    assert "mine" in texts and "old" not in texts


def switching(
    folder: Path, how: str, wrong: float = 1.0, resume: str | None = None, steps: int | None = None
) -> tuple[dict[str, Tensor], str, list[int]]:
    """A long enough run with a compiler that is ready at once: the weights, what its steps ran
    as, and the steps that called compiled code."""
    calls: list[int] = []
    kinds: set[type] = set()
    config = quiet(
        folder,
        step_execution=how,
        batch_size=8,
        epochs=4,
        max_steps=steps,
        resume=resume,
        run_name="run",
        enable_fault_tolerance=True,
    )
    manager = MultiGPUTrainingManager(config)

    def compile_it(function: Any, **_: Any) -> Any:
        def compiled(model: nn.Module, batch: Any) -> Any:
            calls.append(manager.trainer.step + 1)
            kinds.add(type(batch))
            return function(model, batch) * wrong

        return compiled

    with ExitStack() as stack:
        for target, name, value in (
            (compile_switch, "PAYS_AFTER_S", 0.0),
            (compile_switch, "CompileAhead", CompiledAtOnce),
            (selection, "WORTH_IT", 1e9),
            (selection, "CLEARLY_FASTER", 1e9),
            (torch, "compile", compile_it),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        if how == "auto":
            stack.enter_context(recording())
        manager.fit(Net(), data(), loss_fn=_own_loss, optimizer=sgd)
    assert len(kinds) <= 1, f"it would be compiled once for each of {kinds}"
    state = {name: tensor.clone() for name, tensor in manager.model.state_dict().items()}
    return state, manager.trainer.execution.mode, calls


def test_recorded_steps_become_compiled_ones_and_compute_the_same(tmp_path: Path) -> None:
    plain, _, _ = switching(tmp_path / "plain", "eager")
    state, mode, calls = switching(tmp_path / "switched", "auto")
    assert mode == "compiled graph"
    assert calls
    assert calls[0] > 16  # not before recorded steps were compared
    same(plain, state)


def test_code_that_compiles_wrongly_is_not_used(tmp_path: Path) -> None:
    plain, _, _ = switching(tmp_path / "plain", "eager")
    state, mode, _ = switching(tmp_path / "wrong", "auto", wrong=1.5)
    assert mode == "graph"
    same(plain, state)


def test_a_resumed_run_begins_with_compiled_steps_where_its_checkpoint_had_them(
    tmp_path: Path,
) -> None:
    whole, _, _ = switching(tmp_path / "whole", "auto")
    _, mode, _ = switching(tmp_path / "cut", "auto", steps=60)
    assert mode == "compiled graph"
    state, mode, calls = switching(tmp_path / "cut", "auto", resume="auto")
    assert mode == "compiled graph"
    assert calls[0] == 61
    same(whole, state)


def test_a_resumed_run_that_cannot_compile_as_before_goes_on_without(tmp_path: Path) -> None:
    whole, _, _ = switching(tmp_path / "whole", "eager")
    _, mode, _ = switching(tmp_path / "cut", "auto", steps=60)
    assert mode == "compiled graph"
    state, mode, _ = switching(tmp_path / "cut", "auto", wrong=1.5, resume="auto")
    assert mode == "graph"
    same(whole, state)


def uneven(folder: Path, recorded: bool, accumulation: int, room: int) -> Any:
    """Shapes that come back at other times on each rank: sequences of two lengths."""
    rank = int(os.environ.get("RANK", 0))
    settings = {"batch_size": 4, "gradient_accumulation_steps": accumulation}
    config = quiet(folder / str(recorded), step_execution="graph", **settings)
    manager = MultiGPUTrainingManager(config)

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.line = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.line(x).mean(1)

    with recording(lambda rank: None if recorded else "not wanted"):
        model, *_ = manager.setup_training(Mean(), data(8), loss_fn=_own_loss, optimizer=sgd)
    generator = torch.Generator().manual_seed(rank)
    rooms = [mock.patch.object(part, "KEPT_BYTES", room) for part in (verified_graph, graph_cache)]
    with rooms[0], rooms[1]:
        for step in range(60 * accumulation):
            long = (step + 2 * rank) % 7 == 0 or (rank == 1 and step % 5 == 0)
            x = torch.randn(4, 6 if long else 5, 3, generator=generator)
            manager.trainer.train_step((x, torch.arange(4) % 2))
    run = manager.trainer.execution
    manager.finish()
    return {n: t.tolist() for n, t in model.state_dict().items()}, run.mode, run.replayed


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize(("accumulation", "room"), [(1, 2**26), (2, 2**26), (1, 2000)])
def test_ranks_that_see_shapes_at_different_times_never_wait_for_ever(
    tmp_path: Path, accumulation: int, room: int
) -> None:
    """Nor where they run out of room for batches at different times."""
    expected = run_ranks(2, uneven, tmp_path, False, accumulation, room)
    found = run_ranks(2, uneven, tmp_path, True, accumulation, room)
    for (weights, *_), (recorded, mode, replayed) in zip(expected, found, strict=True):
        assert mode == "graph"
        assert replayed > (20 if accumulation == 1 and room > 2000 else 5)
        for name, values in weights.items():
            torch.testing.assert_close(
                torch.tensor(recorded[name]), torch.tensor(values), rtol=1e-6, atol=1e-7
            )


def compiled(folder: Path, fails_on: int) -> tuple[str, str, list[float]]:
    """Ranks that compile, one of which cannot: what they run as, why, and what they learned."""
    rank = int(os.environ.get("RANK", 0))

    def compile_it(function: Any, **_: Any) -> Any:
        def refuse(*_: Any) -> Any:
            raise RuntimeError("no compiler here")

        return refuse if rank == fails_on else function

    config = quiet(folder / str(fails_on), step_execution="compile", batch_size=8, epochs=2)
    manager = MultiGPUTrainingManager(config)
    with mock.patch.object(torch, "compile", compile_it):
        manager.fit(Net(), data(), optimizer=sgd)
    run = manager.trainer.execution
    return run.mode, run.reason, manager.model.head.weight.flatten().tolist()


def test_a_rank_that_cannot_compile_keeps_all_of_them_from_it(tmp_path: Path) -> None:
    well = run_ranks(2, compiled, tmp_path, -1)
    badly = run_ranks(2, compiled, tmp_path, 1)
    assert [mode for mode, *_ in well] == ["compile", "compile"]
    assert [mode for mode, *_ in badly] == ["eager", "eager"]
    assert badly[0][1] == "it does not compile on another rank"
    assert badly[1][1] == "it does not compile: no compiler here"
    assert badly[0][2] == well[0][2]
