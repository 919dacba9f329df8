"""Sharded streams over the real packages: pyarrow, webdataset, Hugging Face datasets."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from multi_gpu_training import MultiGPUError, ShardedStream
from multi_gpu_training.data.loader import Feeding
from multi_gpu_training.data.stream import StreamLoader

pytestmark = [
    pytest.mark.engines,
    pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning"),
    # webdataset leaves it to the garbage collector to close its files.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

LENGTHS = [7, 20, 1, 13, 2, 16]
IDS = [100 * shard + i for shard, length in enumerate(LENGTHS) for i in range(length)]


def flat(parts: Iterable[Iterable[Any]]) -> list[Any]:
    return [one for part in parts for one in part]


def number(sample: dict[str, Any]) -> int:
    return int(sample["number"]) if "number" in sample else int(sample["txt"])


def parquet_files(folder: Path) -> list[str]:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for shard, length in enumerate(LENGTHS):
        ids = pa.array(range(100 * shard, 100 * shard + length), pa.int64())
        table = pa.table({"number": ids, "other": ids})
        pq.write_table(table, folder / f"{shard}.parquet", row_group_size=4)
    return sorted(str(file) for file in folder.glob("*.parquet"))


def tar_files(folder: Path) -> list[str]:
    pytest.importorskip("webdataset")
    for shard, length in enumerate(LENGTHS):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for i in range(100 * shard, 100 * shard + length):
                for extension in ("txt", "cls"):
                    info = tarfile.TarInfo(f"folder.d/{i:04}.{extension}")
                    info.size = len(str(i))
                    archive.addfile(info, io.BytesIO(str(i).encode()))
    return sorted(str(file) for file in folder.glob("*.tar"))


def hugging_face(folder: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.load_dataset(
        "parquet",
        data_files=parquet_files(folder),
        split="train",
        streaming=True,
        cache_dir=str(folder / "cache"),
    )


def stream(kind: str, folder: Path, **options: Any) -> ShardedStream:
    if kind == "parquet":
        made = ShardedStream.from_parquet(
            parquet_files(folder), columns=["number"], decode=number, **options
        )
    elif kind == "webdataset":
        made = ShardedStream.from_webdataset(
            str(folder / "{0..5}.tar") if tar_files(folder) else "", decode=number, **options
        )
    else:
        made = ShardedStream.from_datasets(hugging_face(folder), decode=number, **options)
    made.settle(0, 1, lambda told: [told])
    return made


def read(stream: ShardedStream, ranks: int, workers: int = 0, start: int = 0) -> list[list[int]]:
    def part(rank: int) -> list[list[int]]:
        feeding = Feeding(
            8, 0, rank, ranks, num_workers=workers, prefetch_factor=2 if workers else None
        )
        ours = StreamLoader(stream, 8, feeding)
        ours.seek(0, start)
        return [batch.tolist() for batch in ours]

    return [flat(parts) for parts in zip(*(part(rank) for rank in range(ranks)), strict=True)]


@pytest.mark.parametrize("kind", ["parquet", "webdataset", "datasets"])
def test_every_source_has_one_order_on_any_number_of_ranks_and_workers(
    tmp_path: Path, kind: str
) -> None:
    reference = read(stream(kind, tmp_path, buffer=12), 1)
    assert sorted(flat(reference)) == IDS
    assert flat(reference) != IDS
    ours = stream(kind, tmp_path, buffer=12)
    if kind != "datasets":
        assert ours.lengths == LENGTHS  # from the headers alone
    assert read(ours, 2, workers=2) == reference
    assert read(ours, 3, start=3) == reference[3:]
    counted = stream(kind, tmp_path, buffer=12, count=True)
    assert counted.lengths == LENGTHS
    assert read(counted, 2, workers=2, start=2) == reference[2:]


@pytest.mark.parametrize("kind", ["parquet", "webdataset"])
def test_a_cut_off_file_is_named_or_skipped(tmp_path: Path, kind: str) -> None:
    stream(kind, tmp_path)
    bad = tmp_path / ("1.parquet" if kind == "parquet" else "1.tar")
    cut = bad.read_bytes()[:-20000] if kind == "webdataset" else bad.read_bytes()[:-30]
    files = sorted(str(file) for file in tmp_path.glob(f"*{bad.suffix}"))
    bad.write_bytes(cut)
    make = ShardedStream.from_parquet if kind == "parquet" else ShardedStream.from_webdataset
    with pytest.raises(MultiGPUError, match=rf"1 of 6 shards .*{bad.name} \(.*on_bad_shard='skip'"):
        make(files).settle(0, 1, lambda told: [told])
    left = make(files, decode=number, on_bad_shard="skip")
    left.settle(0, 1, lambda told: [told])
    assert sorted(flat(read(left, 2))) == [i for i in IDS if i // 100 != 1]
    missing = make([*files, str(tmp_path / "none.tar")])
    with pytest.raises(MultiGPUError, match="2 of 7 shards cannot be read"):
        missing.settle(0, 1, lambda told: [told])


def test_the_length_of_a_tar_file_counts_what_webdataset_gives(tmp_path: Path) -> None:
    pytest.importorskip("webdataset")
    names = ["._1.txt", "1.txt", "1.cls", "README", "__meta__", "__meta__.json", "a/._2.txt"]
    with tarfile.open(tmp_path / "mac.tar", "w") as archive:
        for name in [*names, "a/2.txt", "__all__/x.txt", "./3.txt", ".hidden"]:
            archive.addfile(tarfile.TarInfo(name))
    made = ShardedStream.from_webdataset(str(tmp_path / "mac.tar"), shuffle=False)
    made.settle(0, 1, lambda told: [told])
    found = [raw.value["__key__"] for raw in made.one_pass(0, 0, 1).all()]
    assert found == ["1", "__meta__", "a/", "a/2", "./3"]
    assert made.lengths == [5]


def test_a_parquet_file_without_a_wanted_column_is_named_before_training(tmp_path: Path) -> None:
    stream("parquet", tmp_path)
    wrong = ShardedStream.from_parquet(str(tmp_path / "*.parquet"), columns=["label"])
    with pytest.raises(MultiGPUError, match="it has no column 'label', only "):
        wrong.settle(0, 1, lambda told: [told])


def drawing(sample: dict[str, Any]) -> dict[str, Any]:
    return {"number": sample["number"] * 1000 + int(torch.randint(1000, ()))}


def test_hugging_face_streams_keep_map_and_filter_and_may_not_shuffle_themselves(
    tmp_path: Path,
) -> None:
    found = hugging_face(tmp_path).filter(lambda row: row["number"] % 2 == 0).map(drawing)
    first = read(ShardedStream.from_datasets(found, decode=number), 1)
    again = ShardedStream.from_datasets(found, decode=number, count=True)
    again.settle(0, 1, lambda told: [told])
    assert read(again, 2, workers=2) == first
    assert sorted(i // 1000 for i in flat(first)) == [i for i in IDS if i % 2 == 0]
    with pytest.raises(MultiGPUError, match=r"shuffled with \.shuffle\(\)"):
        ShardedStream.from_datasets(hugging_face(tmp_path).shuffle(seed=1, buffer_size=10))


def _plain_stream(folder: Path, seed: int | None) -> list[int]:
    from tiny import line, manager_for, sgd

    seen: list[int] = []

    def loss_fn(model: Any, batch: Any) -> Any:
        seen.extend(batch["number"].tolist())
        return model(batch["number"].float()[:, None].expand(-1, 4)).square().mean() * 1e-9

    rows = hugging_face(folder).select_columns(["number"]).shuffle(seed=seed, buffer_size=8)
    manager_for(folder).fit(line(), rows.with_format("torch"), loss_fn=loss_fn, optimizer=sgd)
    return seen


def test_a_plain_hugging_face_stream_shuffles_alike_on_every_rank_or_is_refused(
    tmp_path: Path,
) -> None:
    pytest.importorskip("datasets", reason="datasets of Hugging Face is not installed")
    from ranks import RankError, run_ranks

    assert sorted(flat(run_ranks(2, _plain_stream, tmp_path, 3))) == IDS
    with pytest.raises(RankError, match=r"without a seed draws another order"):
        run_ranks(2, _plain_stream, tmp_path, None)


def test_a_stateful_data_loader_gives_its_dataset(tmp_path: Path) -> None:
    loader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    from tiny import line, manager_for, sgd, squares

    ours = ShardedStream(range(4), _rows, lengths=[8] * 4)
    manager = manager_for(tmp_path, num_workers=0, batch_size=8)
    result = manager.fit(line(), loader(ours, batch_size=8), loss_fn=squares, optimizer=sgd)
    assert result.steps == 4


def _rows(shard: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.full((4,), float(shard)), torch.ones(1))] * 8
