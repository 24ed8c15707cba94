"""Traffic: the live requests of running servers, any of which may be gone and come back."""

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
"""Most calls to a server at a time, whatever it says that is left."""


class Traffic:
    """Takes requests from servers. What a server says of them is kept as counts alone."""

    def __init__(self, urls: Sequence[str], timeout_s: float) -> None:
        """Ask nobody yet; ``timeout_s`` is for each answer."""
        self._urls, self._timeout_s = urls, timeout_s
        self._problems: dict[str, str] = {}
        self._left_out: dict[str, Counter[str]] = {}
        self.versions: dict[str, int | None] = {}
        """Draft version of each server that has answered last time."""

    @property
    def left_out(self) -> Counter[str]:
        """Requests that the servers did not keep, by the reason."""
        return sum(self._left_out.values(), Counter())

    def take(self) -> list[LiveRequest]:
        """Return what the servers have kept; one that fails is named in the log, once, and asked again next time."""
        taken: list[LiveRequest] = []
        self.versions = {}
        for url, server in ask_servers(self._urls, self._timeout_s).items():
            try:
                if isinstance(server, EngineError):
                    raise server
                with server:
                    taken += self._of(url, server)
                self.versions[url] = server.first_answer.status.version
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
