"""CaptureController is the engine's side of the connection to the worker that captures states.

An engine such as vLLM runs the target in worker processes that it starts. There, a hook of the engine's plugin
hands the states of each request to a FeatureExporter. A request carries its id and short names of its
destinations through the engine. Token ids and states never pass the controller.

The controller sends ``configuration`` once, and ``destination`` before the first request that names a destination.
The exporter sends ``token`` once, then ``sent`` or ``failed`` for each request, and ``alive`` regularly.
"""

from __future__ import annotations

import secrets
import threading
import time
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from spec_core.errors import EngineError, PeerLost, ProtocolError
from spec_core.foreign import parse_json_object
from spec_core.resource import Resource
from spec_processes import ControlChannel
from spec_processes.sockets import local_socket
from spec_processes.sockets.peer_admission import AcceptLimiter, same_token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from spec_core import EngineContext
    from spec_core.records import CaptureRequest, FeatureSchema
    from spec_kit.hosting.modes import Fields

CAPTURE_VARIABLE = "SPEC_TRAINER_CAPTURE"
"""Environment variable with the controller's address and token. Engines write their arguments into logs, but not
their environment."""


@dataclass(eq=False)
class _Batch:
    """Requests that were registered together."""

    num_left: int
    """Number of requests that are neither sent nor failed."""
    done: Future[None]
    error: BaseException | None = None
    """The first reason why a request failed."""

    def finish(self) -> None:
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(None)


class CaptureController(Resource):
    """Tracks the captures of one program, with one schema and one exporter. Any thread may call it."""

    def __init__(
        self,
        context: EngineContext,
        schema: FeatureSchema,
        send_timeout_s: float,
        death: Callable[[], EngineError | None] = lambda: None,
    ) -> None:
        """Listen for the exporter.

        ``send_timeout_s``: the longest time for which the exporter waits to connect to a trainer, or for free
        memory there. ``death`` is called when the exporter is gone, and returns why the program has ended.
        """
        self._configuration = {
            "backend": context.backend.config.model_dump(mode="json") | {"name": context.backend.name},
            "placement": context.placement,
            "schema": asdict(schema),
            "send_timeout_s": send_timeout_s,
            "peer_s": context.peer_s,
        }
        self._peer_s = context.peer_s
        self._stuck_s = 2 * send_timeout_s
        self._death = death
        self._token = secrets.token_hex(16)
        self._pending: dict[int, _Batch] = {}
        self._destinations: dict[str, str] = {}
        self._lock = threading.Lock()
        self._exporter: ControlChannel | None = None
        self._connected = threading.Event()
        self._received_s = self._moved_s = time.monotonic()
        self._failure: EngineError | None = None
        listener, self._name = local_socket.listen("spec-capture")
        self._limiter = AcceptLimiter(listener)
        self._thread = threading.Thread(target=self._serve, name="capture controller", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Address for ``FeatureExporter``; it contains a secret token for the exporter's process only."""
        return f"{self._name}:{self._token}"

    def wait_connected(self, timeout_s: float) -> bool:
        """Return whether the exporter connects within ``timeout_s``."""
        return self._connected.wait(timeout_s)

    def register(self, requests: Sequence[CaptureRequest], done: Future[None]) -> list[CaptureRequest]:
        """Register requests; return them for the program, with short names in place of their destinations.

        ``done`` completes when the features of every request were handed to the transport, or fails with the first
        error of a request.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._exporter is None:
                raise EngineError("the engine's worker has not connected to the capture controller")
            if taken := [r.request_id for r in requests if r.request_id in self._pending]:
                raise EngineError(
                    f"request {taken[0]} is being captured already; give each request its own id"
                )
            for address in dict.fromkeys(address for request in requests for address in request.destinations):
                if address not in self._destinations:
                    name = str(len(self._destinations))
                    self._exporter.send("destination", name=name, address=address)
                    self._destinations[address] = name
            batch = _Batch(len(requests), done)
            self._pending |= {request.request_id: batch for request in requests}
            self._moved_s = time.monotonic()
        if not requests:
            batch.finish()
        return [
            replace(request, destinations=tuple(self._destinations[to] for to in request.destinations))
            for request in requests
        ]

    def fail(self, request_ids: Iterable[int], error: BaseException) -> None:
        """Mark requests as failed, because the program could not run them."""
        for request_id in request_ids:
            self._settle(request_id, error)

    def drain(self) -> None:
        """Wait until no request is pending."""
        with self._lock:
            batches = [batch.done for batch in self._pending.values()]
        wait(batches)

    def health(self) -> None:
        """Raise EngineError if the exporter is gone or silent, or if pending requests do not finish."""
        if self._failure is not None:
            raise self._failure
        now = time.monotonic()
        if self._connected.is_set() and now - self._received_s > self._peer_s:
            raise EngineError(f"the engine's worker has been silent for timeouts.peer_s={self._peer_s} s")
        if self._pending and now - self._moved_s > self._stuck_s:
            raise EngineError(
                "the engine has captured nothing for twice engine.send_timeout_s: it does not call our hook"
            )

    def close(self) -> None:
        """Close the connection; pending requests fail with EngineError. Idempotent."""
        self._end(EngineError("the engine was closed"))
        self._limiter.close()
        if self._exporter is not None:
            self._exporter.close()
        self._thread.join()

    def _serve(self) -> None:
        """Accept the exporter, which has the token, and read its messages until its connection ends."""
        for connection, first in self._limiter.first_packets():
            channel = ControlChannel(connection, self._peer_s)
            if not self._has_token(first):
                channel.close()
                continue
            with suppress(PeerLost):  # then its messages end below
                channel.send("configuration", **self._configuration)
            self._received_s = time.monotonic()
            self._exporter = channel
            self._connected.set()
            for message in channel.messages():
                self._received_s = time.monotonic()
                if message["kind"] != "alive":
                    self._finish(message)
            if self._failure is None:
                self._end(self._death() or EngineError("the engine's worker process has ended"))

    def _has_token(self, first: bytes) -> bool:
        try:
            claimed = parse_json_object(first, "the first record", ProtocolError).get("token")
        except ProtocolError:
            return False
        return same_token(claimed, self._token)

    def _finish(self, message: Fields) -> None:
        request_id = message["request_id"]
        error = None
        if message["kind"] == "failed":
            error = EngineError(f"capture of request {request_id}: {message['error']}: {message['message']}")
        self._settle(request_id, error)

    def _settle(self, request_id: int, error: BaseException | None) -> None:
        with self._lock:
            if (batch := self._pending.pop(request_id, None)) is None:
                return
            batch.num_left -= 1
            batch.error = batch.error or error
            last = batch.num_left == 0
            self._moved_s = time.monotonic()
        if last:
            batch.finish()

    def _end(self, error: EngineError) -> None:
        with self._lock:
            self._failure = self._failure or error
            batches = dict.fromkeys(self._pending.values())
            self._pending = {}
        for batch in batches:
            batch.error = batch.error or self._failure
            batch.finish()
