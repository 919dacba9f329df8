"""What a search may vary: parameters as the command line and a YAML file write them.

1e-5..1e-1:log     a float on a logarithmic scale
16..256            a whole number, because both ends are
0.0..0.5:step=0.1  every tenth
adamw,sgd          one of these
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from multi_gpu_training.config_file import read_override
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.safe_output import brief
from multi_gpu_training.setting_names import ALIASES

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

EXAMPLES = "learning_rate=1e-5..1e-1:log, batch_size=16..256:step=16 or schedule=constant,cosine"
MOST_CHOICES = 1000
# One of several choices: in quotes where it holds a comma.
CHOICE = re.compile(r"""\s*("(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|[^,]*?)\s*(?:,|$)""")
LIKE_A_RANGE = re.compile(r"[-+.\d][-+.\de]*?\.\.[-+.\d]")
# Fields that say where and how a trial runs; the search sets them itself.
NOT_SEARCHED = {
    *("save_dir", "local_dir", "run_name", "recipe", "resume", "resume_anyway", "rank"),
    *("local_rank", "world_size", "device", "device_ids", "share_gpu", "forecast", "seed"),
}


@dataclass(frozen=True)
class Parameter:
    """One parameter: `choices`, or everything from `low` to `high`."""

    name: str
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None
    whole: bool = False

    def distribution(self) -> BaseDistribution:
        """The same in Optuna's words."""
        from optuna import distributions

        if self.choices:
            return distributions.CategoricalDistribution(self.choices)
        if self.whole:
            step = int(self.step or 1)
            return distributions.IntDistribution(int(self.low), int(self.high), self.log, step)
        return distributions.FloatDistribution(self.low, self.high, self.log, self.step)

    def grid(self) -> list[Any]:
        """Every value, for a grid search."""
        if self.choices:
            return list(self.choices)
        step = self.step or (1 if self.whole and not self.log else None)
        if step is None:
            raise ConfigError(
                f"--sampler grid needs a finite number of values, and {self.name} has none; write "
                f"them out, as in {self.name}=0.1,0.2,0.3, or add :step=..."
            )
        count = math.floor((self.high - self.low) / step + 1e-9) + 1
        if count > MOST_CHOICES:
            raise ConfigError(f"{self.name} has {count:,} values in a grid; use a larger step")
        found = [spaced(self.low, step, number) for number in range(count)]
        return [int(value) for value in found] if self.whole else found

    def extremes(self) -> list[Any]:
        """The values that are tried against the config before anything runs."""
        if self.choices:
            return list(self.choices)
        if self.whole:
            return [int(self.low), int(self.high)]
        inside = self.low + (self.step or 0.381966 * (self.high - self.low))
        return [self.low, inside, self.high]  # 16.0 and 1e3 are whole numbers, 391.8 is not

    def middle(self) -> Any:
        """A typical value."""
        if self.choices:
            return self.choices[0]
        found = math.sqrt(self.low * self.high) if self.log else (self.low + self.high) / 2
        return round(found) if self.whole else found

    @property
    def words(self) -> str:
        """As the command line writes it."""
        if self.choices:
            return ",".join(str(choice) for choice in self.choices)
        low, *_, high = self.extremes()
        step = f":step={self.step:g}" if self.step is not None else ""
        return f"{low}..{high}{':log' if self.log else ''}{step}"


def read_space(given: Mapping[str, Any]) -> list[Parameter]:
    """The parameters of a search, by name. All problems are reported together."""
    problems: list[str] = []
    found: dict[str, Parameter] = {}
    for name, spec in given.items():
        try:
            parameter = read_parameter(str(name), spec)
        except ConfigError as error:
            problems += error.problems
            continue
        if parameter.name in found:
            problems.append(f"--param {parameter.name} is given twice; keep one")
        found[parameter.name] = parameter
    if not given:
        problems.append(f"a search needs at least one --param, such as {EXAMPLES}")
    if problems:
        raise ConfigError(problems)
    return list(found.values())


