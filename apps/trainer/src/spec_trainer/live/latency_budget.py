"""LatencyBudget makes training wait while servers are slower than ``follow.latency_budget_ms``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from spec_core.errors import EngineError, PluginError
from spec_core.records import ServerCounters
from spec_processes.sockets import HttpClient
from spec_trainer.measure.server.metrics_reader import read_counters
from spec_trainer.workers.run_driver import Sleep

log = logging.getLogger(__name__)

_SHARE = 0.99
_ANSWER_S = 5.0
_LONGEST_PAGE = 1 << 24
_LEAST_TOKENS = 100
"""Smallest number of tokens between two readings of a server's metrics by which its latency is judged; a server with
fewer tokens is not busy."""


class LatencyBudget:
    """Compares the p99 inter-token latency of servers with a budget, over the time since the last reading."""

    def __init__(self, urls: Sequence[str], budget_ms: float, every_s: float) -> None:
        """Prepare to compare the servers' latency with ``budget_ms``, at most once in ``every_s`` seconds."""
        self._servers = [_ServerLatency(url) for url in urls]
        self._budget_s = budget_ms / 1000
        self._every_s = every_s
        self._next_s = time.monotonic()
        """Time (``time.monotonic``) of the next reading of the metrics."""
        self.waited_s = 0.0
        """Seconds that training has waited."""

    def wait(self, should_stop: Callable[[], bool], sleep: Sleep) -> None:
        """Wait until no server exceeds the budget, or until ``should_stop()`` is true.

        It waits by calling ``sleep``.
        """
        if time.monotonic() < self._next_s:
            return
        began_s = time.monotonic()
        slow = self._slow()
        if slow:
            log.info("training waits: %s", slow)
            while slow and not should_stop():
                sleep(0.1)
                slow = self._slow() if time.monotonic() >= self._next_s else slow
            log.info("training goes on after %.1f s", time.monotonic() - began_s)
            self.waited_s += time.monotonic() - began_s

    def _slow(self) -> str:
        """Read every server's metrics; return a line about a server over the budget, or an empty string."""
        found = {server.url: server.p99_s() for server in self._servers}
        self._next_s = time.monotonic() + self._every_s
        for url, p99_s in found.items():
            if p99_s is not None and p99_s > self._budget_s:
                return f"{url} has a p99 latency of {1000 * p99_s:.1f} ms a token, above {1000 * self._budget_s:g} ms"
        return ""


class _ServerLatency:
    """The inter-token latency of one server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = HttpClient(url, None)
        self._engine: str | None = None
        """Name of the engine whose plugin read the metrics last."""
        self._before: ServerCounters | None = None
        self._problem = ""

    def p99_s(self) -> float | None:
        """Return the p99 of the seconds between tokens, over the tokens served since the last call.

        Return None if the server has served too few tokens, does not answer, or has no such metrics, or if its
        engine's plugin fails to read them.
        """
        try:
            now = self._counters()
        except (EngineError, PluginError) as error:
            if str(error) != self._problem:
                log.warning("follow.latency_budget_ms: %s", error)
            self._problem = str(error)
            self._engine = None
            self._before = None
            return None
        before, self._before = self._before, now
        since = None if before is None else now - before
        is_busy = since is not None and since.inter_token_latency[-1][1] >= _LEAST_TOKENS
        return since.latency_quantile(_SHARE) if since is not None and is_busy else None

    def _counters(self) -> ServerCounters:
        """Return the server's counters. Raise EngineError if they do not include the inter-token latency."""
        page = b"".join(self._client.stream("/metrics", "", _ANSWER_S, _LONGEST_PAGE)).decode(
            errors="replace"
        )
        found = read_counters(page, self.url, None if self._engine is None else [self._engine])
        if found is None or not found[1].inter_token_latency:
            raise EngineError(
                f"{self.url}/metrics has no inter-token latency; training does not give way to it"
            )
        self._engine, counters = found
        return counters
