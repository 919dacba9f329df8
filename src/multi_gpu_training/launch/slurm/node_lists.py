"""Slurm's way to write many node names in one: `a[1-2],b7`, `gpu[001-016]-ib`, `r[1-2]n[1-4]`."""

from __future__ import annotations

import itertools
import re

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.safe_output import brief

MOST_NODES = 100_000  # a slip such as a[1-999999999] must not fill the memory
_NAME = re.compile(r"[A-Za-z0-9._-]*")
_SPAN = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def expand(text: str) -> list[str]:
    """The names in a node list, in its order. `a[1-2],b7` is a1, a2 and b7."""
    names: list[str] = []
    for part in _split(text):
        names += _expand_part(part, text)
        if len(names) > MOST_NODES:
            raise _wrong(text, f"it has more than {MOST_NODES} nodes")
    return names


def _split(text: str) -> list[str]:
    """The parts between commas that are not inside brackets."""
    parts, depth = [""], 0
    for letter in text.strip():
        depth += (letter == "[") - (letter == "]")
        if not 0 <= depth <= 1:
            raise _wrong(text, "its brackets do not match")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    if depth or not all(parts):
        raise _wrong(text, "a bracket is open" if depth else "a name is empty")
    return parts


def _expand_part(part: str, text: str) -> list[str]:
    pieces: list[list[str]] = []
    for number, piece in enumerate(re.split(r"[\[\]]", part)):
        if number % 2:  # between brackets
            pieces.append([name for span in piece.split(",") for name in _numbers(span, text)])
        elif _NAME.fullmatch(piece):
            pieces.append([piece])
        else:
            raise _wrong(text, f"{brief(piece, 40)} is not part of a name")
    count = 1
    for choices in pieces:
        count *= len(choices)
    if count > MOST_NODES:
        raise _wrong(text, f"it has more than {MOST_NODES} nodes")
    return ["".join(chosen) for chosen in itertools.product(*pieces)]


def _numbers(span: str, text: str) -> list[str]:
    found = _SPAN.fullmatch(span)
    if found is None:
        raise _wrong(text, f"{brief(span, 40)} is not a number or a range such as 1-4")
    first, last = found[1], found[2] or found[1]
    if int(last) < int(first) or int(last) - int(first) >= MOST_NODES:
        raise _wrong(text, f"{brief(span, 40)} is not a range such as 1-4")
    # n[08-11] is n08, n09, n10, n11.
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def _wrong(text: str, why: str) -> ConfigError:
    return ConfigError(f"{brief(text, 80)} is not a node list: {why}; write it as a[1-2],b7")
