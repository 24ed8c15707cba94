"""Listen, and connect a sender: by a Unix socket on the same host, by TCP from another host."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from spec_core.errors import ConfigError, ProtocolError
from spec_kit.streams.wire import MAX_PACKET_BYTES
from spec_processes.sockets import local_socket
from spec_processes.sockets.addresses import bind, format_address, parse_address
from spec_processes.sockets.framed_socket import FramedSocket, detect_dead_host

HANG_UP_S = 5.0
"""Seconds that a sender waits until a receiver on another host closes the connection."""


def open_port(host: str, port: int = 0) -> socket.socket | None:
    """Return a listening socket for senders of other hosts, or None if ``host`` is empty.

    ``host`` is an address of this host; port 0 selects a free port. Raise ConfigError if listening fails.
    """
    if not host:
        return None
    try:
        return bind(host, port)
    except OSError as error:
        raise ConfigError(
            f"no sender of another host can connect to {format_address(host, port)}: {error.strerror}; name an "
            "address of this host, with port 0 where several receivers listen"
        ) from error


def split_address(address: str) -> tuple[str, str, str]:
    """Split a receiver's address into socket name, token, and ``host:port`` (or an empty string)."""
    own, _, remote = address.partition("@")
    kind, _, rest = own.partition(":")
    name, _, token = rest.partition(":")
    if kind != "shm" or not token:
        raise ProtocolError(f"not the address of a stream receiver: {kind}:{name}")
    return name, token, remote


def connect_stream(name: str, remote: str, timeout_s: float) -> FramedSocket:
    """Return a connection to the receiver. Raise OSError if it fails, such as TimeoutError."""
    if not remote or is_on_this_host(name):
        end = local_socket.connect(name, timeout_s)
    else:
        end = socket.create_connection(parse_address(remote), max(1e-3, timeout_s))
        detect_dead_host(end)
    return FramedSocket(end, MAX_PACKET_BYTES)


def is_on_this_host(name: str) -> bool:
    """Return whether an abstract Unix socket of this name exists in this network namespace."""
    try:
        names = Path("/proc/net/unix").read_text()
    except OSError:
        return False
    return f"@{name}\n" in names


def hang_up(channel: FramedSocket) -> None:
    """Close a connection so that the receiver gets all data that was sent.

    If received data is unread when a TCP socket is closed, TCP drops data that is in transit. So this side first
    reads until the receiver has closed the connection.
    """
    if channel.end.family == socket.AF_UNIX:
        channel.shutdown()
        return
    channel.shutdown(socket.SHUT_WR)
    with contextlib.suppress(OSError):
        local_socket.limit_wait(channel.end, socket.SO_RCVTIMEO, HANG_UP_S)
        while channel.end.recv(MAX_PACKET_BYTES):
            pass
    channel.shutdown()
