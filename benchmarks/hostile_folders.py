"""Hostile run folders: `mgt report`, `mgt checkpoints` and `--resume auto` on each.

    python benchmarks/hostile_folders.py --out hostile_folders.json
    python benchmarks/hostile_folders.py --only manifest --verbose

A real run is copied and changed: files replaced by devices, FIFOs, links and folders, contents by
bombs and nonsense, manifests and events forged with hashes that fit. Nothing may end in a
traceback, hang, take more than 1 GiB, or write outside the run; a training that is resumed must end
with the weights of an undisturbed one, or be refused in words.
"""

# ruff: noqa: E501 - one line per case reads best
from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import itertools

from hostile_trial import attempt, files_below, mgt

Change = Callable[[Path], None]
STEP = "checkpoints/step-00000006"
JSON = (
    f"{STEP}/manifest.json",
    f"{STEP}/state.json",
    "checkpoints/lineage.json",
    "environment.json",
)
FILES = (
    *JSON, "checkpoints/lineage.copy.json", "config.yaml", ".lock", "events/rank-0.jsonl",
    "forecast.json", f"{STEP}/model.safetensors", f"{STEP}/optimizer.safetensors",
)  # fmt: skip


def train(folder: Path, steps: int = 12, **settings: Any) -> str:
    """One rank, a checkpoint every other step; returns a hash of the weights."""
    from tiny import flat, line, manager_for, points, sgd, squares

    given = {"training_mode": "single", "batch_size": 2, "epochs": 2, "run_name": "it"}
    given |= {"enable_fault_tolerance": True, "checkpoint_frequency": 2, "keep_last": 99}
    given |= {"log_every": 1, "max_steps": steps, "resume": "auto", **settings}
    manager, model = manager_for(folder, **given), line()
    manager.fit(model, points(), loss_fn=squares, optimizer=sgd)
    return hashlib.sha256(flat(model).numpy().tobytes()).hexdigest()


# Any file


def text_as(name: str, content: bytes) -> Change:
    def change(run: Path) -> None:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).unlink(missing_ok=True)
        (run / name).write_bytes(content)

    return change


def gone(run: Path, name: str) -> Path:
    (run / name).unlink(missing_ok=True)
    return run / name


def sparse(path: Path, size: int = 8 << 30) -> None:
    with path.open("wb") as file:
        file.truncate(size)


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        here = Path.cwd()
        os.chdir(path.parent)
        listener.bind(path.name)
        os.chdir(here)


def swallowed(run: Path, name: str) -> None:
    """The start of a real file, cut in the middle."""
    path = run / name
    if path.exists():
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


KINDS: dict[str, Callable[[Path, str], object]] = {
    "empty": lambda run, name: gone(run, name).touch(),
    "half": swallowed,
    "device": lambda run, name: gone(run, name).symlink_to("/dev/zero"),
    "fifo": lambda run, name: os.mkfifo(gone(run, name)),
    "socket": lambda run, name: bound(gone(run, name)),
    "folder": lambda run, name: gone(run, name).mkdir(),
    "loop": lambda run, name: gone(run, name).symlink_to(Path(name).name),
    "link outside": lambda run, name: gone(run, name).symlink_to(run.parents[2] / "outside/precious"),
    "hard link": lambda run, name: os.link(run.parents[2] / "outside/precious", gone(run, name)),
    "8 GiB": lambda run, name: sparse(gone(run, name)),
    "deep": lambda run, name: gone(run, name).write_text("[" * 300_000),
    "deep mapping": lambda run, name: gone(run, name).write_text('{"a":' * 100_000 + "1" + "}" * 100_000),
    "huge integer": lambda run, name: gone(run, name).write_text('{"step": %s}' % ("9" * 200_000)),
    "binary": lambda run, name: gone(run, name).write_bytes(bytes(range(256)) * 200),
    "list": lambda run, name: gone(run, name).write_text("[1, 2, 3]"),
    "number": lambda run, name: gone(run, name).write_text("5"),
    "NaN": lambda run, name: gone(run, name).write_text("NaN"),
    "NUL": lambda run, name: gone(run, name).write_bytes(b"\0" * 5_000_000),
}  # fmt: skip


