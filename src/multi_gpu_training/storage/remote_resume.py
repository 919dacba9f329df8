"""From a URL to a run on this disk: which run, which checkpoint, and what is newer."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multi_gpu_training.checkpoint.integrity import MANIFEST, trusted_manifest
from multi_gpu_training.checkpoint.store import CheckpointStore
from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.distributed.identity import Identity
from multi_gpu_training.errors import CheckpointError, ConfigError
from multi_gpu_training.run_places import is_url, name_problem
from multi_gpu_training.storage.event_mirror import fetch_events
from multi_gpu_training.storage.lease import Lease, take_lease
from multi_gpu_training.storage.remote_folder import RemoteFolder, StorageError
from multi_gpu_training.storage.remote_run import (
    History,
    RemoteCheckpoint,
    RemoteRun,
    on_timeline,
    uploaded_name,
)

Say = Callable[[str], None]


@dataclass(frozen=True)
class RunAddress:
    """A run's URL, and a checkpoint of it where one was named: step-N, step-N.HASH or best."""

    url: str
    checkpoint: str | None = None

    def folder(self, config: MultiGPUConfig) -> Path:
        """Where its local copy lies."""
        save, recipe, name = self.url.rsplit("/", 2)
        return config.local_copy_of(save) / recipe / name

    def fetched(self, config: MultiGPUConfig) -> Path:
        """Where checkpoints of it lie that another run starts from."""
        return config.local_copy_of(f"{self.url}/checkpoints")


def parse_address(url: str) -> RunAddress:
    """Read the URL of a run, or of a checkpoint in it."""
    found = re.fullmatch(r"(.+?://.+?/[^/]+/[^/]+)/checkpoints(?:/([^/]+))?", url.rstrip("/"))
    address = RunAddress(found[1], found[2]) if found else RunAddress(url.rstrip("/"))
    parts = address.url.partition("://")[2].split("/")
    known = address.checkpoint is None or re.fullmatch(
        r"best|step-[0-9]{1,16}(\.[0-9a-f]{12})?", address.checkpoint
    )
    # A name becomes a folder here: it must not lead anywhere else.
    if len(parts) < 3 or not known or any(name_problem(name) for name in parts[-2:]):
        raise ConfigError(
            f"{url} is not a run in object storage; give SAVE_DIR/RECIPE/NAME, or a checkpoint "
            "SAVE_DIR/RECIPE/NAME/checkpoints/step-N"
        )
    return address


def run_url(config: MultiGPUConfig, folder: Path) -> str | None:
    """The URL of the run whose local copy is `folder`; None if it is on this disk only."""
    if config.resume is not None and is_url(config.resume):
        address = parse_address(config.resume)
        if address.folder(config) == folder:
            return address.url
    if is_url(config.save_dir) and folder.parent == config.local_save_dir / config.recipe:
        return f"{config.save_dir}/{config.recipe}/{folder.name}"
    return None


def latest_remote_run(config: MultiGPUConfig) -> tuple[float, str] | None:
    """The run that uploaded a checkpoint last: when, and its name."""
    base = RemoteFolder(f"{config.save_dir}/{config.recipe}")
    found = []
    for name in base.folders():
        changed = base.changed(f"{name}/checkpoints", f"/{MANIFEST}")
        if changed is not None and name_problem(name) is None:
            found.append((changed, name))
    return max(found, default=None)


def is_taken(config: MultiGPUConfig, name: str) -> bool:
    """Whether there is a run of this name already."""
    return bool(RemoteFolder(f"{config.save_dir}/{config.recipe}/{name}").files("lease"))


# Opening


def open_remote_run(
    url: str, folder: Path, config: MultiGPUConfig, identity: Identity, say: Say
) -> Lease | None:
    """Take the run at `url`, and bring its local copy in `folder` up to date.

    None where ranks were restarted and storage is away: the copy here is what they wrote.
    """
    store = CheckpointStore(folder / "checkpoints")
    try:
        run = RemoteRun(url)
        lease = take_lease(run.folder, identity, say)
    except StorageError as error:
        if identity.attempt and not error.lasting and any(store.folders()):
            say(f"{error}; going on from the local copy in {folder}")
            return None
        raise
    try:
        if config.resume is None and not identity.attempt:
            _refuse_to_overwrite(run)
        with lease.kept():
            restore(run, store, say, newest=config.resume == "auto" or identity.attempt > 0)
            if not any((folder / "events").glob("*.jsonl")):
                fetch_events(run.folder, folder / "events")
    except BaseException:
        lease.release()
        raise
    return lease


def _refuse_to_overwrite(run: RemoteRun) -> None:
    if any(one.complete for one in run.checkpoints()):
        raise ConfigError(
            f"the run {run.folder.url} already has checkpoints; add --resume auto to continue it, "
            "or choose another --run-name",
            code="MGT106",
        )


