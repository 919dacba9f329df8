"""The private names of torch that the package relies on still do what it relies on.

One test per name in torch_internals.py. If one fails after an update of torch, the wrapper of the
same name must be mended before anything is trained with it.
"""

from __future__ import annotations

import copy
import inspect
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ChainedScheduler, LinearLR, SequentialLR
from torch.utils.data import RandomSampler
from torch.utils.flop_counter import flop_registry

from multi_gpu_training import torch_internals
from multi_gpu_training.monitoring.memory_snapshot import held_at_peak
from multi_gpu_training.training.fast_defaults import fuse

FUSED: dict[str, Any] = {
    "adam": lambda p: optim.Adam(p, lr=0.1, fused=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.1, fused=True),
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1, fused=True),
}


def test_programs_are_compiled_into_packages_under_the_name_that_is_used() -> None:
    """tests/delivery/test_exports.py compiles and runs one, which takes a minute."""
    found = inspect.signature(torch._inductor.aoti_compile_and_package).parameters
    assert next(iter(found)) == "exported_program" and "package_path" in found
    assert callable(torch._inductor.aoti_load_package)  # in the run.py of exports


def test_errors_of_the_compiler_are_told_from_those_of_compiled_code() -> None:
    def breaks(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1

    def raises(x: Tensor) -> Tensor:
        raise ValueError("the user's own")

    for function, ours in ((breaks, True), (raises, False)):
        compiled = torch.compile(function, fullgraph=ours, backend="eager")
        with pytest.raises(Exception) as caught:
            compiled(torch.ones(2))
        assert torch_internals.is_compiler_error(caught.value) is ours


def line_with_gradient() -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    model(torch.ones(4, 3)).sum().backward()
    return model


def moved(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return any(not torch.equal(v, before[n]) for n, v in model.state_dict().items())


@pytest.mark.parametrize("kind", list(FUSED))
def test_set_found_inf_keeps_a_fused_optimizer_from_moving_weights(kind: str) -> None:
    """If torch stopped reading it, the NaN gate would stand open and nobody would notice."""
    model = line_with_gradient()
    before = copy.deepcopy(model.state_dict())
    optimizer = FUSED[kind](model.parameters())
    gate = torch.ones(())
    torch_internals.set_found_inf(optimizer, gate)
    optimizer.step()
    assert not moved(model, before)
    gate.zero_()
    optimizer.step()
    assert moved(model, before)


@pytest.mark.parametrize("kind", ["adam", "adamw", "adagrad"])
def test_a_closed_gate_holds_back_the_optimizers_own_count_of_steps(kind: str) -> None:
    """The guard reads from it since when the gate is closed."""
    model = line_with_gradient()
    optimizer = FUSED[kind](model.parameters())
    gate = torch.zeros(())
    torch_internals.set_found_inf(optimizer, gate)
    optimizer.step()
    gate.fill_(1.0)
    optimizer.step()
    optimizer.step()
    assert float(optimizer.state[model.weight]["step"]) == 1.0


def test_pop_found_inf_opens_the_gate_for_good() -> None:
    model = line_with_gradient()
    before = copy.deepcopy(model.state_dict())
    optimizer = FUSED["adamw"](model.parameters())
    gate = torch.ones(())
    torch_internals.set_found_inf(optimizer, gate)
    assert torch_internals.pop_found_inf(optimizer) is gate
    assert torch_internals.pop_found_inf(optimizer) is None
    optimizer.step()
    assert moved(model, before)


@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd"])
def test_mark_fused_says_what_torchs_own_constructor_says(kind: str) -> None:
    """Without it, GradScaler unscales by itself, and the kernel skips nothing."""
    model = line_with_gradient()
    theirs = FUSED[kind](model.parameters())
    assert theirs._step_supports_amp_scaling is True
    ours = type(theirs)(model.parameters(), lr=0.1)
    assert not getattr(ours, "_step_supports_amp_scaling", False)
    torch_internals.mark_fused(ours)
    assert ours._step_supports_amp_scaling is True


def test_a_scaler_leaves_an_infinite_gradient_to_a_marked_optimizer() -> None:
    model = line_with_gradient()
    assert model.weight.grad is not None
    before = copy.deepcopy(model.state_dict())
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
    torch_internals.mark_fused(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))  # a scaler makes its tensors at its first use
    model.weight.grad[0, 0] = torch.inf
    scaler.step(optimizer)
    assert not moved(model, before)
    model.weight.grad[0, 0] = 1.0
    scaler.update()
    scaler.step(optimizer)
    assert moved(model, before)


def test_fuse_leaves_optimizers_on_the_cpu_alone() -> None:
    optimizer = optim.AdamW(line_with_gradient().parameters())
    fuse(optimizer)
    assert not getattr(optimizer, "_step_supports_amp_scaling", False)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_flag_nonfinite_sets_the_flag_and_never_clears_it(value: float) -> None:
    flag, one = torch.zeros(()), torch.ones(())
    fine, bad = torch.ones(5), torch.tensor([1.0, value])
    torch_internals.flag_nonfinite_([fine], flag, one)
    assert float(flag) == 0.0
    torch_internals.flag_nonfinite_([fine, bad], flag, one)
    torch_internals.flag_nonfinite_([fine], flag, one)
    assert float(flag) == 1.0
    assert torch.equal(fine, torch.ones(5))


def test_forget_scaler_steps_lets_gradients_be_unscaled_again() -> None:
    model = line_with_gradient()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    torch_internals.forget_scaler_steps(scaler)
    scaler.unscale_(optimizer)


def test_foreach_copy_mul_lerp_and_norm() -> None:
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([1.0])
    targets = [torch.empty(2), torch.empty(1)]
    torch_internals.foreach_copy_(targets, [a, b])
    assert torch.equal(targets[0], a) and torch.equal(targets[1], b)
    torch_internals.foreach_mul_(targets, torch.tensor(2.0))
    assert torch.equal(targets[0], 2 * a) and torch.equal(targets[1], 2 * b)
    assert [float(n) for n in torch_internals.foreach_norm([a, b])] == [5.0, 1.0]
    assert torch_internals.foreach_norm([a], dtype=torch.float64)[0].dtype == torch.float64
    assert torch.equal(torch_internals.foreach_sub([a], [a])[0], torch.zeros_like(a))
    torch_internals.foreach_lerp_(targets, [torch.zeros_like(t) for t in targets], 0.5)
    assert torch.equal(targets[0], a)


def test_largest_elements_are_not_finite_where_an_element_is_not() -> None:
    bad = torch.tensor([1.0, math.nan, 2.0])
    found = torch_internals.largest_elements([torch.tensor([-3.0, 1.0]), torch.empty(0), bad])
    assert len(found) == 2
    assert float(found[0]) == 3.0 and math.isnan(float(found[1]))


def test_sparse_values_of_a_gradient_that_is_not_coalesced() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    grad = table.weight.grad
    assert grad is not None and not grad.is_coalesced()
    with pytest.raises(RuntimeError):
        grad.values()
    assert torch_internals.sparse_values(grad).shape == (3, 2)


def test_version_counts_writes_in_place() -> None:
    tensor = torch.zeros(2)
    before = torch_internals.version(tensor)
    tensor.detach().add_(1)
    assert torch_internals.version(tensor) == before + 1
    with torch.inference_mode():
        assert torch_internals.version(torch.zeros(2)) == 0


def test_queue_after_backward_runs_once_all_gradients_are_there() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    found: list[bool] = []

    def announce(grad: Tensor) -> None:
        assert all(p.grad is None for p in model.parameters())
        torch_internals.queue_after_backward(
            lambda: found.append(all(p.grad is not None for p in model.parameters()))
        )

    loss = model(torch.ones(1, 2)).sum()
    loss.register_hook(announce)
    loss.backward()
    assert found == [True]


def test_end_allocation_to_pool_is_there() -> None:
    """What it does takes a GPU: see tests/test_gpu_execution.py."""
    if torch.backends.cuda.is_built():
        assert callable(torch._C._cuda_endAllocateToPool)
    else:
        pytest.skip("this torch is built without CUDA")


def test_gpu_sleep_is_there() -> None:
    """What it does takes a GPU."""
    assert list(inspect.signature(torch.cuda._sleep).parameters) == ["cycles"]


def test_base_classes_cover_their_families() -> None:
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    assert all(issubclass(kind, torch_internals.BatchNormBase) for kind in norms)
    assert issubclass(nn.InstanceNorm2d, torch_internals.RunningStatsBase)
    assert issubclass(torch_internals.BatchNormBase, torch_internals.RunningStatsBase)
    assert not issubclass(nn.InstanceNorm2d, torch_internals.BatchNormBase)
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d)
    assert all(issubclass(kind, torch_internals.ConvBase) for kind in convolutions)
    criteria = (nn.CrossEntropyLoss, nn.MSELoss, nn.CTCLoss, nn.BCEWithLogitsLoss)
    assert all(issubclass(kind, torch_internals.CriterionBase) for kind in criteria)


