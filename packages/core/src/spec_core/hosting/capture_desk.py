"""CaptureDesk: the engine's end of its conversation with the one worker process that holds the captured states.

An engine such as vLLM runs the target in worker processes that it starts itself. There, our code (a connector, a
hook) sees states and request numbers, nothing else. The desk tells the worker where the states of each request go;
the worker (``capture_outlet.py``) sends them there and reports what became of each. Tensors never pass the desk.

Records to the worker: ``welcome`` (the capture as a whole), ``expect`` (some requests). From it: ``hello`` (the
token), ``sent``, ``failed``, ``alive``.
"""

from __future__ import annotations

import itertools
import secrets
import socket
import threading
import time
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from spec_core import local_socket
from spec_core.errors import EngineError, PeerLost, ProtocolError
from spec_core.foreign import parse_json_object
from spec_core.lobby import Lobby, same_token
from spec_core.processes.control import LENGTH, ControlChannel
from spec_core.resource import Resource

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from spec_core.engine import EngineContext
    from spec_core.processes.control import Record
    from spec_core.records import CaptureRequest, FeatureSchema


@dataclass(eq=False)
class _Batch:
    """Requests that were announced together."""

    left: int
    """Of which nothing has been heard yet."""
    done: Future[None] = field(default_factory=Future)
    error: BaseException | None = None
    """The first one."""

    def finish(self) -> None:
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(None)


class CaptureDesk(Resource):
    """One engine start: one schema, one worker. Any thread may call it."""

    def __init__(self, site: EngineContext, schema: FeatureSchema, send_timeout_s: float) -> None:
        """``send_timeout_s``: longest wait of the worker for a trainer to connect to, or to have room."""
        self._welcome = {
            "backend": site.backend.config.model_dump(mode="json"),
            "placement": site.placement,
            "schema": asdict(schema),
            "send_timeout_s": send_timeout_s,
            "peer_s": site.peer_s,
        }
        self._peer_s = site.peer_s
        self._stuck_s = 2 * send_timeout_s
        self._token = secrets.token_hex(16)
        self._keys = itertools.count()
        self._pending: dict[int, tuple[CaptureRequest, _Batch]] = {}
        self._lock = threading.Lock()
        self._worker: ControlChannel | None = None
        self._connected = threading.Event()
        self._heard_s = self._moved_s = time.monotonic()
        self._failure: EngineError | None = None
        listener, self._name = local_socket.listen("spec-capture", socket.SOCK_STREAM)
        self._lobby = Lobby(listener, LENGTH)
        self._thread = threading.Thread(target=self._serve, name="capture desk", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """What the worker's ``CaptureOutlet`` connects to; holds the token, so it is for that process only."""
        return f"{self._name}:{self._token}"

    def wait_connected(self, timeout_s: float) -> bool:
        return self._connected.wait(timeout_s)

    def expect(self, requests: Sequence[CaptureRequest]) -> tuple[list[int], Future[None]]:
        """Announces a batch to the worker: the keys under which the engine must run its requests, and a future. That
        is done when every request is through, its features handed to their transport, and has the first reason why
        one of them was not."""
        batch = _Batch(left=len(requests))
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._worker is None:
                raise EngineError("the engine's worker has not connected to the capture desk")
            worker = self._worker
            expected = {next(self._keys): request for request in requests}
            self._pending.update({key: (request, batch) for key, request in expected.items()})
            self._moved_s = time.monotonic()
        # The worker compares what it ran with the request: an engine that alters a prompt is found there. One record:
        # every read costs a thread of the worker a turn beside the engine's own.
        orders = [
            {
                "key": key,
                "request_id": request.request_id,
                "ids": request.input_ids,
                "to": request.destinations,
            }
            for key, request in expected.items()
        ]
        worker.send("expect", orders=orders)
        return list(expected), batch.done

    def fail(self, keys: Iterable[int], error: BaseException) -> None:
        """The engine itself could not run these requests."""
        for key in keys:
            self._settle(key, error)

    def drain(self) -> None:
        """Until nothing is pending."""
        with self._lock:
            batches = [batch.done for _, batch in self._pending.values()]
        wait(batches)

    def health(self) -> None:
        """Raises EngineError if the worker is gone or has been silent for too long, or nothing has come of what is
        pending for longer than any send may take."""
        if self._failure is not None:
            raise self._failure
        now = time.monotonic()
        if self._connected.is_set() and now - self._heard_s > self._peer_s:
            raise EngineError(f"the engine's worker has been silent for timeouts.peer_s={self._peer_s} s")
        if self._pending and now - self._moved_s > self._stuck_s:
            raise EngineError(
                "the engine has captured nothing for twice engine.send_timeout_s: it does not call our hook"
            )

    def close(self) -> None:
        """Idempotent; what is pending ends with EngineError."""
        self._end(EngineError("the engine was closed"))
        self._lobby.close()
        if self._worker is not None:
            self._worker.close()
        self._thread.join()

    def _serve(self) -> None:
        """Until closed: strangers are turned away, the worker is heard until it ends."""
        for connection, hello in self._lobby.first_records():
            channel = ControlChannel(connection, self._peer_s)
            if not self._knows(hello):
                channel.close()
                continue
            with suppress(PeerLost):  # the end of its records says so too
                channel.send("welcome", **self._welcome)
            self._heard_s = time.monotonic()
            self._worker = channel
            self._connected.set()
            for record in channel.records():
                self._heard_s = time.monotonic()
                self._hear(record)
            self._end(EngineError("the engine's worker process has ended"))

    def _knows(self, hello: bytes) -> bool:
        try:
            claimed = parse_json_object(hello, "the first record", ProtocolError).get("token")
        except ProtocolError:
            return False
        return same_token(claimed, self._token)

    def _hear(self, record: Record) -> None:
        if record["kind"] == "alive":
            return
        request, _ = self._pending.get(record["key"], (None, None))
        if request is None:
            return  # failed before, by the engine
        error = None
        if record["kind"] == "failed":
            error = EngineError(
                f"capture of sample {request.request_id}: {record['error']}: {record['message']}"
            )
        self._settle(record["key"], error)

    def _settle(self, key: int, error: BaseException | None) -> None:
        with self._lock:
            _, batch = self._pending.pop(key, (None, None))
            if batch is None:
                return
            batch.left -= 1
            batch.error = batch.error or error
            last = batch.left == 0
            self._moved_s = time.monotonic()
        if last:
            batch.finish()

    def _end(self, error: EngineError) -> None:
        with self._lock:
            self._failure = self._failure or error
            batches = dict.fromkeys(batch for _, batch in self._pending.values())
            self._pending = {}
        for batch in batches:
            batch.error = batch.error or self._failure
            batch.finish()
