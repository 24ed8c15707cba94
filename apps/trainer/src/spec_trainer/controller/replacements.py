"""Replacements: which engines of a run are started again where they have failed, how often, and why.

A trainer is none of them: the other ranks wait in a collective for its share of a step.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from typing import TYPE_CHECKING

from spec_core.errors import HostLost, RunError, UsageError

if TYPE_CHECKING:
    from collections.abc import Container, Sequence
    from pathlib import Path

    from spec_trainer.controller.failures import Failure

log = logging.getLogger(__name__)


class Replacements:
    """The policy of a run for failures, and the record of what it did: a line of ``file`` for each replacement."""

    def __init__(self, engines: Container[str], limit: int, file: Path) -> None:
        """Allow ``limit`` replacements of each of the workers ``engines``."""
        self._engines = engines
        self._limit = limit
        self._file = file
        self._tries = Counter[str]()

    def note(self, failures: Sequence[Failure], step: int) -> None:
        """Note the replacement of every failed worker; raise the first failure's error if one may not be replaced.

        ``failures`` begin with the root cause. ``step``: optimizer steps done.
        """
        for failure in failures:
            if failure.worker not in self._engines or isinstance(failure.error, UsageError | HostLost):
                raise failures[0].error
            if self._tries[failure.worker] == self._limit:
                raise self._last(failure)
        for failure in failures:
            self._tries[failure.worker] += 1
            log.warning(
                "%s; %s is replaced (%d of engine.replacements=%d)",
                failure.error, failure.worker, self._tries[failure.worker], self._limit,
            )  # fmt: skip
            entry = {"time": time.time(), "step": step, "worker": failure.worker, "cause": str(failure.error)}
            with self._file.open("a") as lines:
                lines.write(json.dumps(entry) + "\n")

    def _last(self, failure: Failure) -> Exception:
        """Return the error of a worker that was replaced as often as may be."""
        if self._limit == 0:
            return failure.error
        return RunError(f"{failure.error}; it was replaced engine.replacements={self._limit} times before")
