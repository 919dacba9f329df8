"""Why ranks do not see the samples that one rank sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.measure.batch_rows import row_hashes
from multi_gpu_training.planning.verify.conclusion import Diagnosis, name_ranks
from multi_gpu_training.planning.verify.mismatch import Mismatch
from multi_gpu_training.planning.verify.recorded_run import RankRecord, seen_by


def name_data_cause(one: RankRecord, ranks: Sequence[RankRecord], found: Mismatch) -> Diagnosis:
    """Why ranks do not see the samples that one rank sees."""
    mine, theirs = found.facts["mine"], found.facts["theirs"]
    own = any(micro is not None and not micro["window"] for micro in theirs)
    batch, alone = ranks[0].header["own_batch"], one.header["own_batch"]
    total, total_one = found.facts["total"], found.facts["total_one"]
    if total != total_one and ranks[0].header["total"] != one.header["total"] and not own:
        computed = (
            f"{ranks[0].header['total']} samples on {len(ranks)} ranks, and {one.header['total']} "
            "on one rank"
            if batch is None
            else f"{batch} samples for each of {len(ranks)} ranks, and {alone} for one rank alone"
        )
        return Diagnosis(
            [
                f"the global batch depends on the number of ranks: the script computes {computed}. "
                "Set global_batch_size to the same number everywhere: it is shared out to the last "
                "sample"
            ]
        )
    sizes = [rank.header["samples"] for rank in ranks]
    if any(size != one.header["samples"] for size in sizes):
        shown = ", ".join(str(size) for size in sizes)
        return Diagnosis(
            [
                f"data per rank: the dataset has {shown} samples on the ranks and "
                f"{one.header['samples']} on one rank. The script shards its data by rank; give "
                "the whole dataset everywhere, the loader shares out each batch"
            ]
        )
    if own:
        return _own_batches(one, ranks, found)
    there = [micro for micro in theirs if micro is not None]
    ahead = [
        rank
        for rank, micro in enumerate(theirs)
        if micro is not None and mine is not None and _place(micro) != _place(mine)
    ]
    if mine is not None and 0 < len(ahead) < len(there):
        return Diagnosis(
            [
                f"{name_ranks(ahead)} is at another place in the data than the others: it skips or "
                "repeats batches by itself, control flow that depends on the rank or on its own "
                "samples. Every rank must take every batch of its loader"
            ]
        )
    places = {(rank, place) for rank, place in (found.match.extra if found.match else [])}
    same_indices = mine is not None and sorted(mine["indices"]) == sorted(
        index for micro in theirs if micro is not None for index in micro["indices"]
    )
    if not same_indices:
        return Diagnosis(
            [
                "data per rank: the ranks do not draw the same batches from the dataset; a sampler "
                "or an order of the data depends on the rank or on the number of ranks"
            ]
        )
    guilty = sorted({rank for rank, _ in places})
    who = name_ranks(guilty)
    seen = seen_by(one)
    # One rank has these very samples, but at other places.
    elsewhere = sum(theirs[rank]["hashes"][place] in seen for rank, place in places)
    kind = _same_sample_changed(one, ranks, found)
    if 2 * elsewhere > len(places) or (elsewhere and kind == "other sample"):
        return Diagnosis(
            [
                f"data per rank: a sample's number means another sample on {who}. The script "
                "shards or shuffles its data by rank; give the same dataset in the same order "
                "everywhere, the loader shares out each batch"
            ]
        )
    if kind == "same sample":
        return Diagnosis(
            [
                f"a sample differs between {who} and one rank: its augmentation or noise "
                "depends on the rank, on its place in the process or on the others of its part (a "
                "generator per process, seeded by the rank or drawn from in the order of loading; "
                "statistics, random numbers or mixing in collate_fn). Draw from torch, numpy or "
                "random in __getitem__ without seeding them: they are seeded per sample"
            ]
        )
    changed = _changed_tensors(one, ranks, found)
    if changed is not None:
        return Diagnosis([changed])
    return Diagnosis(
        [
            f"data per rank: samples on {who} are not those of one rank, which does not have them "
            "at other places either. The data depend on the rank: they are sharded, generated, "
            "augmented or collated per process (a collate_fn sees a rank's part alone, and draws "
            "its own random numbers)"
        ]
    )


def _place(micro: dict[str, Any]) -> tuple[int, int]:
    return micro["epoch"], micro["position"]


def _same_sample_changed(
    one: RankRecord, ranks: Sequence[RankRecord], found: Mismatch
) -> str | None:
    """Whether strange samples are other ones, or the same ones with other values: whole numbers
    (labels) agree, and the rest points the same way."""
    mine = found.facts["mine"]
    rows = one.kept_rows(mine)
    if rows is None or found.match is None:
        return None
    places = {index: place for place, index in enumerate(mine["indices"])}
    labels, angles = [], []
    for rank, place in found.match.extra:
        micro = found.facts["theirs"][rank]
        other = ranks[rank].kept_rows(micro)
        if other is None or other.keys() != rows.keys():
            return None
        home = places.get(micro["indices"][place])
        if home is None:
            return None
        for path, leaf in rows.items():
            a, b = leaf[home], other[path][place]
            if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape:
                continue
            if a.is_floating_point():
                angles.append(_cosine(a, b))
            else:
                labels.append(bool(torch.equal(a, b)))
    if labels and not all(labels):
        return "other sample"
    if labels and len(labels) >= 4:
        return "same sample"
    if angles:
        middle = sorted(angles)[len(angles) // 2]
        return "same sample" if middle > 0.5 else "other sample" if middle < 0.3 else None
    return None


def _cosine(one: Tensor, other: Tensor) -> float:
    a, b = one.double().flatten(), other.double().flatten()
    return float(a @ b / (a.norm() * b.norm()).clamp_min(1e-30))


def _changed_tensors(one: RankRecord, ranks: Sequence[RankRecord], found: Mismatch) -> str | None:
    """Where the samples are the same but for some of their tensors: what happened to these."""
    mine = one.kept_rows(found.facts["mine"]) if found.facts["mine"] is not None else None
    theirs = [
        (rank, record.kept_rows(micro))
        for rank, (record, micro) in enumerate(zip(ranks, found.facts["theirs"], strict=True))
        if micro is not None
    ]
    if mine is None or any(rows is None or rows.keys() != mine.keys() for _, rows in theirs):
        return None
    count = len(next(iter(mine.values()), []))
    kept = {
        path: row_hashes({path: leaf}, count)
        for path, leaf in mine.items()
        if len(leaf) == count and isinstance(leaf[0], Tensor)
    }
    homes: dict[str, dict[str, int]] = {}  # per tensor that says which sample it is, its places
    for path, hashes in kept.items():
        got = [
            text
            for _, rows in theirs
            if rows is not None
            for text in row_hashes({path: rows[path]}, len(rows[path]))
        ]
        if sorted(got) == sorted(hashes):
            homes[path] = {text: place for place, text in enumerate(hashes)}
    telling = max(homes, key=lambda path: len(homes[path]), default=None)
    changed = [path for path in kept if path not in homes]
    if telling is None or len(homes[telling]) < count or not changed:
        return None
    path = changed[0]
    fits = []
    for _, rows in theirs:
        assert rows is not None
        own = row_hashes({telling: rows[telling]}, len(rows[telling]))
        before = [mine[path][homes[telling][text]] for text in own]
        fits.append(_affine(before, rows[path]))
    where = f"tensor {path.strip('.')} of the batch"
    if all(fits):
        return (
            f"{where} is scaled and shifted on each rank by statistics of its own part of the "
            "batch (normalised per rank), before it is handed to train_step: the same samples have "
            "other values on one rank. Normalise over all ranks, or before the data are shared out"
        )
    return (
        f"data per rank: the samples are the same but for {where}, which is drawn or computed by "
        "each rank for itself, from its own generator, number, order of a set or part of the batch"
    )


def _affine(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    """Whether one factor and one offset turn the first values into the second."""
    if not before or any(not t.is_floating_point() for t in before):
        return False
    x = torch.stack([t.double().flatten() for t in before]).flatten()
    y = torch.stack([t.double().flatten() for t in after]).flatten()
    if x.numel() != y.numel() or x.numel() < 4:
        return False
    x0, y0 = x - x.mean(), y - y.mean()
    left = y0 - x0 * (x0 @ y0) / (x0 @ x0).clamp_min(1e-30)
    return float(left.norm()) <= 1e-4 * max(float(y0.norm()), 1e-30)


def _own_batches(one: RankRecord, ranks: Sequence[RankRecord], found: Mismatch) -> Diagnosis:
    """The script hands its own batches to `train_step`."""
    total, alone = found.facts["total"], found.facts["total_one"]
    changed = _changed_tensors(one, ranks, found)
    if changed is not None:
        return Diagnosis([changed])
    seen = [seen_by(rank) for rank in ranks]
    common = sum((seen[0] & seen[1]).values())
    if common:
        return Diagnosis(
            [
                f"data per rank: rank 0 and rank 1 train on {common} samples in common, but not on "
                "the same batches: the script shuffles or draws its batches by rank. Iterate over "
                "the loader of setup_training, or cut the same batch into parts"
            ]
        )
    if total == alone * len(ranks):
        return Diagnosis(
            [
                "the script hands its own batches to train_step, and each rank brings as many "
                "samples as one rank does alone: data per rank, another training"
            ],
            f"a step sees {total} samples on {len(ranks)} ranks and {alone} on one, because every "
            "rank brings its own batches; use the loader of setup_training, or share out one batch",
        )
    return Diagnosis(
        [
            "data per rank: the batches that the script hands to train_step depend on the rank "
            f"({found.text})"
        ]
    )
