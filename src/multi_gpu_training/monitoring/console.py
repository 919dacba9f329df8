"""What a person sees: on the main rank a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, TypeVar

from rich.console import Console as RichConsole
from rich.control import strip_control_codes
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

T = TypeVar("T")


class Console:
    """Prints on the main rank only. All output of a run goes through here."""

    def __init__(
        self, main: bool = True, style: Literal["auto", "bar", "lines", "off"] = "auto"
    ) -> None:
        self.main = main
        self._rich = RichConsole(highlight=False, soft_wrap=True)
        notebook = self._rich.is_jupyter
        if style == "auto":
            # A kernel sets FORCE_COLOR, which rich takes for a terminal; its ranks write to a pipe.
            terminal = self._rich.is_terminal and self._rich.file.isatty()
            style = "bar" if terminal or notebook else "lines"
        if notebook and (style != "bar" or importlib.util.find_spec("ipywidgets") is None):
            # Without widgets rich would show one bar below the other, and each line as a picture.
            style = "lines" if style == "bar" else style
            self._rich = RichConsole(highlight=False, soft_wrap=True, force_jupyter=False)
        self.style = style
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._title = ""
        self._last_line = 0.0
        self._last_tick = 0.0

    def line(self, text: str = "") -> None:
        if not self.main or self.style == "off":
            return
        if self.style == "lines":  # rich takes ten times as long, between two epochs of a GPU
            self._rich.file.write(strip_control_codes(text) + "\n")
        else:
            target = self._progress.console if self._progress is not None else self._rich
            target.print(text, markup=False, emoji=False)
        sys.stdout.flush()

    def warn(self, text: str) -> None:
        """A line that is shown even where progress is off."""
        if self.main and self.style == "off":
            print(text, file=sys.stderr, flush=True)
        self.line(text)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        if not self.main or self.style == "off":
            return
        # Names of metrics and runs are data: acc[/top5] is not a closing tag.
        table = Table(
            *map(escape, columns),
            title=escape(title),
            title_justify="left",
            show_header=any(columns),
        )
        for row in rows:
            table.add_row(*map(escape, row))
        self._rich.print(table)

    def start_bar(self, title: str, total: int | None, done: int = 0) -> None:
        self._title = title
        if not self.main or self.style != "bar":
            return
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=self._rich,
            transient=True,
        )
        self._task = self._progress.add_task(title, total=total, completed=done, note="")
        self._progress.start()

    def tick(self, done: Callable[[], int]) -> None:
        """Move the bar, at most ten times a second."""
        if self._progress is None or self._task is None:
            return
        now = time.monotonic()
        if now - self._last_tick > 0.1:
            self._last_tick = now
            self._progress.update(self._task, completed=done())

    def track(self, title: str, items: Iterable[T], total: int | None) -> Iterator[T]:
        """The items, with a bar that counts them: its own, or one below that of the epoch."""
        if not self.main or self.style != "bar":
            yield from items
            return
        alone = self._progress is None
        if alone:
            self.start_bar(title, total)
        progress = self._progress
        assert progress is not None and self._task is not None
        task = self._task if alone else progress.add_task(title, total=total, note="")
        try:
            for item in items:
                yield item
                progress.advance(task)
        finally:
            if alone:
                self.end_bar()
            else:
                progress.remove_task(task)

    def advance(self, done: int, total: int | None, note: str) -> None:
        """Show how far we are. Called when something was logged, not every step."""
        if not self.main or self.style == "off":
            return
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, note=note)
        else:
            self.note(f"{self._title} {done}/{total or '?'}  {note}")

    def note(self, text: str) -> None:
        """A line about how far we are, where there is no bar; at most one in five seconds."""
        if time.monotonic() - self._last_line > 5.0:
            self._last_line = time.monotonic()
            self.line(text)

    def end_bar(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._task = None
