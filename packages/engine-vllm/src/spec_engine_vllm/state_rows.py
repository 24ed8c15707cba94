"""StateRows: states of requests in a fixed amount of host memory, written by position as the target computes them.

A verify step computes rows of guesses. A rejected guess leaves a wrong row, and the next step of the request starts
at the position of the first wrong token. So it overwrites the row. Rows are right if each step started where an
earlier step had ended, or before, and if the token of each row is the final token at its position.

Shapes: T rows of a step, N captured layers, H hidden size.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from spec_kit.hosting import MOST_STATE_ROWS, StatesLayout, piece_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from spec_core.records import FeatureSchema
    from spec_kit.hosting import Fields, StatesRange

STATES_ARGUMENT = "spec_states"
"""Key of vLLM's ``SamplingParams.extra_args``: the name under which a request's states are captured."""
PAGE_ROWS = 32
"""Rows that are given to a request at once."""
_MOST_ENDED = 4096
"""Most ended requests that are known, those without rows included."""


@dataclass(eq=False)
class _Request:
    """The rows of one request."""

    key: str
    pages: list[int] = field(default_factory=list[int])
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    """The token of each row."""
    end: int = 0
    """Position after the last row of the latest step."""
    problem: str = ""
    """The cause for which the request is left out; empty if it is not."""
    ended_s: float | None = None
    """Time at which the request ended; None while the target runs it."""


class StateRows:
    """Rows of states of the requests that are captured. Calls come from one thread."""

    def __init__(
        self,
        schema: FeatureSchema,
        num_bytes: int,
        age_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Allocate at most ``num_bytes``; drop requests that ended more than ``age_s`` ago."""
        self._schema, self._age_s, self._clock = schema, age_s, clock
        num_pages = num_bytes // (PAGE_ROWS * schema.bytes_per_token())
        shape = schema.shape(num_pages * PAGE_ROWS)
        # Its pages are touched here, once: a step that touched new ones would take several times as long.
        rows = torch.empty(shape, dtype=schema.torch_dtype(), device="cpu").fill_(0)
        self._bytes = rows.view(torch.uint8).flatten(1).numpy()
        """uint8 [rows, bytes of a row]. NumPy copies a few rows in a fraction of the time that torch takes."""
        self._free = list(range(num_pages))
        self._running: dict[str, _Request] = {}
        """vLLM's id -> request that the target runs."""
        self._ended: dict[str, _Request] = {}
        """Key -> request that has ended, oldest first."""
        self._by_key: dict[str, _Request] = {}

    @property
    def num_free(self) -> int:
        """Number of rows that no request has."""
        return len(self._free) * PAGE_ROWS

    def begin(self, request_id: str, key: str) -> None:
        """Capture a request from now on, unless another one has its key."""
        if request_id in self._running:  # a session that goes on with further input
            self._leave_out(self._running[request_id], "session")
            return
        if key in self._by_key:
            return
        self._running[request_id] = self._by_key[key] = _Request(key)

    def has(self, request_id: str) -> bool:
        """Return whether a request runs that was begun, whether it is left out or not."""
        return request_id in self._running

    def wants(self, request_id: str) -> bool:
        """Return whether the rows of this request's next step are to be written."""
        request = self._running.get(request_id)
        return request is not None and not request.problem

    def write(self, request_id: str, first: int, token_ids: Sequence[int], hidden_TNH: Tensor) -> None:
        """Write the rows of a step, whose first token is at position ``first``, over earlier ones."""
        request = self._running.get(request_id)
        if request is None or request.problem:
            return
        if first > request.end:
            self._leave_out(request, "hole" if request.end else "prefix_hit")
            return
        stop = first + len(token_ids)
        if problem := self._reserve(request, stop):
            self._leave_out(request, problem)
            return
        rows, done = hidden_TNH.view(torch.uint8).flatten(1).numpy(), 0
        for place in self._places(request, first, stop):
            self._bytes[place.start : place.stop] = rows[done : done + len(place)]
            done += len(place)
        request.token_ids[first:stop] = array("i", token_ids)
        request.end = stop

    def leave_out(self, request_ids: Sequence[str], cause: str) -> None:
        """Leave out requests, because rows of a step are missing."""
        for request_id in request_ids:
            if (request := self._running.get(request_id)) is not None and not request.problem:
                self._leave_out(request, cause)

    def end(self, request_id: str) -> None:
        """Keep the rows of a request that has ended or was aborted, until they are read or others need the memory."""
        if (request := self._running.pop(request_id, None)) is not None:
            request.ended_s = self._clock()
            self._ended[request.key] = request
            if len(self._ended) > _MOST_ENDED:
                self._drop_oldest()

    def read(self, asked: StatesRange) -> Fields:
        """Return ``piece``, the bytes of some rows from ``asked.first`` on, or ``left_out``, the cause.

        The request is dropped with its last row.
        """
        self.expire()
        request = self._by_key.get(asked.key)
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
        """Drop requests that ended too long ago."""
        while self._ended:
            ended_s = next(iter(self._ended.values())).ended_s
            if ended_s is None or self._clock() - ended_s < self._age_s:
                return
            self._drop_oldest()

    def layout(self) -> Fields:
        """Return the fields of the StatesLayout."""
        return StatesLayout.of(self._schema).model_dump()

    def _reserve(self, request: _Request, stop: int) -> str:
        """Give the request memory for rows up to ``stop``; return why there is none, or an empty string."""
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
        """Return where in memory the rows from ``first`` to ``stop`` are: one range for each page."""
        places = list[range]()
        while first < stop:
            page, row = divmod(first, PAGE_ROWS)
            num, place = min(PAGE_ROWS - row, stop - first), request.pages[page] * PAGE_ROWS + row
            places.append(range(place, place + num))
            first += num
        return places

    def _leave_out(self, request: _Request, cause: str) -> None:
        request.problem = cause
        self._free.extend(request.pages)
        request.pages, request.token_ids = [], array("i")

    def _drop_oldest(self) -> None:
        self._drop(next(iter(self._ended.values())))

    def _drop(self, request: _Request | None) -> None:
        """Forget an ended request; a running one, which a client must not have asked for, is only left out."""
        if request is None:
            return
        self._leave_out(request, request.problem or "states_dropped")
        if self._ended.pop(request.key, None) is not None:
            del self._by_key[request.key]


def marked(extra_args: Any) -> str | None:
    """Return the key under which a request is to be captured; None if it is not."""
    key = (extra_args or {}).get(STATES_ARGUMENT)
    return key if isinstance(key, str) else None
