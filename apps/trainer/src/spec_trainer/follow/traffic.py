"""Traffic collects live requests of running servers; a server may disappear and come back."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from spec_core.errors import ConfigError, EngineError
from spec_trainer.follow.kept_states import take_states
from spec_trainer.push.servers import ask_servers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from spec_core.records import FeatureSchema
    from spec_kit.hosting import HttpReplica, LiveRequest

log = logging.getLogger(__name__)

_LONGEST_TAKE_S = 10.0
"""Seconds after which one ``take`` requests nothing more from a server, even if more requests are left."""


class TakenRequest(NamedTuple):
    """A live request that a server has stored, and the hidden states that the server captured for it."""

    request: LiveRequest
    states: Tensor | str | None
    """Hidden states of the request's first tokens that the server has captured, or the reason why there are none.
    None if the command itself captures features."""


class Traffic:
    """Fetches stored requests from servers, and counts the requests that the servers did not store."""

    def __init__(self, urls: Sequence[str], timeout_s: float, schema: FeatureSchema | None = None) -> None:
        """Prepare to ask the servers at ``urls``; ``timeout_s`` is the longest wait for each answer.

        ``schema``: the features that the servers capture for each request; None if they need not capture.
        """
        self._urls, self._timeout_s, self._schema = urls, timeout_s, schema
        self._capturing: set[str] = set()
        """Addresses of servers that are known to capture ``schema``."""
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

    def take(self) -> list[TakenRequest]:
        """Return the requests that the servers have stored since the last call.

        A server that fails is logged once, and is asked again in the next call. Raise ConfigError if a server does
        not capture the features that the draft needs.
        """
        taken: list[TakenRequest] = []
        self.versions, self.acceptance_lengths = {}, {}
        for url, server in ask_servers(self._urls, self._timeout_s).items():
            try:
                if isinstance(server, EngineError):
                    raise server
                with server:
                    self._check_capture(url, server)
                    for requests in self._of(url, server):
                        taken.extend(with_states(server, requests, self._schema))  # up to an error
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
                self._capturing.discard(url)
        return taken

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

    def _of(self, url: str, server: HttpReplica) -> Iterator[Sequence[LiveRequest]]:
        deadline = time.monotonic() + _LONGEST_TAKE_S
        while True:
            answer = server.take_requests()
            self._left_out[url] = Counter(answer.left_out)
            yield answer.requests
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