def any_file() -> Iterator[tuple[str, Change]]:
    for name in FILES:
        for kind, change in KINDS.items():
            yield f"{name}: {kind}", lambda run, name=name, change=change: change(run, name)


# Manifests whose hash fits


def forged(changes: dict[str, Any]) -> Change:
    def change(run: Path) -> None:
        from multi_gpu_training.safe_files import signed

        path = run / STEP / "manifest.json"
        facts = json.loads(path.read_text())
        del facts["sha256"]
        merged = dict(changes)
        if isinstance(merged.get("files"), dict) and not merged.pop("alone", False):
            merged["files"] = {**facts["files"], **merged["files"]}
        path.write_text(json.dumps(signed({**facts, **merged}), indent=1))

    return change


def file_of(**facts: Any) -> dict[str, Any]:
    return {"files": {"model.safetensors": facts}}


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


HASH = "0" * 64
MANIFESTS: dict[str, dict[str, Any]] = {
    "chunk_bytes 1": file_of(bytes=2**40, sha256_of_chunks=HASH, chunk_bytes=1),
    "chunk_bytes 0": file_of(bytes=2**20, sha256_of_chunks=HASH, chunk_bytes=0),
    "chunk_bytes -1": file_of(bytes=2**20, sha256_of_chunks=HASH, chunk_bytes=-1),
    "chunk_bytes huge": file_of(bytes=2**20, sha256_of_chunks=HASH, chunk_bytes=2**62),
    "chunk_bytes text": file_of(bytes=2**20, sha256_of_chunks=HASH, chunk_bytes="x"),
    "two hashes": file_of(bytes=1, sha256=HASH, sha256_of_chunks=HASH, chunk_bytes=4),
    "no hash": file_of(bytes=1),
    "bytes huge": file_of(bytes=2**63, sha256=HASH),
    "bytes -1": file_of(bytes=-1, sha256=HASH),
    "hash list": file_of(bytes=1, sha256=[HASH]),
    "files list": {"files": [1]},
    "files none": {"files": {}, "alone": True},
    "file device": {"files": {"/dev/zero": {"bytes": 0, "sha256": HASH}}},
    "file outside": {"files": {"../../../outside/precious": {"bytes": 0, "sha256": HASH}}},
    "file NUL": {"files": {"a\0b": {"bytes": 0, "sha256": HASH}}},
    "file ESC": {"files": {"\x1b[2J": {"bytes": 0, "sha256": HASH}}},
    "100,000 files": {"files": {f"f{i}": {"bytes": 0, "sha256": HASH} for i in range(100_000)}},
    "world_size": {"world_size": 3_000_000_000},
    "world_size 0": {"world_size": 0},
    "world_size list": {"world_size": [2]},
    "step -1": {"step": -1},
    "step huge": {"step": 10**40},
    "step text": {"step": "6"},
    "step true": {"step": True},
    "epoch float": {"epoch": 1.5},
    "epoch huge": {"epoch": 2**53},
    "attempt huge": {"attempt": 10**30},
    "format 99": {"format": 99},
    "format text": {"format": "2"},
    "aliases list": {"aliases": [1]},
    "aliases circle": {"aliases": {"a": "b", "b": "a"}},
    "aliases unknown": {"aliases": {"weight": "nowhere"}},
    "metrics NaN": {"metrics": {"loss": float("nan")}},
    "metrics text": {"metrics": {"loss": "x"}},
    "metrics ESC": {"metrics": {"\x1b]0;owned\x07": 1.0}},
    "metrics many": {"metrics": {f"m{i}": 1.0 for i in range(50_000)}},
    "score list": {"score": [1]},
    "score NaN": {"score": {"metric": "loss", "value": float("nan"), "smaller_is_better": True}},
    "options deep": {"options": {"a": deep(900)}},
    "options text": {"options": "x"},
    "history long": {"history": [[0, 0]] * 300_000},
    "history text": {"history": [["x", 1]]},
    "history deep": {"history": deep(500)},
    "created long": {"created": "x" * 100_000},
    "created ESC": {"created": "\x1b[2J"},
    "created number": {"created": 5},
    "global_batch_size 0": {"global_batch_size": 0},
    "global_batch_size huge": {"global_batch_size": 2**60},
}


