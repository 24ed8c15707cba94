"""CaptureDesk: the engine's end of its conversation with the one worker process that holds the captured states.

An engine such as vLLM runs the target in worker processes that it starts itself. There, our code (a connector, a
hook) sees states and request numbers, nothing else. The desk tells the worker where the states of each request go;
the worker (``capture_outlet.py``) sends them there and reports what became of each. Tensors never pass the desk.

Records to the worker: ``welcome`` (the capture as a whole), ``expect`` (some requests). From it: ``hello`` (the
token), ``sent``, ``failed``, ``alive``.
"""

from __future__ import annotations

import hmac
import itertools
import secrets
import socket
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

from spec_core.errors import EngineError
from spec_core.resource import Resource
from spec_trainer.launch.control import ControlChannel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spec_core.engine import Site
    from spec_core.records import CaptureRequest, FeatureSchema
    from spec_trainer.launch.control import Record


class CaptureDesk(Resource):
    """One engine start: one schema, one worker. Any thread may call it."""

    def __init__(self, site: Site, schema: FeatureSchema, send_timeout_s: float) -> None:
        """``send_timeout_s``: longest wait of the worker for a trainer to connect to, or to have room."""
        self._welcome = {
            "backend": site.backend.config.model_dump(mode="json"),
            "placement": site.placement,
            "schema": asdict(schema),
            "send_timeout_s": send_timeout_s,
            "peer_s": site.peer_s,
        }
        self._peer_s = site.peer_s
        self._token = secrets.token_hex(16)
        self._name = f"spec-capture-{secrets.token_hex(8)}"
        self._keys = itertools.count()
        self._pending: dict[int, tuple[CaptureRequest, Future[None]]] = {}
        self._lock = threading.Lock()
        self._worker: ControlChannel | None = None
        self._heard_s = time.monotonic()
        self._failure: EngineError | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self._name}")  # abstract: leaves no file
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._serve, name="capture desk", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """What the worker's ``CaptureOutlet`` connects to; holds the token, so it is for that process only."""
        return f"{self._name}:{self._token}"

    @property
    def connected(self) -> bool:
        return self._worker is not None

    def expect(self, requests: Sequence[CaptureRequest]) -> list[tuple[int, Future[None]]]:
        """Announces requests to the worker. For each: the key under which the engine must run it, and a future that
        is done when its features were handed to their transport, or has the reason why not."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._worker is None:
                raise EngineError("the engine's worker has not connected to the capture desk")
            worker = self._worker
            expected = [(next(self._keys), request, Future[None]()) for request in requests]
            self._pending.update({key: (request, future) for key, request, future in expected})
        # The worker compares what it ran with the request: an engine that alters a prompt is found there. One record:
        # every read costs a thread of the worker a turn beside the engine's own.
        orders = [
            {"key": key, "sample_id": request.sample_id, "ids": request.input_ids, "to": request.destination}
            for key, request, _ in expected
        ]
        worker.send("expect", orders=orders)
        return [(key, future) for key, _, future in expected]

    def fail(self, key: int, error: BaseException) -> None:
        """The engine itself could not run a request."""
        with self._lock:
            _, future = self._pending.pop(key, (None, None))
        if future is not None:
            future.set_exception(error)

    def health(self) -> None:
        """Raises EngineError if the worker is gone or has been silent for too long."""
        if self._failure is not None:
            raise self._failure
        if self.connected and time.monotonic() - self._heard_s > self._peer_s:
            raise EngineError(f"the engine's worker has been silent for timeouts.peer_s={self._peer_s} s")

    def close(self) -> None:
        """Idempotent; what is pending ends with EngineError."""
        self._end(EngineError("the engine was closed"))
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._listener.close()
        if self._worker is not None:
            self._worker.close()
        self._thread.join()

    def _serve(self) -> None:
        """Until closed: strangers are turned away, the worker is heard until it ends."""
        while (channel := self._accept()) is not None:
            records = channel.records()
            hello = next(records, None)
            if hello is None or not hmac.compare_digest(str(hello.get("token")), self._token):
                channel.close()
                continue
            channel.send("welcome", **self._welcome)
            self._heard_s = time.monotonic()
            self._worker = channel
            for record in records:
                self._heard_s = time.monotonic()
                self._hear(record)
            self._end(EngineError("the engine's worker process has ended"))

    def _accept(self) -> ControlChannel | None:
        try:
            end, _ = self._listener.accept()
        except OSError:  # closed
            return None
        return ControlChannel(end, self._peer_s)

    def _hear(self, record: Record) -> None:
        if record["kind"] == "alive":
            return
        with self._lock:
            request, future = self._pending.pop(record["key"], (None, None))
        if future is None or request is None:
            return  # failed before, by the engine
        if record["kind"] == "sent":
            future.set_result(None)
        else:
            future.set_exception(
                EngineError(f"capture of sample {request.sample_id}: {record['error']}: {record['message']}")
            )

    def _end(self, error: EngineError) -> None:
        with self._lock:
            self._failure = self._failure or error
            pending, self._pending = self._pending, {}
        for _, future in pending.values():
            future.set_exception(self._failure)
