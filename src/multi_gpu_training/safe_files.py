"""Small files of a run folder, read and written as if somebody else had prepared the folder.

Nothing here follows a symbolic link, waits for a FIFO, reads a device, or believes what a file
says: sizes are limited, and JSON must fit a schema. What cannot be used ends in an OSError or in
`UnreadableFile`, a ValueError, with a message that names the file.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import hashlib
import io
import json
import os
import secrets
import stat
import time
from collections.abc import Hashable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import yaml
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

T = TypeVar("T")
# What PyYAML raises at text that is none, or that has values which its types cannot hold, such as
# `!!timestamp x`.
NOT_YAML = (
    *(yaml.YAMLError, RecursionError, OverflowError, ValueError),
    *(AttributeError, TypeError, LookupError),
)

MIB = 2**20
SMALL = 4 * MIB  # more than any file of ours beside checkpoints and events has
MOST_ROWS = 1_000_000  # of a CSV file
MOST_VALUES = 50_000  # of a YAML file, which PyYAML reads at 10,000 in a second
_DRAFT = ".draft-"
_STALE_S = 60.0
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}

# Numbers that our files may hold. Beyond these, somebody is having us allocate memory.
Count = Annotated[int, Field(ge=0, le=2**53)]
Ranks = Annotated[int, Field(ge=1, le=2**20)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class UnreadableFile(ValueError):
    """A file that does not hold what its name promises."""


# Opening


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Open a regular file that has one name only; a link, FIFO or device is an OSError."""
    # Without O_NONBLOCK, opening a FIFO would wait for whoever is at its other end.
    guarded = flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, guarded, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EMLINK):
            raise _refusal(path) from None
        raise
    found = os.fstat(descriptor)
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    if not stat.S_ISREG(found.st_mode) or (writes and found.st_nlink > 1):
        os.close(descriptor)
        raise _refusal(path)
    os.set_blocking(descriptor, True)
    return descriptor


def _refusal(path: Path) -> OSError:
    kind = "not a regular file"
    with contextlib.suppress(OSError):
        found = path.lstat()
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "a file with a second name (hard link)")
    return OSError(errno.EPERM, f"it is {kind}; remove it, a regular file belongs there", str(path))


