"""Define ProgramReplica, for an engine of this run, and HttpReplica, for a user's server.

Both only forward calls; the program's worker processes connect to the publisher.
"""

from __future__ import annotations

import http
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, NamedTuple

import pydantic

from spec_core import DraftReplica, ServingStatus
from spec_core.errors import ConfigError, EngineError, ProtocolError
from spec_core.foreign import cause
from spec_core.records import AcceptanceCounters
from spec_core.resource import Resource
from spec_core.wire_record import WireRecord
from spec_core.wording import one_line, shown
from spec_kit.hosting.futures import then
from spec_kit.live_traffic.live_requests import TakenRequests
from spec_kit.live_traffic.served_states import ID_BYTES, StatesLayout, StatesLeftOut, StatesRange, piece_rows
from spec_processes.sockets.http_client import LONGEST_ANSWER, HttpClient

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from spec_core import UpdateId, UpdateRequest
    from spec_core.draft_replica import ReplicaCall
    from spec_core.records import FeatureSchema
    from spec_kit.hosting.modes import Fields
    from spec_processes.sockets.http_client import HttpAnswer

DRAFT_TOKEN_VARIABLE = "SPEC_DRAFT_TOKEN"
"""Environment variable with the secret token for pushes, the same for a server and its publisher."""
_ROUTES = "/spec/draft/"
_ANSWER_S = 60.0
"""Longest time in seconds for a response of a server, from the connection to the last byte. A call waits for the
current step of the engine."""
_GRACE_S = 1.0
"""Further seconds for a system that is still resolving the host's name."""
_MOST_RANKS = 4096
_LARGEST_COUNT = 1 << 53
"""Largest count: a float, in which counts are divided, does not hold every larger integer."""


class ServerAnswer(WireRecord):
    """The response of a server, of the same form for every call."""

    status: ServingStatus
    ranks: Annotated[int, pydantic.Field(ge=1, le=_MOST_RANKS)]
    acceptance: AcceptanceCounters

    @pydantic.field_validator("acceptance")
    @classmethod
    def _counts(cls, acceptance: AcceptanceCounters) -> AcceptanceCounters:
        totals = acceptance.rounds, acceptance.drafted, acceptance.accepted, acceptance.answers
        if not all(0 <= count <= _LARGEST_COUNT for count in (*totals, *acceptance.accepted_per_position)):
            raise ValueError(f"expected counts of 0 to {_LARGEST_COUNT}")
        squares = acceptance.squared_rounds, acceptance.squared_accepted, acceptance.rounds_times_accepted
        if not all(0 <= square <= _LARGEST_COUNT**2 for square in squares):
            raise ValueError(f"expected squares of 0 to {_LARGEST_COUNT**2}")
        return acceptance


class CapturedRows(NamedTuple):
    """Rows of states from position 0 on, as bytes."""

    token_ids: bytes
    """The tokens that the target ran, little-endian int32."""
    states: bytearray
    """The states of every captured layer, row after row."""


class _Refusal(WireRecord):
    """The response to a refused call."""

    error: str


class ProgramReplica(DraftReplica):
    """The program of an engine of this run, whose process accepts requests of kind ``draft``."""

    def __init__(self, ask: Callable[[str, str], Future[Fields]], num_ranks: int) -> None:
        """Create a replica of ``num_ranks`` ranks. ``ask``: sends a call's name and its argument as JSON."""
        self.num_ranks = num_ranks
        self._ask = ask

    def call(self, name: ReplicaCall, argument: UpdateRequest | UpdateId | None) -> Future[ServingStatus]:
        """Send a call to the program; the future returns the program's reply."""
        asked = self._ask(name, _body(argument))
        return then(asked, lambda fields: ServingStatus.decode(json.dumps(fields["status"])))


