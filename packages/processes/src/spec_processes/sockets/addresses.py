"""Parse and format addresses of sockets, ``host:port`` or ``[ipv6]:port``, and listen at them."""

from __future__ import annotations

import socket
import threading

from spec_core.errors import ProtocolError

_MAX_PORT = 65535

opening = threading.Lock()
"""Lock that is held while a socket begins to listen, so that code that looks for a library's new listener finds
no other listener."""


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port`` or ``[ipv6]:port``. Raise ProtocolError for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ProtocolError(f"{address!r} is not host:port")
    if int(port) > _MAX_PORT:
        raise ProtocolError(f"{address!r} has port {port}; the highest port is {_MAX_PORT}")
    return host.strip("[]"), int(port)


def format_address(host: str, port: int) -> str:
    """Return ``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket on the interface ``host``; port 0 takes a free port."""
    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        with opening:
            listener.listen()
    except OSError:
        listener.close()
        raise
    return listener
