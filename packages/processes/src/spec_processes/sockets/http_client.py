"""An HttpClient sends HTTP requests to one server, which may be broken or hostile.

A request ends at its timeout, whatever the server does. A response has at most ``LONGEST_ANSWER`` bytes, or as many
as its caller allows, including headers, chunk sizes and interim responses (1xx). Redirects are not followed, and
proxies in the environment are ignored, so the secret is sent to the given address only.
"""

from __future__ import annotations

import http
import socket
import ssl
import threading
import time
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

import h11

from spec_core.errors import ConfigError, DeadlineExceeded, EngineError, ProtocolError, RunError
from spec_core.foreign import cause
from spec_core.resource import Resource
from spec_core.wording import one_line, shortened, shown

LONGEST_ANSWER = 1 << 18
"""Largest number of bytes of a response. A status has some hundred bytes, an error message a few thousand."""
_LONGEST_HEAD = 1 << 16
"""Largest number of bytes of the status line with the headers, and of a line between chunks."""
_AT_ONCE = 1 << 16
"""Largest number of bytes that one call reads from a connection."""
_LONGEST_ADDRESS = 1_000
"""Largest number of characters of an address; a host name has at most 253."""
_LONGEST_QUOTE = 200
_LONGEST_REFUSAL = 1 << 12
"""Largest number of bytes of a refusal's body that are stored."""
_PORTS = {"http": 80, "https": 443}
"""Scheme -> default port."""
_CONNECT_S = 10.0
"""Longest wait, in seconds, to connect; another thread cannot interrupt this wait."""


@dataclass(frozen=True, kw_only=True)
class HttpAnswer:
    """The HTTP response to one request."""

    status: int
    reason: str
    location: str
    """The ``Location`` header of a redirect, else empty."""
    body: bytes


class HttpClient(Resource):
    """Sends requests to one HTTP server, each in a new thread over a new connection. Any thread may call."""

    def __init__(self, url: str, token: str | None, headers: Mapping[str, str] | None = None) -> None:
        """Store the server's ``url`` and the bearer ``token``, if there is one, without connecting.

        ``headers``: further headers of each request. Raise ConfigError if the URL or the token is invalid.
        """
        self._parts = server_address(url)
        if token is not None:
            check_secret(token)
        self._headers = dict(headers or {})
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self.url = f"{self._parts.scheme}://{self._parts.netloc}"
        self._port = self._parts.port or _PORTS[self._parts.scheme]
        self._hint = "is the server's API at this address?"
        if self._parts.port is None:
            self._hint = f"is the server's API at port {self._port}? The address names no other"
        self._lock = threading.Lock()
        """Guards ``_closed`` and ``_under_way``."""
        self._under_way: set[socket.socket] = set()
        self._closed = False

    def ask(
        self, path: str, body: str, timeout_s: float, longest: int = LONGEST_ANSWER
    ) -> Future[HttpAnswer]:
        """Send a POST with ``body``, or a GET if ``body`` is empty, and return a future of the response.

        The future is done within ``timeout_s``, unless the system's name lookup takes longer. It raises EngineError
        if the request fails, or if the response has more than ``longest`` bytes.
        """
        answer: Future[HttpAnswer] = Future()
        deadline = time.monotonic() + timeout_s

        def run() -> None:
            try:
                with self._explained(path, timeout_s):
                    answer.set_result(self._exchange(path, body.encode(), deadline, longest))
            except BaseException as error:  # noqa: BLE001 (the top of a thread: the caller gets every error)
                answer.set_exception(error)

        threading.Thread(target=run, name=f"http {_last_name(path)}", daemon=True).start()
        return answer

    def stream(self, path: str, body: str, timeout_s: float, longest: int) -> Generator[bytes]:
        """Send a POST with ``body``, or a GET if ``body`` is empty, and yield the answer's body as it arrives.

        The caller's thread waits for at most ``timeout_s`` in all, and reads at most ``longest`` bytes. Raise
        EngineError for an answer that is invalid, too long or too late, and for every status but 200.
        """
        deadline = time.monotonic() + timeout_s
        refusal = None
        refused = bytearray()
        with self._explained(path, timeout_s):
            for event in self._events(path, body.encode(), deadline, longest):
                if isinstance(event, h11.Data) and refusal is None:
                    yield bytes(event.data)
                elif isinstance(event, h11.Data):
                    refused += event.data[: _LONGEST_REFUSAL - len(refused)]
                elif event.status_code != http.HTTPStatus.OK:
                    refusal = event
        if refusal is not None:
            raise EngineError(f"{self.url} refused {_last_name(path)}: {_refusal(refusal, bytes(refused))}")

    def close(self) -> None:
        """End every current and every later request with EngineError; any thread may call it."""
        with self._lock:
            self._closed = True
            for connected in self._under_way:
                with suppress(OSError):
                    connected.shutdown(socket.SHUT_RDWR)

    def _exchange(self, path: str, body: bytes, deadline: float, longest: int) -> HttpAnswer:
        head = None
        answer = bytearray()
        for event in self._events(path, body, deadline, longest):
            if isinstance(event, h11.Response):
                head = event
            else:
                answer += event.data
        assert head is not None, "an answer has a head, or else reading it raises"
        return _whole(head, bytes(answer))

    def _events(
        self, path: str, body: bytes, deadline: float, longest: int
    ) -> Generator[h11.Response | h11.Data]:
        """Send a request and yield its answer: the head, then the pieces of the body."""
        request = h11.Request(
            method="POST" if body else "GET",
            target=self._parts.path.rstrip("/") + path,
            headers=[
                ("Host", self._parts.netloc),
                *self._headers.items(),
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
            ],
        )
        state = h11.Connection(h11.CLIENT, max_incomplete_event_size=_LONGEST_HEAD)
        parts = (request, h11.Data(data=body), h11.EndOfMessage())
        with self._connected(deadline) as connection:
            connection.settimeout(_left_s(deadline))
            connection.sendall(b"".join(state.send(part) or b"" for part in parts))
            yield from _read_answer(state, connection, deadline, longest)

    @contextmanager
    def _explained(self, path: str, timeout_s: float) -> Generator[None]:
        """Turn errors of the network or the server into an EngineError that names the server and the reason."""
        try:
            yield
        except (
            OSError,
            h11.RemoteProtocolError,
            RunError,
            UnicodeError,
        ) as error:  # UnicodeError: of an invalid host name
            reason = self._reason(error, timeout_s)
            raise EngineError(f"{self.url} does not answer {_last_name(path)}: {reason}") from error

    @contextmanager
    def _connected(self, deadline: float) -> Generator[socket.socket]:
        """Yield a connection to the server. ``close`` in another thread ends this connection."""
        host = self._parts.hostname or ""
        secure = self._parts.scheme == "https"
        with ExitStack() as stack:
            limit_s = min(_CONNECT_S, _left_s(deadline))
            try:
                connection = stack.enter_context(socket.create_connection((host, self._port), limit_s))
            except TimeoutError as error:
                raise EngineError(
                    f"nobody took the connection within {limit_s:.3g} s; {self._hint}"
                ) from error
            if secure:
                connection.settimeout(_left_s(deadline))
                tls = ssl.create_default_context()
                connection = stack.enter_context(tls.wrap_socket(connection, server_hostname=host))
            stack.enter_context(self._known(connection))
            yield connection

    @contextmanager
    def _known(self, connection: socket.socket) -> Generator[None]:
        with self._lock:
            if self._closed:
                raise EngineError("this side has closed")
            self._under_way.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._under_way.discard(connection)

    def _reason(self, error: Exception, timeout_s: float) -> str:
        if isinstance(error, TimeoutError):
            return f"no whole answer came within {timeout_s:g} s"
        if isinstance(error, h11.RemoteProtocolError):  # its text quotes received bytes
            if str(error).startswith("peer closed connection"):
                return f"it broke off its answer: {error}; the server's own output may say why"
            return f"it speaks no HTTP: {shortened(str(error), _LONGEST_QUOTE)}; {self._hint}"
        return f"{cause(error)}; {self._hint}" if isinstance(error, OSError) else cause(error)


