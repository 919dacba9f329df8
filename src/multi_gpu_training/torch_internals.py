"""Names that torch does not promise to keep, in one place.

Each function wraps one private name and says why the public ones do not do. Every one of them has
a test in tests/test_torch_internals.py that fails loudly when torch renames it or changes what it
does. Nothing else in the package may touch a private name of torch.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import RandomSampler
from torch.utils.data import _utils as worker_utils

# BatchNorm1d to 3d, SyncBatchNorm and their relatives share no public base class.
BatchNormBase = nn.modules.batchnorm._BatchNorm
# InstanceNorm as well: everything that keeps running statistics.
RunningStatsBase = nn.modules.batchnorm._NormBase
# Conv1d to 3d and their transposed forms.
ConvBase = nn.modules.conv._ConvNd
# Every criterion of torch.nn.
CriterionBase = nn.modules.loss._Loss
# Keeps a function out of compiled graphs, as `torch.compiler.disable` does, without the second
# that importing the compiler takes.
disable_dynamo = _disable_dynamo
# Sees every operation that a block of code starts.
DispatchMode = TorchDispatchMode


def check_dimensions(norm: BatchNormBase, input: Tensor) -> None:
    """Raise if an input has the wrong number of dimensions for this BatchNorm: each of torch's
    classes hides its check in a method."""
    norm._check_input_dim(input)


class BatchNormOfAnyDimensions(BatchNormBase):
    """What torch's SyncBatchNorm accepts."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


# The NaN gate of fused optimizers


def set_found_inf(optimizer: Optimizer, found_inf: Tensor) -> None:
    """Give a fused optimizer the flag that its kernel reads: where it is 1, no weight moves.

    GradScaler sets the same attribute around each step. If torch stopped reading it, NaN would
    reach the weights in silence: the test of this function trains with a closed gate.
    """
    vars(optimizer)["found_inf"] = found_inf


def pop_found_inf(optimizer: Optimizer) -> Tensor | None:
    """Take the flag away; returns it, or None where there was none."""
    found: Tensor | None = vars(optimizer).pop("found_inf", None)
    return found


def mark_fused(optimizer: Optimizer) -> None:
    """Tell GradScaler that the optimizer's kernel unscales and looks for infinities by itself.

    torch sets this only in the constructor; `fuse` changes an optimizer that exists.
    """
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def flag_nonfinite_(tensors: list[Tensor], flag: Tensor, one: Tensor) -> None:
    """Set `flag` to 1 where an element is not finite, in one kernel that never waits for the
    host. `one` is the scale to divide by."""
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, flag, one)


def forget_scaler_steps(scaler: torch.amp.GradScaler) -> None:
    """Let a scaler forget that it unscaled gradients: the step is taken back, and a second
    `unscale_` before the next `update` would raise."""
    scaler._per_optimizer_states.clear()


# Many tensors in one kernel


def foreach_copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensor by tensor; fused only for tensors of one type."""
    torch._foreach_copy_(list(targets), list(sources))


def foreach_mul_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    torch._foreach_mul_(list(tensors), factor)


def foreach_lerp_(tensors: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> None:
    """Move each tensor by `weight` of the way to its end."""
    torch._foreach_lerp_(list(tensors), list(ends), weight)


def foreach_sub(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    return list(torch._foreach_sub(list(tensors), list(others)))


def foreach_norm(
    tensors: Sequence[Tensor], order: float = 2.0, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Norms of tensors. `order=math.inf`: their largest elements."""
    return list(torch._foreach_norm(list(tensors), order, dtype))


def largest_elements(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The largest element of each; not finite where any of its elements is not."""
    return foreach_norm([t for t in tensors if t.numel()], math.inf)


# Tensors and autograd


def sparse_values(tensor: Tensor) -> Tensor:
    """The values of a sparse tensor; the public `values()` refuses gradients that are not
    coalesced."""
    return tensor._values()


def version(tensor: Tensor) -> int:
    """How often a tensor was written to in place. Always 0 for a tensor of `inference_mode`, which
    keeps no count and cannot be written to outside that mode."""
    return 0 if tensor.is_inference() else tensor._version


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """`version` of each."""
    tensors = list(tensors)
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # one of them keeps no count
        return [version(tensor) for tensor in tensors]


@contextmanager
def without_gradient_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Let no hook of the user run on the gradients of these tensors in a `with` block. Hooks can
    be added and removed by public names, but not found; DDP's own are others."""
    kept = []
    for tensor in tensors:
        for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks):
            if hooks:
                kept.append((hooks, dict(hooks)))
                hooks.clear()  # the same object: torch looks into it when a gradient comes
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)


