"""A folder in object storage, through fsspec: whole files appear at once, errors say what to do."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import fsspec
from fsspec.registry import known_implementations

from multi_gpu_training.redaction import redact

# Extras of this package, by what a protocol's implementation needs.
EXTRAS = {"s3fs": "s3", "gcsfs": "gs"}
# Parts of a large file that are in memory at a time; s3fs would take ten of 50 MiB.
PARTS_AT_A_TIME = 3
_LOCAL = ("file", "local")
_CREDENTIALS = (
    "check the credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE or the machine's "
    "role; other providers have their own) and that they may list, read, write and delete there"
)


class StorageError(Exception):
    """Object storage refused, or could not be reached. The message is one sentence with a remedy.

    lasting: whether waiting cannot help: a wrong name, or something that is not installed.
    away: whether storage could not be reached at all.
    """

    def __init__(self, text: str, lasting: bool = False, away: bool = False) -> None:
        super().__init__(redact(text))
        self.lasting = lasting
        self.away = away


class RemoteFolder:
    """Files below a URL. A file that is written appears whole or not at all.

    Credentials come from the environment and the provider's own files, never from us.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._scheme = url.partition("://")[0]
        self._fs, self._root = self._open()

    def reopen(self) -> None:
        """Connect anew, after a failure: credentials on this machine may have changed."""
        self._fs, self._root = self._open()

    # Writing

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, over an older one of the same name."""
        with self._explained(f"write {name}"):
            if self._scheme in _LOCAL:
                self._write_locally(name, data)
            else:
                self._fs.pipe_file(self._path(name), data)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file unless it is there; whether this call made it."""
        try:
            with self._explained(f"write {name}"):
                if self._scheme in _LOCAL:
                    self._write_locally(name, data, new=True)
                else:
                    self._fs.pipe_file(self._path(name), data, mode="create")
                return True
        except FileExistsError:
            return False

    def upload(self, file: str, name: str) -> None:
        """Copy a local file there."""
        with self._explained(f"write {name}"):
            if self._scheme in _LOCAL:
                with Path(file).open("rb") as source:
                    self._write_locally(name, source)
                return
            more = {"max_concurrency": PARTS_AT_A_TIME} if self._scheme == "s3" else {}
            self._fs.put_file(file, self._path(name), **more)

    def delete(self, names: Iterable[str]) -> None:
        """Delete files in this order; those that are gone are no error."""
        for name in names:
            with contextlib.suppress(FileNotFoundError), self._explained(f"delete {name}"):
                self._fs.rm_file(self._path(name))
            if self._scheme in _LOCAL:  # object storage has no folders that could be empty
                with contextlib.suppress(OSError):
                    Path(self._path(name)).parent.rmdir()

    def _write_locally(self, name: str, data: Any, new: bool = False) -> None:
        """On a file system, such as a network disk, a copy that is cut off would look whole."""
        target = Path(self._path(name))
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}-{secrets.token_hex(6)}")
        try:
            with draft.open("xb") as file:
                if isinstance(data, bytes):
                    file.write(data)
                else:
                    shutil.copyfileobj(data, file, 2**20)
                file.flush()
                os.fsync(file.fileno())
            if new:
                os.link(draft, target)
            else:
                draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)

    # Reading

    def read(self, name: str, limit: int) -> bytes:
        """The whole of a small file. FileNotFoundError if it does not exist."""
        with self._explained(f"read {name}"):
            found: bytes = self._fs.cat_file(self._path(name), start=0, end=limit + 1)
        if len(found) > limit:
            raise StorageError(f"{self.url}/{name} has more than {limit:,} bytes", lasting=True)
        return found

    def download(self, name: str, target: Path) -> None:
        """Copy a file from there to the new file `target`."""
        with self._explained(f"read {name}"):
            self._fs.get_file(self._path(name), str(target))

    def files(self, below: str = "") -> dict[str, int]:
        """The names of all files below a folder, relative to this one, and their sizes."""
        return {name: int(facts["size"]) for name, facts in self._found(below).items()}

    def changed(self, below: str, file: str) -> float | None:
        """When a file whose name ends like this was last written below a folder; None: never."""
        found = self._found(below).items()
        times = [_time_of(facts) for name, facts in found if name.endswith(file)]
        return max(times, default=None)

    def _found(self, below: str) -> dict[str, dict[str, Any]]:
        with self._explained(f"list {below or 'files'}"):
            self._fs.invalidate_cache()  # others write there, too
            try:
                found = self._fs.find(self._path(below), detail=True)
            except FileNotFoundError as error:
                if "bucket" in str(error).lower():
                    raise
                return {}
        root = self._root.rstrip("/") + "/"
        names = {path.removeprefix(root): facts for path, facts in found.items()}
        return {n: f for n, f in names.items() if not n.rpartition("/")[2].startswith(".")}

    def folders(self) -> list[str]:
        """The names of the folders right below this one."""
        with self._explained("list folders"):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._root, detail=True)
            except FileNotFoundError as error:
                if "bucket" in str(error).lower():
                    raise
                return []
        paths = [item["name"].rstrip("/") for item in found if item["type"] == "directory"]
        return sorted(path.rpartition("/")[2] for path in paths)

    def drop_unfinished(self) -> None:
        """Remove parts of large files whose upload was cut off: S3 keeps and bills them."""
        listing = getattr(self._fs, "list_multipart_uploads", None)
        if listing is None:
            return
        bucket, _, prefix = self._root.partition("/")
        with self._explained("list unfinished uploads"):
            for upload in listing(bucket):
                if str(upload["Key"]).startswith(f"{prefix}/"):
                    self._fs.abort_mpu(bucket, upload["Key"], upload["UploadId"])

    # The connection

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _open(self) -> tuple[Any, str]:
        try:
            # Instances are shared by default, and with them what they remember.
            alone = self._scheme != "memory"
            fs, root = fsspec.core.url_to_fs(self.url, skip_instance_cache=alone)
            return fs, str(root)
        except ImportError as error:
            needed = str(known_implementations.get(self._scheme, {}).get("class", "")).split(".")[0]
            if needed in ("", "fsspec"):  # it brings the protocol, and lacks what that stands on
                needed = (error.name or "a package").partition(".")[0]
            extra = EXTRAS.get(needed)
            package = f"'multi-gpu-training[{extra}]'" if extra else needed
            raise StorageError(
                f"{self.url}: {self._scheme}:// needs {needed}, which is not installed ({error}); "
                f"pip install {package}",
                lasting=True,
            ) from None
        except ValueError as error:
            if self._scheme in known_implementations:
                raise StorageError(f"{self.url}: {error}", lasting=True) from None
            raise StorageError(
                f"{self.url}: {self._scheme}:// is not a protocol that fsspec knows; use s3://, "
                "gs://, az://, file:// or a folder",
                lasting=True,
            ) from None

    @contextlib.contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        """Turn whatever an implementation raises into a sentence; a missing or an existing file
        stays what it is."""
        try:
            yield
        except (StorageError, FileExistsError):
            raise
        except FileNotFoundError as error:
            if "bucket" not in str(error).lower():
                raise
            bucket = self._root.partition("/")[0]
            raise StorageError(
                f"{self.url}: the bucket {bucket} does not exist or is closed to you; create it, "
                "or correct the URL",
                lasting=True,
            ) from None
        except Exception as error:
            text = explain(error, doing)
            away = text.startswith("cannot be reached")
            raise StorageError(f"{self.url}: {text}", away=away) from None


