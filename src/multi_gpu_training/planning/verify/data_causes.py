"""Why ranks do not see the samples that one rank sees.

Each cause is one function, from what was recorded to a sentence, or None where it is not the
cause. `CAUSES` lists them in the order in which they are asked; the first answer counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.measure.batch_rows import row_hashes
from multi_gpu_training.planning.verify.conclusion import Diagnosis, first_cause, name_ranks
from multi_gpu_training.planning.verify.mismatch import Mismatch
from multi_gpu_training.planning.verify.recorded_run import RankRecord, seen_by


class DataEvidence:
    """A step in which the ranks have other samples than one rank.

    mine, theirs: the micro-batch on one rank and on each of several; None where there is none.
    total, total_one: samples of the step, over all ranks and on one.
    """

    def __init__(self, one: RankRecord, ranks: Sequence[RankRecord], found: Mismatch) -> None:
        self.one = one
        self.ranks = ranks
        self.found = found
        self.mine: dict[str, Any] | None = found.facts["mine"]
        self.theirs: list[dict[str, Any] | None] = found.facts["theirs"]
        self.total: int = found.facts["total"]
        self.total_one: int = found.facts["total_one"]

    @property
    def there(self) -> list[dict[str, Any]]:
        return [micro for micro in self.theirs if micro is not None]

    @property
    def own_batches(self) -> bool:
        """Whether the script hands its own batches to `train_step`: no loader has numbered them."""
        return any(not micro["window"] or not micro["indices"] for micro in self.there)

    @property
    def strange(self) -> list[tuple[int, int]]:
        """Samples that one rank does not have in this step: (rank, place in its micro-batch)."""
        return sorted(set(self.found.match.extra)) if self.found.match else []

    @property
    def guilty(self) -> str:
        return name_ranks(sorted({rank for rank, _ in self.strange}))

    @cached_property
    def elsewhere(self) -> int:
        """How many of the strange samples one rank has in another step."""
        seen = seen_by(self.one)
        return sum(self.theirs[rank]["hashes"][place] in seen for rank, place in self.strange)  # type: ignore[index]

    @cached_property
    def kind(self) -> str | None:
        return _same_sample_changed(self)

    @cached_property
    def changed(self) -> tuple[str, bool] | None:
        return _changed_tensor(self)


def name_data_cause(one: RankRecord, ranks: Sequence[RankRecord], found: Mismatch) -> Diagnosis:
    """Why ranks do not see the samples that one rank sees."""
    evidence = DataEvidence(one, ranks, found)
    cause = first_cause(CAUSES, evidence)
    return Diagnosis([cause] if cause else [], _why_not_comparable(evidence, cause))


# Causes


def batch_by_world(data: DataEvidence) -> str | None:
    one, ranks = data.one.header, data.ranks[0].header
    if data.own_batches or data.total == data.total_one or ranks["total"] == one["total"]:
        return None
    batch, alone = ranks["own_batch"], one["own_batch"]
    world = len(data.ranks)
    computed = (
        f"{ranks['total']} samples on {world} ranks, and {one['total']} on one rank"
        if batch is None
        else f"{batch} samples for each of {world} ranks, and {alone} for one rank alone"
    )
    return (
        f"the global batch depends on the number of ranks: the script computes {computed}. Set "
        "global_batch_size to the same number everywhere: it is shared out to the last sample"
    )


def dataset_sharded(data: DataEvidence) -> str | None:
    sizes = [rank.header["samples"] for rank in data.ranks]
    alone = data.one.header["samples"]
    if all(size == alone for size in sizes):
        return None
    by = "shards its data by rank" if len(set(sizes)) > 1 else "cuts its data by the ranks"
    return (
        f"data per rank: the dataset has {', '.join(map(str, sizes))} samples on the ranks and "
        f"{alone} on one rank. The script {by}; give the whole dataset everywhere, the loader "
        "shares out each batch"
    )


def own_batch_changed(data: DataEvidence) -> str | None:
    return first_cause(CHANGES, data) if data.own_batches else None


def loader_batches_cut(data: DataEvidence) -> str | None:
    if not data.own_batches or data.total == data.total_one:
        return None
    if not all(micro["changed"] for micro in data.there):
        return None
    return (
        "the script cuts or collects the batches that the loader gives it: together the ranks "
        f"train on {data.total} samples of a step, one rank alone on {data.total_one}. Each rank "
        "gets its part of the global batch, so how much is left must not depend on the size of a "
        "part or on the number of ranks: hand over whole batches, and set global_batch_size"
    )


def own_batches_drawn_by_rank(data: DataEvidence) -> str | None:
    if not data.own_batches:
        return None
    seen = [seen_by(rank) for rank in data.ranks]
    common = sum((seen[0] & seen[1]).values())
    if not common:
        return None
    return (
        f"data per rank: rank 0 and rank 1 train on {common} samples in common, but not on the "
        "same batches: the script shuffles or draws its batches by rank. Iterate over the loader "
        "of setup_training, or cut the same batch into parts"
    )


def own_batches_of_every_rank(data: DataEvidence) -> str | None:
    if not data.own_batches or data.total != data.total_one * len(data.ranks):
        return None
    return (
        "the script hands its own batches to train_step, and each rank brings as many samples as "
        "one rank does alone: data per rank, another training"
    )


def own_batches_by_rank(data: DataEvidence) -> str | None:
    if not data.own_batches:
        return None
    return (
        "data per rank: the batches that the script hands to train_step depend on the rank "
        f"({data.found.text})"
    )


def another_place(data: DataEvidence) -> str | None:
    if data.mine is None:
        return None
    place = _place(data.mine)
    ahead = [rank for rank, m in enumerate(data.theirs) if m is not None and _place(m) != place]
    if not 0 < len(ahead) < len(data.there):
        return None
    return (
        f"{name_ranks(ahead)} is at another place in the data than the others: it skips or "
        "repeats batches by itself, control flow that depends on the rank or on its own samples. "
        "Every rank must take every batch of its loader"
    )


def another_order(data: DataEvidence) -> str | None:
    drawn = sorted(index for micro in data.there for index in micro["indices"])
    if data.mine is not None and sorted(data.mine["indices"]) == drawn:
        return None
    return (
        "data per rank: the ranks do not draw the same batches from the dataset; a sampler or an "
        "order of the data depends on the rank or on the number of ranks"
    )


def numbers_mean_other_samples(data: DataEvidence) -> str | None:
    if not (
        2 * data.elsewhere > len(data.strange) or (data.elsewhere and data.kind == "other sample")
    ):
        return None
    return (
        f"data per rank: a sample's number means another sample on {data.guilty}. The script "
        "shards or shuffles its data by rank; give the same dataset in the same order everywhere, "
        "the loader shares out each batch"
    )


def sample_changed(data: DataEvidence) -> str | None:
    if data.kind != "same sample":
        return None
    return (
        f"a sample differs between {data.guilty} and one rank: its augmentation or noise depends "
        "on the rank, on its place in the process or on the others of its part (a generator per "
        "process, seeded by the rank or drawn from in the order of loading; hash() of a text; "
        "statistics, random numbers or mixing in collate_fn). Draw from torch, numpy or random in "
        "__getitem__ without seeding them: they are seeded per sample"
    )


def tensor_normalised_by_rank(data: DataEvidence) -> str | None:
    if data.changed is None or not data.changed[1]:
        return None
    return (
        f"{data.changed[0]} is scaled and shifted on each rank by statistics of its own part of "
        "the batch (normalised per rank), before it is handed to train_step: the same samples have "
        "other values on one rank. Normalise over all ranks, or before the data are shared out"
    )


def tensor_drawn_by_rank(data: DataEvidence) -> str | None:
    if data.changed is None:
        return None
    return (
        f"data per rank: the samples are the same but for {data.changed[0]}, which is drawn or "
        "computed by each rank for itself, from its own generator, number, order of a set or part "
        "of the batch"
    )


def samples_of_the_rank(data: DataEvidence) -> str | None:
    return (
        f"data per rank: samples on {data.guilty} are not those of one rank, which does not have "
        "them at other places either. The data depend on the rank: they are sharded, generated, "
        "augmented or collated per process (a collate_fn sees a rank's part alone, and draws its "
        "own random numbers)"
    )


CHANGES = (tensor_normalised_by_rank, tensor_drawn_by_rank)
CAUSES = (
    batch_by_world,
    dataset_sharded,
    own_batch_changed,
    loader_batches_cut,
    own_batches_drawn_by_rank,
    own_batches_of_every_rank,
    own_batches_by_rank,
    another_place,
    another_order,
    numbers_mean_other_samples,
    sample_changed,
    *CHANGES,
    samples_of_the_rank,
)


def _why_not_comparable(data: DataEvidence, cause: str | None) -> str | None:
    if cause is None or cause != own_batches_of_every_rank(data):
        return None
    return (
        f"a step sees {data.total} samples on {len(data.ranks)} ranks and {data.total_one} on one, "
        "because every rank brings its own batches; use the loader of setup_training, or share "
        "out one batch"
    )


# What happened to a sample


def _place(micro: dict[str, Any]) -> tuple[int, int]:
    return micro["epoch"], micro["position"]


def _same_sample_changed(data: DataEvidence) -> str | None:
    """Whether strange samples are other ones, or the same ones with other values: whole numbers
    (labels) agree, and the rest points the same way."""
    mine = data.mine
    rows = data.one.kept_rows(mine) if mine is not None else None
    if mine is None or rows is None:
        return None
    places = {index: place for place, index in enumerate(mine["indices"])}
    labels, angles = [], []
    for rank, place in data.strange:
        micro = data.theirs[rank]
        assert micro is not None
        other = data.ranks[rank].kept_rows(micro)
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


def _changed_tensor(data: DataEvidence) -> tuple[str, bool] | None:
    """Where the samples are the same but for some of their tensors: the first of these, and
    whether every rank scaled and shifted it."""
    mine = data.one.kept_rows(data.mine) if data.mine is not None else None
    theirs = [
        (rank, record.kept_rows(micro))
        for rank, (record, micro) in enumerate(zip(data.ranks, data.theirs, strict=True))
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
    return f"tensor {path.strip('.')} of the batch", all(fits)


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
