"""How a sender reaches a receiver: by its Unix socket on the same host, by its port from another one."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from spec_core.errors import ProtocolError
from spec_kit.streams.wire import MAX_PACKET_BYTES
from spec_processes.sockets import local_socket
from spec_processes.sockets.addresses import parse_address
from spec_processes.sockets.framed_socket import FramedSocket, detect_dead_host

HANG_UP_S = 5.0
"""How long a sender waits for a receiver of another host to close its end, in seconds."""


def split_address(address: str) -> tuple[str, str, str]:
    """Return a receiver's socket name, its token, and its ``host:port`` or an empty string."""
    own, _, remote = address.partition("@")
    kind, _, rest = own.partition(":")
    name, _, token = rest.partition(":")
    if kind != "shm" or not token:
        raise ProtocolError(f"not the address of a stream receiver: {kind}:{name}")
    return name, token, remote


def connect_stream(name: str, remote: str, timeout_s: float) -> FramedSocket:
    """Return a connection to the receiver. Raise OSError, TimeoutError for one."""
    if not remote or is_on_this_host(name):
        end = local_socket.connect(name, timeout_s)
    else:
        end = socket.create_connection(parse_address(remote), max(1e-3, timeout_s))
        detect_dead_host(end)
    return FramedSocket(end, MAX_PACKET_BYTES)


def is_on_this_host(name: str) -> bool:
    """Return whether that abstract socket is one of this host's (of this network namespace, that is)."""
    try:
        names = Path("/proc/net/unix").read_text()
    except OSError:
        return False
    return f"@{name}\n" in names


def hang_up(channel: FramedSocket) -> None:
    """End a connection so that the receiver gets all that was sent.

    TCP drops what is on its way if the receiver has sent something that was not read: so it is read first, until the
    receiver has closed its end.
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
