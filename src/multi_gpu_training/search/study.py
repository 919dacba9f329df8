"""The study: Optuna's storage is the one place that knows which trials there are.

Everything about a trial is written there before it happens: its parameters before it starts, its
run folder with them, the decision to prune before its processes are ended. So a search that is
killed at any instant finds there what to do next, and nothing else can disagree with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multi_gpu_training.errors import ConfigError, MultiGPUError
from multi_gpu_training.extras import install, installed
from multi_gpu_training.redaction import redact
from multi_gpu_training.safe_output import brief
from multi_gpu_training.search.objectives import SearchObjective
from multi_gpu_training.search.space import Parameter
from multi_gpu_training.search.trial_run import TrialEnd, TrialEnding

if TYPE_CHECKING:
    import optuna

SAMPLERS = ("tpe", "optuna-tpe", "random", "grid", "cmaes", "nsga2", "pbt")
PRUNERS = ("none", "median", "hyperband", "asha")
RUN, REASON, ENDING, PARENT = "mgt:run", "mgt:reason", "mgt:ending", "mgt:parent"
MEMORY = "memory"  # a storage that ends with the process, for functions
BUSY_S = 60.0  # that SQLite waits for another program
ONE_OBJECTIVE = ("cmaes", "pbt")
# Where `tpe` differs from Optuna's own defaults (10); benchmarks/search.md has the studies.
STARTUP_TRIALS = 5


@dataclass(frozen=True)
class TrialRecord:
    """One trial as the storage has it."""

    number: int
    state: str
    params: Mapping[str, Any]
    values: tuple[float, ...]
    reported: Mapping[int, float]
    reason: str
    run: str
    began: float
    ended: float | None
    parent: int | None = None  # the trial whose weights it began with

    @property
    def finished(self) -> bool:
        return self.state in (TrialEnding.COMPLETE, TrialEnding.PRUNED, TrialEnding.FAILED)


def require_optuna(sampler: str = "tpe") -> None:
    """Raise where a package that the search needs is missing."""
    for package, needed in (("optuna", True), ("cmaes", sampler == "cmaes")):
        if needed and not installed(package):
            raise ConfigError(f"mgt search needs {package}; run {install('search')}", code="MGT105")


class Study:
    """Asks for suggestions and tells results. One process at a time has it."""

    def __init__(
        self,
        name: str,
        storage: str | None,
        space: Sequence[Parameter],
        objectives: Sequence[SearchObjective],
        sampler: str = "tpe",
        pruner: str = "none",
        seed: int = 0,
        resume: bool = False,
        population: int = 0,
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.space = list(space)
        self.objectives = list(objectives)
        self._distributions = {one.name: one.distribution() for one in space}
        try:
            self._storage = optuna.storages.get_storage(opened(storage))
            self._study = optuna.create_study(
                storage=self._storage,
                study_name=name,
                directions=[one.optuna_direction for one in objectives],
                load_if_exists=True,
                pruner=make_pruner(pruner),
                sampler=optuna.samplers.RandomSampler(seed=seed),
            )
            begun = len(self._study.get_trials(deepcopy=False))
        except Exception as error:  # whatever the driver of that database raises
            text = redact(str(error)).strip().splitlines() or [type(error).__name__]
            raise ConfigError(
                f"--storage {brief(redact(str(storage)))} cannot be opened: {text[0][:300]}; give "
                "a URL as Optuna takes it, such as sqlite:///study.db, or leave it out"
            ) from None
        directions = [direction.name.lower() for direction in self._study.directions]
        if begun and not resume:
            raise ConfigError(
                f"the storage has a study {brief(name)} of {begun} trials already; choose another "
                "--study, or continue that one with --resume",
                code="MGT106",
            )
        if directions != [one.optuna_direction for one in objectives]:
            raise ConfigError(
                f"the study {brief(name)} was begun with the directions {', '.join(directions)}; "
                "give the same --metric again, or choose another --study"
            )
        hollow = [
            one.number
            for one in self.records()
            if one.state == TrialEnding.COMPLETE and len(one.values) != len(objectives)
        ]
        if hollow:
            raise ConfigError(
                f"the storage is damaged: trial {hollow[0]} of the study {brief(name)} is complete "
                "and has no value; restore it from a copy, or begin another --study"
            )
        self._live: dict[int, optuna.trial.Trial] = {}
        # A sampler that starts with the same seed again would repeat its first suggestions.
        again = seed if sampler in ("grid", "pbt") else seed + 7919 * begun
        self._study.sampler = self._sampler = make_sampler(
            sampler, again, space, population, len(objectives)
        )
        self._population = population if sampler == "pbt" else 0
        self._id = self._storage.get_study_id_from_name(name)

    # Asking

    def ready(self) -> bool:
        """Whether a new trial can be suggested now: a generation begins when the last has ended."""
        if not self._population:
            return True
        known = self._study.get_trials(deepcopy=False)
        before = known[: len(known) // self._population * self._population]
        return all(trial.state.is_finished() for trial in before)

    def ask(self, run_of: Any = None) -> TrialRecord:
        """A new trial with its parameters; `run_of(number)` names its run."""
        with _quiet():
            trial = self._live_trial(self._study.ask(self._distributions))
        self._describe(trial, run_of)
        return self.record(trial.number)

    def reattach(self, number: int, run_of: Any = None) -> TrialRecord:
        """A trial that was running when the search ended. What it had no suggestion for yet, it
        gets now."""
        known = self._frozen(number)
        missing = self._distributions.keys() - known.params.keys()
        if missing or RUN not in known.user_attrs:
            trial = self._trial(number)
            with _quiet():
                for parameter in self.space:
                    suggest(trial, parameter)
            self._describe(trial, run_of)
        return self.record(number)

    def _describe(self, trial: optuna.trial.Trial, run_of: Any) -> None:
        """Note where a trial comes from, and last where its run is."""
        if self._population:
            sampler: Any = self._sampler
            trial.set_user_attr(PARENT, sampler.parent(self._study, trial.number))
        if run_of is not None:
            trial.set_user_attr(RUN, str(run_of(trial.number)))

    # Telling

    def report(self, number: int, index: int, value: float) -> bool:
        """Note validation `index` of a trial; True where the pruner wants it ended."""
        trial = self._trial(number)
        if index not in self._frozen(number).intermediate_values:
            trial.report(value, index)
        with _quiet():
            return bool(trial.should_prune())

    def note_ending(self, number: int, ending: TrialEnding, reason: str) -> None:
        """Write down how a trial is about to end, before its processes are."""
        # The decision comes last: it counts only together with its reason.
        self._storage.set_trial_user_attr(self._trial_id(number), REASON, reason)
        self._storage.set_trial_user_attr(self._trial_id(number), ENDING, str(ending))

    def noted_ending(self, number: int) -> TrialEnd | None:
        """What `note_ending` wrote down."""
        attributes = self._frozen(number).user_attrs
        if ENDING not in attributes:
            return None
        return TrialEnd(TrialEnding(attributes[ENDING]), reason=str(attributes.get(REASON, "")))

    def tell(self, number: int, end: TrialEnd) -> None:
        """Finish a trial. A second time does nothing."""
        from optuna.trial import TrialState

        if end.reason:
            self.note_ending(number, end.ending, end.reason)
        values: list[float] | None = None
        if end.ending is TrialEnding.COMPLETE:
            state, values = TrialState.COMPLETE, list(end.values)
        else:
            state = TrialState.PRUNED if end.ending is TrialEnding.PRUNED else TrialState.FAIL
        try:
            with _quiet():
                self._study.tell(number, values, state=state, skip_if_finished=True)
            self._live.pop(number, None)
        except RuntimeError:
            # A grid that is exhausted asks `optimize` to stop, which we do not use.
            if not self._frozen(number).state.is_finished():
                raise

    # Looking

    def records(self) -> list[TrialRecord]:
        return [_record(frozen) for frozen in self._study.get_trials(deepcopy=False)]

    def record(self, number: int) -> TrialRecord:
        return _record(self._frozen(number))

    def best(self) -> list[TrialRecord]:
        """The complete trials: best first, or those of the Pareto front."""
        done = [one for one in self.records() if one.state == TrialEnding.COMPLETE]
        if len(self.objectives) > 1:
            return pareto_front(done, self.objectives)
        sign = 1 if self.objectives[0].direction == "min" else -1
        return sorted(done, key=lambda one: (sign * one.values[0], one.number))

    def importances(self) -> dict[str, float]:
        """How much each parameter explains of the first objective; empty where too few trials or
        no scikit-learn are there."""
        from optuna.importance import get_param_importances

        def first(trial: optuna.trial.FrozenTrial) -> float:
            return float(trial.values[0])

        try:
            with _quiet():
                return dict(get_param_importances(self._study, target=first))
        except (ValueError, RuntimeError, ImportError):
            return {}

    def _frozen(self, number: int) -> optuna.trial.FrozenTrial:
        return self._storage.get_trial(self._trial_id(number))

    def _trial_id(self, number: int) -> int:
        return int(self._storage.get_trial_id_from_study_id_trial_number(self._id, number))

    def _trial(self, number: int) -> optuna.trial.Trial:
        import optuna

        if number not in self._live:
            with _quiet():
                return self._live_trial(optuna.trial.Trial(self._study, self._trial_id(number)))
        return self._live[number]

    def _live_trial(self, trial: optuna.trial.Trial) -> optuna.trial.Trial:
        self._live[trial.number] = trial
        return trial


def suggest(trial: optuna.trial.Trial, parameter: Parameter) -> Any:
    """One suggestion through Optuna's public names."""
    if parameter.choices:
        return trial.suggest_categorical(parameter.name, parameter.choices)
    if parameter.whole:
        low, high, step = int(parameter.low), int(parameter.high), int(parameter.step or 1)
        return trial.suggest_int(parameter.name, low, high, step=step, log=parameter.log)
    return trial.suggest_float(
        parameter.name, parameter.low, parameter.high, step=parameter.step, log=parameter.log
    )


