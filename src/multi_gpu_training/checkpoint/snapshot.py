"""The state of a run at one step, and its copy in host memory while training continues.

Snapshot    live tensors and plain state: what is saved, and what is loaded
HostBuffer  host memory, reused from save to save, that the tensors are copied into
Capture     the copy: files as they will be written, so training may overwrite the tensors
"""

from __future__ import annotations

import contextlib
import json
import mmap
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.checkpoint.integrity import FORMAT, SHARDED, Bytes
from multi_gpu_training.checkpoint.shards import ShardWriting, part_in_two
from multi_gpu_training.distributed.sharding import is_split, place_of
from multi_gpu_training.errors import CheckpointError
from multi_gpu_training.state_dicts import pack

# What safetensors calls each type.
_CODES = """float64=F64 float32=F32 float16=F16 bfloat16=BF16 float8_e4m3fn=F8_E4M3
    float8_e5m2=F8_E5M2 complex64=C64 int64=I64 int32=I32 int16=I16 int8=I8 uint64=U64 uint32=U32
    uint16=U16 uint8=U8 bool=BOOL"""
DTYPE_NAMES = {
    getattr(torch, name): code for name, code in (pair.split("=") for pair in _CODES.split())
}
_ALIGNMENT = 64  # of each file's bytes in the buffer
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
    device_s: float = 0.0  # how long the device copied, after `wait`
    marks: list[tuple[Any, Any]] = field(default_factory=list)  # CUDA events: start, end

    def wait(self) -> None:
        """Return when the device has copied everything. May be called from any thread."""
        for start, end in self.marks:
            end.synchronize()
            self.device_s = max(self.device_s, start.elapsed_time(end) / 1000)
        self.marks = []


@dataclass
class Capture:
    """A snapshot in host memory, as plain data and files: training may continue."""

    step: int
    manifest: dict[str, Any]
    plain: dict[str, Any]
    copy: HostCopy
    shard: ShardWriting | None = None  # where the state is split over the ranks


def capture(
    snapshot: Snapshot, buffer: HostBuffer, shard: ShardWriting | None = None, writes: bool = True
) -> Capture:
    """Copy `snapshot` into `buffer`. The device may still be copying when this returns.

    shard: of a state that is split, this rank's rows are a file by themselves; of a rank that
    does not write the rest, nothing else is copied.
    """
    optimizer: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {}
    plain = {
        "optimizer": pack(snapshot.optimizer, optimizer),
        "state": pack(snapshot.state, state),
    }
    manifest = {
        "format": FORMAT,
        "step": snapshot.step,
        "epoch": snapshot.epoch,
        "created": datetime.now(UTC).isoformat(timespec="microseconds"),
        "aliases": snapshot.aliases,
        **snapshot.facts,
    }
    mine, split = part_in_two(snapshot.model, optimizer) if shard is not None else ({}, {})
    files = {
        "model.safetensors": _without(snapshot.model, split.get("model")),
        "optimizer.safetensors": _without(optimizer, split.get("optimizer")),
        "state.safetensors": state,
    }
    if shard is not None:
        manifest |= {"format": SHARDED, "shards": shard.ranks, "split": split}
        files = {**files, shard.name: mine} if writes else {shard.name: mine}
    return Capture(snapshot.step, manifest, plain, buffer.copy(files), shard)


def _without(tensors: Mapping[str, Tensor], names: Any) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in (names or ())}


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

    @property
    def nbytes(self) -> int:
        return self._flat.numel()

    @torch.no_grad()
    def copy(self, files: Mapping[str, Mapping[str, Tensor]]) -> HostCopy:
        """Start copying the tensors of each file.

        The host does not wait. Whatever the current stream computes after this call finds the
        copy done.
        """
        layouts = {name: lay_out(tensors, name) for name, tensors in files.items()}
        starts, total = {}, 0
        for name, layout in layouts.items():
            starts[name] = total
            total += layout.nbytes + (-layout.nbytes % _ALIGNMENT)
        self._reserve(total)
        raw = memoryview(self._flat.numpy())  # type: ignore[arg-type]
        copy = HostCopy({}, sum(layout.nbytes for layout in layouts.values()))
        pairs = []
        for name, layout in layouts.items():
            start = starts[name]
            copy.files[name] = [layout.header, raw[start : start + layout.nbytes]]
            for key, (offset, size) in layout.places.items():
                source = files[name][key].detach()
                place = self._flat[start + offset : start + offset + size]
                pairs.append((place.view(source.dtype).view(source.shape), source))
        copy.marks = self._begin(pairs)
        return copy

    def _begin(self, pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Any, Any]]:
        on_gpu: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for host, source in pairs:
            if source.device.type == "cuda":
                on_gpu.setdefault(source.device, []).append((host, source))
        marks = [self._begin_on(device, group) for device, group in on_gpu.items()]
        for host, source in pairs:  # while the GPU copies
            if source.device.type != "cuda":
                host.copy_(source)
        return marks

    def _begin_on(
        self, device: torch.device, pairs: list[tuple[Tensor, Tensor]]
    ) -> tuple[Any, Any]:
        """Copy on a side stream, which the next step waits for before it overwrites anything."""
        current = torch.cuda.current_stream(device)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        side = self._streams[device]
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

    def _reserve(self, nbytes: int) -> None:
        self.allocated_s = 0.0
        if nbytes <= self.nbytes:
            return
        begun = time.perf_counter()
        self._flat = torch.empty(0, dtype=torch.uint8)  # free it before taking the larger one
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


@dataclass(frozen=True)
class FileLayout:
    """A safetensors file: its header, and where each tensor lies in the bytes that follow."""

    header: bytes
    places: dict[str, tuple[int, int]]  # name -> (first byte, number of bytes)
    nbytes: int


def lay_out(tensors: Mapping[str, Tensor], file: str) -> FileLayout:
    """Lay out tensors in the common safetensors format, which any reader loads."""
    # Wide types first, so that every tensor starts at a multiple of its element size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {}
    places: dict[str, tuple[int, int]] = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in DTYPE_NAMES or tensor.layout is not torch.strided:
            raise CheckpointError(
                f"cannot save {name} in {file}: a {tensor.layout} tensor of {tensor.dtype}; save "
                "it as a dense tensor of a common type"
            )
        start, end = end, end + tensor.numel() * tensor.element_size()
        places[name] = (start, end - start)
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return FileLayout(len(text).to_bytes(8, "little") + text, places, end)
