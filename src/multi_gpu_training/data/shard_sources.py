"""Where the samples of a sharded stream come from: Parquet, WebDataset, Hugging Face, your own.

A source lists its shards and reads one of them from any sample on. What it reads is raw: `decode`
turns it into a sample, and runs only where the sample is used.
"""

from __future__ import annotations

import glob
import re
import tarfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Protocol

from multi_gpu_training.errors import DataError

_BLOCK = 512  # of tar files
# What webdataset makes of a member's name: the key of its sample, or nothing.
_KEY = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)$")
_META = re.compile(r"__[^/]*__($|/)")


class ShardSource(Protocol):
    """Shards that any process can read on its own.

    names: one per shard, in an order that is the same everywhere; errors name them.
    draws: reading itself draws random numbers, so they are seeded before each sample.
    """

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def draws(self) -> bool: ...

    def read(self, shard: int, start: int) -> Iterator[Any]:
        """The raw samples of a shard from sample `start` on, the same every time."""
        ...

    def length(self, shard: int) -> int | None:
        """Samples in a shard where that is cheap to know; None: only reading tells."""
        ...

    def decode(self, raw: Any) -> Any: ...


class FunctionShards:
    """Shards that a function opens: `open_shard(shard)` gives an iterable of samples."""

    draws = True

    def __init__(self, shards: Iterable[Any], open_shard: Callable[[Any], Iterable[Any]]) -> None:
        self.shards = list(shards)
        self.names = [str(shard) for shard in self.shards]
        self.open_shard = open_shard

    def read(self, shard: int, start: int) -> Iterator[Any]:
        return islice(iter(self.open_shard(self.shards[shard])), start, None)

    def length(self, shard: int) -> int | None:
        return None

    def decode(self, raw: Any) -> Any:
        return raw


class ParquetShards:
    """One shard per Parquet file, read by row group. A sample is a dict of column to value."""

    draws = False

    def __init__(self, files: str | Sequence[str], columns: Sequence[str] | None = None) -> None:
        self.names = expanded(files)
        self.columns = list(columns) if columns is not None else None
        needed("pyarrow", "parquet")  # before the first step, not in a worker

    def read(self, shard: int, start: int) -> Iterator[Any]:
        with _opened(self.names[shard]) as raw:
            file = self._file(raw)
            groups = range(file.metadata.num_row_groups)
            ends = list(accumulate(file.metadata.row_group(group).num_rows for group in groups))
            first = bisect_right(ends, start)
            begun = ends[first - 1] if first else 0
            for group in groups[first:]:
                table = file.read_row_group(group, columns=self.columns)
                # A row stays in its table until it is used: passing it by costs nothing.
                for row in range(max(0, start - begun), table.num_rows):
                    yield table, row
                begun = ends[group]

    def length(self, shard: int) -> int | None:
        with _opened(self.names[shard]) as raw:
            return int(self._file(raw).metadata.num_rows)

    def _file(self, raw: Any) -> Any:
        file = import_module("pyarrow.parquet").ParquetFile(raw)
        held = file.schema_arrow.names
        # pyarrow passes over a column that is not there, and gives samples without it.
        lacking = [
            name
            for name in self.columns or ()
            if name not in held and name.partition(".")[0] not in held
        ]
        if lacking:
            raise LookupError(f"it has no column {lacking[0]!r}, only {', '.join(held):.200}")
        return file

    def decode(self, raw: Any) -> Any:
        table, row = raw
        return table.slice(row, 1).to_pylist()[0]


