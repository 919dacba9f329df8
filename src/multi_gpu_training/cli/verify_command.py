"""`mgt verify`: the table and the verdict."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from multi_gpu_training.cli.measured_script import (
    command_of,
    place_problems,
    rank_problems,
    too_small,
)
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.safe_output import brief

NOT_COMPARABLE = 3


def verify_target(command: list[str], ranks: str, steps: int, device: str) -> int:
    """0 if several ranks compute what one computes, 1 if not, 3 if that cannot be said."""
    from multi_gpu_training.planning.verify import verify

    command = command_of(command, "verify")
    if steps < 4:
        raise ConfigError(
            f"--steps {brief(steps, 40)}: use at least 4, so an epoch ends within them"
        )
    problems = [*place_problems(device, 1.0), *too_small(("--steps", steps, 4))]
    if problems:
        raise ConfigError(problems)
    # Whole lines for files and pipes; a terminal gets them broken between words.
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    report = verify(command, _numbers(ranks), steps, device, console.print)
    table = Table("ranks", "steps", "gradients", "worst in", "updates", "validation", "result")
    rows = [(str(outcome.ranks), outcome) for outcome in report.outcomes]
    if report.own is not None:
        rows.append((f"{report.own.ranks}, own", report.own))
    for name, outcome in rows:
        table.add_row(
            name,
            str(outcome.steps),
            f"{outcome.gradients:.1e}",
            outcome.worst_name,
            f"{outcome.moves:.1e}",
            outcome.metrics or ("none" if outcome.passed else "not reached"),
            "same" if outcome.passed else "DIFFERENT",
        )
    console.print(table)
    console.print(
        f"largest ||a-b|| / ||a|| of a tensor against one rank ({report.conditions.describe()})"
    )
    if report.by_hand is not None:
        console.print(f"one rank against a plain PyTorch loop: {report.by_hand:.1e}")
    for line in [*report.notes, *report.problems]:
        console.print(line, markup=False)
    if report.not_comparable is not None and not report.problems:
        console.print(f"NOT COMPARABLE: {report.not_comparable}", markup=False)
        return NOT_COMPARABLE
    console.print("[bold]PASS[/bold]" if report.passed else "[bold]FAIL[/bold]")
    return 0 if report.passed else 1


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--ranks {text[:80]}: use numbers like 2,3") from None
    if not all(n >= 2 for n in numbers):
        raise ConfigError(f"--ranks {text[:80]}: each is compared with one rank; use 2 or more")
    problems = rank_problems("--ranks", max(numbers))
    if problems:
        raise ConfigError(problems)
    return numbers
