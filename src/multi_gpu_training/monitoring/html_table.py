"""Tables of the pages that are made from runs, searches and profiles."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def html_table(
    titles: Sequence[str], rows: Sequence[Sequence[object]], label: str | None = None
) -> str:
    """A table; every cell is shown as text. With a `label`, a wide one scrolls by itself."""
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    table = f"<table><tr>{head}</tr>{body}</table>"
    return table if label is None else scrolling(table, label)


def scrolling(inside: str, label: str) -> str:
    """What may be wider than the page; the keyboard reaches it, too."""
    attributes = f'tabindex="0" role="region" aria-label="{escape(label)}"'
    return f'<div class="scroll" {attributes}>{inside}</div>'
