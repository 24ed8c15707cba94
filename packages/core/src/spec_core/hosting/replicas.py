"""Replicas of engines whose program has processes of its own: one that a run started, one that a user started.

Both hand calls on and do nothing else; the program's own worker processes connect to the publisher.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, cast
from urllib.parse import SplitResult, urlsplit

import pydantic

from spec_core.draft_replica import DraftReplica, ServingStatus
from spec_core.errors import ConfigError, EngineError, ProtocolError
from spec_core.foreign import cause
from spec_core.records import AcceptanceCounters
from spec_core.resource import Resource
from spec_core.wire_record import WireRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from spec_core.draft_replica import ReplicaCall, UpdateId, UpdateOrder
    from spec_core.hosting.modes import Fields

DRAFT_TOKEN_VARIABLE = "SPEC_DRAFT_TOKEN"
"""Environment variable with the secret of those who may push; a server and whoever pushes to it have the same."""
_CONNECT_S = 10.0
"""Longest wait for a connection to a server."""
_ANSWER_S = 60.0
"""Longest wait for an answer of a server: a call waits for the step that the engine is in."""


class _Answer(WireRecord):
    """The answer of a server, the same to every call."""

    status: ServingStatus
    ranks: Annotated[int, pydantic.Field(ge=1)]
    acceptance: AcceptanceCounters


class ProgramReplica(DraftReplica):
    """The program of an engine of this run, whose process takes requests of kind ``draft``."""

    def __init__(self, ask: Callable[[str, str], Future[Fields]], num_ranks: int) -> None:
        """Send calls by ``ask``, with their argument as JSON."""
        self.num_ranks = num_ranks
        self._ask = ask

    def call(self, name: ReplicaCall, argument: UpdateOrder | UpdateId | None) -> Future[ServingStatus]:
        """Ask the program; the future ends with its answer."""
        status: Future[ServingStatus] = Future()

        def answered(future: Future[Fields]) -> None:
            try:
                status.set_result(ServingStatus.decode(json.dumps(future.result()["status"])))
            except Exception as error:  # noqa: BLE001 (the caller gets every error, by the future)
                status.set_exception(error)

        self._ask(name, _body(argument)).add_done_callback(answered)
        return status


def check_draft_token(token: str) -> None:
    """Raise ConfigError for a secret that no header can carry."""
    if not token or not token.isascii() or not token.isprintable() or token != token.strip():
        raise ConfigError(
            "the secret of the servers cannot be sent; expected printable ASCII without spaces at its ends "
            f"({DRAFT_TOKEN_VARIABLE})"
        )


class HttpReplica(DraftReplica, Resource):
    """A server that a user has started with this project's extension; ``docs/engines.md`` has its routes."""

    def __init__(self, url: str, token: str, timeout_s: float = _ANSWER_S) -> None:
        """Ask the server at ``url`` (``http://host:port``) how many ranks it has.

        Raise ConfigError for another address or a token that no header can carry, EngineError where there is no
        server, or none with these routes.
        """
        self._url = server_address(url)
        check_draft_token(token)
        self._token, self._timeout_s = token, timeout_s
        self._lock = threading.Lock()
        """Guards the two below."""
        self._under_way: set[socket.socket] = set()
        self._closed = False
        self.num_ranks = self._exchange("status", "").ranks

    def acceptance(self, rounds: int = 0, wait_s: float = 0.0) -> AcceptanceCounters:
        """Return what the server has counted since the last commit or revert; waits for the answer.

        The server holds that back until it has counted ``rounds`` verifications, for ``wait_s`` at most.
        """
        if not rounds:
            return self._exchange("status", "").acceptance
        return self._exchange("status", "", f"?rounds={rounds}&wait_s={wait_s:g}", wait_s).acceptance

    def close(self) -> None:
        """End every call under way with EngineError, and each that follows; any thread may call it."""
        with self._lock:
            self._closed = True
            for connected in self._under_way:
                with suppress(OSError):
                    connected.shutdown(socket.SHUT_RDWR)

    def call(self, name: ReplicaCall, argument: UpdateOrder | UpdateId | None) -> Future[ServingStatus]:
        """Ask the server on a thread of the call's own."""
        status: Future[ServingStatus] = Future()

        def run() -> None:
            try:
                status.set_result(self._exchange(name, _body(argument)).status)
            except Exception as error:  # noqa: BLE001 (the caller gets every error, by the future)
                status.set_exception(error)

        threading.Thread(target=run, name=f"draft {name}", daemon=True).start()
        return status

    def _exchange(self, name: str, argument: str, query: str = "", held_s: float = 0.0) -> _Answer:
        """Send one request and return its answer, which the server may hold back for ``held_s``."""
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        connection = kinds[self._url.scheme](self._url.hostname or "", self._url.port, timeout=_CONNECT_S)
        where = f"{self._url.scheme}://{self._url.netloc}"
        path = f"{self._url.path.rstrip('/')}/spec/draft/{name}{query}"
        try:
            with self._connected(connection, held_s):
                method = "POST" if argument else "GET"
                connection.request(method, path, argument or None, {"Authorization": f"Bearer {self._token}"})
                response = connection.getresponse()
                body = response.read()
        except (OSError, http.client.HTTPException, UnicodeError) as error:  # UnicodeError: of a host's name
            raise EngineError(f"{where} does not answer {name}: {cause(error)}") from error
        finally:
            connection.close()
        if response.status == http.HTTPStatus.NOT_FOUND:
            raise EngineError(f"{where} has no /spec/draft/{name}; start it with this project's extension")
        fields = _json(body, where)
        if response.status != http.HTTPStatus.OK:
            raise EngineError(f"{where} refused {name}: {fields.get('error', response.reason)}")
        try:
            return _Answer.decode(json.dumps(fields))
        except ProtocolError as error:
            raise EngineError(f"{where} is no server with this project's extension: {error}") from error

    @contextmanager
    def _connected(self, connection: http.client.HTTPConnection, held_s: float) -> Generator[None]:
        """Connect; ``close`` ends what happens then."""
        connection.connect()
        connected = connection.sock
        connected.settimeout(self._timeout_s + held_s)
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("this side has closed")
            self._under_way.add(connected)
        try:
            yield
        finally:
            with self._lock:
                self._under_way.discard(connected)


def server_address(url: str) -> SplitResult:
    """Return the parts of ``http://host:port``, where a path may follow. Raise ConfigError for anything else."""
    with suppress(ValueError):  # of a port or of an IPv6 address
        parts = urlsplit(url)
        rest = parts.username or parts.password or parts.query or parts.fragment
        can_be_sent = url.isprintable() and " " not in url and parts.path.isascii()
        if (
            parts.scheme in ("http", "https")
            and parts.hostname
            and parts.port != 0
            and not rest
            and can_be_sent
        ):
            return parts
    raise ConfigError(f"{url!r} is no address of a server; expected http://host:port")


def _body(argument: UpdateOrder | UpdateId | None) -> str:
    return "" if argument is None else argument.model_dump_json()


def _json(body: bytes, where: str) -> Fields:
    try:
        fields = json.loads(body)
    except ValueError as error:
        raise EngineError(f"{where} answered {body[:80]!r}, expected JSON") from error
    if not isinstance(fields, dict):
        raise EngineError(f"{where} answered {body[:80]!r}, expected a JSON object")
    return cast("Fields", fields)