class HttpReplica(DraftReplica, Resource):
    """A server that a user has started with this project's extension; ``docs/engines.md`` has its routes."""

    def __init__(self, url: str, token: str, timeout_s: float = _ANSWER_S) -> None:
        """Connect to the server at ``url`` (``http://host:port``) and read its number of ranks.

        ``timeout_s``: longest time of each response. Raise ConfigError for another form of address or a token
        that is no valid header value, EngineError if no server answers or it lacks these routes.
        """
        self._client = HttpClient(url, token)
        self._timeout_s = timeout_s
        self.first_answer = self._answer()
        """The server's first response."""
        self.num_ranks = self.first_answer.ranks

    def acceptance(self, rounds: int = 0, wait_s: float = 0.0) -> AcceptanceCounters:
        """Return the counters of requests that began after the server's draft last changed; blocking.

        The server responds when it has counted ``rounds`` verifications, or after ``wait_s`` seconds.
        """
        return self._answer(f"?rounds={rounds}&wait_s={wait_s:g}" if rounds else "", wait_s).acceptance

    def take_requests(self) -> TakenRequests:
        """Return some of the requests that the server has stored for training; the server deletes them.

        Raise EngineError if the call fails. No error message contains the server's data.
        """
        asked = self._client.ask(f"{_ROUTES}requests", "{}", self._timeout_s)
        answer = self._awaited("requests", asked, self._timeout_s)
        if answer.status != http.HTTPStatus.OK:
            self._read("requests", answer)  # raises the error that the answer reports
        try:
            return TakenRequests.decode(answer.body)
        except ProtocolError:
            where = self._client.url
            length = len(answer.body)
            raise EngineError(f"{where} answered requests with {length} bytes that are none") from None

    def states_schema(self) -> FeatureSchema:
        """Return the schema of the states that the server captures while it serves.

        Raise ConfigError if it captures none, EngineError if the call fails.
        """
        answer = self._states("{}", LONGEST_ANSWER)
        if answer.status in (http.HTTPStatus.NOT_FOUND, http.HTTPStatus.CONFLICT):
            with suppress(ProtocolError):
                refusal = one_line(_Refusal.decode(answer.body).error)
                raise ConfigError(f"{self._client.url} has no states of requests: {refusal}")
        try:
            return StatesLayout.decode(answer.body).to_schema()
        except (ProtocolError, ValueError):
            raise self._no_states(answer) from None

    def take_states(self, key: str, rows: int, schema: FeatureSchema) -> CapturedRows | str:
        """Return the first ``rows`` rows of a request's states; the server deletes them.

        Return the cause if the server does not have all of them. Raise EngineError if the call fails. No error
        message contains the server's data.
        """
        ids, states = bytearray(), bytearray()
        row_bytes = schema.bytes_per_token()
        while (first := len(ids) // ID_BYTES) < rows:
            num = min(rows - first, piece_rows(schema))
            size = num * (ID_BYTES + row_bytes)
            asked = StatesRange(key=key, first=first, rows=rows).model_dump_json()
            answer = self._states(asked, size + LONGEST_ANSWER)
            if answer.status == http.HTTPStatus.GONE:
                with suppress(ProtocolError):
                    return StatesLeftOut.decode(answer.body).left_out
            if answer.status != http.HTTPStatus.OK or len(answer.body) != size:
                raise self._no_states(answer)
            ids += answer.body[: num * ID_BYTES]
            states += answer.body[num * ID_BYTES :]
        return CapturedRows(bytes(ids), states)

    def _states(self, body: str, longest: int) -> HttpAnswer:
        asked = self._client.ask(f"{_ROUTES}states", body, self._timeout_s, longest)
        return self._awaited("states", asked, self._timeout_s)

    def _no_states(self, answer: HttpAnswer) -> EngineError:
        return EngineError(
            f"{self._client.url} answered states with {answer.status} and {len(answer.body)} bytes that are none"
        )

    def close(self) -> None:
        """End every pending and later call with EngineError; any thread may call it."""
        self._client.close()

    def call(self, name: ReplicaCall, argument: UpdateRequest | UpdateId | None) -> Future[ServingStatus]:
        """Send a call to the server on a separate thread."""
        asked = self._client.ask(f"{_ROUTES}{name}", _body(argument), self._timeout_s)
        return then(asked, lambda answer: self._read(name, answer).status)

    def _answer(self, query: str = "", held_s: float = 0.0) -> ServerAnswer:
        """Return the server's status, for which the server may wait up to ``held_s`` seconds."""
        limit_s = self._timeout_s + held_s
        asked = self._client.ask(f"{_ROUTES}status{query}", "", limit_s)
        return self._read("status", self._awaited("status", asked, limit_s))

    def _awaited(self, name: str, asked: Future[HttpAnswer], limit_s: float) -> HttpAnswer:
        try:
            return asked.result(limit_s + _GRACE_S)
        except TimeoutError as error:
            raise EngineError(f"{self._client.url} does not answer {name} within {limit_s:g} s") from error

    def _read(self, name: str, answer: HttpAnswer) -> ServerAnswer:
        """Parse a server's response. Raise EngineError for a refusal and for an invalid response."""
        where = self._client.url
        if answer.status == http.HTTPStatus.NOT_FOUND:
            raise EngineError(f"{where} has no {_ROUTES}{name}; start it with this project's extension")
        if answer.location:
            raise EngineError(
                f"{where} redirects {name} to {shown(answer.location)}, and the secret goes nowhere else; "
                "name the address of the server itself"
            )
        try:
            if answer.status == http.HTTPStatus.OK:
                return ServerAnswer.decode(answer.body)
            refusal = one_line(_Refusal.decode(answer.body).error)
        except ProtocolError as error:
            came = f"{answer.status} {shown(answer.reason)}, {shown(answer.body[:80])}"
            raise EngineError(
                f"{where} is no server with this project's extension: it answered {name} with {came}: {cause(error)}"
            ) from error
        raise EngineError(f"{where} refused {name}: {refusal}")


def _body(argument: UpdateRequest | UpdateId | None) -> str:
    return "" if argument is None else argument.model_dump_json()
