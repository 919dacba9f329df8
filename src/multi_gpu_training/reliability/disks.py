"""On which nodes a run is kept: one copy on each disk, so that any node may be lost."""

from __future__ import annotations

import contextlib
import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from multi_gpu_training.distributed.identity import Identity
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import ConfigError


@dataclass(frozen=True)
class Disks:
    """`keepers` are the ranks that write checkpoints, the lowest one on each disk.

    `known`: what lies in this rank's folder belongs to this run, or may be taken up by it.
    """

    keepers: tuple[int, ...] = (0,)
    keeps: bool = True
    known: bool = True

    @property
    def several(self) -> bool:
        return len(self.keepers) > 1


def one_disk(placement: Placement) -> Disks:
    return Disks(keeps=placement.is_main)


def on_several_nodes(identity: Identity) -> bool:
    return identity.local_world_size < identity.world_size


def find_disks(placement: Placement, folder: Path) -> Disks:
    """Which nodes share a disk, found out by a file that each leaves in `folder`. Collective."""
    identity = placement.identity
    if placement.group is None or not on_several_nodes(identity):
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
    keepers = tuple(sorted({min(ranks) for ranks in every if ranks}))
    return Disks(keepers, identity.rank in keepers, _known(folder, identity))


def _known(folder: Path, identity: Identity) -> bool:
    """What an earlier launch left here counts when a run is taken up again, not when a node
    joins one that has long gone on."""
    if identity.attempt == 0:
        return True
    try:
        facts = json.loads((folder / "environment.json").read_text())
        return bool(facts.get("run_id") == identity.run_id)
    except (OSError, ValueError, AttributeError):
        return False
