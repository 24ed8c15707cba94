"""LiveRequests: token ids of a server's finished requests, for whoever trains the server's draft on its traffic.

Nothing is kept unless the server's environment variable ``SPEC_LIVE_REQUESTS`` asks for it. What is kept lies in
memory of the server's frontend, bounded in rows, bytes and age, until it is taken: no disk, no log. An error here is
counted, and never reaches a request.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from array import array
from collections import Counter, deque
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import pydantic

from spec_core.config import Config, Seconds
from spec_core.errors import ConfigError
from spec_core.validation import validate
from spec_core.wire_record import WireRecord

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterable

    from spec_kit.hosting.modes import Fields

    Message = dict[str, Any]
    Receive = Callable[[], Awaitable[Message]]

LIVE_REQUESTS_VARIABLE = "SPEC_LIVE_REQUESTS"
"""Environment variable of a server with the fields of LiveRequestsConfig as JSON; without it nothing is kept."""
LEARN_HEADER = b"x-draft-learn"
"""Header of a request: ``no`` leaves it out, ``yes`` takes it whatever the share is."""
_LONGEST_BODY = 1 << 18
"""Bytes of the largest body that is looked at."""
_LONGEST_ROW = 16_384
"""Most tokens of a prompt with its answer that are kept."""
_TAKEN_TOKENS = 24_576
"""Most tokens that are taken at once: ids of seven digits with their commas fit what a client reads of an answer."""
_ROW_TOKENS = 4
"""Tokens that the names of a row's fields are worth."""
_TOKEN_BYTES = 4


class LiveRequestsConfig(Config):
    """Fields of ``SPEC_LIVE_REQUESTS``."""

    share: Annotated[float, pydantic.Field(gt=0, le=1)]
    """Share of the requests that is kept; a hash of the request's id decides."""
    opt_in: bool = False
    """Keep requests alone that have the header ``x-draft-learn: yes``."""
    models: list[str] = pydantic.Field(default_factory=list)
    """Names of models as requests have them; empty for all. Requests to an adapter are never kept."""
    routes: list[str] = pydantic.Field(default_factory=list)
    """Paths of requests, such as /v1/chat/completions; empty for all."""
    rows: Annotated[int, pydantic.Field(ge=1)] = 1024
    """Most requests that are kept at a time; the oldest goes first."""
    bytes: Annotated[int, pydantic.Field(ge=1)] = 64 << 20
    """Most bytes of token ids that are kept at a time, four for each token."""
    age_s: Seconds = 600.0
    """Longest time for which a request is kept."""


Token = Annotated[int, pydantic.Field(ge=0, lt=1 << 31)]


class LiveRequest(WireRecord):
    """Token ids of one finished request."""

    prompt: Annotated[list[Token], pydantic.Field(min_length=1)]
    answer: Annotated[list[Token], pydantic.Field(min_length=1)]


class TakenRequests(WireRecord):
    """Requests that a server gives away, and what it has counted since it started."""

    requests: list[LiveRequest]
    left: Annotated[int, pydantic.Field(ge=0)]
    """Requests that are still there."""
    kept: Annotated[int, pydantic.Field(ge=0)]
    left_out: dict[str, Annotated[int, pydantic.Field(ge=0)]]
    """Requests that were not kept or not taken in time, by the reason."""


@dataclass
class _AskedRequest:
    """A request as it has come by HTTP."""

    route: str
    learn: str
    """Value of the header, lower-case; empty where there is none."""
    body: bytearray = field(default_factory=bytearray)
    is_long: bool = False

    def note(self, part: bytes) -> None:
        """Note a part of the body, as far as bodies are looked at."""
        self.is_long = self.is_long or len(self.body) + len(part) > _LONGEST_BODY
        if not self.is_long:
            self.body += part

    @cached_property
    def problem(self) -> str:
        """Return why the fields of the body leave the request out; empty where they do not."""
        if self.is_long:
            return "too_long"
        try:
            fields = json.loads(self.body)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            return "unreadable"
        self.model = fields.get("model")
        if fields.get("store") is False:
            return "store_false"
        return "cache_salt" if fields.get("cache_salt") is not None else ""

    model: object = None
    """Name of the model, after ``problem``."""


_ASKED: ContextVar[_AskedRequest | None] = ContextVar("asked", default=None)
"""The request that a task of the server answers."""


class _Row(NamedTuple):
    kept_s: float
    prompt: array[int]
    answer: array[int]

    @property
    def num_bytes(self) -> int:
        return _TOKEN_BYTES * self.num_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.answer)


