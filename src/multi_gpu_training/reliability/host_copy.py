"""State copied into host memory that is reused from save to save, so that training may go on."""

from __future__ import annotations

import contextlib
import mmap
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.reliability.hashing import Bytes
from multi_gpu_training.reliability.tensor_file import lay_out

_ALIGNMENT = 64  # of each file's bytes in the buffer
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU of this process


@dataclass
class HostCopy:
    """Files as they are to be written. Complete after `wait`."""

    files: dict[str, list[Bytes]]
    nbytes: int
    device_s: float = 0.0  # how long the device copied, after `wait`
    _marks: list[tuple[Any, Any]] = field(default_factory=list)

    def wait(self) -> None:
        """Return when the device has copied everything. May be called from any thread."""
        for start, end in self._marks:
            end.synchronize()
            self.device_s = max(self.device_s, start.elapsed_time(end) / 1000)
        self._marks = []


class HostBuffer:
    """One block of host memory as large as the largest state that was saved, pinned for a GPU.

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
        """Begin to copy the tensors of each file. What is computed after this call on the
        current stream sees the copy done; the host does not wait for it."""
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
        copy._marks = self._begin(pairs)
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
        """Copies on a stream of their own: the host goes on, and the next step on the device
        waits until they are done, before it overwrites what is copied."""
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
        self._flat = torch.empty(0, dtype=torch.uint8)  # freed before the larger one is taken
        if self._unpin is not None:
            self._unpin()
        self._flat = _memory(nbytes, advice=("MADV_HUGEPAGE",))
        self.pinned = self._wants_pinned and self._pin()
        self.allocated_s = time.perf_counter() - begun

    def _pin(self) -> bool:
        """Fix the memory in place for the GPU. torch's own pinned memory is rounded up to a
        power of two, and is asked for only where that fails; without either, copies are slower
        and safe all the same."""
        cudart: Any = torch.cuda.cudart()
        # A forked loader worker must not get a copy of pages that the GPU writes into.
        memory = _memory(self.nbytes, advice=("MADV_HUGEPAGE", "MADV_DONTFORK"))
        address = memory.data_ptr()
        if int(cudart.cudaHostRegister(address, memory.numel(), _PORTABLE)) == 0:
            self._flat = memory
            self._unpin = weakref.finalize(self, cudart.cudaHostUnregister, address)
            return True
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda").add_(1)  # takes the error that CUDA remembers
        try:
            self._flat = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            return False
        return True


def _memory(nbytes: int, advice: Sequence[str]) -> Tensor:
    """Memory of its own pages; not touched yet, it costs nothing until it is used."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for word in advice:
        if hasattr(mmap, word):
            with contextlib.suppress(OSError):
                pages.madvise(getattr(mmap, word))
    return torch.frombuffer(pages, dtype=torch.uint8)
