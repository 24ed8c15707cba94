"""Show the quickstart's progress: a bar, the current stage, and the next stages."""

from __future__ import annotations

import logging
from collections.abc import Mapping

log = logging.getLogger(__name__)

READ, TARGET, DRAFT, MEASURE, REPORT = (
    "reading the text that Python ships",
    "training the tiny target (once: it is cached)",
    "training the draft",
    "measuring",
    "writing the report",
)
SHARES: Mapping[str, float] = {READ: 0.02, TARGET: 0.42, DRAFT: 0.37, MEASURE: 0.18, REPORT: 0.01}
"""Share of the total time that each stage takes on two cores."""
_WIDTH = 24


class Stages:
    """Shows the progress through the stages, in order; a stage that does not begin is skipped."""

    def __init__(self) -> None:
        """Begin with the first stage."""
        self._current = READ

    def begin(self, title: str) -> None:
        """Show that a stage begins, and which stages follow."""
        self._current = title
        titles = list(SHARES)
        following = titles[titles.index(title) + 1 :]
        self.show(0.0, f"next: {', '.join(following)}" if following else "")

    def show(self, share: float, note: str = "") -> None:
        """Show that ``share`` (0 to 1) of the current stage is done."""
        titles = list(SHARES)
        before = sum(SHARES[title] for title in titles[: titles.index(self._current)])
        done = before + share * SHARES[self._current]
        bar = f"{'#' * round(done * _WIDTH):-<{_WIDTH}}"
        log.info("[%s] %3.0f %%  %s%s", bar, 100 * done, self._current, note and f"; {note}")
