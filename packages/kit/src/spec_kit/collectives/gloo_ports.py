"""Close gloo's listening ports after the members of a group have connected.

Gloo listens on TCP as long as its group exists. It keeps every connection open, and ends the process when the process
has no free file descriptor. It also ends the process if its socket is closed or shut down. So its socket is replaced,
under the same file descriptor, by a socket that nobody can reach. This needs no privilege.
"""

# torch.distributed declares no __all__, so its classes count as private names of another module.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import socket
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroupGloo

from spec_processes.sockets.addresses import opening

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def closed_afterwards() -> Generator[None]:
    """Close the TCP ports that gloo opens in the ``with`` block when the block ends.

    Existing connections stay open.
    """
    before = _listeners()
    yield
    for inode, descriptor in _listeners().items():
        if inode not in before:
            _close_port(inode, descriptor)


@contextlib.contextmanager
def gloo_device(interface: str) -> Generator[Any]:
    """Yield a gloo device at the address ``interface``; close its port when the block ends.

    Existing connections stay open. Other threads may call this function at the same time, or
    ``spec_processes.sockets.bind``. A socket that another thread opens in another way may be closed by mistake.
    """
    with opening:
        before = _listeners()
        # A group connects when it is built (lazy_init=False), so a group that cannot work raises then (P8).
        device = ProcessGroupGloo.create_device(hostname=interface, lazy_init=False)
        ports = {inode: descriptor for inode, descriptor in _listeners().items() if inode not in before}
    yield device
    for inode, descriptor in ports.items():
        _close_port(inode, descriptor)


def _listeners() -> dict[int, int]:
    """Return the TCP sockets on which this process listens: inode -> file descriptor."""
    found: dict[int, int] = {}
    for descriptor, file in _open_files():
        if (match := re.fullmatch(r"socket:\[(\d+)\]", file)) and _listens(descriptor):
            found[int(match[1])] = descriptor
    return found


def _listens(descriptor: int) -> bool:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
        on_ip = end.family in (socket.AF_INET, socket.AF_INET6)
        return on_ip and bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def _close_port(inode: int, descriptor: int) -> None:
    """Replace the socket ``inode`` at the file descriptor ``descriptor``, for which gloo's thread waits."""
    watcher = _watcher(inode, descriptor)
    if watcher is None:
        _log.warning(
            "a TCP port that gloo may have opened stays open: /proc/self/fdinfo does not say who waits for it"
        )
        return
    with watcher, _deaf_socket() as replacement:
        watcher.unregister(descriptor)
        os.dup2(replacement.fileno(), descriptor, inheritable=False)
        watcher.register(descriptor, 0)  # gloo unregisters it when the group ends


def _watcher(inode: int, descriptor: int) -> select.epoll | None:
    """Return a copy of the epoll instance that waits for the socket, or None if it is not found.

    Closing the copy does not affect gloo's thread.
    """
    entry = re.compile(rf"^tfd:\s*{descriptor}\s.*\bino:{inode:x}\b", re.MULTILINE)
    for watcher, file in _open_files():
        with contextlib.suppress(OSError):  # another thread has closed it
            if file == "anon_inode:[eventpoll]" and entry.search(_described(watcher)):
                return select.epoll.fromfd(os.dup(watcher))
    return None


def _described(descriptor: int) -> str:
    """Return the kernel's text about a file descriptor; for an epoll instance it lists the watched files."""
    return Path(f"/proc/self/fdinfo/{descriptor}").read_text()


def _deaf_socket() -> socket.socket:
    """Return a listening socket that nobody can connect to, because its name is removed again."""
    deaf = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    deaf.setblocking(False)
    with tempfile.TemporaryDirectory() as folder:
        opened = os.open(folder, os.O_PATH)
        try:
            deaf.bind(f"/proc/self/fd/{opened}/name")  # the folder's own path may be too long
        finally:
            os.close(opened)
    deaf.listen(0)
    return deaf


def _open_files() -> Iterator[tuple[int, str]]:
    """Yield each file descriptor of this process, and what it refers to."""
    for name in os.listdir("/proc/self/fd"):
        try:
            file = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # such as the descriptor of this listing itself
            continue
        yield int(name), file
