"""What checks found: one line each with what to do about it, and how a terminal shows them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from rich.console import Console
from rich.text import Text

SCHEMA = 1


class Level(StrEnum):
    PASS = "pass"
    WARN = "warn"  # training runs, but slower than it could or not as asked
    FAIL = "fail"  # training cannot run, or gives wrong results


@dataclass(frozen=True)
class Finding:
    """`remedy` says what to do; a line that passes needs none. `facts` are for programs. `host` is
    set where several machines are checked."""

    group: str
    topic: str
    level: Level
    text: str
    remedy: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    host: str = ""

    def plain(self) -> dict[str, Any]:
        """As JSON has it: null where there is nothing to do, or one machine alone."""
        return {**asdict(self), "remedy": self.remedy or None, "host": self.host or None}

    @staticmethod
    def from_plain(raw: Mapping[str, Any]) -> Finding:
        known = {key: value for key, value in raw.items() if value is not None}
        return Finding(**{**known, "level": Level(raw["level"])})


@dataclass(frozen=True)
class Topic:
    """Makes the findings about one thing; `facts` go with each of them."""

    group: str
    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def passed(self, text: str, **facts: Any) -> Finding:
        return Finding(self.group, self.name, Level.PASS, text, facts={**self.facts, **facts})

    def warn(self, text: str, remedy: str, **facts: Any) -> Finding:
        return Finding(self.group, self.name, Level.WARN, text, remedy, {**self.facts, **facts})

    def fail(self, text: str, remedy: str, **facts: Any) -> Finding:
        return Finding(self.group, self.name, Level.FAIL, text, remedy, {**self.facts, **facts})


@dataclass(frozen=True)
class Group:
    """A heading of the report, and the findings under it."""

    name: str

    def about(self, topic: str, **facts: Any) -> Topic:
        return Topic(self.name, topic, facts)

    def passed(self, topic: str, text: str, **facts: Any) -> Finding:
        return self.about(topic).passed(text, **facts)

    def warn(self, topic: str, text: str, remedy: str, **facts: Any) -> Finding:
        return self.about(topic).warn(text, remedy, **facts)

    def fail(self, topic: str, text: str, remedy: str, **facts: Any) -> Finding:
        return self.about(topic).fail(text, remedy, **facts)


@dataclass
class CheckReport:
    """All findings, told to `heard` as they come. `advice` is what `mgt check RECIPE` ends with."""

    heard: Callable[[Finding], None] = lambda finding: None
    findings: list[Finding] = field(default_factory=list)
    curve: list[tuple[int, float]] = field(default_factory=list)
    advice: dict[str, Any] | None = None

    def add(self, findings: Iterable[Finding], host: str = "") -> None:
        for finding in findings:
            found = replace(finding, host=host) if host else finding
            self.findings.append(found)
            self.heard(found)

    def count(self, level: Level) -> int:
        return sum(finding.level is level for finding in self.findings)

    @property
    def exit_code(self) -> int:
        return 1 if self.count(Level.FAIL) else 0  # warnings do not stop a script

    def plain(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "schema": SCHEMA,
            "ready": self.exit_code == 0,
            "counts": {level.value: self.count(level) for level in Level},
            "findings": [finding.plain() for finding in self.findings],
            "all_reduce": [
                {"bytes": size, "time_us": seconds * 1e6} for size, seconds in self.curve
            ],
            "advice": self.advice,
        }


# In a terminal

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

    def summary(self, report: CheckReport) -> None:
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

    def say(self, text: str) -> None:
        indent = "    " if text.startswith("- ") else "  "  # under the words of a list item
        wide = self.console.width
        for line in textwrap.wrap(text, wide, initial_indent="  ", subsequent_indent=indent):
            self.console.print(Text(line), soft_wrap=True)
