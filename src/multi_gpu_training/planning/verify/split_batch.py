"""One micro-batch, computed by one rank as a whole and in the parts that the ranks had.

Where a part gives another loss or gradient than its rank had, the model or the loss depends on the
rank. Where parts agree and do not add up to the whole, the split itself changes the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from multi_gpu_training.measure.tensor_sketch import (
    Sketches,
    combined,
    furthest,
    ratio,
    total_norm,
)
from multi_gpu_training.planning.verify.conclusion import batchnorm_cause, differing, name_ranks
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

    @property
    def world(self) -> int:
        return len(self.theirs)

    def loss_cause(self) -> str | None:
        """Why a rank's loss is not what one rank computes for the same samples."""
        probe, header = self.probe, self.alone.header
        if differs(probe["whole"]["loss"], probe["again"], self.tolerance):
            return (
                "the loss gives another number when it is called again with the same weights "
                "and samples: it draws from its own generator in each process, or keeps "
                "state beside parameters and buffers; ranks cannot have the same"
            )
        synced = bool(header["batchnorm"]) and header["sync_bn"]
        if not synced and len(self.micros) == len(probe["parts"]):
            return self._loss_of_ranks()
        mine = step_loss([self.mine])
        if synced and mine:
            return self._world_factor(step_loss(self.theirs) / mine)
        return None

    def _loss_of_ranks(self) -> str | None:
        """Each rank's loss beside what one rank computes for the same samples and weights."""
        parts, micros = self.probe["parts"], self.micros
        both = list(zip(parts, micros, strict=True))
        off = [
            rank
            for rank, (part, micro) in enumerate(both)
            if differs(part["loss"], micro["loss"], self.tolerance)
        ]
        if not off:
            return self._weights_of_ranks(both)
        if self.found.stage == "grads":
            return (
                "the loss exchanges something between the ranks: together they have the loss of "
                "one rank, but not its gradients. What is gathered from other ranks carries no "
                "gradient (use torch.distributed.nn.functional.all_gather), or in-batch pairs are "
                "counted on one side only"
            )
        whole = [micro["shapes"] for micro in self.mine["micros"]]
        padded = [rank for rank in off if micros[rank]["shapes"] not in whole]
        if padded:
            return (
                "the loss is not weighted: the collate_fn pads the samples of "
                f"{name_ranks(padded)} to another length than those of the whole batch, and the "
                "loss counts the padding. Average over what is not padding, and return its number "
                "as the weight"
            )
        total = sum(part["loss"] for part in parts)
        if all(not differs(micro["loss"], total, self.tolerance) for micro in micros):
            return (
                "the loss is added up over the ranks: every rank returns the sum of all ranks' "
                "losses, as all_reduce leaves it in place of a rank's own. Return the mean over "
                "the rank's own samples; what is logged is averaged over ranks already"
            )
        factors = [
            micro["loss"] / part["loss"] if part["loss"] else math.nan
            for part, micro in zip(parts, micros, strict=True)
        ]
        counts = [micro["count"] for micro in micros]
        shares = [count * len(counts) / sum(counts) for count in counts]
        if all(abs(f - share) < 1e-6 for f, share in zip(factors, shares, strict=True)):
            return (
                "the loss is weighted wrongly: it is multiplied by the rank's share of the "
                "samples, which the trainer does already. Return the mean over the rank's own "
                "samples"
            )
        if max(factors) - min(factors) <= 1e-4 * abs(factors[0]):
            return self._world_factor(factors[0]) or (
                f"the loss of every rank is {factors[0]:.4g} times what one rank computes for the "
                "same samples: it is scaled by something that depends on the number of ranks"
            )
        rank = off[0]
        return (
            f"rank {rank} computes a loss of {micros[rank]['loss']:.6g} where one rank computes "
            f"{parts[rank]['loss']:.6g} for the same samples and weights"
            + (
                f", while rank {next(r for r in range(len(parts)) if r not in off)} agrees: the "
                "model or the loss depends on the rank (control flow, a generator or a state of "
                "each process)"
                if len(off) < len(parts)
                else ": the model or the loss depends on the rank or on the number of ranks "
                "(control flow, a generator or a state of each process)"
            )
        )

    def _weights_of_ranks(self, both: list[tuple[dict[str, Any], dict[str, Any]]]) -> str | None:
        """The same for the weights that the loss function returns."""
        for rank, (part, micro) in enumerate(both):
            mine, theirs = part["weight"], micro["weight"]
            if (mine is None) != (theirs is None) or (
                mine is not None and differs(mine, theirs, self.tolerance)
            ):
                return (
                    f"the loss is weighted wrongly: rank {rank} returns the weight {theirs}, "
                    f"where one rank returns {mine} for the same samples; the weight depends on "
                    "the rank or on the number of ranks"
                )
        return None

    def _world_factor(self, factor: float) -> str | None:
        if abs(factor * self.world - 1) < 1e-3:
            return (
                "the loss is divided by the number of ranks (world size); the trainer averages "
                "over ranks already: return the mean over the rank's own samples"
            )
        if abs(factor / self.world - 1) < 1e-3:
            return (
                "the loss is multiplied by the number of ranks (world size); the trainer weighs "
                "the ranks already: return the mean over the rank's own samples"
            )
        return None

    def split_cause(self) -> str | None:
        """Ranks compute what one rank computes for each part: the split itself changes it."""
        mixing = self.probe["mixing"]
        if mixing is not None:
            if mixing["batchnorm"]:
                return batchnorm_cause([mixing["name"]])
            place = f", in the forward of {mixing['class']}" if mixing["before"] else ""
            before = f" before {mixing['before']}" if mixing["before"] else ""
            apart, buffer = furthest(self.mine["buffers"], self.theirs[0]["buffers"], FLOOR)
            follows = (
                f"; buffer {buffer} is not synchronised either, it follows one rank's samples"
                if apart > self.tolerance
                else ""
            )
            return (
                f"{mixing['name']} ({mixing['class']}) mixes the samples of a batch{place}{before}"
                ": a sample's output depends on which others are on the same rank (statistics over "
                f"the batch, or pairs in it){follows}"
            )
        structure = self.probe.get("structure", "unknown")
        given = any(micro["weight"] is not None for micro in self.micros)
        if structure == "mean" and not given and not self._losses_add_up():
            structure = "statistics"  # small blocks looked like a mean: the hardest one of each
        if self.probe.get("batchnorm_beside"):
            return (
                "BatchNorm in a module beside the trained model (a teacher, a network in the loss) "
                "is in training mode, and normalises each rank's part alone. Call .eval() on that "
                "module, or make it part of the model and set sync_bn=true"
            )
        if structure == "part sum":
            return (
                "a part of the loss is a sum over the samples, not a mean: its size depends on how "
                "many of them a rank holds. Take the mean of every part"
            )
        if structure == "sum":
            return (
                "the loss is a sum over the samples, not a mean: its size depends on how many of "
                "them a rank holds. Return the mean (reduction='mean')"
            )
        if structure == "mean" and given:
            return (
                "the loss is weighted wrongly: it is a mean over samples, but the weight that "
                "it returns is not their number. Return the loss alone, or what the mean was "
                "divided by"
            )
        if structure == "weighted":
            what = "returns another weight than it divides by" if given else "returns no weight"
            return (
                "the loss is not weighted: it is a mean over something other than samples (tokens, "
                f"class weights, masked places) and {what}, so that ranks with few of them count "
                "too much. Let loss_fn return (mean_loss, weight), the weight being what the mean "
                "was divided by"
            )
        if structure == "root":
            return (
                "the loss is a mean of means: it is the root of a mean over the batch, and "
                "averaging it over the ranks is not the same as computing it over all their samples"
            )
        if structure == "statistics":
            return (
                "the loss is computed over the batch as a whole (statistics, ratios of sums, a "
                "mean of means, the hardest of in-batch pairs): averaged over the ranks' parts it "
                "becomes a mean of means, which is not the loss of all their samples"
            )
        if structure == "pairs":
            return (
                "the loss compares the samples of a batch with each other (in-batch pairs): a rank "
                "sees only the pairs within its own part. Gather the outputs of all ranks first"
            )
        if structure == "unknown":
            return (
                "the loss of a batch is not the mean of the losses of its parts: it is not "
                "weighted by what it is a mean of, or the samples of a batch meet in it (in-batch "
                "pairs, statistics over the batch)"
            )
        return None

    def _losses_add_up(self) -> bool:
        """Whether the loss of the batch is the mean of those of the ranks' parts, by samples."""
        counts = [micro["count"] for micro in self.micros]
        losses = [part["loss"] for part in self.probe["parts"]]
        if len(counts) != len(losses):
            return True
        mean = sum(n * loss for n, loss in zip(counts, losses, strict=True)) / sum(counts)
        return not differs(self.probe["whole"]["loss"], mean, self.tolerance)

    def gradient_cause(self) -> str | None:
        """The losses agree, the gradients do not: what happened between the two?"""
        mine, theirs, probe, micros = self.mine, self.theirs, self.probe, self.micros
        if self.found.ranks_differ:
            return (
                f"the ranks end with different gradients ({self.found.name}): they were computed "
                "or changed past the wrapper, which exchanges only what the trainer's backward "
                "gives (a model called past it, its own backward or hook)"
            )
        if len(mine["micros"]) > 1:
            return self._scaled_gradient()
        one, many = mine["grads"], theirs[0]["grads"]
        whole = probe["whole"]["grads"]
        weights = [m["count"] if m["weight"] is None else m["weight"] for m in micros]
        parts = [part["grads"] for part in probe["parts"]]
        limit = 1e-6 if self.double else 1e-2
        split = _weighted(weights, parts)
        alone = ratio(whole, one, limit)
        if math.isnan(alone) and not math.isnan(ratio(whole, split, limit)):
            return (
                "gradients come from more than the loss: even on one rank they are not those of "
                "the loss that was returned, and several ranks have others. Another backward adds "
                "to them past the wrapper, which does not exchange them (a model called past it, "
                "gradients left by other code)"
            )
        if math.isnan(ratio(whole, split, limit)) and not math.isnan(ratio(split, many, limit)):
            return _nonlinear(probe, self.tolerance)
        header = self.alone.header
        if abs(alone - 1) > 1e-3 and header["max_grad_norm"] is None:
            lengths = [total_norm(line["grads"]) for line in self.alone.steps if "grads" in line]
            if max(lengths) - min(lengths) <= 1e-3 * max(lengths):
                return _CLIPPED  # one rank's gradient has the same length in every step
            return _CHANGED
        return (
            self._scaled_gradient()
            or _shares_of_ranks(parts, many, weights)
            or self._scaled_tensors(one, many, limit)
            or _changed_by_tensor(parts, many)
            or self._backward_of_ranks(one, many, abs(ratio(whole, split, limit) - 1) <= limit)
        )

    def _scaled_tensors(self, one: Sketches, many: Sketches, limit: float) -> str | None:
        """Whether some tensors' gradients are right but for one factor."""
        names = differing(one, many, limit)
        factors = [ratio({name: one[name]}, {name: many[name]}, limit) for name in names]
        if not names or any(abs(f - factors[0]) > 1e-3 * abs(factors[0]) for f in factors):
            return None
        for factor, done in ((1 / self.world, "divided"), (self.world, "multiplied")):
            if abs(factors[0] - factor) < 1e-3 * factor:
                return (
                    f"the gradient of {', '.join(names[:3])} is {done} by the number of ranks "
                    "(world size) in backward, by a hook or an autograd function"
                )
        if math.isnan(factors[0]):
            return None
        return (
            f"the gradient of {', '.join(names[:3])} is {factors[0]:.4g} times that of one rank: a "
            "hook or an autograd function scales it by something that depends on the rank or on "
            "the number of ranks"
        )

    def _backward_of_ranks(self, one: Sketches, many: Sketches, adds_up: bool) -> str | None:
        """One rank's gradients of the parts add up to those of the batch; the ranks' do not."""
        if not adds_up:
            return None
        names = differing(one, many, self.tolerance)
        return (
            f"the gradient of {', '.join(names[:3])} depends on the rank or on the number of "
            "ranks: losses agree, and on one rank the gradients of the parts add up to those of "
            "the batch. A gradient hook, a callback or an autograd function uses the rank, the "
            "number of ranks (world size) or a generator of each process"
        )

    def _scaled_gradient(self) -> str | None:
        limit = 1e-6 if self.double else 1e-2
        factor = ratio(self.mine["grads"], self.theirs[0]["grads"], limit)
        if math.isnan(factor):
            return None
        if abs(factor * self.world - 1) < 1e-3:
            return (
                "the gradients are divided by the number of ranks (world size) once more than the "
                "trainer does"
            )
        if abs(factor / self.world - 1) < 1e-3:
            return "the gradients are added over the ranks instead of averaged"
        return (
            f"the gradients are {factor:.4g} times those of one rank: they are scaled by something "
            "that depends on the number of ranks or on a rank's part of the batch"
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


def _nonlinear(probe: dict[str, Any], tolerance: float) -> str:
    """The mean of the parts' gradients is not the gradient of the whole, though losses add up."""
    every = [probe["whole"], *probe["parts"]]
    largest = [part["largest"] for part in every]
    norms = [
        [part["grads"][name][0] for part in every if name in part["grads"]]
        for name in probe["whole"]["grads"]
    ]
    total = [math.sqrt(sum(found[0] ** 2 for found in part["grads"].values())) for part in every]

    def equal(values: Sequence[float]) -> bool:
        return max(values) - min(values) <= max(tolerance, 1e-9) * max(values) and max(values) > 0

    clipped = equal(largest) or equal(total) or any(equal(values) for values in norms)
    return _CLIPPED if clipped else _CHANGED


_CLIPPED = (
    "gradients are clipped per rank, before they are averaged: clipping the mean is not the mean "
    "of clipped parts. Set max_grad_norm, which clips the whole gradient"
)
_CHANGED = (
    "gradients are changed per rank before they are averaged, and not in proportion (a hook that "
    "clips, normalises or selects): the mean of changed parts is not the changed mean. Do it after "
    "the exchange, in on_optimizer, or set max_grad_norm"
)


def _shares_of_ranks(
    parts: Sequence[Sketches], many: Sketches, weights: Sequence[float]
) -> str | None:
    """With which factors the ranks' gradients were added up, where they were."""
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


def _changed_by_tensor(parts: Sequence[Sketches], many: Sketches) -> str | None:
    """Whether every tensor is some sum of the ranks' gradients, each with its own factors."""
    names = set.intersection(*(set(part) for part in parts)) & set(many)
    for name in names:
        matrix = np.array([part[name][1:] for part in parts]).T
        target = np.array(many[name][1:])
        factors, *_ = np.linalg.lstsq(matrix, target, rcond=None)
        if np.linalg.norm(matrix @ factors - target) > 1e-5 * np.linalg.norm(target):
            return None
    return _CHANGED if names else None
