"""A checkpoint in shards: every rank writes the rows of each tensor that it holds.

    step-00000100/
      shard-00001-of-00004.safetensors   model/NAME and optimizer/NAME: rows, in rank order
      model.safetensors, ...             tensors that are not split, from the rank that writes
      manifest.json                      `split` gives the whole shape of each split tensor

The rank that writes makes the staging folder and the manifest. Every other rank puts its file
there, and beside it a note of its size and hash, which the writer takes over. So all of them
write at once, in threads, without a word over the ranks' group.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from multi_gpu_training.checkpoint import durable, integrity
from multi_gpu_training.distributed.sharding import (
    by_rows,
    is_split,
    part_of,
    piece,
    rows,
    split_like,
)
from multi_gpu_training.errors import CheckpointError
from multi_gpu_training.safe_files import read_json

PATIENCE_S = 1800.0  # for the other ranks' files
_HURRIED_S = 10.0  # where this process is ending: the others may be gone
_LOOK_S = 0.02
Split = dict[str, dict[str, list[int]]]  # model or optimizer -> name -> whole shape


def shard_name(rank: int, ranks: int) -> str:
    return f"shard-{rank + 1:05d}-of-{ranks:05d}.safetensors"


def part_in_two(
    model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Split]:
    """This rank's rows of the tensors that are split, and their whole shapes."""
    mine: dict[str, Tensor] = {}
    split: Split = {"model": {}, "optimizer": {}}
    for kind, tensors in (("model", model), ("optimizer", optimizer)):
        for name, tensor in tensors.items():
            if is_split(tensor):
                mine[f"{kind}/{name}"] = piece(tensor)
                split[kind][name] = list(tensor.shape)
    return mine, split


# Writing


@dataclass
class ShardWriting:
    """How one rank's file gets into the folder that another rank stages.

    staged: that folder. ranks: how many files there are. rank: whose this is.
    """

    staged: Path
    rank: int
    ranks: int
    hurry: bool = False  # wait no longer than needed: this process is ending

    @property
    def name(self) -> str:
        return shard_name(self.rank, self.ranks)

    def write(self, pieces: Sequence[integrity.Bytes], chunk_bytes: int) -> None:
        """Write this rank's file, flush it, and leave its facts for the writer."""
        try:
            self._wait(self.staged.is_dir, "the folder of the rank that writes")
            with integrity.HashThreads() as threads:
                descriptor, found = durable.write_pieces(
                    self.staged / self.name, pieces, threads, chunk_bytes
                )
                try:
                    os.fsync(descriptor)
                    facts = found.facts()
                finally:
                    os.close(descriptor)
        except BaseException as error:
            self._note({"problem": f"{type(error).__name__}: {error}"})
            raise
        self._note(facts)

    def _note(self, facts: dict[str, Any]) -> None:
        draft = self.staged / f".{self.name}.{durable.own_name()}"
        try:
            durable.write_text(draft, json.dumps(facts))
            draft.rename(self.staged / f".{self.name}.json")
        except OSError:
            if "problem" not in facts:
                raise

    def collect(self) -> dict[str, Any]:
        """On the rank that writes: the facts of all other ranks' files, once they are there."""
        found = {}
        for rank in range(self.ranks):
            if rank == self.rank:
                continue
            name = shard_name(rank, self.ranks)
            note = self.staged / f".{name}.json"
            self._wait(note.exists, f"the file of rank {rank}")
            facts = read_json(note, dict[str, Any])
            if "problem" in facts:
                raise CheckpointError(
                    f"rank {rank} could not write its file: {facts['problem']}", code="MGT704"
                )
            found[name] = facts
            note.unlink()
        return found

    def _wait(self, there: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not there():
            if self.hurry or not threading.main_thread().is_alive():
                end = min(end, time.monotonic() + _HURRIED_S)
                self.hurry = False
            if time.monotonic() > end:
                raise CheckpointError(f"{what} did not come into {self.staged}", code="MGT704")
            time.sleep(_LOOK_S)


# Reading


class StoredRows:
    """A tensor whose rows lie in several files. Nothing is read before it is asked for."""

    def __init__(self, files: Sequence[Any], key: str, shape: Sequence[int]) -> None:
        self.shape = torch.Size(shape)
        self._parts = [file.get_slice(key) for file in files]
        self._rows = [part.get_shape()[0] for part in self._parts]
        self.dtype: torch.dtype = self._parts[0][0:0].dtype
        alike = all(part.get_shape()[1:] == list(shape[1:]) for part in self._parts)
        if not alike or not shape or sum(self._rows) != shape[0]:
            raise CheckpointError(f"the files do not hold the {shape} of {key}", code="MGT701")

    def read(self, start: int, stop: int) -> Tensor:
        found, first = [], 0
        for part, count in zip(self._parts, self._rows, strict=True):
            low, high = max(start - first, 0), min(stop - first, count)
            if low < high:
                found.append(part[low:high])
            first += count
        if not found:
            return torch.empty((0, *self.shape[1:]), dtype=self.dtype)
        return found[0] if len(found) == 1 else torch.cat(found)

    def whole(self) -> Tensor:
        return self.read(0, self.shape[0])


def stored_rows(path: Path, manifest: Mapping[str, Any], kind: str) -> dict[str, StoredRows]:
    """The split tensors of a checkpoint, of its model or of its optimizer."""
    split = manifest.get("split")
    if not split or not split.get(kind):
        return {}
    ranks = int(manifest["shards"])
    names = [shard_name(rank, ranks) for rank in range(ranks)]
    missing = [name for name in names if name not in manifest["files"]]
    if missing:
        raise CheckpointError(f"{path}: its manifest lists no {missing[0]}", code="MGT701")
    files = [safe_open(path / name, framework="pt") for name in names]
    return {name: StoredRows(files, f"{kind}/{name}", shape) for name, shape in split[kind].items()}


def fit_to(own: Tensor | None, saved: Any) -> Any:
    """A saved tensor as `own` lies on the ranks: whole, or this rank's rows of it."""
    if not isinstance(saved, (Tensor, StoredRows)):
        return saved
    if own is None or own.shape != saved.shape or not is_split(own):
        return saved.whole() if isinstance(saved, StoredRows) else saved
    if isinstance(saved, StoredRows) and by_rows(own):
        local = saved.read(*rows(own))
    else:
        local = part_of(own, saved.whole() if isinstance(saved, StoredRows) else saved)
    return split_like(own, local.to(piece(own).device, copy=True))
