"""Whatever a server sends, a request ends in time, holds little memory, and tells nobody else the secret."""

import json
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, repeat

import pytest

from spec_core.errors import ConfigError, EngineError
from spec_kit.hosting import HttpReplica
from spec_processes.sockets import server_address
from spec_processes.sockets.http_client import LONGEST_ANSWER, HttpClient

LIMIT_S = 10.0
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
STATUS = {
    "status": {"state": "idle"},
    "ranks": 1,
    "acceptance": {"rounds": 0, "drafted": 0, "accepted": 0, "accepted_per_position": []},
}


class Scripted:
    """Sends the same parts to everybody who connects, and notes what they have sent."""

    def __init__(self, parts: Iterable[bytes], pause_s: float) -> None:
        self.heads: list[bytes] = []
        self.num_sent = 0
        self._parts, self._pause_s = parts, pause_s
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with suppress(OSError), connection:
                    connection.settimeout(LIMIT_S)
                    self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        self.heads.append(connection.recv(1 << 16))
        for part in self._parts:
            connection.sendall(part)
            self.num_sent += len(part)
            if self._over.wait(self._pause_s):
                return


@contextmanager
def answering(*parts: bytes, forever: bytes | None = None, pause_s: float = 0.0) -> Iterator[Scripted]:
    """Yield a server that sends ``parts``, and ``forever`` again and again where it is given."""
    endless = () if forever is None else repeat(forever)
    server = Scripted(chain(parts, endless), pause_s)
    try:
        yield server
    finally:
        server.close()


def framed(body: bytes, status: bytes = OK) -> bytes:
    return status + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize(
    ("start", "forever"),
    [
        (OK + b"\r\n", b"x" * 65_536),
        (OK + b"Content-Length: 4000000000\r\n\r\n", b" " * 65_536),
        (OK + b"Content-Length: 100000000000000\r\n\r\n", b"[" * 65_536),
        (CHUNKED, b"1\r\nx\r\n" * 9_999),
        (CHUNKED + b"1000000000000\r\n", b"x" * 65_536),
        (CHUNKED + b"1\r\nx\r\n0\r\n", b"x: y\r\n" * 9_999),
        (b"", CONTINUE * 999),
        (b"", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 999),
        (OK, b"x: y\r\n" * 9_999),
        (OK + b"x: ", b"y" * 65_536),
    ],
)
def test_an_answer_without_an_end_is_left_when_it_is_too_long(start, forever) -> None:
    with answering(start, forever=forever) as server:
        asked = HttpClient(server.url, "secret").ask("/spec/draft/status", "", LIMIT_S)
        with pytest.raises(EngineError, match=rf"^{server.url} does not answer status: ") as error:
            asked.result(2 * LIMIT_S)
    assert "no whole answer" not in str(error.value)  # it is the size that ends it, long before the time
    assert server.num_sent < LONGEST_ANSWER + (16 << 20)  # the rest is what the system's buffers hold


