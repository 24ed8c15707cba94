"""MetricsPage serves the figures of a run that follows servers at ``/metrics``, for Prometheus.

Whoever reaches the address can read the page. It holds counts, addresses of servers and labels of requests,
but no text of a request.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, cast

from spec_core.errors import ConfigError, ProtocolError
from spec_core.foreign import cause
from spec_core.resource import Resource
from spec_processes.sockets.addresses import bind, parse_address

_MOST_CONNECTIONS = 16
_SILENCE_S = 10.0
"""Seconds of silence after which a connection is closed."""


@dataclass(frozen=True)
class Metric:
    """A metric of the page: one number, or a number for each value of a label."""

    name: str
    kind: Literal["counter", "gauge"]
    description: str
    value: float | Mapping[str, float]
    label: str = ""

    def __str__(self) -> str:
        """Return the metric's lines in Prometheus' text format; an empty string if it has no number."""
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterable[str]:
        samples = {"": self.value}
        if isinstance(self.value, Mapping):
            samples = {f'{{{self.label}="{_escaped(key)}"}}': one for key, one in self.value.items()}
        if samples:
            yield f"# HELP spec_follow_{self.name} {self.description}"
            yield f"# TYPE spec_follow_{self.name} {self.kind}"
        for labels, number in samples.items():
            yield f"spec_follow_{self.name}{labels} {number}"


class MetricsPage(Resource):
    """An HTTP server, in separate threads, with one page, which is empty at first."""

    def __init__(self, address: str) -> None:
        """Listen at ``address``, host:port; port 0 is any free one. Raise ConfigError if it cannot be used."""
        try:
            listener = bind(*parse_address(address))
        except (OSError, UnicodeError, ProtocolError) as error:
            raise ConfigError(
                f"follow.metrics={address!r}: {cause(error)}; expected host:port of this host, with a free port"
            ) from error
        self.port: int = listener.getsockname()[1]
        self._server = _Server(listener)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics-page", daemon=True)
        self._thread.start()

    def show(self, metrics: Iterable[Metric]) -> None:
        """Replace the content of the page by ``metrics``."""
        self._server.page = "".join(map(str, metrics)).encode()

    def close(self) -> None:
        """Stop listening, and close every connection."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """Serves the page. If too many connections are open, a new connection replaces the oldest.

    So a client that holds connections open cannot keep other clients out.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(("", 0), _Page, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_address = listener.getsockname()
        self.page = b""
        self._open: deque[socket.socket] = deque()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.append(request)
        if len(self._open) > _MOST_CONNECTIONS:
            self.shutdown_request(self._open[0])
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with suppress(ValueError):  # another thread has closed it
            self._open.remove(request)
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)  # a thread that reads from it ends
        request.close()

    def server_close(self) -> None:
        super().server_close()
        for request in list(self._open):
            self.shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing if a client breaks its connection."""


class _Page(BaseHTTPRequestHandler):
    timeout = _SILENCE_S

    def do_GET(self) -> None:
        if self.path != "/metrics":
            self.send_error(404)
            return
        page = cast("_Server", self.server).page
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing for a request."""


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