def read_words(words: Sequence[str]) -> dict[str, str]:
    """`name=spec` words of the command line as a mapping."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, spec = word.partition("=")
        if not equals or not name.strip() or not spec.strip():
            raise ConfigError(f"--param {brief(word)}: write NAME=VALUES, such as {EXAMPLES}")
        if name.strip() in found:
            raise ConfigError(f"--param {name.strip()} is given twice; keep one")
        found[name.strip()] = spec.strip()
    return found


def read_parameter(name: str, spec: Any) -> Parameter:
    """One parameter from its text, or from a list of choices."""
    name = ALIASES.get(name.replace("-", "_"), name.replace("-", "_"))
    if name in NOT_SEARCHED:
        raise ConfigError(
            f"--param {name}: the search sets this itself for every trial; drop it"
            + ("; --repeat-best K --seeds N repeats the best trials" if name == "seed" else "")
        )
    if isinstance(spec, list | tuple):
        return _choices(name, list(spec))
    text = str(spec)
    parts = split_choices(text)
    if len(parts) == 1 and ".." in text:
        return _range(name, text)
    problem = None
    if any(LIKE_A_RANGE.match(part) for part in parts):
        problem = "give one range, or a list of values"
    elif not all(parts):
        problem = 'a value is missing; for none write null, for an empty text ""'
    if problem is not None:
        raise ConfigError(f"--param {name}={brief(text, 80)}: {problem}")
    return _choices(name, [read_override(f"{name}={part}")[1] for part in parts])


def split_choices(text: str) -> list[str]:
    """What stands between the commas; a comma in quotes is none."""
    found, start = [], 0
    while True:
        match = CHOICE.match(text, start)
        if match is None:  # a quote that ends before the comma: read_override names it
            return text.split(",")
        found.append(match[1])
        if not match[0].endswith(","):
            return found
        start = match.end()


def _choices(name: str, values: list[Any]) -> Parameter:
    if len(values) < 2:
        raise ConfigError(
            f"--param {name}={brief(values[0]) if values else ''}: one value leaves nothing to "
            f"search; give several ({EXAMPLES}), or set it as {name}=VALUE"
        )
    odd = [value for value in values if not isinstance(value, str | bool | int | float | None)]
    if odd:
        raise ConfigError(
            f"--param {name}: {brief(odd[0])} is neither text, number nor true or false; "
            "only those can be searched"
        )
    if len(set(values)) < len(values):
        raise ConfigError(
            f"--param {name}={brief(values)} repeats a value; name each once (1, 1.0 and true are "
            "the same to Optuna)"
        )
    if len(values) > MOST_CHOICES:
        raise ConfigError(f"--param {name} has {len(values):,} values; use {MOST_CHOICES} at most")
    return Parameter(name, tuple(values))


def _range(name: str, text: str) -> Parameter:
    asked = f"--param {name}={brief(text, 80)}"
    ends, *marks = text.split(":")
    log, step = False, None
    for mark in marks:
        if mark == "log":
            log = True
        elif mark.startswith("step="):
            step = _number(mark.removeprefix("step="), asked)
        else:
            raise ConfigError(f"{asked}: {mark[:40]!r} is unknown; use :log or :step=NUMBER")
    first, _, last = ends.partition("..")
    low, high = _number(first, asked), _number(last, asked)
    whole = all(_is_whole(end) for end in (first, last)) and (step is None or step == int(step))
    problem = None
    if "..." in text:
        problem = "three dots; write 0.5 for .5"
    elif whole and max(abs(low), abs(high)) >= 2**53:
        problem = "whole numbers from 2**53 on are not exact; use smaller ones"
    elif low >= high:
        problem = "the first number must be smaller than the second"
    elif log and low <= 0:
        problem = "a logarithmic scale needs numbers above 0; raise the first or drop :log"
    elif log and step is not None:
        problem = "use :log or :step=, not both"
    elif step is not None and not 0 < step <= high - low:
        problem = f"the step must lie above 0 and be at most {high - low:g}"
    if problem is not None:
        raise ConfigError(f"{asked}: {problem}")
    if step is not None:  # as Optuna would do, with a warning
        high = spaced(low, step, math.floor((high - low) / step + 1e-9))
    return Parameter(name, (), low, high, log, step, whole)


def spaced(low: float, step: float, number: int) -> float:
    """low + number * step as people count: 0.1 + 2 * 0.1 is 0.3."""
    return float(Decimal(str(low)) + number * Decimal(str(step)))


def _is_whole(text: str) -> bool:
    return text.strip().lstrip("+-").isdecimal()


def _number(text: str, asked: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise ConfigError(f"{asked}: {text[:40]!r} is not a number; write LOW..HIGH, as 1e-5..1e-1")
    return found
