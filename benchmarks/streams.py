"""Stop sharded streams anywhere, continue on other numbers of ranks: is a sample lost or repeated?

Each trial trains on 2 ranks x 2 workers, ends at a random step or by `kill -9` of everything at a
random instant, and continues from the checkpoint on 1 and, from a copy, on 3 ranks. The samples of
every step are compared with those of one undisturbed process.

    python benchmarks/streams.py --trials 20 --out benchmarks/streams.md

Sources whose package is missing are left out: pyarrow, webdataset, datasets.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager, ShardedStream

BATCH, STEPS, SHARDS = 12, 40, 13


def lengths(seed: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.choice([1, 2, 7, 20, 31, 45]) for _ in range(SHARDS - 1)] + [20]


def numbers(shard: tuple[int, int]) -> Iterator[int]:
    first, length = shard
    yield from range(first, first + length)


def sample(number: Any) -> tuple[Tensor, Tensor, int]:
    if isinstance(number, dict):  # a row, or the members of a tar file
        number = int(number["number"] if "number" in number else number["txt"])
    return torch.full((4,), number / 1e4), torch.ones(1), number


def make_files(kind: str, seed: int, folder: Path) -> None:
    for shard, length in enumerate(lengths(seed)):
        ids = range(1000 * shard, 1000 * shard + length)
        if kind in ("parquet", "datasets"):
            import pyarrow as pa
            import pyarrow.parquet as pq

            table = pa.table({"number": pa.array(ids, pa.int64())})
            pq.write_table(table, folder / f"{shard:03}.parquet", row_group_size=8)
        if kind == "webdataset":
            with tarfile.open(folder / f"{shard:03}.tar", "w") as archive:
                for number in ids:
                    info = tarfile.TarInfo(f"{number:06}.txt")
                    info.size = len(str(number))
                    archive.addfile(info, io.BytesIO(str(number).encode()))


def stream(kind: str, seed: int, folder: Path) -> ShardedStream:
    options: dict[str, Any] = {"decode": sample, "buffer": 60}
    if kind == "parquet":
        return ShardedStream.from_parquet(str(folder / "*.parquet"), **options)
    if kind == "webdataset":
        return ShardedStream.from_webdataset(str(folder / "*.tar"), **options)
    if kind == "datasets":
        import datasets

        files = sorted(str(file) for file in folder.glob("*.parquet"))
        found = datasets.load_dataset(
            "parquet", data_files=files, split="train", streaming=True, cache_dir=str(folder)
        )
        return ShardedStream.from_datasets(found, **options)
    known = lengths(seed)
    shards = [(1000 * shard, length) for shard, length in enumerate(known)]
    return ShardedStream(
        shards, numbers, lengths=known if kind == "known lengths" else None, **options
    )


def train(kind: str, seed: int, ranks: int, stop: int, folder: Path, seen: Path) -> None:
    """In every rank: train and note which samples each step had."""
    config = MultiGPUConfig(
        device="cpu",
        world_size=ranks,
        global_batch_size=BATCH,
        num_workers=2 if ranks == 2 else 1,
        prefetch_factor=2,
        max_steps=stop,
        epochs=100,
        seed=seed,
        checkpoint_frequency=3,
        save_dir=str(folder),
        run_name="run",
        resume="auto",
        tensorboard=False,
        progress="off",
        max_restarts=0,
    )
    manager = MultiGPUTrainingManager(config)
    seen.mkdir(exist_ok=True)
    rank = os.environ.get("RANK", "0")
    with (seen / f"{time.time_ns()}-{rank}.jsonl").open("w", buffering=1) as notes:

        def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
            step = manager.trainer.state.step
            print(json.dumps([int(rank), step, batch[2].tolist()]), file=notes)
            return nn.functional.mse_loss(model(batch[0]), batch[1])

        torch.manual_seed(0)
        manager.fit(nn.Linear(4, 1), stream(kind, seed, folder.parent), loss_fn=loss_fn)


def launch(arguments: list[str], kill_after: float | None = None) -> bool:
    """Start a training; False: it was killed."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--train", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        said, _ = process.communicate(timeout=kill_after)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        time.sleep(1)
        return False
    if process.returncode:
        raise RuntimeError(said.decode()[-3000:])
    return True


