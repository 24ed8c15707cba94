"""Canary compares a pushed draft's acceptance length on live traffic with the previous version's."""

from __future__ import annotations

import contextlib
import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_core.errors import EngineError
from spec_core.records import AcceptanceCounters

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from spec_kit.hosting import HttpReplica

_HELD_S = 10.0
"""Longest long-poll of a server, in seconds; a server that shuts down waits for the poll to end."""
_AGAIN_S = 1.0
"""Seconds until a server is polled again if it was unreachable or had too little traffic."""
_SURE = 3.0
"""Standard errors of a significant difference: chance exceeds it on one side once in 740 times."""
_LOOKS = 4
"""Number of comparisons of a version until it has ``rounds`` verifications. It is small, because each
comparison may err by chance."""
_LEAST_ANSWERS = 10
"""Smallest number of answers on which a verdict rests. With fewer answers, up to ``_LONGEST`` times as many
verifications are awaited."""
_LONGEST = 4


@dataclass(frozen=True, kw_only=True)
class CanaryVerdict:
    """The comparison of a draft version with the reference, the last version that was not reverted."""

    before: AcceptanceCounters
    after: AcceptanceCounters
    margin: float

    @property
    def fall(self) -> float:
        """Return the fall of the acceptance length, in tokens."""
        return self.before.acceptance_length - self.after.acceptance_length

    @property
    def chance(self) -> float:
        """Return three standard errors of ``fall``: chance alone rarely changes ``fall`` by more."""
        errors = self.before.acceptance_length_error, self.after.acceptance_length_error
        return _SURE * math.hypot(*errors)

    @property
    def has_fallen(self) -> bool:
        """Whether the acceptance length has fallen by more than the margin, even allowing for chance."""
        return self.fall - self.chance > self.margin

    @property
    def has_stayed(self) -> bool:
        """Whether the acceptance length has fallen by at most the margin, even allowing for chance."""
        return self.fall + self.chance <= self.margin


class Canary:
    """Compares each version's acceptance length with the last version that was not reverted.

    Servers count only requests that began after the last change of the draft, because the draft's KV cache of earlier
    requests was computed by another version. A version is judged until the verdict is significant, normally over at
    most ``rounds`` verifications, summed over servers.
    """

    def __init__(self, servers: Mapping[str, HttpReplica], margin: float, rounds: int) -> None:
        """Prepare to compare versions on ``servers``.

        ``margin``: a fall of the acceptance length, in tokens, that is allowed. ``rounds``: see the class.
        """
        self._servers = servers
        self._margin = margin
        self._rounds = rounds
        self._reference: AcceptanceCounters | None = None
        self._earlier = AcceptanceCounters()
        """Counters of the served version from before a push that was reverted; zero after a version that was
        not reverted."""
        self._count: _Count | None = None
        self._ended = False

    def look(self, names: Iterable[str]) -> None:
        """Store the acceptance counters of these servers as the reference for the next version.

        They are not stored if they count too few verifications. The caller calls this method before each
        push.
        """
        counted = self._earlier
        for name in names:
            with contextlib.suppress(EngineError):  # the publisher reports a lost server
                counted += self._servers[name].acceptance()
        if counted.rounds >= self._rounds:
            self._reference = counted

    def judge(self, names: Iterable[str]) -> CanaryVerdict | None:
        """Compare a version's acceptance length with the reference, on the servers that committed the version.

        Wait for enough traffic on the servers ``names``. ``look`` has stored the reference before the push.
        Return None if there is no reference, or if ``end`` is called before there is a verdict.
        """
        self._earlier = AcceptanceCounters()
        if self._reference is None:
            return None
        servers = [self._servers[name] for name in names]
        wanted = 0
        while True:
            wanted += math.ceil(self._rounds / _LOOKS)
            self._count = _Count(servers, wanted)
            if self._ended or (after := self._count.wait()).rounds < wanted:
                return None
            verdict = CanaryVerdict(before=self._reference, after=after, margin=self._margin)
            if verdict.has_fallen:  # the old draft serves again, and its rounds so far still count
                self._earlier = self._reference
            window = self._rounds if after.answers >= _LEAST_ANSWERS else self._rounds * _LONGEST
            if verdict.has_fallen or verdict.has_stayed or wanted >= window:
                return verdict

    def end(self) -> None:
        """Stop judging; a call of ``judge`` that waits returns None. Thread-safe."""
        self._ended = True
        if self._count is not None:
            self._count.end()


class _Count:
    """Adds up the counters of servers until they have counted enough verifications together."""

    def __init__(self, servers: Iterable[HttpReplica], rounds: int) -> None:
        self._counted = dict.fromkeys(servers, AcceptanceCounters())
        self._rounds = rounds
        self._lock = threading.Lock()
        self._over = threading.Event()

    def wait(self) -> AcceptanceCounters:
        """Wait until enough verifications were counted or ``end`` is called, and return the counters."""
        for server in self._counted:
            threading.Thread(target=self._follow, args=(server,), name="canary", daemon=True).start()
        self._over.wait()
        return self._total()

    def end(self) -> None:
        self._over.set()

    def _follow(self, server: HttpReplica) -> None:
        """Poll a server's counters until enough verifications are counted on all servers together.

        The server answers a poll when it has counted its equal share of the missing verifications, or
        after ``_HELD_S`` seconds.
        """
        while not self._over.is_set():
            wanted = self._counted[server].rounds + max(1, self._num_left() // len(self._counted))
            with contextlib.suppress(EngineError):  # the publisher reports a lost server
                self._note(server, server.acceptance(rounds=wanted, wait_s=_HELD_S))
                if self._counted[server].rounds >= wanted:
                    continue
            self._over.wait(_AGAIN_S)

    def _note(self, server: HttpReplica, counted: AcceptanceCounters) -> None:
        with self._lock:
            self._counted[server] = counted
            if self._num_left() <= 0:
                self._over.set()

    def _num_left(self) -> int:
        return self._rounds - self._total().rounds

    def _total(self) -> AcceptanceCounters:
        return sum(self._counted.values(), AcceptanceCounters())
