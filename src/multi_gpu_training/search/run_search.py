"""From the settings of a search to its trials: the folder, the slots, the files that remain.

STUDY/search.yaml         what was asked for
STUDY/study.db            Optuna's storage, unless --storage names another
STUDY/trials/trial-0007   the config and the output of a trial
STUDY/runs/RECIPE/...     the run of each trial: events, checkpoints, report
STUDY/best.yaml           the best trial, for `mgt train`
STUDY/report.html
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml

from multi_gpu_training.checkpoint.run_lock import RunLock
from multi_gpu_training.checkpoint.store import CheckpointStore
from multi_gpu_training.config_file import storable
from multi_gpu_training.distributed.identity import from_environment
from multi_gpu_training.errors import ConfigError, MultiGPUError
from multi_gpu_training.launch.launcher import available_gpus
from multi_gpu_training.launch.signals import LauncherSignals
from multi_gpu_training.portability import usable_cores
from multi_gpu_training.redaction import HIDDEN
from multi_gpu_training.safe_files import make_private, write_atomically
from multi_gpu_training.safe_output import brief
from multi_gpu_training.search.objectives import SearchObjective
from multi_gpu_training.search.searcher import Searcher, Shown
from multi_gpu_training.search.settings import FILE, SearchSettings
from multi_gpu_training.search.study import (
    Study,
    TrialRecord,
    require_optuna,
    sqlite_url,
    storage_problems,
)
from multi_gpu_training.search.trial_run import (
    FunctionTrial,
    RunningTrial,
    RunPlace,
    TrialLimits,
    TrialRun,
    write_config,
)

SCRIPT_RECIPE = "custom"  # the folder of runs that a script makes
Infeasible = Callable[[Mapping[str, Any]], str | None]


@dataclass(frozen=True)
class RepeatedTrial:
    """One of the best trials, trained with several seeds; `values` of those that worked."""

    number: int
    metric: str
    searched: float
    values: tuple[float, ...]
    failed: int = 0

    @property
    def mean(self) -> float | None:
        return fmean(self.values) if self.values else None

    @property
    def spread(self) -> float | None:
        """The sample's standard deviation; None with fewer than two values."""
        return stdev(self.values) if len(self.values) > 1 else None

    def words(self) -> str:
        found = f"trial {self.number}: {self.metric} {self.searched:.6g} in the search"
        if self.mean is None:
            return f"{found}; no repeat was complete"
        spread = "" if self.spread is None else f" +- {self.spread:.2g} (standard deviation)"
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{found}; with {len(self.values)} seeds {self.mean:.6g}{spread}{failed}"


@dataclass
class SearchResult:
    """What a search found. `front`: best first, or the Pareto front of several objectives.
    `importances` is asked for when it is shown: it trains a forest. `repeats`: the best trials
    with other seeds, where asked for."""

    folder: Path
    objectives: Sequence[SearchObjective]
    trials: list[TrialRecord]
    front: list[TrialRecord]
    importances: Callable[[], Mapping[str, float]] = dict
    repeats: Sequence[RepeatedTrial] = ()

    @property
    def best(self) -> TrialRecord | None:
        return self.front[0] if self.front else None


@dataclass(frozen=True)
class Slots:
    """How many trials run at a time, and on which GPUs each; none on CPUs."""

    count: int
    ranks: int
    gpus: tuple[tuple[str, ...], ...] = ()

    def variables(self, slot: int) -> dict[str, str]:
        if self.gpus:
            return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus[slot])}
        cores = max(1, len(usable_cores()) // (self.count * self.ranks))
        return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(cores)}


