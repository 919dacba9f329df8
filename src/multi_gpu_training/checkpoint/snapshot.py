"""The state of a run at one step, and its copy in host memory while training continues.

Snapshot    live tensors and plain state: what is saved, and what is loaded
HostBuffer  host memory, reused from save to save, that the tensors are copied into
Capture     the copy: files as they will be written, so training may overwrite the tensors
"""

from __future__ import annotations

import contextlib
import mmap
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

import torch
from torch import Tensor

from multi_gpu_training.checkpoint.file_layout import Layouts, StateLayout, copy_by_type
from multi_gpu_training.checkpoint.integrity import FORMAT, SHARDED, Bytes
from multi_gpu_training.checkpoint.shards import ShardWriting, part_in_two
from multi_gpu_training.distributed.sharding import is_split, place_of
from multi_gpu_training.state_dicts import packed

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU of this process


@dataclass
class Snapshot:
    """The whole state of a run at one step: what is saved, and what is loaded."""

    step: int
    epoch: int
    model: dict[str, Tensor]
    aliases: dict[str, str]
    optimizer: Any
    state: Any
    facts: dict[str, Any] = field(default_factory=dict)
    description: dict[str, Any] = field(default_factory=dict)  # how to rebuild and feed the model

    @property
    def split(self) -> bool:
        """Whether each rank holds a part of it."""
        return any(is_split(tensor) for tensor in self.model.values())

    @property
    def place(self) -> tuple[int, int, bool]:
        """Of a split state: which part of how many is ours, and whether another rank has the same
        part and comes first."""
        return place_of(next(tensor for tensor in self.model.values() if is_split(tensor)))


@dataclass
class HostCopy:
    """Files as they are to be written. Complete after `wait`."""

    files: dict[str, list[Bytes]]
    nbytes: int
    release: Callable[[], None] = lambda: None  # the memory may be used for another copy
    small: bool = False  # further copies may be taken before this one is released
    device_s: float = 0.0  # how long the device copied, after `wait`
    marks: list[tuple[Any, Any]] = field(default_factory=list)  # CUDA events: start, end

    def wait(self) -> None:
        """Return when the device has copied everything. May be called from any thread."""
        for start, end in self.marks:
            end.synchronize()
            self.device_s = max(self.device_s, start.elapsed_time(end) / 1000)
        self.marks = []


class StateBuffer(Protocol):
    """Memory that tensors are copied into, file by file."""

    def copy(self, files: Mapping[str, Mapping[str, Tensor]]) -> HostCopy: ...


@dataclass
class Capture:
    """A snapshot in host memory, as plain data and files: training may continue."""

    step: int
    manifest: dict[str, Any]
    plain: dict[str, Any]
    copy: HostCopy
    shard: ShardWriting | None = None  # where the state is split over the ranks
    description: dict[str, Any] = field(default_factory=dict)


def capture(
    snapshot: Snapshot, buffer: StateBuffer, shard: ShardWriting | None = None, writes: bool = True
) -> Capture:
    """Copy `snapshot` into `buffer`. The device may still be copying when this returns.

    shard: of a state that is split, this rank's rows are a file by themselves; of a rank that
    does not write the rest, nothing else is copied.
    """
    optimizer, state = packed(snapshot.optimizer), packed(snapshot.state)
    plain = {"optimizer": optimizer.plain, "state": state.plain}
    manifest = {
        "format": FORMAT,
        "step": snapshot.step,
        "epoch": snapshot.epoch,
        "created": datetime.now(UTC).isoformat(timespec="microseconds"),
        "aliases": snapshot.aliases,
        **snapshot.facts,
    }
    files = by_file(snapshot.model, optimizer.tensors, state.tensors)
    if shard is not None:
        mine, split = part_in_two(snapshot.model, optimizer.tensors)
        for kind in ("model", "optimizer"):
            files[f"{kind}.safetensors"] = _without(files[f"{kind}.safetensors"], split[kind])
        manifest |= {"format": SHARDED, "shards": shard.ranks, "split": split}
        files = {**files, shard.name: mine} if writes else {shard.name: mine}
    copy = buffer.copy(files)
    return Capture(snapshot.step, manifest, plain, copy, shard, snapshot.description)


