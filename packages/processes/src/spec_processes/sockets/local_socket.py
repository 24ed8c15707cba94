"""Connect processes of one user by Unix stream sockets with abstract names, which leave no file.

Every user of the host sees such a name (in ``/proc/net/unix``) and may connect to it. So both sides ask the
kernel for the peer's user id before they read anything.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import secrets
import socket
import struct
import time

log = logging.getLogger(__name__)

_UCRED = struct.Struct("3i")
"""struct ucred of unix(7): pid, uid, gid."""
_TIMEVAL = struct.Struct("@ll")
_FULL_S = 0.01
"""Seconds between two attempts to accept a connection while no file descriptor is free."""
_PASSING = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED, errno.EAGAIN, errno.EINTR}
)
"""Errors of ``accept`` after which the listener still works."""


def listen(prefix: str) -> tuple[socket.socket, str]:
    """Return a listening socket and its name, which is ``prefix`` and a random suffix."""
    name = f"{prefix}-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")  # abstract: no file, and gone with this process
    listener.listen()
    return listener, name


def connect(name: str, timeout_s: float) -> socket.socket:
    """Connect to this user's socket called ``name`` and return a blocking socket.

    Raise TimeoutError if the listener does not accept in time, and another OSError if the connection fails.

    Other users can fill the queue of a listening socket. A blocking ``connect`` waits until the queue has space; a
    socket with Python's timeout would fail instead.
    """
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        limit_wait(end, socket.SO_SNDTIMEO, max(1e-3, timeout_s))
        try:
            end.connect(f"\0{name}")
        except BlockingIOError as error:
            raise TimeoutError(f"{name} did not accept within {timeout_s:.3g} s") from error
        limit_wait(end, socket.SO_SNDTIMEO, 0.0)
        if (uid := peer(end)[1]) != os.geteuid():
            raise PermissionError(f"the socket {name} belongs to user {uid}")
    except OSError:
        end.close()
        raise
    return end


def accept(listener: socket.socket) -> socket.socket | None:
    """Return the next connection; None if it was another user's, or if none could be accepted now.

    Raise OSError once the listener is closed. The user of a TCP connection is unknown, so TCP listeners must
    check a token.
    """
    try:
        connection, _ = listener.accept()
    except OSError as error:
        if error.errno not in _PASSING:
            raise
        if error.errno != errno.EAGAIN:
            log.warning("no connection could be accepted: %s", error.strerror)
            time.sleep(_FULL_S)
        return None
    if connection.family == socket.AF_UNIX and (uid := peer(connection)[1]) != os.geteuid():
        connection.close()
        _warn_of(uid)
        return None
    return connection


def peer(end: socket.socket) -> tuple[int, int]:
    """Return process id and user id of the peer, which the kernel reports (SO_PEERCRED)."""
    pid, uid, _ = _UCRED.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def limit_wait(end: socket.socket, direction: int, seconds: float) -> None:
    """Set the socket's timeout for one direction, SO_SNDTIMEO or SO_RCVTIMEO; 0 means no timeout."""
    limit = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
    end.setsockopt(socket.SOL_SOCKET, direction, limit)


@functools.cache
def _warn_of(uid: int) -> None:
    """Log a warning of a refused user, once for each user id, so that many attempts do not fill the log."""
    log.warning("refused a connection of user %d, and will refuse others in silence", uid)
