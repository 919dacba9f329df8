"""One micro-batch, computed by one rank as a whole and in the parts that the ranks had.

Where a part gives another loss or gradient than its rank had, the model or the loss depends on the
rank. Where parts agree and do not add up to the whole, the split itself changes the result.

Each cause is one function, from a `SplitBatch` to a sentence, or None where it is not the cause.
`LOSS_CAUSES`, `SPLIT_CAUSES` and `GRADIENT_CAUSES` list them in the order in which they are asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from multi_gpu_training.measure.tensor_sketch import (
    Sketches,
    combined,
    furthest,
    ratio,
    total_norm,
)
from multi_gpu_training.planning.verify.conclusion import (
    batchnorm_cause,
    differing,
    first_cause,
    name_ranks,
)
from multi_gpu_training.planning.verify.mismatch import FLOOR, Mismatch, differs, step_loss
from multi_gpu_training.planning.verify.recorded_run import RankRecord


@dataclass
class SplitBatch:
    """probe: what one rank computed. micros: what each rank that had samples recorded.
    mine, theirs: the whole step, on one rank and on each of several."""

    probe: dict[str, Any]
    micros: list[dict[str, Any]]
    mine: dict[str, Any]
    theirs: list[dict[str, Any]]
    found: Mismatch
    alone: RankRecord
    double: bool
    tolerance: float

    def loss_cause(self) -> str | None:
        """Why a rank's loss is not what one rank computes for the same samples."""
        return first_cause(LOSS_CAUSES, self)

    def split_cause(self) -> str | None:
        """Ranks compute what one rank computes for each part: the split itself changes it."""
        return first_cause(SPLIT_CAUSES, self)

    def gradient_cause(self) -> str | None:
        """The losses agree, the gradients do not: what happened between the two?"""
        causes = GRADIENT_CAUSES if len(self.mine["micros"]) == 1 else STEP_GRADIENT_CAUSES
        return first_cause(causes, self)

    @property
    def world(self) -> int:
        return len(self.theirs)

    @property
    def synced(self) -> bool:
        """With BatchNorm synchronised, a part alone does not give what its rank had."""
        return bool(self.alone.header["batchnorm"]) and self.alone.header["sync_bn"]

    @property
    def by_rank(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """What one rank computes for each part, beside what the rank that has it recorded."""
        parts = self.probe["parts"]
        if self.synced or len(self.micros) != len(parts):
            return []
        return list(zip(parts, self.micros, strict=True))

    @cached_property
    def off(self) -> list[int]:
        """The ranks whose loss is not what one rank computes for the same samples."""
        return [
            rank
            for rank, (part, micro) in enumerate(self.by_rank)
            if differs(part["loss"], micro["loss"], self.tolerance)
        ]

    @property
    def factors(self) -> list[float]:
        """How many times its part's loss each rank has."""
        return [
            micro["loss"] / part["loss"] if part["loss"] else math.nan
            for part, micro in self.by_rank
        ]

    @property
    def given(self) -> bool:
        """Whether the loss function returns a weight."""
        return any(micro["weight"] is not None for micro in self.micros)

    @cached_property
    def structure(self) -> str:
        """How the loss of a batch follows from those of its parts; "" where the model mixes."""
        if self.probe["mixing"] is not None:
            return ""
        structure: str = self.probe.get("structure", "unknown")
        if structure == "mean" and not self.given and not self._losses_add_up():
            return "statistics"  # small blocks looked like a mean: the hardest one of each
        return structure

    def _losses_add_up(self) -> bool:
        """Whether the loss of the batch is the mean of those of the ranks' parts, by samples."""
        counts = [micro["count"] for micro in self.micros]
        losses = [part["loss"] for part in self.probe["parts"]]
        if len(counts) != len(losses):
            return True
        mean = sum(n * loss for n, loss in zip(counts, losses, strict=True)) / sum(counts)
        return not differs(self.probe["whole"]["loss"], mean, self.tolerance)

    # Gradients: of one rank (one), of the ranks together (many), of the batch and its parts

    @property
    def limit(self) -> float:
        return 1e-6 if self.double else 1e-2

    @property
    def one(self) -> Sketches:
        grads: Sketches = self.mine["grads"]
        return grads

    @property
    def many(self) -> Sketches:
        grads: Sketches = self.theirs[0]["grads"]
        return grads

    @property
    def whole(self) -> Sketches:
        grads: Sketches = self.probe["whole"]["grads"]
        return grads

    @property
    def parts(self) -> list[Sketches]:
        return [part["grads"] for part in self.probe["parts"]]

    @property
    def weights(self) -> list[float]:
        return [m["count"] if m["weight"] is None else m["weight"] for m in self.micros]

    @cached_property
    def whole_by_split(self) -> float:
        """The gradient of the batch over the mean of its parts'; NaN if not in proportion."""
        return ratio(self.whole, _weighted(self.weights, self.parts), self.limit)

    @cached_property
    def step_by_whole(self) -> float:
        """The same for what one rank's step used, over the gradient of the loss alone."""
        return ratio(self.whole, self.one, self.limit)


# A rank's loss is not what one rank computes for the same samples


def unrepeatable(split: SplitBatch) -> str | None:
    if not differs(split.probe["whole"]["loss"], split.probe["again"], split.tolerance):
        return None
    return (
        "the loss gives another number when it is called again with the same weights and samples: "
        "it draws from its own generator in each process, or keeps state beside parameters and "
        "buffers; ranks cannot have the same"
    )


def not_finite(split: SplitBatch) -> str | None:
    bad = [rank for rank, micro in enumerate(split.micros) if not math.isfinite(micro["loss"])]
    if not bad or not math.isfinite(split.probe["whole"]["loss"]):
        return None
    counts = ", ".join(str(split.micros[rank]["count"]) for rank in bad)
    return (
        f"the loss on {name_ranks(bad)} is NaN or infinite, for {counts} samples, and the loss of "
        "the whole batch is a number: the loss or the model takes a deviation, a ratio or a "
        "maximum over samples that a part may not have. Compute it per sample, or return a loss "
        "of zero and a weight of zero where nothing counts"
    )


def gathered_without_gradient(split: SplitBatch) -> str | None:
    if not split.off or split.found.stage != "grads":
        return None
    return (
        "the loss exchanges something between the ranks: together they have the loss of one rank, "
        "but not its gradients. What is gathered from other ranks carries no gradient (use "
        "torch.distributed.nn.functional.all_gather), or in-batch pairs are counted on one side "
        "only"
    )


def padding_counted(split: SplitBatch) -> str | None:
    whole = [micro["shapes"] for micro in split.mine["micros"]]
    padded = [rank for rank in split.off if split.micros[rank]["shapes"] not in whole]
    if not padded:
        return None
    return (
        f"the loss is not weighted: the collate_fn pads the samples of {name_ranks(padded)} to "
        "another length than those of the whole batch, and the loss counts the padding. Average "
        "over what is not padding, and return its number as the weight"
    )


def summed_over_ranks(split: SplitBatch) -> str | None:
    total = sum(part["loss"] for part, _ in split.by_rank)
    if not split.off or any(differs(m["loss"], total, split.tolerance) for m in split.micros):
        return None
    return (
        "the loss is added up over the ranks: every rank returns the sum of all ranks' losses, as "
        "all_reduce leaves it in place of a rank's own. Return the mean over the rank's own "
        "samples; what is logged is averaged over ranks already"
    )


def weighted_twice(split: SplitBatch) -> str | None:
    counts = [micro["count"] for micro in split.micros]
    shares = [count * len(counts) / sum(counts) for count in counts]
    pairs = list(zip(split.factors, shares, strict=False))
    if not split.off or any(not abs(factor - share) < 1e-6 for factor, share in pairs):
        return None
    return (
        "the loss is weighted wrongly: it is multiplied by the rank's share of the samples, which "
        "the trainer does already. Return the mean over the rank's own samples"
    )


def scaled_alike(split: SplitBatch) -> str | None:
    factors = split.factors
    if not split.off or not max(factors) - min(factors) <= 1e-4 * abs(factors[0]):
        return None
    return _world_factor(factors[0], split.world) or (
        f"the loss of every rank is {factors[0]:.4g} times what one rank computes for the same "
        "samples: it is scaled by something that depends on the number of ranks"
    )


def loss_of_the_rank(split: SplitBatch) -> str | None:
    if not split.off:
        return None
    rank = split.off[0]
    part, micro = split.by_rank[rank]
    agree = [other for other in range(len(split.by_rank)) if other not in split.off]
    return (
        f"rank {rank} computes a loss of {micro['loss']:.6g} where one rank computes "
        f"{part['loss']:.6g} for the same samples and weights"
        + (
            f", while rank {agree[0]} agrees: the model or the loss depends on the rank (control "
            "flow, a generator or a state of each process)"
            if agree
            else ": the model or the loss depends on the rank or on the number of ranks (control "
            "flow, a generator or a state of each process)"
        )
    )


def weight_of_the_rank(split: SplitBatch) -> str | None:
    factors = []
    for rank, (part, micro) in enumerate(split.by_rank):
        mine, theirs = part["weight"], micro["weight"]
        if mine == theirs:  # or neither returns one
            factors += [1.0] if mine else []
            continue
        factors.append(theirs / mine if mine and theirs is not None else math.nan)
        # One factor for all, such as the number of ranks, leaves the mean over the ranks as it is.
        if differs(factors[0], factors[-1], split.tolerance) or math.isnan(factors[-1]):
            return (
                f"the loss is weighted wrongly: rank {rank} returns the weight {theirs}, where one "
                f"rank returns {mine} for the same samples; the weight depends on the rank or on "
                "the number of ranks"
            )
    return None


def scaled_beside_synced_batchnorm(split: SplitBatch) -> str | None:
    mine = step_loss([split.mine])
    if not split.synced or not mine:
        return None
    return _world_factor(step_loss(split.theirs) / mine, split.world)


LOSS_CAUSES = (
    unrepeatable,
    not_finite,
    gathered_without_gradient,
    padding_counted,
    summed_over_ranks,
    weighted_twice,
    scaled_alike,
    loss_of_the_rank,
    weight_of_the_rank,
    scaled_beside_synced_batchnorm,
)


def _world_factor(factor: float, world: int) -> str | None:
    if abs(factor * world - 1) < 1e-3:
        return (
            "the loss is divided by the number of ranks (world size); the trainer averages over "
            "ranks already: return the mean over the rank's own samples"
        )
    if abs(factor / world - 1) < 1e-3:
        return (
            "the loss is multiplied by the number of ranks (world size); the trainer weighs the "
            "ranks already: return the mean over the rank's own samples"
        )
    return None


# The split itself changes the loss


def module_mixes(split: SplitBatch) -> str | None:
    mixing = split.probe["mixing"]
    if mixing is None:
        return None
    if mixing["batchnorm"]:
        return batchnorm_cause([mixing["name"]])
    place = f", in the forward of {mixing['class']}" if mixing["before"] else ""
    before = f" before {mixing['before']}" if mixing["before"] else ""
    apart, buffer = furthest(split.mine["buffers"], split.theirs[0]["buffers"], FLOOR)
    follows = (
        f"; buffer {buffer} is not synchronised either, it follows one rank's samples"
        if apart > split.tolerance
        else ""
    )
    return (
        f"{mixing['name']} ({mixing['class']}) mixes the samples of a batch{place}{before}: a "
        "sample's output depends on which others are on the same rank (statistics over the batch, "
        f"or pairs in it){follows}"
    )


def batchnorm_beside(split: SplitBatch) -> str | None:
    if not split.probe.get("batchnorm_beside"):
        return None
    return (
        "BatchNorm in a module beside the trained model (a teacher, a network in the loss) is in "
        "training mode, and normalises each rank's part alone. Call .eval() on that module, or "
        "make it part of the model and set sync_bn=true"
    )


def wrong_weight(split: SplitBatch) -> str | None:
    if split.structure != "mean" or not split.given:
        return None
    return (
        "the loss is weighted wrongly: it is a mean over samples, but the weight that it returns "
        "is not their number. Return the loss alone, or what the mean was divided by"
    )


def without_its_weight(split: SplitBatch) -> str | None:
    if split.structure != "weighted":
        return None
    what = "returns another weight than it divides by" if split.given else "returns no weight"
    return (
        "the loss is not weighted: it is a mean over something other than samples (tokens, class "
        f"weights, masked places) and {what}, so that ranks with few of them count too much. Let "
        "loss_fn return (mean_loss, weight), the weight being what the mean was divided by"
    )


# What a batch's loss is of those of its parts (measure/split_probe.py), and what that means.
STRUCTURES = {
    "part sum": "a part of the loss is a sum over the samples, not a mean: its size depends on how "
    "many of them a rank holds. Take the mean of every part",
    "sum": "the loss is a sum over the samples, not a mean: its size depends on how many of them a "
    "rank holds. Return the mean (reduction='mean')",
    "root": "the loss is a mean of means: it is the root of a mean over the batch, and averaging "
    "it over the ranks is not the same as computing it over all their samples",
    "statistics": "the loss is computed over the batch as a whole (statistics, ratios of sums, a "
    "mean of means, the hardest of in-batch pairs): averaged over the ranks' parts it becomes a "
    "mean of means, which is not the loss of all their samples",
    "pairs": "the loss compares the samples of a batch with each other (in-batch pairs): a rank "
    "sees only the pairs within its own part. Gather the outputs of all ranks first",
    "unknown": "the loss of a batch is not the mean of the losses of its parts: it is not weighted "
    "by what it is a mean of, or the samples of a batch meet in it (in-batch pairs, statistics "
    "over the batch)",
}


def not_a_mean(split: SplitBatch) -> str | None:
    return STRUCTURES.get(split.structure)


SPLIT_CAUSES = (module_mixes, batchnorm_beside, wrong_weight, without_its_weight, not_a_mean)


# The losses agree, the gradients do not

_CLIPPED = (
    "gradients are clipped per rank, before they are averaged: clipping the mean is not the mean "
    "of clipped parts. Set max_grad_norm, which clips the whole gradient"
)
_CHANGED = (
    "gradients are changed per rank before they are averaged, and not in proportion (a hook that "
    "clips, normalises or selects): the mean of changed parts is not the changed mean. Do it after "
    "the exchange, in on_optimizer, or set max_grad_norm"
)


def not_exchanged(split: SplitBatch) -> str | None:
    if not split.found.ranks_differ:
        return None
    return (
        f"the ranks end with different gradients ({split.found.name}): they were computed or "
        "changed past the wrapper, which exchanges only what the trainer's backward gives (a model "
        "called past it, its own backward or hook)"
    )


def not_of_the_loss(split: SplitBatch) -> str | None:
    if not math.isnan(split.step_by_whole) or math.isnan(split.whole_by_split):
        return None
    return (
        "gradients come from more than the loss: even on one rank they are not those of the loss "
        "that was returned, and several ranks have others. Another backward adds to them past the "
        "wrapper, which does not exchange them (a model called past it, gradients left by other "
        "code)"
    )


def changed_in_backward(split: SplitBatch) -> str | None:
    """The mean of the parts' gradients is what the ranks have, and not that of the batch."""
    by_ranks = ratio(_weighted(split.weights, split.parts), split.many, split.limit)
    if not math.isnan(split.whole_by_split) or math.isnan(by_ranks):
        return None
    every = [split.probe["whole"], *split.probe["parts"]]
    largest = [part["largest"] for part in every]
    norms = [
        [part["grads"][name][0] for part in every if name in part["grads"]] for name in split.whole
    ]
    total = [math.sqrt(sum(found[0] ** 2 for found in part["grads"].values())) for part in every]

    def equal(values: Sequence[float]) -> bool:
        limit = max(split.tolerance, 1e-9)
        return max(values) - min(values) <= limit * max(values) and max(values) > 0

    clipped = equal(largest) or equal(total) or any(equal(values) for values in norms)
    return _CLIPPED if clipped else _CHANGED


def changed_on_one_rank_too(split: SplitBatch) -> str | None:
    if not abs(split.step_by_whole - 1) > 1e-3 or split.alone.header["max_grad_norm"] is not None:
        return None
    lengths = [total_norm(line["grads"]) for line in split.alone.steps if "grads" in line]
    # One rank's gradient has the same length in every step.
    return _CLIPPED if max(lengths) - min(lengths) <= 1e-3 * max(lengths) else _CHANGED


def scaled_gradient(split: SplitBatch) -> str | None:
    factor = ratio(split.one, split.many, split.limit)
    if math.isnan(factor):
        return None
    if abs(factor * split.world - 1) < 1e-3:
        return (
            "the gradients are divided by the number of ranks (world size), or multiplied by a "
            "rank's share of the batch, once more than the trainer does"
        )
    if abs(factor / split.world - 1) < 1e-3:
        return "the gradients are added over the ranks instead of averaged"
    return (
        f"the gradients are {factor:.4g} times those of one rank: they are scaled by something "
        "that depends on the number of ranks or on a rank's part of the batch"
    )


def shares_of_ranks(split: SplitBatch) -> str | None:
    """With which factors the ranks' gradients were added up, where they were."""
    parts, many, weights = split.parts, split.many, split.weights
    names = sorted(set.intersection(*(set(part) for part in parts)) & set(many))
    if not names:
        return None
    matrix = np.array([[v for name in names for v in part[name][1:]] for part in parts]).T
    target = np.array([v for name in names for v in many[name][1:]])
    factors, *_ = np.linalg.lstsq(matrix, target, rcond=None)
    if np.linalg.norm(matrix @ factors - target) > 1e-5 * np.linalg.norm(target):
        return None
    lengths = [math.sqrt(sum(part[name][0] ** 2 for name in names)) for part in parts]
    after = [f * n * sum(weights) / w for f, n, w in zip(factors, lengths, weights, strict=True)]
    for same in (after, lengths):  # before the ranks' shares came to it, or after
        if len(same) > 1 and max(same) - min(same) <= 1e-3 * max(same):
            # Each rank's gradient had the same length when it was averaged.
            return _CLIPPED
    shown = ", ".join(f"{factor:.3g}" for factor in factors)
    right = ", ".join(f"{weight / sum(weights):.3g}" for weight in weights)
    if any(abs(factor) < 1e-6 for factor in factors):
        who = [rank for rank, factor in enumerate(factors) if abs(factor) < 1e-6]
        return f"the gradient of {name_ranks(who)} is missing: its model is called past the wrapper"
    return (
        f"the loss is not weighted by the ranks' shares: their gradients count {shown}, by their "
        f"samples they should count {right}"
    )


def scaled_tensors(split: SplitBatch) -> str | None:
    """Whether some tensors' gradients are right but for one factor."""
    one, many, limit = split.one, split.many, split.limit
    names = differing(one, many, limit)
    factors = [ratio({name: one[name]}, {name: many[name]}, limit) for name in names]
    if not names or any(abs(f - factors[0]) > 1e-3 * abs(factors[0]) for f in factors):
        return None
    for factor, done in ((1 / split.world, "divided"), (split.world, "multiplied")):
        if abs(factors[0] - factor) < 1e-3 * factor:
            return (
                f"the gradient of {', '.join(names[:3])} is {done} by the number of ranks (world "
                "size) in backward, by a hook or an autograd function"
            )
    if math.isnan(factors[0]):
        return None
    return (
        f"the gradient of {', '.join(names[:3])} is {factors[0]:.4g} times that of one rank: a "
        "hook or an autograd function scales it by something that depends on the rank or on the "
        "number of ranks"
    )


def changed_by_tensor(split: SplitBatch) -> str | None:
    """Whether every tensor is some sum of the ranks' gradients, each with its own factors."""
    parts, many = split.parts, split.many
    names = set.intersection(*(set(part) for part in parts)) & set(many)
    for name in names:
        matrix = np.array([part[name][1:] for part in parts]).T
        target = np.array(many[name][1:])
        factors, *_ = np.linalg.lstsq(matrix, target, rcond=None)
        if np.linalg.norm(matrix @ factors - target) > 1e-5 * np.linalg.norm(target):
            return None
    return _CHANGED if names else None


def backward_of_ranks(split: SplitBatch) -> str | None:
    """One rank's gradients of the parts add up to those of the batch; the ranks' do not."""
    if not abs(split.whole_by_split - 1) <= split.limit:
        return None
    names = differing(split.one, split.many, split.tolerance)
    return (
        f"the gradient of {', '.join(names[:3])} depends on the rank or on the number of ranks: "
        "losses agree, and on one rank the gradients of the parts add up to those of the batch. A "
        "gradient hook, a callback or an autograd function uses the rank, the number of ranks "
        "(world size) or a generator of each process"
    )


STEP_GRADIENT_CAUSES = (not_exchanged, scaled_gradient)  # of several micro-batches
GRADIENT_CAUSES = (
    not_exchanged,
    not_of_the_loss,
    changed_in_backward,
    changed_on_one_rank_too,
    scaled_gradient,
    shares_of_ranks,
    scaled_tensors,
    changed_by_tensor,
    backward_of_ranks,
)


def _weighted(weights: Sequence[float], parts: Sequence[Sketches]) -> Sketches:
    total = sum(weights) or 1.0
    names = {name for part in parts for name in part}
    return {
        name: combined(
            (weight / total, part[name])
            for weight, part in zip(weights, parts, strict=True)
            if name in part
        )
        for name in names
    }