def make_sampler(
    name: str, seed: int, space: Sequence[Parameter], population: int = 0, metrics: int = 1
) -> optuna.samplers.BaseSampler:
    """Optuna's sampler, or our own for population-based training.

    All have Optuna's defaults, except that `tpe` with one metric draws fewer trials at random.
    """
    from optuna import samplers

    if name == "pbt":
        from multi_gpu_training.search.population import PopulationSampler

        return PopulationSampler(space, population, seed)
    if name == "random":
        return samplers.RandomSampler(seed=seed)
    if name == "grid":
        return samplers.GridSampler({one.name: one.grid() for one in space}, seed=seed)
    if name == "cmaes":
        return samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
    if name == "nsga2":
        return samplers.NSGAIISampler(seed=seed)
    if name == "tpe" and metrics == 1:
        return samplers.TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS)
    return samplers.TPESampler(seed=seed)


def make_pruner(name: str) -> optuna.pruners.BasePruner:
    from optuna import pruners

    if name == "median":
        return pruners.MedianPruner()
    if name == "hyperband":
        return pruners.HyperbandPruner()
    if name == "asha":
        return pruners.SuccessiveHalvingPruner()
    return pruners.NopPruner()


def study_problems(
    sampler: str, pruner: str, objectives: Sequence[SearchObjective], space: Sequence[Parameter]
) -> list[str]:
    """Which of these do not go together."""
    problems = []
    if sampler not in SAMPLERS:
        problems.append(f"--sampler {brief(sampler)} is unknown; use {', '.join(SAMPLERS)}")
    if pruner not in PRUNERS:
        problems.append(f"--pruner {brief(pruner)} is unknown; use {', '.join(PRUNERS)}")
    names = [one.metric for one in objectives]
    if len(set(names)) < len(names):
        problems.append(f"--metric {', '.join(names)}: one is given twice; name each once")
    if len(objectives) > 1:
        if pruner not in ("none", *(() if pruner in PRUNERS else (pruner,))):
            problems.append(
                f"--pruner {pruner} cannot judge {len(objectives)} metrics at once "
                f"({', '.join(names)}): Optuna prunes by one; use --pruner none, or one --metric"
            )
        if sampler in ONE_OBJECTIVE:
            problems.append(
                f"--sampler {sampler} optimizes one metric, and {len(objectives)} are given; use "
                "--sampler nsga2 or tpe"
            )
    if sampler == "pbt" and pruner != "none":
        problems.append(
            "--sampler pbt replaces weak members itself; use --pruner none, or --sampler tpe"
        )
    if sampler == "cmaes" and all(one.choices for one in space):
        problems.append(
            "--sampler cmaes works on ranges of numbers, and every --param is a list of choices; "
            "use --sampler tpe"
        )
    return problems


