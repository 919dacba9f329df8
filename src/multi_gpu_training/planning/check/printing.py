"""The report in a terminal: a line for each finding, with what to do below it."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from multi_gpu_training.planning.check.findings import Finding, Level, Report

if TYPE_CHECKING:
    from multi_gpu_training.planning.check.advice import Recommendation
    from multi_gpu_training.planning.check.fit import Fit

STYLES = {Level.PASS: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}
INDENT = 7  # of what stands beside pass, warn, fail
TOPIC_WIDTH = 16


class Printer:
    """Shows findings as they come, under the heading of their group."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._group = ""

    @property
    def begun(self) -> bool:
        return bool(self._group)

    def show(self, finding: Finding) -> None:
        self._head(finding.group)
        text = f"{finding.host}: {finding.text}" if finding.host else finding.text
        lines = self._wrap(f"{finding.topic.ljust(TOPIC_WIDTH)} {text}")
        if finding.remedy:
            lines += self._wrap(f"{' ' * TOPIC_WIDTH} -> {finding.remedy}")
        level = Text(f"  {finding.level.value} ", STYLES[finding.level])
        self.console.print(level + Text(lines[0]), soft_wrap=True)
        for line in lines[1:]:
            self.console.print(Text(" " * INDENT + line), soft_wrap=True)

    def _head(self, group: str) -> None:
        if group != self._group:
            self.console.print(Text(f"\n{group}" if self._group else group, "bold"))
            self._group = group

    def note(self, group: str, text: str) -> None:
        """A word about what goes on, under the heading that it belongs to."""
        self._head(group)
        self.console.print(Text(f"       {text}", "dim"), soft_wrap=True)

    def _wrap(self, text: str) -> list[str]:
        """Lines for the space beside the level; what follows the first stands under the text."""
        return textwrap.wrap(
            text,
            max(40, self.console.width - INDENT),
            subsequent_indent=" " * (TOPIC_WIDTH + 1),
            break_long_words=False,
            break_on_hyphens=False,
        )

    def summary(self, report: Report) -> None:
        counts = ", ".join(f"{report.count(level)} {level.value}" for level in Level)
        failed = [f.topic for f in report.findings if f.level is Level.FAIL]
        level, text = Level.PASS, "Ready to train."
        if failed:
            level, text = Level.FAIL, f"Not ready to train: {', '.join(dict.fromkeys(failed))}"
        elif report.count(Level.WARN):
            level, text = Level.WARN, "Ready to train; look at the warnings."
        self.console.print()
        for line in textwrap.wrap(f"{counts}. {text}", self.console.width):
            self.console.print(Text(line, STYLES[level]), soft_wrap=True)

    def advice(self, fit: Fit, advice: Recommendation) -> None:
        """The tables and the command that `mgt check RECIPE` ends with."""
        from multi_gpu_training.planning.check.advice import batch_text, memory_rows, time_rows

        memory = _table(f"Memory of one {fit.unit}, {fit.batch} samples", "part", "bytes", "share")
        for row in memory_rows(fit):
            memory.add_row(*row)
        titles = ("", "step", "samples/s", "speed-up", "epoch", "training")
        time = _table("Time (steps alone, measured here)", *titles)
        for cells in time_rows(fit):
            time.add_row(*cells)
        for table in (memory, time):
            self.console.print()
            self.console.print(table)
        how = f"{advice.ranks} {fit.unit}{'s' if advice.ranks > 1 else ''}"
        self.console.print(Text("\nRecommended", "bold"))
        batch = batch_text(fit.chosen.batch)
        self.say(
            f"{advice.mode}, {how}, {batch}, {advice.num_workers} loader workers, "
            f"{advice.precision}"
        )
        for reason in advice.reasons:
            self.say(f"- {reason}")
        self.console.print()
        self.console.print(Text(f"  {advice.command}", "bold"), soft_wrap=True)

    def say(self, text: str) -> None:
        indent = "  " if not text.startswith("- ") else "    "
        for line in textwrap.wrap(
            text, self.console.width, initial_indent="  ", subsequent_indent=indent
        ):
            self.console.print(Text(line), soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    return table
