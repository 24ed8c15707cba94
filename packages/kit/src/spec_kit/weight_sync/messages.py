"""Define the messages of one update between publisher and rank, and the connection that carries them.

::

    rank                                             publisher
    Greeting: token, location per transport    ->
                                               <-    Offer: manifest, transport, bucket size
    Endpoint: address of the receiver          ->
                                               <-    Endpoint: address of the sender
    ...  the transport moves the tensors  ...
    Loaded: the spare copy holds the update    ->
    ...  when all replicas have received or failed, the engine is asked to commit  ...
                                               <-    Confirm
    Loaded: seconds of the commit              ->

Either side may send UpdateFailed instead, or close the connection.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from typing import Annotated, Literal, TypeVar

import pydantic

from spec_core import Manifest, UpdateId
from spec_core.errors import EngineError
from spec_core.foreign import cause
from spec_core.wire_record import WireRecord
from spec_core.wording import one_line
from spec_processes.sockets.addresses import parse_address
from spec_processes.sockets.framed_socket import FramedSocket, peer_errors

MAX_PACKET_BYTES = 16 << 20
"""Largest message in bytes; enough for a manifest of some 80,000 tensors."""
_LOOK_S = 0.5
"""Seconds between two checks whether the peer is still connected."""
_CONNECT_S = 10.0
"""Longest wait for a connection, in seconds. No other thread can interrupt this wait."""

_Seconds = Annotated[float, pydantic.Field(ge=0, le=1e6)]


class Greeting(WireRecord):
    """The first message on a connection, from the rank to the publisher."""

    kind: Literal["greeting"] = "greeting"
    token: Annotated[str, pydantic.Field(repr=False)]
    update: UpdateId
    replica: str
    rank: int
    locations: Mapping[str, str]
    """Name of a weight transport -> location of this rank, from ``WeightTransport.location``."""
    unusable: Mapping[str, str] = {}
    """Name of a weight transport whose ``location`` failed -> the error message."""


class Offer(WireRecord):
    """The manifest of an update that the rank should receive, the transport, and the bucket size."""

    kind: Literal["offer"] = "offer"
    manifest: Manifest
    transport: str
    bucket_bytes: Annotated[int, pydantic.Field(ge=4096)]
    """Bucket size of the sender. Both sides compute from it which bytes of a tensor are in which bucket."""


class Endpoint(WireRecord):
    """Address of one side of the transport: of the rank's receiver or of the publisher's sender."""

    kind: Literal["endpoint"] = "endpoint"
    address: str


class Loaded(WireRecord):
    """A rank has received the whole update, or has committed it."""

    kind: Literal["loaded"] = "loaded"
    seconds: Annotated[
        Mapping[str, Annotated[float, pydantic.Field(ge=0, le=1e6)]], pydantic.Field(max_length=16)
    ] = {}
    """Phase (``receive``, ``swap``) -> seconds that this rank spent on it since its previous message."""


class Confirm(WireRecord):
    """The update was committed; the rank should answer with the seconds that its commit took."""

    kind: Literal["confirm"] = "confirm"


class UpdateFailed(WireRecord):
    """The update has failed at the sender of this message."""

    kind: Literal["failed"] = "failed"
    reason: Annotated[str, pydantic.AfterValidator(one_line)]
    version_taken: bool = False
    """Whether another draft was committed under this version. A higher version can then be pushed."""


class VersionTaken(EngineError):
    """A rank has committed another draft under the version of an update."""


M = TypeVar("M", Greeting, Offer, Endpoint, Loaded, Confirm)


class UpdateChannel(FramedSocket):
    """A connection between one rank and the publisher."""

    def __init__(self, end: socket.socket, peer: str) -> None:
        """Take ownership of the socket ``end``. ``peer``: name of the other side in error messages."""
        super().__init__(end, MAX_PACKET_BYTES)
        self._peer = peer

    @classmethod
    def connect(cls, address: str, deadline: float) -> UpdateChannel:
        """Return a connection to the publisher at ``address``.

        Raise PeerLost if nothing listens there, DeadlineExceeded if nothing answers in time.
        """
        peer = f"the publisher at {address}"
        with _errors_of(peer):
            left_s = max(1e-3, min(_CONNECT_S, deadline - time.monotonic()))
            end = socket.create_connection(parse_address(address), left_s)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return cls(end, peer)

    def post(self, message: WireRecord, deadline: float) -> None:
        """Send a message."""
        with _errors_of(self._peer):
            self.send(message.encode(), deadline)

    def expect(self, kind: type[M], deadline: float) -> M:
        """Return the next message, which must be of type ``kind``.

        If the other side has sent UpdateFailed instead, raise VersionTaken if its ``version_taken`` is set, else
        EngineError.
        """
        with _errors_of(self._peer):
            packet = self.receive(deadline)
        if b'"kind":"failed"' in packet[:32]:
            failed = UpdateFailed.decode(packet)
            error = VersionTaken if failed.version_taken else EngineError
            raise error(f"{self._peer}: {failed.reason}")
        return kind.decode(packet)

    @contextlib.contextmanager
    def watched(self, ended: Callable[[], None]) -> Generator[None]:
        """Call ``ended``, on another thread, if the peer disconnects during the block.

        The peer must send nothing during the block.
        """
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_LOOK_S):
                if self._has_ended():
                    ended()
                    return

        watcher = threading.Thread(target=watch, name=f"watch of {self._peer}", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()

    def fail(self, error: Exception) -> None:
        """Send the error that ended the update, if the peer is still connected."""
        failed = UpdateFailed(reason=cause(error), version_taken=isinstance(error, VersionTaken))
        with contextlib.suppress(OSError):
            self.send(failed.encode(), time.monotonic() + 1.0)

    def _has_ended(self) -> bool:
        try:
            return not self.end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


def _errors_of(peer: str) -> AbstractContextManager[None]:
    return peer_errors(f"{peer} did not answer in time", f"{peer} has gone")
