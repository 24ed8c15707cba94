"""DraftMiddleware is the ASGI middleware of an engine's server that has this project's extension.

It answers ``/spec/draft/status`` (GET) and ``/spec/draft/prepare``, ``commit``, ``revert`` and ``abort`` (POST
with JSON). ``/spec/draft/status?rounds=N&wait_s=S`` is a long poll: it is answered when N verifications were
counted since the draft last changed, or after S seconds. Meanwhile the counters are read whenever the server
sends a response. POST ``/spec/draft/requests`` returns the token ids that LiveRequests has stored, and deletes
them. POST ``/spec/draft/states`` returns states of such a request (``served_states``). Each request needs
``Authorization: Bearer TOKEN`` with the token in the server's environment variable ``SPEC_DRAFT_TOKEN``. All other
responses get the headers ``x-draft-version`` and ``x-draft-digest`` while a pushed draft is served.
"""

from __future__ import annotations

import asyncio
import hmac
import http
import json
import logging
import os
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import parse_qs

from spec_core.errors import ConfigError, EngineError, SpecError
from spec_kit.hosting.draft_ranks import CALLS
from spec_kit.hosting.program_replicas import DRAFT_TOKEN_VARIABLE
from spec_kit.live_traffic.live_requests import LIVE_REQUESTS_VARIABLE, LiveRequests, route_of
from spec_kit.live_traffic.served_states import StatesRange

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from spec_kit.hosting.draft_ranks import DraftRanks
    from spec_kit.hosting.modes import Fields

    Message = dict[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    App = Callable[[Message, Receive, Send], Awaitable[None]]

log = logging.getLogger(__name__)

_PREFIX = "/spec/draft/"
_LONGEST_BODY = 1 << 16
"""Largest body, in bytes, of a request about the draft."""
_LONGEST_WAIT_S = 30.0
"""Longest time in seconds of a long poll; a server that shuts down waits for it."""
_LOOK_S = 0.1
"""Seconds from a response of the server to the next read of the counters, so that few reads suffice."""
_NEWS_S = 1.0
"""Age in seconds at which the served version is read again, as another frontend may have changed it."""


class DraftMiddleware(ABC):
    """The middleware around one ASGI application."""

    sleep_path: ClassVar[str] = ""
    """Path of the request that frees the draft's memory, after which no pushed version is served."""
    keeps_requests: ClassVar[bool] = False
    """Whether the subclass passes the tokens of requests to ``live_requests``."""
    no_states: ClassVar[str] = (
        f"this server captures no states; start it with states_bytes in {LIVE_REQUESTS_VARIABLE}"
    )
    """Error message for a request for states if the server captures none."""

    def __init__(self, app: App) -> None:
        """Wrap the ASGI application ``app``."""
        self._app = app
        self._token = os.environ.get(DRAFT_TOKEN_VARIABLE, "")
        self.ranks: DraftRanks | None = None
        """The ranks of the server; None before it starts."""
        self.live_requests = LiveRequests.from_environment()
        """Stored requests from which a trainer may learn; None if the environment does not enable them."""
        if self.live_requests is not None and not self.keeps_requests:
            raise ConfigError(f"this server's engine keeps no requests; remove {LIVE_REQUESTS_VARIABLE}")
        self._served: list[tuple[bytes, bytes]] = []
        self._asked_s = float("-inf")
        self._asking: asyncio.Future[None] | None = None
        self._traffic = asyncio.Event()
        """Set when the server sends the next ASGI message of a response."""

    @abstractmethod
    def find_ranks(self, scope: Message) -> DraftRanks:
        """Return the server's ranks. ``scope``: ASGI scope of the server's start or first request."""

    async def renewed(self, path: str, receive: Receive) -> Receive:
        """Return the ``receive`` by which the application reads the request; a subclass may wrap it."""
        return receive

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request about the draft; pass any other request, and the lifespan, to the application."""
        if self.ranks is None:
            self.ranks = self.find_ranks(scope)
        if scope["type"] != "http":
            await self._app(scope, receive, self._opening(send))
            return
        path = route_of(scope)
        if path.startswith(_PREFIX):
            await _send(send, *await self._answer(scope, path.removeprefix(_PREFIX), receive))
            return
        if scope["method"] == "GET":  # health and metrics
            await self._app(scope, receive, send)
            return
        if time.monotonic() - self._asked_s > _NEWS_S and (self._asking is None or self._asking.done()):
            self._asking = asyncio.ensure_future(self._note("status"))  # no request waits for it
        if self.live_requests is not None:
            receive = self.live_requests.begin(scope, receive)
        answered: list[int] = []

        async def naming(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered.append(message["status"])
                message = {**message, "headers": [*message.get("headers", []), *self._served]}
            await send(message)
            passed, self._traffic = self._traffic, asyncio.Event()
            passed.set()

        await self._app(scope, await self.renewed(path, receive), naming)
        if path == self.sleep_path and answered == [http.HTTPStatus.OK]:  # a server may lack this route
            await self._note("forget")

    def _opening(self, send: Send) -> Send:
        """Return a ``send`` for the lifespan that calls ``open`` on the ranks when the server has started.

        So they are ready for pushes before the first request.
        """

        async def opening(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete" and self._token:
                try:
                    await self._call("open", "")
                except Exception as error:  # noqa: BLE001 (whatever it is, the server serves)
                    log.warning("this server is not ready for pushes of a draft: %s", error)
            await send(message)

        return opening

    async def _answer(self, scope: Message, name: str, receive: Receive) -> tuple[int, Fields | bytes]:
        if not self._is_admitted(scope):
            return 401, {"error": f"a bearer token is needed, that of the server's {DRAFT_TOKEN_VARIABLE}"}
        if (scope["method"], name) == ("POST", "requests"):
            return self._taken()
        if (scope["method"], name) == ("POST", "states"):
            return await self._states(receive)
        if (scope["method"], name) != ("GET", "status") and (scope["method"] != "POST" or name not in CALLS):
            known = ", ".join(["status", *CALLS, "requests", "states"])
            return 404, {"error": f"{scope['method']} {name!r} is none of {known}"}
        try:
            body = (await _body(receive)).decode()
            if name == "status" and scope.get("query_string"):
                return 200, await self._counted(*_held(scope["query_string"].decode()))
            return 200, await self._call(name, body)
        except (SpecError, ValueError) as error:
            return 409, {"error": str(error)}

    def _taken(self) -> tuple[int, Fields]:
        """Return the HTTP status and stored requests, and delete these requests."""
        if self.live_requests is None:
            return 409, {"error": f"this server keeps no requests; start it with {LIVE_REQUESTS_VARIABLE}"}
        return 200, self.live_requests.take()

    async def _states(self, receive: Receive) -> tuple[int, Fields | bytes]:
        """Return the HTTP status, and the layout of states or a piece of a request's states."""
        assert self.ranks is not None
        try:
            if self.live_requests is None or not self.live_requests.captures_states:
                raise EngineError(self.no_states)
            body = (await _body(receive)).decode()
            answer = await self.ranks.states(
                "" if body == "{}" else StatesRange.decode(body).model_dump_json()
            )
        except (SpecError, ValueError) as error:
            return 409, {"error": str(error)}
        return (410 if isinstance(answer, dict) and "left_out" in answer else 200), answer

    def _is_admitted(self, scope: Message) -> bool:
        claimed = dict(scope["headers"]).get(b"authorization", b"")
        return bool(self._token) and hmac.compare_digest(claimed, f"Bearer {self._token}".encode())

    async def _counted(self, rounds: int, wait_s: float) -> Fields:
        """Wait for ``rounds`` counted verifications, but at most ``wait_s`` seconds; return the status."""
        ends_s = time.monotonic() + wait_s
        while True:
            traffic = self._traffic
            answer = await self._call("status", "")
            left_s = ends_s - time.monotonic()
            if answer["acceptance"]["rounds"] >= rounds or left_s <= 0:
                return answer
            with suppress(TimeoutError):
                await asyncio.wait_for(traffic.wait(), left_s)
                await asyncio.sleep(_LOOK_S)

    async def _call(self, name: str, argument: str) -> Fields:
        assert self.ranks is not None
        answer = await self.ranks.call(name, argument)
        served = answer["status"]
        self._asked_s = time.monotonic()
        self._served = [
            (b"x-draft-version", str(served["version"]).encode()),
            (b"x-draft-digest", served["digest"].encode()),
        ]
        if served["version"] is None:
            self._served = []
        return answer

    async def _note(self, name: str) -> None:
        """Make the call ``name`` to the ranks, only to update the headers of the next responses."""
        self._asked_s = time.monotonic()
        try:
            await self._call(name, "")
        except SpecError:  # a server without a draft
            self._served = []


def _held(query: str) -> tuple[int, float]:
    """Parse a long-poll query: the number of verifications to wait for, and the timeout in seconds.

    Raise ValueError for any other query.
    """
    fields = parse_qs(query, strict_parsing=True)
    if set(fields) != {"rounds", "wait_s"}:
        raise ValueError(f"{query!r}: expected rounds=NUMBER&wait_s=SECONDS")
    rounds, wait_s = int(fields["rounds"][0]), float(fields["wait_s"][0])
    if not 0 <= wait_s <= _LONGEST_WAIT_S:
        raise ValueError(f"wait_s={wait_s:g}: expected 0 to {_LONGEST_WAIT_S:g} seconds")
    return rounds, wait_s


async def _body(receive: Receive) -> bytes:
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > _LONGEST_BODY:
            raise ValueError(f"the order has more than {_LONGEST_BODY} bytes")
    return body


async def _send(send: Send, status: int, content: Fields | bytes) -> None:
    is_binary = isinstance(content, bytes)
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    kind = b"application/octet-stream" if is_binary else b"application/json"
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
