"""Copies of a model on several ranks: wrapped in DDP, equal at the start, compared later."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import DivergenceError, ModelError
from multi_gpu_training.torch_internals import (
    DDPWithBufferHook,
    ddp_logging_data,
    ignore_in_ddp,
    without_gradient_hooks,
)

# torch 2.13 renamed the argument and warns about the old name.
_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class Replicas(DDPWithBufferHook):
    """DDP that can say where its time goes.

    hook_s: seconds that the user's communication hooks took on the host so far. They run inside
    the backward, between the gradients of one bucket and the next, and would look like computing.
    comm_hook: the user's (state, hook), for a wrapper that takes the place of this one.
    """

    placement: Placement
    hook_s = 0.0
    comm_hook: tuple[Any, Callable[..., Any]] | None = None

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        @functools.wraps(hook)  # DDP reads its signature
        def timed(state: Any, bucket: Any) -> Any:
            begun = time.perf_counter()
            try:
                return hook(state, bucket)
            finally:
                self.hook_s += time.perf_counter() - begun

        super().register_comm_hook(state, timed)
        self.comm_hook = state, hook

    def take_comm_hook(self, comm_hook: tuple[Any, Callable[..., Any]], group: Any) -> None:
        """Use the hook of a wrapper that is gone, and whose process group was `group`."""
        state, hook = comm_hook
        if state is not None and state is group:  # as torch's own hooks have it
            state = self.placement.group
        elif group is not None and getattr(state, "process_group", None) is group:
            state.process_group = self.placement.group
        self.register_comm_hook(state, hook)

    # A rank that is early waits here for rank 0's buffers: that is communication, not computing.

    def before_buffers(self) -> None:
        if self.placement.watch is not None:
            self.placement.watch.collective_begins()

    def after_buffers(self) -> None:
        if self.placement.watch is not None:
            self.placement.watch.collective_ends()


def ddp_settings(config: MultiGPUConfig) -> dict[str, Any]:
    """What DDP is told, apart from its process group."""
    asked = {"bucket_cap_mb", "reduce_bucket_size"} & config.model_fields_set
    return {
        "find_unused_parameters": config.find_unused_parameters,
        "gradient_as_bucket_view": config.use_gradient_as_bucket_view,
        "static_graph": config.static_graph,
        # None keeps DDP's small first bucket, which starts the exchange early.
        "bucket_cap_mb": config.bucket_bytes / 2**20 if asked else None,
        _BUFFERS: config.broadcast_buffers,
    }


def replicate_alone(module: nn.Module, settings: dict[str, Any]) -> nn.Module:
    """Wrap `module` as `replicate` does, in a process without other ranks."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    return DistributedDataParallel(module, **settings)


def replicate(module: nn.Module, placement: Placement, config: MultiGPUConfig) -> Replicas:
    """Wrap `module`; every rank starts with rank 0's weights."""
    if config.compress_gradients:
        # The step's weight must not be rounded to 16 bits. DDP prefixes a parameter's name with
        # the module's (empty) name and a dot.
        names = ["tally", ".tally"]
        ignore_in_ddp(module, names)
    ddp = Replicas(module, process_group=placement.group, **ddp_settings(config))
    ddp.placement = placement
    if config.compress_gradients:
        hook = default_hooks.fp16_compress_hook
        DistributedDataParallel.register_comm_hook(ddp, placement.group, hook)  # not the user's
    return ddp


def settle_buckets(ddp: DistributedDataParallel, zero_loss: Callable[[], Tensor]) -> None:
    """Let DDP rebuild its buckets now, in an order that depends on the model alone.

    It does so after the first exchange. Left to the first real step, a resumed run would add
    gradients in another order than the run it continues.
    """
    # The user's hooks expect gradients of a batch: zeros may be an error to them.
    with without_gradient_hooks(ddp.parameters()):
        for _ in range(2):
            zero_loss().backward()
            ddp.zero_grad(set_to_none=True)


