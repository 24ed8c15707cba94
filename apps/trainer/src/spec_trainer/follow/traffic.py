"""Traffic collects live requests of running servers; a server may disappear and come back."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from spec_core.errors import EngineError
from spec_trainer.push.servers import ask_servers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from spec_kit.hosting import HttpReplica, LiveRequest

log = logging.getLogger(__name__)

_MOST_CALLS = 64
"""Most calls to one server in one ``take``, even if it reports that more requests are left."""


class Traffic:
    """Fetches stored requests from servers, and counts the requests that the servers did not store."""

    def __init__(self, urls: Sequence[str], timeout_s: float) -> None:
        """Ask no server yet; ``timeout_s`` is the longest wait for each answer."""
        self._urls, self._timeout_s = urls, timeout_s
        self._problems: dict[str, str] = {}
        self._left_out: dict[str, Counter[str]] = {}
        self.versions: dict[str, int | None] = {}
        """Address -> draft version of each server that answered the last ``take``."""
        self.acceptance_lengths: dict[str, float] = {}
        """Address -> tokens per verification that the server has counted since its draft changed, if any."""

    @property
    def left_out(self) -> Counter[str]:
        """Number of requests that the servers did not store, by reason."""
        return sum(self._left_out.values(), Counter())

    def take(self) -> list[LiveRequest]:
        """Return the requests that the servers have stored since the last call.

        A server that fails is logged once, and is asked again in the next call.
        """
        taken: list[LiveRequest] = []
        self.versions, self.acceptance_lengths = {}, {}
        for url, server in ask_servers(self._urls, self._timeout_s).items():
            try:
                if isinstance(server, EngineError):
                    raise server
                with server:
                    taken += self._of(url, server)
                self.versions[url] = server.first_answer.status.version
                counted = server.first_answer.acceptance
                if counted.rounds:
                    self.acceptance_lengths[url] = counted.acceptance_length
                if self._problems.pop(url, None):
                    log.info("%s answers again", url)
            except EngineError as error:
                if self._problems.get(url) != str(error):
                    log.warning("%s", error)
                self._problems[url] = str(error)
        return taken

    def _of(self, url: str, server: HttpReplica) -> Iterator[LiveRequest]:
        for _ in range(_MOST_CALLS):
            answer = server.take_requests()
            self._left_out[url] = Counter(answer.left_out)
            yield from answer.requests
            if not answer.left:
                return
