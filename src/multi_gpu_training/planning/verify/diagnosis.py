"""Name the cause of a difference from where it first stands and from what was recorded there.

Nothing is guessed from a script's text. Each cause follows from numbers: which samples a rank
got, what one rank computes for the same samples from the same weights, how a loss behaves when
its batch is split.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multi_gpu_training.measure.batch_rows import row_hashes
from multi_gpu_training.measure.tensor_sketch import (
    Sketches,
    combined,
    difference,
    furthest,
    ratio,
    total_norm,
)
from multi_gpu_training.planning.verify.mismatch import (
    FLOOR,
    Mismatch,
    compare_runs,
    differs,
    step_loss,
)
from multi_gpu_training.planning.verify.recorded_run import (
    Conditions,
    RankRecord,
    RecordedRun,
    match_rows,
    seen_by,
)

Run = Callable[..., RecordedRun]


@dataclass
class Diagnosis:
    """causes: what makes the difference. not_comparable: why that is no fault of the script."""

    causes: list[str] = field(default_factory=list)
    not_comparable: str | None = None


def diagnose(
    run: Run, one: RecordedRun, many: RecordedRun, found: Mismatch, conditions: Conditions
) -> Diagnosis:
    """Say why `many` differs from `one`, where it first does. May train the script again."""
    return _Examination(run, one, many, found, conditions).conclude()


class _Examination:
    def __init__(
        self,
        run: Run,
        one: RecordedRun,
        many: RecordedRun,
        found: Mismatch,
        conditions: Conditions,
    ) -> None:
        self.run = run
        self.one = one
        self.many = many
        self.found = found
        self.conditions = conditions
        self.tolerance = 1e-7 if conditions.double else 1e-3

    @property
    def alone(self) -> RankRecord:
        return self.one.managers[self.found.manager][0]

    @property
    def ranks(self) -> list[RankRecord]:
        return self.many.managers[self.found.manager]

    @property
    def world(self) -> int:
        return self.many.ranks

    def _last_lines(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The last step that both one rank and rank 0 of several have finished."""
        place = min(len(self.alone.steps), len(self.ranks[0].steps)) - 1
        return self.alone.steps[place], self.ranks[0].steps[place]

    def lines(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The step of the difference, on one rank and on each of several."""
        place = self.found.step - 1
        return self.alone.steps[place], [rank.steps[place] for rank in self.ranks]

    def conclude(self) -> Diagnosis:
        stage = self.found.stage
        if stage == "failed":
            return Diagnosis([failure_cause(self.many.error, self.world)])
        if stage == "metrics":
            return self._metrics()
        if stage in ("loss", "grads"):
            return self._computed()
        unrepeatable = self._unrepeatable()
        if unrepeatable is not None:
            return unrepeatable
        how = {
            "start": self._start,
            "data": self._data,
            "settings": self._settings,
            "buffers": self._buffers,
            "length": self._length,
            "train_metrics": self._train_metrics,
        }.get(stage, self._changed)
        return how()

    def _train(self, ranks: int, conditions: Conditions) -> RecordedRun:
        return self.run(ranks, conditions, steps=self.one.asked)

    # One rank again

    def _unrepeatable(self, probe: dict[str, Any] | None = None) -> Diagnosis | None:
        """One rank once more: what differs from itself cannot be compared with anything."""
        again = self.run(1, self.conditions, probe=probe, steps=self.one.asked)
        self.again = again
        if again.steps == 0 and again.probe is None:
            return None
        repeated = compare_runs(_up_to(self.one, again), again).mismatch
        if repeated is None or repeated.stage in ("length", "failed", "metrics"):
            return None  # a probe ends early
        where = {
            "start": "its first weights differ; call torch.manual_seed before the model is built",
            "data": "its samples differ: they come from a generator that is not seeded, or seeded "
            "by the process or the time",
        }.get(
            repeated.stage,
            "randomness that is not seeded (or seeded by the process or the time), or kernels "
            "without a deterministic variant",
        )
        return Diagnosis(
            [
                "one rank alone gives another result when it is run again "
                f"({repeated.text}): {where}"
            ],
            "the script does not repeat itself, so that there is nothing to compare with",
        )

    # Causes by stage

    def _start(self) -> Diagnosis:
        return Diagnosis(
            [
                f"the model starts with other weights on {self.world} ranks ({self.found.name}): "
                "its seed depends on the rank or on the number of ranks; call torch.manual_seed "
                "with the same number everywhere before the model is built"
            ]
        )

    def _data(self) -> Diagnosis:
        return name_data_cause(self.alone, self.ranks, self.found)

    def _settings(self) -> Diagnosis:
        facts, header = self.found.facts, self.alone.header
        key, mine, theirs = facts["key"], facts["one"], facts["many"]
        numbers = all(isinstance(v, (int, float)) and v for v in (mine, theirs))
        factor = theirs / mine if numbers else math.nan
        # A schedule that counts otherwise may begin with this factor, but does not keep it.
        last = [line["settings"][0].get(key) for line in self._last_lines()]
        kept = numbers and all(last) and abs(last[1] / last[0] - factor) < 1e-4 * abs(factor)
        at_once = self.found.step == 1 and not self.found.ranks_differ and kept
        by_world = (
            key == "lr"
            and at_once
            and any(
                abs(factor - want) < 1e-4 * want for want in (self.world, math.sqrt(self.world))
            )
        )
        if by_world:
            rule = header["lr_scaling"]
            twice = (
                f"twice: lr_scaling={rule} scales it for the batch already"
                if rule != "none"
                else "although the global batch is the same; where batches grow with the ranks, "
                "lr_scaling does this"
            )
            cause = (
                f"the rate is scaled by the number of ranks: {theirs:g} on {self.world} ranks, "
                f"{mine:g} on one, {twice}. Give the rate of one rank"
            )
            grows = rule == "none" and not self.one.settings.get("global_batch_size")
            return Diagnosis(
                [cause],
                "with batch_size per rank a step grows with the ranks, and the script scales its "
                "rate for that; here the global batch is kept"
                if grows
                else None,
            )
        if self.found.ranks_differ:
            return Diagnosis(
                [
                    f"{self.found.name} is set by each rank for itself ({self.found.text}): a "
                    "schedule or callback that follows a rank's own loss or number"
                ]
            )
        return Diagnosis(
            [
                f"{self.found.name} depends on the number of ranks: {self.found.text}; a schedule "
                "that counts samples, batches or epochs of one rank, or a setting computed from "
                "the number of ranks"
            ]
        )

    def _buffers(self) -> Diagnosis:
        name, header = self.found.name, self.alone.header
        module = name.rpartition(".")[0]
        if module in header["batchnorm"] and not header["sync_bn"]:
            return Diagnosis([_batchnorm([module])])
        mine, theirs = self.lines()
        others = _differing(mine["buffers"], theirs[0]["buffers"], self.tolerance)
        names = ", ".join([name, *(other for other in others if other != name)])
        return Diagnosis(
            [
                f"buffer {names} is not synchronised: it follows the samples of one rank (its part "
                "of the batch), not the global batch. Average it over the ranks, or compute it "
                "from the weights"
            ]
        )

    def _length(self) -> Diagnosis:
        if self.found.ranks_differ:
            who = _ranks(self.found.ranks_differ)
            return Diagnosis(
                [
                    f"{who} stops or skips steps by itself: control flow that depends on the rank "
                    "or on its own loss (an early stop, a break or a skipped batch on one rank). "
                    "Decide on rank 0, or from a number that all ranks share"
                ]
            )
        return Diagnosis(
            [
                "the number of steps depends on the number of ranks: the script counts or cuts "
                "its batches per rank"
            ]
        )

    def _train_metrics(self) -> Diagnosis:
        return Diagnosis(
            [
                f"losses and weights agree, the metric {self.found.name} does not: it is a mean of "
                "means (a mean over a rank's samples that counts as one, whatever their number), "
                "or it depends on the rank. Return it as (sum, count)"
            ]
        )

    def _changed(self) -> Diagnosis:
        """A parameter changes where it should not, or moves otherwise from equal gradients."""
        found = self.found
        when = {
            "between": "between two steps, outside the trainer",
            "forward": "during the forward or backward",
            "optimizer": "in the optimizer's step",
            "move": "in the optimizer's step",
            "callback": "after the step, in a callback",
        }[found.stage]
        if found.ranks_differ:
            return Diagnosis(
                [
                    f"parameter {found.name} is changed {when} on {_ranks(found.ranks_differ)} "
                    "otherwise than on rank 0: change weights on every rank alike, and let the "
                    "trainer move them"
                ]
            )
        if found.stage in ("optimizer", "move"):
            return Diagnosis(
                [
                    f"the optimizer moves {found.name} otherwise from the same gradients and "
                    "settings: its step depends on the number of ranks"
                ]
            )
        return Diagnosis(
            [
                f"parameter {found.name} is changed {when}, by an amount that depends on the "
                "number of ranks or on one rank's samples"
            ]
        )

    # Losses and gradients

    def _computed(self) -> Diagnosis:
        """Split one rank's batch as the ranks did, and compare what each part gives."""
        mine, theirs = self.lines()
        number = self._splittable(mine, theirs)
        micro = mine["micros"][number]
        parts = [
            rank["micros"][number] if len(rank["micros"]) > number else None for rank in theirs
        ]
        match = match_rows(self.alone, self.ranks, micro, parts)
        whole = not match.same  # every rank has the whole batch
        rows = [list(range(micro["count"])) for _ in parts] if whole else match.parts
        probe = {"step": self.found.step, "micro": number, "parts": rows}
        unrepeatable = self._unrepeatable(probe)
        if unrepeatable is not None:
            return unrepeatable
        noisy = self._noise(mine, theirs)
        if noisy is not None:
            return noisy
        found = self.again.probe
        if found is None or "error" in found:
            why = self.again.error if found is None else found["error"]
            return Diagnosis(
                [self._unexplained(f"the batch could not be split on one rank: {why}")]
            )
        return self._from_probe(found, [p for p in parts if p is not None], theirs, number)

    def _splittable(self, mine: dict[str, Any], theirs: list[dict[str, Any]]) -> int:
        """A micro-batch of which several ranks have a part."""
        count: int = len(mine["micros"])
        order: list[int] = [self.found.micro, *range(count)]
        held = [
            number
            for number in order
            if number < count and sum(len(rank["micros"]) > number for rank in theirs) > 1
        ]
        return held[0] if held else 0

    def _noise(self, mine: dict[str, Any], theirs: list[dict[str, Any]]) -> Diagnosis | None:
        """Whether the difference goes away with noise that belongs to samples."""
        drew = sorted(
            {name for line in (mine, *theirs) for m in line["micros"] for name in m["drew"]}
        )
        if not drew or self.conditions.sample_noise:
            return None
        other = Conditions(**{**vars(self.conditions), "sample_noise": True})
        one, many = self._train(1, other), self._train(self.world, other)
        if one.failure is not None or many.failure is not None:
            return None
        left = compare_runs(one, many).mismatch
        cause = (
            f"the model or the loss draws random numbers in training ({', '.join(drew)}: dropout, "
            "noise, sampling); every rank draws its own, so that results agree only on average"
        )
        if left is None:
            agrees = "; with numbers that belong to samples instead of ranks everything agrees"
            return Diagnosis([cause + agrees], cause)
        if left.stage in ("loss", "grads") and left.step == self.found.step:
            outside = [name for name in drew if name not in ("torch", "torch.cuda")]
            if outside:
                return Diagnosis(
                    [
                        f"the model or the loss draws from {', '.join(outside)}, a generator of "
                        "each process: ranks draw other numbers than one rank does. Draw with "
                        "torch, or from a generator that is the same everywhere"
                    ]
                )
        further = diagnose(self.run, one, many, left, other)
        return Diagnosis(further.causes, further.not_comparable)

    def _from_probe(
        self,
        probe: dict[str, Any],
        micros: list[dict[str, Any]],
        theirs: list[dict[str, Any]],
        number: int,
    ) -> Diagnosis:
        header = self.alone.header
        whole, parts = probe["whole"], probe["parts"]
        if differs(whole["loss"], probe["again"], self.tolerance):
            return Diagnosis(
                [
                    "the loss gives another number when it is called again with the same weights "
                    "and samples: it draws from a generator of its own in each process, or keeps "
                    "state beside parameters and buffers; ranks cannot have the same"
                ]
            )
        synced = bool(header["batchnorm"]) and header["sync_bn"]
        micros = [micro for micro in micros if micro["count"]]
        if not synced and len(micros) == len(parts):
            by_rank = self._loss_of_ranks(parts, micros)
            if by_rank is not None:
                return Diagnosis([by_rank])
        mine = step_loss([self.lines()[0]])
        if synced and mine:
            scaled = self._world_factor(step_loss(theirs) / mine)
            if scaled:
                return Diagnosis([scaled])
        if self.found.stage == "loss" or probe.get("mixing"):
            split = self._split_cause(probe, [micro["weight"] for micro in micros])
            if split is not None:
                return self._confirmed(split, probe)
        return Diagnosis([self._gradient_cause(probe, micros, theirs, number)])

    def _loss_of_ranks(
        self, parts: list[dict[str, Any]], micros: list[dict[str, Any]]
    ) -> str | None:
        """Each rank's loss beside what one rank computes for the same samples and weights."""
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
        factors = [
            micro["loss"] / part["loss"] if part["loss"] else math.nan
            for part, micro in zip(parts, micros, strict=True)
        ]
        counts = [micro["count"] for micro in micros]
        shares = [count * len(counts) / sum(counts) for count in counts]
        if all(abs(f - share) < 1e-6 for f, share in zip(factors, shares, strict=True)):
            return (
                "the loss is not weighted rightly: it is multiplied by the rank's share of the "
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
                    f"the loss is not weighted rightly: rank {rank} returns the weight {theirs}, "
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

    def _split_cause(self, probe: dict[str, Any], weights: list[float | None]) -> str | None:
        """Ranks compute what one rank computes for each part: the split itself changes it."""
        mixing = probe["mixing"]
        if mixing is not None:
            if mixing["batchnorm"]:
                return _batchnorm([mixing["name"]])
            place = f", in the forward of {mixing['class']}" if mixing["before"] else ""
            before = f" before {mixing['before']}" if mixing["before"] else ""
            mine, theirs = self.lines()
            apart, buffer = furthest(mine["buffers"], theirs[0]["buffers"], FLOOR)
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
        structure = probe.get("structure", "unknown")
        given = any(weight is not None for weight in weights)
        if structure == "sum":
            return (
                "the loss is a sum over the samples, not a mean: its size depends on how many of "
                "them a rank holds. Return the mean (reduction='mean')"
            )
        if structure == "mean" and given:
            return (
                "the loss is not weighted rightly: it is a mean over samples, but the weight that "
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

    def _confirmed(self, cause: str, probe: dict[str, Any]) -> Diagnosis:
        """For BatchNorm, train again with it synchronised: there may be more than one cause."""
        mixing = probe["mixing"]
        if mixing is None or not mixing["batchnorm"] or self.conditions.sync_bn:
            return Diagnosis([cause])
        synced = Conditions(**{**vars(self.conditions), "sync_bn": True})
        many = self._train(self.world, synced)
        left = compare_runs(self.one, many)
        if left.passed:
            return Diagnosis([f"{cause} (with it the results agree)"])
        assert left.mismatch is not None
        if many.failure is not None or left.mismatch.stage in ("failed", "metrics"):
            return Diagnosis([cause])
        further = diagnose(self.run, self.one, many, left.mismatch, synced)
        return Diagnosis([cause, *further.causes])

    def _gradient_cause(
        self,
        probe: dict[str, Any],
        micros: list[dict[str, Any]],
        theirs: list[dict[str, Any]],
        number: int,
    ) -> str:
        """The losses agree, the gradients do not: what happened between the two?"""
        mine, _ = self.lines()
        if self.found.ranks_differ:
            return (
                f"the ranks end with different gradients ({self.found.name}): they were computed "
                "or changed past the wrapper, which exchanges only what the trainer's backward "
                "gives (a model called past it, a backward or a hook of its own)"
            )
        if len(mine["micros"]) > 1:
            return self._scaled_gradient(mine, theirs) or self._unexplained()
        one, many = mine["grads"], theirs[0]["grads"]
        whole = probe["whole"]["grads"]
        weights = [m["count"] if m["weight"] is None else m["weight"] for m in micros]
        parts = [part["grads"] for part in probe["parts"]]
        limit = 1e-6 if self.conditions.double else 1e-2
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
            self._scaled_gradient(mine, theirs)
            or _shares_of_ranks(parts, many, weights)
            or self._scaled_tensors(one, many, limit)
            or _changed_by_tensor(parts, many)
            or self._backward_of_ranks(one, many, abs(ratio(whole, split, limit) - 1) <= limit)
            or self._unexplained()
        )

    def _scaled_tensors(self, one: Sketches, many: Sketches, limit: float) -> str | None:
        """Whether some tensors' gradients are right but for one factor."""
        names = _differing(one, many, limit)
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
        names = _differing(one, many, self.tolerance)
        return (
            f"the gradient of {', '.join(names[:3])} depends on the rank or on the number of "
            "ranks: losses agree, and on one rank the gradients of the parts add up to those of "
            "the batch. A gradient hook, a callback or an autograd function uses the rank, the "
            "number of ranks (world size) or a generator of each process"
        )

    def _scaled_gradient(self, mine: dict[str, Any], theirs: list[dict[str, Any]]) -> str | None:
        factor = ratio(mine["grads"], theirs[0]["grads"], 1e-6 if self.conditions.double else 1e-2)
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

    def _unexplained(self, why: str = "") -> str:
        return (
            f"not found; the first difference is in step {self.found.step}: {self.found.text}. "
            "Look for code that depends on the rank" + (f" ({why})" if why else "")
        )

    # Validation

    def _metrics(self) -> Diagnosis:
        key = self.found.facts.get("key")
        if key is None:
            return Diagnosis([self.found.text])
        header = self.alone.header
        differing = []
        if self.alone.steps and self.ranks[0].steps:
            mine, theirs = self.alone.steps[-1], self.ranks[0].steps[-1]
            differing = _differing(mine["buffers"], theirs["buffers"], 1e-6)
        if differing:
            return Diagnosis([f"buffer {', '.join(differing)} is not synchronised"])
        return Diagnosis(
            [
                f"weights and buffers agree, the metric {key} does not: it is a mean of means (a "
                "mean per batch or per rank, which counts a small batch as much as a large one), "
                "or it depends on the rank. In eval_fn add sums and weights, for example "
                "metrics.add_mean(mean, count)"
                + ("" if header["broadcast_buffers"] else "; buffers are not broadcast")
            ]
        )


def _differing(one: Sketches, other: Sketches, tolerance: float) -> list[str]:
    return [
        name
        for name in one
        if name in other
        and not difference(one[name], other[name]) <= tolerance * max(one[name][0], 1e-12)
    ]


def _up_to(one: RecordedRun, again: RecordedRun) -> RecordedRun:
    """One rank's record as far as a run got that may have ended in the middle of a step."""
    managers = []
    for (record, *_), (other, *_) in zip(one.managers, again.managers, strict=False):
        steps = record.steps[: len(other.steps)]
        if steps and len(other.steps) == len(steps):
            steps = [*steps[:-1], {**steps[-1]}]
            steps[-1]["micros"] = steps[-1]["micros"][: len(other.steps[-1]["micros"])]
        managers.append([replace(record, steps=steps)])
    return replace(one, managers=managers)


def _batchnorm(names: Sequence[str]) -> str:
    return f"BatchNorm ({', '.join(names[:3])}) normalises each rank's part alone; set sync_bn=true"


def _ranks(numbers: Sequence[int]) -> str:
    several = ", ".join(str(number) for number in numbers)
    return f"rank {several}" if len(numbers) == 1 else f"ranks {several}"


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
    if len(after) > 1 and max(after) - min(after) <= 1e-3 * max(after):
        # Each rank's gradient had the same length when it was averaged.
        return _CLIPPED
    shown = ", ".join(f"{factor:.3g}" for factor in factors)
    right = ", ".join(f"{weight / sum(weights):.3g}" for weight in weights)
    if any(abs(factor) < 1e-6 for factor in factors):
        who = [rank for rank, factor in enumerate(factors) if abs(factor) < 1e-6]
        return f"the gradient of {_ranks(who)} is missing: its model is called past the wrapper"
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


def failure_cause(error: str, world: int) -> str:
    """What an error that only several ranks raise says about the script."""
    if "This run cannot start:" in error:
        # The check before training has named it already.
        lines = error.partition("This run cannot start:")[2].strip().splitlines()
        return lines[0].removeprefix("-").strip()
    if "expects same model across all ranks" in error:
        return (
            "the parameters that are trained depend on the rank: another part of the model is "
            "frozen (requires_grad), or another model is built"
        )
    if "outside the trainer" in error:
        return (
            "the model is trained past the wrapper: the script calls backward and optimizer.step() "
            "itself, where ranks do not exchange gradients; use manager.trainer.train_step(batch)"
        )
    if "marked as ready twice" in error:
        return (
            "gradients are computed past the wrapper: another backward runs in the middle of the "
            "trainer's own, for which ranks exchange nothing; add its loss to the one that loss_fn "
            "returns"
        )
    if "by peer" in error:
        return (
            "a rank has left while the others went on: control flow that depends on the rank or on "
            "its own loss (an early stop, a break, an exit). Decide from a number that all ranks "
            "share"
        )
    if "hang" in error.lower() or "not done after" in error or "waiting" in error.lower():
        return (
            "the ranks wait for each other for ever: control flow that depends on the rank (an "
            "early stop, a break, a collective call on one rank only)"
        )
    if re.search(r"not finite|NaN|the loss is (-?inf|nan)", error):
        return f"a loss or gradient is NaN or infinite on {world} ranks, and finite on one"
    return (
        f"the script fails on {world} ranks and not on one: code that depends on the rank, or on "
        "how many samples a rank has"
    )


# Data


def name_data_cause(one: RankRecord, ranks: Sequence[RankRecord], found: Mismatch) -> Diagnosis:
    """Why ranks do not see the samples that one rank sees."""
    mine, theirs = found.facts["mine"], found.facts["theirs"]
    own = any(micro is not None and not micro["window"] for micro in theirs)
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
                f"{_ranks(ahead)} is at another place in the data than the others: it skips or "
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
    who = _ranks(guilty)
    seen = seen_by(one)
    # One rank has these very samples, but at other places.
    elsewhere = sum(theirs[rank]["hashes"][place] in seen for rank, place in places)
    kind = _same_sample_otherwise(one, ranks, found)
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
                f"a sample looks otherwise on {who} than on one rank: its augmentation or noise "
                "depends on the rank, on its place in the process or on the others of its part (a "
                "generator per process, seeded by the rank or drawn from in the order of loading; "
                "statistics, random numbers or mixing in collate_fn). Draw from torch, numpy or "
                "random in __getitem__ without seeding them: they are seeded per sample"
            ]
        )
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


def _same_sample_otherwise(
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
        "each rank for itself, from its own generator, number or part of the batch"
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
