"""Name the cause of a difference from where it first stands and from what was recorded there.

Nothing is guessed from a script's text. Each cause follows from numbers: which samples a rank
got, what one rank computes for the same samples from the same weights, how a loss behaves when
its batch is split.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from multi_gpu_training.measure.recorder import LATE_SETTINGS, RATE_SETTINGS
from multi_gpu_training.planning.verify.conclusion import (
    Diagnosis,
    batchnorm_cause,
    differing,
    name_ranks,
)
from multi_gpu_training.planning.verify.data_causes import name_data_cause
from multi_gpu_training.planning.verify.mismatch import NOTED_AT, Mismatch, compare_runs
from multi_gpu_training.planning.verify.recorded_run import (
    CANNOT_START,
    Conditions,
    RankRecord,
    RecordedRun,
    match_rows,
)
from multi_gpu_training.planning.verify.split_batch import SplitBatch

Run = Callable[..., RecordedRun]


def diagnose(
    run: Run, one: RecordedRun, many: RecordedRun, found: Mismatch, conditions: Conditions
) -> Diagnosis:
    """Say why `many` differs from `one`, where it first does. May train the script again."""
    return _Examination(run, one, many, found, conditions).conclude()


# Per stage of a difference, the settings that can make it.
_REACH = {
    "data": ("seed", "shuffle", "steps_per_epoch"),
    "loss": ("sync_bn", "gradient_accumulation_steps"),
    "grads": ("max_grad_norm", "max_grad_value", "sync_bn", "gradient_accumulation_steps"),
    "buffers": ("sync_bn", "gradient_accumulation_steps"),
    "settings": RATE_SETTINGS,
    "length": ("max_steps", "epochs", "steps_per_epoch", "early_stopping_patience"),
    "metrics": ("ema_decay", "swa_start", "swa_every", "limit_val_batches", "validate_every"),
    "asked": LATE_SETTINGS,
}
_WHY = {
    "gradient_accumulation_steps": ", and BatchNorm normalises one micro-batch at a time",
}


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
        setting = self._own_settings()
        if setting is not None:
            return Diagnosis([setting])
        if stage == "metrics":
            return self._metrics()
        if stage in ("loss", "grads"):
            return self._computed()
        if stage in ("move", "optimizer") and self._gradients_apart():
            self.tolerance = 1e-5  # a rank's part of a batch is computed in the same order
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

    def _own_settings(self) -> str | None:
        """Settings of its manager that the script computes from the rank or the number of ranks,
        where what they change is what differs."""
        asked = self.alone.header["asked"]
        reach = _REACH.get(self.found.stage, ())
        for rank, record in enumerate(self.ranks):
            theirs = record.header["asked"]
            for key in reach:
                if theirs[key] == asked[key] or not self._matters(key):
                    continue
                apart = theirs != self.ranks[0].header["asked"]
                where = f"rank {rank}" if apart else f"{self.world} ranks"
                why = _WHY.get(key, "")
                return (
                    f"the setting {key} depends on the {'rank' if apart else 'number of ranks'}: "
                    f"it is {theirs[key]} on {where} and {asked[key]} on one rank{why}. Give the "
                    "same number everywhere"
                )
        return None

    def _matters(self, key: str) -> bool:
        if key == "learning_rate" and self.found.stage == "settings":
            return not self._rate_times_world()  # which says more than the setting's name
        return key != "gradient_accumulation_steps" or bool(self.alone.header["batchnorm"])

    def _gradients_apart(self) -> bool:
        """Whether float32 hid a difference of gradients that the optimizer has blown up: Adam
        divides each by its own size."""
        mine, theirs = self.lines()
        return not self.conditions.double and bool(
            differing(mine["grads"], theirs[0]["grads"], 1e-5)
        )

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
        """An optimizer's setting, such as the learning rate, is not that of one rank."""
        if self._rate_times_world():
            return self._scaled_rate()
        name, text = self.found.name, self.found.text
        if self.found.ranks_differ:
            return Diagnosis(
                [
                    f"{name} is set by each rank for itself ({text}): a schedule, callback or "
                    "choice that follows a rank's own loss or number"
                ]
            )
        return Diagnosis(
            [
                f"{name} depends on the number of ranks: {text}; a schedule that counts samples, "
                "batches or epochs of one rank, or a setting computed from the number of ranks"
            ]
        )

    def _rate_times_world(self) -> bool:
        """Whether the rate is that of one rank times the number of ranks, or its root, all along: a
        schedule that counts differently may begin with this factor, but does not keep it."""
        facts = self.found.facts
        key, mine, theirs = facts["key"], facts["one"], facts["many"]
        if key != "lr" or self.found.step != 1 or self.found.ranks_differ or not (mine and theirs):
            return False
        factor = theirs / mine
        last = [line["settings"][0].get(key) for line in self._last_lines()]
        if not all(last) or not abs(last[1] / last[0] - factor) < 1e-4 * abs(factor):
            return False
        return any(abs(factor - want) < 1e-4 * want for want in (self.world, math.sqrt(self.world)))

    def _scaled_rate(self) -> Diagnosis:
        rule = self.alone.header["lr_scaling"]
        twice = (
            f"twice: lr_scaling={rule} scales it for the batch already"
            if rule != "none"
            else "although the global batch is the same; where batches grow with the ranks, "
            "lr_scaling does this"
        )
        mine, theirs = self.found.facts["one"], self.found.facts["many"]
        grows = rule == "none" and not self.one.settings.get("global_batch_size")
        return Diagnosis(
            [
                f"the rate is scaled by the number of ranks: {theirs:g} on {self.world} ranks, "
                f"{mine:g} on one, {twice}. Give the rate of one rank"
            ],
            "with batch_size per rank a step grows with the ranks, and the script scales its rate "
            "for that; here the global batch is kept"
            if grows
            else None,
        )

    def _buffers(self) -> Diagnosis:
        name, header = self.found.name, self.alone.header
        module = name.rpartition(".")[0]
        if module in header["batchnorm"] and not header["sync_bn"]:
            return Diagnosis([batchnorm_cause([module])])
        mine, theirs = self.lines()
        others = differing(mine["buffers"], theirs[0]["buffers"], self.tolerance)
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
            who = name_ranks(self.found.ranks_differ)
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
        """A parameter changes where it should not, or equal gradients move it differently."""
        found = self.found
        when = {
            "between": "between two steps, outside the trainer",
            "forward": "during the forward or backward",
            "optimizer": "in the optimizer's step",
            "move": "in the optimizer's step",
            "callback": "after the step, in a callback",
        }[found.stage]
        if found.ranks_differ:
            alone = self._ranks_that_change()
            who = (
                f"on {name_ranks(alone)} alone"
                if len(alone) < self.world
                else f"on {name_ranks(found.ranks_differ)}, and not on rank 0 in the same way"
            )
            return Diagnosis(
                [
                    f"parameter {found.name} is changed {when} {who}: change weights equally on "
                    "every rank, or leave them to the trainer"
                ]
            )
        if found.stage in ("optimizer", "move"):
            return Diagnosis(
                [
                    f"the optimizer moves {found.name} differently although gradients and "
                    "settings are the same: its step depends on the number of ranks"
                ]
            )
        return Diagnosis(
            [
                f"parameter {found.name} is changed {when}, by an amount that depends on the "
                "number of ranks or on one rank's samples"
            ]
        )

    def _ranks_that_change(self) -> list[int]:
        """The ranks on which the parameter of the difference is not what it was just before."""
        key, before, _ = NOTED_AT[self.found.stage]
        place = self.found.step - 1
        changed = []
        for rank, record in enumerate(self.ranks):
            line = record.steps[place]
            earlier = (
                record.header["parameters"] if place == 0 else record.steps[place - 1]["after"]
            )
            then = earlier if before is None else line.get(before, {})
            if line[key].get(self.found.name) != then.get(self.found.name):
                changed.append(rank)
        return changed or list(range(self.world))

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
        place = {"manager": self.found.manager, "step": self.found.step, "micro": number}
        probe = {**place, "parts": rows}
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
        split = SplitBatch(
            found,
            [part for part in parts if part is not None and part["count"]],
            mine,
            theirs,
            self.found,
            self.alone,
            self.conditions.double,
            self.tolerance,
        )
        cause = split.loss_cause()
        if cause is not None:
            return Diagnosis([cause])
        if self.found.stage == "loss" or found.get("mixing"):
            cause = split.split_cause()
            if cause is not None:
                return self._confirmed(cause, found)
        return Diagnosis([split.gradient_cause() or self._unexplained()])

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
        apart: list[str] = []
        if self.alone.steps and self.ranks[0].steps:
            mine, theirs = self.alone.steps[-1], self.ranks[0].steps[-1]
            apart = differing(mine["buffers"], theirs["buffers"], 1e-6)
        if apart:
            return Diagnosis([f"buffer {', '.join(apart)} is not synchronised"])
        return Diagnosis(
            [
                f"weights and buffers agree, the metric {key} does not: it is a mean of means (a "
                "mean per batch or per rank, which counts a small batch as much as a large one), "
                "or it depends on the rank. In eval_fn add sums and weights, for example "
                "metrics.add_mean(mean, count)"
                + ("" if header["broadcast_buffers"] else "; buffers are not broadcast")
            ]
        )


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


