"""Why the run is slow, in plain words."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from multi_gpu_training.monitoring.report.attribution import COMPUTING, Steps, side_by_side
from multi_gpu_training.monitoring.report.cause import EVERYWHERE, Cause
from multi_gpu_training.monitoring.report.causes import find_causes
from multi_gpu_training.monitoring.report.figures import figures
from multi_gpu_training.monitoring.report.run_record import RunRecord
from multi_gpu_training.monitoring.report.sentences import (
    STATISTICS,
    duration,
    exchanges_statistics,
    sentence,
    strangers,
)


@dataclass
class Verdict:
    """headline: the worst cause, or that there is none. more: what else costs time. notes: what
    the figures do not say of themselves."""

    headline: str
    causes: list[Cause] = field(default_factory=list)
    more: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """That of the worst cause; none; unknown."""
        if self.causes:
            return self.causes[0].kind
        return "unknown" if self.headline.startswith("nothing can be said") else "none"


def judge(run: RunRecord) -> Verdict:
    steps = side_by_side(run)
    causes = find_causes(run)
    notes = _notes(run, steps, causes)
    if causes:
        sentences = [sentence(run, steps, cause) for cause in causes]
        return Verdict(sentences[0], causes, sentences[1:], notes)
    if steps is None:
        return Verdict(
            "nothing can be said about speed: fewer than three steps were timed on every rank "
            "(monitor=false, or a very short run)",
            notes=notes,
        )
    return Verdict(_healthy(run, steps), notes=notes)


def _healthy(run: RunRecord, steps: Steps) -> str:
    """Where the time of a step goes, where none of it is a defect."""
    typical = {phase: float(steps.typical(phase).mean()) for phase in steps.phases}
    whole = max(sum(typical.values()), 1e-12)
    share = {phase: seconds / whole for phase, seconds in typical.items()}
    computing = sum(share[phase] for phase in COMPUTING)
    transfer = min(float(np.median(steps.transfer)) / whole, share["comm"])
    waits = share["comm"] - transfer
    step = duration(figures(run).step_s or steps.loaded_step)
    what = "gradients"
    if exchanges_statistics(run):
        what = f"gradients and {STATISTICS}"
    text = f"nothing stands out: of a {step} step"
    if steps.mean_loaded_step > 2 * steps.loaded_step:
        longer = steps.mean_loaded_step / steps.loaded_step
        text = (
            f"some steps take far longer than most (on average {longer:.1f} times a typical one), "
            "but neither always on one rank nor in one phase: of a typical step"
        )
    elif steps.mean_loaded_step > 2 * steps.step:
        other = 1 - steps.step / steps.mean_loaded_step
        text = (
            f"nothing stands out but other work on the machine, which takes {other:.0%} of a "
            f"{step} step; of the rest"
        )
    elif len(steps.ranks) > 1 and not steps.unseen and max(transfer, waits) >= EVERYWHERE:
        where = f"exchanging {what} costs much of it"
        if waits > transfer:
            where = "ranks wait for each other in turns"
        text = f"no rank is slow, but {where}: of a {step} step"
    text += f", {computing:.0%} is computing, {share['input']:.0%} waiting for data"
    if steps.unseen:
        text += f", {share['comm']:.0%} waiting for {strangers(steps)} or the network"
    elif len(steps.ranks) > 1:
        text += f", {transfer:.0%} exchanging {what}, {waits:.0%} waiting for other ranks"
        if transfer >= EVERYWHERE:
            rarer = "larger batches or gradient_accumulation_steps make exchanges rarer"
            if exchanges_statistics(run):
                rarer = (
                    "larger batches make exchanges rarer, gradient_accumulation_steps only those "
                    "of gradients: sync_bn exchanges statistics in every forward and backward"
                )
            text += f"; {rarer}"
    return text


def _notes(run: RunRecord, steps: Steps | None, causes: list[Cause]) -> list[str]:
    notes = []
    if steps is not None and steps.from_checks:
        notes.append(
            "steps are replayed as CUDA graphs: their phases are shares of eager steps that were "
            "computed to compare"
        )
    late = any(cause.kind in ("data", "compute", "hooks") for cause in causes)
    if steps is not None and len(steps.ranks) > 1 and not late:
        waits = float(np.median(steps.waits.max(axis=0)))
        steady = float(np.median(steps.waits, axis=1).max())
        if waits > 0.15 * steps.step and steady < 0.5 * waits:
            notes.append(
                f"ranks wait for each other in turns, {duration(waits)} per step: none of them is "
                "slow, but their times vary (other work on the machine, uneven batches)"
            )
    if steps is not None:
        queued = float(np.median(steps.queued, axis=1).max())
        if queued > 0.15 * steps.loaded_step:
            notes.append(
                f"the machine is busy: ranks stand ready without a core for up to "
                f"{duration(queued)} per step, which is left out of the phases above"
            )
    crowd = [f for f in run.facts.values() if not f.get("device_uuid")]
    cores = min((int(f.get("machine_cores") or 0) for f in crowd), default=0)
    if cores and len(crowd) > cores:
        notes.append(f"{len(crowd)} ranks share {cores} cores: steps take turns on them")
    return notes + run.problems
