"""The settings of DDP: each reaches it, and does what it says, on two real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny import FEATURES, flat, line, manager_for, points, quiet, sgd, squares, watching
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from multi_gpu_training import Callback, MultiGPUTrainingManager
from multi_gpu_training.distributed.replicas import bucket_bytes
from multi_gpu_training.errors import ConfigError, DivergenceError, ModelError

# Four layers of 64 x 64 float32 weights are 16 KB each; a bias 256 bytes; the tally 4 bytes.
LAYER = 64 * 64 * 4
TENSORS = 12


def wide() -> nn.Module:
    torch.manual_seed(1)
    middle = [nn.Linear(64, 64) for _ in range(4)]
    return nn.Sequential(nn.Linear(FEATURES, 64), *middle, nn.Linear(64, 1))


def replica(manager: MultiGPUTrainingManager) -> DistributedDataParallel:
    wrapped = manager.trainer.wrapped
    assert isinstance(wrapped, DistributedDataParallel)
    return wrapped


def train_buckets(folder: Path, settings: dict[str, Any]) -> list[int]:
    manager = manager_for(folder, batch_size=4, **settings)
    manager.fit(wide(), points(), optimizer=sgd)
    return bucket_bytes(replica(manager))


def buckets(folder: Path, **settings: Any) -> list[int]:
    first, second = run_ranks(2, train_buckets, folder, settings)
    assert first == second
    return first


def test_bucket_cap_mb_sets_the_size_of_the_buckets(tmp_path: Path) -> None:
    whole = buckets(tmp_path)
    small = buckets(tmp_path, bucket_cap_mb=LAYER / 2**20)
    large = buckets(tmp_path, bucket_cap_mb=2 * LAYER / 2**20)
    assert len(whole) == 1
    assert sum(small) == sum(large) == sum(whole)
    # A bucket is closed by the tensor that fills it: one layer and what came before it.
    assert max(small) < 1.1 * LAYER < 2 * LAYER < max(large) < 2.2 * LAYER
    assert len(small) > len(large) > 1


def test_reduce_bucket_size_is_the_same_in_bytes(tmp_path: Path) -> None:
    assert buckets(tmp_path, reduce_bucket_size=LAYER) == buckets(
        tmp_path, bucket_cap_mb=LAYER / 2**20
    )
    assert buckets(tmp_path, reduce_bucket_size=LAYER) != buckets(
        tmp_path, reduce_bucket_size=2 * LAYER
    )


def train_grads(folder: Path, settings: dict[str, Any]) -> tuple[int, bool]:
    """In how many storages the optimizer finds the gradients, and if 16 bits hold them all."""
    model = wide()
    seen: list[tuple[int, bool]] = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        storages = {grad.untyped_storage().data_ptr() for grad in grads}
        tensors = [grad for grad in grads if grad.numel() > 1]
        seen.append((len(storages), all(torch.equal(g, g.half().float()) for g in tensors)))

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        built = sgd(parameters)
        built.register_step_pre_hook(look)
        return built

    manager = manager_for(folder, batch_size=4, **settings)
    manager.fit(model, points(), loss_fn=squares, optimizer=optimizer)
    assert len(set(seen)) == 1
    return seen[0]


def test_use_gradient_as_bucket_view_keeps_the_gradients_in_the_buckets(tmp_path: Path) -> None:
    in_buckets = run_ranks(2, train_grads, tmp_path, {})
    own = run_ranks(2, train_grads, tmp_path, {"use_gradient_as_bucket_view": False})
    assert [storages for storages, _ in in_buckets] == [1, 1]
    assert [storages for storages, _ in own] == [TENSORS] * 2


def train_counting_bytes(folder: Path, settings: dict[str, Any]) -> tuple[int, int]:
    """Bytes that a Python hook hands to all_reduce in the second step, and the buckets' own."""
    sent: list[int] = []
    real = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel() * tensor.element_size())
        return real(tensor, *args, **kwargs)

    manager = manager_for(folder, batch_size=4, **settings)
    _, loader, _ = manager.setup_training(wide(), points(), loss_fn=squares, optimizer=sgd)
    dist.all_reduce = counting
    try:
        for batch in loader:
            sent.clear()  # the first step also settles the buckets
            manager.trainer.train_step(batch)
    finally:
        dist.all_reduce = real
    return sum(sent), sum(bucket_bytes(replica(manager)))


@pytest.mark.parametrize("field", ["fp16_compression", "use_fp16_allreduce"])
def test_gradients_are_sent_in_half_the_bytes(tmp_path: Path, field: str) -> None:
    for sent, full in run_ranks(2, train_counting_bytes, tmp_path, {field: True}):
        assert full / 2 <= sent < 0.51 * full
    assert [half for _, half in run_ranks(2, train_grads, tmp_path, {field: True})] == [True] * 2
    assert [half for _, half in run_ranks(2, train_grads, tmp_path, {})] == [False] * 2


def train_heavy(folder: Path, weight: float, compress: bool) -> Tensor:
    """A loss that counts tokens: 4 samples of `weight` tokens together on each rank."""
    model = line()
    manager = manager_for(folder, batch_size=4, fp16_compression=compress)
    manager.fit(
        model,
        points(),
        loss_fn=lambda model, batch: (1e-3 * squares(model, batch), weight),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=100.0),
    )
    return flat(model)