def gradient_hooks(tensor: Tensor) -> bool:
    """Whether somebody has hooks on the gradient of this tensor."""
    return bool(on_gradient_hooks(tensor) or after_accumulation_hooks(tensor))


def on_gradient_hooks(tensor: Tensor) -> dict[int, Any]:
    """What `register_hook` has registered, by the handles' numbers. Torch looks into it when a
    gradient comes, so an entry that is replaced is not called any more."""
    return tensor._backward_hooks or {}


def after_accumulation_hooks(tensor: Tensor) -> dict[int, Any]:
    """The same of `register_post_accumulate_grad_hook`."""
    found: dict[int, Any] = tensor._post_accumulate_grad_hooks or {}
    return found


def queue_after_backward(call: Callable[[], None]) -> None:
    """Run `call` when the backward under way has computed all gradients, before DDP's own
    callback waits for the other ranks. Only inside a backward."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def complete_optimizer(optimizer: Optimizer, calls_hooks: bool = False) -> None:
    """Give an optimizer whose class does not call `super().__init__()` the places for hooks that
    torch's base class would have made: wrappers such as Lookahead are often so. Its `step` stays
    as it is, and calls none, unless `calls_hooks`."""
    for name in vars(Optimizer([nn.Parameter(torch.zeros(()))], {})):
        if name.endswith("_hooks") and not hasattr(optimizer, name):
            setattr(optimizer, name, OrderedDict())
    if calls_hooks:
        optimizer._patch_step_function()


def is_compiler_error(error: Exception) -> bool:
    """Whether torch.compile failed, and not the code that it compiled."""
    import torch._dynamo.exc  # takes a second, and whoever compiles has imported it

    return isinstance(error, torch._dynamo.exc.TorchDynamoException)


# CUDA graphs


def end_allocation_to_pool(device: int, pool: Any) -> None:
    """After a recording that failed the allocator still serves its pool; nothing public ends
    that."""
    torch._C._cuda_endAllocateToPool(device, pool)


def gpu_sleep(cycles: int) -> None:
    """Keep the current stream busy for so many GPU cycles; nothing public only waits."""
    torch.cuda._sleep(cycles)


# DDP


class DDPWithBufferHook(DistributedDataParallel):
    """DDP that calls `before_buffers` and `after_buffers` around sending rank 0's buffers, which
    happens inside a forward, where no public hook is."""

    def before_buffers(self) -> None:
        pass

    def after_buffers(self) -> None:
        pass

    def _sync_buffers(self) -> None:
        self.before_buffers()
        super()._sync_buffers()  # type: ignore[no-untyped-call]
        self.after_buffers()


def ignore_in_ddp(module: nn.Module, names: list[str]) -> None:
    """Keep DDP from exchanging these parameters."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)


def remove_ddp_hooks(ddp: DistributedDataParallel) -> None:
    """Let parameters forget a wrapper that will not be used again; else a second one around the
    same module exchanges every gradient twice."""
    ddp._remove_autograd_hooks()


def unexchanged_parameters(ddp: DistributedDataParallel) -> list[str]:
    """Names of the parameters whose gradients DDP still waits for after a backward."""
    try:
        ddp.reducer._check_reducer_finalized()
    except RuntimeError as error:
        # DDP numbers its parameters; the sentence that lists them ends the paragraph.
        names = [name for name, p in ddp.module.named_parameters() if p.requires_grad]
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        numbers = [int(number) for number in found[1].split()] if found else []
        return [names[n] for n in numbers if n < len(names)] or ["(DDP does not say which)"]
    return []


