"""FeatureExporter sends captured states from the engine's worker process to the trainers.

``capture_controller`` is the other side, in the engine's process. Code that the engine calls (a connector, a hook)
hands the states of each request to ``export``. A thread of the exporter sends them, so the engine is not blocked.

Shapes: T tokens, N captured layers, H hidden size.
"""

from __future__ import annotations

import logging
import queue
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_core import Backend, plugins
from spec_core.errors import PeerLost, ProtocolError, SpecError, first_line
from spec_core.records import FeatureSample, FeatureSchema
from spec_core.resource import Resource
from spec_core.validation import validate
from spec_processes import ControlChannel
from spec_processes.sockets import local_socket
from spec_processes.sockets.framed_socket import peer_errors

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import torch
    from torch import Tensor

    from spec_core import FeatureSender

log = logging.getLogger(__name__)

_CONNECT_S = 60.0
"""Longest time in seconds to wait for the controller, which listens before the engine's program starts."""


@dataclass(frozen=True)
class _Export:
    request_id: int
    destinations: Sequence[str]
    token_ids: Sequence[int] | Tensor
    hidden_TNH: Tensor
    ready: torch.Event | None
    """Event after the computation of the states; None on a device without streams."""


class FeatureExporter(Resource):
    """Sends states to trainers. Only the first worker of a tensor-parallel group has an exporter."""

    def __init__(self, address: str, timeout_s: float = _CONNECT_S) -> None:
        """Connect to the controller at ``address``, the value of the variable ``CAPTURE_VARIABLE``.

        Raise PeerLost if no controller listens there, DeadlineExceeded if it does not answer.
        """
        name, _, token = address.partition(":")
        with peer_errors(
            "the capture controller does not answer", f"no capture controller listens at {name}"
        ):
            self._channel = ControlChannel(local_socket.connect(name, timeout_s), timeout_s)
        self._channel.send("token", token=token)
        self._messages = self._channel.messages()
        configuration = next(self._messages, None)
        if configuration is None:
            self._channel.close()
            raise ProtocolError("the capture controller refused this worker's token")
        self._channel.keep_alive(configuration["peer_s"])  # importing the backend may take long
        schema = configuration["schema"]
        self.schema = FeatureSchema(**schema | {"layers": tuple(schema["layers"])})
        """Schema of the states that are captured for each token."""
        self._send_timeout_s: float = configuration["send_timeout_s"]
        backend_type = plugins.load(Backend, configuration["backend"]["name"])
        backend = backend_type(
            validate(backend_type.Config, configuration["backend"], "backend of the engine")
        )
        self._transport = backend.transport(configuration["placement"])
        self._stream: torch.Stream | None = None
        self._addresses: dict[str, str] = {}
        self._senders: dict[str, FeatureSender] = {}
        self._exports: queue.SimpleQueue[_Export | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._send_all, name="feature exporter", daemon=True)
        self._thread.start()

    def export(
        self,
        request_id: int,
        destinations: Sequence[str],
        token_ids: Sequence[int] | Tensor,
        hidden_TNH: Tensor,
    ) -> None:
        """Queue the states of a request and return at once; ``hidden_TNH`` must not be overwritten later.

        ``request_id`` and ``destinations``: fields of the request. ``token_ids``: the tokens that the engine ran,
        which the trainer compares with its data. If they are a tensor, the calling thread does not read it.
        """
        import torch

        ready = None
        if not hidden_TNH.is_cpu:
            ready = torch.Event(hidden_TNH.device)
            ready.record()
        self._exports.put(_Export(request_id, destinations, token_ids, hidden_TNH, ready))

    def fail(self, request_id: int, error: BaseException) -> None:
        """Report a request as failed because its states could not be captured."""
        self._channel.send(
            "failed", request_id=request_id, error=type(error).__name__, message=first_line(error)
        )

    def close(self) -> None:
        """Send all exported states, then close the connections. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._exports.put(None)
        self._thread.join()
        self._channel.close()
        for sender in self._senders.values():
            sender.close()

    def _send_all(self) -> None:
        with suppress(PeerLost):  # the engine is gone, so nobody waits for an answer
            while (export := self._exports.get()) is not None:
                try:
                    with self._ordered_after(export):
                        self._send(export)
                except (SpecError, RuntimeError) as error:  # RuntimeError: torch's, such as out of memory
                    log.exception("features of request %d were not sent", export.request_id)
                    self.fail(export.request_id, error)
                else:
                    self._channel.send("sent", request_id=export.request_id)

    @contextmanager
    def _ordered_after(self, export: _Export) -> Generator[None]:
        """Run the block on a stream that waits for the states; the engine's stream waits for no copy."""
        import torch

        if export.ready is None:
            yield
            return
        device = export.hidden_TNH.device
        if self._stream is None:
            torch.accelerator.set_device_index(device)  # current devices are per thread
            self._stream = torch.Stream(device)
        with self._stream:
            self._stream.wait_event(export.ready)
            yield
            # The allocator must not give the memory to the engine's stream before this stream has read it.
            for tensor in (export.hidden_TNH, export.token_ids):
                if isinstance(tensor, torch.Tensor) and not tensor.is_cpu:
                    tensor.record_stream(self._stream)

    def _send(self, export: _Export) -> None:
        import torch

        from spec_kit.layers import encode_features

        hidden_TNH = encode_features(export.hidden_TNH, self.schema)
        sample = FeatureSample(
            request_id=export.request_id,
            input_ids=torch.as_tensor(export.token_ids, dtype=torch.int64, device=hidden_TNH.device),
            hidden_TNH=hidden_TNH,
        )
        # The ticket is not awaited: nobody overwrites these states, and the transport keeps them while it needs them.
        for destination in export.destinations:
            self._sender(destination).send(sample, self._send_timeout_s)

    def _sender(self, destination: str) -> FeatureSender:
        # The controller has sent the address before the request, so it is here or on its way.
        while destination not in self._addresses:
            if (message := next(self._messages, None)) is None:
                raise PeerLost("the capture controller is gone")
            self._addresses[message["name"]] = message["address"]
        if destination not in self._senders:
            self._senders[destination] = self._transport.connect(
                self._addresses[destination], self.schema.sent, self._send_timeout_s
            )
        return self._senders[destination]
