"""What people ask of a run while it trains: save, stop, another learning rate.

A request is a small file in RUN/requests, which only the owner of the run can write, as only the
owner can send it a signal. Rank 0 takes it from there, `distributed.control` lets all ranks agree
on a step, and every rank does it there and records it as an event.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import time
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, Field

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.safe_files import make_private, parse_json, read_bytes, write_atomically

FOLDER = "requests"
LARGEST = 4096  # bytes of a request
MOST_WAITING = 100
Action = Literal["save", "stop_after_epoch", "stop", "set_lr", "set_log_every", "memory_snapshot"]
ACTIONS: tuple[str, ...] = get_args(Action)


class RunRequest(BaseModel):
    """One thing that a run is asked to do. `by`: where the user asked, for the record."""

    action: Action
    value: float | None = None
    by: Annotated[str, Field(max_length=80)] = ""


def checked(action: str, value: float | None, by: str) -> RunRequest:
    """The request, or an error that says what is wrong with it."""
    if action not in ACTIONS:
        raise ConfigError(f"cannot ask a run to {action[:40]!r}; use {', '.join(ACTIONS)}")
    if action == "set_lr" and not (value is not None and math.isfinite(value) and value > 0):
        raise ConfigError(f"a learning rate of {value} is not possible; give a number above 0")
    if action == "set_log_every" and not (
        value is not None and value == int(value) and 1 <= value <= 10**9
    ):
        raise ConfigError(f"cannot log every {value} steps; give a whole number from 1 on")
    if action not in ("set_lr", "set_log_every") and value is not None:
        raise ConfigError(f"{action} takes no value, and {value} was given")
    return RunRequest.model_validate({"action": action, "value": value, "by": by})


def send_request(run: Path, request: RunRequest) -> None:
    """Leave a request in the folder of a run that trains."""
    folder = run / FOLDER
    try:
        if folder.is_symlink():
            raise ConfigError(f"{folder} is a symbolic link, which no run follows; remove it")
        make_private(folder)
        if sum(1 for _ in os.scandir(folder)) >= MOST_WAITING:
            raise ConfigError(
                f"{MOST_WAITING} requests wait in {folder} already; is the run still going?"
            )
        # Read in the order of their names: first come, first served.
        name = f"{time.time_ns():020d}-{secrets.token_hex(4)}.json"
        write_atomically(folder / name, json.dumps(request.model_dump()))
    except OSError as error:
        raise ConfigError(
            f"the request cannot be written to {folder}: {error.strerror}; only the owner of a run "
            "can ask something of it",
            code="MGT704",
        ) from None


class Inbox:
    """Requests as rank 0 finds them. Those from before it was opened were meant for a run that is
    no longer there, and are dropped."""

    def __init__(self, run: Path) -> None:
        self._folder = run / FOLDER
        for path in self._waiting():
            with contextlib.suppress(OSError):
                path.unlink()

    def next(self) -> str | None:
        """Take the oldest request, as JSON; None if there is none. A file that is not a request is
        removed and ignored."""
        for path in self._waiting():
            try:
                request = parse_json(read_bytes(path, LARGEST), RunRequest, path.name)
                request = checked(request.action, request.value, request.by)
            except (OSError, ValueError, ConfigError):
                request = None
            try:
                path.unlink()
            except OSError:  # it would be done again and again
                continue
            if request is not None:
                return json.dumps(request.model_dump())
        return None

    def _waiting(self) -> list[Path]:
        # A folder that somebody else prepared may lead anywhere, and files are removed here.
        if self._folder.is_symlink():
            return []
        try:
            with os.scandir(self._folder) as entries:
                return sorted(
                    Path(entry.path)
                    for entry in entries
                    # Whoever may send this process a signal may ask something of the run.
                    if entry.name.endswith(".json")
                    and entry.stat(follow_symlinks=False).st_uid in (0, os.geteuid())
                )
        except OSError:
            return []