class LiveRequests:
    """Keeps requests until they are taken; any thread may call."""

    def __init__(
        self, config: LiveRequestsConfig, clock: Callable[[], float] = time.monotonic, timed: bool = True
    ) -> None:
        """Keep what ``config`` says. ``timed``: a timer drops what is too old, even if nobody calls any more."""
        self._config, self._clock, self._timed = config, clock, timed
        self._lock = threading.Lock()
        self._rows: deque[_Row] = deque()
        self._num_bytes = self._kept = 0
        self._left_out: Counter[str] = Counter()
        self._timer: threading.Timer | None = None

    @classmethod
    def from_environment(cls) -> LiveRequests | None:
        """Return what the environment asks for; None where that is nothing. Raise ConfigError for a wrong value."""
        text = os.environ.get(LIVE_REQUESTS_VARIABLE, "")
        if not text:
            return None
        try:
            values = json.loads(text)
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise ConfigError(
                f"environment variable {LIVE_REQUESTS_VARIABLE} is no JSON object; expected such as "
                '{"share": 0.1}, or remove it'
            )
        return cls(validate(LiveRequestsConfig, values, f"environment variable {LIVE_REQUESTS_VARIABLE}"))

    def begin(self, scope: Message, receive: Receive) -> Receive:
        """Note the request of an ASGI scope for ``admits`` in this task; return the way to read it."""
        learn = dict(scope["headers"]).get(LEARN_HEADER, b"").decode("latin-1").strip().lower()
        asked = _AskedRequest(scope["path"], learn)
        _ASKED.set(asked)

        async def noting() -> Message:
            message = await receive()
            asked.note(message.get("body", b""))
            return message

        return noting

    def admits(self, request_id: str) -> bool:
        """Return whether to keep the request that this task answers; count why not.

        The body of a sampled one alone is read.
        """
        reason = self._reason(_ASKED.get(), request_id)
        if reason:
            self.leave_out(reason)
        return not reason

    def leave_out(self, reason: str) -> None:
        """Count a request that is not kept."""
        with self._lock:
            self._left_out[reason] += 1

    @contextmanager
    def guarded(self) -> Generator[None]:
        """Count whatever fails in the ``with`` block, whose caller goes on."""
        try:
            yield
        except Exception:  # noqa: BLE001 (whatever it is, the request is answered; a message could quote it)
            self.leave_out("error")

    def add(self, prompt: Iterable[int], answer: Iterable[int]) -> None:
        """Keep a request that has finished, in the place of the oldest ones where there is no room."""
        row = _Row(self._clock(), array("i", prompt), array("i", answer))
        is_long = row.num_tokens > _LONGEST_ROW or row.num_bytes > self._config.bytes
        if is_long or not row.prompt or not row.answer:
            self.leave_out("too_long" if is_long else "empty")
            return
        with self._lock:
            self._rows.append(row)
            self._num_bytes += row.num_bytes
            self._kept += 1
            while len(self._rows) > self._config.rows or self._num_bytes > self._config.bytes:
                self._drop("overrun")
            self._expire()

    def take(self) -> Fields:
        """Return the oldest requests, which are not kept any more, by the names of TakenRequests."""
        taken: list[_Row] = []
        with self._lock:
            self._expire()
            room = _TAKEN_TOKENS
            while self._rows and (size := self._rows[0].num_tokens + _ROW_TOKENS) <= room:
                row = self._rows.popleft()
                room -= size
                self._num_bytes -= row.num_bytes
                taken.append(row)
            return {
                "requests": [{"prompt": row.prompt.tolist(), "answer": row.answer.tolist()} for row in taken],
                "left": len(self._rows),
                "kept": self._kept,
                "left_out": dict(self._left_out),
            }

    def expire(self) -> None:
        """Drop what is too old."""
        with self._lock:
            self._timer = None
            self._expire()

    def _reason(self, asked: _AskedRequest | None, request_id: str) -> str:
        """Return why a request is left out; empty where it is not."""
        config = self._config
        if asked is None:  # none of a client's
            return "no_http"
        if asked.learn == "no":
            return "opted_out"
        if asked.learn != "yes" and config.opt_in:
            return "not_opted_in"
        if asked.learn != "yes" and not _is_sampled(request_id, config.share):
            return "not_sampled"
        if config.routes and asked.route not in config.routes:
            return "route"
        if asked.problem:
            return asked.problem
        return "model" if config.models and asked.model not in config.models else ""

    def _expire(self) -> None:
        """Drop what is too old, and come again when the oldest of the rest will be; the caller holds the lock."""
        while self._rows and self._clock() - self._rows[0].kept_s >= self._config.age_s:
            self._drop("expired")
        if self._rows and self._timed and self._timer is None:
            left_s = self._rows[0].kept_s + self._config.age_s - self._clock()
            self._timer = threading.Timer(max(0.0, left_s), self.expire)
            self._timer.daemon = True
            self._timer.start()

    def _drop(self, reason: str) -> None:
        self._num_bytes -= self._rows.popleft().num_bytes
        self._left_out[reason] += 1


def _is_sampled(request_id: str, share: float) -> bool:
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64
