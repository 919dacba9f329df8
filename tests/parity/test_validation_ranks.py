"""Validation, prediction and averaged weights on one, two, three and four ranks are the same."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny import manager_for
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from multi_gpu_training import Callback, MetricsCollector
from multi_gpu_training.errors import ModelError

CLASSES = 3


def samples(count: int, seed: int = 5) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, (inputs.sum(1) * 2).long().remainder(CLASSES))


def classifier(norm: bool = False) -> nn.Module:
    torch.manual_seed(2)
    # Before a BatchNorm, the gradient of a bias is rounding alone, which Adam would scale up.
    first = [nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6)] if norm else [nn.Linear(4, 6)]
    return nn.Sequential(*first, nn.Tanh(), nn.Linear(6, CLASSES)).double()


class Watch(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []

    def on_validation(self, run: Any, metrics: Any) -> None:
        self.seen.append((run.step, dict(metrics)))


def forms(model: nn.Module, batch: list[Tensor]) -> Any:
    logits = model(batch[0])
    best = logits.argmax(1)
    return {
        "logits": logits,
        "pair": (best, batch[0][:, :2]),
        "length": [row[: 1 + int(k)] for row, k in zip(logits, best, strict=True)],
        "word": [f"class {int(k)}" for k in best],
    }


def session(folder: Path, settings: dict[str, Any], norm: bool) -> dict[str, Any]:
    """One training with two validation sets, and afterwards predictions."""
    watch = Watch()
    defaults = {"global_batch_size": 8, "epochs": 2, "enable_fault_tolerance": True}
    manager = manager_for(folder, **{**defaults, "validate_every": 2, **settings}, monitor=False)
    manager.fit(
        classifier(norm),
        samples(21),
        {"odd": samples(17, 6), "one": samples(1, 7)},
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.05),
        callbacks=[watch],
    )
    return {
        "validated": watch.seen,
        "weights": {k: v.clone() for k, v in manager.model.state_dict().items()},
        "evaluated": manager.evaluate({"x": samples(11, 8), "y": samples(2, 9)}),
        "forms": manager.predict(samples(7, 8), forms),
        "few": manager.predict(samples(1, 8)),
        "some": manager.predict(DataLoader(samples(9, 8), batch_size=2, sampler=[8, 1, 5, 1, 0])),
        "best": manager.result().best,
    }


def assert_same(mine: Any, theirs: Any, exactly: bool = False) -> None:
    """Equal to 1e-12: sums over other parts of a batch are rounded differently."""
    assert type(mine) is type(theirs)
    if isinstance(mine, dict):
        assert list(mine) == list(theirs)
        for key in mine:
            assert_same(mine[key], theirs[key], exactly)
    elif isinstance(mine, (list, tuple)):
        assert len(mine) == len(theirs)
        for a, b in zip(mine, theirs, strict=True):
            assert_same(a, b, exactly)
    elif isinstance(mine, (Tensor, float)) and not exactly:
        a, b = torch.as_tensor(mine), torch.as_tensor(theirs)
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)
    elif isinstance(mine, Tensor):
        assert torch.equal(mine, theirs)
    else:
        assert mine == theirs


@pytest.mark.parametrize(
    ("settings", "norm"),
    [
        ({"ema_decay": 0.8, "validate_at_start": True, "limit_val_batches": 2}, False),
        ({"swa_start": 2, "swa_every": 2, "sync_bn": True, "best_metric": "one/loss"}, True),
    ],
)
def test_metrics_predictions_and_averages_do_not_depend_on_the_ranks(
    tmp_path: Path, settings: dict[str, Any], norm: bool
) -> None:
    (alone,) = run_ranks(1, session, tmp_path / "1", settings, norm)
    start = [0] if "validate_at_start" in settings else []
    assert [step for step, _ in alone["validated"]] == [*start, 2, 3, 4, 6]
    assert len(alone["forms"]["word"]) == 7 and len(alone["some"]) == 5
    for world in (2, 3) if norm else (2, 3, 4):
        for rank in run_ranks(world, session, tmp_path / str(world), settings, norm):
            assert_same(rank, alone)
        if world == 2:
            whole = rank
    # Stopped on two ranks; resumed on two bit for bit, and on three.
    stopped = {**settings, "run_name": "a", "max_steps": 4}
    run_ranks(2, session, tmp_path / "stopped", stopped, norm)
    shutil.copytree(tmp_path / "stopped", tmp_path / "again")
    resumed = {**settings, "run_name": "a", "resume": "auto"}
    for world, folder, exactly in ((2, "stopped", True), (3, "again", False)):
        for rank in run_ranks(world, session, tmp_path / folder, resumed, norm):
            assert_same(rank["validated"], whole["validated"][-1:], exactly)
            rank["validated"] = whole["validated"]
            assert_same(rank, whole, exactly)


def normalised_by_batch(folder: Path, sizes: list[int]) -> list[Any]:
    """A BatchNorm without running statistics; the outcome, or what is said, per validation set."""
    found: list[Any] = []
    for number, size in enumerate(sizes):
        torch.manual_seed(2)
        norm = nn.BatchNorm1d(6, track_running_stats=False)
        model = nn.Sequential(nn.Linear(4, 6), norm, nn.Linear(6, CLASSES)).double()
        settings = {"global_batch_size": 8, "sync_bn": True, "run_name": str(number)}
        manager = manager_for(folder, **settings, monitor=False)
        optimizer = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
        try:
            manager.fit(model, samples(16), samples(size), optimizer=optimizer)
        except ModelError as error:
            found.append(str(error))
            continue
        evaluated = manager.result().metrics, manager.predict(samples(size))
        found.append([*evaluated, manager.evaluate(DataLoader(samples(size), batch_size=8))])
    return found


def test_a_batch_normalised_in_validation_is_the_same_on_any_number_of_ranks(
    tmp_path: Path,
) -> None:
    """Also where the last one has fewer samples than there are ranks."""
    (alone,) = run_ranks(1, normalised_by_batch, tmp_path / "1", [16, 18])
    for world in (3, 4):
        for found in run_ranks(world, normalised_by_batch, tmp_path / str(world), [16, 18]):
            assert_same(found, alone)
    for (said,) in run_ranks(4, normalised_by_batch, tmp_path / "few", [3]):
        assert "some rank has no sample at all" in said


def measured(folder: Path) -> list[dict[str, float]]:
    """The same validation by torchmetrics objects inside a function, and in place of one."""
    import torchmetrics as tm
    from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

    auroc, spread = MulticlassAUROC(CLASSES), tm.PearsonCorrCoef()
    top = tm.MaxMetric()
    each = tm.ClasswiseWrapper(tm.Accuracy("multiclass", num_classes=CLASSES, average=None))

    def inside(model: nn.Module, batch: list[Tensor], metrics: MetricsCollector) -> None:
        logits = model(batch[0])
        metrics.add("rows", len(logits), 1.0)
        metrics.update("auroc", auroc, logits.softmax(1), batch[1])
        metrics.update("corr", spread, logits[:, 0], batch[0].sum(1))
        metrics.update("top", top, logits.max())
        metrics.update("class", each, logits, batch[1])

    objects = tm.MetricCollection(
        {"tm_f1": MulticlassF1Score(CLASSES), "tm_acc": MulticlassF1Score(CLASSES, average="micro")}
    )
    found = []
    named = {"matthews": tm.MatthewsCorrCoef("multiclass", num_classes=CLASSES)}
    for number, eval_fn in enumerate((inside, objects, named)):
        manager = manager_for(folder, global_batch_size=8, run_name=str(number), monitor=False)
        sets = {"odd": samples(17, 6), "one": samples(2, 7)}
        optimizer = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
        manager.fit(classifier(), samples(16), sets, optimizer=optimizer, eval_fn=eval_fn)
        found.append(dict(manager.result().metrics))
    return found


def test_torchmetrics_objects_count_every_sample_once(tmp_path: Path) -> None:
    library = pytest.importorskip(
        "torchmetrics", reason="torchmetrics is not installed: pip install torchmetrics"
    )
    assert library.__version__
    (alone,) = run_ranks(1, measured, tmp_path / "1")
    assert alone[1]["odd/tm_acc"] == pytest.approx(alone[1]["odd/accuracy"], abs=1e-6)
    assert alone[1]["odd/tm_f1"] == pytest.approx(alone[1]["odd/f1"], abs=1e-6)
    assert 0 < alone[0]["odd/auroc"] < 1 and "odd/class/multiclassaccuracy_0" in alone[0]
    for world in (2, 3):
        for rank in run_ranks(world, measured, tmp_path / str(world)):
            for mine, theirs in zip(rank, alone, strict=True):
                mine.pop("odd/rows", None), mine.pop("one/rows", None)
                wanted = {k: v for k, v in theirs.items() if not k.endswith("rows")}
                assert mine.keys() == wanted.keys()
                for name, value in wanted.items():
                    # torchmetrics itself divides in float32; sums of the run are float64.
                    exact = name.endswith(("loss", "accuracy", "/f1"))
                    assert mine[name] == pytest.approx(value, abs=1e-12 if exact else 1e-6), name


def mistaken(folder: Path) -> list[str]:
    import torchmetrics as tm

    from multi_gpu_training import ConfigError

    class Mean(tm.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")

        def update(self, output: Tensor, target: Tensor) -> None:
            self.mean = output.mean()

        def compute(self) -> Tensor:
            return self.mean

    one = tm.MeanMetric()
    matrix = tm.ConfusionMatrix("multiclass", num_classes=CLASSES)

    def twice(model: nn.Module, batch: list[Tensor], metrics: MetricsCollector) -> None:
        metrics.update("a", one, model(batch[0]).mean())
        metrics.update("b", one, model(batch[0]).mean())

    def anew(model: nn.Module, batch: list[Tensor], metrics: MetricsCollector) -> None:
        for _ in range(2):
            metrics.update("a", tm.MeanMetric(), model(batch[0]).mean())

    said = []
    cases: list[Any] = [Mean(), {"m": matrix}, twice, anew]
    cases.append(lambda model, batch, metrics: metrics.update("a", 3.0))
    for number, eval_fn in enumerate(cases):
        manager = manager_for(folder, global_batch_size=8, run_name=str(number), monitor=False)
        with pytest.raises(ConfigError) as raised:
            manager.fit(classifier(), samples(8), samples(8), eval_fn=eval_fn)
        said.append(raised.value.problems[0])
    return said


def test_torchmetrics_objects_that_cannot_be_exact_or_are_not_numbers_are_refused(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    for said in run_ranks(2, mistaken, tmp_path):
        assert "averages its state 'mean' over ranks, which is not exact" in said[0]
        assert "metric 'm' computes a tensor of shape (3, 3), not a number; choose" in said[1]
        assert "got an object that another name updates as well; give each name its own" in said[2]
        assert "got another object than before; make the metric once, outside eval_fn" in said[3]
        assert "takes a torchmetrics Metric, and got float; for numbers use metrics.add" in said[4]