def inside_ddp_forward(ddp: DistributedDataParallel) -> AbstractContextManager[None]:
    """Compile as inside DDP's forward: torch then cuts the backward where buckets end, so that
    gradients are sent while it runs."""
    context: AbstractContextManager[None] = ddp._inside_ddp_forward()
    return context


def ddp_logging_data(ddp: DistributedDataParallel) -> dict[str, Any]:
    """What DDP's logger knows: bucket sizes as they are now, times of the last steps."""
    data: dict[str, Any] = ddp._get_ddp_logging_data()
    return data


# Learning-rate schedulers


def inner_schedulers(scheduler: Any) -> list[Any]:
    """The scheduler and all that it combines: SequentialLR and ChainedScheduler keep theirs to
    themselves."""
    found = [scheduler]
    for inner in getattr(scheduler, "_schedulers", ()):
        found += inner_schedulers(inner)
    return found


# Data


def asked_samples(sampler: RandomSampler) -> int | None:
    """The `num_samples` that a RandomSampler was made with; the public one fills in a default."""
    asked: int | None = sampler._num_samples
    return asked


def hide_worker_info() -> None:
    """In a loader worker, from now on: let datasets find no worker. Those that split themselves by
    worker would do it a second time."""
    worker_utils.worker._worker_info = None


# Operations and process groups


def overload_packet(operation: Any) -> Any:
    """What an operation is called whatever the types of its arguments: the key of torch's table
    of operation counts."""
    return operation._overloadpacket


def default_store() -> Any:
    """The store that the ranks met at; torch keeps it to itself."""
    return _get_default_store()


def attention_implementation(config: Any) -> str | None:
    """Which attention a Hugging Face model uses; the public API can set it, but not tell."""
    return getattr(config, "_attn_implementation", None)


def metric_reductions(metric: Any) -> dict[str, Callable[[Tensor], Tensor] | None]:
    """By the name of a torchmetrics Metric's state, how ranks combine it; the public API sets it
    (`add_state`), but does not tell."""
    found: dict[str, Callable[[Tensor], Tensor] | None] = metric._reductions
    return found


# Operations, as a dispatch mode sees them


def storage_of(tensor: Tensor) -> tuple[int, Any]:
    """A number for the memory of a tensor, also on the meta device, where addresses are all 0; and
    the memory itself: while somebody holds it, the number means nothing else."""
    storage = tensor.untyped_storage()
    return storage._cdata, storage


