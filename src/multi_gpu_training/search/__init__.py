"""Search hyperparameters: one process suggests and decides, every trial is an ordinary run.

space        what may vary, as the command line and a YAML file write it
objectives   what is optimized, read from the events of a run
study        Optuna's storage, the one place that knows which trials there are
trial_run    a trial: a training in its own process and folder, or a Python function
searcher     the loop: ask, start, read, prune, tell; and going on after a kill
run_search   the folder of a search, its slots, the files that remain
settings     everything that was asked for, kept for --resume
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multi_gpu_training.search.run_search import SearchResult


def search(
    target: str | Callable[[dict[str, Any]], Any],
    params: Mapping[str, Any],
    *,
    folder: str | Path,
    metric: str | Sequence[str] = "val/loss",
    resume: bool = False,
    **settings: Any,
) -> SearchResult:
    """Search the best values of `params` and return what was found.

    target: a recipe's name, a script, or a function that takes a dict of values and returns one
        value, or one for each metric. A function that yields values can be pruned between them.
    params: by name, `"1e-5..1e-1:log"`, `"16..256"`, or a list of choices.
    folder: where the search is kept, with its report; with `resume=True` it goes on there.
    settings: trials, sampler, pruner, seed, storage, parallel, gpus_per_trial, value, settings
        (what every trial of a recipe is set to) and the others of `mgt search`.
    """
    from multi_gpu_training.search.planning_ahead import batch_check
    from multi_gpu_training.search.repeats import repeat_best
    from multi_gpu_training.search.run_search import find_slots, run_search
    from multi_gpu_training.search.search_report import write_report
    from multi_gpu_training.search.settings import SearchSettings, read_settings
    from multi_gpu_training.search.study import MEMORY, require_optuna

    metrics = [metric] if isinstance(metric, str) else list(metric)
    function = None if isinstance(target, str) else target
    given = {
        **settings,
        "target": target if isinstance(target, str) else "",
        "params": dict(params),
        "metric": metrics,
    }
    path = Path(folder)
    asked = SearchSettings.load(path, **given) if resume else read_settings(given)
    require_optuna(asked.sampler)
    asked.check()
    if function is not None:
        found = run_search(asked, path, resume, function)
    else:
        slots = find_slots(asked)
        infeasible = batch_check(asked, slots, lambda text: None)
        found = run_search(asked, path, resume, infeasible=infeasible)
        found.repeats = repeat_best(asked, path, slots, found)
    if asked.storage != MEMORY:
        write_report(found, asked, found.repeats)
    return found