def order_of(seen: list[Path], samples: int) -> list[int]:
    """The samples of all steps; where a step was trained twice, those of the later launch. At the
    end of a pass of `samples`, ranks without a share compute a stand-in, which does not count."""
    steps: dict[int, dict[int, list[int]]] = {}
    for folder in seen:  # in the order of the launches
        launched: dict[int, dict[int, list[int]]] = {}
        for file in folder.glob("*.jsonl"):
            for row in file.read_text().splitlines():
                try:
                    rank, step, ids = json.loads(row)
                except ValueError:
                    continue  # the line that kill -9 cut
                launched.setdefault(step, {})[rank] = ids
        steps.update(launched)
    order: list[int] = []
    for step, ranks in sorted(steps.items()):
        place = BATCH * (step % -(-samples // BATCH))
        ids = [i for rank in sorted(ranks) for i in ranks[rank]]
        order += ids[: min(BATCH, samples - place)]
    return order


def trial(number: int, kind: str, folder: Path) -> dict[str, Any]:
    drawn = random.Random(number)
    make_files(kind, number, folder)
    alone = folder / "alone"
    alone.mkdir()
    launch([kind, str(number), "1", str(STEPS), str(alone), str(alone / "seen")])
    samples = sum(lengths(number))
    reference = order_of([alone / "seen"], samples)
    first = folder / "first"
    first.mkdir()
    stop = drawn.randrange(1, STEPS)
    killed = drawn.random() < 0.5
    after = drawn.uniform(6, 16) if killed else None
    arguments = [kind, str(number), "2", str(STEPS if killed else stop)]
    killed = not launch([*arguments, str(first), str(first / "seen")], after)
    result: dict[str, Any] = {"source": kind, "ended by": "kill -9" if killed else "its last step"}
    for ranks in (1, 3):
        copied = folder / f"on-{ranks}"
        shutil.copytree(first, copied)
        launch([kind, str(number), str(ranks), str(STEPS), str(copied), str(copied / "then")])
        order = order_of([copied / "seen", copied / "then"], samples)
        result[f"same on {ranks}"] = order == reference
        result[f"lost on {ranks}"] = len(set(reference) - set(order))
        result[f"repeated on {ranks}"] = len(order) - len(reference)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--train", nargs=6)
    options = parser.parse_args()
    if options.train:
        kind, seed, ranks, stop, folder, seen = options.train
        train(kind, int(seed), int(ranks), int(stop), Path(folder), Path(seen))
        return
    packages = {"parquet": "pyarrow", "webdataset": "webdataset", "datasets": "datasets"}
    kinds = ["known lengths", "unknown lengths"]
    kinds += [kind for kind, needed in packages.items() if importlib.util.find_spec(needed)]
    results = []
    for number in range(options.seed, options.seed + options.trials):
        with tempfile.TemporaryDirectory(prefix="mgt-streams-") as folder:
            results.append(trial(number, kinds[number % len(kinds)], Path(folder)))
        print(json.dumps(results[-1]), flush=True)
    lines = [
        f"{os.cpu_count()} cores, {platform.system()}, torch {torch.__version__}: "
        f"`python benchmarks/streams.py --trials {options.trials} --seed {options.seed}`",
        "",
        f"{STEPS} steps of {BATCH} samples from {SHARDS} uneven shards, shuffled; 2 ranks x 2 "
        "workers, stopped, then continued on 1 and on 3 ranks.",
        "",
        "| source | trials | ended by kill -9 | same order on 1 | on 3 | samples lost | repeated |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in kinds:
        rows = [row for row in results if row["source"] == kind]
        total = (
            {key: sum(row[key] for row in rows) for key in rows[0] if " on " in key} if rows else {}
        )
        if rows:
            lines.append(
                f"| {kind} | {len(rows)} | {sum(row['ended by'] == 'kill -9' for row in rows)} "
                f"| {total['same on 1']} | {total['same on 3']} "
                f"| {total['lost on 1'] + total['lost on 3']} "
                f"| {total['repeated on 1'] + total['repeated on 3']} |"
            )
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
