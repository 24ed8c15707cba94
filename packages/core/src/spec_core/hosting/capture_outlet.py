"""CaptureOutlet: sends captured states to the trainers, from the engine's worker process where they are.

The counterpart of ``capture_desk.py``. Whatever an engine calls us from (a connector, a hook) hands the states of a
finished request to ``deliver``; a thread of the outlet's own sends them, so the engine computes on.

Shapes: T tokens, N captured layers, H hidden size.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from spec_core import Backend, local_socket, plugins
from spec_core.config import first_line, validate
from spec_core.errors import DeadlineExceeded, EngineError, PeerLost, ProtocolError, SpecError
from spec_core.processes.control import ControlChannel
from spec_core.records import FeatureSample, FeatureSchema
from spec_core.resource import Resource

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from torch import Tensor

    from spec_core.processes.control import Record
    from spec_core.transport import FeatureSender

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Delivery:
    key: int
    token_ids: Sequence[int]
    hidden_TNH: Tensor
    ready: torch.Event | None
    """Recorded where the states were computed; None on a device without streams."""


class CaptureOutlet(Resource):
    """One per engine worker that holds the states (of a tensor-parallel group, one)."""

    def __init__(self, address: str, timeout_s: float) -> None:
        """Raises PeerLost where no desk listens at ``address``, DeadlineExceeded where it does not answer."""
        name, _, token = address.partition(":")
        self._channel = _connect(name, timeout_s)
        self._channel.send("hello", token=token)
        self._records = self._channel.records()
        welcome = next(self._records, None)
        if welcome is None:
            self._channel.close()
            raise ProtocolError("the capture desk refused this worker's token")
        self.schema = FeatureSchema(**welcome["schema"] | {"layers": tuple(welcome["schema"]["layers"])})
        self._send_timeout_s: float = welcome["send_timeout_s"]
        backend_type = plugins.load(Backend, welcome["backend"]["name"])
        backend = backend_type(validate(backend_type.Config, welcome["backend"], "backend of the engine"))
        self._transport = backend.transport(welcome["placement"])
        self._stream: torch.Stream | None = None
        self._senders: dict[str, FeatureSender] = {}
        self._expected: dict[int, Record] = {}
        self._arrived = threading.Condition()
        self._deliveries: queue.SimpleQueue[_Delivery | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        threading.Thread(target=self._listen, name="capture orders", daemon=True).start()
        self._channel.keep_alive(welcome["peer_s"])
        self._sending = threading.Thread(target=self._send_all, name="capture sender", daemon=True)
        self._sending.start()

    def deliver(self, key: int, token_ids: Sequence[int], hidden_TNH: Tensor) -> None:
        """Takes the states of request ``key`` over and returns at once: ``hidden_TNH`` must not be written to again.

        ``token_ids`` are those that the engine ran; they must be the request's.
        """
        ready = None
        if not hidden_TNH.is_cpu:
            ready = torch.Event(hidden_TNH.device)
            ready.record()
        self._deliveries.put(_Delivery(key, token_ids, hidden_TNH, ready))

    def fail(self, key: int, error: BaseException) -> None:
        """The states of request ``key`` could not be had."""
        self._channel.send("failed", key=key, error=type(error).__name__, message=first_line(error))

    def close(self) -> None:
        """What was delivered is sent first."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._deliveries.put(None)
        self._sending.join()
        self._channel.close()
        for sender in self._senders.values():
            sender.close()

    def _listen(self) -> None:
        for record in self._records:
            with self._arrived:
                self._expected.update({order["key"]: order for order in record["orders"]})
                self._arrived.notify_all()

    def _send_all(self) -> None:
        with suppress(PeerLost):  # the engine is gone: so is everybody who would want to know
            while (delivery := self._deliveries.get()) is not None:
                try:
                    with self._ordered_after(delivery):
                        self._send(delivery)
                except (SpecError, RuntimeError) as error:  # RuntimeError: torch's, out of memory for one
                    log.exception("features of request %d were not sent", delivery.key)
                    self.fail(delivery.key, error)
                else:
                    self._channel.send("sent", key=delivery.key)

    @contextmanager
    def _ordered_after(self, delivery: _Delivery) -> Generator[None]:
        """A stream of the outlet's own, which waits for the states; the engine's stream never waits for a copy."""
        if delivery.ready is None:
            yield
            return
        device = delivery.hidden_TNH.device
        if self._stream is None:
            torch.accelerator.set_device_index(device)  # current devices are per thread
            self._stream = torch.Stream(device)
        with self._stream:
            self._stream.wait_event(delivery.ready)
            yield
            # The allocator may give the memory to the engine's stream again: not before this one is through.
            delivery.hidden_TNH.record_stream(self._stream)

    def _send(self, delivery: _Delivery) -> None:
        order = self._order(delivery.key)
        if list(delivery.token_ids) != order["ids"]:
            raise EngineError("the engine ran other tokens than it was asked to")
        hidden_TNH = delivery.hidden_TNH
        sample = FeatureSample(
            request_id=order["request_id"],
            input_ids=torch.tensor(order["ids"], dtype=torch.int64, device=hidden_TNH.device),
            hidden_TNH=hidden_TNH,
        )
        # The ticket is not awaited: nobody writes to these states again, and the transport holds them while it must.
        for destination in order["to"]:
            self._sender(destination).send(sample, self._send_timeout_s)

    def _order(self, key: int) -> Record:
        """What the desk said of ``key``; it did so before the engine got the request, so it is here or on its way."""
        deadline = time.monotonic() + self._send_timeout_s
        with self._arrived:
            if not self._arrived.wait_for(lambda: key in self._expected, deadline - time.monotonic()):
                raise DeadlineExceeded(f"request {key} was never announced")
            return self._expected.pop(key)

    def _sender(self, destination: str) -> FeatureSender:
        if destination not in self._senders:
            self._senders[destination] = self._transport.connect(
                destination, self.schema, self._send_timeout_s
            )
        return self._senders[destination]


def _connect(name: str, timeout_s: float) -> ControlChannel:
    try:
        end = local_socket.connect(name, socket.SOCK_STREAM, timeout_s)
    except TimeoutError as error:
        raise DeadlineExceeded(f"the capture desk is not heard: {error}") from error
    except OSError as error:
        raise PeerLost(f"no capture desk listens at {name}: {error}") from error
    return ControlChannel(end, timeout_s)
