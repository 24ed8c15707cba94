"""Canary: whether a new version is accepted on live traffic as the one before was."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_core.errors import EngineError
from spec_core.records import AcceptanceCounters

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Mapping

    from spec_core.hosting import HttpReplica

_ASK_S = 1.0
"""Time between two looks at the servers' counters, which they do not send by themselves."""


@dataclass(frozen=True, kw_only=True)
class CanaryVerdict:
    """The comparison of a version with the one before."""

    before: AcceptanceCounters
    after: AcceptanceCounters
    has_fallen: bool
    """Whether the acceptance length has fallen by more than the margin."""


class Canary:
    """Compares the acceptance length of each version with that of the last one that has stayed.

    Servers count anew from each commit. A version is compared over ``rounds`` verifications, of all servers together.
    """

    def __init__(self, servers: Mapping[str, HttpReplica], margin: float, rounds: int) -> None:
        """Watch ``servers``; ``margin`` is in tokens of acceptance length."""
        self._servers, self._margin, self._rounds = servers, margin, rounds
        self._reference: AcceptanceCounters | None = None

    def look(self) -> None:
        """Note what the version is worth that serves now, if there was traffic enough; called before each push."""
        counted = self._counted(self._servers)
        if counted.rounds >= self._rounds:
            self._reference = counted

    def judge(self, names: Iterable[str], ending: threading.Event) -> CanaryVerdict | None:
        """Wait for traffic on the servers that have committed a version, and compare it with the reference.

        Return None where there is none, and where ``ending`` is set before there was traffic enough.
        """
        if self._reference is None:
            return None
        servers = {name: self._servers[name] for name in names}
        while (counted := self._counted(servers)).rounds < self._rounds:
            if ending.wait(_ASK_S):
                return None
        fall = self._reference.acceptance_length - counted.acceptance_length
        return CanaryVerdict(before=self._reference, after=counted, has_fallen=fall > self._margin)

    def _counted(self, servers: Mapping[str, HttpReplica]) -> AcceptanceCounters:
        total = AcceptanceCounters()
        for server in servers.values():
            with contextlib.suppress(EngineError):  # the publisher says which one is lost
                total += server.acceptance()
        return total
