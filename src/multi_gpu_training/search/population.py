"""Population-based training: members train side by side, and the worst go on from the best.

Trial g * size + m is member m in generation g. After each generation, every member of the last
quarter takes the weights and values of one of the first quarter, with the values changed a little;
all others continue their own run. After Jaderberg et al. 2017.

Whatever is decided follows from the study's results and its seed alone. So a search that was killed
decides the same again, and nothing but Optuna's storage has to remember it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from multi_gpu_training.errors import MultiGPUError
from multi_gpu_training.search.space import Parameter

SHARE = 4  # the best and the worst are a quarter each
FACTORS = (0.8, 1.2)
ANOTHER_CHOICE = 0.25  # how often a choice is drawn again


class PopulationSampler(BaseSampler):
    """Optuna's side of it: which values a member trains with next, and from whose weights."""

    def __init__(self, space: Sequence[Parameter], size: int, seed: int) -> None:
        self._space = {one.name: one for one in space}
        self.size = size
        self._seed = seed

    def parent(self, study: Study, number: int) -> int | None:
        """The trial whose weights this one continues; None in the first generation."""
        if number < self.size:
            return None
        first = number // self.size * self.size - self.size
        before = study.get_trials(deepcopy=False)[first : first + self.size]
        sign = -1.0 if study.direction is StudyDirection.MAXIMIZE else 1.0
        done = [trial for trial in before if trial.state is TrialState.COMPLETE]
        ranked = sorted(done, key=lambda trial: (sign * float(trial.values[0]), trial.number))
        if not ranked:
            raise MultiGPUError(
                f"no trial from {first} to {first + self.size - 1} is complete, so there is "
                "nothing to continue; their reasons are in the report"
            )
        many = max(1, self.size // SHARE)
        own = number - self.size
        kept = [trial.number for trial in ranked[: max(1, self.size - many)]]
        if own in kept:
            return own
        return self._draws(number, "parent").choice([trial.number for trial in ranked[:many]])

    def values(self, study: Study, number: int) -> dict[str, Any]:
        parent = self.parent(study, number)
        draws = self._draws(number, "values")
        if parent is None:
            return {name: drawn(one, draws) for name, one in self._space.items()}
        inherited: Mapping[str, Any] = study.get_trials(deepcopy=False)[parent].params
        if parent == number - self.size:
            return dict(inherited)
        return {name: near(one, inherited[name], draws) for name, one in self._space.items()}

    def _draws(self, number: int, what: str) -> random.Random:
        return random.Random(f"{self._seed}/{number}/{what}")

    # What Optuna calls

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return {name: one.distribution() for name, one in self._space.items()}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self.values(study, trial.number)

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        return self.values(study, trial.number)[param_name]


def drawn(one: Parameter, draws: random.Random) -> Any:
    """Any value of a parameter."""
    if one.choices:
        return draws.choice(one.choices)
    if one.log:
        return fitted(one, math.exp(draws.uniform(math.log(one.low), math.log(one.high))))
    return fitted(one, draws.uniform(one.low, one.high))


def near(one: Parameter, value: Any, draws: random.Random) -> Any:
    """A value a fifth smaller or larger; of choices mostly the same one."""
    if one.choices:
        return draws.choice(one.choices) if draws.random() < ANOTHER_CHOICE else value
    return fitted(one, value * draws.choice(FACTORS))


def fitted(one: Parameter, value: float) -> Any:
    """The nearest value that the parameter has."""
    if one.step is not None:
        value = one.low + round((value - one.low) / one.step) * one.step
    value = min(max(value, one.low), one.high)
    return round(value) if one.whole else value
