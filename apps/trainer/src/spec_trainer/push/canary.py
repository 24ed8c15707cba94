"""Canary: whether a new version is accepted on live traffic as the one before was."""

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
"""Longest time for which a server holds back its answer: a server that stops waits for it."""
_AGAIN_S = 1.0
"""Time until a server is asked again that is lost, or has answered without traffic enough."""
_SURE = 3.0
"""Standard errors that leave nothing to chance: one time in 740 it goes further to one side."""
_LOOKS = 4
"""Times to compare within a window: each one is another chance to err."""
_LEAST_ANSWERS = 10
"""Answers that end a window; with fewer it lasts up to ``_LONGEST`` windows."""
_LONGEST = 4


@dataclass(frozen=True, kw_only=True)
class CanaryVerdict:
    """The comparison of a version with the one before."""

    before: AcceptanceCounters
    after: AcceptanceCounters
    margin: float

    @property
    def fall(self) -> float:
        """Return by how much the acceptance length is lower than before."""
        return self.before.acceptance_length - self.after.acceptance_length

    @property
    def chance(self) -> float:
        """Return how far chance alone may move ``fall``, to either side."""
        errors = self.before.acceptance_length_error, self.after.acceptance_length_error
        return _SURE * math.hypot(*errors)

    @property
    def has_fallen(self) -> bool:
        """Whether the acceptance length has fallen by more than the margin, beyond chance."""
        return self.fall - self.chance > self.margin

    @property
    def has_stayed(self) -> bool:
        """Whether it has not fallen by more than the margin, beyond chance."""
        return self.fall + self.chance <= self.margin


class Canary:
    """Compares the acceptance length of each version with that of the last one that has stayed.

    Servers count requests alone that began after their draft last changed: others keep keys and values that another
    draft has computed. A version is compared until the verdict is beyond chance, or over a window of ``rounds``
    verifications, of all servers together.
    """

    def __init__(self, servers: Mapping[str, HttpReplica], margin: float, rounds: int) -> None:
        """Watch ``servers``; ``margin`` is in tokens of acceptance length."""
        self._servers, self._margin, self._rounds = servers, margin, rounds
        self._reference: AcceptanceCounters | None = None
        self._earlier = AcceptanceCounters()
        """Counts of the version that serves, from before another one was reverted."""
        self._count: _Count | None = None
        self._ended = False

    def look(self, names: Iterable[str]) -> None:
        """Note what the version is worth that these servers serve, if there was traffic enough.

        Called before each push.
        """
        counted = self._earlier
        for name in names:
            with contextlib.suppress(EngineError):  # the publisher says which one is lost
                counted += self._servers[name].acceptance()
        if counted.rounds >= self._rounds:
            self._reference = counted

    def judge(self, names: Iterable[str]) -> CanaryVerdict | None:
        """Wait for traffic on the servers that have committed a version, and compare it with the reference.

        Return None if there is no reference, and where ``end`` is called before there is a verdict.
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
            if verdict.has_fallen:  # its reference serves again, and a lucky count of that evens out
                self._earlier = self._reference
            window = self._rounds if after.answers >= _LEAST_ANSWERS else self._rounds * _LONGEST
            if verdict.has_fallen or verdict.has_stayed or wanted >= window:
                return verdict

    def end(self) -> None:
        """Judge nothing any more, also not what is waited for; any thread may call it."""
        self._ended = True
        if self._count is not None:
            self._count.end()


class _Count:
    """Collects what servers count, until it is enough of all of them together."""

    def __init__(self, servers: Iterable[HttpReplica], rounds: int) -> None:
        self._counted = dict.fromkeys(servers, AcceptanceCounters())
        self._rounds = rounds
        self._lock = threading.Lock()
        self._over = threading.Event()

    def wait(self) -> AcceptanceCounters:
        """Return what was counted when it was enough, or at ``end``."""
        for server in self._counted:
            threading.Thread(target=self._follow, args=(server,), name="canary", daemon=True).start()
        self._over.wait()
        return self._total()

    def end(self) -> None:
        self._over.set()

    def _follow(self, server: HttpReplica) -> None:
        """Note what a server has counted, each time that its share of the rounds that are left has come."""
        while not self._over.is_set():
            wanted = self._counted[server].rounds + max(1, self._num_left() // len(self._counted))
            with contextlib.suppress(EngineError):  # the publisher says which one is lost
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
