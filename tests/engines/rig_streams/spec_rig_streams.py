"""Events that the rigs in vLLM and SGLang send to an HTTP client of streamed requests.

``streams-PID`` in a folder holds the port of process PID. GET / there streams until another client's GET /end: a line
``NAME WRITTEN TOKENS`` when a request begins (no tokens), and one for each part of its answer.
"""

import functools
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Streams:
    """Lines of this process for all clients that are connected."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._streams: list = []

    @functools.cache  # noqa: B019 (one for each process)
    def open(self) -> None:
        """Listen, at the first call."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, self))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = self._folder / f"streams-{os.getpid()}"
        port.with_suffix(".new").write_text(str(server.server_port))
        port.with_suffix(".new").rename(port)

    def tell(self, name: str, tokens: int) -> None:
        """Write a line before the engine's caller gets what it tells."""
        self.write(f"{name} {time.monotonic()} {tokens}")

    def write(self, line: str) -> None:
        for stream in self._streams:
            stream.write(line.encode() + b"\n")

    def add(self, stream) -> None:
        self._streams.append(stream)


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, streams: Streams, *args: object) -> None:
        self._streams = streams
        super().__init__(*args)

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        if self.path == "/end":
            self._streams.write("end")
            return
        self._streams.add(self.wfile)
        self.wfile.write(b"open\n")
        threading.Event().wait()  # the lines are written where they arise

    def log_message(self, *args: object) -> None: ...