def test_fp16_compression_bears_steps_of_many_tokens(tmp_path: Path) -> None:
    exact = run_ranks(2, train_heavy, tmp_path, 1.0, False)[0]
    # 16-bit gradients are right to 2^-11; a weight that is everywhere the same cancels out.
    for ours in run_ranks(2, train_heavy, tmp_path, 70_000.0, True):
        assert torch.allclose(ours, exact, rtol=0, atol=2e-3)


class Branches(nn.Module):
    """Has a layer that no batch uses, as a detection head may be for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = line(), line()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.used(inputs)


def train_unused(folder: Path, settings: dict[str, Any]) -> str | tuple[bool, bool]:
    model = Branches()
    before = flat(model.used), flat(model.spare)
    try:
        manager_for(folder, batch_size=4, **settings).fit(model, points(), optimizer=sgd)
    except ModelError as error:
        return str(error)
    moved = before[0].ne(flat(model.used)).any(), before[1].ne(flat(model.spare)).any()
    return bool(moved[0]), bool(moved[1])


def test_find_unused_parameters_lets_a_spare_branch_rest(tmp_path: Path) -> None:
    for answer in run_ranks(2, train_unused, tmp_path, {}):
        assert "spare.weight" in answer and "find_unused_parameters" in answer
    allowed = run_ranks(2, train_unused, tmp_path, {"find_unused_parameters": True})
    assert allowed == [(True, False)] * 2


class Repeated(nn.Module):
    """Recomputes the same layer twice, the old way: its gradient becomes ready twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.same, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for _ in range(2):
            hidden = checkpoint(self.same, hidden, use_reentrant=True)
        return self.last(hidden)


def train_repeated(folder: Path, settings: dict[str, Any]) -> str:
    torch.manual_seed(1)
    try:
        manager_for(folder, batch_size=4, **settings).fit(Repeated(), points(), optimizer=sgd)
    except ModelError as error:
        return str(error)
    return "trained"


def test_static_graph_trains_a_layer_that_is_recomputed_twice(tmp_path: Path) -> None:
    for said in run_ranks(2, train_repeated, tmp_path, {}):
        assert "use_reentrant=False, or static_graph=true" in said
    assert run_ranks(2, train_repeated, tmp_path, {"static_graph": True}) == ["trained"] * 2


def test_static_graph_finds_unused_parameters_while_accumulating(tmp_path: Path) -> None:
    settings = {
        "static_graph": True,
        "find_unused_parameters": True,
        "gradient_accumulation_steps": 2,
    }
    assert run_ranks(2, train_unused, tmp_path, settings) == [(True, False)] * 2


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = line()
        self.register_buffer("mark", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.line(inputs)


def train_marked(folder: Path, settings: dict[str, Any]) -> tuple[list[float], float]:
    """What each forward finds in a buffer that every rank sets to its own number."""
    found: list[float] = []
    manager = manager_for(folder, batch_size=2, **settings)

    def loss_fn(model: Counting, batch: list[Tensor]) -> Tensor:
        if torch.is_grad_enabled():
            found.append(float(model.mark))
        model.mark.fill_(10.0 + manager.placement.dp_rank)
        return squares(model, batch)

    model = Counting()
    manager.setup_training(model, points(), points(), loss_fn=loss_fn, optimizer=sgd)
    manager.train_epoch(manager.train_loader, 0)
    at_validation: list[float] = []
    manager.loop.validation.evaluator.loss_fn = watching(lambda m, _: float(m.mark), at_validation)
    manager.validate_epoch()
    return found, at_validation[0]


def test_broadcast_buffers_gives_every_rank_the_buffers_of_rank_0(tmp_path: Path) -> None:
    for found, validating in run_ranks(2, train_marked, tmp_path, {}):
        assert found == [0.0, 10.0, 10.0, 10.0]
        assert validating == 10.0
    own = run_ranks(2, train_marked, tmp_path, {"broadcast_buffers": False})
    assert [found[1:] for found, _ in own] == [[10.0] * 3, [11.0] * 3]
    assert [validating for _, validating in own] == [10.0, 11.0]


class Meddle(Callback):
    """One rank's weights are changed past the trainer."""

    def on_step_end(self, manager: Any, result: Any) -> None:
        step = result.step
        if step == 1 and manager.placement.dp_rank == 1:
            with torch.no_grad():
                manager.model.weight += 1e-3


def train_meddled(folder: Path, every: int) -> str:
    manager = manager_for(folder, batch_size=1, consistency_check_every=every)
    try:
        manager.fit(line(), points(), optimizer=sgd, callbacks=[Meddle()])
    except DivergenceError as error:
        return str(error)
    return "unseen"


def test_consistency_check_every_finds_a_weight_that_differs(tmp_path: Path) -> None:
    for every in (3, 5):
        for said in run_ranks(2, train_meddled, tmp_path, every):
            assert f"after step {every} the replicas differ: ranks [1]" in said
            assert "weight" in said and "bias" not in said


def test_consistency_check_every_0_is_never(tmp_path: Path) -> None:
    assert run_ranks(2, train_meddled, tmp_path, 0) == ["unseen"] * 2


def test_two_sizes_of_a_bucket_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give one of them, or equal values"):
        quiet(tmp_path, bucket_cap_mb=1, reduce_bucket_size=100)
