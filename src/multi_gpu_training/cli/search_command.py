"""`mgt search`: from flags or a YAML file to a search, a live table, and what it found."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from multi_gpu_training.cli.measured_script import folder_problems
from multi_gpu_training.cli.train_command import extra_settings
from multi_gpu_training.config_file import flatten, merge, read_config_file
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.recipes import RECIPES
from multi_gpu_training.run_places import is_url, name_problem
from multi_gpu_training.safe_output import brief, printable

if TYPE_CHECKING:
    from multi_gpu_training.search.run_search import SearchResult
    from multi_gpu_training.search.searcher import ActiveTrial
    from multi_gpu_training.search.settings import SearchSettings
    from multi_gpu_training.search.study import TrialRecord

ROWS = 15  # finished trials in the live table
OWN = ("study", "save_dir", "resume", "forecast")  # flags that are not settings of the search
PLACED = ("world_size", "save_dir", "run_name", "resume", "device_ids", "local_dir")


@dataclass(frozen=True)
class SearchFlags:
    """What the command line said; None where it said nothing."""

    target: str
    words: list[str]
    params: list[str]
    given: Mapping[str, Any]
    study: str | None
    save_dir: str
    resume: bool
    forecast: bool


def search(flags: SearchFlags) -> int:
    """0 if at least one trial is complete, else 1; as a signal asks for it otherwise."""
    from multi_gpu_training.launch.signals import AskedToEnd
    from multi_gpu_training.search.planning_ahead import batch_check, forecast_search
    from multi_gpu_training.search.repeats import repeat_best
    from multi_gpu_training.search.run_search import find_slots, run_search
    from multi_gpu_training.search.search_report import write_report
    from multi_gpu_training.search.study import require_optuna

    console = Console(highlight=False, soft_wrap=True)
    settings, folder = resolve(flags)
    require_optuna(settings.sampler)
    settings.check()
    slots = find_slots(settings)
    if flags.forecast:
        for line in forecast_search(settings, slots):
            console.print(line, markup=False)
        return 0
    console.print(opening(settings, folder, slots.count), markup=False)
    infeasible = batch_check(settings, slots, lambda text: console.print(text, markup=False))
    shown = LiveTable(console, settings)
    again = f"mgt search {shlex.quote(str(folder))} --resume"
    try:
        with shown:
            result = run_search(
                settings, folder, flags.resume, shown=shown.show, infeasible=infeasible
            )
            repeats = repeat_best(settings, folder, slots, result, shown.say)
    except AskedToEnd as asked:
        console.print(f"stopped; running trials have saved. Continue with: {again}", markup=False)
        return 128 + asked.number
    report = write_report(result, settings, repeats)
    closing(console, settings, result, repeats)
    console.print(f"report: {report}", markup=False)
    return 0 if result.front else 1


# What was asked for


def resolve(flags: SearchFlags) -> tuple[SearchSettings, Path]:
    """The settings and the folder: flags win over a YAML file; a resumed search has its own."""
    from multi_gpu_training.search.settings import FILE, SearchSettings, read_settings
    from multi_gpu_training.search.space import read_words

    # A flag that may be repeated comes as a tuple, empty where it was not given.
    given = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in flags.given.items()
        if value is not None and value != ()
    }
    if flags.params:
        given["params"] = read_words(flags.params)
    target, base = flags.target, Path(flags.save_dir).expanduser()
    if is_url(flags.save_dir):
        raise ConfigError(f"--save-dir {brief(flags.save_dir)}: a search needs a local folder")
    if flags.resume:
        folder = Path(target) if (Path(target) / FILE).is_file() else None
        if folder is None and flags.study is not None:
            folder = base / flags.study
        if folder is None:
            raise ConfigError(
                f"--resume {brief(target)}: give the search's folder, as in `mgt search "
                "runs/search/NAME --resume`"
            )
        return SearchSettings.load(folder, **given), folder
    if (Path(target) / FILE).is_file():
        raise ConfigError(f"{target} is a search; add --resume to continue it")
    found = {**from_target(target, flags.words), **given}
    said = found.pop("study", None)
    if not isinstance(said, str | int | None):
        raise ConfigError(f"study: {brief(said)} is not a name; write it as in `study: mine`")
    if flags.study is not None:
        name = flags.study
    else:
        name = default_name(found["target"]) if said is None else str(said)
    problem = name_problem(name)
    if problem is not None:
        raise ConfigError(f"--study {brief(name)}: {problem}")
    problems = folder_problems("--save-dir", str(base))
    if problems:
        raise ConfigError(problems)
    return read_settings(found), base / name


def from_target(target: str, words: Sequence[str]) -> dict[str, Any]:
    """The target and its fixed settings; a YAML file with `params` is a whole search."""
    if target.endswith(".py"):
        if not Path(target).is_file():
            raise ConfigError(f"mgt search {brief(target)}: no such file", code="MGT104")
        return {"target": target, "words": list(words)}
    fixed = flatten(dict(extra_settings(list(words))))
    if target in RECIPES:
        return {"target": target, "settings": _own(fixed)}
    values = read_config_file(target)
    if "params" in values:  # the file describes the search
        inner = values.pop("target", values.pop("recipe", None))
        if not isinstance(inner, str):
            raise ConfigError(
                f"{target} has no `target`; add one, as in `target: image`", code="MGT103"
            )
        own = values.pop("settings", None) or {}
        if not isinstance(own, dict):
            raise ConfigError(
                f"{target}: settings={brief(own)} is not a mapping; write `settings:` with lines "
                "such as `epochs: 5` below it",
                code="MGT103",
            )
        below = from_target(inner, _words(values.pop("words", None), target))
        metric = values.pop("metric", None)
        if metric is not None:
            values["metric"] = [metric] if isinstance(metric, str) else metric
        if below["target"].endswith(".py"):
            return {**values, **below, "words": [*below["words"], *words]}
        return {
            **values,
            **below,
            "settings": merge(below["settings"], _own(flatten(own)), _own(fixed)),
        }
    recipe = fixed.pop("recipe", values.pop("recipe", None))
    if not isinstance(recipe, str):
        raise ConfigError(f"{target} names no recipe; add `recipe: image` to it", code="MGT103")
    return {"target": recipe, "settings": _own(merge(flatten(values), fixed))}


def _words(given: Any, target: str) -> list[str]:
    """The arguments of a script as its YAML file lists them."""
    listed = [] if given is None else given
    if not isinstance(listed, list) or not all(isinstance(word, str) for word in listed):
        raise ConfigError(
            f"{target}: words={brief(given)} is not a list of texts; write them as in "
            'words: ["--depth", "3"]',
            code="MGT103",
        )
    return listed


def _own(fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Fixed settings, without those that the search sets for every trial."""
    wrong = [name for name in PLACED if name in fixed]
    if wrong:
        remedy = "use --gpus-per-trial and --parallel" if wrong[0] == "world_size" else "drop it"
        raise ConfigError(f"{wrong[0]}: the search sets this for every trial; {remedy}")
    return dict(fixed)


