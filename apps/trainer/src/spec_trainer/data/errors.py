"""The one error that a row can cause."""

from __future__ import annotations

from spec_core.errors import DataError


class BadRow(DataError):
    """A row that cannot be used.

    ``reason`` is one of a few, which the report counts; ``detail`` is about this row. A ``harmless`` row is well
    formed and merely of no use: it is dropped whatever ``data.on_bad_row`` says.
    """

    def __init__(self, reason: str, detail: str = "", *, harmless: bool = False) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.harmless = harmless

    @property
    def reason(self) -> str:
        return str(self).partition(": ")[0]
