"""A checkpoint from the node that has it to the nodes that have not.

The bytes travel over the ranks' own group, as bytes: they are written to a staging folder, checked
against the hashes of the manifest, and renamed into place. Nothing that arrives is executed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import CheckpointError
from multi_gpu_training.reliability.checkpoint import CheckpointStore
from multi_gpu_training.reliability.disks import Disks
from multi_gpu_training.reliability.durable import sync
from multi_gpu_training.reliability.integrity import MANIFEST, damage, trusted_manifest

CHUNK = 16 << 20
_TENSORS = ("model.safetensors", "optimizer.safetensors", "state.safetensors")

History = list[dict[str, int]]


@dataclass(frozen=True)
class Found:
    """The checkpoint to go on from, in this rank's own folder."""

    path: Path | None
    damaged: list[str]
    said: list[str]


def agree(placement: Placement, disks: Disks, store: CheckpointStore) -> Found:
    """The newest intact checkpoint of all nodes, on every node. Collective."""
    mine = None
    if disks.keeps:
        store.recover()
        mine = store.lineage.entries() if disks.known else []
    histories = placement.gather_json([mine, disks.known])
    kept = {rank: histories[rank][0] for rank in disks.keepers}
    known = [rank for rank in disks.keepers if histories[rank][1]] or [0]
    steps = placement.gather_json(_newest_step(store) if disks.keeps and disks.known else -1)
    winner = newest_history({rank: kept[rank] for rank in known}, steps)
    said = []
    if disks.keeps and (not disks.known or not is_part(kept[placement.identity.rank], winner)):
        said.append(set_aside(store))
    if disks.keeps:
        store.lineage.adopt(winner)
    offers = placement.gather_json(_offer(store) if disks.keeps else None)
    damaged = [line for offer in offers if offer for line in offer["damaged"]]
    source = best_offer(offers)
    if source is None:
        return Found(None, damaged, _all_said(placement, said))
    chosen = offers[source]
    needy = [
        rank
        for rank in disks.keepers
        if any(offers[rank][key] != chosen[key] for key in ("step", "attempt", "tensors"))
    ]
    path = store.path_of(chosen["step"])
    if needy:
        send(placement, source, needy, path, store)
        nodes = "node" if len(needy) == 1 else "nodes"
        if placement.is_main:
            said.append(
                f"{path.name} was sent from rank {source}'s disk to {len(needy)} {nodes} without it"
            )
    return Found(path, damaged, _all_said(placement, said))


def bring(placement: Placement, disks: Disks, store: CheckpointStore, given: Path) -> Path:
    """The checkpoint that was named, from rank 0 to every node that has not got it. Collective."""
    there = trusted_manifest(given)
    mine = there.get("sha256") if disks.keeps else None
    offers = placement.gather_json([mine, damage(given) if placement.is_main else None])
    wanted, problem = offers[0]
    if wanted is None or problem is not None:
        raise CheckpointError(
            f"--resume {given}: {problem or 'no checkpoint there'}; give a folder "
            "checkpoints/step-N of a run, or auto"
        )
    needy = [rank for rank in disks.keepers if offers[rank][0] != wanted]
    if not needy:
        return given
    final = store.folder / given.name
    send(placement, 0, needy, given if placement.is_main else final, store)
    near = placement.gather_json(there.get("sha256") == wanted)
    return given if near[placement.identity.rank] else final


def is_part(history: History, whole: History) -> bool:
    return whole[: len(history)] == history


def newest_history(histories: dict[int, History], steps: Sequence[int]) -> History:
    """The history that the others are part of; of two that went apart, the one with more steps.

    Going back to an earlier checkpoint adds to a history: the longer one knows of it."""
    best = min(histories)
    for rank in sorted(histories):
        longer = len(histories[rank]) > len(histories[best])
        apart = not is_part(histories[best], histories[rank]) and not is_part(
            histories[rank], histories[best]
        )
        if (apart and steps[rank] > steps[best]) or (not apart and longer):
            best = rank
    return histories[best]


def best_offer(offers: Sequence[dict[str, Any] | None]) -> int | None:
    """The rank with the newest checkpoint, the lowest of several."""
    steps = {rank: offer["step"] for rank, offer in enumerate(offers) if offer}
    steps = {rank: step for rank, step in steps.items() if step >= 0}
    return max(steps, key=lambda rank: (steps[rank], -rank)) if steps else None


