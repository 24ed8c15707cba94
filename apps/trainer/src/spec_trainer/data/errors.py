"""The error that a single row can cause."""

from __future__ import annotations

from spec_core.errors import DataError


class BadRow(DataError):
    """A row that cannot be used.

    The report counts rows by ``reason``; ``detail`` is about this row. A ``harmless`` row is well formed but
    useless: it is dropped, whatever ``data.on_bad_row`` is.
    """

    def __init__(self, reason: str, detail: str = "", *, harmless: bool = False) -> None:
        """Keep the reason, under which rows are counted, and what is particular to this row."""
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.harmless = harmless

    @property
    def reason(self) -> str:
        """The kind of problem, the same for all rows that have it."""
        return str(self).partition(": ")[0]