def test_check_dimensions_refuses_the_wrong_number_of_dimensions() -> None:
    norm = nn.BatchNorm2d(3)
    torch_internals.check_dimensions(norm, torch.zeros(2, 3, 4, 4))
    with pytest.raises(ValueError, match="4D"):
        torch_internals.check_dimensions(norm, torch.zeros(2, 3))


def test_inner_schedulers_finds_those_that_are_combined() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=1.0)
    first, second, third = (LinearLR(optimizer) for _ in range(3))
    chained = ChainedScheduler([second, third], optimizer)
    combined = SequentialLR(optimizer, [first, chained], [2])
    found = torch_internals.inner_schedulers(combined)
    assert found == [combined, first, chained, second, third]


def test_asked_samples_tells_a_default_from_a_wish() -> None:
    data = list(range(5))
    assert torch_internals.asked_samples(RandomSampler(data)) is None
    assert torch_internals.asked_samples(RandomSampler(data, num_samples=5)) == 5


def test_disable_dynamo_keeps_the_compiler_unimported() -> None:
    code = """
        import sys
        from multi_gpu_training.torch_internals import disable_dynamo
        disable_dynamo(lambda: None)
        sys.exit("torch._dynamo" in sys.modules)
    """
    lines = "\n".join(line.strip() for line in code.splitlines())
    assert subprocess.run([sys.executable, "-c", lines], check=False).returncode == 0


