"""Out of memory in the middle of a step: same weights as without it, and no process restarted."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from multi_gpu_training import MultiGPUTrainingManager
from multi_gpu_training.data.batch import attach
from multi_gpu_training.data.order import Share
from multi_gpu_training.data.parts import in_parts
from multi_gpu_training.errors import DataError, MemoryShortError
from multi_gpu_training.training.oom import is_out_of_memory

SAMPLES, WIDTH = 48, 8
# Rounding: half micro-batches add the same numbers in another order.
CLOSE = 1e-5


class Short(torch.autograd.Function):
    """Hands its input on; in backward there is no memory left when `when()` says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, when: Callable[[], bool]) -> Tensor:
        ctx.when = when
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if ctx.when():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return grads[0], None


class Net(nn.Module):
    """Several small layers: with small buckets some are sent before backward comes to `place`."""

    def __init__(self, place: Any, when: Callable[[], bool], batchnorm: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.norm = nn.BatchNorm1d(WIDTH) if batchnorm else nn.Identity()
        self.place, self.when = place, when

    def forward(self, x: Tensor) -> Tensor:
        if self.place == "forward" and self.training and self.when():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if self.place == "input":  # reached after every bucket is on its way
            x = Short.apply(x.clone().requires_grad_(), self.when)  # type: ignore[no-untyped-call]
        for number, layer in enumerate(self.layers):
            if number == self.place:
                x = Short.apply(x, self.when)  # type: ignore[no-untyped-call]
            x = torch.tanh(layer(x))
            x = self.norm(x) if number == 2 else x
        return x


class Random(Dataset[tuple[Tensor, Tensor]]):
    """Samples that draw noise, as augmentation does: keyed by the sample, not by its batch."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(WIDTH) + 0.01 * index, torch.randn(WIDTH)


def data() -> TensorDataset:
    random = torch.Generator().manual_seed(3)
    return TensorDataset(*(torch.randn(SAMPLES, WIDTH, generator=random) for _ in range(2)))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(folder: Path, case: dict[str, Any], faults: bool) -> dict[str, Any]:
    """One short run; `case` says where, when and on which ranks memory is short, once each."""
    case = dict(case)
    place, ranks = case.pop("place", 1), case.pop("ranks", (1,))
    steps, micro = set(case.pop("steps", (3,))), case.pop("micro", None)
    batchnorm, optimizer = case.pop("batchnorm", False), case.pop("optimizer", momentum)
    dataset = Random() if case.get("num_workers") else data()
    if case.get("num_workers"):
        tiny.fork_workers()
    settings = {"batch_size": 4, "bucket_cap_mb": 0.0003, "epochs": 2, "log_every": 1, **case}
    manager = tiny.manager_for(folder, **settings)
    mine = manager.placement.dp_rank in ranks and faults

    def when() -> bool:
        step, calls = manager.trainer.step + 1, manager.trainer.state.calls_in_step
        at = mine and step in steps and (micro is None or calls == micro)
        steps.difference_update({step} if at else ())
        return at

    model = Net(place, when, batchnorm)
    result = manager.fit(model, dataset, optimizer=optimizer)
    lines = manager.run.events(manager.placement.identity.rank).read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return {
        "weights": tiny.weights(model),
        "losses": [epoch["train"]["loss"] for epoch in result.history],
        "parts": manager.trainer.oom.parts,
        "faults": [event for event in events if event["event"] == "fault"],
        "hit": mine and not steps,
        "pid": os.getpid(),
    }


def both(world: int, folder: Path, case: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Each rank's run with and without the faults; the first must come out as the second."""
    whole = run_ranks(world, train, folder / "whole", case, False)
    short = run_ranks(world, train, folder / "short", case, True)
    for ours, reference in zip(short, whole, strict=True):
        for name, value in reference["weights"].items():
            value = value.double()
            apart = float((ours["weights"][name] - value).norm() / value.norm().clamp(min=1e-30))
            assert apart <= CLOSE, (name, apart)
        assert ours["losses"] == pytest.approx(reference["losses"], rel=1e-5)
        assert ours["pid"] == reference["pid"]
    assert any(ours["hit"] for ours in short)
    return list(zip(short, whole, strict=True))


@pytest.mark.parametrize(
    ("world", "case"),
    [
        (2, {"steps": (1,)}),
        (3, {"place": 2}),
        (3, {"place": "input", "optimizer": adamw, "consistency_check_every": 1}),
        (3, {"place": "input", "steps": (1,), "optimizer": adamw}),
        (3, {"ranks": (0, 2), "steps": (2, 3)}),
        (2, {"place": "forward", "ranks": (0,)}),
        (3, {"gradient_accumulation_steps": 3, "micro": 1, "optimizer": adamw}),
        (2, {"gradient_accumulation_steps": 2, "micro": 0}),
        (2, {"num_workers": 1, "gradient_accumulation_steps": 2, "micro": 1}),
        (2, {"global_batch_size": 7, "steps": (2,)}),
        (2, {"enable_fault_tolerance": True, "checkpoint_frequency": 1}),
        (2, {"fp16_compression": True}),
        (2, {"static_graph": True}),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else str(value),
)
def test_memory_short_on_a_rank_changes_nothing_but_the_parts(
    tmp_path: Path, world: int, case: dict[str, Any]
) -> None:
    found = both(world, tmp_path, case)
    times = len(case.get("steps", (3,)))
    for rank, (ours, _) in enumerate(found):
        assert ours["parts"] == 2**times
        assert [f["action"] for f in ours["faults"]] == ["halve_micro_batch"] * times
        assert ours["faults"][0]["kind"] == "out_of_memory"
        assert ours["faults"][0]["ranks"] == list(case.get("ranks", (1,)))
        assert ours["faults"][0]["rank"] == rank


@pytest.mark.parametrize("sync", [False, True])
def test_batchnorm_keeps_its_batches_where_freed_memory_is_enough(
    tmp_path: Path, sync: bool
) -> None:
    case = {"batchnorm": True, "sync_bn": sync, "place": 4}
    for ours, reference in both(3, tmp_path, case):
        assert ours["parts"] == 1
        assert [f["action"] for f in ours["faults"]] == ["free_memory"]
        for name, value in reference["weights"].items():  # averages of BatchNorm included
            assert torch.equal(ours["weights"][name], value), name


@pytest.mark.parametrize("mode", ["single", "data_parallel"])
def test_one_process_halves_as_well(tmp_path: Path, mode: str) -> None:
    ((ours, _),) = both(1, tmp_path, {"training_mode": mode, "ranks": (0,), "steps": (1, 4)})
    assert ours["parts"] == 4


def test_on_out_of_memory_stop_ends_the_run(tmp_path: Path) -> None:
    case = {"training_mode": "single", "ranks": (0,), "on_out_of_memory": "stop"}
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train(tmp_path, case, faults=True)
    assert "batch_size" in "".join(caught.value.__notes__)


def own_loop(folder: Path, short: bool) -> dict[str, Tensor]:
    """`train_step` with batches of the user's own, two to a step."""
    manager = tiny.manager_for(folder, bucket_cap_mb=0.0003, gradient_accumulation_steps=2)
    hits = [short and manager.placement.dp_rank == 1]

    def when() -> bool:
        at = hits[0] and manager.trainer.step == 1 and manager.trainer.state.calls_in_step == 1
        hits[0] = hits[0] and not at
        return at

    model, _, _ = manager.setup_training(Net(1, when, False), data(), optimizer=momentum)
    inputs, targets = data().tensors
    mine = slice(manager.placement.dp_rank, None, manager.placement.dp_size)
    for start in range(0, SAMPLES, 6):
        batch = inputs[start : start + 6][mine], targets[start : start + 6][mine]
        manager.trainer.train_step(batch)
    manager.finish()
    assert manager.trainer.oom.parts == 1 + short
    assert manager.trainer.step == SAMPLES // 12
    return tiny.weights(model)


def test_batches_of_ones_own_are_cut_in_two(tmp_path: Path) -> None:
    whole = run_ranks(2, own_loop, tmp_path / "whole", False)
    short = run_ranks(2, own_loop, tmp_path / "short", True)
    for ours, reference in zip(short, whole, strict=True):
        for name, value in reference.items():
            assert float((ours[name] - value).norm() / value.norm()) <= CLOSE


def test_one_sample_that_does_not_fit_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    manager = tiny.manager_for(tmp_path, batch_size=4)
    with pytest.raises(MemoryShortError, match=r"1 sample at a time.*use_mixed_precision"):
        manager.fit(Net("forward", lambda: True, False), data(), optimizer=momentum)


class Limited(nn.Module):
    """Memory for so many samples at a time, and BatchNorm."""

    def __init__(self, most: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        self.most = most

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self.layers(x)  # type: ignore[no-any-return]


def limited(folder: Path) -> tuple[int, list[str]]:
    manager = tiny.manager_for(folder, batch_size=4, epochs=2)
    manager.fit(Limited(2), data(), optimizer=momentum)
    lines = manager.run.events(manager.placement.identity.rank).read_text().splitlines()
    faults = [e for e in map(json.loads, lines) if e["event"] == "fault"]
    return manager.trainer.oom.parts, [fault["action"] for fault in faults]


def test_a_batch_that_never_fits_is_halved_with_batchnorm_as_well(tmp_path: Path) -> None:
    for parts, actions in run_ranks(2, limited, tmp_path):
        assert parts == 2
        assert actions == ["free_memory", "halve_micro_batch"]


def test_ranks_that_are_started_again_begin_with_smaller_parts(tmp_path: Path) -> None:
    settings = {"batch_size": 4, "enable_fault_tolerance": True, "run_name": "run"}
    manager = tiny.manager_for(tmp_path, **settings)
    manager.setup_training(Net(None, lambda: False, False), data())
    manager.save_checkpoint()
    error = torch.OutOfMemoryError("as over NCCL, where a group cannot be made anew")
    with pytest.raises(torch.OutOfMemoryError):
        try:
            manager.fault_tolerance.handle_error(error)
        finally:
            manager.finish()
    again = tiny.manager_for(tmp_path, **settings, resume="auto")
    again.setup_training(Net(None, lambda: False, False), data())
    assert again.trainer.oom.parts == 2
    again.finish()


def test_the_parts_are_kept_over_a_resume(tmp_path: Path) -> None:
    settings = {"batch_size": 4, "enable_fault_tolerance": True, "run_name": "run"}
    times = [True]
    manager = tiny.manager_for(tmp_path, **settings)
    manager.fit(Net("forward", lambda: bool(times and times.pop()), False), data())
    resumed = tiny.manager_for(tmp_path, **settings, resume="auto")
    resumed.setup_training(Net(None, lambda: False, False), data())
    assert resumed.trainer.oom.parts == 2
    resumed.finish()
    smaller = tiny.manager_for(tmp_path, **{**settings, "batch_size": 2, "resume": "auto"})
    smaller.setup_training(Net(None, lambda: False, False), data())
    assert smaller.trainer.oom.parts == 1  # as few samples at a time as before
    smaller.finish()


def share(count: int) -> Share:
    return Share(0, 0, tuple(range(count)), count, count, True, True, 0)


def test_a_batch_is_cut_whatever_its_structure() -> None:
    batch = {"x": torch.arange(5), "words": ["a", "b", "c", "d", "e"], "rate": 0.5}
    parts = list(in_parts(batch, torch.arange(5), share(5), 2, None))
    assert [part["x"].tolist() for part, _, _ in parts] == [[0, 1, 2], [3, 4]]
    assert [part["words"] for part, _, _ in parts] == [["a", "b", "c"], ["d", "e"]]
    assert [(s.count, s.first, s.last) for _, _, s in parts] == [(3, True, False), (2, False, True)]
    assert [numbers.tolist() for _, numbers, _ in parts if numbers is not None] == [
        [0, 1, 2],
        [3, 4],
    ]


def test_a_batch_that_cannot_be_cut_is_collated_anew(tmp_path: Path) -> None:
    def flat(samples: list[Any]) -> Any:  # rows of all samples one after the other
        return torch.cat([torch.full((i + 1,), i) for i, _ in samples]), torch.tensor([3.0])

    loader = torch.utils.data.DataLoader(
        [(i, i) for i in range(4)],  # type: ignore[arg-type]
        batch_size=4,
        collate_fn=flat,
    )
    manager = tiny.manager_for(tmp_path)
    model = nn.Linear(1, 1)
    loss = lambda model, batch: (model.weight * batch[0].sum()).sum()  # noqa: E731
    _, train_loader, _ = manager.setup_training(model, loader, loss_fn=loss)
    (batch,) = list(train_loader)
    parts = list(in_parts(batch, None, batch._mgt_share, 2, train_loader))
    given = sorted(value for part, _, _ in parts for value in part[0].tolist())
    assert given == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    manager.finish()
    with pytest.raises(DataError, match="cannot be cut in two"):
        list(in_parts(attach(flat([(1, 1)]), share(3)), None, share(3), 2, None))


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (MemoryError(), False),
    ],
)
def test_what_counts_as_out_of_memory(error: BaseException, answer: bool) -> None:
    assert is_out_of_memory(error) is answer


def test_an_error_of_user_code_is_no_lack_of_memory(tmp_path: Path) -> None:
    def wrong(model: nn.Module, batch: Any) -> Tensor:
        raise RuntimeError("shapes do not fit")

    manager: MultiGPUTrainingManager = tiny.manager_for(tmp_path)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        manager.fit(tiny.line(), tiny.points(), loss_fn=wrong)
    assert manager.trainer.oom.parts == 1
