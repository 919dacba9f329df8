"""A model whose parameters are split over the ranks: `fully_shard`, and the piece each rank holds.

A split tensor is a DTensor. Its pieces are rows: rank r of n holds the r-th of n equal runs of
rows, of which the last ones may be shorter or empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.torch_internals import (
    apply_to_tensors,
    exchange_unused,
    forget_sharded_step,
    own_box,
)


def make_mesh(placement: Placement, copy_size: int) -> DeviceMesh:
    """The ranks as `fully_shard` sees them: one row; copies of the model by parts of a copy; or
    shares of the batch by the ranks that compute one together (`mesh["dp"]`, `mesh["tp"]`)."""
    device, ranks = placement.device.type, placement.dp_size
    if placement.team_size > 1:
        layout = torch.arange(ranks * placement.team_size).view(ranks, placement.team_size)
        groups, names = [placement.group, placement.team], ("dp", "tp")
    elif copy_size < ranks:
        layout = torch.arange(ranks).view(-1, copy_size)
        groups, names = list(placement.in_copies(copy_size)), ("copy", "part")
    else:
        assert placement.group is not None
        return DeviceMesh.from_group(placement.group, device)
    return DeviceMesh.from_group(groups, device, mesh=layout, mesh_dim_names=names)  # type: ignore[arg-type]


def shard(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    whole: Iterable[nn.Parameter],
    *,
    mesh: DeviceMesh,
    reshard: bool,
    gather_dtype: torch.dtype | None,
) -> FSDPModule:
    """Split every parameter of `root` over the ranks of `mesh`, except those that stay `whole`.

    The parameters of a block are gathered together when it runs; with `reshard` they are freed
    after its forward and gathered again for its backward. All others are gathered by the root.
    """
    # Gradients are added up in the type of the parameters, whatever these are gathered in. Inputs
    # stay as they are: autocast decides what is computed in 16 bits.
    policy = MixedPrecisionPolicy(
        param_dtype=gather_dtype,
        reduce_dtype=None if gather_dtype is None else torch.float32,
        cast_forward_inputs=False,
    )
    ignored = set(whole)
    for module in (*blocks, root):
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard and module is not root,
            mp_policy=policy,
            ignored_params=ignored,
        )
    assert isinstance(root, FSDPModule)
    # A parameter that this rank did not use takes part with zeros: another rank may have used it.
    exchange_unused(root)
    return root


def fill(
    root: nn.Module,
    model: nn.Module,
    values: Callable[[str], Tensor],
    rows_of: Callable[[str, int, int], Tensor] | None,
    placement: Placement,
) -> None:
    """Give a sharded model that was built on the meta device its weights, one tensor at a time.

    values: whole tensors by name, asked for on rank 0 and sent to the others. rows_of: reads rows
    of a tensor, where every rank can read its own.
    """
    named = dict(chain(model.named_parameters(), model.named_buffers()))
    missing = [name for name, tensor in named.items() if tensor.is_meta]
    empty = lambda t: torch.empty_like(t, device=placement.device) if t.is_meta else t  # noqa: E731
    apply_to_tensors(root, empty)
    named = dict(chain(model.named_parameters(), model.named_buffers()))
    for name in missing:
        mine = piece(named[name])
        start, stop = rows(named[name]) if is_split(named[name]) else (0, None)
        with torch.no_grad():
            if rows_of is not None:
                stop = named[name].shape[0] if stop is None else stop
                mine.copy_(rows_of(name, start, stop))
                continue
            if placement.is_main:
                sent = values(name).to(placement.wire, mine.dtype).contiguous()
            else:
                sent = torch.empty(named[name].shape, dtype=mine.dtype, device=placement.wire)
            placement.broadcast_tensors([sent])
            mine.copy_(sent[start:stop])


def sharded_modules(root: nn.Module) -> list[FSDPModule]:
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that a sharded module gathers: all but those of sharded modules inside it."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from own_parameters(child)


@contextmanager
def gathered(root: FSDPModule, reshard: bool) -> Iterator[None]:
    """Hold every parameter whole, on every rank, for the length of a `with` block. Inside it ranks
    compute without each other; both ends are collective."""
    modules = sharded_modules(root)  # type: ignore[arg-type]
    root.set_reshard_after_forward(False, recurse=True)
    for module in modules:
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()
            module.set_reshard_after_forward(reshard and module is not root, recurse=False)


def forget_step(root: FSDPModule) -> None:
    """Drop what an unfinished step has gathered and added up."""
    for module in sharded_modules(root):  # type: ignore[arg-type]
        forget_sharded_step(module)


# Split tensors


def is_split(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def by_rows(tensor: Tensor) -> bool:
    """Whether a tensor is split into rows in the order of the ranks, in one copy or in several."""
    if not isinstance(tensor, DTensor):
        return False
    *copies, last = tensor.placements
    return last == Shard(0) and all(placement.is_replicate() for placement in copies)


def over_team(tensor: Tensor) -> bool:
    """Whether the ranks of a team hold different parts of a tensor."""
    if not isinstance(tensor, DTensor) or "tp" not in (tensor.device_mesh.mesh_dim_names or ()):
        return False
    return bool(tensor.placements[-1].is_shard())


def place_of(tensor: Tensor) -> tuple[int, int, bool]:
    """Of a tensor that is split by rows: which part of how many is ours, and whether it is that of
    a further copy."""
    assert isinstance(tensor, DTensor)
    mesh, last = tensor.device_mesh, tensor.device_mesh.ndim - 1
    further = any(mesh.get_local_rank(dim) for dim in range(last))
    return mesh.get_local_rank(last), mesh.size(last), further


def piece(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: its own memory, not a copy."""
    if not isinstance(tensor, DTensor):
        return tensor
    local: Tensor = tensor.to_local()
    return local


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, on every rank. Collective where it is split."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = list(tensor.placements)
    with torch.no_grad():
        # One dimension at a time: torch warns where it cannot gather several at once.
        for dim, placement in enumerate(placements):
            if not placement.is_replicate():
                placements[dim] = Replicate()
                tensor = tensor.redistribute(placements=placements)
        full: Tensor = tensor.to_local()
    return full


def rows(tensor: Tensor) -> tuple[int, int]:
    """First row of this rank's piece of a split tensor, and the one behind its last."""
    assert isinstance(tensor, DTensor)
    rank, ranks, _ = place_of(tensor)
    start = min(rank * -(-tensor.shape[0] // ranks), tensor.shape[0])
    return start, start + tensor.to_local().shape[0]


def part_of(like: Tensor, tensor: Tensor) -> Tensor:
    """This rank's part of a whole tensor, as it holds one of `like`."""
    assert isinstance(like, DTensor)
    return tensor[tuple(map(slice, *own_box(like)))]


def split_like(parameter: Tensor, local: Tensor) -> Tensor:
    """A tensor of which every rank holds the piece `local`, as it does of `parameter`."""
    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
