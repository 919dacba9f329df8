"""Tables of samples: CSV, TSV and JSON lines, with the line that each row stands in."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

from multi_gpu_training.errors import DataError
from multi_gpu_training.recipes.user_data import refuse

MOST_TEXT = 2**30  # bytes of a file, which is read whole
MOST_LOOKED_AT = 2**16
TABLES = (".jsonl", ".csv", ".tsv")

Row = tuple[int, dict[str, Any]]


def read_text(path: Path) -> str:
    """The text of a file that has some."""
    try:
        if not path.is_file():  # opening a FIFO would wait for whoever is at its other end
            raise DataError(f"{path} is not a regular file; remove it")
        size = path.stat().st_size
        if size > MOST_TEXT:
            raise DataError(
                f"{path} has {size:,} bytes, {MOST_TEXT:,} at most are read; divide it into several"
            )
        # Excel begins its files with a byte order mark, which would become part of a name.
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 (byte {error.start} is {error.object[error.start]:#04x}); "
            "convert it, as in iconv -f latin1 -t utf-8"
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None
    if "\0" in text[:MOST_LOOKED_AT]:
        raise DataError(f"{path} is not text: it holds NUL characters; convert it to UTF-8")
    if not text.strip():
        raise DataError(f"{path} is empty; put text into it or remove it")
    return text


def read_rows(path: Path) -> list[Row]:
    """Each row with the number of the line that it begins in."""
    text = read_text(path)
    return _json_rows(path, text) if path.suffix == ".jsonl" else _csv_rows(path, text)


def _json_rows(path: Path, text: str) -> list[Row]:
    rows = []
    # Not splitlines: JSON allows U+2028 and its like inside a string.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if "\\ud" in line or "\\uD" in line:  # half of a pair is no character
                json.dumps(row, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path}, line {number}: {error!s:.200}; write one object per line"
            ) from None
        rows.append((number, row if isinstance(row, dict) else {}))
    return rows


def _csv_rows(path: Path, text: str) -> list[Row]:
    """The first row names the columns. A quoted field may hold line breaks."""
    limit = csv.field_size_limit(sys.maxsize)  # a document may be longer than 128 KB
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter="\t" if path.suffix == ".tsv" else ",", strict=True
    )
    rows: list[Row] = []
    names: list[str] = []
    problems, start = [], 1
    try:
        for fields in reader:
            first, start = start, reader.line_num + 1
            if not fields:
                continue
            if not names:
                names = [name.strip() for name in fields]
            elif len(fields) > len(names):
                # Dropping what is too much would cut a text at its first comma.
                problems.append(
                    f"{path}, line {first}: {len(fields)} fields, but the first line names "
                    f"{len(names)} columns ({', '.join(names)}); put fields with a separator or a "
                    'line break into double quotes ("...")'
                )
            else:
                rows.append((first, dict(zip(names, fields, strict=False))))
    except csv.Error as error:
        raise DataError(
            f"{path}, line {start}: {error}; close every quote, and double those inside a field"
        ) from None
    finally:
        csv.field_size_limit(limit)
    refuse(problems)
    return rows
