"""HTML of reports: the only place where values become part of a page, each of them as text."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def text(value: object) -> str:
    """Return a value as text of a page, in which nothing is markup."""
    return html.escape(str(value))


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], words: int = 0) -> str:
    """Return a table of values: ``words`` columns of text, then numbers, which stand on the right."""
    head = "<tr>" + "".join(f"<th>{text(name)}" for name in heads) if heads else ""
    cells = (
        "".join(
            f"<td{'' if column < words else ' class=n'}>{text(value)}" for column, value in enumerate(row)
        )
        for row in rows
    )
    return f"<table>{head}{''.join(f'<tr>{row}' for row in cells)}</table>"


def figures(shown: Iterable[tuple[str, float | None, str]]) -> str:
    """Return a box for each number that is there: its label, the number, and the format that it is shown in."""
    boxes = [
        f"<div class=figure><b>{text(form.format(value))}</b>{text(label)}</div>"
        for label, value, form in shown
        if value is not None
    ]
    return f"<div class=figures>{''.join(boxes)}</div>"
