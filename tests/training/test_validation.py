"""Validation: when, on what, by which metric; and what a wrong one is told."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import FEATURES, line, manager_for, points, quiet, sgd, squares
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from multi_gpu_training import (
    Callback,
    ConfigError,
    MetricsCollector,
    MultiGPUTrainingManager,
)
from multi_gpu_training.errors import DataError, ModelError
from multi_gpu_training.training.metrics import classification_scores

ALONE: dict[str, Any] = {"training_mode": "single", "global_batch_size": 4, "monitor": False}


class Watch(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []

    def on_validation(self, run: Any, metrics: Any) -> None:
        self.seen.append((run.step, dict(metrics)))

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.seen]


def fit(
    folder: Path, val: Any, samples: int = 16, *, stops_in: int | None = None, **settings: Any
) -> tuple[MultiGPUTrainingManager, Watch]:
    watch, passed = Watch(), [0]

    def measured(model: nn.Module, batch: list[Tensor], metrics: MetricsCollector) -> None:
        metrics.add("loss", squares(model, batch) * len(batch[0]), len(batch[0]))
        passed[0] += 1
        if passed[0] == stops_in:
            signal.raise_signal(signal.SIGTERM)
            while not manager.control.ends_next:  # a thread hears of it
                time.sleep(0.01)

    manager = manager_for(folder, **{**ALONE, **settings})
    manager.fit(
        line(),
        points(samples),
        val,
        loss_fn=squares,
        optimizer=sgd,
        eval_fn=measured if stops_in else None,
        callbacks=[watch],
    )
    return manager, watch


def events(manager: MultiGPUTrainingManager, kind: str) -> list[dict[str, Any]]:
    lines = manager.run.events(0).read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == kind]


def test_several_sets_are_named_and_one_of_them_names_the_best(tmp_path: Path) -> None:
    far = TensorDataset(points(6).tensors[0], points(6).tensors[1] + 100)
    sets = {"clean": points(9), "error": far}
    settings: dict[str, Any] = {"enable_fault_tolerance": True, "epochs": 2}
    manager, watch = fit(tmp_path, sets, **settings, best_metric="val/error/loss")
    names = {"clean/loss", "error/loss"}
    assert watch.steps == [4, 8] and all(set(metrics) == names for _, metrics in watch.seen)
    assert manager.result().best == min(metrics["error/loss"] for _, metrics in watch.seen)
    (last,) = events(manager, "validation")[-1:]
    assert last["clean/loss"] == watch.seen[-1][1]["clean/loss"]
    manifest = json.loads((manager.run.checkpoints / "best" / "manifest.json").read_text())
    assert manifest["score"]["metric"] == "error/loss" and manifest["score"]["smaller_is_better"]
    # Not said: the first set's loss. And an accuracy of a set called `error` is better if large.
    manager, watch = fit(tmp_path, sets, **settings)
    assert manager.result().best == min(metrics["clean/loss"] for _, metrics in watch.seen)
    manager.progress.metric = "error/accuracy"
    assert not manager.progress.smaller_is_better


def test_the_best_of_the_validations_inside_an_epoch_is_kept(tmp_path: Path) -> None:
    def measured(model: nn.Module, batch: list[Tensor], metrics: MetricsCollector) -> None:
        metrics.add("score", {3: 5.0, 6: 9.0, 8: 7.0}[manager.step] * len(batch[0]), len(batch[0]))

    kept: dict[str, Any] = {"enable_fault_tolerance": True, "keep_last": 1}
    manager = manager_for(tmp_path, **ALONE, **kept, validate_every=3, best_metric="score")
    manager.fit(line(), points(32), points(3), loss_fn=squares, optimizer=sgd, eval_fn=measured)
    best = (manager.run.checkpoints / "best").resolve()
    manifest = json.loads((best / "manifest.json").read_text())
    assert manager.result().best == 9.0 and manifest["step"] == 6
    assert manifest["metrics"] == {"score": 9.0}


def test_steps_between_validations_are_counted_across_epochs_and_resumes(tmp_path: Path) -> None:
    kept: dict[str, Any] = {"enable_fault_tolerance": True, "epochs": 3, "validate_every": 3}
    whole, watch = fit(tmp_path, points(5), run_name="whole", **kept)
    assert watch.steps == [3, 4, 6, 8, 9, 12]  # 4, 8 and 12 end an epoch
    # A run that ends between validations, and one that a signal stops in the middle of one: that
    # validation is made again.
    fit(tmp_path, points(5), run_name="a", max_steps=5, **kept)
    resumed, rest = fit(tmp_path, points(5), run_name="a", resume="auto", **kept)
    assert rest.seen == watch.seen[2:]
    with pytest.raises(SystemExit):
        fit(tmp_path, points(5), run_name="b", stops_in=5, **kept)  # the first batch at step 6
    stopped, rest = fit(tmp_path, points(5), run_name="b", resume="auto", **kept)
    assert rest.steps == [6, 8, 9, 12] and rest.seen == watch.seen[2:]
    for one in (resumed, stopped):
        assert torch.equal(one.model.weight, whole.model.weight)
        assert one.result().history == whole.result().history


def test_a_stream_that_ends_where_a_validation_is_due_is_validated_once(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(zip(*points(16).tensors, strict=True))

    watch = Watch()
    manager = manager_for(tmp_path, **ALONE, epochs=2, validate_every=2)
    manager.fit(line(), Stream(), points(5), loss_fn=squares, optimizer=sgd, callbacks=[watch])
    assert watch.steps == [2, 4, 6, 8] and len(manager.result().history) == 2
    _, watch = fit(tmp_path, points(5), max_steps=2, validate_every=2)
    assert watch.steps == [2]


def test_validate_at_start_judges_the_untrained_model_first(tmp_path: Path) -> None:
    _, watch = fit(tmp_path, points(5), validate_at_start=True)
    untrained = float(squares(line(), list(points(5).tensors)).detach())
    assert watch.steps == [0, 4] and watch.seen[0][1]["loss"] == pytest.approx(untrained)
    trained: list[int] = []

    class Steps(Callback):
        def on_step_end(self, run: Any, result: Any) -> None:
            trained.append(result.step)

    def other(model: nn.Module, batch: Any, metrics: MetricsCollector) -> None:
        metrics.add("wer", 1.0, 1.0)

    manager = manager_for(tmp_path, **ALONE, validate_at_start=True, best_metric="cer")
    with pytest.raises(ConfigError, match=r"best_metric='cer' is not among .*: wer; name one"):
        manager.fit(line(), points(), points(), eval_fn=other, callbacks=[Steps()])
    assert not trained


@pytest.mark.parametrize("kind", ["dataset", "loader", "batches", "stream", "items"])
def test_limit_val_batches_takes_the_first_global_batches(tmp_path: Path, kind: str) -> None:
    data = points(23)

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(zip(*data.tensors, strict=True))

    class Items(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return tuple(t[8 * index : 8 * index + 8] for t in self.tensors)

        def __len__(self) -> int:
            return 3

    pairs = torch.utils.data.BatchSampler(range(23), 8, False)
    val: Any = {
        "dataset": data,
        "loader": DataLoader(data, batch_size=5, sampler=range(23)),
        "batches": DataLoader(data, batch_sampler=pairs),
        "stream": Stream(),
        "items": DataLoader(Items(*data.tensors), batch_size=None),
    }[kind]
    seen: list[Tensor] = []

    def count(model: nn.Module, batch: list[Tensor], metrics: MetricsCollector) -> None:
        seen.append(batch[0])
        metrics.add("samples", len(batch[0]), 1.0)

    settings = {**ALONE, "global_batch_size": 8, "batch_size": 3}
    manager = manager_for(tmp_path, **settings, limit_val_batches=2)
    _, _, loader = manager.setup_training(line(), points(), val, loss_fn=squares, eval_fn=count)
    manager.validate_epoch(loader)
    manager.finish()
    assert torch.equal(torch.cat(seen), data.tensors[0][:16])


def test_f1_is_that_of_the_average_asked_for(tmp_path: Path) -> None:
    matrix = torch.tensor([[5, 2], [1, 4]])  # rows: true classes
    f1 = {how: classification_scores(matrix, how)["f1"] for how in ("macro", "micro", "binary")}
    assert f1["binary"] == pytest.approx(2 * 4 / (2 * 4 + 2 + 1))
    assert f1["macro"] == pytest.approx((10 / 13 + 8 / 11) / 2)
    assert f1["micro"] == pytest.approx(9 / 12)
    inputs, labels = points(12).tensors[0], torch.arange(12) % 2
    found = {}
    for how in f1:
        manager = manager_for(tmp_path, **ALONE, f1_average=how)
        torch.manual_seed(0)
        data = TensorDataset(inputs, labels)
        found[how] = manager.fit(nn.Linear(FEATURES, 2), data, data).metrics["f1"]
        predicted = manager.predict(data).argmax(1)
    hits = [int(((predicted == c) & (labels == c)).sum()) for c in (0, 1)]
    sizes = [int((predicted == c).sum() + (labels == c).sum()) for c in (0, 1)]
    assert found["binary"] == pytest.approx(2 * hits[1] / sizes[1])
    assert found["macro"] == pytest.approx(hits[0] / sizes[0] + hits[1] / sizes[1])
    assert found["micro"] == pytest.approx(2 * sum(hits) / sum(sizes))
    with pytest.raises(
        ConfigError, match="binary is for 2 classes, and the model has 3; use macro"
    ):
        classification_scores(torch.eye(3), "binary")


def test_evaluate_and_predict_take_data_after_a_run_and_leave_it_as_it_is(tmp_path: Path) -> None:
    manager, _ = fit(tmp_path, points(5))
    data = points(11)
    expected = manager.model(data.tensors[0]).detach()
    before = manager.model.weight.clone()
    assert torch.allclose(manager.predict(data), expected)  # rows of other batches: rounding
    shuffled = DataLoader(data, batch_size=3, shuffle=True)
    assert torch.allclose(manager.predict(shuffled), expected)  # the dataset's order
    some = DataLoader(data, batch_size=3, sampler=[7, 2, 2, 9])
    assert torch.allclose(manager.predict(some), expected[[7, 2, 2, 9]])
    one = float(squares(manager.model, list(data.tensors)).detach())
    assert manager.evaluate(data)["loss"] == pytest.approx(one)
    two = manager.evaluate({"a": shuffled, "b": points(5)})
    assert set(two) == {"a/loss", "b/loss"} and two["a/loss"] == pytest.approx(one)
    assert manager.evaluate() == manager.evaluate(points(5))
    parts = manager.predict(
        {"a": data, "b": points(5)}, lambda model, batch: (batch[0], {"y": batch[1]})
    )
    assert torch.equal(parts["a"][0], data.tensors[0]) and len(parts["b"][1]["y"]) == 5
    assert torch.equal(manager.model.weight, before) and manager.model.training


def test_outputs_of_any_form_come_back_one_per_sample(tmp_path: Path) -> None:
    manager, _ = fit(tmp_path, points(7))
    data = points(7)

    def forms(model: nn.Module, batch: list[Tensor]) -> Any:
        x = batch[0]
        width = 1 + int(x[0, 0] > 0)  # padded to another width from batch to batch
        words = [f"{v:.3f}" for v in x[:, 0].tolist()]
        return {
            "tuple": (x, x.sum(1).numpy()),
            "ragged": x[:, :width],
            "rows": [row[: 1 + i % 3] for i, row in enumerate(x)],
            "words": words,
            "none": None,
        }

    found = manager.predict(DataLoader(data, batch_size=2), forms)
    x = data.tensors[0]
    assert torch.equal(found["tuple"][0], x) and torch.equal(found["tuple"][1], x.sum(1))
    assert [row[0] for row in found["ragged"]] == x[:, 0].tolist() and len(found["rows"]) == 7
    assert found["words"] == [f"{v:.3f}" for v in x[:, 0].tolist()] and found["none"] is None
    wrong = {
        "shape": (lambda m, b: m(b[0]).sum(), r"batch of 4 samples are a tensor of shape \(\)"),
        "list": (lambda m, b: [m(b[0])], "are a list of 1; return tensors with one row"),
        "other": (lambda m, b: 3.0, "are float; return tensors with one row"),
    }
    for predict_fn, said in wrong.values():
        with pytest.raises(ModelError, match=said):
            manager.predict(data, predict_fn)
    with pytest.raises(DataError, match="does not say which samples it holds"):
        manager.predict([[data.tensors[0], data.tensors[1]]])
    with pytest.raises(DataError, match="the prediction dataset TensorDataset has 0 samples"):
        manager.predict(points(0))


class TakesTwo(nn.Linear):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * scale)


def test_a_model_that_batches_do_not_fit_needs_a_predict_fn(tmp_path: Path) -> None:
    x, y = points().tensors
    manager = MultiGPUTrainingManager(quiet(tmp_path))
    manager.fit(TakesTwo(4, 1), TensorDataset(x, torch.ones(16, 1), y))
    with pytest.raises(ModelError, match=r"forward\(x.*1 inputs, without the last.*predict_fn"):
        manager.predict(TensorDataset(x, torch.ones(16, 1)))
    found = manager.predict(TensorDataset(x, y), lambda model, batch: model(batch[0], batch[1]))
    assert found.shape == (16, 1)


def test_gather_puts_the_outputs_of_your_own_loop_in_order(tmp_path: Path) -> None:
    manager = manager_for(tmp_path, **ALONE)
    model, _, val_loader = manager.setup_training(line(), points(), points(9), loss_fn=squares)
    assert val_loader is not None
    with torch.no_grad():
        found = manager.gather((batch, model(batch[0])) for batch in val_loader)
        assert torch.allclose(found, model(points(9).tensors[0]))
        twice = [(batch, batch[0]) for _ in range(2) for batch in val_loader]
        with pytest.raises(DataError, match="came twice"):
            manager.gather(twice)
    manager.finish()


def test_your_own_loop_validates_several_sets_or_one_of_them(tmp_path: Path) -> None:
    manager = manager_for(tmp_path, **ALONE)
    sets = {"a": points(5), "b": points(3)}
    _, train_loader, loaders = manager.setup_training(line(), points(), sets, loss_fn=squares)
    assert isinstance(loaders, dict)
    manager.train_epoch(train_loader, 0)
    assert manager.validate_epoch(loaders).keys() == {"a/loss", "b/loss"}
    assert manager.validate_epoch(loaders["b"]).keys() == {"b/loss"}
    assert manager.result().metrics.keys() == {"a/loss", "b/loss"}
    manager.finish()


class Nothing(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def bad_metric(value: Any) -> Any:
    def eval_fn(model: nn.Module, batch: Any, metrics: MetricsCollector) -> None:
        metrics.add("score", value, 1.0)

    return eval_fn


@pytest.mark.parametrize(
    ("settings", "given", "said"),
    [
        ({"limit_val_batches": 0}, {}, "limit_val_batches=0: .*; give the number of batches, or"),
        (
            {"limit_val_batches": -3},
            {},
            "limit_val_batches=-3: .*leave it out to validate on every",
        ),
        ({"limit_val_batches": 0.5}, {}, "limit_val_batches=0.5: .*; give the number of batches"),
        (
            {"validate_every": 0},
            {},
            "validate_every=0: .*; give a number of steps, or leave it out",
        ),
        (
            {"limit_val_batches": 2},
            {"val": None},
            "there is no val_dataset; give one, or drop limi",
        ),
        ({"validate_at_start": True}, {"val": None}, "validate_at_start=True, but there is no val"),
        ({}, {"val": {}}, "holds no set; give one by name, or leave it out"),
        ({}, {"val": {"a/b": points(3)}}, "a set named 'a/b'.*without slashes"),
        ({}, {"val": {"a": points(3), "b": points(0)}}, "validation set 'b' of type .* has 0 samp"),
        ({"best_metric": "c/loss"}, {}, "names no validation set; there are a, b: write for exam"),
        ({"best_metric": "loss"}, {}, "names no validation set; .*best_metric=a/loss"),
        ({"best_metric": "b/wer"}, {"loss_fn": None}, "is unknown; without an eval_fn there are"),
        (
            {},
            {"eval_fn": [1]},
            r"eval_fn is a list; give a function eval_fn\(model, batch, metrics",
        ),
        ({}, {"eval_fn": lambda model, batch: None}, r"and takes \(model, batch\); give a functio"),
        ({}, {"eval_fn": nn.MSELoss}, "eval_fn is the class MSELoss itself; give a function"),
    ],
)
def test_a_wrong_validation_is_one_sentence_with_the_remedy_before_training(
    tmp_path: Path, settings: Any, given: Any, said: str
) -> None:
    given = {"val": {"a": points(3), "b": points(3)}, "loss_fn": squares, **given}
    with pytest.raises((ConfigError, DataError), match=said) as raised:
        manager = manager_for(tmp_path, **{**ALONE, **settings})
        val = given.pop("val")
        manager.setup_training(line(), points(), val, **given)
    (sentence,) = raised.value.problems
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("val", "value", "said"),
    [
        (points(3), "high", "metric 'score' is str 'high', not a number; add a sum and its weight"),
        (points(3), torch.ones(2), r"metric 'score' is a tensor of shape \(2,\), not a number"),
        (
            {"a": points(3), "b": Nothing()},
            1.0,
            "validation on 'b' gave no metric: its data are em",
        ),
    ],
)
def test_a_metric_that_is_not_a_number_is_found_at_the_start(
    tmp_path: Path, val: Any, value: Any, said: str
) -> None:
    manager = manager_for(tmp_path, **ALONE, validate_at_start=True)
    with pytest.raises(ConfigError, match=said):
        manager.fit(line(), points(), val, loss_fn=squares, eval_fn=bad_metric(value))
    assert manager.step == 0


def test_nan_is_named_and_never_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = manager_for(tmp_path, **ALONE)
    manager.fit(line(), points(), points(3), loss_fn=squares, eval_fn=bad_metric(math.nan))
    assert manager.result().best is None
    assert (
        "step 4: val/score is nan; such a validation is never the best" in capsys.readouterr().err
    )


def test_people_see_batches_bars_and_the_running_accuracy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = torch.arange(32) % 2
    data = TensorDataset(points(32).tensors[0], labels)
    settings = {**ALONE, "progress": "bar", "log_every": 1, "batch_size": 2}
    manager = MultiGPUTrainingManager(quiet(tmp_path, **settings, validate_every=3))
    sets = {"clean": data, "noisy": points_of(data, 5)}
    manager.fit(nn.Linear(FEATURES, 2), data, sets)
    out = capsys.readouterr().out
    assert "Val batches of clean: 16 (per rank: 16)" in out
    assert "Val batches of noisy: 3 (per rank: 3)" in out
    assert "val clean loss" in out and "noisy acc" in out
    lines = MultiGPUTrainingManager(quiet(tmp_path, **{**settings, "progress": "lines"}))
    lines.fit(nn.Linear(FEATURES, 2), data)
    assert " acc " in capsys.readouterr().out.split("Epoch 1/1 ")[1]


def points_of(data: TensorDataset, count: int) -> TensorDataset:
    return TensorDataset(*(tensor[:count] for tensor in data.tensors))


@pytest.mark.parametrize(
    ("predicted", "target", "said"),
    [
        ([0, 2, 1], [0, 1, 1], "got 1 samples whose class is not among 0 to 1; give classes=3"),
        ([0, 1, 1], [0, 2, -1], "got 1 samples whose class is not among 0 to 1; give classes=3"),
        ([0, -1, 1], [0, 1, 1], "got 1 samples whose class is not among 0 to 1"),
        ([[0, 1], [1, 0]], [0, 1], r"of shape \(2, 2\) for targets of shape \(2,\)"),
    ],
)
def test_a_class_that_there_is_not_never_counts_as_another(
    predicted: Any, target: Any, said: str
) -> None:
    metrics = MetricsCollector()
    metrics.add_predictions(torch.tensor([5, 1]), torch.tensor([-100, 1]), 2)  # one is ignored
    assert metrics.compute() == {"accuracy": 1.0, "f1": 1.0}
    with pytest.raises(ConfigError, match=said):
        metrics.add_predictions(torch.tensor(predicted), torch.tensor(target), 2)
