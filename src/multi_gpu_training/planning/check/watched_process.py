"""Programs in child processes, watched and always ended: none hangs longer than its limit.

A program writes JSON lines of what it begins and finds (see distributed/trial.py); one that says
nothing for longer than the limit is killed, and its last line says where it was.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from multi_gpu_training.distributed.cleanup import die_with_parent
from multi_gpu_training.distributed.trial import Voice

GRACE_S = 3.0  # a program's own limit is the same: let it be the first to speak
POLL_S = 0.05
# Importing torch from a slow disk, on a busy machine, is no hang.
START_S = 60.0


class Watched:
    """One program: its lines so far, its last words, how it ended."""

    def __init__(self, module: str, request: Any, env: Mapping[str, str] | None = None) -> None:
        self.lines: list[dict[str, Any]] = []
        self.timed_out = False
        self.killed = False
        self._heard_at = time.monotonic()
        self._errors: list[bytes] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(env) if env is not None else None,
            # Ctrl-C reaches the one who watches, who ends this one.
            start_new_session=True,
        )
        self._readers = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        self.tell(json.dumps(request))

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):  # it has ended: its lines say why
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for raw in self.process.stdout:
            with suppress(ValueError):
                self.lines.append(json.loads(raw))
                self._heard_at = time.monotonic()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for raw in self.process.stderr:
            self._errors = [*self._errors[-200:], raw]

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def code(self) -> int | None:
        """How it ended by itself; None while it runs, and where we ended it."""
        return None if self.killed else self.process.poll()

    def is_late(self, limit_s: float) -> bool:
        """Whether it has said nothing for too long."""
        patience_s = max(limit_s, START_S) if self.stage == "start" else limit_s + GRACE_S
        return time.monotonic() - self._heard_at > patience_s

    def last(self, key: str) -> Any:
        """The newest value that it said under this name."""
        return next((line[key] for line in reversed(self.lines) if key in line), None)

    def told(self, key: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if key in line]

    @property
    def stage(self) -> str:
        return str(self.last("stage") or "start")

    @property
    def errors(self) -> str:
        return b"".join(self._errors).decode(errors="replace")

    def complaint(self) -> str:
        """Why it failed, in one line."""
        said = self.last("error")
        if said:
            return str(said).strip().splitlines()[0][:300]
        code = self.code
        if code in (-9, 137):
            return "it was killed, by the system where its memory was full"
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return lines[-1][:300] if lines else f"it ended with code {code} and said nothing"

    def kill(self) -> None:
        if not self.ended:
            self.killed = True
            self.process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join(1)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            with suppress(OSError, ValueError):
                if stream is not None:
                    stream.close()


def watch(team: Sequence[Watched], limit_s: float, until: str = "end") -> None:
    """Wait until every one has begun `until` or ended. Who says nothing for `limit_s` is noted as
    `timed_out`; when one has failed, the others have a moment to say so too."""
    failed_at = None
    while True:
        busy = [one for one in team if not one.ended and one.stage != until]
        if not busy:
            return
        if any(one.code for one in team):
            failed_at = failed_at or time.monotonic()
            if time.monotonic() > failed_at + GRACE_S:
                return
        late = [one for one in busy if one.is_late(limit_s)]
        if late:
            for one in late:
                one.timed_out = True
            return
        time.sleep(POLL_S)


def run_program(module: str, request: Any, limit_s: float) -> Watched:
    """A program of this package until it is done or says nothing for `limit_s`; then it is gone."""
    program = Watched(module, request)
    try:
        watch([program], limit_s)
    finally:
        program.kill()
    return program


def be_program(work: Callable[[Any, Voice], None]) -> NoReturn:
    """The `main` of a watched program: do what the first line of input asks, and end."""
    die_with_parent()
    voice = Voice()
    request = json.loads(sys.stdin.readline())
    code = 0
    try:
        work(request, voice)
        voice.say(stage="end")
    except Exception as error:
        voice.say(error="".join(traceback.format_exception_only(error)).strip())
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # cleaning up would wait for the driver or disk that hangs
