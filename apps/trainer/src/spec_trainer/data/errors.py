"""BadRow is the error for a single row of the data."""

from __future__ import annotations

from spec_core.errors import DataError


class BadRow(DataError):
    """A row that cannot be used.

    The data report counts rows by ``reason``; ``detail`` describes this row. A ``harmless`` row is well formed but
    useless, such as a row that is too short: it is dropped even with ``data.on_bad_row=error``.
    """

    def __init__(self, reason: str, detail: str = "", *, harmless: bool = False) -> None:
        """Set the reason, by which rows are counted, and the detail of this row."""
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.harmless = harmless

    @property
    def reason(self) -> str:
        """The kind of problem, without the detail of this row."""
        return str(self).partition(": ")[0]