def explain(error: Exception, doing: str) -> str:
    """What an error of an fsspec implementation means, and what to do."""
    kind, text = type(error).__name__, " ".join(str(error).split())[:300]
    said = f"{kind}: {text}" if text else kind
    if "NoSuchBucket" in said:
        return "the bucket does not exist; create it, or correct the URL"
    if "Credentials" in kind:
        return f"no credentials were found ({text}); {_CREDENTIALS}"
    if isinstance(error, PermissionError) or "Forbidden" in said or "AccessDenied" in said:
        return f"cannot {doing}: it was refused ({text}); {_CREDENTIALS}"
    away = ("Endpoint", "Timeout", "ConnectionClosed", "Connector", "ConnectionRefused")
    if isinstance(error, ConnectionError | TimeoutError) or any(word in kind for word in away):
        return f"cannot be reached ({said}); check the network and the endpoint (AWS_ENDPOINT_URL)"
    if "SlowDown" in said or "reduce your request rate" in said or "Throttl" in said:
        return f"cannot {doing}: too many requests for the storage ({text}); wait, or ask for more"
    return f"cannot {doing} ({said}); check the storage and the URL"


def _time_of(facts: dict[str, Any]) -> float:
    for name in ("LastModified", "mtime", "updated", "created"):
        value = facts.get(name)
        if value is None:
            continue
        with contextlib.suppress(TypeError, ValueError):
            return value.timestamp() if hasattr(value, "timestamp") else float(value)
    return 0.0