def check_same_model(model: nn.Module, placement: Placement) -> None:
    """Every rank must have built the same parameters and buffers."""
    lazy = [name for name, tensor in model.named_parameters() if is_lazy(tensor)]
    if lazy:
        raise ModelError(
            f"{', '.join(lazy[:5])}{' ...' if len(lazy) > 5 else ''} have no shape yet (lazy "
            "modules); call the model once on a batch before training, or give a function that "
            "builds it and does so"
        )
    mine = [
        [name, list(tensor.shape), str(tensor.dtype)]
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]
    all_ranks = placement.gather_json(mine)
    for rank, theirs in enumerate(all_ranks):
        if theirs != all_ranks[0]:
            here, there = next(
                (
                    (a, b)
                    for a, b in zip(
                        all_ranks[0] + [None] * len(theirs),
                        theirs + [None] * len(all_ranks[0]),
                        strict=False,
                    )
                    if a != b
                ),
            )
            raise ModelError(
                f"rank {rank} built another model than rank 0: rank 0 has {_tensor(here)}, "
                f"rank {rank} has {_tensor(there)}; build the model from the config alone, not "
                "from the rank",
                code="MGT606",
            )


def refuse_layers_of_one_batch(model: nn.Module, placement: Placement) -> None:
    """Raise for embeddings that change their weights or gradients by the words of the batch: each
    rank would count its own part alone, and no exchange makes up for that."""
    for name, module in model.named_modules():
        if placement.dp_size == 1 or not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        for option, does in (
            ("max_norm", "rescales the rows that a batch uses"),
            ("scale_grad_by_freq", "divides by how often the batch has a word"),
        ):
            if getattr(module, option):
                raise ModelError(
                    f"{name or 'the model'} is {type(module).__name__}({option}="
                    f"{getattr(module, option)}), which {does}: on {placement.dp_size} ranks each "
                    f"has a part of it, and results would differ. Leave {option} out, or use one "
                    "rank",
                    code="MGT403",
                )


def _tensor(entry: list[Any] | None) -> str:
    if entry is None:
        return "nothing more"
    name, shape, dtype = entry
    return f"{name} {tuple(shape)} {dtype.removeprefix('torch.')}"


def check_replicas(model: nn.Module, placement: Placement, step: int) -> None:
    """Raise if a parameter differs in any bit between ranks."""
    if placement.dp_size == 1:
        return
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    prints = placement.gather(fingerprint(p for _, p in named))
    different = (prints != prints[0]).cpu()
    if different.any():
        names = [named[i][0] for i in different.any(0).nonzero().flatten().tolist()]
        ranks = different.any(1).nonzero().flatten().tolist()
        raise DivergenceError(
            f"after step {step} the replicas differ: ranks {ranks} against rank 0 in "
            f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''}. Weights were changed "
            "outside the trainer on one rank, or a step was taken past it; change them on every "
            "rank alike, inside train_step or a callback"
        )


_CHUNK = 2**22  # elements that are looked at at a time: each takes a few times 8 bytes


def fingerprint(parameters: Iterable[Tensor]) -> Tensor:
    """One integer per tensor, which changes with any of its bits."""
    return torch.stack([_bits(p.detach()) for p in parameters])


def _bits(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    whole = tensor.contiguous().view(kind).flatten()
    found = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, whole.numel(), _CHUNK):
        value = whole[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start, start + value.numel(), device=value.device)
        # Mixed so that each bit reaches every other: in a plain sum, the top bits (signs) of two
        # elements cancel. The constants are those of splitmix64.
        value = value + place * -0x61C8864680B583EB
        value = _folded(value, 30) * -0x40A7B892E31B1A47
        value = _folded(value, 27) * -0x6B2FB644ECCEEE15
        found += _folded(value, 31).sum()
    return found


def _folded(value: Tensor, by: int) -> Tensor:
    """value xor (value >> by), where zeros come in from the left: no two values become one."""
    folded: Tensor = value ^ ((value >> by) & (2 ** (64 - by) - 1))
    return folded


def watch_buckets(ddp: DistributedDataParallel, ready: Callable[[int], None]) -> None:
    """Call `ready(bytes)` whenever the gradients of a bucket are ready to be sent, and send
    nothing from now on. For a single rank."""

    def hook(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        ready(buffer.numel() * buffer.element_size())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    hook.__annotations__.clear()  # DDP compares them with its own classes, and these are strings
    ddp.register_comm_hook(None, hook)


def bucket_bytes(ddp: DistributedDataParallel) -> list[int]:
    """Sizes of the gradient buckets DDP really uses."""
    data = ddp_logging_data(ddp)
    sizes = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or ""
    return [int(size) for size in str(sizes).split(",") if size.strip()]
