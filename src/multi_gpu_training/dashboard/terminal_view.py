"""`mgt top`: the same runs in a terminal, with keys for the same actions."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from multi_gpu_training.dashboard.live_runs import LiveRun, LiveRuns
from multi_gpu_training.dashboard.run_view import STATES, Values, detail, summary
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.monitoring.report.sentences import duration
from multi_gpu_training.monitoring.report.terminal import packed
from multi_gpu_training.monitoring.report.wording import number, size
from multi_gpu_training.monitoring.run_requests import checked, send_request

COLOURS = {"running": "cyan", "finished": "green", "failed": "red", "killed": "red"}
# Letters too: in a terminal without colours, a bar must still say which phase is which.
PHASE_STYLES = {
    "input": ("i", "dark_orange"),
    "forward": ("f", "dodger_blue2"),
    "backward": ("b", "sky_blue2"),
    "comm": ("c", "grey62"),
    "optimizer": ("o", "spring_green3"),
    "checkpoint": ("k", "orchid"),
    "other": (".", "grey39"),
    "queued": ("q", "khaki3"),
}
KEYS = {
    "s": ("save", "save a checkpoint now"),
    "e": ("stop_after_epoch", "stop after this epoch"),
    "x": ("stop", "save and stop now"),
    "l": ("set_lr", "set the learning rate"),
    "g": ("set_log_every", "set the log interval"),
    "m": ("memory_snapshot", "take a memory snapshot"),
}
ASKS_VALUE = ("set_lr", "set_log_every")
UP, DOWN = ("\x1b[A", "k"), ("\x1b[B", "j")
MOST_LISTED = 15
BAR = 24
MOST_DEVICE = 16  # columns of its name


def show_runs(roots: Sequence[str], once: bool, interval_s: float) -> int:
    """Show runs until `q`. Into a file or a pipe, and with `once`, print them as they are."""
    runs, console = LiveRuns(roots), Console(highlight=False)
    screen = TopScreen(runs)
    if once or not (console.is_terminal and sys.stdin.isatty()):
        if runs.urls:
            runs.poll_remote()
        runs.poll()
        if not console.is_terminal:
            console.width = 140
        for problem in runs.problems:
            console.print(Text(problem))
        console.print(screen.listing(), screen.details() or "")
        return 0
    runs.watch(interval_s)
    try:
        with _keys() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
            while screen.open:
                live.update(screen.render(console.height), refresh=True)
                for key in keyboard.read(interval_s):
                    screen.press(key)
    except KeyboardInterrupt:
        pass
    finally:
        runs.close()
    return 0


class TopScreen:
    """What is on the screen, and what keys do to it."""

    def __init__(self, runs: LiveRuns) -> None:
        self.runs = runs
        self.open = True
        self.message = ""
        self._chosen: str | None = None
        self._asked: str | None = None  # the action that waits for y, or for a value
        self._typed = ""
        self._waits_for: tuple[str, list[str]] = "", []  # run, and its answers before

    # What is shown

    def ordered(self) -> list[LiveRun]:
        """Running ones first, then the latest."""
        found = list(self.runs.runs.values())
        return sorted(found, key=lambda run: (run.state != "running", -_began(run), run.name))

    @property
    def chosen(self) -> LiveRun | None:
        there = self.ordered()
        return next((run for run in there if run.id == self._chosen), there[0] if there else None)

    def render(self, height: int) -> RenderableType:
        parts: list[RenderableType] = [self.listing(max(3, height // 3 - 3))]
        shown = self.details(max(4, height // 3 - 4))
        if shown is not None:
            parts.append(shown)
        parts.append(self._foot())
        return Group(*parts)

    def listing(self, most: int = MOST_LISTED) -> RenderableType:
        there = self.ordered()
        if not there and self.runs.reading != 0:
            return Text("reading the runs...")
        if not there:
            return Text(
                f"no runs below {', '.join((*self.runs.roots, *self.runs.urls))} yet; start one "
                "with mgt train"
            )
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("run", "state", "done", "left", "step", "loss", "samples/s", "ranks", "GPU"):
            right = name not in ("run", "state")
            table.add_column(name, justify="right" if right else "left", no_wrap=True)
        chosen, now = self.chosen, time.monotonic()
        place = there.index(chosen) if chosen is not None else 0
        first = max(0, min(place - most // 2, len(there) - most))
        for run in there[first : first + most]:
            style = "reverse" if chosen is not None and run.id == chosen.id else ""
            table.add_row(*_cells(summary(run, now)), style=style)
        if len(there) > most:
            table.caption = f"{len(there)} runs"
        return table

    def details(self, most: int = 6) -> RenderableType | None:
        if self.chosen is None:
            return None
        told = detail(self.chosen, time.monotonic())
        if "rank_rows" not in told:
            return Panel(Text(told["problem"] or told["state_text"]), title=Text(told["name"]))
        self._take_answer(told)
        parts: list[RenderableType] = [Text(_headline(told)), _rank_table(told)]
        events = Table(box=None, pad_edge=False, show_header=False)
        for after, kind, text in told["events"][:most]:
            first = text.partition("\n")[0][:200]
            events.add_row(after, Text(kind), Text(first, overflow="ellipsis", no_wrap=True))
        if told["events"]:
            parts += [Text("last events", style="bold"), events]
        return Panel(Group(*parts), title=Text(told["name"]), title_align="left")

    def _foot(self) -> RenderableType:
        if self._asked in ASKS_VALUE:
            return Text(f"{_words(self._asked)}: {self._typed}_   Enter sends, Esc cancels", "bold")
        if self._asked is not None:
            return Text(f"{_words(self._asked)}? y / n", "bold")
        keys = [f"{key} {action.replace('_', ' ')}" for key, (action, _) in KEYS.items()]
        foot = _Packed(["up/down choose", *keys, "q quit"])
        return Group(Text(self.message), foot) if self.message else foot

    # Keys

    def press(self, key: str) -> None:
        """Every action asks first: y, or the value and Enter."""
        if self._asked is None:
            self._command(key)
        elif key == "\x1b" or (key in "nq" and self._asked not in ASKS_VALUE):
            self._asked, self.message = None, "not sent"
        elif self._asked in ASKS_VALUE:
            self._type(key)
        elif key == "y":
            self._send(None)

    def _command(self, key: str) -> None:
        self.message = ""
        if key in ("q", "\x03"):
            self.open = False
        elif key in UP or key in DOWN:
            there, chosen = self.ordered(), self.chosen
            if chosen is not None:
                place = there.index(chosen) + (1 if key in DOWN else -1)
                self._chosen = there[max(0, min(place, len(there) - 1))].id
        elif key in KEYS:
            run = self.chosen
            if run is None or run.url is not None or run.state != "running":
                state = "there is no run" if run is None else STATES[run.state]
                self.message = f"nothing to ask: {'read from a URL' if run and run.url else state}"
                return
            self._chosen, self._asked, self._typed = run.id, KEYS[key][0], ""

    def _type(self, key: str) -> None:
        if key in ("\r", "\n"):
            try:
                self._send(float(self._typed))
            except ValueError:
                self._asked, self.message = None, f"{self._typed!r} is not a number; not sent"
        elif key in ("\x7f", "\b"):
            self._typed = self._typed[:-1]
        elif key in "0123456789.eE-+" and len(self._typed) < 20:
            self._typed += key

    def _send(self, value: float | None) -> None:
        action, self._asked = self._asked, None
        run = self.chosen
        assert action is not None
        if run is None or run.id != self._chosen:
            self.message = "the run is gone; not sent"
            return
        try:
            told = detail(run, time.monotonic())
            send_request(run.path, checked(action, value, "mgt top"))
            self._waits_for = run.id, _answers(told)
            self.message = f"asked {run.name} to {_words(action)}; its events tell when it is done"
        except ConfigError as error:
            self.message = error.problems[0]

    def _take_answer(self, told: Values) -> None:
        """Say what became of the last request, once the run's events tell."""
        run, before = self._waits_for
        new = [text for text in _answers(told) if text not in before]
        if told["id"] == run and (new or told["state"] != "running"):
            answer = new[0] if new else told["state_text"]
            self.message, self._waits_for = f"{told['name']}: {answer}", ("", [])


