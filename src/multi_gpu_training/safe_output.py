"""Standard output that can go away without taking the training with it.

`mgt train ... | head`, a dead `tee`, a closed terminal, a full disk behind `>`: from then on
nothing can be shown, but the run must go on and save. Python would raise BrokenPipeError from
`print`, and rich turns it into SystemExit(1).
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, TextIO, cast


def protect_output() -> None:
    """Make `sys.stdout` and `sys.stderr` swallow write errors, in this process, from now on."""
    _fill_closed_descriptors()
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:  # Python's answer to `>&-`
            stream = open(os.devnull, "w")  # noqa: SIM115, PTH123 - lives as long as the process
        if not isinstance(stream, _SafeStream):
            setattr(sys, name, cast(TextIO, _SafeStream(stream, descriptor)))


def printable(text: str) -> str:
    """Text from a file or another machine without control characters, which a terminal obeys."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


def brief(value: object, most: int = 200) -> str:
    """`repr` for a message: of a reasonable length, and whatever the value is."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return f"a number of more than {sys.get_int_max_str_digits()} digits"
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def _fill_closed_descriptors() -> None:
    """Open /dev/null where 0, 1 or 2 is closed: the next file to be opened would take its place,
    and whatever a library prints would end up in a checkpoint."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)


class _SafeStream:
    """A text stream whose writes never raise for lack of a reader or of space."""

    def __init__(self, stream: TextIO, descriptor: int) -> None:
        self._stream = stream
        self._descriptor = descriptor

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):
            self._discard()
            return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._discard()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Any:
        return iter(self._stream)

    def _discard(self) -> None:
        """Let the descriptor point to /dev/null, so that what is still buffered, and what C code
        or a child process prints, goes there too instead of failing again at exit."""
        with contextlib.suppress(OSError, ValueError):
            if self._stream.fileno() != self._descriptor:
                return  # a stream of a test or a notebook, not this process's own
            empty = os.open(os.devnull, os.O_WRONLY)
            os.dup2(empty, self._descriptor)
            os.close(empty)
            self._stream.flush()
