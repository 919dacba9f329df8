"""What `mgt compress` is asked to try: settings such as `prune:2:4+quantize:int8`.

    quantize[:int8|int8-dynamic|int4|onnx-int8]
    prune[:2:4|SHARE]            SHARE of the channels, such as 0.5
    distil[:SHARE|NAME=VALUE,..] a student with this share of the parameters, or these arguments

Methods in one setting are joined by `+` and applied in this order: distil, prune, quantize.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from multi_gpu_training.compress import SCHEMES
from multi_gpu_training.errors import ConfigError

ONNX = "onnx-int8"
DEFAULTS = {"quantize": "int8", "prune": "2:4", "distil": "0.25"}


@dataclass(frozen=True)
class Setting:
    """One compressed model to make.

    prune: 2:4, or the share of channels to remove. student: the share of parameters that a
    student keeps, or the arguments in which it differs.
    """

    name: str
    quantize: str | None = None
    prune: str | float | None = None
    student: float | dict[str, Any] | None = None

    @property
    def trains(self) -> bool:
        return self.prune is not None or self.student is not None

    @property
    def folder(self) -> str:
        """The name as that of a folder."""
        kept = [sign if sign.isalnum() or sign in "+-." else "-" for sign in self.name]
        return "".join(kept)


@dataclass
class MaxDrop:
    """How much a compressed model may lose, as a share: 0.01 is one point of accuracy."""

    most: float | None = None
    text: str = field(default="", repr=False)

    @classmethod
    def read(cls, text: str | None) -> MaxDrop:
        if text is None:
            return cls()
        percent = text.strip().endswith("%")
        try:
            value = float(text.strip().removesuffix("%")) / (100 if percent else 1)
        except ValueError:
            value = -1.0
        if not 0 <= value < 1:
            raise ConfigError(f"--max-drop {text[:40]}: give a share such as 1% or 0.01")
        return cls(value, text)

    def holds(self, drop: float | None) -> bool:
        return self.most is None or (drop is not None and drop <= self.most)


def read_settings(methods: list[str]) -> list[Setting]:
    """The settings that the flags name, all mistakes at once."""
    found: list[Setting] = []
    problems = []
    for text in methods:
        try:
            found.append(_read(text))
        except ConfigError as error:
            problems += error.problems
    names = [setting.name for setting in found]
    problems += [f"--method {name} is given twice" for name in set(names) if names.count(name) > 1]
    if problems:
        raise ConfigError(problems)
    return found


def _read(text: str) -> Setting:
    parts: dict[str, str] = {}
    for part in text.split("+"):
        method, _, value = part.strip().partition(":")
        if method not in DEFAULTS:
            raise ConfigError(
                f"--method {text[:80]}: {method[:40]!r} is unknown; use {', '.join(DEFAULTS)}, "
                "joined by +"
            )
        if method in parts:
            raise ConfigError(f"--method {text[:80]} names {method} twice")
        parts[method] = value or DEFAULTS[method]
    ordered = [
        f"{method}:{parts[method]}" for method in ("distil", "prune", "quantize") if method in parts
    ]
    setting = Setting(
        "+".join(ordered),
        _scheme(text, parts.get("quantize")),
        _pruning(text, parts.get("prune")),
        _student(text, parts.get("distil")),
    )
    if setting.quantize == ONNX and setting.prune == "2:4":
        raise ConfigError(f"--method {text[:80]}: ONNX has no 2:4 sparsity; drop one of them")
    return setting


def _scheme(text: str, given: str | None) -> str | None:
    if given is not None and given not in (*SCHEMES, ONNX):
        known = ", ".join((*SCHEMES, ONNX))
        raise ConfigError(f"--method {text[:80]}: quantize:{given[:40]} is unknown; use {known}")
    return given


def _pruning(text: str, given: str | None) -> str | float | None:
    if given in (None, "2:4"):
        return given
    share = _share(given)
    if share is None:
        raise ConfigError(
            f"--method {text[:80]}: prune:{given[:40]} is neither 2:4 nor a share of the channels "
            "between 0 and 1, such as 0.5"
        )
    return share


def _student(text: str, given: str | None) -> float | dict[str, Any] | None:
    if given is None:
        return None
    if "=" not in given:
        share = _share(given)
        if share is None:
            raise ConfigError(
                f"--method {text[:80]}: distil:{given[:40]} is neither a share of the parameters "
                "between 0 and 1, such as 0.1, nor NAME=VALUE"
            )
        return share
    changes: dict[str, Any] = {}
    for word in given.split(","):
        name, _, value = word.partition("=")
        try:
            changes[name.strip()] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            changes[name.strip()] = value
    return changes


def _share(given: str | None) -> float | None:
    try:
        share = float(given or "")
    except ValueError:
        return None
    return share if 0 < share < 1 else None