def pareto_front(
    trials: Sequence[TrialRecord], objectives: Sequence[SearchObjective]
) -> list[TrialRecord]:
    """The trials that no other one beats in every objective, by the first objective."""
    signs = [1 if one.direction == "min" else -1 for one in objectives]
    rows = [tuple(s * v for s, v in zip(signs, one.values, strict=True)) for one in trials]

    def beaten(row: tuple[float, ...]) -> bool:
        return any(
            other != row and all(a <= b for a, b in zip(other, row, strict=True)) for other in rows
        )

    found = [(row, trial) for row, trial in zip(rows, trials, strict=True) if not beaten(row)]
    return [trial for _, trial in sorted(found, key=lambda pair: (pair[0], pair[1].number))]


def _record(frozen: optuna.trial.FrozenTrial) -> TrialRecord:
    values = tuple(frozen.values) if frozen.values is not None else ()
    began, ended = frozen.datetime_start, frozen.datetime_complete
    return TrialRecord(
        frozen.number,
        frozen.state.name.lower(),
        dict(frozen.params),
        values,
        dict(frozen.intermediate_values),
        str(frozen.user_attrs.get(REASON, "")),
        str(frozen.user_attrs.get(RUN, "")),
        began.timestamp() if began is not None else 0.0,
        ended.timestamp() if ended is not None else None,
        frozen.user_attrs.get(PARENT),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Optuna's warnings on features that it calls experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def opened(url: str | None) -> Any:
    """What Optuna opens. SQLite waits long for other programs that read or write the same file."""
    if url is None or not url.startswith("sqlite"):
        return None if url == MEMORY else url
    from optuna.storages import RDBStorage

    return RDBStorage(url, engine_kwargs={"connect_args": {"timeout": BUSY_S}})


def storage_problem(error: BaseException) -> str | None:
    """What the storage's driver says, where the storage failed."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    if not isinstance(error, StorageInternalError | SQLAlchemyError):
        return None
    while error.__cause__ is not None:
        error = error.__cause__
    return (redact(str(error)).strip().splitlines() or [type(error).__name__])[0][:300]


@contextmanager
def storage_problems(again: str) -> Iterator[None]:
    """Tell them in one sentence; `again`: how to go on."""
    try:
        yield
    except Exception as error:
        problem = storage_problem(error)
        if problem is None:
            raise
        raise SearchError(
            f"the search's storage failed: {problem}; running trials were asked to save. Mend it, "
            f"then continue with {again}"
        ) from None


class SearchError(MultiGPUError):
    """The search cannot go on: every trial would fail."""

    code = "MGT800"


def sqlite_url(folder: Path) -> str:
    """The storage of a study that names none."""
    return f"sqlite:///{(folder / 'study.db').absolute()}"
