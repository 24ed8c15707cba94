"""Replacements decides whether a failed engine is started again, and logs each replacement.

A trainer is not replaced, because the other ranks wait for it in a collective.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from pathlib import Path

from spec_core.errors import HostLost, RunError, UsageError
from spec_trainer.run.metrics import StepLines
from spec_trainer.workers.failures import Failure

log = logging.getLogger(__name__)

DAY_S = 24 * 3600.0
"""Period, in seconds, in which replacements are counted. An engine that fails again and again ends the run;
rare failures do not end a run of weeks."""


class Replacements:
    """Decides whether failed workers are replaced, and appends a line to ``file`` for each replacement."""

    def __init__(self, limit: int, file: Path, now: Callable[[], float] = time.monotonic) -> None:
        """Allow ``limit`` replacements of each engine in a day, and log replacements to ``file``."""
        self._limit = limit
        self._file = file
        self._now = now
        self._recent: dict[str, list[float]] = defaultdict(list)

    def note(self, failures: Sequence[Failure], engines: Container[str], step: int | None) -> None:
        """Log that failed workers are replaced.

        ``failures``: the failed workers, the root cause first. If one of them may not be replaced, raise the
        first failure's error; if one has reached the limit, an error that names the limit. Only workers in
        ``engines`` may be replaced. ``step``: optimizer steps done; None before training starts, when no worker
        may be replaced, because the replacement would fail, too.
        """
        for failure in failures:
            lasting = step is None or isinstance(failure.error, UsageError | HostLost)
            if lasting or failure.worker not in engines:
                raise failures[0].error
            self._forget_old(failure.worker)
            if len(self._recent[failure.worker]) >= self._limit:
                raise self._last(failure)
        for failure in failures:
            self._recent[failure.worker].append(self._now())
            log.warning(
                "%s; %s is replaced (%d of engine.replacements=%d)",
                failure.error, failure.worker, len(self._recent[failure.worker]), self._limit,
            )  # fmt: skip
            entry = {"time": time.time(), "step": step, "worker": failure.worker, "cause": str(failure.error)}
            with StepLines(self._file) as lines:
                lines.write(entry)

    def _forget_old(self, worker: str) -> None:
        earliest = self._now() - DAY_S
        self._recent[worker] = [replaced for replaced in self._recent[worker] if replaced > earliest]

    def _last(self, failure: Failure) -> Exception:
        """Return the error to raise if the failed worker has reached its limit of replacements."""
        if self._limit == 0:
            return failure.error
        return RunError(
            f"{failure.error}; engine.replacements={self._limit} allows no other replacement in a day"
        )
