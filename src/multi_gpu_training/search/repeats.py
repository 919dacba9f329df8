"""The best trials again with other seeds, so that luck is not mistaken for a finding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from multi_gpu_training.launch.signals import LauncherSignals
from multi_gpu_training.search.run_search import (
    RepeatedTrial,
    SearchResult,
    Slots,
    StudyFolder,
    trial_name,
)
from multi_gpu_training.search.settings import SearchSettings
from multi_gpu_training.search.trial_run import TrialEnd, TrialEnding, TrialLimits, TrialRun

FIRST_SEED = 1000  # not those that people choose


def repeat_best(
    settings: SearchSettings,
    path: Path,
    slots: Slots,
    result: SearchResult,
    say: Callable[[str], None] = lambda text: None,
) -> list[RepeatedTrial]:
    """Train the best trials again. A repeat that is done already is read, not trained."""
    chosen = result.front[: settings.repeat_best]
    if not chosen or not settings.target:
        return []
    folder = StudyFolder(path, settings, resume=True)
    wanted = [(best.number, seed) for best in chosen for seed in range(settings.seeds)]
    params = {best.number: best.params for best in chosen}

    def start(job: tuple[int, int], slot: int) -> TrialRun:
        number, seed = job
        name = f"{trial_name(number)}-seed-{seed}"
        values = {**params[number], "seed": FIRST_SEED + seed}
        limits = TrialLimits(settings.trial_timeout, settings.hang_timeout)
        place = folder.place(name, values, slots, slot)
        return TrialRun(place, result.objectives, settings.value, limits)

    try:
        ends = _run_all(wanted, start, slots.count, say)
    finally:
        folder.close()
    found = []
    for best in chosen:
        own = [ends[best.number, seed] for seed in range(settings.seeds)]
        values = tuple(end.values[0] for end in own if end.ending is TrialEnding.COMPLETE)
        metric = result.objectives[0].metric
        found.append(
            RepeatedTrial(best.number, metric, best.values[0], values, len(own) - len(values))
        )
    return found


def _run_all(
    wanted: Sequence[tuple[int, int]],
    start: Callable[[tuple[int, int], int], TrialRun],
    count: int,
    say: Callable[[str], None],
) -> dict[tuple[int, int], TrialEnd]:
    """Every run to its end, `count` at a time."""
    waiting, ends = list(wanted), {}
    active: dict[int, tuple[tuple[int, int], TrialRun]] = {}
    with LauncherSignals() as signals:
        signals.listen()
        try:
            while waiting or active:
                signals.pause(0.2)
                for slot in range(count):
                    if slot not in active and waiting:
                        job = waiting.pop(0)
                        active[slot] = job, start(job, slot)
                for slot, (job, running) in list(active.items()):
                    end = running.look()[1]
                    if end is not None:
                        ends[job] = end
                        del active[slot]
                        shown = f"{end.values[0]:.6g}" if end.values else end.reason
                        say(f"trial {job[0]}, seed {FIRST_SEED + job[1]}: {shown}")
        except BaseException:
            for _, running in active.values():
                running.stop(save=True)
            raise
    return ends