def by_file(
    model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> dict[str, Mapping[str, Tensor]]:
    """The tensors of a state by the name of their file."""
    return {
        "model.safetensors": model,
        "optimizer.safetensors": optimizer,
        "state.safetensors": state,
    }


def _without(tensors: Mapping[str, Tensor], names: Any) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


class HostBuffer:
    """One block of host memory as large as the largest state saved so far, pinned for a GPU.

    A copy overwrites the one before: its files must have been written by then.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.pinned = False
        self.allocated_s = 0.0  # in the last copy
        self._wants_pinned = torch.device(device).type == "cuda"
        self._unpin: Any = None
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._streams: dict[torch.device, Any] = {}
        self._layouts = Layouts()
        self._laid_out: StateLayout | None = None  # what `_places` are for
        self._places: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        return self._flat.numel()

    @torch.no_grad()
    def copy(self, files: Mapping[str, Mapping[str, Tensor]]) -> HostCopy:
        """Start copying the tensors of each file.

        The host does not wait. Whatever the current stream computes after this call finds the
        copy done.
        """
        layout, sources = self._layouts.of(files)
        return self.copy_laid_out(layout, sources)

    @torch.no_grad()
    def copy_laid_out(self, layout: StateLayout, sources: list[Tensor]) -> HostCopy:
        """`copy`, where the layout is known already."""
        places = self.places(layout)
        copy = HostCopy(self.files(layout), layout.nbytes)
        if not any(source.is_cuda for source in sources):
            copy_by_type(layout, places, sources)
            return copy
        on_gpu: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for host, source in zip(places, sources, strict=True):
            if source.is_cuda:
                on_gpu.setdefault(source.device, []).append((host, source))
        copy.marks = [self._begin_on(device, group) for device, group in on_gpu.items()]
        for host, source in zip(places, sources, strict=True):  # while the GPU copies
            if not source.is_cuda:
                host.copy_(source)
        return copy

    def places(self, layout: StateLayout) -> list[Tensor]:
        """The memory of each tensor."""
        self.reserve(layout.total)
        if self._laid_out is not layout:
            self._laid_out, self._places = layout, layout.views(self._flat)
        return self._places

    def files(self, layout: StateLayout) -> dict[str, list[Bytes]]:
        """The files as they lie in this memory."""
        # Files are slices of the buffer: nothing is copied again on its way to the disk.
        raw = memoryview(self._flat.numpy())  # type: ignore[arg-type]
        return {
            name: [file.header, raw[start : start + file.nbytes]]
            for name, (start, file) in layout.files.items()
        }

    def fetch(self, layout: StateLayout, flat: Tensor, after: Any) -> None:
        """Copy a whole state that lies on a device as it will lie here; return when it is here.

        after: the CUDA event that it waits for. May be called from any thread.
        """
        if after is None:
            self.reserve(layout.total)
            self._flat[: layout.total].copy_(flat[: layout.total])
            return
        # A thread begins with the first GPU, and pinning memory would open a context there.
        with torch.cuda.device(flat.device):
            self.reserve(layout.total)
            side = self._side_stream(flat.device)
            end = torch.cuda.Event(blocking=True)
            side.wait_event(after)
            with torch.cuda.stream(side):
                self._flat[: layout.total].copy_(flat[: layout.total], non_blocking=True)
                end.record(side)
            end.synchronize()

    def _side_stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _begin_on(
        self, device: torch.device, pairs: list[tuple[Tensor, Tensor]]
    ) -> tuple[Any, Any]:
        """Copy on a side stream, which the next step waits for before it overwrites anything."""
        current = torch.cuda.current_stream(device)
        side = self._side_stream(device)
        # Blocking events let a waiting thread sleep instead of spin.
        start, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        side.wait_stream(current)
        with torch.cuda.stream(side):
            start.record(side)
            for host, source in pairs:
                host.copy_(source.contiguous(), non_blocking=True)
            end.record(side)
        current.wait_event(end)
        return start, end

    def reserve(self, nbytes: int) -> None:
        self.allocated_s = 0.0
        if nbytes <= self.nbytes:
            return
        begun = time.perf_counter()
        self._laid_out, self._places = None, []
        self._flat = torch.empty(0, dtype=torch.uint8)  # free it before taking the larger one
        # Before the memory goes: another allocation may get its pages.
        if self._unpin is not None:
            self._unpin()
        self._flat = _memory(nbytes, for_gpu=self._wants_pinned)
        self.pinned = self._wants_pinned and self._pin()
        self.allocated_s = time.perf_counter() - begun

    def _pin(self) -> bool:
        """Pin the memory for the GPU. Where that fails, copies are slower but just as safe."""
        cudart: Any = torch.cuda.cudart()
        address = self._flat.data_ptr()
        if int(cudart.cudaHostRegister(address, self.nbytes, _PORTABLE)) == 0:
            self._unpin = weakref.finalize(self, cudart.cudaHostUnregister, address)
            return True
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda").add_(1)  # takes the error that CUDA remembers
        # torch rounds its pinned memory up to a power of two, so it comes second.
        try:
            self._flat = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            return False
        return True


def _memory(nbytes: int, for_gpu: bool) -> Tensor:
    """Allocate separate pages, which cost nothing until they are touched."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A forked loader worker must not get a copy of pages that the GPU writes into.
    for word in ("MADV_HUGEPAGE", "MADV_DONTFORK") if for_gpu else ("MADV_HUGEPAGE",):
        if hasattr(mmap, word):
            with contextlib.suppress(OSError):
                pages.madvise(getattr(mmap, word))
    return torch.frombuffer(pages, dtype=torch.uint8)