def test_overload_packet_finds_an_operation_in_the_table_of_counts() -> None:
    found: list[Any] = []

    class Watch(torch_internals.DispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            found.append(torch_internals.overload_packet(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert torch.ops.aten.mm in found
    assert torch.ops.aten.mm in flop_registry


def stored() -> str:
    store = torch_internals.default_store()
    store.set(f"of {torch.distributed.get_rank()}", "here")
    other = 1 - torch.distributed.get_rank()
    return bytes(store.clone().get(f"of {other}")).decode()


def test_default_store_is_the_one_that_the_ranks_met_at() -> None:
    assert run_ranks(2, stored) == ["here", "here"]


# DDP


class Notes(torch_internals.DDPWithBufferHook):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.events: list[str] = []

    def before_buffers(self) -> None:
        self.events.append("before")

    def after_buffers(self) -> None:
        self.events.append("after")


def ddp_facts() -> dict[str, Any]:
    torch.manual_seed(0)
    noting = Notes(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    noting(torch.randn(4, 2)).sum().backward()

    rank = torch.distributed.get_rank()
    module = nn.Linear(2, 1)
    module.alone = nn.Parameter(torch.ones(()))
    torch_internals.ignore_in_ddp(module, ["alone", ".alone"])
    ddp = DistributedDataParallel(module)
    (ddp(torch.full((1, 2), float(rank))).sum() + module.alone * rank).backward()
    logged = torch_internals.ddp_logging_data(ddp)
    together = module.weight.grad.tolist()
    apart = float(module.alone.grad)

    torch_internals.remove_ddp_hooks(ddp)
    module.zero_grad()
    module(torch.full((1, 2), float(rank))).sum().backward()
    return {
        "events": noting.events,
        "together": together,
        "apart": apart,
        "sizes": logged["bucket_sizes"],
        "released": module.weight.grad.tolist(),
    }


def test_names_of_ddp(tmp_path: Path) -> None:
    """ignore_in_ddp, remove_ddp_hooks, ddp_logging_data, DDPWithBufferHook."""
    first, second = run_ranks(2, ddp_facts)
    assert first["events"] == second["events"] == ["before", "after"]
    assert first["together"] == second["together"] == [[0.5, 0.5]]  # exchanged
    assert (first["apart"], second["apart"]) == (0.0, 1.0)  # not exchanged
    assert str(first["sizes"]).split(",")[0].strip().isdigit()
    assert (first["released"], second["released"]) == ([[0.0, 0.0]], [[1.0, 1.0]])


def test_without_gradient_hooks_keeps_hooks_from_running_and_gives_them_back() -> None:
    model, seen = nn.Linear(2, 1), []
    model.weight.register_hook(lambda grad: seen.append("hook"))
    handle = model.bias.register_post_accumulate_grad_hook(lambda p: seen.append("after"))
    with torch_internals.without_gradient_hooks(model.parameters()):
        model(torch.ones(1, 2)).sum().backward()
    assert seen == []
    model(torch.ones(1, 2)).sum().backward()
    assert sorted(seen) == ["after", "hook"]
    handle.remove()
    model(torch.ones(1, 2)).sum().backward()
    assert sorted(seen) == ["after", "hook", "hook"]


def test_a_worker_can_be_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = torch.utils.data._utils.worker
    monkeypatch.setattr(worker, "_worker_info", "somebody")
    assert torch.utils.data.get_worker_info() == "somebody"
    torch_internals.hide_worker_info()
    assert torch.utils.data.get_worker_info() is None


def test_the_reductions_of_a_torchmetrics_metric_are_where_we_read_them() -> None:
    metrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    found = torch_internals.metric_reductions(metrics.MeanMetric())
    assert {how.__name__ for how in found.values() if how} == {"dim_zero_sum"}


def test_gradient_hooks_are_found_and_views_are_known() -> None:
    """gradient_hooks, is_view."""
    weight = nn.Parameter(torch.ones(2))
    assert not torch_internals.gradient_hooks(weight)
    weight.register_hook(lambda grad: None)
    assert torch_internals.gradient_hooks(weight)
    assert torch_internals.is_view((weight * 2)[0])
    assert not torch_internals.is_view(weight * 2)


def test_a_hook_that_is_replaced_is_not_called_and_its_handle_still_removes_it() -> None:
    """on_gradient_hooks, after_accumulation_hooks."""
    weight, called = nn.Parameter(torch.ones(2)), []
    handles = [
        weight.register_hook(lambda grad: called.append("first")),
        weight.register_post_accumulate_grad_hook(lambda p: called.append("first, after")),
    ]
    found = [
        torch_internals.on_gradient_hooks(weight),
        torch_internals.after_accumulation_hooks(weight),
    ]
    for hooks in found:
        for key in hooks:
            hooks[key] = lambda value: called.append("second")
    weight.sum().backward()
    assert called == ["second", "second"]
    for handle in handles:
        handle.remove()
    assert found == [{}, {}]


def test_complete_optimizer_makes_places_for_hooks() -> None:
    class Bare(optim.Optimizer):
        def __init__(self, base: optim.Optimizer) -> None:
            self.param_groups = base.param_groups

    bare = Bare(optim.SGD([nn.Parameter(torch.zeros(()))], 0.1))
    with pytest.raises(AttributeError):
        bare.register_step_pre_hook(lambda *_: None)
    torch_internals.complete_optimizer(bare)
    for register in (bare.register_step_pre_hook, bare.register_step_post_hook):
        register(lambda *_: None)


def test_names_of_operations_as_a_dispatch_mode_sees_them() -> None:
    """storage_of, argument_writes, takes_device, operation_name."""
    seen: list[Any] = []

    class Watch(torch_internals.DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            kwargs = kwargs or {}
            written = list(torch_internals.argument_writes(func, args, kwargs))
            takes = torch_internals.takes_device(func)
            seen.append((torch_internals.operation_name(func), takes, len(written)))
            return func(*args, **kwargs)

    with Watch():
        made = torch.empty(3, device="meta")
        made.uniform_()
        torch._foreach_mul_([made, made.clone()], 2.0)
    assert seen[:2] == [("empty", True, 0), ("uniform_", False, 1)]
    assert seen[-1] == ("_foreach_mul_", False, 2)
    (key, _), (view, _) = torch_internals.storage_of(made), torch_internals.storage_of(made[1:])
    other = torch.empty(3, device="meta")
    assert key == view != torch_internals.storage_of(other)[0]


def test_apply_to_tensors_replaces_parameters_and_buffers() -> None:
    model = nn.BatchNorm1d(3, device="meta")
    torch_internals.apply_to_tensors(model, lambda t: torch.ones_like(t, device="cpu"))
    assert isinstance(model.weight, nn.Parameter) and float(model.running_var.sum()) == 3


def sharded_facts() -> list[Any]:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    for module in (*model, model):
        fully_shard(module)
    boxes = [torch_internals.own_box(model[place].weight) for place in (0, 1)]
    rank = int(os.environ["RANK"])
    assert boxes[0] == ([rank, 0], [rank + 1, 2])
    assert boxes[1] == ([min(rank, 1), 0], [1, 2])  # the second rank's part is empty
    torch_internals.initialise_sharded(model)
    model[0](torch.ones(1, 2))  # a part alone does not become the root
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 2)).sum().backward()
    for module in (*model, model):
        torch_internals.forget_sharded_step(module)
    model.set_requires_gradient_sync(True)
    model(torch.zeros(1, 2)).sum().backward()
    return [float(model[0].weight.grad.full_tensor().abs().sum()), model[0].weight.shape[0]]


class Branches(nn.Module):
    """Ranks use a layer each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.layers[number](x)  # type: ignore[no-any-return]


def gradients_of_branches() -> list[Any]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Branches()
    fully_shard(model)
    torch_internals.exchange_unused(model)
    model(torch.ones(1, 2), int(os.environ["RANK"])).sum().backward()
    return [layer.weight.grad.full_tensor().tolist() for layer in model.layers]


def test_names_of_fully_shard() -> None:
    """initialise_sharded, forget_sharded_step, own_box."""
    assert run_ranks(2, sharded_facts) == [[0.0, 2]] * 2


def numbers_of_a_split_tensor() -> list[float | bool]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch_internals.read_split_scalars_whole()
    mesh = DeviceMesh.from_group(torch.distributed.group.WORLD, "cpu")
    split = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)])
    sums = [split.sum().item(), float(split.square().sum()), split[2, 1].item()]
    return [*sums, bool((split > 4).any()), int(split.mean() * 2)]


def test_a_number_read_of_a_split_tensor_is_that_of_the_whole() -> None:
    """read_split_scalars_whole: torch alone returns the sum of this rank's rows."""
    assert run_ranks(2, numbers_of_a_split_tensor) == [[15.0, 55.0, 5.0, True, 5]] * 2


def test_what_a_rank_did_not_use_is_exchanged_as_zeros() -> None:
    """exchange_unused: each layer's gradient is the mean of one rank's ones and the other's zeros.
    Without it, ranks would exchange different parameters."""
    half = [[0.5, 0.5], [0.5, 0.5]]
    assert run_ranks(2, gradients_of_branches) == [[half, half]] * 2


def test_names_that_tell_who_holds_the_memory() -> None:
    asked = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert {"enabled", "context", "stacks", "max_entries"} <= asked.keys()
    assert callable(torch.cuda.memory._snapshot)


@pytest.mark.gpu
def test_the_snapshot_of_a_gpu_says_which_line_holds_the_memory() -> None:
    torch_internals.note_allocations(True)
    try:
        held = torch.zeros(2**22, device="cuda")
        torch_internals.on_out_of_memory(lambda *_: None)
        found = held_at_peak(
            torch_internals.memory_snapshot(), torch.cuda.current_device(), "asked for", 1
        )
    finally:
        torch_internals.note_allocations(False)
    # Not the first holder: tests before this one may have left more on the device.
    lines = [holder.line for holder in found.holders]
    assert held.numel() and any("test_torch_internals" in line for line in lines), lines
