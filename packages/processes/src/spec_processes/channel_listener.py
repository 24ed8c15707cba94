"""A ChannelListener listens at the port at which workers on other hosts connect to their launcher.

The first packet of a connection has the listener's secret token, the worker's name and the use of the
connection. The use is the control channel, or the worker's output if the worker's host does not see the log
folder. A peer without the token is refused (``AcceptLimiter`` bounds the cost). Traffic is not encrypted: use
loopback or a private network.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import secrets
import socket
import threading
from pathlib import Path

from spec_processes.sockets.addresses import bind, format_address, parse_address
from spec_processes.sockets.framed_socket import LENGTH, detect_dead_host
from spec_processes.sockets.peer_admission import AcceptLimiter, same_token

log = logging.getLogger(__name__)

_CONTROL, _OUTPUT = "control", "output"
_OUTPUT_S = 5.0
"""Longest wait for the last output of a worker that has ended, in seconds."""
_CHUNK_BYTES = 1 << 16
_MAX_PENDING = 512
"""Largest number of connections that have not authenticated yet. The workers of a large run connect all at once."""


class ChannelListener:
    """Listens on a TCP port and accepts the connections of workers on other hosts."""

    def __init__(self, host: str, logs: Path | None = None) -> None:
        """Listen on a free port of the interface ``host``.

        Output that workers send is appended to files in ``logs``.
        """
        listener = bind(host, 0)
        self.address = format_address(host, listener.getsockname()[1])
        self.token = secrets.token_hex(16)
        self._limiter = AcceptLimiter(listener, max_pending=_MAX_PENDING)
        self._arrived: queue.SimpleQueue[tuple[str, socket.socket]] = queue.SimpleQueue()
        self._logs = logs
        self._outputs: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._accept, name="workers", daemon=True)
        self._thread.start()

    def accept(self, timeout_s: float) -> tuple[str, socket.socket] | None:
        """Wait for the next worker; return its name and its connection, or None after ``timeout_s``."""
        try:
            return self._arrived.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Stop listening and write the last output of workers.

        Connections that ``accept`` returned stay open.
        """
        self._limiter.close()
        self._thread.join()
        for thread in self._outputs:
            thread.join(_OUTPUT_S)
        while (left := self.accept(0.0)) is not None:
            left[1].close()

    def _accept(self) -> None:
        for connection, packet in self._limiter.first_packets():
            try:
                token, name, use = json.loads(packet)
            except (ValueError, TypeError):
                token = name = use = None
            if same_token(token, self.token):
                detect_dead_host(connection)
                self._admit(str(name), str(use), connection)
            else:
                log.debug("refused a connection that does not know the token")
                connection.close()

    def _admit(self, name: str, use: str, connection: socket.socket) -> None:
        if use == _CONTROL:
            self._arrived.put((name, connection))
        elif use == _OUTPUT and self._logs is not None:
            log_file = self._logs / f"{Path(name).name}.log"
            thread = threading.Thread(
                target=_append, args=(connection, log_file), name=f"log {name}", daemon=True
            )
            self._outputs.append(thread)
            thread.start()
        else:
            log.debug("refused a connection of %s: nothing here takes its %r", name, use)
            connection.close()


def _append(output: socket.socket, file: Path) -> None:
    """Read the connection ``output`` until the peer closes it, and append the bytes to ``file``."""
    with output, file.open("ab", buffering=0) as stream, contextlib.suppress(OSError):
        while data := output.recv(_CHUNK_BYTES):
            stream.write(data)


def connect_output(address: str, token: str, name: str, timeout_s: float) -> socket.socket:
    """Connect to a ChannelListener and return a socket to which a process can write its output.

    Raise OSError if the connection fails.
    """
    return _connect(address, [token, name, _OUTPUT], timeout_s)


def connect_channel(address: str, token: str, name: str, timeout_s: float) -> socket.socket:
    """Connect to a ChannelListener and return a blocking socket for ``spawn_on``.

    Raise OSError if the connection fails.
    """
    return _connect(address, [token, name, _CONTROL], timeout_s)


def _connect(address: str, first: list[str], timeout_s: float) -> socket.socket:
    end = socket.create_connection(parse_address(address), timeout_s)
    packet = json.dumps(first).encode()
    end.sendall(LENGTH.pack(len(packet)) + packet)
    detect_dead_host(end)
    end.settimeout(None)
    return end
