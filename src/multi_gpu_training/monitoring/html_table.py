"""Tables of the pages that are made from runs, searches and profiles."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def html_table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; every cell is shown as text."""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
