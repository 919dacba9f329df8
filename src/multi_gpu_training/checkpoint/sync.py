"""Checkpoints on several hosts: who writes them, and how a host without one receives it.

Each disk gets one copy, so that any host may be lost. To resume, all ranks agree on the newest
intact checkpoint; hosts without it receive its bytes over the ranks' group, stage them, check them
against the manifest and rename them into place. Nothing that arrives is executed.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from multi_gpu_training.checkpoint.durable import flush, write_text
from multi_gpu_training.checkpoint.integrity import MANIFEST, is_plain_name, trusted_manifest
from multi_gpu_training.checkpoint.store import CheckpointStore
from multi_gpu_training.distributed.identity import Identity
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import CheckpointError, ConfigError
from multi_gpu_training.safe_files import read_json

CHUNK = 16 << 20

History = list[dict[str, int]]


# Who writes


@dataclass(frozen=True)
class CheckpointHosts:
    """Which ranks write checkpoints: `writers` holds the lowest rank on each disk.

    writes: whether this rank does.
    known: whether what lies in this rank's folder belongs to this run.
    """

    writers: tuple[int, ...] = (0,)
    writes: bool = True
    known: bool = True

    @property
    def several(self) -> bool:
        """Whether there is more than one disk."""
        return len(self.writers) > 1


def one_disk(placement: Placement) -> CheckpointHosts:
    """All ranks share one disk: rank 0 writes."""
    return CheckpointHosts(writes=placement.is_main)


def find_checkpoint_hosts(placement: Placement, folder: Path) -> CheckpointHosts:
    """Find out which hosts share a disk, by a file that each leaves in `folder`. Collective."""
    identity = placement.identity
    if placement.group is None or not identity.on_several_hosts:
        return one_disk(placement)
    mark, problem = None, None
    if identity.local_rank == 0:
        mark = f".disk-{identity.rank}-{secrets.token_hex(8)}"
        try:
            (folder / "events").mkdir(parents=True, exist_ok=True)
            (folder / mark).touch()
        except OSError as error:
            problem = (
                f"cannot write the run folder {folder} on {identity.host}: {error.strerror}; "
                "choose another --save-dir"
            )
    told = placement.gather_json([mark, problem])
    problems = [answer[1] for answer in told if answer[1]]
    # A mark names a file in this folder and nothing else, whoever sent it.
    marks = [name if name and Path(name).name == name else None for name, _ in told]
    seen = [r for r, name in enumerate(marks) if name and (folder / name).exists()]
    every = placement.gather_json(seen)
    if mark is not None:
        with contextlib.suppress(OSError):
            (folder / mark).unlink(missing_ok=True)
    if problems:
        raise ConfigError(problems)
    writers = tuple(sorted({min(ranks) for ranks in every if ranks}))
    return CheckpointHosts(writers, identity.rank in writers, _is_known(folder, identity))


def _is_known(folder: Path, identity: Identity) -> bool:
    # What an earlier launch left here counts when a run is resumed, but not when a host joins a
    # run that has long continued without it.
    if identity.attempt == 0:
        return True
    try:
        facts = read_json(folder / "environment.json", dict[str, Any])
        return bool(facts.get("run_id") == identity.run_id)
    except (OSError, ValueError):
        return False


# What to resume from


@dataclass(frozen=True)
class AgreedCheckpoint:
    """The checkpoint to resume from, in this rank's own folder, and what to tell the user."""

    path: Path | None
    damaged: list[str]
    said: list[str]


def agree_on_newest(
    placement: Placement, hosts: CheckpointHosts, store: CheckpointStore
) -> AgreedCheckpoint:
    """Agree on the newest intact checkpoint of all hosts and bring it to each. Collective."""
    # Every rank takes part in the same exchanges; only writers have something to tell.
    known = hosts.known or not hosts.several
    mine: list[Any] = [[], known, -1]
    if hosts.writes:
        store.recover()
        if known:
            mine = [store.lineage.entries(), known, _newest_step(store)]
    told = placement.gather_json(mine)
    histories = {rank: told[rank][0] for rank in hosts.writers}
    trusted = [rank for rank in hosts.writers if told[rank][1]] or [0]
    winner = newest_history({r: histories[r] for r in trusted}, [steps for _, _, steps in told])
    said = []
    if hosts.writes:
        if not known or not _is_part(histories[placement.identity.rank], winner):
            said.append(_set_aside(store))
        store.lineage.adopt(winner)
    offers = placement.gather_json(_offer(store) if hosts.writes else None)
    damaged = [line for offer in offers if offer for line in offer["damaged"]]
    source = best_offer(offers)
    path = None
    if source is not None:
        chosen = offers[source]
        path = store.path_of(int(chosen["step"]))  # not by the name, which came over the network
        same = ("step", "attempt", "tensors")
        needy = [r for r in hosts.writers if any(offers[r][k] != chosen[k] for k in same)]
        if needy:
            send(placement, source, needy, path, store)
        if needy and placement.is_main:
            count = f"{len(needy)} host{'s' if len(needy) > 1 else ''}"
            said.append(f"{path.name} was sent from rank {source}'s disk to {count} without it")
    every = placement.gather_json(said)
    return AgreedCheckpoint(path, damaged, [line for lines in every for line in lines if line])