def check_folder(path: Path) -> None:
    """Raise an OSError if `path` is a link that another user made: it may lead anywhere."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) and found.st_uid != os.geteuid():
        raise OSError(errno.EPERM, "it is a symbolic link of another user", str(path))


# Reading


def read_bytes(path: Path, limit: int = SMALL) -> bytes:
    """The whole file; an error if it has more than `limit` bytes."""
    descriptor = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise UnreadableFile(f"{path.name} has {size:,} bytes, {limit:,} at most are expected")
        return file.read(size)  # what is appended meanwhile is not waited for


def read_text(path: Path, limit: int = SMALL) -> str:
    try:
        return read_bytes(path, limit).decode()
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"{path.name} is not text ({error.reason})") from None


def parse_json(text: str | bytes, schema: type[T], name: str) -> T:
    """JSON as an object of the `schema`, a pydantic model or any annotation; strictly."""
    try:
        # Twice: json reads NaN and has no opinion on types, pydantic the other way round.
        adapter = _adapter(cast(Hashable, schema))
        found: T = adapter.validate_python(json.loads(text), strict=True)
        return found
    except RecursionError:
        problem = "it is nested too deeply"
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part)[:40] for part in first["loc"])
        problem = f"{place}: {first['msg']}" if place else first["msg"]
    except ValueError as error:
        problem = str(error)[:200]
    raise UnreadableFile(f"{name} is unreadable ({problem})")


def read_json(path: Path, schema: type[T], limit: int = SMALL) -> T:
    """The JSON of a file, which must fit the `schema`."""
    return parse_json(read_text(path, limit), schema, path.name)


def read_yaml(path: Path, limit: int = SMALL) -> dict[str, Any]:
    """The mapping in a YAML file without aliases: a few lines of them stand for gigabytes."""
    text = read_text(path, limit)
    try:
        check_yaml(text, path.name)
        found = yaml.safe_load(text)
        repr(found)  # 1:59:59:... is a number, of more digits than can be shown
    except UnreadableFile:
        raise
    except NOT_YAML as error:
        problem = str(error).partition("\n")[0] or type(error).__name__
        raise UnreadableFile(f"{path.name} is unreadable ({problem})") from None
    if not isinstance(found, dict):
        raise UnreadableFile(f"{path.name} is not a list of settings")
    return found


def read_csv(path: Path, limit: int = SMALL) -> tuple[list[str], list[dict[str, str]]]:
    """The names of the columns and the rows of a CSV file that the user names; links are fine."""
    try:
        text = read_text(path.resolve(), limit)
        reader = csv.DictReader(io.StringIO(text, newline=""))
        rows = [row for _, row in zip(range(MOST_ROWS + 1), reader, strict=False)]
    except OSError as error:
        raise UnreadableFile(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RuntimeError, csv.Error) as error:
        raise UnreadableFile(f"{path} is not a CSV file ({error})") from None
    if len(rows) > MOST_ROWS:
        raise UnreadableFile(f"{path} has more than {MOST_ROWS:,} rows")
    return list(reader.fieldnames or ()), rows


def check_yaml(text: str, name: str, aliases: bool = False) -> None:
    """Refuse what takes PyYAML minutes or gigabytes, before it has read far into it.

    `aliases` are fine in what a person wrote, as long as they stand for little.
    """
    open_: list[str | None] = []  # anchors of the collections around the event
    sizes: dict[str, int] = {}  # what an anchor stands for, in values
    counts = [0]
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            if not aliases:
                raise UnreadableFile(f"{name} is unreadable (it has aliases, which we never write)")
            if event.anchor in open_:
                raise UnreadableFile(f"{name} is unreadable (*{event.anchor} contains itself)")
            counts[-1] += sizes.get(str(event.anchor), 1)
        elif isinstance(event, yaml.CollectionStartEvent):
            open_.append(event.anchor)
            counts.append(1)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_.pop(), counts.pop()
            counts[-1] += size
            if anchor is not None:
                sizes[anchor] = size
        else:
            counts[-1] += 1
        if len(open_) > 50:
            raise UnreadableFile(f"{name} is unreadable (it is nested too deeply)")
        if sum(counts) > MOST_VALUES:
            raise UnreadableFile(
                f"{name} is unreadable (it holds, with its aliases, more than {MOST_VALUES:,} "
                "values)"
            )


@cache
def _adapter(schema: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(cast(Any, schema))


# Writing


def write_atomically(path: Path, content: str | bytes, mode: int = 0o600) -> None:
    """Replace a file of ours at once: whoever reads it sees the old one or the new one."""
    check_replaceable(path)
    draft = path.with_name(f".{path.name}{_DRAFT}{secrets.token_hex(8)}")
    raw = content.encode() if isinstance(content, str) else content
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(raw)
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def check_replaceable(path: Path) -> None:
    """Raise an OSError if what lies at `path` is neither a regular file nor ours to replace."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode):
        raise _refusal(path)
    # In a folder of somebody else, such as a run that a colleague owns, its owner's files count.
    if found.st_uid not in (os.geteuid(), path.parent.stat().st_uid):
        raise OSError(errno.EPERM, f"it belongs to another user ({found.st_uid})", str(path))


def clear_drafts(folder: Path) -> None:
    """Remove what a killed `write_atomically` left."""
    for draft in folder.glob(f".*{_DRAFT}*"):
        with contextlib.suppress(OSError):
            if time.time() - draft.lstat().st_mtime > _STALE_S:
                draft.unlink()


def make_private(folder: Path) -> None:
    """Make a folder that only its owner may enter; parents are made as usual."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    check_folder(folder)
    if not folder.is_dir():
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


# JSON that carries its own hash


def signed(facts: dict[str, Any]) -> dict[str, Any]:
    """The same with `sha256`, by which a changed file is found."""
    return {**facts, "sha256": digest(facts)}


def digest(facts: dict[str, Any]) -> str:
    """Hash facts, without the hash that they carry themselves."""
    text = json.dumps({k: v for k, v in facts.items() if k != "sha256"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class Signed(BaseModel):
    """The base of schemas whose facts carry their hash."""

    model_config = {"extra": "allow"}

    sha256: Sha256