def failure_cause(error: str, world: int) -> str:
    """What an error that only several ranks raise says about the script."""
    if CANNOT_START in error:
        # The check before training has named it already.
        lines = error.partition(CANNOT_START)[2].strip().splitlines()
        said = lines[0].removeprefix("-").strip()
        return f"data per rank: {said}" if "MGT305" in error else said
    for sign, cause in FAILURES:
        if re.search(sign, error):
            return cause.format(world=world)
    return (
        f"the script fails on {world} ranks and not on one: code that depends on the rank, or on "
        "how many samples a rank has"
    )


# What an error says, as a regular expression, and what that means; the first that fits counts.
FAILURES = (
    (
        "expects same model across all ranks",
        "the parameters that are trained depend on the rank: another part of the model is frozen "
        "(requires_grad), or another model is built",
    ),
    (
        "outside the trainer",
        "the model is trained past the wrapper: the script calls backward and optimizer.step() "
        "itself, where ranks do not exchange gradients; use manager.trainer.train_step(batch)",
    ),
    (
        "marked as ready twice",
        "gradients are computed past the wrapper: another backward runs in the middle of the "
        "trainer's own, for which ranks exchange nothing; add its loss to the one that loss_fn "
        "returns",
    ),
    (
        "by peer",
        "a rank has left while the others went on: control flow that depends on the rank or on "
        "its own loss (an early stop, a break, an exit). Decide from a number that all ranks share",
    ),
    (
        "(?i:hang)|not done after|(?i:waiting)",
        "the ranks wait for each other forever: control flow that depends on the rank (an early "
        "stop, a break, a collective call on one rank only)",
    ),
    (
        "not finite|NaN|the loss is (-?inf|nan)|bad gradient",
        "a loss or gradient is NaN or infinite on {world} ranks, and finite on one",
    ),
)