def bring_to_all(
    placement: Placement, hosts: CheckpointHosts, store: CheckpointStore, given: Path
) -> Path:
    """Bring the checkpoint `given`, as rank 0 sees it, to every host without it. Collective."""
    there = trusted_manifest(given).get("sha256")
    problem = store.verifier.damage(given) if placement.is_main else None
    offers = placement.gather_json([there, problem])
    wanted, problem = offers[0]
    if wanted is None or problem is not None:
        found = "no checkpoint there" if wanted is None else f"it is damaged: {problem}"
        raise CheckpointError(
            f"--resume {given}: {found}; give a folder checkpoints/step-N of a run, or auto"
        )
    needy = [rank for rank in hosts.writers if offers[rank][0] != wanted]
    if not needy:
        return given
    final = store.folder / given.name
    send(placement, 0, needy, given if placement.is_main else final, store)
    return given if there == wanted else final


def newest_history(histories: dict[int, History], steps: Sequence[int]) -> History:
    """Return the history that the others are part of; if two diverged, the one with more steps."""
    # Going back to an earlier checkpoint adds to a history: the longer one knows about it.
    best = min(histories)
    for rank in sorted(histories):
        ours, other = histories[best], histories[rank]
        diverged = not _is_part(ours, other) and not _is_part(other, ours)
        if (diverged and steps[rank] > steps[best]) or (not diverged and len(other) > len(ours)):
            best = rank
    return histories[best]


def best_offer(offers: Sequence[dict[str, Any] | None]) -> int | None:
    """Return the rank with the newest checkpoint, the lowest if there are several."""
    steps = {rank: offer["step"] for rank, offer in enumerate(offers) if offer}
    steps = {rank: step for rank, step in steps.items() if step >= 0}
    return max(steps, key=lambda rank: (steps[rank], -rank)) if steps else None


def _is_part(history: History, whole: History) -> bool:
    return whole[: len(history)] == history


def _set_aside(store: CheckpointStore) -> str:
    """Move checkpoints of another history out of the run's folder, without deleting them."""
    if not any(store.folders()) and not (store.folder / "lineage.json").exists():
        return ""
    name = f"{store.folder.name}-before-{datetime.now().strftime('%Y%m%d-%H%M%S-%f')}"
    store.folder.rename(store.folder.with_name(name))
    return f"{store.folder} belonged to another history of the run: kept as {name}"


def _newest_step(store: CheckpointStore) -> int:
    paths = [path for path in store.folders() if store.on_timeline(path)]
    return max((int(trusted_manifest(path).get("step", -1)) for path in paths), default=-1)


def _offer(store: CheckpointStore) -> dict[str, Any]:
    """What this disk has to resume from."""
    path, damaged = store.newest_intact()
    facts = trusted_manifest(path) if path is not None else {}
    return {
        "name": "" if path is None else path.name,
        "step": int(facts.get("step", -1)),
        "attempt": int(facts.get("attempt", 0)),
        # Not state.json: it holds each writer's own settings, such as its save_dir.
        "tensors": {n: f for n, f in facts.get("files", {}).items() if n.endswith(".safetensors")},
        "damaged": damaged,
    }


# Sending


def send(
    placement: Placement, source: int, needy: Sequence[int], path: Path, store: CheckpointStore
) -> None:
    """Send `path` from rank `source` to the stores of the ranks `needy`. Collective."""
    rank = placement.identity.rank
    head: dict[str, Any] = {}
    if rank == source:
        names = sorted(trusted_manifest(path)["files"])
        sizes = [(name, (path / name).stat().st_size) for name in names]
        head = {"manifest": (path / MANIFEST).read_text(), "sizes": sizes}
    head = placement.gather_json(head)[source]
    # The names came over the network: they must not lead out of the staging folder.
    strange = [n for n, _ in head["sizes"] if not is_plain_name(n)]
    if strange:
        raise CheckpointError(
            f"{path.name} is not a checkpoint: it has files named {strange}", code="MGT701"
        )
    problem: str | None = None
    staged = store.staging(path) if rank in needy else None
    for name, size in head["sizes"]:
        try:
            target = None if staged is None or problem else staged / name
            _send_file(placement, source, path / name, size, target)
        except OSError as error:
            problem = f"{placement.identity.host} could not receive {path.name}: {error}"
    if staged is not None and problem is None:
        try:
            write_text(staged / MANIFEST, head["manifest"])
            flush(staged)
            problem = store.install(staged, path)
        except OSError as error:
            problem = f"could not receive {path.name} into {store.folder}: {error}"
    if staged is not None and problem is not None:
        shutil.rmtree(staged, ignore_errors=True)
    problems = [line for line in placement.gather_json(problem) if line]
    if problems:
        raise CheckpointError("; ".join(problems), code="MGT701")


def _send_file(
    placement: Placement, source: int, file: Path, size: int, target: Path | None
) -> None:
    """Send one file. Every rank takes part to the end, even one that cannot write what it gets."""
    failed: OSError | None = None
    with contextlib.ExitStack() as opened:
        reader = writer = None
        if placement.identity.rank == source:
            reader = opened.enter_context(file.open("rb"))
        try:
            writer = opened.enter_context(target.open("wb")) if target is not None else None
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
    if failed is not None:
        raise failed
    if target is not None:
        flush(target)