def default_name(target: str) -> str:
    word = re.sub(r"[^A-Za-z0-9]+", "-", Path(target).stem).strip("-") or "search"
    return f"{word}-{datetime.now():%Y%m%d-%H%M%S}"


# What is shown


def opening(settings: SearchSettings, folder: Path, slots: int) -> str:
    names = ", ".join(f"{one.name} ({one.words})" for one in settings.space())
    goals = ", ".join(f"{one.metric} ({one.direction})" for one in settings.objectives())
    return (
        f"{settings.trials} trials of {settings.target}, {slots} at a time: {names}\n"
        f"optimizing {goals} with {settings.sampler}, pruner {settings.pruner}; {folder}"
    )


class LiveTable:
    """The newest trials on a terminal; elsewhere one line for each that ends."""

    def __init__(self, console: Console, settings: SearchSettings) -> None:
        self._console = console
        self._settings = settings
        self._done: list[TrialRecord] = []
        self._counts: dict[str, int] = {}
        self._next = 0.0
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> LiveTable:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def show(self, active: Sequence[ActiveTrial], ended: TrialRecord | None) -> None:
        if ended is not None:
            self._done.append(ended)
            self._counts[ended.state] = self._counts.get(ended.state, 0) + 1
            if self._live is None:
                self.say(one_line(ended))
        now = time.monotonic()
        if self._live is None or (ended is None and now < self._next):
            return
        self._next = now + 0.5
        self._live.update(self.table(active), refresh=True)

    def table(self, active: Sequence[ActiveTrial]) -> Table:
        names = [one.name for one in self._settings.space()]
        counts = ", ".join(f"{count} {state}" for state, count in self._counts.items())
        title = f"{counts or 'starting'}, {len(active)} running of {self._settings.trials}"
        table = Table("trial", "state", *names, *self._settings.metric, "", title=title)
        for record in self._done[-ROWS:]:
            table.add_row(*cells(record, names, record.values, len(self._settings.metric)))
        for one in active:
            latest = (*one.latest,)
            table.add_row(*cells(one.record, names, latest, len(self._settings.metric)))
        return table