@pytest.mark.parametrize(
    ("start", "forever"),
    [
        (b"", b""),
        (CONTINUE, b""),
        (OK + b"x: ", b"y"),
        (OK + b"\r\n", b" "),
        (OK + b"Content-Length: 99\r\n\r\n", b" "),
        (CHUNKED + b"5;", b"x"),
    ],
)
def test_the_time_is_one_for_the_whole_answer(start, forever) -> None:
    with answering(start, forever=forever, pause_s=0.05) as server:
        asked = HttpClient(server.url, "secret").ask("/spec/draft/status", "", 0.5)
        with pytest.raises(EngineError, match=r"does not answer status: no whole answer came within 0\.5 s$"):
            asked.result(LIMIT_S / 2)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (framed(b"[" * 100_000), "is no server with this project's extension"),
        (framed(b'{"error":' * 20_000, b"HTTP/1.1 409 No\r\n"), "is no server with this project's extension"),
        (framed(b"\xff\xfe"), "is no server with this project's extension"),
        (
            framed(b'{"error": "two\\nlines \\u001b[2J"}', b"HTTP/1.1 409 No\r\n"),
            r"refused status: two lines \\x1b\[2J$",
        ),
        (OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nx", "does not answer status: .*Content-Length"),
        (OK + b"Content-Length: -1\r\n\r\nx", "does not answer status: .*Content-Length"),
        (CHUNKED + b"zz\r\n", "does not answer status: "),
        (OK + b"Content-Length: 9\r\n\r\nx", r"it broke off its answer: .*received 1 bytes, expected 9"),
        (CHUNKED + b"5\r\nx", "it broke off its answer: "),
        (b"", "does not answer status: it closed the connection without an answer"),
        (b"SSH-2.0-OpenSSH_9.0\r\n\r\n", "it speaks no HTTP: illegal status line"),
        (b"HTTP/1.1 two OK\r\n\r\n", "it speaks no HTTP: illegal status line"),
        (b"HTTP/1.1 2 " + b"x" * 60_000 + b"\r\n\r\n", "it speaks no HTTP: illegal status line"),
    ],
)
def test_what_is_no_answer_is_refused_in_one_line(answer, problem) -> None:
    with answering(answer) as server, pytest.raises(EngineError, match=problem) as error:
        HttpReplica(server.url, "secret", LIMIT_S)
    text = str(error.value)
    assert text.isprintable()
    assert len(text) < 2_000


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("ranks", "1000000000"),
        ("ranks", "1.5"),
        ("status", '{"state": "committed", "version": -1}'),
        ("status", '{"state": "committed", "version": %s}' % ("9" * 4_000)),
        ("status", '{"state": "committed", "version": %s}' % ("9" * 5_000)),
        ("status", '{"state": "committed", "digest": "%s"}' % ("d" * 200)),
        (
            "acceptance",
            '{"rounds": %s, "drafted": 1, "accepted": 1, "accepted_per_position": []}' % ("9" * 400),
        ),
        ("acceptance", '{"rounds": NaN, "drafted": 1, "accepted": 1, "accepted_per_position": []}'),
        ("acceptance", '{"rounds": 1, "drafted": 1, "accepted": 1, "accepted_per_position": [-1]}'),
        ("acceptance", '{"rounds": 1, "answers": -1}'),
        ("acceptance", '{"rounds": 1, "squared_rounds": %s}' % ("9" * 40)),
    ],
)
def test_a_field_out_of_its_range_is_refused(place, value) -> None:
    body = json.dumps({**STATUS, place: "HERE"}).replace('"HERE"', value).encode()
    problem = "is no server with this project's extension"
    with answering(framed(body)) as server, pytest.raises(EngineError, match=problem) as error:
        HttpReplica(server.url, "secret", LIMIT_S)
    assert len(str(error.value)) < 2_000


def test_the_reason_that_a_server_gives_is_one_printable_line() -> None:
    fields = {**STATUS, "status": {"state": "quarantined", "reason": "two\nlines \x1b[2J"}}
    with answering(framed(json.dumps(fields).encode())) as server:
        replica = HttpReplica(server.url, "secret", LIMIT_S)
    assert replica.first_answer.status.reason == r"two lines \x1b[2J"


def test_a_redirect_is_named_and_not_followed() -> None:
    with answering(framed(json.dumps(STATUS).encode())) as elsewhere:
        moved = f"HTTP/1.1 307 Moved\r\nLocation: {elsewhere.url}/\r\nContent-Length: 0\r\n\r\n".encode()
        with answering(moved) as server, pytest.raises(EngineError, match="redirects status to ") as error:
            HttpReplica(server.url, "secret", LIMIT_S)
        assert elsewhere.url in str(error.value)
        assert elsewhere.heads == []
    assert b"Authorization: Bearer secret" in server.heads[0]


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch) -> None:
    answer = framed(json.dumps(STATUS).encode())
    with answering(answer) as proxy, answering(answer) as server:
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
            monkeypatch.setenv(name.upper(), proxy.url)
        assert HttpReplica(server.url, "secret", LIMIT_S).num_ranks == 1
        assert (len(server.heads), proxy.heads) == (1, [])


def test_a_server_without_tls_gets_no_secret() -> None:
    with answering(framed(b"{}")) as server:
        url = server.url.replace("http", "https")
        with pytest.raises(EngineError, match=rf"^{url} does not answer status: "):
            HttpReplica(url, "secret", LIMIT_S)
    assert all(b"secret" not in head for head in server.heads)


@pytest.mark.parametrize(
    "url",
    [
        "http://a:1\n",
        "http://a b:1",
        "http://a:1/\x1b",
        "http://@a:1",
        "http://a:1#",
        "http://" + "a" * 2_000,
    ],
)
def test_an_address_that_would_break_a_line_or_a_request_is_refused(url) -> None:
    with pytest.raises(ConfigError, match="is no address of a server; expected http://host:port"):
        server_address(url)


@pytest.mark.parametrize(
    "url", ["http://me:hush@a:1", "me:hush@a", "http://me:hu@sh@a", "http://me:hush/x@a"]
)
def test_a_refused_address_is_quoted_without_its_password(url) -> None:
    with pytest.raises(ConfigError, match=r"^'…@a(:1)?' is no address of a server; ") as refused:
        server_address(url)
    assert "hush" not in str(refused.value)
