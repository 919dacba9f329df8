"""Daily prices: read from CSV files and checked, or generated."""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multi_gpu_training.errors import DataError

Prices = NDArray[np.float64]
Day = tuple[float, float, float, float]  # high, low, close, open

COLUMNS = ("open", "high", "low", "close", "volume")
SYMBOL_COLUMNS = ("ticker", "symbol", "tic")
# The longest closing of the New York exchange since 1933 made a step of seven days, in 2001.
LONGEST_STEP_DAYS = 10
LONGEST_LINE = 2**16
MOST_CHARACTERS, MOST_LINES = 2**29, 2**22  # unpacked; 500 assets over 30 years fit


@dataclass(frozen=True)
class Market:
    """Prices of some assets on the same days; arrays are (days, assets)."""

    source: str
    days: list[str]
    symbols: list[str]
    high: Prices
    low: Prices
    close: Prices
    open: Prices
    limits: str = ""  # which assets end the common period, where there are several

    def describe(self) -> str:
        return (
            f"{self.source}: {len(self.symbols)} assets, {len(self.days)} days "
            f"from {self.days[0]} to {self.days[-1]}{self.limits}"
        )


def read_market(path: str, symbols: Sequence[str] | None = None) -> Market:
    """Prices of a CSV file, or of all CSV files in a folder, on their common period.

    Columns Date, Open, High, Low, Close, Volume, in any order and case. A column Ticker holds
    several assets in one file; otherwise the file's name names its asset. With a column
    Adj Close all prices are adjusted by it, for splits and dividends.
    """
    place = Path(path)
    files = sorted([*place.glob("*.csv"), *place.glob("*.csv.gz")]) if place.is_dir() else [place]
    if not files or not files[0].exists():
        raise DataError(
            f"data_dir={path}: no such CSV file, nor a folder with *.csv or *.csv.gz in it",
            code="MGT301",
        )
    strange = [str(file) for file in files if not file.is_file()]
    if strange:
        raise DataError(f"data_dir={path}: {strange[0]} is not a regular file; remove it")
    series: dict[str, dict[str, Day]] = {}
    for file in files:
        for symbol, day, row in _rows(file):
            days = series.setdefault(symbol, {})
            if days and day <= next(reversed(days)):
                last = next(reversed(days))
                what = "twice" if day == last else f"after {last}"
                raise DataError(f"{file.name}: {symbol} has {day} {what}; sort the rows by date")
            days[day] = row
    if not series:
        raise DataError(f"data_dir={path}: no row of prices in {len(files)} file(s)")
    missing = [symbol for symbol in symbols or () if symbol not in series]
    if missing:
        raise DataError(f"symbols={','.join(missing)} not in {path}; it has {', '.join(series)}")
    return _common(path, {symbol: series[symbol] for symbol in symbols or series})


def _common(path: str, series: dict[str, dict[str, Day]]) -> Market:
    """The period that all assets cover; a day that only some of them have is an error."""
    first = max(next(iter(days)) for days in series.values())
    last = min(next(reversed(days)) for days in series.values())
    period = sorted({d for days in series.values() for d in days if first <= d <= last})
    if not period:
        raise DataError(
            f"{path}: the assets have no day in common (the latest begins {first}, the earliest "
            f"ends {last}); choose some with symbols=A,B"
        )
    for symbol, days in series.items():
        absent = [day for day in period if day not in days]
        if absent:
            raise DataError(
                f"{path}: {symbol} lacks {len(absent)} days that others have, {absent[0]} first; "
                f"fill the gap, or leave it out with symbols="
            )
    # A step over a gap would look like one day's return.
    for before, after in pairwise(period):
        step = (date.fromisoformat(after) - date.fromisoformat(before)).days
        if step > LONGEST_STEP_DAYS:
            raise DataError(
                f"{path}: nothing between {before} and {after}, a gap of {step} days; fill it, or "
                "give the part before or after it"
            )
    rows = np.array([[days[day] for days in series.values()] for day in period])
    high, low, close, open_ = (np.ascontiguousarray(rows[:, :, i]) for i in range(4))
    return Market(path, period, list(series), high, low, close, open_, _limits(series))


def _limits(series: dict[str, Any]) -> str:
    """Who makes the common period as short as it is."""
    if len({(next(iter(days)), next(reversed(days))) for days in series.values()}) < 2:
        return ""
    latest = max(series, key=lambda symbol: next(iter(series[symbol])))
    earliest = min(series, key=lambda symbol: next(reversed(series[symbol])))
    return f" ({latest} begins last, {earliest} ends first)"


