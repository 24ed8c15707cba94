"""LiveRequests stores token ids of a server's finished requests, to train its draft on its traffic.

Requests are stored only if the server's environment variable ``SPEC_LIVE_REQUESTS`` enables this. They are stored in
memory of the server's frontend until they are taken, never on disk or in a log. Their number, bytes and age are
bounded. An error here is counted, and never affects a request.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import pydantic

from spec_core import Config
from spec_core.config import Seconds
from spec_core.errors import ConfigError
from spec_core.validation import validate
from spec_core.wire_record import WireRecord
from spec_kit.live_traffic.served_states import MOST_STATE_ROWS, LeftOutReason, StatesKey

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]

LIVE_REQUESTS_VARIABLE = "SPEC_LIVE_REQUESTS"
"""Environment variable of a server: the fields of LiveRequestsConfig as JSON. If unset, nothing is stored."""
LEARN_HEADER = "x-draft-learn"
"""Header of a request: ``yes`` stores it regardless of ``share``; any other value prevents its storage."""
LABEL_HEADER = b"x-draft-label"
"""Header of a request: one of the labels of the configuration, by which acceptance is reported."""
OTHER_LABEL = "other"
"""Label of requests whose header or path the configuration does not know."""
_LABELLED_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/inference/v1/generate",
    "/generate",
)
"""Paths that label a request without the header; the paths in the configuration's ``routes`` do so, too."""
_LONGEST_BODY = 1 << 18
"""Largest body of a request, in bytes, that is parsed."""
_TAKEN_TOKENS = 24_576
"""Largest number of tokens of one ``take``. Written as ids of seven digits with commas, they fit the largest response
that a client reads."""
_ROW_TOKENS = 18
"""Size of the field names, the label and the key of one request in a response, in tokens."""
_TOKEN_BYTES = 4


Label = Annotated[str, pydantic.Field(pattern=r"^[A-Za-z0-9/][A-Za-z0-9/._-]{0,63}$")]
"""A label of requests: up to 64 letters, digits and ``/._-``, so that it fits every page, plot and file."""
_LABEL: pydantic.TypeAdapter[str] = pydantic.TypeAdapter(Label)


class LiveRequestsConfig(Config):
    """Fields of the JSON object in the environment variable ``SPEC_LIVE_REQUESTS``."""

    share: Annotated[float, pydantic.Field(gt=0, le=1)]
    """Share of the requests that is stored; a hash of the request's id decides."""
    opt_in: bool = False
    """Store only requests that have the header ``x-draft-learn: yes``."""
    models: list[str] = pydantic.Field(default_factory=list)
    """Store only requests whose field ``model`` is in this list; an empty list means all. Requests to an adapter are
    never stored."""
    routes: list[str] = pydantic.Field(default_factory=list)
    """Store only requests to these paths, such as /v1/chat/completions; an empty list means all."""
    labels: Annotated[list[Label], pydantic.Field(max_length=16)] = pydantic.Field(default_factory=list)
    """Values of the header ``x-draft-label`` that are kept with a request; any other value becomes ``other``."""
    rows: Annotated[int, pydantic.Field(ge=1)] = 1024
    """Largest number of stored requests; the oldest is dropped first."""
    bytes: Annotated[int, pydantic.Field(ge=1)] = 64 << 20
    """Largest number of bytes of stored token ids, four for each token."""
    age_s: Seconds = 600.0
    """Longest time in seconds for which a request is stored."""
    states_bytes: Annotated[int, pydantic.Field(ge=0)] = 0
    """Bytes of host memory for hidden states that the server captures as it serves requests; 0 captures none."""

    @classmethod
    def from_environment(cls) -> LiveRequestsConfig | None:
        """Return the configuration that ``SPEC_LIVE_REQUESTS`` holds, or None if it is unset.

        Raise ConfigError for an invalid value.
        """
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
        return validate(cls, values, f"environment variable {LIVE_REQUESTS_VARIABLE}")


Token = Annotated[int, pydantic.Field(ge=0, lt=1 << 31)]


class LiveRequest(WireRecord):
    """Token ids of one finished request."""

    prompt: Annotated[list[Token], pydantic.Field(min_length=1)]
    answer: Annotated[list[Token], pydantic.Field(min_length=1)]
    label: Label = OTHER_LABEL
    """Label of the request, by which acceptance is reported; never text that a client chose freely."""
    states: StatesKey | None = None
    """Name of the request's states at its server; None if the server captures none."""


