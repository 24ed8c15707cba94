"""StateRows keeps the states of requests in a fixed amount of host memory, one row for each position.

A verification computes rows of guesses. A rejected guess leaves a wrong row. The request's next step starts
at the position of the first wrong token, and so overwrites this row. The rows of a request are right under two
conditions: its steps leave no position out, and the token of each row is the final token at its position.

Shapes: T rows of a step, N captured layers, H hidden size.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spec_core.records import FeatureSchema
from spec_kit.live_traffic.served_states import MOST_STATE_ROWS, StatesLayout, StatesRange, piece_rows

PAGE_ROWS = 32
"""Number of rows that a request gets at once."""
_MOST_ENDED = 4096
"""Maximum number of ended requests that are remembered, including requests without rows."""


@dataclass(eq=False)
class _Request:
    """The rows of one request."""

    key: str
    pages: list[int] = field(default_factory=list[int])
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    """The token of each row."""
    end: int = 0
    """Position that follows the last row of the latest step."""
    problem: str = ""
    """Why the request is left out; an empty string if it is not."""
    ended_s: float | None = None
    """Time at which the request ended, by the clock of StateRows; None while the target runs the request."""


class StateRows:
    """Rows of states of all captured requests. Only one thread may call it."""

    def __init__(
        self,
        schema: FeatureSchema,
        num_bytes: int,
        age_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Allocate at most ``num_bytes``; drop requests that ended more than ``age_s`` seconds ago."""
        self._schema = schema
        self._age_s = age_s
        self._clock = clock
        num_pages = num_bytes // (PAGE_ROWS * schema.bytes_per_token())
        shape = schema.shape(num_pages * PAGE_ROWS)
        # This touches every page once: a step that touches new pages would take several times as long.
        rows = torch.empty(shape, dtype=schema.torch_dtype(), device="cpu").fill_(0)
        self._bytes = rows.view(torch.uint8).flatten(1).numpy()
        """uint8 [rows, bytes of a row]. NumPy copies a few rows in a fraction of the time that torch takes."""
        self._free = list(range(num_pages))
        self._requests: dict[str, _Request] = {}
        """Key → request, running or ended."""
        self._ended: dict[str, _Request] = {}
        """Key → request that has ended, oldest first."""

    @property
    def num_free(self) -> int:
        """Number of rows that belong to no request."""
        return len(self._free) * PAGE_ROWS

    def begin(self, key: str) -> bool:
        """Capture the request ``key`` from now on; return False if another request has its key."""
        if key in self._requests:
            return False
        self._requests[key] = _Request(key)
        return True

    def has_ended(self, key: str) -> bool:
        """Return whether no further rows of the request ``key`` will be written."""
        request = self._requests.get(key)
        return request is None or request.ended_s is not None

    def wants(self, key: str) -> bool:
        """Return whether the rows of this request's next step must be written."""
        return self._captured(key) is not None

    def write(self, key: str, first: int, token_ids: Sequence[int], hidden_TNH: Tensor) -> None:
        """Write the rows of a step from position ``first`` on; they overwrite earlier rows."""
        request = self._captured(key)
        if request is None:
            return
        if first > request.end:
            self._leave_out(request, "hole" if request.end else "prefix_hit")
            return
        stop = first + len(token_ids)
        if problem := self._reserve(request, stop):
            self._leave_out(request, problem)
            return
        rows = hidden_TNH.view(torch.uint8).flatten(1).numpy()
        done = 0
        for place in self._places(request, first, stop):
            self._bytes[place.start : place.stop] = rows[done : done + len(place)]
            done += len(place)
        request.token_ids[first:stop] = array("i", token_ids)
        request.end = stop

    def leave_out(self, keys: Iterable[str], cause: str) -> None:
        """Leave out requests because rows of a step are missing."""
        for key in keys:
            if (request := self._captured(key)) is not None:
                self._leave_out(request, cause)

    def end(self, key: str) -> None:
        """Keep the rows of an ended or aborted request until they are read or other requests need the memory."""
        request = self._requests.get(key)
        if request is None or request.ended_s is not None:
            return
        request.ended_s = self._clock()
        self._ended[key] = request
        if len(self._ended) > _MOST_ENDED:
            self._drop_oldest()

    def read(self, asked: StatesRange) -> dict[str, Any]:
        """Return ``piece``, the bytes of some rows from ``asked.first`` on, or ``left_out``, the cause.

        The request is dropped when its last row has been read.
        """
        self.expire()
        request = self._requests.get(asked.key)
        cause = "states_dropped" if request is None else request.problem
        if request is not None and not cause and (request.end < asked.rows or asked.first >= asked.rows):
            cause = "hole"
        if request is None or cause:
            self._drop(request)
            return {"left_out": cause}
        stop = min(asked.rows, asked.first + piece_rows(self._schema))
        ids = request.token_ids[asked.first : stop].tobytes()
        places = self._places(request, asked.first, stop)
        piece = b"".join([ids, *(self._bytes[place.start : place.stop].data for place in places)])
        if stop == asked.rows:
            self._drop(request)
        return {"piece": piece}

    def expire(self) -> None:
        """Drop requests that ended more than ``age_s`` seconds ago."""
        while self._ended:
            ended_s = next(iter(self._ended.values())).ended_s
            if ended_s is None or self._clock() - ended_s < self._age_s:
                return
            self._drop_oldest()

    def layout(self) -> dict[str, Any]:
        """Return the fields of the StatesLayout."""
        return StatesLayout.of(self._schema).model_dump()

    def _captured(self, key: str) -> _Request | None:
        """Return the request ``key``; None unless it runs and is captured completely."""
        request = self._requests.get(key)
        return None if request is None or request.problem or request.ended_s is not None else request

    def _reserve(self, request: _Request, stop: int) -> str:
        """Allocate memory for the request's rows up to ``stop``.

        Return why there is no memory, or an empty string.
        """
        if stop > MOST_STATE_ROWS:
            return "too_long"
        while len(request.pages) * PAGE_ROWS < stop:
            while not self._free and self._ended:
                self._drop_oldest()
            if not self._free:
                return "no_room"
            request.pages.append(self._free.pop())
        return ""

    def _places(self, request: _Request, first: int, stop: int) -> list[range]:
        """Return where the rows from ``first`` to ``stop`` are in memory: one range for each page."""
        places = list[range]()
        while first < stop:
            page, row = divmod(first, PAGE_ROWS)
            num = min(PAGE_ROWS - row, stop - first)
            place = request.pages[page] * PAGE_ROWS + row
            places.append(range(place, place + num))
            first += num
        return places

    def _leave_out(self, request: _Request, cause: str) -> None:
        request.problem = cause
        self._free.extend(request.pages)
        request.pages = []
        request.token_ids = array("i")

    def _drop_oldest(self) -> None:
        self._drop(next(iter(self._ended.values())))

    def _drop(self, request: _Request | None) -> None:
        """Free a request's rows and mark its states as left out. Forget the request if it has ended."""
        if request is None:
            return
        self._leave_out(request, request.problem or "states_dropped")
        if self._ended.pop(request.key, None) is not None:
            del self._requests[request.key]