def restore(run: RemoteRun, store: CheckpointStore, say: Say, newest: bool) -> None:
    """Take over the history there and, where asked to, the newest checkpoint if it is newer than
    what is here, and the best one. What is here and newer stays."""
    there, entries = run.checkpoints(), _merged_history(run, store)
    if not newest:
        return
    current = [one for one in there if one.complete and _counts(one, entries)]
    here, _ = store.newest_intact()
    step = trusted_manifest(here)["step"] if here is not None else -1
    problems = []
    for one in current:
        if one.step <= step:
            break
        say(f"downloading {one.name} ({one.bytes / 2**20:,.1f} MiB) from {run.folder.url}")
        problem = run.download(one, store)
        if problem is None:
            here = store.path_of(one.step)
            break
        problems.append(problem)
        say(f"warning: {problem}; taking an older one")
    if problems and here is None:
        raise CheckpointError(
            f"no intact checkpoint at {run.folder.url}: {'; '.join(problems)}; resume from another "
            "run, or start a new one with another --run-name",
            code="MGT701",
        )
    _restore_best(run, store, current, say)


def _restore_best(
    run: RemoteRun, store: CheckpointStore, current: list[RemoteCheckpoint], say: Say
) -> None:
    """Without it, the next checkpoint with a score would pass for the best one."""
    if (store.folder / "best").exists():
        return
    name = run.best()
    best = next((one for one in current if one.name == name), None)
    if best is None:
        return
    path = store.path_of(best.step)
    problem = run.download(best, store) if uploaded_name(path) != best.name else None
    if problem is None:
        store.mark_best(path)
    else:
        say(f"warning: the best checkpoint could not be restored: {problem}")


def _counts(one: RemoteCheckpoint, entries: History) -> bool:
    return not one.manifest or on_timeline(one.manifest, entries)


def _merged_history(run: RemoteRun, store: CheckpointStore) -> History:
    """The history of the run, of which that here and that there must be parts."""
    ours, theirs = store.lineage.entries(), run.lineage()
    shorter, longer = sorted((ours, theirs), key=len)
    local = {path: trusted_manifest(path) for path in store.folders()}
    remote: dict[tuple[Any, Any], dict[str, Any]] = {
        (one.manifest.get("attempt"), one.step): one.manifest for one in run.checkpoints()
    }
    split = longer[: len(shorter)] != shorter
    for facts in local.values():
        other = remote.get((facts.get("attempt"), facts.get("step")))
        # The same step of the same attempt with other weights: two machines went on from there.
        split = split or (bool(other) and _model(other or {}) != _model(facts))
    if split:
        raise ConfigError(
            f"the local copy {store.folder.parent} and {run.folder.url} have gone different ways: "
            f"two machines continued the same run. To continue the one there, move the local copy "
            f"away; to continue the local one, start a new --run-name with --resume "
            f"{next(iter(local), store.folder)}"
        )
    if longer is theirs and theirs != ours:
        store.lineage.adopt(theirs)
        store.folder.mkdir(parents=True, exist_ok=True)
        store.lineage.write()
    return longer


def _model(manifest: dict[str, Any]) -> dict[str, Any]:
    files = manifest.get("files", {}).items()
    return {n: f for n, f in files if n.startswith("model") and n.endswith(".safetensors")}


# One checkpoint that was asked for


def fetch_checkpoint(address: RunAddress, store: CheckpointStore, say: Say) -> Path:
    """Bring the checkpoint that an address names into a store, unless it is there."""
    run = RemoteRun(address.url)
    asked = address.checkpoint or "best"
    name = run.best() if asked == "best" else asked
    every = [one for one in run.checkpoints() if one.complete]
    entries = run.lineage()
    found = [one for one in every if name in (one.name, one.name.partition(".")[0])]
    found.sort(key=lambda one: _counts(one, entries), reverse=True)
    if not found:
        there = ", ".join(one.name for one in every[:5]) or "none"
        raise ConfigError(
            f"--resume {address.url}/checkpoints/{asked}: no such checkpoint; complete ones there: "
            f"{there}"
        )
    path = store.path_of(found[0].step)
    if uploaded_name(path) == found[0].name and store.verifier.damage(path) is None:
        return path
    say(f"downloading {found[0].name} from {address.url}")
    problem = run.download(found[0], store)
    if problem is not None:
        raise CheckpointError(f"{problem}; resume from another checkpoint", code="MGT701")
    return path


def newest_manifest(config: MultiGPUConfig) -> dict[str, Any]:
    """What the checkpoint says about itself that `resume` would continue from; empty if none."""
    if config.resume is not None and is_url(config.resume):
        address = parse_address(config.resume)
    else:
        latest = None if config.run_name else latest_remote_run(config)
        name = config.run_name or (latest[1] if latest else None)
        if name is None:
            return {}
        address = RunAddress(f"{config.save_dir}/{config.recipe}/{name}")
    run = RemoteRun(address.url)
    word = run.best() if address.checkpoint == "best" else address.checkpoint
    found = [one for one in run.checkpoints() if one.problem is None]
    if word is not None:
        found = [one for one in found if word in (one.name, one.name.partition(".")[0])]
    else:
        entries = run.lineage()
        found = [one for one in found if _counts(one, entries)]
    return found[0].manifest if found else {}