def manifests() -> Iterator[tuple[str, Change]]:
    for name, changes in MANIFESTS.items():
        yield f"manifest: {name}", forged(changes)

    def chunks(run: Path) -> None:
        """A file of zeros without blocks, with its real hash in tiny chunks."""
        size, chunk = 2**26, 2**10
        sparse(gone(run, f"{STEP}/model.safetensors"), size)
        one = hashlib.sha256(bytes(chunk)).digest()
        whole = hashlib.sha256(one * (size // chunk)).hexdigest()
        forged(file_of(bytes=size, sha256_of_chunks=whole, chunk_bytes=chunk))(run)

    yield "manifest: real hash of small chunks", chunks

    def large(run: Path) -> None:
        sparse(gone(run, f"{STEP}/model.safetensors"), 4 << 30)
        facts = file_of(bytes=4 << 30, sha256_of_chunks=HASH, chunk_bytes=2**30)
        forged(facts)(run)

    yield "manifest: chunks of 1 GiB", large
    states = {
        "empty": {}, "list": [], "deep": deep(900), "set": {"optimizer": {"$": "set"}, "state": 1},
        "tensor": {"optimizer": {"$": "tensor", "name": "nowhere"}, "state": {}},
        "rng": {"optimizer": {"groups": []}, "state": {"trainer": {"rng": 5}, "config": {}}},
        "int": {"optimizer": {"groups": [{"lr": 10**400}]}, "state": {}},
    }  # fmt: skip
    for name, state in states.items():

        def change(run: Path, state: Any = state) -> None:
            text = json.dumps(state).encode()
            (run / STEP / "state.json").write_bytes(text)
            digest = hashlib.sha256(text).hexdigest()
            forged({"files": {"state.json": {"bytes": len(text), "sha256": digest}}})(run)

        yield f"state: {name}", change
    headers = {
        "length": (2**62).to_bytes(8, "little") + b"{}",
        "shape": b'{"weight":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4]}}',
        "offsets": b'{"weight":{"dtype":"F32","shape":[1],"data_offsets":[0,4611686018427387904]}}',
        "dtype": b'{"weight":{"dtype":"X99","shape":[1],"data_offsets":[0,4]}}',
        "deep": b"[" * 100_000,
    }
    for name, header in headers.items():

        def tensors(run: Path, name: str = name, header: bytes = header) -> None:
            text = (
                header
                if name == "length"
                else len(header).to_bytes(8, "little") + header + b"\0" * 4
            )
            (run / STEP / "model.safetensors").write_bytes(text)
            forged(file_of(bytes=len(text), sha256=hashlib.sha256(text).hexdigest()))(run)

        yield f"safetensors: {name}", tensors


# Events whose checksum fits


HEAD = {"v": 2, "run": "it", "attempt": 0, "rank": 0, "world_size": 1, "host": "h"}
EVENTS: dict[str, list[dict[str, Any]]] = {
    "step huge": [{"event": "step", "step": 2**53, "loss": 1.0}],
    "step beyond": [{"event": "step", "step": 10**30, "loss": 1.0}],
    "loss huge": [{"event": "step", "step": 99, "loss": 10**400}],
    "loss list": [{"event": "step", "step": 99, "loss": [1]}],
    "loss deep": [{"event": "step", "step": 99, "loss": deep(900)}],
    "loss 1e308": [{"event": "step", "step": 90 + i, "loss": s * 1e308} for i, s in ((0, 1), (1, -1))],
    "rate text": [{"event": "step", "step": 99, "samples_per_s": "fast"}],
    "rate NaN": [{"event": "step", "step": 99, "samples_per_s": float("nan"), "loss": float("inf")}],
    "world_size 2**20": [{"event": "rank", "step": 0, "world_size": 2**20}],
    "world_size 3e9": [{"event": "rank", "step": 0, "world_size": 3_000_000_000}],
    "world_size text": [{"event": "rank", "step": 0, "world_size": "2"}],
    "rank facts": [{"event": "rank", "step": 0, "cores": "x", "global_batch": {}, "parameters": []}],
    "rank facts huge": [{"event": "rank", "step": 0, "global_batch": 10**300, "device_bytes": -1}],
    "rank facts list": [{"event": "rank", "step": 0, "peak_flops": [1], "workers": {}, "device": 5}],
    "time early": [{"event": "step", "step": 99, "time": 0}],
    "time late": [{"event": "step", "step": 99, "time": 1e11}],
    "time huge": [{"event": "step", "step": 99, "time": 1e300}],
    "clock jump": [{"event": "step", "step": 90 + i, "time": t} for i, t in enumerate((9e9, 5, 1e10))],
    "phases text": [{"event": "phases", "step": 99, "forward_s": "x", "step_s": []}],
    "phases NaN": [{"event": "phases", "step": 99, "forward_s": float("nan"), "step_s": 0}],
    "phases negative": [{"event": "phases", "step": 90 + i, "step_s": -1.0, "forward_s": -5} for i in range(9)],
    "phases huge": [{"event": "phases", "step": 90 + i, "step_s": 1e308, "forward_s": 1e308} for i in range(9)],
    "phases 10**400": [{"event": "phases", "step": 99, "step_s": 10**400}],
    "device text": [{"event": "device", "memory_bytes": "x", "gpu_utilization": {}}],
    "device huge": [{"event": "device", "memory_bytes": 10**400, "peak_bytes": -(10**400)}],
    "epoch deep": [{"event": "epoch", "epoch": 1, "step": 8, "train": deep(900), "val": 5}],
    "epoch text": [{"event": "epoch", "epoch": 1, "step": 8, "train": "x", "val": ["y"]}],
    "epoch values": [{"event": "epoch", "epoch": 1, "step": 8, "train": {"loss": [], "a": {}}}],
    "epoch none": [{"event": "epoch", "epoch": None, "train": None}, {"event": "epoch"}],
    "checkpoint": [{"event": "checkpoint", "step": 4, "stall_s": "x", "bytes": {}, "waited_s": 1e308}],
    "fault": [{"event": "fault", "step": 4, "kind": ["x"], "action": {}, "error": 5}],
    "run_end": [{"event": "run_end", "step": 4, "error": {"a": 1}, "elapsed_s": "x"}],
    "run_end list": [{"event": "run_end", "step": [4], "error": ["x"]}],
    "stall": [{"event": "stall", "step": 4, "waited_s": "long"}],
    "work": [{"event": "work", "flops": "many", "step": 2}, {"event": "work", "flops": 10**400}],
    "shares": [{"event": "shares", "shares": 5}, {"event": "shares", "shares": ["x"]}],
    "log ESC": [{"event": "log", "level": "warning", "message": "\x1b[2J\x1b]0;owned\x07<script>"}],
    "log list": [{"event": "log", "level": ["x"], "message": {"a": 1}}],
    "log long": [{"event": "log", "level": "warning", "message": "x" * 900_000}],
    "validation": [{"event": "validation", "step": 4, "loss": "x"}],
    "metrics": [{"event": "metrics", "step": 4, "values": 5}],
    "thinned": [{"event": "thinned", "dropped": "x"}, {"event": "thinned", "dropped": 10**40}],
    "unknown": [{"event": "x" * 39, "step": 1}, {"event": "x" * 4000, "step": 1}],
    "host": [{"event": "rank", "step": 0, "host": ["x"], "run": {}, "device_name": {"a": 1}}],
    "attempt": [{"event": "rank", "step": 0, "attempt": 2**53}, {"event": "rank", "attempt": -1}],
    "many starts": [{"event": "rank", "step": i % 7} for i in range(30_000)],
    "many kinds": [{"event": f"kind{i}", "step": i} for i in range(5_000)],
    "many logs": [{"event": "log", "level": "warning", "message": f"m{i}"} for i in range(50_000)],
    "many faults": [{"event": "fault", "step": i, "kind": "k", "message": f"{i}"} for i in range(30_000)],
    "many epochs": [{"event": "epoch", "epoch": i, "step": i, "train": {"loss": 1.0}} for i in range(30_000)],
    "many metrics": [{"event": "epoch", "epoch": 1, "train": {f"m{i}": 1.0 for i in range(20_000)}}],
    "metric names": [{"event": "epoch", "epoch": 1, "train": {"<script>": 1.0, "\x1b[2J": 2.0, "": 3.0}}],
}  # fmt: skip


def events() -> Iterator[tuple[str, Change]]:
    for name, told in EVENTS.items():

        def change(run: Path, told: list[dict[str, Any]] = told) -> None:
            from multi_gpu_training.monitoring.event_crc import with_crc

            lines = [
                with_crc(json.dumps({**HEAD, "time": 1.79e9 + i, **e})) for i, e in enumerate(told)
            ]
            with (run / "events/rank-0.jsonl").open("ab") as file:
                file.write(b"\n".join(lines) + b"\n")

        yield f"events: {name}", change
    for name, lines in {
        "no newline": b"x" * 30_000_000,
        "only newlines": b"\n" * 5_000_000,
        "unsigned": b'{"v": 2, "event": "step", "step": 1}\n' * 1000,
        "heads only": b'"event": "step", "step": 1\n' * 500_000,
        "nested heads": b'{"a": {"event": "phases", "step": 5}}\n' * 1000,
        "steps of 10**15 digits": b'{"v": 1, "event": "step", "step": ' + b"9" * 900_000 + b"}\n",
    }.items():

        def append(run: Path, lines: bytes = lines) -> None:
            with (run / "events/rank-0.jsonl").open("ab") as file:
                file.write(lines)

        yield f"events: {name}", append
    for name in ("rank-999999.jsonl", "rank-1048575.jsonl", "rank-²3.jsonl", "rank--1.jsonl", "rank-.jsonl",
                 "rank-0.000001.jsonl", "rank-0.000001-000009.jsonl", "rank-0.999999999999999.jsonl",
                 "rank-0.000009-000001.jsonl", "rank-00.jsonl", "rank-0.x.jsonl"):  # fmt: skip

        def named(run: Path, name: str = name) -> None:
            shutil.copy(run / "events/rank-0.jsonl", run / "events" / name)

        yield f"events: file {name}", named
    segment = "events/rank-0.000001.jsonl"
    for kind in ("fifo", "device", "8 GiB", "folder", "loop", "binary"):
        yield f"{segment}: {kind}", lambda run, kind=kind: KINDS[kind](run, segment)
    yield "events: 2,000 ranks", _many_ranks


def _many_ranks(run: Path) -> None:
    text = (run / "events/rank-0.jsonl").read_bytes().splitlines(keepends=True)[0]
    for rank in range(1, 2000):
        (run / f"events/rank-{rank}.jsonl").write_bytes(text)


# Settings and facts


def facts() -> Iterator[tuple[str, Change]]:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    names = "abcdefghijk"
    for before, name in itertools.pairwise(names):
        lines.append(f"{name}: &{name} [" + ", ".join([f"*{before}"] * 10) + "]")
    texts = {
        "alias bomb": "\n".join(lines),
        "alias loop": "a: &a [*a]",
        "tag": "a: !!python/object/apply:os.system ['touch /tmp/owned']",
        "types": "batch_size: [1]\nworld_size: {a: 1}\ntraining_mode: 5\nnum_workers: x\nepochs: .nan",
        "huge": "batch_size: " + "9" * 100_000,
        "many keys": "".join(f"k{i}: {i}\n" for i in range(300_000)),
        "long key": "? " + "x" * 2_000_000 + "\n: 1",
        "merge": "<<: {a: 1}\n<<: 5",
        "dates": "a: 9999-99-99\nb: 2026-01-01T25:00:00",
        "sexagesimal": "a: 1" + ":59" * 100_000,
        "tabs": "a:\t\t- 1\n\t- 2",
    }
    for name, text in texts.items():
        yield f"config.yaml: {name}", text_as("config.yaml", text.encode())
    environments: dict[str, Any] = {
        "types": {"gpus": 5, "packages": [1], "command": {"a": 1}, "cpus": "x", "host": []},
        "files": {"files": [1]},
        "files deep": {"files": deep(900)},
        "hash": {"sha256": 5},
        "run_id": {"run_id": {"a": 1}},
        "names": {"packages": {"<script>alert(1)</script>": "\x1b[2J"}, "command": ["x" * 100_000]},
    }
    for name, value in environments.items():
        yield f"environment.json: {name}", text_as("environment.json", json.dumps(value).encode())
    forecasts: dict[str, Any] = {
        "types": {"gpus": "x", "rows": 5, "result": [], "profile": 1},
        "empty rows": {"gpus": [], "rows": []},
        "rows": {"gpus": [1], "rows": [{"gpus": 10**400, "step_s": "x"}]},
        "nan": {"gpus": [1], "rows": [{"gpus": 1, "step_s": float("nan"), "samples_per_s": -1}]},
        "deep": {"gpus": deep(900)},
    }
    for name, value in forecasts.items():
        yield f"forecast.json: {name}", text_as("forecast.json", json.dumps(value).encode())
    lineages: dict[str, Any] = {
        "long": {"entries": [{"attempt": i, "from_step": 0} for i in range(300_000)]},
        "types": {"entries": 5},
        "huge": {"entries": [{"attempt": 10**40, "from_step": -1}]},
    }
    for name, value in lineages.items():

        def change(run: Path, value: Any = value) -> None:
            from multi_gpu_training.safe_files import signed

            for copied in ("lineage.json", "lineage.copy.json"):
                (run / "checkpoints" / copied).write_text(json.dumps(signed(value)))

        yield f"lineage: {name}", change
    lock = {"pid": 2**70, "host": "\x1b[2J", "since": 5, "command": ["x"]}
    yield ".lock: types", text_as(".lock", json.dumps(lock).encode())
    for name in ("checkpoints", "events", "tensorboard"):

        def linked(run: Path, name: str = name) -> None:
            if (run / name).exists():
                (run / name).rename(run / f"{name}.away")
            (run / name).symlink_to(run.parents[2] / "outside")

        yield f"{name}: link to another folder", linked

        def filed(run: Path, name: str = name) -> None:
            if (run / name).exists():
                (run / name).rename(run / f"{name}.away")
            (run / name).write_text("x")

        yield f"{name}: a file", filed
    for name in (
        "step-00000099",
        "step-99999999999999999999",
        "step-",
        "step--1",
        "step-²",
        "step-1e9",
    ):
        yield (
            f"checkpoints: folder {name}",
            lambda run, name=name: (run / "checkpoints" / name).mkdir(),
        )
    yield "checkpoints: 20,000 folders", _many_folders
    yield (
        "best: link outside",
        lambda run: (
            (run / "checkpoints/best").unlink(missing_ok=True),
            (run / "checkpoints/best").symlink_to(run.parents[2] / "outside"),
        ),
    )  # type: ignore[func-returns-value]
    yield (
        "best: loop",
        lambda run: (
            (run / "checkpoints/best").unlink(missing_ok=True),
            (run / "checkpoints/best").symlink_to("best"),
        ),
    )  # type: ignore[func-returns-value]
    yield (
        "step: link outside",
        lambda run: (
            shutil.move(run / STEP, run.parents[2] / "moved"),
            (run / STEP).symlink_to(run.parents[2] / "moved"),
        ),
    )  # type: ignore[func-returns-value]
    for name in ("report.html", "metrics.png"):
        for kind in ("device", "fifo", "folder", "link outside"):
            yield f"{name}: {kind}", lambda run, name=name, kind=kind: KINDS[kind](run, name)


def _many_folders(run: Path) -> None:
    for number in range(20_000):
        (run / "checkpoints" / f"step-{number + 100:08d}").mkdir()


GROUPS = {"manifests": manifests, "events": events, "facts": facts, "any_file": any_file}


def hostile() -> dict[str, Change]:
    return {name: change for group in GROUPS.values() for name, change in group()}


def make_run(folder: Path) -> str:
    """A run that went back from step 8 to 4 and on to 6; returns the weights after 12 steps."""
    train(folder / "runs", 8)
    resume = str(folder / "runs/custom/it/checkpoints/step-00000004")
    train(folder / "runs", 6, resume=resume)
    return train(folder / "whole")


def tried(change: Change, made: Path, whole: str) -> list[str]:
    """Change a copy of the run, and say what goes wrong with the commands on it."""
    with tempfile.TemporaryDirectory(prefix="hostile-") as temporary:
        base = Path(temporary)
        (base / "outside").mkdir()
        (base / "outside" / "precious").write_text("precious")
        shutil.copytree(made / "runs", base / "runs", symlinks=True)
        change(base / "runs" / "custom" / "it")
        before = files_below(base / "outside")
        # All in one process: a fork costs more than most of the commands.
        ended = attempt(lambda: everything(base), base)
        found = ended.problems(must_fail=False)
        if "\x1b" in ended.said:
            found.append("lets control characters through to the terminal")
        if "weights" in ended.said and f"weights {whole}" not in ended.said:
            found.append(f"resumed to other weights: {ended.said[-200:]!r}")
        # A `checkpoints` or `events` folder may be a link of the user's own to a larger disk.
        linked = any((base / "runs/custom/it" / n).is_symlink() for n in ("checkpoints", "events"))
        if files_below(base / "outside") != before and not linked:
            found.append("wrote outside the run")
        return found


def everything(base: Path) -> None:
    """Each command in turn; only an error in words may end it."""
    run = "runs/custom/it"
    for words in (("report", run, "--json"), ("report", run, "--no-html"), ("checkpoints", run)):
        print("$", *words)
        try:
            mgt(*words)()
        except SystemExit as end:
            print("exit", end.code)
    print("$ resume")
    try:
        print("weights", resumed(base / "runs"))
    except SystemExit as end:
        print("exit", end.code)


def resumed(folder: Path) -> str:
    from multi_gpu_training.errors import MultiGPUError

    try:
        return train(folder)
    except MultiGPUError as error:
        print(error)
        sys.exit(error.exit_code)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="only folders whose name holds one of these")
    parser.add_argument("--part", default="", help="2/5: every fifth, from the second on")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    from wrong_invocations import warm_up

    wanted = [word for word in given.only.split(",") if word]
    bad: dict[str, list[str]] = {}
    count, begun = 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hostile-run-") as made:
        warm_up()
        whole = made_in_a_child(Path(made))
        part, parts = map(int, (given.part or "1/1").split("/"))
        for name, change in list(hostile().items())[part - 1 :: parts]:
            if wanted and not any(word in name for word in wanted):
                continue
            count += 1
            problems = tried(change, Path(made), whole)
            if problems:
                bad[name] = problems
            if problems or given.verbose:
                print(name, *(f"\n    {problem}" for problem in problems), flush=True)
    print(f"{count} hostile folders, {len(bad)} with problems, {time.monotonic() - begun:.0f} s")
    if given.out is not None:
        told = {"python": platform.python_version(), "folders": count, "bad": bad}
        given.out.write_text(json.dumps(told, indent=1) + "\n")
    return 1 if bad else 0


def made_in_a_child(folder: Path) -> str:
    """The run, made by a forked process: the parent must never train before it forks."""
    ended = attempt(lambda: print("whole", make_run(folder)), folder, 120.0)
    assert ended.code == 0, ended.said
    return ended.said.rpartition("whole ")[2].strip()


if __name__ == "__main__":
    sys.exit(main())
