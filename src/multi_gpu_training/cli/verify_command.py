"""`mgt verify`: the table and the verdict."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from multi_gpu_training.cli.measured_script import command_of
from multi_gpu_training.errors import ConfigError


def verify_target(command: list[str], ranks: str, steps: int, device: str) -> int:
    """0 if several ranks compute what one computes, else 1."""
    from multi_gpu_training.planning.verify import TOLERANCE, verify

    command = command_of(command, "verify")
    if steps < 4:
        raise ConfigError(f"--steps {steps}: use at least 4, so an epoch ends within them")
    console = Console(highlight=False, soft_wrap=True)
    report = verify(command, _numbers(ranks), steps, device, console.print)
    table = Table("ranks", "largest difference", "in", "same samples", "validation", "")
    for outcome in report.outcomes:
        table.add_row(
            str(outcome.ranks),
            f"{outcome.worst:.1e}",
            outcome.worst_name,
            "yes" if outcome.same_samples else "no",
            outcome.metrics or "-",
            "same" if outcome.passed else "rounding" if report.rounding else "DIFFERENT",
        )
    console.print(table)
    console.print(f"||a-b|| / ||a|| of each tensor against one rank; limit {TOLERANCE:.0e}")
    if report.by_hand is not None:
        console.print(f"one rank against a plain PyTorch loop: {report.by_hand:.1e}")
    left_out = sorted({name for outcome in report.outcomes for name in outcome.left_out})
    if left_out:
        console.print(f"left out, gradient zero in exact arithmetic: {', '.join(left_out)}")
    console.print("dropout was off: its noise depends on the rank")
    for line in [*report.notes, *report.problems]:
        console.print(line, markup=False)
    for outcome in [] if report.rounding else report.outcomes:
        for line in outcome.problems:
            console.print(f"{outcome.ranks} ranks: {line}", markup=False)
    console.print("[bold]PASS[/bold]" if report.passed else "[bold]FAIL[/bold]")
    return 0 if report.passed else 1


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--ranks {text}: give numbers like 2,3") from None
    if not all(n >= 2 for n in numbers):
        raise ConfigError(f"--ranks {text}: each is compared with one rank; use 2 or more")
    return numbers
