"""A server that answers each request in another wrong way: ``python hostile_server.py`` prints its port.

The path of a request draws the answer, so that a case can be told by its address. It ends with its standard input.
"""

import json
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import repeat
from typing import Any

HELD_S = 45
"""Longest time for which a connection is kept busy, or silent."""
GOOD = {
    "status": {"state": "committed", "version": 3, "digest": "d", "update": None, "reason": ""},
    "ranks": 1,
    "acceptance": {"rounds": 2, "drafted": 6, "accepted": 3, "accepted_per_position": [2, 1, 0]},
}
_PLACES = [
    ("status",), ("ranks",), ("acceptance",), ("more",), ("status", "state"), ("status", "version"),
    ("status", "digest"), ("status", "update"), ("status", "reason"), ("status", "more"), ("acceptance", "rounds"),
    ("acceptance", "drafted"), ("acceptance", "accepted"), ("acceptance", "accepted_per_position"),
]  # fmt: skip
_VALUES = [
    "null", "true", "0", "1", "-1", "1e3", "1e400", "NaN", "-Infinity", "9" * 19, "9" * 400, "9" * 5_000,
    "-" + "9" * 5_000,
    '""', '"x"', '"\\u001b[31mred"', '"two\\nlines"', '"\\u0000"', '"\\ud800"', '"' + "x" * 200_000 + '"',
    '"quarantined"',
    "[]", "{}", "[1,2]", "[" + "9" * 20 + "]", "[-1]", "[" * 100_000, '{"a":' * 20_000, "[0" + ",0" * 60_000 + "]",
    "9007199254740992", "9223372036854775807", "4096", "100000", "1000000000",
]  # fmt: skip
_BODIES = [
    b"", b"<html>", b"null", b"[]", b"{}", b'"x"', b"NaN", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"\x00" * 9, b"{",
    b"\x1b[31m",
    b"[" * 100_000, b'{"error":' * 30_000, b'{"error":"' + b"x" * 100_000 + b'"}',
    b'{"error":"two\\nlines \\u001b[2J"}',
    b'{"error":null}', b'{"error":' + b"9" * 5_000 + b"}", b'{"error":"\xff"}', b"x" * 1_000_000, b" " * 1_000_000,
]  # fmt: skip
_STATUS_LINES = [
    b"HTTP/1.1 101 Switching Protocols", b"HTTP/1.1 204 No Content", b"HTTP/1.1 304 Not Modified", b"HTTP/1.1 400 ",
    b"HTTP/1.1 401 Unauthorized", b"HTTP/1.1 404 Not Found", b"HTTP/1.1 409 Conflict", b"HTTP/1.1 500 \x1b[31mred",
    b"HTTP/1.1 503 " + b"x" * 70_000, b"HTTP/1.1 999 ?", b"HTTP/1.1 20 ?", b"HTTP/1.1 -1 ?",
    b"HTTP/1.1 99999999999 ?",
    b"HTTP/1.1 two OK", b"HTTP/0.9 200 OK", b"HTTP/9.9 200 OK", b"ICY 200 OK", b"", b"\x00\x01\x02", b"<html>",
    b"HTTP/1.1",
    b"HTTP/1.1 200", b"SSH-2.0-OpenSSH_9.0", b"\x15\x03\x01\x00\x02\x02", b"HTTP/1.1 200 \xff\xfe",
]  # fmt: skip
_HEADERS = [
    b"no colon", b": no name", b"x: \x00", b"x: \xff\xfe", b" folded: too soon", b"x: a\r\n folded",
    b"x:" + b"y" * 70_000,
    b"x: \x1b[31m", b"Content-Encoding: gzip", b"Location: http://elsewhere:1/", b"x: y\r\n" * 20_000 + b"z: z",
    b"Set-Cookie: a=b", b"Upgrade: h2c", b"Transfer-Encoding: gzip", b"Connection: keep-alive",
    b"Retry-After: 999999999",
]  # fmt: skip
_LENGTHS = [
    b"0", b"1", b"-1", b"+5", b"two", b"", b"99", b"1e3", b"0x10", b"9" * 14, b"9" * 25, b"9" * 5_000, b"5, 5",
    b"5, 6",
    b"5\r\nContent-Length: 6", b"100000000000000",
]  # fmt: skip
_CHUNK_SIZES = [
    b"0", b"-1", b"zz", b"", b"1000000000000", b"F" * 16, b"f" * 5_000, b"5;" + b"x" * 70_000, b"0x5", b" 5",
    b"5\r", b"7fffffff",
]  # fmt: skip
INTERIM = [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: " + b"x" * 500 + b"\r\n\r\n"]


def answer(draw: random.Random, url: str) -> Iterator[bytes]:
    """Yield what is sent for one request, part by part."""
    kind = draw.choice(
        ["body", "body", "field", "field", "status", "headers", "length", "chunks", "endless", "redirect"]
    )
    yield b"".join(draw.choice(INTERIM) for _ in range(draw.choice([0, 0, 0, 0, 1, 3, 100])))
    if kind == "endless":
        yield from _endless(draw)
    elif kind == "body":
        yield _framed(draw.choice(_BODIES), draw)
    elif kind == "field":
        yield _framed(_with_a_wrong_field(draw), draw)
    elif kind == "status":
        yield draw.choice(_STATUS_LINES) + b"\r\n\r\n" + draw.choice([b"", b'{"error":"no"}'])
    elif kind == "headers":
        lines = b"\r\n".join(draw.choice(_HEADERS) for _ in range(draw.choice([1, 1, 2, 200])))
        yield b"HTTP/1.1 200 OK\r\n" + lines + b"\r\n\r\n" + _good()
    elif kind == "length":
        yield b"HTTP/1.1 200 OK\r\nContent-Length: " + draw.choice(_LENGTHS) + b"\r\n\r\n" + _good()
    elif kind == "chunks":
        yield (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            + draw.choice(_CHUNK_SIZES)
            + b"\r\n"
            + _good()
        )
    else:
        code = draw.choice([300, 301, 302, 303, 307, 308])
        place = draw.choice(
            [f"{url}/redirected", "/redirected", "//[", "\x1b[31m", "file:///etc/passwd", "x" * 9_000]
        )
        yield f"HTTP/1.1 {code} Moved\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n".encode()


def _endless(draw: random.Random) -> Iterator[bytes]:
    head = b"HTTP/1.1 200 OK\r\n"
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    start, part = draw.choice(
        [
            (b"", INTERIM[0] * 500), (b"", INTERIM[1] * 50), (b"", b"x" * 9_999), (b"", b"\r\n" * 5_000),
            (head, b"x: y\r\n" * 999),
            (head + b"x: ", b"y" * 9_999), (head + b"\r\n", b"x" * 9_999), (head + b"\r\n", b"\x00" * 9_999),
            (head + b"Content-Length: 4000000000\r\n\r\n", b" " * 9_999), (chunked, b"1\r\nx\r\n" * 999),
            (chunked + b"5;", b"x" * 9_999), (chunked + b"f" * 12 + b"\r\n", b"[" * 9_999),
            (chunked + b"0\r\n", b"x: y\r\n" * 999),
        ]
    )  # fmt: skip
    yield start
    yield from repeat(part)


def _framed(body: bytes, draw: random.Random) -> bytes:
    code = draw.choice([200, 200, 200, 409])
    if draw.random() < 0.2:
        return f"HTTP/1.1 {code} X\r\n\r\n".encode() + body
    if draw.random() < 0.3:
        chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        return f"HTTP/1.1 {code} X\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + chunk + b"0\r\n\r\n"
    return f"HTTP/1.1 {code} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def _with_a_wrong_field(draw: random.Random) -> bytes:
    fields: dict[str, Any] = json.loads(json.dumps(GOOD))
    *outer, last = draw.choice(_PLACES)
    place = fields
    for name in outer:
        place = place[name]
    if draw.random() < 0.15:
        place.pop(last, None)
        return json.dumps(fields).encode()
    place[last] = "VALUE"
    return json.dumps(fields).replace('"VALUE"', draw.choice(_VALUES)).encode()


def _good() -> bytes:
    return json.dumps(GOOD).encode()


def send(connection: socket.socket, parts: Iterator[bytes], draw: random.Random) -> None:
    """Send the parts at a pace that is drawn, until the other side has enough or the time is over."""
    pace = draw.choice(["at once"] * 6 + ["trickle", "stop in the middle", "cut", "reset", "silent"])
    deadline = time.monotonic() + HELD_S
    if pace == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        return
    for part in parts if pace != "silent" else ():
        if pace == "trickle":
            for byte in part[:500]:
                connection.sendall(bytes([byte]))
                time.sleep(0.1)
        else:
            connection.sendall(part[: len(part) // 2 if pace != "at once" else None])
        if pace != "at once" or time.monotonic() > deadline:
            break
    if pace == "cut" or (pace == "at once" and draw.random() < 0.8):
        return
    connection.settimeout(HELD_S)
    connection.recv(1)


class Server:
    """Takes connections, each on a thread of its own."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]

    def serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError, IndexError), connection:
            connection.settimeout(HELD_S)
            head = b""
            while b"\r\n\r\n" not in head and (data := connection.recv(1 << 16)):
                head += data
            path = head.split()[1].decode("latin-1")
            draw = random.Random(path)
            if draw.random() < 0.3:
                connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + _good())
                return
            send(connection, answer(draw, f"http://127.0.0.1:{self.port}"), draw)


if __name__ == "__main__":
    server = Server()
    threading.Thread(target=server.serve, daemon=True).start()
    print(server.port, flush=True)
    sys.stdin.read()
