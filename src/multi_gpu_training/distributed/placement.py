"""Where this rank stands: its device, its group, and the few collectives the system uses."""

from __future__ import annotations

import atexit
import functools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from multi_gpu_training import accelerator
from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.distributed import meeting_place
from multi_gpu_training.distributed.cleanup import die_with_parent, spare_forked_children
from multi_gpu_training.distributed.identity import ALONE, Identity, from_environment
from multi_gpu_training.distributed.progress_slot import (
    launcher_reads,
    note_hang_limit,
    note_limits,
)
from multi_gpu_training.distributed.recoverable_group import (
    RecoverableGroup,
    open_sockets,
    recoverable_group,
    shut_listeners,
)
from multi_gpu_training.errors import ConfigError, LaunchError

_PIECE = 64 * 2**20  # bytes that a rank sends at a time
T = TypeVar("T")
Collective = TypeVar("Collective", bound=Callable[..., Any])


class CollectiveWatch(Protocol):
    """Whoever times what ranks say to each other outside DDP."""

    def collective_begins(self) -> None: ...

    def collective_ends(self) -> None: ...


def _watched(collective: Collective) -> Collective:
    """Tell `placement.watch`, where there is one, when the collective begins and ends."""

    @functools.wraps(collective)
    def call(self: Placement, *args: Any) -> Any:
        watch = self.watch
        if watch is None:
            return collective(self, *args)
        watch.collective_begins()
        try:
            return collective(self, *args)
        finally:
            watch.collective_ends()

    return cast(Collective, call)