def find_slots(settings: SearchSettings) -> Slots:
    """As many trials at a time as the GPUs allow, or as were asked for."""
    if settings.engine == "ray":  # which knows the GPUs of its nodes
        return Slots(settings.parallel or 1, settings.gpus_per_trial)
    gpus = 0 if settings.device == "cpu" else available_gpus()
    ranks = settings.gpus_per_trial
    if settings.device == "cuda" and not gpus:
        raise ConfigError("--device cuda: torch sees no GPU; `mgt info` shows why", code="MGT201")
    if not gpus:
        return Slots(settings.parallel or 1, ranks)
    if ranks > gpus:
        raise ConfigError(
            f"--gpus-per-trial {ranks} asked for, but {gpus} GPUs are there; use at most {gpus}",
            code="MGT201",
        )
    most = gpus // ranks * settings.trials_per_gpu
    count = settings.parallel or most
    if count > most:
        raise ConfigError(
            f"--parallel {count} trials with --gpus-per-trial {ranks} need {count * ranks} GPUs, "
            f"and {gpus} are there; use --parallel {most}, or --trials-per-gpu for small models "
            "that share a GPU",
            code="MGT201",
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(gpus)]
    groups = [tuple(names[i * ranks : (i + 1) * ranks]) for i in range(gpus // ranks)]
    # Slot by slot around the GPUs, so that two trials share one only where no other is free.
    return Slots(count, ranks, tuple(groups[slot % len(groups)] for slot in range(count)))


class StudyFolder:
    """The folder of one search; this process has it alone until `close`."""

    def __init__(self, path: Path, settings: SearchSettings, resume: bool) -> None:
        self.path = path
        # The study keeps its name in the storage when its folder is moved.
        self.study = settings.study or path.resolve().name
        kept = {"study": self.study, "working_dir": str(settings.trials_dir())}
        self.settings = settings.model_copy(update=kept)
        exists = (path / FILE).exists()
        if exists and not resume:
            raise ConfigError(
                f"{path} holds a search already; continue it with `mgt search {path} --resume`, or "
                "choose another --study",
                code="MGT106",
            )
        make_private(path)
        self._lock = RunLock(path)
        self.settings.save(path)

    def close(self) -> None:
        self._lock.release()

    @property
    def recipe(self) -> str:
        return SCRIPT_RECIPE if self.settings.is_script else self.settings.target

    def run_of(self, number: int) -> str:
        """The run of a trial, relative to this folder."""
        return f"runs/{self.recipe}/{trial_name(number)}"

    def config_of(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What `mgt train` needs for a trial."""
        return {"recipe": self.recipe, **self.settings.settings, **values}

    def place(
        self,
        name: str,
        values: Mapping[str, Any],
        slots: Slots,
        slot: int,
        begin_from: Path | None = None,
    ) -> RunPlace:
        """Where the run `name` with these values goes. begin_from: a checkpoint of another run."""
        settings, path = self.settings, self.path.absolute()
        working_dir = settings.trials_dir()
        own = {"save_dir": str(path / "runs"), "run_name": name, "resume": "auto"}
        device = {} if settings.device == "auto" else {"device": settings.device}
        run = path / "runs" / self.recipe / name
        files = path / "trials" / name
        if settings.is_script:
            given = {**values, **own, **device, "recipe": self.recipe, "world_size": slots.ranks}
            command = [settings.target, *settings.words]
            if settings.engine == "ray":
                start = ["-m", "multi_gpu_training", "run", *self._on_ray(slots.ranks)]
                command = [*start, str(working_dir / settings.target), *settings.words]
            log = files.with_suffix(".log")
            variables = slots.variables(slot)
            return RunPlace(run, log, command, variables, given, begin_from, working_dir)
        config = files.with_suffix(".yaml")
        # A search of many trials would fill the disk with checkpoints that nobody goes back to.
        few = {"keep_last": 1}
        write_config(config, as_yaml({**few, **self.config_of(values), **own, **device}))
        command = ["-m", "multi_gpu_training", "train", str(config)]
        ray = settings.engine == "ray"
        command += self._on_ray(slots.ranks) if ray else ["--num-gpus", str(slots.ranks)]
        log = files.with_suffix(".log")
        variables = slots.variables(slot)
        return RunPlace(run, log, command, variables, None, begin_from, working_dir)

    def _on_ray(self, ranks: int) -> list[str]:
        """Flags of a trial on Ray. Its process here is Ray's driver: its ranks end with it."""
        address = self.settings.ray_address
        more = [] if address is None else ["--ray-address", address]
        return ["--engine", "ray", "--num-gpus", str(ranks), *more]

    def checkpoint_of(self, number: int | None) -> Path | None:
        """The weights that a trial ended with."""
        if number is None:
            return None
        store = CheckpointStore(self.path.absolute() / self.run_of(number) / "checkpoints")
        found = [path for path in store.folders() if store.on_timeline(path)]
        if not found:
            raise MultiGPUError(
                f"trial {number} has no checkpoint to continue; with --sampler pbt, trials need "
                "enable_fault_tolerance=true, and their runs must stay"
            )
        return found[0]

    def write_best(self, best: TrialRecord | None) -> Path | None:
        """The best trial as a config file. Of a script: the fields of its MultiGPUConfig."""
        if best is None or best.parent is not None:  # no single config leads to the latter
            return None
        values: dict[str, Any] = dict(best.params)
        if not self.settings.is_script and self.settings.target:
            values = {**self.config_of(values), **self.settings.batch_of(values)}
        path = self.path / "best.yaml"
        write_atomically(path, as_yaml(values))
        return path


def trial_name(number: int) -> str:
    return f"trial-{number:04d}"


def as_yaml(values: Mapping[str, Any]) -> str:
    """A config file; what looks like a secret is refused rather than lost."""
    kept = storable(values)
    hidden = [name for name, value in kept.items() if HIDDEN in str(value)]
    if hidden:
        raise ConfigError(
            f"{hidden[0]} looks like a secret, which a search does not write to its files; set it "
            f"as {hidden[0]}='${{oc.env:NAME}}' and export NAME"
        )
    return yaml.safe_dump(kept, sort_keys=False)


def run_search(
    settings: SearchSettings,
    path: Path,
    resume: bool = False,
    function: Callable[..., Any] | None = None,
    shown: Shown = lambda active, ended: None,
    infeasible: Infeasible = lambda params: None,
) -> SearchResult:
    """Run a search to its end, or go on with one. AskedToEnd where a signal came."""
    require_optuna(settings.sampler)
    settings.check()
    if function is None and from_environment() is not None:
        raise ConfigError(
            "mgt search starts ranks itself; start it without torchrun or srun", code="MGT202"
        )
    slots = find_slots(settings) if function is None else Slots(1, 1)
    folder = StudyFolder(path, settings, resume)
    try:
        study = _open_study(settings, path, folder.study, resume)
        limits = TrialLimits(settings.trial_timeout, settings.hang_timeout)

        def start(record: TrialRecord, slot: int) -> RunningTrial:
            if function is not None:
                return FunctionTrial(function, record.params)
            values = {**record.params, **settings.of_trial(record.number)}
            begin_from = folder.checkpoint_of(record.parent)
            place = folder.place(trial_name(record.number), values, slots, slot, begin_from)
            return TrialRun(place, study.objectives, settings.value, limits)

        trials = settings.trials
        if settings.sampler == "grid":
            trials = min(trials, settings.grid_size())
        searcher = Searcher(
            study,
            trials,
            start,
            slots.count,
            None if function is not None else folder.run_of,
            infeasible,
            shown,
            pruning=settings.pruner != "none",
        )
        again = "resume=True" if function is not None else f"`mgt search {path} --resume`"
        with storage_problems(again):
            try:
                with LauncherSignals() as signals:
                    if function is None:  # a function runs here: Ctrl-C must reach it at once
                        signals.listen()
                    searcher.run(signals)
            finally:
                result = SearchResult(
                    path, study.objectives, study.records(), study.best(), study.importances
                )
                folder.write_best(result.best)
        return result
    finally:
        folder.close()


def _open_study(settings: SearchSettings, path: Path, name: str, resume: bool) -> Study:
    study = Study(
        name,
        settings.storage or sqlite_url(path),
        settings.space(),
        settings.objectives(),
        settings.sampler,
        settings.pruner,
        settings.seed,
        resume,
        settings.population,
    )
    if resume and not study.records() and (path / "trials").exists():
        raise ConfigError(
            f"{path} holds trials, but the storage knows no study {brief(name)} with any; give the "
            "--storage that it was begun with"
        )
    return study
