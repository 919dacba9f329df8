"""A short search over the settings of DDP, in which noise must not choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from multi_gpu_training.config_fields import TrainingMode
from multi_gpu_training.measure.case import Case, CaseResult, Measure, percentile, together
from multi_gpu_training.planning.bench import result_table as show
from multi_gpu_training.planning.bench.result_table import Column, ResultTable

DDP = TrainingMode.DISTRIBUTED_DATA_PARALLEL
DEFAULT, AGAIN, COMBINED = "as configured", "as configured, again", "winners together"
# If its best steps are slower than this in the first round, it is not measured again.
HOPELESS = 1.2
LEAST_GAIN = 0.01  # a change of settings must be worth the reader's time


@dataclass(frozen=True)
class Candidate:
    """A setting to try. `changes`: what it does to the arithmetic, where it is not the same."""

    name: str
    settings: dict[str, Any]
    changes: str = ""


@dataclass
class TuningTrial:
    """All measurements of a candidate: one per round."""

    candidate: Candidate
    parts: list[CaseResult] = field(default_factory=list)
    verdict: str = ""

    @property
    def ok(self) -> bool:
        return bool(self.parts) and all(part.ok for part in self.parts)

    @property
    def times(self) -> list[float]:
        """Median seconds per sample, one per round."""
        return [part.step_s / part.samples_per_step for part in self.parts]


def candidates(batch: int, accumulation: int) -> list[Candidate]:
    """What is tried, for a model that takes `batch` samples per rank."""
    halves = {"batch_size": batch // 2, "gradient_accumulation_steps": 2 * accumulation}
    twice = {"batch_size": batch, "gradient_accumulation_steps": 2 * accumulation}
    found = [
        Candidate("bucket 5 MB", {"bucket_cap_mb": 5.0}),
        Candidate("bucket 100 MB", {"bucket_cap_mb": 100.0}),
        Candidate("static graph", {"static_graph": True}),
        Candidate("no bucket view", {"use_gradient_as_bucket_view": False}),
        Candidate("compression", {"fp16_compression": True}, "gradients are rounded to 16 bits"),
    ]
    if batch % 2 == 0:
        found.append(Candidate("accumulation 2, same step", halves))
    found.append(Candidate("accumulation 2, twice the step", twice, "the global batch is doubled"))
    return found


def tune(
    measure: Measure,
    ranks: int,
    repeats: int = 3,
    allow_compression: bool = False,
    tried: Sequence[Candidate] | None = None,
    unit: str = "GPU",
) -> ResultTable:
    """Measure every candidate beside the user's config, round by round, and name the winner.

    A candidate wins if it beats the config by more than the spread of the config's own
    measurements, and does so again when it is measured once more.
    """
    default, again = TuningTrial(Candidate(DEFAULT, {})), TuningTrial(Candidate(AGAIN, {}))
    # The config is measured under two names: by how much the two differ is noise.
    run_round(measure, ranks, [default, again])
    if not (default.ok and again.ok):
        reason = next(part.error for part in [*default.parts, *again.parts] if not part.ok)
        return table(ranks, unit, [default], [f"The config itself fails: {reason}"], {})
    facts = default.parts[0].facts
    if tried is None:
        tried = candidates(facts["per_rank_batch"], facts["accumulation"])
    trials = [TuningTrial(candidate) for candidate in tried]
    run_round(measure, ranks, trials)
    for _ in range(repeats - 1):
        run_round(measure, ranks, [default, again, *hopeful(trials, default)])
    base = [*default.times, *again.times]
    winners = [trial for trial in trials if judge(trial, base, repeats, allow_compression)]
    apart = (max(base) - min(base)) / median(base)
    notes = [
        f"The config was measured {len(base)} times; the times differ by {apart:.1%}, which a "
        "winner must exceed."
    ]
    finalists: list[TuningTrial] = []
    chosen: dict[str, Any] = {}
    note = (
        "No candidate beats the config by more than the spread: keep it. Nothing here is worth a "
        "change."
    )
    if winners:
        finalists, chosen, note = confirm(measure, ranks, winners, repeats)
    notes.append(note)
    if ranks == 1:
        notes.append("One rank exchanges nothing: tune on as many as you train on.")
    return table(ranks, unit, [default, again, *trials, *finalists], notes, chosen)


def run_round(measure: Measure, ranks: int, trials: Sequence[TuningTrial]) -> None:
    for trial in trials:
        case = Case(trial.candidate.name, DDP, ranks, trial.candidate.settings)
        trial.parts.append(measure(case))


def hopeful(trials: Sequence[TuningTrial], default: TuningTrial) -> list[TuningTrial]:
    """Those worth another round."""
    kept = []
    for trial in trials:
        if not trial.ok:
            continue
        first = trial.parts[0]
        # Its best steps, so that a neighbour who slowed the others down does not end it.
        best = percentile(first.step_times_s, 10) / first.samples_per_step
        if best < HOPELESS * default.times[0]:
            kept.append(trial)
        else:
            trial.verdict = "slower; one round"
    return kept


def beats(times: Sequence[float], base: Sequence[float]) -> bool:
    """Every measurement is faster than the fastest of the config, and the median by more than all
    of the config's measurements are apart."""
    gain = median(base) - median(times)
    spread = max(base) - min(base)
    return max(times) < min(base) and gain > spread and gain > LEAST_GAIN * median(base)