def _answers(told: Values) -> list[str]:
    """What the ranks did with requests, the latest first."""
    return [text for _, kind, text in told.get("events", ()) if kind == "request"]


def _words(action: str) -> str:
    return next(words for name, words in KEYS.values() if name == action)


def _began(run: LiveRun) -> float:
    return 0.0 if run.record is None else run.record.began


def _cells(told: Values) -> list[Text | str]:
    state = Text(told["state"], COLOURS.get(told["state"], "yellow"))
    if told.get("step") is None:
        return [Text(told["name"]), state]
    progress, left = told["progress"], told["remaining_s"]
    return [
        Text(told["name"]),
        state,
        "" if progress is None else f"{progress:.0%}",
        "" if left is None else duration(left),
        f"{told['step']:,}",
        "" if told["loss"] is None else f"{told['loss']:.4g}",
        number(told["samples_per_s"]) or "",
        str(told["ranks"]),
        "" if told["gpu_use"] is None else f"{told['gpu_use']:.0%}",
    ]


def _headline(told: Values) -> str:
    total = f" of {told['total']:,}" if told["total"] else ""
    parts = [told["state_text"], f"step {told['step']:,}{total}"]
    if told["elapsed_s"]:
        parts.append(f"{duration(told['elapsed_s'])} trained")
    if told["remaining_s"] is not None:
        parts.append(f"about {duration(told['remaining_s'])} left")
    if told["lr"] is not None:
        parts.append(f"learning rate {told['lr']:g}")
    if told["forecast"] is not None:
        parts.append(told["forecast"]["text"])
    return ", ".join(parts) + f"\n{told['verdict']}"


