"""Tables of `mgt bench` and `mgt estimate` stay whole in any terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from multi_gpu_training.planning.bench.result_table import Column, ResultTable

NAMES = ("ranks", "theoretical", "actual", "efficiency", "80% band", "time (20 epochs)", "cost")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_table_that_is_too_wide_is_shown_in_parts_that_name_their_rows(width: int) -> None:
    rows = [{name: f"{name[:5]}-{row}-value" for name in NAMES} for row in range(3)]
    columns = [Column(name, lambda row, name=name: row[name]) for name in NAMES]  # type: ignore[misc]
    table = ResultTable("estimate", "a title", columns, rows, notes=["a note of some words " * 6])
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    table.show(console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(len(line.rstrip()) for line in lines) <= width
    text = "\n".join(lines)
    assert all(row[name] in text for row in rows for name in NAMES)
    # Each part begins with what its rows are of.
    parts = sum(line.lstrip().startswith("ranks ") for line in lines)
    assert parts == sum(line.lstrip().startswith("ranks-0-value") for line in lines)
    assert (parts > 1) == (width < 120)


def test_a_table_in_a_file_keeps_its_lines() -> None:
    rows = [{name: name * 3 for name in NAMES}]
    columns = [Column(name, lambda row, name=name: row[name]) for name in NAMES]  # type: ignore[misc]
    console = Console(file=io.StringIO(), width=80)
    ResultTable("estimate", "a title", columns, rows).show(console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert any(all(name * 3 in line for name in NAMES) for line in text.splitlines())
