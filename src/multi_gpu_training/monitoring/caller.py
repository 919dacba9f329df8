"""Which of the runs that a script trains, one after the other, is this one?

A script that is started again after a failure asks for its runs again: all of them, or only those
that it does not find done. A run is recognised by the place in the user's code that it is opened
at, and among those of a loop by the plain variables there (`fold = 2`), or else by its number.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from multi_gpu_training.distributed.stacks import LIBRARIES, PACKAGE

_NOT_THEIRS = (PACKAGE, *LIBRARIES, "<frozen")
_opened: Counter[str] = Counter()  # of this process, by place


@dataclass(frozen=True)
class Opening:
    """place: the lines of the user's code that led here. variables: a hash of the plain ones
    there. number: how many runs this process opened at that place before."""

    place: str = ""
    variables: str = ""
    number: int = 0

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def opening() -> Opening:
    """That of the run which is opened now; counts it."""
    places, variables = [], []
    frame = sys._getframe()
    while (above := frame.f_back) is not None:
        frame = above
        if not frame.f_code.co_filename.startswith(_NOT_THEIRS):
            places.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            plain = {
                name: value
                for name, value in frame.f_locals.items()
                if type(value) in (int, float, str, bool) and not name.startswith("_")
            }
            variables.append(json.dumps(plain, sort_keys=True))
    place = " < ".join(places)
    number = _opened[place]
    _opened[place] += 1
    return Opening(place, hashlib.sha256("\n".join(variables).encode()).hexdigest(), number)


def choose(asked: Opening, found: list[tuple[Opening, Path]]) -> Path | None:
    """The run that was opened like this one, of those that an earlier start opened."""
    here = [(opened, path) for opened, path in found if opened.place == asked.place]
    alike = [path for opened, path in here if opened.variables == asked.variables]
    if len(alike) == 1:
        return alike[0]
    same = [path for opened, path in here if opened.number == asked.number]
    return same[0] if same else None
