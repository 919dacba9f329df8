"""List a run's checkpoints, with every byte checked."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from multi_gpu_training.checkpoint.integrity import MANIFEST, trusted_manifest
from multi_gpu_training.checkpoint.run_lock import owner
from multi_gpu_training.checkpoint.signature import ManifestSigner
from multi_gpu_training.checkpoint.store import CheckpointStore
from multi_gpu_training.errors import ConfigError


@dataclass
class ListedCheckpoint:
    """One checkpoint. Fields that a damaged one no longer tells are None or empty.

    problem: what is damaged, None if nothing is.
    current: False if the run went back before it and so abandoned it.
    """

    name: str
    path: str
    bytes: int
    problem: str | None
    best: bool = False
    current: bool = True
    step: int | None = None
    epoch: int | None = None
    created: str | None = None
    world_size: int | None = None
    global_batch_size: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    score: dict[str, Any] | None = None


@dataclass
class CheckpointListing:
    """All checkpoints, newest first, and who is using the folder.

    remote: they lie in object storage, and only their sizes were compared.
    """

    folder: str
    checkpoints: list[ListedCheckpoint]
    newest_intact: str | None
    leftovers: list[str]
    owner: dict[str, Any] | None
    lineage_problem: str | None = None
    remote: bool = False

    def plain(self) -> dict[str, Any]:
        found = asdict(self)
        for item in found["checkpoints"]:
            item["intact"] = item["problem"] is None
        return found


def inspect(given: Path, signer: ManifestSigner | None = None) -> CheckpointListing:
    """List what lies in a run folder, in its `checkpoints` folder, or one checkpoint.

    With a `signer`, checkpoints that it did not sign count as damaged.
    """
    folder, paths = _where(given)
    store = CheckpointStore(folder, signer=signer)
    if paths is None:
        paths = store.folders()
    store.lineage.entries()
    lineage_problem = store.lineage.problem
    items = [_look(store, path) for path in paths]
    intact = [item.name for item in items if item.problem is None and item.current]
    return CheckpointListing(
        folder=str(folder),
        checkpoints=items,
        newest_intact=intact[0] if intact else None,
        leftovers=[path.name for path in store.leftovers()],
        owner=owner(folder.parent),
        lineage_problem=lineage_problem,
    )


def _where(given: Path) -> tuple[Path, Sequence[Path] | None]:
    if (given / MANIFEST).exists() or given.name.startswith("step-"):
        real = given.resolve()
        return given.parent, [given.parent / real.name]
    if (given / "checkpoints").is_dir():
        return given / "checkpoints", None
    if given.name == "checkpoints" or any(given.glob("step-*")):
        return given, None
    runs = sorted(str(path.parent) for path in given.glob("**/checkpoints") if path.is_dir())
    hint = f"; did you mean {runs[-1]}?" if runs else ""
    raise ConfigError(
        f"{given} is not a run folder: there is no `checkpoints` in it{hint}", code="MGT104"
    )


def _look(store: CheckpointStore, path: Path) -> ListedCheckpoint:
    sizes = [0]
    with contextlib.suppress(OSError):
        sizes = [file.lstat().st_size for file in path.iterdir()]
    best = store.folder / "best"
    item = ListedCheckpoint(path.name, str(path), sum(sizes), store.verifier.damage(path))
    item.best = best.is_dir() and best.resolve().name == path.name
    item.current = store.on_timeline(path)
    facts = trusted_manifest(path)
    for name in ("step", "epoch", "created", "world_size", "global_batch_size", "score"):
        setattr(item, name, facts.get(name))
    item.metrics = dict(facts.get("metrics") or {})
    return item
