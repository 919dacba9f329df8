"""safetensors files as a header and one run of bytes, so that they are written as they lie in
memory. What is written is the common format: any safetensors reader loads it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.errors import CheckpointError
from multi_gpu_training.reliability.hashing import Bytes, FileHash, HashThreads, chunks

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}


@dataclass(frozen=True)
class Layout:
    """Where each tensor lies in a file's run of bytes."""

    header: bytes
    places: dict[str, tuple[int, int]]  # name -> (first byte, number of bytes)
    nbytes: int


def lay_out(tensors: Mapping[str, Tensor], file: str) -> Layout:
    """Wide types first, so that every tensor starts at a multiple of its element size."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {}
    places: dict[str, tuple[int, int]] = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES or tensor.layout is not torch.strided:
            raise CheckpointError(
                f"cannot save {name} in {file}: a {tensor.layout} tensor of {tensor.dtype}; save "
                "it as a dense tensor of a common type"
            )
        start, end = end, end + tensor.numel() * tensor.element_size()
        places[name] = (start, end - start)
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return Layout(len(text).to_bytes(8, "little") + text, places, end)


def write_file(path: Path, pieces: Sequence[Bytes], threads: HashThreads) -> tuple[int, FileHash]:
    """Write `pieces`, hashing them on the way; gives the open file, still to be flushed."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    found, start = FileHash(), 0
    try:
        for chunk in chunks(pieces):
            size = sum(map(len, chunk))
            found.add(threads, size, lambda chunk=chunk: chunk)  # type: ignore[misc]
            for part in chunk:
                while len(part):
                    part = part[os.write(descriptor, part) :]
            # The disk begins at once, instead of when the file is flushed; and the page cache
            # is left to those who read.
            os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)
            start += size
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, found
