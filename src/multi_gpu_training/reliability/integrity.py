"""Whether a checkpoint is as it was written, to the last byte."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from multi_gpu_training.reliability.hashing import matches

FORMATS = (1, 2)  # 2 records large files by the hash of their chunks' hashes
FORMAT = FORMATS[-1]
MANIFEST = "manifest.json"


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None if every byte is as written."""
    try:
        manifest = read_manifest(path)
        if manifest["sha256"] != digest(manifest):
            return f"{MANIFEST} was changed"
        if manifest["format"] >= 2 and (path / MANIFEST).read_text() != written(manifest):
            return f"{MANIFEST} was changed"  # in a place that means nothing
        if manifest["format"] not in FORMATS:
            return f"format {manifest['format']} is not known to this version"
        for name, facts in manifest["files"].items():
            file = path / name
            if file.stat().st_size != facts["bytes"]:
                return f"{name} has {file.stat().st_size} bytes instead of {facts['bytes']}"
            if not matches(file, facts):
                return f"{name} was changed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"unreadable ({error})"
    return None


class Verified:
    """`damage`, asked only once of files that nobody has touched since.

    A folder that was checked, or written, is known by its files' sizes, times and inodes; the
    time of the last change is the kernel's own and cannot be set back.
    """

    def __init__(self) -> None:
        self._known: dict[Path, tuple[Any, str | None]] = {}

    def damage(self, path: Path) -> str | None:
        signature = _signature(path)
        known = self._known.get(path)
        if known is None or known[0] != signature:
            known = self._known[path] = (signature, damage(path))
        return known[1]

    def written(self, path: Path) -> None:
        """These files have just been written, and hashed on the way."""
        self._known[path] = (_signature(path), None)

    def forget(self, path: Path) -> None:
        self._known.pop(path, None)


def read_manifest(path: Path) -> dict[str, Any]:
    """What a checkpoint says about itself, without loading it."""
    facts: dict[str, Any] = json.loads((path / MANIFEST).read_text())
    return facts


def trusted_manifest(path: Path) -> dict[str, Any]:
    """The same if it is as it was written, else nothing."""
    try:
        facts = read_manifest(path)
        return facts if facts["sha256"] == digest(facts) else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def written(manifest: dict[str, Any]) -> str:
    """A manifest as it stands in its file."""
    return json.dumps(manifest, indent=1)


def digest(manifest: dict[str, Any]) -> str:
    text = json.dumps({k: v for k, v in manifest.items() if k != "sha256"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _signature(path: Path) -> Any:
    try:
        stats = [(file.name, file.stat()) for file in sorted(path.iterdir())]
    except OSError as error:
        return str(error)
    return [(n, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for n, s in stats]
