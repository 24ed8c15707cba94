"""A server that answers calls for updates of a draft as a test says."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from spec_core import ServingStatus, UpdateId

UPDATE = UpdateId(group="default", fence=1, number=7)
SERVED = ServingStatus(state="committed", version=3, digest="d", update=UPDATE)
ANSWER = {
    "status": SERVED.model_dump(mode="json"),
    "ranks": 2,
    "acceptance": {"rounds": 2, "drafted": 6, "accepted": 3, "accepted_per_position": [2, 1, 0]},
}


class Server(HTTPServer):
    """Answers as it is told, and keeps what was asked."""

    answer: tuple[int, Any] = (200, ANSWER)
    asked: list[tuple[str, str, str]]
    pieces: Iterator[tuple[int, Any]] = iter(())
    """Answers that come before ``answer``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.is_asked = threading.Semaphore(0)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0)).decode()
        self.server.asked.append((self.command, self.path, body))
        self.server.is_asked.release()
        self.server.may_answer.wait(10)
        status, fields = next(self.server.pieces, self.server.answer)
        if self.headers["authorization"] != "Bearer secret":
            status, fields = 401, {"error": "a bearer token is needed"}
        answer = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        with suppress(BrokenPipeError):
            self.wfile.write(answer)

    do_POST = do_GET

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def running_server() -> Iterator[Server]:
    """A server that runs in a thread."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