def _rows(file: Path) -> Iterator[tuple[str, str, Day]]:
    """(symbol, day, prices) of each line, checked."""
    try:
        yield from _checked_rows(file)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"{file} cannot be read as CSV ({reason}); write it as text in UTF-8, plain or .gz"
        ) from None


def _lines(file: Path) -> Generator[str]:
    """The lines of a file, or of a packed one, as long as they are of a reasonable length."""
    opener: Any = gzip.open if file.suffix == ".gz" else open
    read = count = 0
    with opener(file, "rt", newline="", encoding="utf-8-sig") as lines:
        while line := lines.readline(LONGEST_LINE):
            read, count = read + len(line), count + 1
            if len(line) >= LONGEST_LINE or read > MOST_CHARACTERS or count > MOST_LINES:
                raise DataError(
                    f"{file} is too large to be a market: {MOST_LINES:,} lines of "
                    f"{LONGEST_LINE:,} characters at most, and {MOST_CHARACTERS:,} in all"
                )
            yield line


def _checked_rows(file: Path) -> Iterator[tuple[str, str, Day]]:
    with closing(_lines(file)) as lines:
        reader = csv.reader(lines)
        header = [name.strip().lower().replace("_", " ") for name in next(reader, [])]
        missing = [name for name in ("date", *COLUMNS) if name not in header]
        if missing:
            raise DataError(
                f"{file.name} has no column {', '.join(missing)}; the first line must name Date, "
                f"Open, High, Low, Close and Volume (found: {', '.join(header) or 'nothing'})"
            )
        symbol_at = next((header.index(n) for n in SYMBOL_COLUMNS if n in header), None)
        adjusted_at = header.index("adj close") if "adj close" in header else None
        name = file.name.removesuffix(".gz").removesuffix(".csv")
        for line in reader:
            if not line:
                continue
            where = f"{file.name}, line {reader.line_num}"
            if len(line) != len(header):
                raise DataError(f"{where}: {len(line)} values for {len(header)} columns")
            symbol = name if symbol_at is None else line[symbol_at].strip()
            values = [_number(line[header.index(c)], c, where) for c in COLUMNS]
            open_, high, low, close, _ = values
            if high < low:
                raise DataError(f"{where}: high {high:g} is below low {low:g}")
            factor = 1.0  # for splits and dividends
            if adjusted_at is not None:
                factor = _number(line[adjusted_at], "adj close", where) / close
            day = _day(line[header.index("date")], where)
            yield symbol, day, (high * factor, low * factor, close * factor, open_ * factor)


def _number(text: str, column: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0 or (value == 0 and column != "volume"):
        raise DataError(
            f"{where}: {column} is {text.strip() or 'empty'!r}; every price must be a number "
            "above 0, a volume 0 or more: fill or remove the row"
        )
    return value


def _day(text: str, where: str) -> str:
    try:
        return date.fromisoformat(text.strip()[:10]).isoformat()
    except ValueError:
        raise DataError(f"{where}: {text!r} is not a date such as 2013-02-28") from None


def generate_market(assets: int, days: int, seed: int) -> Market:
    """A market of our own making: no prices of the world.

    All assets share a factor, and each follows trends that last for weeks, so that there is
    something to find for who looks back.
    """
    random = np.random.default_rng(seed)
    trend = np.zeros((days, assets))
    for day in range(1, days):
        turns = random.random(assets) < 1 / 40
        fresh = random.normal(0.0003, 0.004, assets)
        trend[day] = np.where(turns, fresh, trend[day - 1])
    factor = random.normal(0.0001, 0.008, (days, 1))
    own = random.normal(0, 0.012, (days, assets))
    close = 50 * np.exp(random.uniform(-0.7, 0.7, assets) + np.cumsum(trend + factor + own, 0))
    spread = np.abs(random.normal(0, 0.006, (2, days, assets)))
    night = random.normal(0, 0.003, (days, assets))  # what happens while the exchange is closed
    before = np.concatenate([close[:1], close[:-1]])
    return Market(
        source=f"generated market (seed {seed})",
        days=[f"day {day}" for day in range(days)],
        symbols=[f"ASSET{number}" for number in range(assets)],
        high=close * (1 + spread[0]),
        low=close * (1 - spread[1]),
        close=close,
        open=before * np.exp(night),
    )


def split_symbols(text: str | None) -> list[str] | None:
    return [name.strip() for name in (text or "").split(",") if name.strip()] or None