def judge(trial: TuningTrial, base: Sequence[float], repeats: int, allow_compression: bool) -> bool:
    """Whether the trial may be chosen; its verdict says why, or why not."""
    if not trial.ok:
        out = any(part.out_of_memory for part in trial.parts)
        trial.verdict = "out of memory" if out else "failed"
        return False
    if trial.verdict:
        return False
    if len(trial.parts) < repeats or not beats(trial.times, base):
        gain = median(base) / median(trial.times) - 1
        trial.verdict = "slower" if gain < 0 else "within the spread"
        return False
    changes = trial.candidate.changes
    compression = "fp16_compression" in trial.candidate.settings
    if changes and not (compression and allow_compression):
        trial.verdict = f"faster; not chosen, {changes}"
        if compression:
            trial.verdict += " (--allow-compression)"
        return False
    trial.verdict = "faster"
    return True


def confirm(
    measure: Measure, ranks: int, winners: list[TuningTrial], repeats: int
) -> tuple[list[TuningTrial], dict[str, Any], str]:
    """Measure the best winner, and all of them together, against the config once more: what was
    measured, the settings to choose, and why."""
    best = min(winners, key=lambda trial: median(trial.times))
    # All anew: the winners were picked for being fast, so their old times flatter them.
    base = TuningTrial(Candidate(DEFAULT, {}))
    second = TuningTrial(replace(best.candidate, name=f"{best.candidate.name}, once more"))
    finalists = [second]
    if len(winners) > 1:
        finalists.append(TuningTrial(Candidate(COMBINED, combine(winners))))
    for _ in range(repeats):
        run_round(measure, ranks, [base, *finalists])
    good = [t for t in finalists if t.ok and base.ok and beats(t.times, base.times)]
    for trial in finalists:
        trial.verdict = "confirmed" if trial in good else "not confirmed"
    if not good:
        note = f"{best.candidate.name} was faster, but not again: keep the config as it is."
        return finalists, {}, note
    chosen = min(good, key=lambda trial: median(trial.times))
    if chosen is not second and second in good and not beats(chosen.times, second.times):
        chosen = second  # the simpler of two that are not told apart
    faster = median(base.times) / median(chosen.times)
    name = best.candidate.name if chosen is second else COMBINED
    note = f"Chosen: {name}, {faster:.2f}x the samples/s of the config."
    return finalists, dict(chosen.candidate.settings), note


def combine(winners: Sequence[TuningTrial]) -> dict[str, Any]:
    """Every winner's settings; of two that set the same, the faster one's."""
    settings: dict[str, Any] = {}
    # The fastest comes last and so has the last word.
    for trial in sorted(winners, key=lambda trial: median(trial.times), reverse=True):
        settings |= trial.candidate.settings
    return settings


def table(
    ranks: int, unit: str, trials: Sequence[TuningTrial], notes: list[str], chosen: dict[str, Any]
) -> ResultTable:
    base = trials[0]
    rows = []
    for trial in trials:
        known = trial.ok and base.ok
        rows.append(
            {
                **together(trial.parts).row(),
                "settings": dict(trial.candidate.settings),
                "rounds": len(trial.parts),
                "relative_speed": median(base.times) / median(trial.times) if known else None,
                "verdict": trial.verdict,
                "changes": trial.candidate.changes or None,
            }
        )
    return ResultTable(
        kind="tune",
        title=f"DDP settings, {show.counted(ranks, unit)}",
        columns=[
            Column("setting", show.case_name),
            Column("rounds", lambda row: str(row["rounds"])),
            Column("speed", lambda row: show.ratio(row["relative_speed"])),
            show.SAMPLES,
            show.STEP,
            show.MEMORY,
            Column("verdict", lambda row: str(row["verdict"] or "-")),
        ],
        rows=rows,
        bars=[show.SAMPLES_BAR, show.PEAK_BAR],
        notes=notes,
        recommended=chosen,
    )


def as_yaml(settings: dict[str, Any]) -> str:
    """Lines for a config file."""
    import yaml

    return yaml.safe_dump(settings, sort_keys=False).strip() if settings else ""