def argument_writes(operation: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """The arguments that an operation overwrites, those inside lists included."""
    for place, declared in enumerate(operation._schema.arguments):
        given = args[place] if place < len(args) else kwargs.get(declared.name)
        if declared.alias_info is not None and declared.alias_info.is_write:
            yield from given if isinstance(given, (list, tuple)) else [given]


def takes_device(operation: Any) -> bool:
    return any(declared.name == "device" for declared in operation._schema.arguments)


def operation_name(operation: Any) -> str:
    """Such as `uniform_`, without its library and its overload."""
    return str(operation._schema.name.rpartition("::")[2])


# Sharded modules


def apply_to_tensors(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer, as `to` and `to_empty` do; those treat all of them
    alike. Sharded modules look at what they hold now."""
    module._apply(change)


def is_view(tensor: Tensor) -> bool:
    """Whether a tensor shares the memory of another that autograd knows of."""
    return tensor._base is not None


def initialise_sharded(root: Any) -> None:
    """Let `fully_shard` settle which module is the root. Left to the first forward, a part of the
    model that is called by itself before would become one."""
    root._get_fsdp_state()._lazy_init()


def own_box(tensor: Any) -> tuple[list[int], list[int]]:
    """Where this rank's part of a DTensor begins and ends, in each dimension. The public API gives
    the part, but not its place."""
    size, start = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return list(start), [first + length for first, length in zip(start, size, strict=True)]


def read_split_scalars_whole() -> None:
    """Let `float(x)` and `x.item()` of a sum or norm over a split tensor give the whole one's.

    Torch returns this rank's part of it (2.11 to 2.13): an optimizer that scales by `p.norm()`
    would move every rank's rows by another factor, without a word. Collective from now on.
    """

    def read(op_call: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        assert isinstance(args[0], DTensor)
        tensor = args[0].detach()
        assert isinstance(tensor, DTensor)
        partial = any(placement.is_partial() for placement in tensor.placements)
        return (tensor.full_tensor() if partial else tensor.to_local()).item()

    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = read


def forget_sharded_step(module: Any) -> None:
    """Drop what a sharded module holds of an unfinished step. `reset_iter_state` alone keeps the
    gradients of micro-batches that were not exchanged yet."""
    state = module._get_fsdp_state()
    for group in _groups(state):
        for parameter in group.fsdp_params:
            # Since torch 2.15 a view of the gradient below, which is all there is.
            if not isinstance(
                getattr(type(parameter), "unsharded_accumulated_grad", None), property
            ):
                parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
    if not state._is_root:
        return
    if hasattr(module, "reset_iter_state"):
        module.reset_iter_state()
    else:
        _reset_iter_state(state)


def exchange_unused(module: Any) -> None:
    """Let parameters that this rank did not use take part with zeros, in `module` and below it."""
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True)
        return
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            for group in _groups(part._get_fsdp_state()):
                group.__class__ = _exchanging(type(group))


# What torch 2.13 does under public names, for the versions before it


def _groups(state: Any) -> list[Any]:
    """The parameters that are gathered together. Older versions keep one group, not a list."""
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return groups
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def _exchanging(kind: Any) -> type:
    """A group of parameters whose unused ones have a gradient of zeros when it is exchanged."""

    class ExchangingGroup(kind):  # type: ignore[misc]
        def post_backward(self, *unused: Any) -> None:
            if self.reduce_grads:
                for parameter in self.fsdp_params:
                    # It exists once the parameter was gathered: as in torch 2.13.
                    whole = getattr(parameter, "_unsharded_param", None)
                    held = parameter.unsharded_accumulated_grad
                    if whole is None or not whole.requires_grad or held is not None:
                        continue
                    if whole.grad is None:
                        whole.grad = torch.zeros_like(whole)
            super().post_backward(*unused)

    return ExchangingGroup


def _reset_iter_state(root: Any) -> None:
    """What `reset_iter_state` of torch 2.13 does: wait for what is under way, and drop it."""
    context, stream = root._comm_ctx, root._device_handle.current_stream()

    def wait(holder: Any, name: str) -> None:
        held = getattr(holder, name, None)
        event = getattr(held, "event", held)
        if event is not None:
            stream.wait_event(event)
        if held is not None:
            setattr(holder, name, None)

    wait(context, "all_gather_state")
    wait(context, "reduce_scatter_state")
    context.post_forward_order.clear()
    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = type(state._training_state).IDLE
        for group in _groups(state):
            gathered, group._all_gather_result = group._all_gather_result, None
            if gathered is not None and gathered.all_gather_event is not None:
                stream.wait_event(gathered.all_gather_event)
            if hasattr(getattr(gathered, "all_gather_work", None), "wait"):
                gathered.all_gather_work.wait()
            for name in ("_post_reduce_event", "_all_reduce_state", "_reshard_after_forward_event"):
                wait(group, name)
            group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = type(group._training_state).IDLE
            group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def compile_package(program: Any, path: Path) -> None:
    """Compile an ExportedProgram into one file that runs without its Python code. AOTInductor has
    no public name yet."""
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))


# Who holds the memory of a GPU


def memory_snapshot() -> dict[str, Any]:
    """Every block of the CUDA allocator, and what it did since `note_allocations`: only private
    names give more than totals."""
    found: dict[str, Any] = torch.cuda.memory._snapshot()
    return found


def note_allocations(active: bool) -> None:
    """Note the Python stack of every CUDA allocation, or no longer."""
    if active:
        torch.cuda.memory._record_memory_history(
            enabled="all", context="alloc", stacks="python", max_entries=200_000
        )
    else:
        torch.cuda.memory._record_memory_history(enabled=None)


def on_out_of_memory(call: Callable[..., None]) -> None:
    """Have `call` called when an allocation fails, before anything is freed."""
    vars(torch._C)["_cuda_attach_out_of_memory_observer"](call)  # only CUDA builds have it