class TakenRequests(WireRecord):
    """Requests that a server returns and deletes, and its counts since it started."""

    requests: list[LiveRequest]
    left: Annotated[int, pydantic.Field(ge=0)]
    """Number of requests that are still stored."""
    stored: Annotated[int, pydantic.Field(ge=0)]
    left_out: dict[LeftOutReason, Annotated[int, pydantic.Field(ge=0, lt=1 << 53)]]
    """Reason -> number of requests that were not stored, or were dropped before they were taken."""


@dataclass
class _AskedRequest:
    """A request as it arrived by HTTP."""

    route: str
    learns: bool | None
    """Answer of the header ``x-draft-learn``; None if the request has none."""
    label: str
    """Label under which the request is reported."""
    body: bytearray = field(default_factory=bytearray)
    is_long: bool = False

    def note(self, part: bytes) -> None:
        """Append a chunk of the body, unless the body becomes too long to be parsed."""
        self.is_long = self.is_long or len(self.body) + len(part) > _LONGEST_BODY
        if not self.is_long:
            self.body += part

    @cached_property
    def problem(self) -> str:
        """Return why the request must not be stored according to its body; empty if it may be."""
        if self.is_long:
            return "too_long"
        try:
            fields = json.loads(self.body)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            return "unreadable"
        self.model = fields.get("model")
        store = fields.get("store")
        if store is not None and store is not True:  # "false" and 0, too: only a clear yes is one
            return "store_false"
        return "cache_salt" if fields.get("cache_salt") is not None else ""

    model: object = None
    """Name of the model in the body; set by ``problem``."""


_ASKED: ContextVar[_AskedRequest | None] = ContextVar("asked", default=None)
"""The HTTP request that the current asyncio task of the server answers."""