class Placement:
    """A rank's device and its data-parallel group.

    `dp_rank` of `dp_size` says which share of a batch is ours. Under tensor parallelism several
    neighbours compute one share together: the group then has one rank of each such team, and
    `world` is the placement among all ranks. Without a group every collective is the identity.
    """

    def __init__(
        self,
        identity: Identity = ALONE,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.identity = identity
        self.device = torch.device(device)
        self.group = group
        self.dp_rank = identity.rank if group is not None else 0
        self.dp_size = identity.world_size if group is not None else 1
        self.breakable: RecoverableGroup | None = None
        # Called when a collective between steps fails; True: there is a new group, try again.
        self.on_broken: Callable[[RuntimeError], bool] | None = None
        self.watch: CollectiveWatch | None = None
        self.owns_group = False
        self.world = self
        self.team: dist.ProcessGroup | None = None  # of the ranks that compute our share with us
        self.team_size = 1
        self._control: dist.ProcessGroup | None = None  # for agreements, beside the GPU's traffic

    @property
    def is_main(self) -> bool:
        return self.identity.is_main

    @property
    def rank(self) -> int:
        """Number of this process among all of the run."""
        return self.identity.rank

    @property
    def world_size(self) -> int:
        """Number of processes of the run."""
        return self.identity.world_size

    @property
    def backend(self) -> str:
        return dist.get_backend(self.group) if self.group is not None else "none"

    @_watched
    def sum(self, tensor: Tensor) -> Tensor:
        """Add `tensor` over all ranks, in place."""
        if self.group is None:
            return tensor
        if self.on_broken is None:
            dist.all_reduce(tensor, group=self.group)
            return tensor
        mine = tensor.clone()  # a broken exchange leaves parts of sums
        self._lasting(lambda: dist.all_reduce(tensor.copy_(mine), group=self.group))
        return tensor

    @_watched
    def gather(self, tensor: Tensor) -> Tensor:
        """The same-shaped tensors of all ranks, stacked in rank order, on every rank."""
        if self.group is None:
            return tensor.unsqueeze(0)
        mine = tensor.contiguous().to(self.wire)  # gloo gathers in host memory only
        parts = [torch.empty_like(mine) for _ in range(self.dp_size)]
        self._lasting(lambda: dist.all_gather(parts, mine, group=self.group))
        return torch.stack(parts).to(tensor.device)

    def regroup(self) -> None:
        """Break the group and connect anew: what hangs on the old one fails everywhere."""
        assert self.breakable is not None
        self.group = self._control = None
        self.breakable = self.breakable.renew()
        self.group = self.breakable.group

    def _lasting(self, exchange: Callable[[], T]) -> T:
        """Do an exchange; once more where the group broke under it and was made anew."""
        try:
            return exchange()
        except RuntimeError as error:
            if self.on_broken is None or not self.on_broken(error):
                raise
        return exchange()

    def gather_json(self, value: Any) -> list[Any]:
        """One JSON value of each rank, in rank order, on every rank. Nothing is unpickled."""
        return [json.loads(raw) for raw in self.gather_bytes(json.dumps(value).encode())]

    def gather_bytes(self, value: bytes) -> list[bytes]:
        """The bytes of each rank, of any number, in rank order, on every rank."""
        if self.group is None:
            return [value]
        sizes = self.gather(torch.tensor([len(value)], device=self.wire)).flatten().tolist()
        parts: list[list[bytes]] = [[] for _ in sizes]
        # In pieces: the GPU holds one of every rank at a time.
        for start in range(0, max(sizes), _PIECE):
            padded = torch.zeros(min(_PIECE, max(sizes) - start), dtype=torch.uint8)
            mine = value[start : start + _PIECE]
            if mine:
                padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            for row, size, found in zip(
                self.gather(padded.to(self.wire)).cpu(), sizes, parts, strict=True
            ):
                found.append(row[: max(0, min(size - start, _PIECE))].numpy().tobytes())
        return [b"".join(found) for found in parts]

    @_watched
    def broadcast_json(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        if self.group is None:
            return value
        size = torch.zeros(1, dtype=torch.int64, device=self.wire)
        raw = torch.empty(0, dtype=torch.uint8)
        if self.dp_rank == 0:
            raw = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
            size.fill_(raw.numel())
        self.broadcast_tensors([size])
        if self.dp_rank != 0:
            raw = torch.empty(int(size), dtype=torch.uint8)
        raw = raw.to(self.wire)
        self.broadcast_tensors([raw])
        return json.loads(bytes(raw.cpu().tolist()))

    def broadcast_tensors(self, tensors: Iterable[Tensor], source: int = 0) -> None:
        """Overwrite `tensors` with those of the rank `source`."""
        if self.group is not None:
            for tensor in tensors:
                self._lasting(
                    lambda t=tensor: dist.broadcast(t, group=self.group, group_src=source)  # type: ignore[misc]
                )

    def broadcast_from(self, source: int, tensor: Tensor) -> Tensor:
        """Rank `source`'s bytes on every rank; `tensor` lies on `wire` and has the same shape."""
        if self.group is not None:
            dist.broadcast(tensor, group=self.group, group_src=source)
        return tensor

    def team_sum(self, tensor: Tensor) -> Tensor:
        """Add `tensor` over the ranks that compute the same share, in place."""
        if self.team is not None:
            dist.all_reduce(tensor, group=self.team)
        return tensor

    @_watched
    def all_min(self, value: int) -> int:
        """The smallest `value` of any rank: what all of them can do. Waits on the CPU only."""
        if self.dp_size == 1:
            return value
        if self._control is None:
            gloo = self.backend == "gloo"
            self._control = self.group if gloo else dist.new_group(backend="gloo")
        votes = torch.tensor([value], dtype=torch.int64)

        def vote() -> None:
            group = self._control or self.group
            dist.all_reduce(votes.fill_(value), op=dist.ReduceOp.MIN, group=group)

        self._lasting(vote)
        return int(votes)

    def all_agree(self, ok: bool) -> bool:
        """Whether it is so on every rank."""
        return self.all_min(int(ok)) == 1

    @_watched
    def barrier(self) -> None:
        if self.group is not None:
            self.sum(torch.zeros(1, device=self.wire)).item()

    def close(self) -> None:
        """Leave the group. Left to interpreter shutdown, gloo may abort or deadlock."""
        if self.world is not self:
            self.world.close()
        self.group = self._control = None
        if self.owns_group and dist.is_initialized():
            if self.breakable is not None:
                self.breakable.release()
            dist.destroy_process_group()
        self.owns_group = False

    def in_teams(self, size: int) -> Placement:
        """The data-parallel placement of a rank whose `size` neighbours compute its share with it.
        Collective."""
        ranks = self.dp_size
        if ranks % size:
            raise ConfigError(
                f"tensor_parallel={size} does not divide the {ranks} ranks; use a multiple of it"
            )
        if self.identity.on_several_hosts:
            raise ConfigError(
                f"tensor_parallel={size} is for the ranks of one machine; use fsdp alone on several"
            )
        teams = [range(first, first + size) for first in range(0, ranks, size)]
        columns = [range(place, ranks, size) for place in range(size)]
        mine = Placement(self.identity, self.device, _own_group(columns, self.dp_rank))
        mine.dp_rank, mine.dp_size = self.dp_rank // size, ranks // size
        mine.world, mine.team_size = self, size
        mine.team = _own_group(teams, self.dp_rank)
        return mine

    def in_copies(self, size: int) -> tuple[Any, Any]:
        """Groups for a model of which each `size` neighbours hold one copy: of the ranks that hold
        the same part, and of those that hold our copy. Collective."""
        ranks = self.dp_size
        copies = [range(first, first + size) for first in range(0, ranks, size)]
        parts = [range(place, ranks, size) for place in range(size)]
        return _own_group(parts, self.dp_rank), _own_group(copies, self.dp_rank)

    @property
    def wire(self) -> torch.device:
        """Where tensors must lie for the ranks to exchange them: gloo takes host memory."""
        if self.group is None:
            return self.device
        return self.device if self.backend == "nccl" else torch.device("cpu")


def _own_group(members: Iterable[Sequence[int]], rank: int) -> Any:
    """All of these groups are made, by every rank in the same order; returns the one of `rank`."""
    before, own = open_sockets(), None
    for ranks in members:
        made = dist.new_group(list(ranks))
        own = made if rank in ranks else own
    if dist.get_backend() == "gloo":
        shut_listeners(open_sockets() - before)
    return own


def place(config: MultiGPUConfig) -> Placement:
    """Join the ranks that a launcher started, or stand alone. Never waits for absent ranks."""
    placement = _place(config)
    if config.tensor_parallel == 1:
        return placement
    if placement.group is None:
        raise ConfigError(
            f"tensor_parallel={config.tensor_parallel} needs as many ranks, and this is a single "
            "process; start it with mgt run, or set world_size",
            code="MGT202",
        )
    return placement.in_teams(config.tensor_parallel)


def _place(config: MultiGPUConfig) -> Placement:
    if not config.training_mode.has_ranks:
        found = from_environment()
        if found is not None and found.world_size > 1:
            raise ConfigError(
                f"training_mode={config.training_mode.value} is one process, but a launcher "
                f"started {found.world_size}; use distributed_data_parallel, or start it alone",
                code="MGT202",
            )
        return Placement(ALONE, _device(config, ALONE))
    identity = claimed_identity(config)
    if identity is None:
        return Placement(ALONE, _device(config, ALONE))
    device = _device(config, identity)
    return _join(config, identity, device)


def claimed_identity(config: MultiGPUConfig) -> Identity | None:
    """The identity from a launcher, else from config.rank where MASTER_ADDR says whom to join."""
    found = from_environment()
    if found is not None:
        if config.world_size is not None and config.world_size != found.world_size:
            raise ConfigError(
                f"world_size={config.world_size} was asked for, but the launcher started "
                f"{found.world_size} ranks; drop world_size, or start {config.world_size}",
                code="MGT202",
            )
        return found
    if config.rank is not None and config.world_size is not None and "MASTER_ADDR" in os.environ:
        local_rank = config.local_rank if config.local_rank is not None else config.rank
        return Identity(config.rank, local_rank, config.world_size, config.world_size, True)
    return None


def _device(config: MultiGPUConfig, identity: Identity) -> torch.device:
    kind = accelerator.choose(config.device)
    if kind in ("mps", "xpu"):
        return _one_device(kind, config, identity)
    if kind == "cpu":
        return torch.device("cpu")
    ids = gpu_ids(config, torch.cuda.device_count())
    if identity.local_rank >= len(ids) and not config.share_gpu:
        raise ConfigError(
            f"{identity.local_world_size} ranks on this machine but {len(ids)} GPUs {ids}; "
            "start fewer ranks, or set share_gpu=true to test several ranks on one GPU",
            code="MGT201",
        )
    device = torch.device("cuda", ids[identity.local_rank % len(ids)])
    torch.cuda.set_device(device)
    return device


def _one_device(kind: str, config: MultiGPUConfig, identity: Identity) -> torch.device:
    if identity.world_size > 1:
        if config.device == "auto":
            return torch.device("cpu")  # the ranks could not exchange what lies on this device
        raise ConfigError(
            f"device={kind} trains on one device, but a launcher started {identity.world_size} "
            "ranks; start one, or use device=cpu",
            code="MGT202",
        )
    if kind == "mps":
        return torch.device("mps")
    device = torch.device("xpu", (config.device_ids or [0])[0])
    torch.xpu.set_device(device)
    return device


def gpu_ids(config: MultiGPUConfig, available: int) -> list[int]:
    """The GPUs a run uses, each checked against what is there."""
    if config.device_ids is None:
        return list(range(available))
    missing = [i for i in config.device_ids if i >= available]
    if missing:
        raise ConfigError(
            f"device_ids={config.device_ids}: {missing} not there; this machine shows "
            f"{available} GPUs, numbered from 0 inside CUDA_VISIBLE_DEVICES",
            code="MGT201",
        )
    return config.device_ids


def _join(config: MultiGPUConfig, identity: Identity, device: torch.device) -> Placement:
    backend = config.backend or (
        "nccl" if device.type == "cuda" and not config.share_gpu else "gloo"
    )
    if backend == "nccl" and device.type != "cuda":
        raise ConfigError(
            "backend=nccl needs GPUs and this rank has none; use backend=gloo", code="MGT201"
        )
    if backend == "nccl" and config.share_gpu:
        raise ConfigError(
            "NCCL refuses two ranks on one GPU; use backend=gloo with share_gpu=true", code="MGT201"
        )
    if "TORCHELASTIC_RUN_ID" in os.environ and not launcher_reads():
        die_with_parent()  # as under a launcher of ours: torchrun's ranks outlive a kill -9
    spare_forked_children()
    if dist.is_initialized():
        # A second manager in this process: the group belongs to whoever made it.
        return _in_world(config, identity, device)
    key = meeting_place.prepare(identity)
    note_limits(config.allowed_restarts, config.restart_window_s)
    note_hang_limit(config.hang_timeout_s or 0.0)
    patience = min(config.timeout, timedelta(seconds=config.recovery_timeout))
    try:
        store = meeting_place.join_store(identity, patience, key)
        store.set_timeout(config.exchange_timeout)
        before = open_sockets()
        dist.init_process_group(
            backend,
            store=PrefixStore("default_pg", store),
            rank=identity.rank,
            world_size=identity.world_size,
            timeout=config.exchange_timeout,
            device_id=device if backend == "nccl" else None,
        )
        if backend == "gloo":
            shut_listeners(open_sockets() - before)
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"rank {identity.rank} on {identity.host} could not join {identity.world_size} ranks "
            f"at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} within "
            f"{patience.total_seconds():g} s: {error}",
            code="MGT502",
        ) from error
    placement = _in_world(config, identity, device)
    placement.owns_group = True
    atexit.register(placement.close)
    if key is not None:

        def gather(tensor: Tensor) -> Tensor:
            return placement.gather(tensor.to(placement.wire)).cpu()

        meeting_place.prove_membership(identity.rank, key, gather, identity.host)
    placement.barrier()
    return placement


def _in_world(config: MultiGPUConfig, identity: Identity, device: torch.device) -> Placement:
    """Placed among all ranks; over gloo in a group that can be broken and made anew."""
    if dist.get_backend() != "gloo":
        return Placement(identity, device, dist.group.WORLD)
    breakable = recoverable_group(config.timeout)
    placement = Placement(identity, device, breakable.group)
    placement.breakable = breakable
    return placement
