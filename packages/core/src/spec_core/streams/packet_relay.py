"""For senders of other hosts: carries the conversation of SharedMemoryTransport over TCP.

Both ends go on speaking to a Unix socket of their own host (``shared_memory_wire``); in between, a relay at each
host passes every packet on, with its length in front, and the end of the connection. Descriptors do not travel, so it
takes memory that needs none.

Threat model: a connection is passed on once its first packet has the receiver's token, within the bounds of a
``Lobby``. Tokens and packets travel in clear: use a network that is private.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from spec_core import local_socket
from spec_core.errors import ConfigError, DeadlineExceeded, PeerLost, ProtocolError
from spec_core.lobby import Lobby, same_token
from spec_core.rendezvous import bind, format_address, parse_address
from spec_core.streams.shared_memory_wire import MAX_PACKET_BYTES, Welcome, decode_hello, encode_json
from spec_core.transport import FeatureReceiver

if TYPE_CHECKING:
    from collections.abc import Callable

    from spec_core.records import FeatureSample

SILENCE_S = 20
"""After which a host that answers nothing at all, not even TCP's probes, counts as dead."""

LOOK_MS = 500
"""How often a relay looks whether its process is about to end."""

_LENGTH = struct.Struct("<I")


class ReachableReceiver(FeatureReceiver):
    """A receiver that senders of other hosts reach, too: its address is ``<the receiver's own>@<host>:<port>``."""

    def __init__(self, receiver: FeatureReceiver, listen: str) -> None:
        """Owns ``receiver``. ``listen``: ``host:port`` of an interface that the others reach; port 0: a free one.
        ConfigError if this host cannot listen there."""
        self._receiver = receiver
        try:
            listener = bind(*parse_address(listen))
        except OSError as error:
            receiver.close()
            raise ConfigError(
                f"no sender of another host can be heard at {listen}: {error.strerror}; name an address of this "
                "host, with port 0 where several receivers listen"
            ) from error
        self._where = format_address(*listener.getsockname()[:2])
        self._lobby = Lobby(listener, _LENGTH)
        self._relays: set[_Relay] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="relay", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"{self._receiver.address}@{self._where}"

    def receive(self, timeout_s: float) -> FeatureSample:
        return self._receiver.receive(timeout_s)

    def release(self, sample: FeatureSample) -> None:
        self._receiver.release(sample)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._receiver.close()
        self._lobby.close()
        self._thread.join()
        for relay in self._relays:
            relay.close()

    def _accept(self) -> None:
        for far, hello in self._lobby.first_records():
            with contextlib.suppress(OSError):  # the receiver was closed, or the sender has gone
                if (near := self._introduced(far, hello)) is not None:
                    self._relays = {relay for relay in self._relays if not relay.ended} | {_Relay(near, far)}
                    continue
            far.close()

    def _introduced(self, far: socket.socket, hello: bytes) -> socket.socket | None:
        """A connection to the receiver in the name of the sender, or None: who sent that knows no token."""
        _, name, token = self._receiver.address.split(":", 2)
        try:
            known = same_token(decode_hello(hello).token, token)
        except ProtocolError:
            return None
        if not known:
            refusal = encode_json(Welcome(refusal=f"the receiver {name} does not know this sender's token"))
            far.sendall(_LENGTH.pack(len(refusal)) + refusal)
            return None
        near = local_socket.connect(name, socket.SOCK_SEQPACKET, SILENCE_S)
        near.send(hello)
        return near


def address_from_here(address: str, timeout_s: float) -> str:
    """Where a sender of this process reaches the receiver at ``address``: on its host at its own address, elsewhere
    at that of a relay, which lives as long as the one connection that it is good for. PeerLost, DeadlineExceeded."""
    own, _, remote = address.partition("@")
    return own if not remote or _is_here(own) else relayed(own, remote, timeout_s)


