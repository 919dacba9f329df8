"""Recipes: whole trainings that a person reads and copies.

Each folder here is one: its `__init__.py` exports `recipe`, and the first line of its docstring
says what it trains. `mgt recipes` prints these lines, and the tests run through all of them.
"""

from __future__ import annotations

from pathlib import Path


def _first_line(file: Path) -> str:
    """Read, not imported: `mgt --help` must not wait for torch."""
    return file.read_text().lstrip().removeprefix('"""').splitlines()[0].rstrip('."')


def _find() -> dict[str, str]:
    files = sorted(Path(__file__).parent.glob("*/__init__.py"))
    return {file.parent.name: _first_line(file) for file in files}


RECIPES = _find()
