"""Memory for the states on their way to the disk, and which of it a state is copied into.

A small state is copied on its own device, in a few kernels, and another thread brings it to the
host. Several such copies can wait for the disk. A large one goes to the host at once, and there
is room for one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.checkpoint.file_layout import (
    Layouts,
    StateLayout,
    copy_all,
    is_fused,
)
from multi_gpu_training.checkpoint.snapshot import HostBuffer, HostCopy
from multi_gpu_training.torch_internals import versions

SMALL_BYTES = 256 * 2**20
_SHARE = 0.05  # of the device's free memory, for one copy


class StateBuffers:
    """All buffers of one run.

    several: whether small states may be copied while others wait. wait: returns when no copy is
    in use any more.
    """

    def __init__(self, device: torch.device, several: bool, wait: Callable[[], None]) -> None:
        self.host = HostBuffer(device)  # what files are written from, or all there is
        self._device = device
        self._several = several
        self._wait = wait
        self._layouts = Layouts()
        self._slots: list[_Slot] = []
        self._too_large: StateLayout | None = None  # for this device, at the last look
        self._ahead: _Ahead | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        hosts = {id(host): host for host in [self.host, *(slot.buffer for slot in self._slots)]}
        return sum(host.nbytes for host in hosts.values() if isinstance(host, HostBuffer))

    def copy(self, files: Mapping[str, Mapping[str, Tensor]]) -> HostCopy:
        """Copy the tensors of each file: see `HostBuffer.copy`."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            if ahead.is_of(files):
                return ahead.copy
            ahead.copy.release()
        layout, sources = self._layouts.of(files)
        copy = self._small_copy(layout, sources)
        if copy is None:
            self._wait()
            return self.host.copy_laid_out(layout, sources)
        return copy

    def copy_ahead(self, files: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy what the next `copy` will ask for, which then costs nothing: unless these tensors
        were written to until then. Recorded steps write without a trace: call `forget_ahead`."""
        self.forget_ahead()
        layout, sources = self._layouts.of(files)
        copy = self._small_copy(layout, sources)
        if copy is not None:
            self._ahead = _Ahead(dict(files), sources, versions(sources), copy)

    def forget_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.copy.release()

    def _small_copy(self, layout: StateLayout, sources: list[Tensor]) -> HostCopy | None:
        """A copy in a buffer of its own, where the state is small enough for that."""
        on_gpu = self._device.type == "cuda"
        small = layout.total <= SMALL_BYTES and (on_gpu or self._several)
        slot = self._slot_for(layout, sources) if small else None
        if slot is None:
            return None
        copy: HostCopy = slot.buffer.copy_laid_out(layout, sources)
        slot.taken, copy.release, copy.small = True, slot.free, self._several
        return copy

    def _slot_for(self, layout: StateLayout, sources: list[Tensor]) -> _Slot | None:
        """A buffer that is free, or a new one; None if this device has no room for it."""
        slot = next((slot for slot in self._slots if not slot.taken), None)
        if self._device.type != "cuda":
            if slot is None:
                slot = _Slot(HostBuffer(self._device) if self._slots else self.host)
                self._slots.append(slot)
            return slot
        if slot is not None and slot.buffer.nbytes >= layout.total:
            return slot
        if self._too_large is layout:
            return None
        here = all(t.device == self._device or t.device.type == "cpu" for t in sources)
        if here and layout.total <= _SHARE * _free_bytes(self._device):
            if slot is None:
                slot = _Slot(DeviceBuffer(self._device, self.host))
                self._slots.append(slot)
            try:
                slot.buffer.reserve(layout.total)
                return slot
            except torch.OutOfMemoryError:  # the host has room; a save must not end a training
                pass
        self._too_large = layout
        return None


@dataclass
class _Ahead:
    """A copy made before it was asked for, and the tensors it was made of."""

    files: dict[str, Mapping[str, Tensor]]
    sources: list[Tensor]
    versions: list[int]
    copy: HostCopy

    def is_of(self, files: Mapping[str, Mapping[str, Tensor]]) -> bool:
        """Whether it holds these tensors as they are now."""
        if files.keys() != self.files.keys():
            return False
        return versions(self.sources) == self.versions and all(
            mine is files[name] or (mine.keys() == files[name].keys() and _same(mine, files[name]))
            for name, mine in self.files.items()
        )


def _same(ones: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    """Whether tensors of the same names lie at the same places. A `detach` is another object."""
    return all(
        one.data_ptr() == others[name].data_ptr() and one.shape == others[name].shape
        for name, one in ones.items()
    )


@dataclass
class _Slot:
    buffer: Any  # HostBuffer or DeviceBuffer
    taken: bool = False

    def free(self) -> None:
        self.taken = False


def _free_bytes(device: torch.device) -> int:
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


class DeviceBuffer:
    """A copy of a state on its device, laid out as its files will be.

    host: where it is brought before it is written, by the thread that writes.
    """

    def __init__(self, device: torch.device, host: HostBuffer) -> None:
        self.host = host
        self._device = device
        self._flat = torch.empty(0, dtype=torch.uint8, device=device)
        self._targets: _Targets | None = None
        self._events: tuple[Any, Any] | None = None

    @property
    def nbytes(self) -> int:
        return self._flat.numel()

    def reserve(self, nbytes: int) -> None:
        if nbytes > self.nbytes:
            self._targets = None
            self._flat = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._flat = torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    @torch.no_grad()
    def copy_laid_out(self, layout: StateLayout, sources: list[Tensor]) -> HostCopy:
        """Copy on the current stream, so what it computes afterwards finds the copy done."""
        self.reserve(layout.total)
        if self._targets is None or not self._targets.fit(layout, sources):
            self._targets = _Targets.of(layout, sources, self._flat)
        targets = self._targets
        if self._flat.is_cuda:
            current = torch.cuda.current_stream(self._device)
            if self._events is None:
                start, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in "ab")
                self._events = start, end
            else:  # a copy that nobody needed any more may have been made on another stream
                current.wait_event(self._events[1])
            self._events[0].record(current)
            targets.copy(sources)
            self._events[1].record(current)
        else:
            targets.copy(sources)
        return _DeviceCopy(
            {}, layout.nbytes, held=targets, flat=self._flat, host=self.host, events=self._events
        )


@dataclass
class _Targets:
    """Where each tensor is copied to: views of device memory, or host memory of its own."""

    layout: StateLayout
    contiguous: list[bool]
    on_host: list[bool]
    tensors: list[Tensor]
    strided: list[int]  # these lie in memory as their sources do, and not as in a file
    groups: list[list[int]]  # copied at once
    single: list[int]

    @classmethod
    def of(cls, layout: StateLayout, sources: list[Tensor], flat: Tensor) -> _Targets:
        contiguous, on_host = _manner(sources)
        tensors, strided, single = [], [], []
        groups: dict[Any, list[int]] = {}
        for number, source in enumerate(sources):
            apart = on_host[number] and flat.is_cuda
            target = torch.empty_like(source) if apart else layout.view(flat, number)
            if not contiguous[number] and not apart and _is_dense(source):
                target = _like(target, source)
                strided.append(number)
            tensors.append(target)
            if source.stride() == target.stride() and is_fused(source.dtype):
                groups.setdefault((source.device, source.dtype), []).append(number)
            else:
                single.append(number)
        return cls(layout, contiguous, on_host, tensors, strided, [*groups.values()], single)

    def fit(self, layout: StateLayout, sources: list[Tensor]) -> bool:
        return (
            layout is self.layout
            and _manner(sources) == (self.contiguous, self.on_host)
            and all(sources[n].stride() == self.tensors[n].stride() for n in self.strided)
        )

    def copy(self, sources: list[Tensor]) -> None:
        for numbers in self.groups:
            copy_all([self.tensors[n] for n in numbers], [sources[n] for n in numbers])
        for number in self.single:
            self.tensors[number].copy_(sources[number])


def _manner(sources: list[Tensor]) -> tuple[list[bool], list[bool]]:
    return [t.is_contiguous() for t in sources], [not t.is_cuda for t in sources]


def _is_dense(tensor: Tensor) -> bool:
    """Whether it fills its memory, in the order of channels last."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    order = formats.get(tensor.dim())
    return order is not None and tensor.is_contiguous(memory_format=order)


def _like(place: Tensor, tensor: Tensor) -> Tensor:
    """The same memory, in the order of `tensor`."""
    return place.view(-1).as_strided(tensor.shape, tensor.stride())


@dataclass
class _DeviceCopy(HostCopy):
    """`wait` brings it to the host, and may do so again as long as it is not released."""

    held: _Targets = field(kw_only=True)
    flat: Tensor = field(kw_only=True)
    host: HostBuffer = field(kw_only=True)
    events: tuple[Any, Any] | None = field(kw_only=True)  # CUDA: start and end

    @torch.no_grad()
    def wait(self) -> None:
        held, layout = self.held, self.held.layout
        self.host.fetch(layout, self.flat, None if self.events is None else self.events[1])
        if self.events is not None:
            self.device_s = self.events[0].elapsed_time(self.events[1]) / 1000
        places = self.host.places(layout)
        for number in held.strided:
            mine = _like(places[number], held.tensors[number])
            places[number].copy_(mine.clone())
        if self.flat.is_cuda:
            apart = [n for n, on_host in enumerate(held.on_host) if on_host]
            copy_all([places[n] for n in apart], [held.tensors[n] for n in apart])
        self.files = self.host.files(layout)