def set_aside(store: CheckpointStore) -> str:
    """Checkpoints that are not of this run's history leave its folder; they are not deleted."""
    if not any(store.folders()) and not (store.folder / "lineage.json").exists():
        return ""
    name = f"{store.folder.name}-before-{datetime.now().strftime('%Y%m%d-%H%M%S-%f')}"
    store.folder.rename(store.folder.with_name(name))
    return f"{store.folder} was of another history of the run: kept as {name}"


def send(
    placement: Placement, source: int, needy: Sequence[int], path: Path, store: CheckpointStore
) -> None:
    """Bring `path` from rank `source` to the ranks `needy`, into their own store. Collective."""
    rank = placement.identity.rank
    head: dict[str, Any] = {}
    if rank == source:
        names = sorted(trusted_manifest(path)["files"])
        sizes = [(name, (path / name).stat().st_size) for name in names]
        head = {"manifest": (path / MANIFEST).read_text(), "sizes": sizes}
    head = placement.gather_json(head)[source]
    problem: str | None = None
    staged = store.staging(path) if rank in needy else None
    for name, size in [*head["sizes"], (MANIFEST, None)]:
        try:
            target = None if staged is None or problem else staged / _plain_name(name)
            if size is None:
                if target is not None:
                    target.write_text(head["manifest"])
                    sync(target)
            else:
                _send_file(placement, source, path / name, size, target)
        except (OSError, ValueError) as error:
            problem = f"{placement.identity.host} could not receive {path.name}: {error}"
    if staged is not None and problem is None:
        problem = _install(store, staged, path)
    if staged is not None and problem is not None:
        shutil.rmtree(staged, ignore_errors=True)
    problems = [line for line in placement.gather_json(problem) if line]
    if problems:
        raise CheckpointError("; ".join(problems))


def _send_file(
    placement: Placement, source: int, file: Path, size: int, target: Path | None
) -> None:
    """Every rank takes part to the end, also one that cannot write what it gets."""
    sending = placement.identity.rank == source
    reader = file.open("rb") if sending else None
    writer, failed = None, None
    try:
        writer = target.open("wb") if target is not None else None
    except OSError as error:
        failed = error
    for begin in range(0, size, CHUNK):
        length = min(CHUNK, size - begin)
        chunk = torch.zeros(length, dtype=torch.uint8)
        if reader is not None:
            chunk = torch.frombuffer(bytearray(reader.read(length)), dtype=torch.uint8)
        chunk = placement.broadcast_from(source, chunk.to(placement.wire)).cpu()
        if writer is not None and failed is None:
            try:
                writer.write(chunk.numpy().data)
            except OSError as error:
                failed = error
    if reader is not None:
        reader.close()
    if writer is not None:
        writer.close()
    if failed is not None:
        raise failed
    if target is not None:
        sync(target)


def _install(store: CheckpointStore, staged: Path, path: Path) -> str | None:
    try:
        sync(staged)
        return store.install(staged, path)
    except OSError as error:
        return f"could not receive {path.name} into {store.folder}: {error}"


def _plain_name(name: str) -> str:
    if name != Path(name).name or name.startswith("."):
        raise ValueError(f"{name!r} is no file of a checkpoint")
    return name


def _newest_step(store: CheckpointStore) -> int:
    paths = [path for path in store.folders() if store.on_timeline(path)]
    return max((int(trusted_manifest(path).get("step", -1)) for path in paths), default=-1)


def _offer(store: CheckpointStore) -> dict[str, Any]:
    """What this disk has to go on from."""
    path, damaged = store.newest_intact()
    facts = trusted_manifest(path) if path is not None else {}
    hashes = [facts.get("files", {}).get(name) for name in _TENSORS]
    return {
        "step": int(facts.get("step", -1)),
        "attempt": int(facts.get("attempt", 0)),
        "tensors": json.loads(json.dumps(hashes)),
        "damaged": damaged,
    }


def _all_said(placement: Placement, said: list[str]) -> list[str]:
    return [line for lines in placement.gather_json(said) for line in lines if line]
