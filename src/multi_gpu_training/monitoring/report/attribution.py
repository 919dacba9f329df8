"""Why a run is as slow as it is: what each rank does in a step, and who waits for whom.

Ranks meet in every step. The one that comes last waits only for the network; the others wait
for it as well. So the shortest wait of a step is the network's, and what a rank waits beyond it is
another rank's doing. No clocks of different machines are compared.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np

from multi_gpu_training.monitoring.phase_names import PHASES
from multi_gpu_training.monitoring.report.run_record import COLUMNS, RunRecord, Samples

COMPUTING = ("forward", "backward", "optimizer")
OWN = tuple(phase for phase in PHASES if phase not in ("comm", "checkpoint"))
SLOWER = 0.1  # of a step, from which on a rank is slower than others
LACKED = 0.02  # of a step without a core, from which on it is shown
QUEUED = "queued"
FEWEST = 3  # timed steps, to say anything


@dataclass
class Steps:
    """The timed steps that all these ranks have, side by side.

    phases[p] has a row a rank and a column a step, in seconds, without `queued`: the time in which
    the rank was ready and other work on the machine had its core. `transfer` has a value a step:
    what the exchange takes once all have come; `waits` what each rank waits for a later one.
    Where ranks are `unseen`, `transfer` holds waiting for them, too.
    """

    ranks: list[int]
    unseen: list[int]
    steps: np.ndarray
    phases: dict[str, np.ndarray]
    step_s: np.ndarray
    transfer: np.ndarray
    waits: np.ndarray
    cpu_s: np.ndarray
    queued: np.ndarray
    input_mean_s: np.ndarray
    checkpoint_share: float
    from_checks: bool

    @property
    def own(self) -> np.ndarray:
        """What each rank does itself before it can meet the others."""
        return np.asarray(sum(self.phases[phase] for phase in OWN))

    @property
    def computing(self) -> np.ndarray:
        return np.asarray(sum(self.phases[phase] for phase in COMPUTING))

    @property
    def slowest(self) -> int | None:
        """The row of the rank that the others wait for; None where no rank is slower than another
        by more than chance."""
        own = np.median(self.own, axis=1)
        if len(own) < 2 or self.unseen:
            return None
        row = int(own.argmax())
        ahead = float(own[row] - np.median(np.delete(own, row)))
        return row if ahead >= SLOWER * self.step else None

    def typical(self, phase: str) -> np.ndarray:
        """Median seconds of a phase, a value a rank; of waiting for data the mean, which knows
        of batches between the timed ones too."""
        if phase == "input":
            return self.input_mean_s
        return np.asarray(np.median(self.phases[phase], axis=1))

    def shown(self, step_s: float | None) -> dict[str, np.ndarray]:
        """Median seconds of each phase, a value a rank, and of `queued` where ranks lacked a core.

        `step_s`: of a step as the run has it. Timing a step makes it longer; then these are its
        shares. They never grow: medians may add up to less than a step, which some long ones fill.
        """
        typical = {phase: self.typical(phase) for phase in PHASES}
        queued = np.median(self.queued, axis=1)
        if queued.max() >= LACKED * self.loaded_step:
            typical[QUEUED] = queued
        timed = float(sum(values.mean() for values in typical.values()))
        scale = min(1.0, (step_s or self.loaded_step) / max(timed, 1e-12))
        return {phase: values * scale for phase, values in typical.items()}

    @property
    def step(self) -> float:
        """Seconds of a typical step, with a core for every rank at any time."""
        return float(np.median(self.modelled()))

    @property
    def loaded_step(self) -> float:
        """Seconds of a typical step as it was."""
        return float(np.median(self._loaded()))

    @property
    def mean_loaded_step(self) -> float:
        return float(self._loaded().mean())

    def _loaded(self) -> np.ndarray:
        return np.asarray((self.own + self.queued).max(axis=0) + self.transfer)

    def modelled(self, less: np.ndarray | float = 0.0, transfer: float | None = None) -> np.ndarray:
        """Seconds of each step if every rank did its own part in `less` seconds less, and the
        exchange took `transfer`."""
        own = np.maximum(self.own - less, 0.0).max(axis=0)
        network = self.transfer if transfer is None else np.minimum(self.transfer, transfer)
        return np.asarray(own + network)


def side_by_side(run: RunRecord) -> Steps | None:
    """The timed steps of all ranks that have any; None where there are too few."""
    found = {rank: samples for rank, samples in run.samples.items() if len(samples.steps)}
    if not found:
        return None
    ranks = sorted(found)
    common = found[ranks[0]].steps
    for rank in ranks[1:]:
        common = np.intersect1d(common, found[rank].steps)
    common = _settled(common)
    if len(common) < FEWEST:
        return None
    table = np.stack([_rows(found[rank], common) for rank in ranks])
    from_checks = any(found[rank].from_checks for rank in ranks)
    if from_checks:
        table = _stretched(table)
    taken = {phase: table[:, :, COLUMNS.index(f"{phase}_s")] for phase in PHASES}
    queued = {p: np.nan_to_num(table[:, :, COLUMNS.index(f"queued_{p}_s")]) for p in PHASES}
    phases = {phase: np.maximum(taken[phase] - queued[phase], 0.0) for phase in PHASES}
    comm = phases["comm"]
    transfer = comm.min(axis=0)
    return Steps(
        ranks=ranks,
        unseen=sorted(set(range(run.world_size)) - set(ranks)),
        steps=common,
        phases=phases,
        step_s=table[:, :, COLUMNS.index("step_s")],
        transfer=transfer,
        waits=comm - transfer,
        cpu_s=table[:, :, COLUMNS.index("cpu_s")],
        queued=np.asarray(sum(queued[phase] for phase in OWN)),
        input_mean_s=np.array([_mean_input(found[rank]) for rank in ranks]),
        checkpoint_share=max(_checkpoint_share(found[rank]) for rank in ranks),
        from_checks=from_checks,
    )


def _rows(samples: Samples, steps: np.ndarray) -> np.ndarray:
    return np.asarray(samples.values[np.searchsorted(samples.steps, steps)])


def _settled(steps: np.ndarray) -> np.ndarray:
    """Without the beginning, in which caches fill and buffers are made."""
    skip = min(len(steps) // 10, 20)
    return steps[max(skip, 1 if len(steps) > 2 * FEWEST else 0) :]


def _stretched(table: np.ndarray) -> np.ndarray:
    """Phases of eager steps, brought to the length of the replayed steps that they stand for.

    All ranks' by the same factor: the one that is busy all the time sets it, and what is left of
    the step on the others is waiting.
    """
    table, at = table.copy(), COLUMNS.index
    steps = np.maximum(table[:, :, at("interval_steps")], 1.0)
    whole = table[:, :, at("interval_s")] - table[:, :, at("interval_checkpoint_s")]
    waited = table[:, :, at("interval_input_s")] / steps
    length = np.maximum(whole / steps - waited, 0.0)
    computed = [at(f"{phase}_s") for phase in COMPUTING]
    needed = table[:, :, computed].sum(axis=2) + table[:, :, at("comm_s")].min(axis=0)
    factor = np.minimum(1.0, (length / np.maximum(needed, 1e-12)).min(axis=0))
    rest = np.maximum(length - factor * needed, 0.0).min(axis=0)
    table[:, :, computed] *= factor[None, :, None]
    table[:, :, at("input_s")] = waited
    table[:, :, at("checkpoint_s")] = 0.0
    table[:, :, at("other_s")] = rest
    table[:, :, at("comm_s")] = length - table[:, :, computed].sum(axis=2) - rest
    table[:, :, at("step_s")] = whole / steps
    return table


def _mean_input(samples: Samples) -> float:
    """Mean wait for data a step over the whole run, without the worst twentieth: the first batch
    of an epoch waits for loader workers to start."""
    steps = samples.column("interval_steps")
    waited = samples.column("interval_input_s") / np.maximum(steps, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not np.isfinite(waited).any():
            return float(np.nanmedian(samples.column("input_s")))
    kept = np.isfinite(waited) & (steps > 0)
    waited, steps = waited[kept], steps[kept]
    if not len(waited):
        return 0.0
    limit = np.quantile(waited, 0.95)
    inside = waited <= limit
    timed = np.nansum(samples.column("input_s"))
    queued = np.nansum(samples.column("queued_input_s"))
    own = max(0.0, 1.0 - queued / timed) if timed > 0 else 1.0
    return float(np.average(waited[inside], weights=steps[inside])) * own


def _checkpoint_share(samples: Samples) -> float:
    """Part of the time in which training stood still for checkpoints."""
    stalled = np.nansum(samples.column("interval_checkpoint_s")[1:])
    whole = np.nansum(samples.column("interval_s")[1:])
    return float(stalled / whole) if whole > 0 else 0.0
