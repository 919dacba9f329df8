"""What may be dropped: never what the run could still need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from multi_gpu_training.checkpoint.durable import own_name
from multi_gpu_training.checkpoint.retention import StoredCheckpoint, to_drop
from multi_gpu_training.checkpoint.snapshot import Snapshot
from multi_gpu_training.checkpoint.store import CheckpointStore


def save(store: CheckpointStore, step: int, loss: float | None = None) -> Path:
    facts = {}
    if loss is not None:
        facts["score"] = {"metric": "loss", "value": loss, "smaller_is_better": True}
    return store.save(Snapshot(step, 0, {"w": torch.ones(3)}, {}, {}, {}, facts))


def left(store: CheckpointStore) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in store.folder.glob("step-*"))


def harm(path: Path) -> None:
    """A flipped bit, with the old time of modification put back."""
    file = path / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    times = file.stat()
    file.write_bytes(raw)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_the_newest_and_the_best_stay() -> None:
    def kept(step: int, score: float | None = None, current: bool = True) -> StoredCheckpoint:
        return StoredCheckpoint(Path(str(step)), current, score)

    found = [kept(9), kept(8), kept(7, 0.2), kept(6, 0.9, current=False), kept(5, 0.5), kept(4)]
    found += [kept(3, 0.5), kept(2, 0.7), kept(1)]

    def dropped(last: int, best: int, intact: str = "123456789", named: str | None = None) -> str:
        link = Path(named) if named else None
        gone = to_drop(found, lambda path: path.name in intact, last, best, link)
        return "".join(sorted(path.name for path in gone))

    assert dropped(2, 1) == "134567"
    assert dropped(1, 2) == "145678"  # of equals the older one, which was best first
    assert dropped(1, 3) == "14678"
    assert dropped(2, 1, named="4") == "13567"
    # Damaged ones take nobody's place, and go when enough intact ones are newer.
    assert dropped(2, 1, intact="1234567") == "1346"
    assert dropped(2, 1, intact="13456789") == "124567"
    # Without one that is intact nothing goes.
    assert dropped(1, 1, intact="") == ""


def test_the_last_intact_one_is_never_dropped(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)
    harm(save(store, 2))
    store.prune()
    assert left(store) == [1, 2]
    assert store.newest_intact()[0] == tmp_path / "step-00000001"
    save(store, 3)
    store.prune()
    assert left(store) == [3]


def test_the_best_ones_are_kept_by_their_score(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=2)
    for step, loss in enumerate([0.5, 0.3, 0.4, 0.9, 0.8], 1):
        save(store, step, loss)
        store.prune()
    assert left(store) == [2, 3, 5]
    again = CheckpointStore(tmp_path, keep_last=1, keep_best=2)  # another process, later
    save(again, 6, float("nan"))
    save(again, 7)
    again.prune()
    assert left(again) == [2, 3, 7]


def test_best_names_the_best_that_could_be_saved(tmp_path: Path) -> None:
    """Step 2 was better than any, and could not be written; step 3 is the best there is."""
    store = CheckpointStore(tmp_path, keep_last=1)
    for step, loss, best in [(1, 0.5, True), (3, 0.4, False), (4, 0.45, False), (5, None, False)]:
        store.keep(save(store, step, loss), best)
    assert (tmp_path / "best").resolve().name == "step-00000003"
    assert left(store) == [3, 5]


PROCESSES = {"another": "1", "same number": str(os.getpid()), "named": "5f1de09a2c64b7e3"}


@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)
def test_leftovers_of_killed_saves_are_cleared_away(tmp_path: Path, process: str) -> None:
    """Also those of a process with this one's number, as in a container."""
    store = CheckpointStore(tmp_path)
    (tmp_path / f".staged-step-00000009-0-{process}").mkdir()
    (tmp_path / f".old-step-00000009-1-{process}").mkdir()
    (tmp_path / f".lineage-2-{process}").write_text("[")
    (tmp_path / f".best-3-{process}").symlink_to("step-00000009")
    assert len(store.leftovers()) == 4
    store.keep(save(store, 10), best=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "step-00000010"]


def test_what_is_being_staged_is_left_alone(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    staged = store.staging(store.path_of(11))
    store.keep(save(store, 10), best=True)
    assert store.leftovers() == [staged]


def name_of_process() -> str:
    return own_name().split("-", 1)[1]


def test_processes_forked_from_one_have_names_of_their_own() -> None:
    names = [*run_ranks(2, name_of_process), name_of_process()]
    assert len(set(names)) == 3
    assert name_of_process() == names[2]


def test_what_nobody_touched_is_not_read_again(tmp_path: Path) -> None:
    """Dropping one of 2 GiB must not read three of 2 GiB."""
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in range(1, 6):
        save(store, step, loss=1.0)
        store.prune()
    assert left(store) == [1, 4, 5]
    assert not store.verifier.hashed
    harm(tmp_path / "step-00000005")
    store.prune()
    assert store.verifier.hashed == {tmp_path / "step-00000005" / "model.safetensors": 1}