def _rank_table(told: Values) -> Group:
    table = Table(box=None, pad_edge=False, header_style="bold")
    gpu = any(row["gpu_use"] is not None for row in told["rank_rows"])
    for name in ("rank", "device", "GPU use" if gpu else "CPU use", "memory", "phases"):
        table.add_column(name, no_wrap=True, max_width=MOST_DEVICE if name == "device" else None)
    longest = max(
        (sum(row["phases"].values()) for row in told["rank_rows"] if row["phases"]), default=0
    )
    for row in told["rank_rows"][:32]:
        use = row["gpu_use"] if gpu else row["cpu_use"]
        memory = size(row["memory"]) or ""
        if row["memory_total"]:
            memory += f" of {size(row['memory_total'])}"
        table.add_row(
            f"{row['rank']}{' slowest' if row['slowest'] else ''}",
            Text(row["device"]),
            _bar(use, 10),
            memory,
            _phase_bar(row["phases"], longest),
        )
    seen = {name for row in told["rank_rows"] for name, ms in (row["phases"] or {}).items() if ms}
    legend = " ".join(
        f"{letter}={'no core' if phase == 'queued' else phase}"
        for phase, (letter, _) in PHASE_STYLES.items()
        if phase in seen
    )
    return Group(table, Text(legend, style="dim"))  # as a heading it would push the ranks out


def _bar(share: float | None, width: int) -> Text:
    if share is None:
        return Text("")
    full = round(min(1.0, share) * width)
    return Text("#" * full + "-" * (width - full) + f" {share:.0%}")


def _phase_bar(phases: dict[str, float] | None, longest: float) -> Text:
    if not phases or not longest:
        return Text("not timed")
    bar = Text(f"{sum(phases.values()):>7.4g} ms ", overflow="crop", no_wrap=True)
    for phase, ms in phases.items():
        letter, style = PHASE_STYLES[phase]
        bar.append(letter * round(BAR * ms / longest), style)
    return bar


class _Packed:
    """Words on as few lines as the terminal allows; none is broken."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in packed(self.words, options.max_width):
            yield Text(line, "dim")


class Keyboard:
    """Keys as they are pressed, without waiting for Enter."""

    def read(self, wait_s: float) -> Iterator[str]:
        """The keys of the next `wait_s` seconds, as soon as there is one."""
        if not select.select([sys.stdin], [], [], wait_s)[0]:
            return
        text = os.read(sys.stdin.fileno(), 64).decode(errors="ignore")
        while text:
            length = 3 if text.startswith("\x1b[") else 1
            yield text[:length]
            text = text[length:]


@contextlib.contextmanager
def _keys() -> Iterator[Keyboard]:
    """The terminal in a mode that gives every key at once; put back whatever happens."""
    before: list[Any] = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield Keyboard()
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
