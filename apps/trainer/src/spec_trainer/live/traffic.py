"""Traffic collects live requests of running servers; a server may disappear and come back."""

from __future__ import annotations

import logging
import math
import re
import time
from collections import Counter
from concurrent import futures
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from spec_core.errors import ConfigError, EngineError
from spec_trainer.base.waiting import LINE_EVERY_S
from spec_trainer.live.kept_states import take_states
from spec_trainer.push.background import in_background
from spec_trainer.push.servers import ask_servers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from spec_core.records import FeatureSchema
    from spec_kit.hosting import HttpReplica
    from spec_kit.live_traffic.live_requests import LiveRequest

log = logging.getLogger(__name__)

_LONGEST_TAKE_S = 10.0
"""Seconds after which one ``take`` requests nothing more from a server, even if more requests are left."""
_CHECK_S = 0.1
"""Seconds between two looks whether the command is to stop."""
_GRACE_S = 5.0
"""Longest time, in seconds, for which a command that is to stop waits for the answers of servers."""


class TakenRequest(NamedTuple):
    """A live request that a server has stored, and the hidden states that the server captured for it."""

    request: LiveRequest
    states: Tensor | str | None
    """Hidden states of the request's first tokens that the server has captured, or the reason why there are none.
    None if the command itself captures features."""


class _Silence:
    """Logs a line every ten seconds while no server answers."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._said_s = 0.0

    def note(self, *, answers: bool) -> None:
        """Note whether a server answers now."""
        now_s = time.monotonic()
        if answers:
            self._began_s = None
        elif self._began_s is None:
            self._began_s = self._said_s = now_s
        elif now_s - self._said_s >= LINE_EVERY_S:
            self._said_s = now_s
            log.info("no server of follow.servers answers: %.0f s so far", now_s - self._began_s)


class Traffic:
    """Fetches stored requests from servers, and counts the requests that the servers did not store."""

    def __init__(self, urls: Sequence[str], timeout_s: float, schema: FeatureSchema | None = None) -> None:
        """Prepare to ask the servers at ``urls``; ``timeout_s`` is the longest wait for each answer.

        ``schema``: the features that the servers capture for each request; None if they need not capture.
        """
        self._urls = urls
        self._timeout_s = timeout_s
        self._schema = schema
        self._capturing: set[str] = set()
        """Addresses of servers that are known to capture ``schema``."""
        self._problems: dict[str, str] = {}
        self._left_out: dict[str, Counter[str]] = {}
        self._silence = _Silence()
        self.versions: dict[str, int | None] = {}
        """Address -> draft version of each server that answered the last ``take``."""
        self.acceptance_lengths: dict[str, float] = {}
        """Address -> tokens per verification that the server has counted since its draft changed, if any."""

    @property
    def left_out(self) -> Counter[str]:
        """Number of requests that the servers did not store, by reason."""
        return sum(self._left_out.values(), Counter())

    @property
    def newest_version(self) -> int:
        """Newest draft version of a server that answered the last ``take``; 0 if they have their first draft."""
        return max((version or 0 for version in self.versions.values()), default=0)

    def take(self, should_stop: Callable[[], bool] = lambda: False) -> list[TakenRequest]:
        """Return the requests that the servers have stored since the last call.

        A server that fails is logged once, and is asked again in the next call; a line every ten seconds says that no
        server answers. If ``should_stop()`` becomes true,
        return soon, with the requests that have come by then. Raise ConfigError if a server does not capture the
        features that the draft needs.
        """
        taken: list[TakenRequest] = []
        self.versions, self.acceptance_lengths = {}, {}
        fetch = in_background(partial(self._fetch, taken, should_stop), "traffic")
        deadline_s = math.inf
        while not futures.wait([fetch], _CHECK_S).done:
            if should_stop():
                deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
            if time.monotonic() >= deadline_s:
                return list(taken)
        fetch.result()
        self._silence.note(answers=bool(self.versions))
        return taken

    def _fetch(self, taken: list[TakenRequest], should_stop: Callable[[], bool]) -> None:
        """Append the servers' requests to ``taken``, up to an error or a stop."""
        for url, server in ask_servers(self._urls, self._timeout_s).items():
            try:
                if isinstance(server, EngineError):
                    raise server
                with server:
                    self._check_capture(url, server)
                    for one in self._of(url, server):
                        taken.append(one)  # one by one, to keep those before an error
                        if should_stop():
                            return
                self.versions[url] = server.first_answer.status.version
                counted = server.first_answer.acceptance
                if counted.rounds:
                    self.acceptance_lengths[url] = counted.acceptance_length
                if self._problems.pop(url, None):
                    log.info("%s answers again", url)
            except EngineError as error:
                problem = re.sub(r"\d+", "", str(error))  # sizes and counts differ from answer to answer
                if self._problems.get(url) != problem:
                    log.warning("%s", error)
                self._problems[url] = problem
                self._capturing.discard(url)

    def _check_capture(self, url: str, server: HttpReplica) -> None:
        """Raise ConfigError if the server does not capture the hidden states that the draft is trained on."""
        if self._schema is None or url in self._capturing:
            return
        if (found := server.states_schema()) != self._schema:
            raise ConfigError(
                f"{url} captures {_described(found)}, and the draft needs {_described(self._schema)}; serve this "
                "draft there, or set follow.capture=prefill"
            )
        self._capturing.add(url)

    def _of(self, url: str, server: HttpReplica) -> Iterator[TakenRequest]:
        deadline = time.monotonic() + _LONGEST_TAKE_S
        while True:
            answer = server.take_requests()
            self._left_out[url] = Counter(answer.left_out)
            yield from with_states(server, answer.requests, self._schema)
            if not answer.left or time.monotonic() >= deadline:
                return


def with_states(
    server: HttpReplica, requests: Sequence[LiveRequest], schema: FeatureSchema | None
) -> Iterator[TakenRequest]:
    """Yield each request with the hidden states that the server captured for it.

    If ``schema`` is None, the states are None. If the server fails, its remaining states are lost: yield the
    remaining requests without states, then raise EngineError.
    """
    for number, request in enumerate(requests):
        try:
            states = None if schema is None else take_states(server, request, schema)
        except EngineError:
            yield from (TakenRequest(lost, "server_failed") for lost in requests[number:])
            raise
        yield TakenRequest(request, states)


def _described(schema: FeatureSchema) -> str:
    layers = ",".join(map(str, schema.layers))
    return f"states of layers {layers} of {schema.hidden_size} numbers in {schema.dtype}"