def relayed(own: str, remote: str, timeout_s: float) -> str:
    """The address of a new relay, good for one sender."""
    try:
        far = socket.create_connection(parse_address(remote), max(1e-3, timeout_s))
    except TimeoutError as error:
        raise DeadlineExceeded(f"the receiver's host at {remote} does not answer") from error
    except OSError as error:
        raise PeerLost(f"no receiver listens at {remote}: {error}") from error
    kind, _, token = own.split(":", 2)
    listener, name = local_socket.listen("spec-relay", socket.SOCK_SEQPACKET)

    def wait_for_sender() -> None:
        with listener:
            near = _first_of_this_user(listener, time.monotonic() + max(1.0, timeout_s))
        if near is None:
            far.close()
        else:
            _Relay(near, far)

    threading.Thread(target=wait_for_sender, name="relay", daemon=True).start()
    return f"{kind}:{name}:{token}"


class _Relay:
    """Between a Unix socket and a TCP connection, a thread for each way. Ends with both."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        near.settimeout(None)
        far.settimeout(None)
        _notice_silence(far)
        self._near, self._far = near, far
        self._threads = [
            # What a sender has said before its process ends is passed on first.
            threading.Thread(target=self._run, args=(self._outward,), name="relay", daemon=False),
            threading.Thread(target=self._run, args=(self._inward,), name="relay", daemon=True),
        ]
        self._open = len(self._threads)
        self._turn = threading.Lock()
        for thread in self._threads:
            thread.start()

    @property
    def ended(self) -> bool:
        return self._open == 0

    def close(self) -> None:
        for end in (self._near, self._far):
            _hang_up(end)
        for thread in self._threads:
            thread.join()

    def _run(self, way: Callable[[], None]) -> None:
        way()
        with self._turn:
            self._open -= 1
            if self._open == 0:
                self._near.close()
                self._far.close()

    def _outward(self) -> None:
        with contextlib.suppress(OSError):
            while packet := self._said():
                self._far.sendall(_LENGTH.pack(len(packet)) + packet)
        _hang_up(self._far, socket.SHUT_WR)

    def _said(self) -> bytes:
        """The next packet of the near end, or none if it has gone."""
        heard = select.poll()
        heard.register(self._near, select.POLLIN)
        while not heard.poll(LOOK_MS):
            if not threading.main_thread().is_alive():
                return b""  # the process ends, and has closed nothing
        try:
            return self._near.recv(MAX_PACKET_BYTES)
        except ConnectionResetError:  # it went with a packet unread; what it said before is still to be read
            return self._near.recv(MAX_PACKET_BYTES)

    def _inward(self) -> None:
        with contextlib.suppress(OSError, ProtocolError):
            while header := self._read(_LENGTH.size):
                (size,) = _LENGTH.unpack(header)
                if not 0 < size <= MAX_PACKET_BYTES:
                    raise ProtocolError(f"a packet of {size} bytes")
                self._near.send(self._read(size))
        _hang_up(self._near)  # nothing that this end says would arrive
        _hang_up(self._far)

    def _read(self, size: int) -> bytes:
        """That many bytes, or none if the connection ends before."""
        chunks = bytearray()
        while len(chunks) < size:
            chunk = self._far.recv(size - len(chunks))
            if not chunk:
                return b""
            chunks += chunk
        return bytes(chunks)


def _first_of_this_user(listener: socket.socket, deadline: float) -> socket.socket | None:
    heard = select.poll()
    heard.register(listener, select.POLLIN)
    while (left_s := deadline - time.monotonic()) > 0 and heard.poll(left_s * 1000):
        if (near := local_socket.accept(listener)) is not None:
            return near
    return None


def _is_here(own: str) -> bool:
    """Whether that abstract socket is one of this host's (of this network namespace, that is)."""
    try:
        names = Path("/proc/net/unix").read_text()
    except OSError:
        return False
    return f"@{_name(own)}\n" in names


def _name(own: str) -> str:
    return own.split(":", 2)[1]


def _notice_silence(far: socket.socket) -> None:
    far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    far.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    far.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 4)
    far.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S // 4)
    far.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)


def _hang_up(end: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Wakes a thread that waits in it."""
    with contextlib.suppress(OSError):
        end.shutdown(how)
