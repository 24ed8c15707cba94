"""The messages of one update between the publisher and a rank, and a connection that carries them.

::

    rank                                             publisher
    Greeting: token, place for each transport  ->
                                               <-    Offer: manifest, transport, size of buckets
    Endpoint: address of the rank's end        ->
                                               <-    Endpoint: address of the sender's end
    ...  the transport moves the tensors  ...
    Loaded: the spare copy holds the update    ->
    ...  all replicas; commit goes to the engine  ...
                                               <-    Confirm
    Loaded: the times of the commit            ->

Either end may send UpdateFailed instead, or close the connection.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import pydantic

from spec_core.draft_replica import UpdateId
from spec_core.errors import EngineError
from spec_core.foreign import cause
from spec_core.weight_manifest import Manifest
from spec_core.wire_record import WireRecord
from spec_core.wording import one_line
from spec_processes.sockets.addresses import parse_address
from spec_processes.sockets.framed_socket import FramedSocket, peer_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager

MAX_PACKET_BYTES = 16 << 20
"""Largest message: a manifest of some 80,000 tensors."""
_LOOK_S = 0.5
"""Between two looks at whether the other end is still there."""
_CONNECT_S = 10.0
"""Longest wait for a connection, which cannot be ended from another thread."""

_Seconds = Annotated[float, pydantic.Field(ge=0, le=1e6)]


class Greeting(WireRecord):
    """The first message of a rank's connection."""

    kind: Literal["greeting"] = "greeting"
    token: Annotated[str, pydantic.Field(repr=False)]
    update: UpdateId
    replica: str
    rank: int
    places: Mapping[str, str]
    """Name of a weight transport -> where this rank is (``WeightTransport.place``)."""
    unplaced: Mapping[str, str] = {}
    """Name of a weight transport that raised in place of that -> its error."""


class Offer(WireRecord):
    """The update that is to be received, and how."""

    kind: Literal["offer"] = "offer"
    manifest: Manifest
    transport: str
    bucket_bytes: Annotated[int, pydantic.Field(ge=4096)]
    """The sender's; both ends lay the tensors out by it."""


class Endpoint(WireRecord):
    """Address of one end of the transport."""

    kind: Literal["endpoint"] = "endpoint"
    address: str


class Loaded(WireRecord):
    """A rank holds the whole update, or has committed it."""

    kind: Literal["loaded"] = "loaded"
    seconds: Annotated[
        Mapping[str, Annotated[float, pydantic.Field(ge=0, le=1e6)]], pydantic.Field(max_length=16)
    ] = {}
    """Time that this rank has taken for each of its parts since the message before."""


class Confirm(WireRecord):
    """The update was committed: how long did that take?"""

    kind: Literal["confirm"] = "confirm"


class UpdateFailed(WireRecord):
    """The end of an update that cannot go on."""

    kind: Literal["failed"] = "failed"
    reason: Annotated[str, pydantic.AfterValidator(one_line)]
    version_taken: bool = False
    """Whether another draft has the version, so that the update can go on under a higher one."""


class VersionTaken(EngineError):
    """A rank has had another draft under the version of an update."""


M = TypeVar("M", Greeting, Offer, Endpoint, Loaded, Confirm)


class UpdateChannel(FramedSocket):
    """One rank's connection to the publisher."""

    def __init__(self, end: socket.socket, peer: str) -> None:
        """Own ``end``; ``peer`` names the other one in errors."""
        super().__init__(end, MAX_PACKET_BYTES)
        self._peer = peer

    @classmethod
    def connect(cls, address: str, deadline: float) -> UpdateChannel:
        """Return a connection to the publisher at ``address``.

        Raise PeerLost where nobody listens there, DeadlineExceeded where nobody answers.
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
        """Return the next message, which must be of that kind.

        Raise EngineError where the other end has failed, VersionTaken where that is why.
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
        """Call ``ended``, on another thread, when the other end goes during the block; it may send nothing in it."""
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
        """Say why the update ends, if the other end still listens."""
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
