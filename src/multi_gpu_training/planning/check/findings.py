"""What a check found: one line each, with what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

SCHEMA = 1


class Level(StrEnum):
    PASS = "pass"
    WARN = "warn"  # training runs, slower or otherwise than it could
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
        return {
            "group": self.group,
            "topic": self.topic,
            "level": self.level.value,
            "text": self.text,
            "remedy": self.remedy or None,
            "host": self.host or None,
            "facts": dict(self.facts),
        }

    @staticmethod
    def from_plain(raw: Mapping[str, Any]) -> Finding:
        return Finding(
            raw["group"],
            raw["topic"],
            Level(raw["level"]),
            raw["text"],
            raw["remedy"] or "",
            raw["facts"],
            raw["host"] or "",
        )


@dataclass(frozen=True)
class Group:
    """Makes the findings of one heading."""

    name: str

    def passed(self, topic: str, text: str, **facts: Any) -> Finding:
        return Finding(self.name, topic, Level.PASS, text, facts=facts)

    def warn(self, topic: str, text: str, remedy: str, **facts: Any) -> Finding:
        return Finding(self.name, topic, Level.WARN, text, remedy, facts)

    def fail(self, topic: str, text: str, remedy: str, **facts: Any) -> Finding:
        return Finding(self.name, topic, Level.FAIL, text, remedy, facts)


@dataclass
class Report:
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
        return 1 if self.count(Level.FAIL) else 0

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