class TarShards:
    """One shard per tar file in WebDataset's form: members that differ in their extension only
    are one sample, a dict of extension to bytes with its `__key__`."""

    draws = False

    def __init__(self, files: str | Sequence[str]) -> None:
        self.names = expanded(files)
        self._wds()

    def read(self, shard: int, start: int) -> Iterator[Any]:
        wds = self._wds()
        # Without splitters: which ranks and workers read what is decided here.
        samples = wds.WebDataset(
            [self.names[shard]],
            shardshuffle=False,
            nodesplitter=None,
            workersplitter=None,
            empty_check=False,
        )
        return islice(iter(samples), start, None)

    def length(self, shard: int) -> int | None:
        """From the headers of a local, uncompressed file; another would have to be read."""
        name = self.names[shard]
        if "://" in name or not name.endswith(".tar"):
            return None
        found, newest, end = 0, None, 0
        with Path(name).open("rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                end = member.offset_data + -(-member.size // _BLOCK) * _BLOCK
                key = _KEY.match(member.name)
                if not member.isreg() or key is None or _META.match(member.name):
                    continue
                if key[1] != newest:
                    found, newest = found + 1, key[1]
            # tarfile takes a file that was cut off for one that ends there.
            file.seek(end)
            if file.read(_BLOCK) != bytes(_BLOCK):
                raise tarfile.ReadError(f"it has no end mark after {found} samples: cut off?")
        return found

    def decode(self, raw: Any) -> Any:
        return raw

    @staticmethod
    def _wds() -> Any:
        return needed("webdataset", "webdataset")


class HuggingFaceShards:
    """The shards of a stream of Hugging Face `datasets`, with its `map` and `filter` applied."""

    draws = True

    def __init__(self, stream: Any) -> None:
        if not hasattr(stream, "num_shards") or hasattr(stream, "__len__"):
            raise DataError(
                "from_datasets takes a stream of Hugging Face datasets, not "
                f"{type(stream).__name__}; load it with streaming=True, or call "
                "dataset.to_iterable_dataset(num_shards=64)"
            )
        _refuse_own_order(stream)
        self.stream = stream
        self.names = [
            f"shard {number} of {stream.num_shards}" for number in range(stream.num_shards)
        ]

    def read(self, shard: int, start: int) -> Iterator[Any]:
        # From its beginning: `map` may work on batches, and draw a batch at a time.
        one = self.stream.shard(num_shards=len(self.names), index=shard)
        return islice(iter(one), start, None)

    def length(self, shard: int) -> int | None:
        return None

    def decode(self, raw: Any) -> Any:
        return raw


def is_hugging_face(dataset: Any) -> bool:
    return type(dataset).__module__.partition(".")[0] == "datasets"


def shuffle_state(stream: Any) -> list[str]:
    """Where the generators stand that a Hugging Face stream shuffles with; empty: it does not."""
    found, inside = [], stream
    while inside is not None:
        if "Shuffl" in type(inside).__name__:
            bits = getattr(getattr(inside, "generator", None), "bit_generator", None)
            found.append(str(bits.state) if bits is not None else "")
        inside = getattr(inside, "_ex_iterable", None) or getattr(inside, "ex_iterable", None)
    return found


def _refuse_own_order(stream: Any) -> None:
    """A stream that shuffles or splits itself: its order would be drawn twice over."""
    if shuffle_state(stream):
        raise DataError(
            "this stream was shuffled with .shuffle(); leave that out and give "
            "from_datasets(stream, shuffle=True, buffer=N): that order is the same on any "
            "number of ranks and after a resume",
            code="MGT303",
        )
    if getattr(stream, "_distributed", None) is not None:
        raise DataError(
            "this stream was split with split_dataset_by_node; leave that out: the manager "
            "shares samples over the ranks itself",
            code="MGT303",
        )


def expanded(files: str | Sequence[str]) -> list[str]:
    """Names of files: as given, with {000..127} and, on this machine, wildcards written out."""
    found: list[str] = []
    for pattern in [files] if isinstance(files, str) else [str(file) for file in files]:
        names = [pattern]
        if "{" in pattern:
            names = list(needed("braceexpand", "webdataset").braceexpand(pattern))
        for name in names:
            if "://" not in name and glob.has_magic(name):
                matching = sorted(glob.glob(name))  # noqa: PTH207 - names stay as they were given
                if not matching:
                    raise DataError(f"no file matches {name!r}; check the folder and the pattern")
                found += matching
            else:
                found.append(name)
    if not found:
        raise DataError("a stream needs at least one shard, and the list of files is empty")
    return found


def needed(module: str, extra: str) -> Any:
    """Import an optional package, or say how to get it."""
    try:
        return import_module(module)
    except ImportError:
        raise DataError(
            f"this stream needs {module}, which is not installed; "
            f"pip install 'multi-gpu-training[{extra}]'",
            code="MGT105",
        ) from None


def _opened(name: str) -> Any:
    return import_module("fsspec").open(name, "rb")  # comes with torch