class _Row(NamedTuple):
    stored_s: float
    prompt: array[int]
    answer: array[int]
    label: str
    states: str | None

    @property
    def num_bytes(self) -> int:
        return _TOKEN_BYTES * self.num_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.answer)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a LiveRequest."""
        fields = {"prompt": self.prompt.tolist(), "answer": self.answer.tolist(), "label": self.label}
        return fields if self.states is None else {**fields, "states": self.states}


class LiveRequests:
    """Stores requests until they are taken; any thread may call it."""

    def __init__(
        self, config: LiveRequestsConfig, clock: Callable[[], float] = time.monotonic, timed: bool = True
    ) -> None:
        """Store requests as ``config`` says. If ``timed``, a timer drops requests that are too old."""
        self._config = config
        self._clock = clock
        self._timed = timed
        self._paths = {*_LABELLED_PATHS, *filter(is_label, config.routes)}
        self._lock = threading.Lock()
        self._rows: deque[_Row] = deque()
        self._num_bytes = self._stored = 0
        self._left_out: Counter[str] = Counter()
        self._timer: threading.Timer | None = None

    @classmethod
    def from_environment(cls) -> LiveRequests | None:
        """Return an instance configured by ``SPEC_LIVE_REQUESTS``, or None if it is unset.

        Raise ConfigError for an invalid value.
        """
        config = LiveRequestsConfig.from_environment()
        return None if config is None else cls(config)

    @property
    def captures_states(self) -> bool:
        """Whether the server is to capture the states of the requests that are stored."""
        return self._config.states_bytes > 0

    def begin(self, scope: Message, receive: Receive) -> Receive:
        """Record an ASGI request for a later ``admits`` in the same task; return a wrapped ``receive``."""
        headers = dict(scope["headers"])
        path = route_of(scope)
        label = self._label(path, headers.get(LABEL_HEADER))
        asked = _AskedRequest(path, _learns(scope["headers"]), label)
        _ASKED.set(asked)

        async def noting() -> Message:
            message = await receive()
            asked.note(message.get("body", b""))
            return message

        return noting

    def admits(self, request_id: str) -> bool:
        """Return whether to store the request that the current asyncio task answers; if not, count the reason.

        Only the body of a sampled request is parsed.
        """
        reason = self._reason(_ASKED.get(), request_id)
        if reason:
            self.leave_out(reason)
        return not reason

    @property
    def label(self) -> str:
        """Label of the request that the current asyncio task answers; acceptance is reported by label."""
        asked = _ASKED.get()
        return OTHER_LABEL if asked is None else asked.label

    def leave_out(self, reason: str) -> None:
        """Count a request that is not stored, by the reason."""
        with self._lock:
            self._left_out[reason] += 1

    @contextmanager
    def guarded(self) -> Generator[None]:
        """Suppress and count any exception of the ``with`` block."""
        try:
            yield
        except Exception:  # noqa: BLE001 (whatever it is, the request is answered; a message could quote it)
            self.leave_out("error")

    def add(
        self,
        prompt: Iterable[int],
        answer: Iterable[int],
        label: str = OTHER_LABEL,
        states: str | None = None,
    ) -> None:
        """Store a finished request; drop the oldest beyond a limit. ``states``: key of its captured states."""
        row = _Row(self._clock(), array("i", prompt), array("i", answer), label, states)
        is_long = row.num_tokens > MOST_STATE_ROWS or row.num_bytes > self._config.bytes
        if is_long or not row.prompt or not row.answer:
            self.leave_out("too_long" if is_long else "empty")
            return
        with self._lock:
            self._rows.append(row)
            self._num_bytes += row.num_bytes
            self._stored += 1
            while len(self._rows) > self._config.rows or self._num_bytes > self._config.bytes:
                self._drop("overrun")
            self._expire()

    def take(self) -> dict[str, Any]:
        """Remove the oldest requests, and return the fields of a TakenRequests with them."""
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
                "requests": [row.fields for row in taken],
                "left": len(self._rows),
                "stored": self._stored,
                "left_out": dict(self._left_out),
            }

    def expire(self) -> None:
        """Drop requests that are too old."""
        with self._lock:
            self._timer = None
            self._expire()

    def _reason(self, asked: _AskedRequest | None, request_id: str) -> str:
        """Return why a request is not stored; empty if it is stored."""
        config = self._config
        if asked is None:  # no client has sent this request
            return "no_http"
        if asked.learns is False:
            return "opted_out"
        if not asked.learns and config.opt_in:
            return "not_opted_in"
        if not asked.learns and not _is_sampled(request_id, config.share):
            return "not_sampled"
        if config.routes and asked.route not in config.routes:
            return "route"
        if asked.problem:
            return asked.problem
        return "model" if config.models and asked.model not in config.models else ""

    def _label(self, path: str, header: bytes | None) -> str:
        """Return one of the labels that the configuration knows, or OTHER_LABEL: never a client's own text."""
        if header is None:
            return path if path in self._paths else OTHER_LABEL
        claimed = header.decode("latin-1").strip()
        return claimed if claimed in self._config.labels else OTHER_LABEL

    def _expire(self) -> None:
        """Drop requests that are too old, and set a timer for the next one. The caller holds the lock."""
        while self._rows and self._clock() - self._rows[0].stored_s >= self._config.age_s:
            self._drop("expired")
        if self._rows and self._timed and self._timer is None:
            left_s = self._rows[0].stored_s + self._config.age_s - self._clock()
            self._timer = threading.Timer(max(0.0, left_s), self.expire)
            self._timer.daemon = True
            self._timer.start()

    def _drop(self, reason: str) -> None:
        self._num_bytes -= self._rows.popleft().num_bytes
        self._left_out[reason] += 1


def route_of(scope: Message) -> str:
    """Return the path of an ASGI request without the prefix by which a proxy reaches the server (``root_path``)."""
    path = scope["path"]
    prefix = scope.get("root_path", "").rstrip("/")
    return path[len(prefix) :] if path.startswith(f"{prefix}/") else path


def _learns(headers: Iterable[tuple[bytes, bytes]]) -> bool | None:
    """Return what ``x-draft-learn`` says, or None without the header.

    A client and a proxy may both send it. Whatever is not ``yes`` is a no, and one no is enough.
    """
    lines = [value.decode("latin-1") for name, value in headers if name == LEARN_HEADER.encode()]
    values = {value.strip(" \t").lower() for line in lines for value in line.split(",")}
    return values == {"yes"} if lines else None


def _is_sampled(request_id: str, share: float) -> bool:
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def is_label(text: str) -> bool:
    """Return whether a text has the form of a label."""
    try:
        return bool(_LABEL.validate_python(text))
    except pydantic.ValidationError:
        return False
