"""Where each tensor lies in the safetensors files of a checkpoint, and in memory before that."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multi_gpu_training.errors import CheckpointError
from multi_gpu_training.torch_internals import foreach_copy_

# What safetensors calls each type.
_CODES = """float64=F64 float32=F32 float16=F16 bfloat16=BF16 float8_e4m3fn=F8_E4M3
    float8_e5m2=F8_E5M2 complex64=C64 int64=I64 int32=I32 int16=I16 int8=I8 uint64=U64 uint32=U32
    uint16=U16 uint8=U8 bool=BOOL"""
DTYPE_NAMES = {
    getattr(torch, name): code for name, code in (pair.split("=") for pair in _CODES.split())
}
_ALIGNMENT = 64  # of each file's bytes in memory
_FUSED = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool}
_FUSED |= {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}


def refuse_what_no_file_holds(model: nn.Module) -> None:
    """Say before training, and not at the first save, that a model cannot be saved."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dtype.is_complex and tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"{name} is of {tensor.dtype}, which checkpoint files cannot hold; use "
                "torch.complex64, or enable_fault_tolerance=False to train without checkpoints"
            )


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


@dataclass(frozen=True, eq=False)
class StateLayout:
    """Several files in one piece of memory. Tensors are counted over all files, in order."""

    files: dict[str, tuple[int, FileLayout]]  # name -> (first byte, layout)
    places: list[tuple[int, int]]  # of each tensor: first byte, number of bytes
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    by_type: dict[torch.dtype, list[int]]
    total: int  # bytes of memory
    nbytes: int  # of the tensors

    def views(self, flat: Tensor) -> list[Tensor]:
        """Every tensor's place in `flat`."""
        return [self.view(flat, number) for number in range(len(self.places))]

    def view(self, flat: Tensor, number: int) -> Tensor:
        start, size = self.places[number]
        return flat[start : start + size].view(self.dtypes[number]).view(self.shapes[number])


class Layouts:
    """Lays files out; the same layout again as long as names, shapes and types stay the same."""

    def __init__(self) -> None:
        self._names: list[tuple[str, list[str]]] = []
        self._known: StateLayout | None = None

    def of(self, files: Mapping[str, Mapping[str, Tensor]]) -> tuple[StateLayout, list[Tensor]]:
        """The layout, and all tensors in its order."""
        names = [(file, [*tensors]) for file, tensors in files.items()]
        sources = [tensor for tensors in files.values() for tensor in tensors.values()]
        shapes, dtypes = [t.shape for t in sources], [t.dtype for t in sources]
        known = self._known
        if (
            known is None
            or names != self._names
            or shapes != known.shapes
            or dtypes != known.dtypes
        ):
            known, self._names = _lay_out_all(files, shapes, dtypes), names
            self._known = known
        return known, sources


def _lay_out_all(
    files: Mapping[str, Mapping[str, Tensor]], shapes: list[torch.Size], dtypes: list[torch.dtype]
) -> StateLayout:
    laid_out: dict[str, tuple[int, FileLayout]] = {}
    places: list[tuple[int, int]] = []
    end = 0
    for file, tensors in files.items():
        layout = lay_out(tensors, file)
        laid_out[file] = end, layout
        places += [(end + layout.places[name][0], layout.places[name][1]) for name in tensors]
        end += layout.nbytes + (-layout.nbytes % _ALIGNMENT)
    by_type: dict[torch.dtype, list[int]] = {}
    for number, dtype in enumerate(dtypes):
        by_type.setdefault(dtype, []).append(number)
    nbytes = sum(layout.nbytes for _, layout in laid_out.values())
    return StateLayout(laid_out, places, shapes, dtypes, by_type, end, nbytes)


def copy_by_type(layout: StateLayout, targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy all tensors, those of a type at once."""
    for numbers in layout.by_type.values():
        copy_all([targets[n] for n in numbers], [sources[n] for n in numbers])


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors of one type and device, at once where torch can."""
    if targets and is_fused(targets[0].dtype):
        foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def is_fused(dtype: torch.dtype) -> bool:
    """Whether torch copies many tensors of this type in one kernel."""
    return dtype in _FUSED