def server_address(url: str) -> SplitResult:
    """Return the parts of a URL ``http://host:port`` or ``https://host:port``, with or without a path.

    The default port is 80, for https 443. Raise ConfigError for any other URL.
    """
    with suppress(ValueError):  # invalid port or IPv6 address
        parts = urlsplit(url)
        is_plain = (
            url.isascii()
            and url.isprintable()
            and not set(url) & set(" @?#\\")
            and len(url) <= _LONGEST_ADDRESS
        )
        if is_plain and parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    raise ConfigError(f"{_without_password(url)} is no address of a server; expected http://host:port")


def _without_password(url: str) -> str:
    """Return a URL without its user and password, for messages."""
    _, user, rest = url.rpartition("@")
    return shown(f"…@{rest}" if user else url)


def check_secret(secret: str, variable: str = "SPEC_DRAFT_TOKEN") -> None:
    """Raise ConfigError if the secret of an environment variable cannot be sent in an HTTP header."""
    if not secret or not secret.isascii() or not secret.isprintable() or secret != secret.strip():
        raise ConfigError(
            "the secret of the servers cannot be sent; expected printable ASCII without spaces at its ends "
            f"({variable})"
        )


def _last_name(path: str) -> str:
    return path.rpartition("/")[2].partition("?")[0]


def _read_answer(
    state: h11.Connection, connection: socket.socket, deadline: float, longest: int
) -> Generator[h11.Response | h11.Data]:
    """Yield the head and the body of the final response; skip interim responses.

    Raise ProtocolError if the response is too long.
    """
    has_head = False
    num_bytes = 0
    while True:
        event = state.next_event()
        if event is h11.NEED_DATA:
            data = _receive(connection, deadline)
            if not has_head and not data:
                raise ProtocolError("it closed the connection without an answer")
            num_bytes += len(data)
            if num_bytes > longest:
                raise ProtocolError(f"its answer has more than {longest} bytes")
            state.receive_data(data)
        elif isinstance(event, h11.Response | h11.Data):
            has_head = True
            yield event
        elif has_head and isinstance(event, h11.EndOfMessage):
            return


def _refusal(head: h11.Response, body: bytes) -> str:
    """Return status and reason of a refusal, with its body's text or the address that it redirects to."""
    answer = _whole(head, body)
    said = f"; it redirects to {shown(answer.location)}, name that address" if answer.location else ""
    if text := answer.body.decode(errors="replace").strip():
        said = f"{said}: {shortened(one_line(text), 2 * _LONGEST_QUOTE)}"
    return f"{answer.status} {shortened(answer.reason, _LONGEST_QUOTE)}{said}"


def _whole(head: h11.Response, body: bytes) -> HttpAnswer:
    location = dict(head.headers).get(b"location", b"")
    return HttpAnswer(
        status=head.status_code,
        reason=head.reason.decode("latin-1"),
        location=location.decode("latin-1"),
        body=body,
    )


def _receive(connection: socket.socket, deadline: float) -> bytes:
    connection.settimeout(_left_s(deadline))
    return connection.recv(_AT_ONCE)


def _left_s(deadline: float) -> float:
    """Return the seconds until ``deadline``. Raise DeadlineExceeded if it has passed."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise DeadlineExceeded("no time is left")
    return left_s