def cells(
    record: TrialRecord, names: Sequence[str], values: Sequence[float], count: int
) -> list[str]:
    """One row; nothing of it is markup."""
    from rich.markup import escape

    shown = [f"{value:.6g}" for value in values] + [""] * (count - len(values))
    params = [escape(printable(text(record.params.get(name, "")))) for name in names]
    reason = escape(printable(record.reason.splitlines()[0][:60] if record.reason else ""))
    return [str(record.number), record.state, *params, *shown, reason]


def one_line(record: TrialRecord) -> str:
    params = " ".join(f"{name}={text(value)}" for name, value in record.params.items())
    values = " ".join(f"{value:.6g}" for value in record.values) or "-"
    why = f" ({record.reason.splitlines()[0]})" if record.reason else ""
    return printable(f"trial {record.number} {record.state}: {values}  {params}{why}")


def text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def descent(result: SearchResult, record: TrialRecord) -> str:
    """Through which trials the weights came, and with which values."""
    steps = []
    current: TrialRecord | None = record
    while current is not None:
        params = " ".join(f"{name}={text(value)}" for name, value in current.params.items())
        steps.append(f"trial {current.number} ({params})")
        current = None if current.parent is None else result.trials[current.parent]
    return printable(f"  its weights: {', then '.join(reversed(steps))}")


def closing(
    console: Console, settings: SearchSettings, result: SearchResult, repeats: Sequence[Any]
) -> None:
    states = [one.state for one in result.trials]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    console.print(f"{len(states)} trials: {counts}", markup=False)
    if not result.front:
        console.print("no trial is complete, so there is no best one", markup=False)
        return
    shown = result.front[:1] if len(settings.metric) == 1 else result.front
    console.print("best:" if len(shown) == 1 else "Pareto front:", markup=False)
    for record in shown:
        console.print(f"  {one_line(record)}", markup=False)
    for one in repeats:
        console.print(f"  {one.words()}", markup=False)
    if shown[0].parent is not None:
        console.print(descent(result, shown[0]), markup=False)
        console.print(f"its model: {result.folder / shown[0].run}", markup=False)
        return
    command = f"mgt train {shlex.quote(str(result.folder / 'best.yaml'))}"
    if settings.is_script:
        command = f"{result.folder / 'best.yaml'} holds its MultiGPUConfig fields"
    console.print(f"train it: {command}", markup=False)
    sys.stdout.flush()
