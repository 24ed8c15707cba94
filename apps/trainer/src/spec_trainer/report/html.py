"""Write HTML for reports. Only these functions insert values into a page; they escape each value."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def text(value: object) -> str:
    """Return a value as HTML text, escaped."""
    return html.escape(str(value))


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], words: int = 0) -> str:
    """Return an HTML table whose numbers are right-aligned.

    ``words``: number of columns of text, which come first; all further columns are numbers.
    """
    head = "<tr>" + "".join(f"<th>{text(name)}" for name in heads) if heads else ""
    cells = (
        "".join(
            f"<td{'' if column < words else ' class=n'}>{text(value)}" for column, value in enumerate(row)
        )
        for row in rows
    )
    return f"<table>{head}{''.join(f'<tr>{row}' for row in cells)}</table>"


def figures(shown: Iterable[tuple[str, float | None, str]]) -> str:
    """Return HTML with a box for each figure in ``shown``: (label, number, format).

    Figures whose number is None are left out.
    """
    boxes = [
        f"<div class=figure><b>{text(form.format(value))}</b>{text(label)}</div>"
        for label, value, form in shown
        if value is not None
    ]
    return f"<div class=figures>{''.join(boxes)}</div>"


def number_table(
    rows: Iterable[Mapping[str, Any]], columns: Mapping[str, tuple[str, str]], words: int = 0
) -> str:
    """Return a ``table`` of records; ``columns``: head -> (key of a record, format). A missing figure is empty."""
    shown = [[form.format(row[key]) if key in row else "" for key, form in columns.values()] for row in rows]
    return table(tuple(columns), shown, words)
