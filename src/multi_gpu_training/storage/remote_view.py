"""Look at a run in object storage without taking part in it: its checkpoints, its events."""

from __future__ import annotations

import time
from pathlib import Path

from multi_gpu_training.checkpoint.inspection import CheckpointListing, ListedCheckpoint
from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.safe_files import SMALL, write_atomically
from multi_gpu_training.storage.event_mirror import fetch_events
from multi_gpu_training.storage.lease import BEAT_S, BEATS_MISSED, holder
from multi_gpu_training.storage.remote_folder import RemoteFolder, StorageError
from multi_gpu_training.storage.remote_resume import parse_address
from multi_gpu_training.storage.remote_run import RemoteRun, on_timeline

DESCRIPTIONS = ("config.yaml", "environment.json", "forecast.json")


def list_remote(url: str) -> CheckpointListing:
    """The checkpoints of a run there. Sizes are compared; hashes need a download."""
    address = parse_address(url)
    try:
        run = RemoteRun(address.url)
        found, entries, best = run.checkpoints(), run.lineage(), run.best()
        in_use = is_running(address.url)
        by = holder(run.folder) if in_use else None
    except StorageError as error:
        raise ConfigError(f"mgt checkpoints {error}", code="MGT707") from None
    if not found and not run.folder.files():
        raise ConfigError(
            f"mgt checkpoints {url}: there is no run; give SAVE_DIR/RECIPE/NAME", code="MGT104"
        )
    asked = address.checkpoint
    items = []
    for one in found:
        if not one.complete or asked not in (None, one.name, one.name.partition(".")[0]):
            continue
        facts = one.manifest
        items.append(
            ListedCheckpoint(
                one.name,
                f"{address.url}/checkpoints/{one.name}",
                one.bytes,
                one.problem,
                best=one.name == best,
                current=not facts or on_timeline(facts, entries),
                step=one.step,
                epoch=facts.get("epoch"),
                created=facts.get("created"),
                world_size=facts.get("world_size"),
                global_batch_size=facts.get("global_batch_size"),
                metrics=dict(facts.get("metrics") or {}),
                score=facts.get("score"),
            )
        )
    usable = [item.name for item in items if item.problem is None and item.current]
    return CheckpointListing(
        folder=f"{address.url}/checkpoints",
        checkpoints=items,
        newest_intact=usable[0] if usable else None,
        leftovers=[one.name for one in found if not one.complete],
        owner=None if by is None else {"pid": by.pid, "host": by.host, "since": by.since},
        remote=True,
    )


def is_running(url: str) -> bool:
    """Whether the writer of a run has shown itself lately, by the clocks of storage and here."""
    folder = RemoteFolder(url)
    by, told = holder(folder), folder.changed("lease", "")
    if by is None or by.released or told is None:
        return False
    return time.time() - told < 2 * BEATS_MISSED * BEAT_S


def fetch_record(url: str) -> Path:
    """Download what a run's report is made from, into a folder below the cache."""
    address = parse_address(url)
    recipe, name = address.url.rsplit("/", 2)[1:]
    folder = MultiGPUConfig().local_copy_of(f"{address.url}/events") / recipe / name
    try:
        remote = RemoteFolder(address.url)
        fetch_events(remote, folder / "events")
        for file in DESCRIPTIONS:
            try:
                write_atomically(folder / file, remote.read(file, SMALL))
            except FileNotFoundError:
                (folder / file).unlink(missing_ok=True)
    except (StorageError, ValueError, FileNotFoundError) as error:
        raise ConfigError(f"mgt report {url}: {error}", code="MGT707") from None
    return folder
