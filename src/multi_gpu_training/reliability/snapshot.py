"""The state of a run at one step: live, copied to the host, and read back from files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from multi_gpu_training.errors import CheckpointError
from multi_gpu_training.reliability.codec import pack, unpack
from multi_gpu_training.reliability.host_copy import HostBuffer, HostCopy
from multi_gpu_training.reliability.integrity import FORMAT, damage, read_manifest


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


@dataclass
class Capture:
    """A snapshot in host memory, as plain data and files: training may go on."""

    step: int
    manifest: dict[str, Any]
    plain: dict[str, Any]
    copy: HostCopy


def capture(snapshot: Snapshot, buffer: HostBuffer) -> Capture:
    """Copy `snapshot` into `buffer`. The device may still be copying when this returns."""
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
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "aliases": snapshot.aliases,
        **snapshot.facts,
    }
    files = {
        "model.safetensors": snapshot.model,
        "optimizer.safetensors": optimizer,
        "state.safetensors": state,
    }
    return Capture(snapshot.step, manifest, plain, buffer.copy(files))


def load(path: Path) -> Snapshot:
    """Read a checkpoint, after checking every byte of it."""
    problem = damage(path)
    if problem is not None:
        raise CheckpointError(f"{path} is damaged: {problem}; resume from another checkpoint")
    manifest = read_manifest(path)
    plain = _read(path / "state.json", lambda file: json.loads(file.read_text()))
    model, optimizer, state = (
        _read(path / f"{name}.safetensors", load_file) for name in ("model", "optimizer", "state")
    )
    return Snapshot(
        step=manifest["step"],
        epoch=manifest["epoch"],
        model=model,
        aliases=manifest["aliases"],
        optimizer=_read(path / "state.json", lambda _: unpack(plain["optimizer"], optimizer)),
        state=_read(path / "state.json", lambda _: unpack(plain["state"], state)),
        facts=manifest,
    )


def _read(file: Path, how: Callable[[Path], Any]) -> Any:
    """What `how` finds in a file. Its hash fits, so that whoever wrote it wrote no checkpoint."""
    try:
        return how(file)
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file} is not what a checkpoint holds ({type(error).__name__}: {error}); resume from "
            "another checkpoint, and ask where this one comes from"
        ) from error
