"""Replicas of engines whose program has processes of its own: one that a run started, one that a user started.

Both hand calls on and do nothing else; the program's own worker processes connect to the publisher.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import SplitResult, urlsplit

from spec_core.draft_replica import DraftReplica, ServingStatus
from spec_core.errors import ConfigError, EngineError
from spec_core.foreign import cause
from spec_core.records import AcceptanceCounters

if TYPE_CHECKING:
    from collections.abc import Callable

    from spec_core.draft_replica import UpdateId, UpdateOrder
    from spec_core.hosting.modes import Fields

_ANSWER_S = 60.0
"""Longest wait for an answer of a server: a call waits for the step that the engine is in."""


class ProgramReplica(DraftReplica):
    """The program of an engine of this run, whose process takes requests of kind ``draft``."""

    def __init__(self, ask: Callable[[str, str], Future[Fields]], num_ranks: int) -> None:
        """Send calls by ``ask``, with their argument as JSON."""
        self.num_ranks = num_ranks
        self._ask = ask

    def prepare(self, order: UpdateOrder) -> Future[ServingStatus]:
        """Begin to receive an update (U2)."""
        return self._call("prepare", order.model_dump_json())

    def commit(self, update: UpdateId) -> Future[ServingStatus]:
        """Serve what was received (U3)."""
        return self._call("commit", update.model_dump_json())

    def abort(self, update: UpdateId) -> Future[ServingStatus]:
        """Forget an update that is not committed (U5)."""
        return self._call("abort", update.model_dump_json())

    def revert(self, update: UpdateId) -> Future[ServingStatus]:
        """Undo the last commit (U5)."""
        return self._call("revert", update.model_dump_json())

    def status(self) -> Future[ServingStatus]:
        """Return what is served."""
        return self._call("status", "")

    def _call(self, name: str, argument: str) -> Future[ServingStatus]:
        status: Future[ServingStatus] = Future()

        def answered(future: Future[Fields]) -> None:
            if (error := future.exception()) is not None:
                status.set_exception(error)
            else:
                status.set_result(_status(future.result()["status"]))

        self._ask(name, argument).add_done_callback(answered)
        return status


class HttpReplica(DraftReplica):
    """A server that a user has started with this project's extension; ``docs/weight-sync.md`` has its routes."""

    def __init__(self, url: str, token: str, timeout_s: float = _ANSWER_S) -> None:
        """Ask the server at ``url`` (``http://host:port``) how many ranks it has.

        Raise ConfigError for another address, EngineError where there is no server, or none with these routes.
        """
        self._url = _server(url)
        self._token, self._timeout_s = token, timeout_s
        self.num_ranks: int = self._exchange("status", "")["ranks"]

    def prepare(self, order: UpdateOrder) -> Future[ServingStatus]:
        """Begin to receive an update (U2)."""
        return self._call("prepare", order.model_dump_json())

    def commit(self, update: UpdateId) -> Future[ServingStatus]:
        """Serve what was received (U3)."""
        return self._call("commit", update.model_dump_json())

    def abort(self, update: UpdateId) -> Future[ServingStatus]:
        """Forget an update that is not committed (U5)."""
        return self._call("abort", update.model_dump_json())

    def revert(self, update: UpdateId) -> Future[ServingStatus]:
        """Undo the last commit (U5)."""
        return self._call("revert", update.model_dump_json())

    def status(self) -> Future[ServingStatus]:
        """Return what is served."""
        return self._call("status", "")

    def acceptance(self) -> AcceptanceCounters:
        """Return what the server has counted since the last commit or revert; waits for the answer."""
        counted = self._exchange("status", "")["acceptance"]
        return AcceptanceCounters(
            **counted | {"accepted_per_position": tuple(counted["accepted_per_position"])}
        )

    def _call(self, name: str, argument: str) -> Future[ServingStatus]:
        status: Future[ServingStatus] = Future()

        def run() -> None:
            try:
                status.set_result(_status(self._exchange(name, argument)["status"]))
            except Exception as error:  # noqa: BLE001 (the caller gets every error, by the future)
                status.set_exception(error)

        threading.Thread(target=run, name=f"draft {name}", daemon=True).start()
        return status

    def _exchange(self, name: str, argument: str) -> Fields:
        """Send one request and return the fields of its answer."""
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        connection = kinds[self._url.scheme](
            self._url.hostname or "", self._url.port, timeout=self._timeout_s
        )
        where = f"{self._url.scheme}://{self._url.netloc}"
        try:
            path = f"{self._url.path.rstrip('/')}/spec/draft/{name}"
            method = "POST" if argument else "GET"
            connection.request(method, path, argument or None, {"Authorization": f"Bearer {self._token}"})
            response = connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"{where} does not answer {name}: {cause(error)}") from error
        finally:
            connection.close()
        if response.status == http.HTTPStatus.NOT_FOUND:
            raise EngineError(f"{where} has no /spec/draft/{name}; start it with this project's extension")
        fields = _json(body, where)
        if response.status != http.HTTPStatus.OK:
            raise EngineError(f"{where} refused {name}: {fields.get('error', response.reason)}")
        return fields


def _server(url: str) -> SplitResult:
    """Return the parts of a server's address. Raise ConfigError for another one."""
    with contextlib.suppress(ValueError):  # for brackets or a port that are none
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    raise ConfigError(f"{url!r} is no address of a server; expected http://host:port")


def _status(fields: Any) -> ServingStatus:
    return ServingStatus.decode(json.dumps(fields))


def _json(body: bytes, where: str) -> Fields:
    try:
        fields = json.loads(body)
    except ValueError as error:
        raise EngineError(f"{where} answered {body[:80]!r}, expected JSON") from error
    if not isinstance(fields, dict):
        raise EngineError(f"{where} answered {body[:80]!r}, expected a JSON object")
    return cast("Fields", fields)
