"""StateCopies copies the states of each step from the device to StateRows; no step waits for a copy.

Shapes: T rows of a step, N captured layers, H hidden size.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_kit.live_traffic.served_states import StatesRange
from spec_kit.live_traffic.state_rows import StateRows

log = logging.getLogger(__name__)

_MOST_PENDING = 8
"""Maximum number of steps whose rows are being copied from the device at the same time. The rows of further
steps are left out."""


@dataclass(frozen=True)
class StepBatch:
    """Rows of a step, request after request. Padding rows, which CUDA graphs need, may follow them."""

    keys: Sequence[str]
    """Key of each request; an empty string for a request that is not captured."""
    lengths: Sequence[int]
    """Number of rows of each request."""
    positions: Tensor
    """Position of each row, on the device. Positions on the host may be ahead of the accepted tokens."""
    token_ids: Tensor
    """Token of each row, on the device. The host does not know sampled tokens and guesses yet."""


class StateCopies:
    """Copies of steps on their way to ``rows``. Only one thread may call it."""

    def __init__(self, rows: StateRows) -> None:
        """Write the copies to ``rows``."""
        self.rows = rows
        self._pending: deque[_Step] = deque()
        self._ending: list[str] = []
        """Keys of requests that have ended, some of whose rows are not written yet."""
        self._logged: set[str] = set()

    def add(self, batch: StepBatch, states: Sequence[Tensor]) -> None:
        """Begin to copy the rows of a step; leave its requests out if too many copies are incomplete.

        This is called on the stream of the forward pass, before later work overwrites the states.
        ``states``: [T, H] for each captured layer.
        """
        self.write_arrived()
        spans = list(_spans(self.rows, batch))
        if spans and len(self._pending) >= _MOST_PENDING:
            self.rows.leave_out([span.key for span in spans], "slow_copy")
        elif spans:
            self._pending.append(_copied(spans, batch, states))

    def end(self, key: str) -> None:
        """End a request in ``rows`` as soon as all of its rows are written."""
        self._ending.append(key)
        self._end_written()

    def fail(self, keys: Iterable[str], failure: str) -> None:
        """Leave out requests after an exception; log its trace if it is the first one that ``failure`` names.

        Other exceptions may follow in every step, and would fill the log.
        """
        self.rows.leave_out(keys, "error")
        if failure not in self._logged:
            self._logged.add(failure)
            log.exception(
                "%s; from now on, such requests are counted as left out (error) in silence", failure
            )

    def answer(self, asked: str) -> dict[str, Any]:
        """Return the layout of states, or a piece of a request's states, or why they are left out.

        ``asked``: a StatesRange as JSON, or an empty string for the layout.
        """
        if not asked:
            return self.rows.layout()
        piece = StatesRange.decode(asked)
        self.write_arrived(is_late=not self.rows.has_ended(piece.key))
        return self.rows.read(piece)

    def write_arrived(self, is_late: bool = False) -> None:
        """Write the rows of steps whose copies are complete, in order.

        ``is_late``: whether to wait for copies that are not complete.
        """
        while self._pending:
            ready = self._pending[0].ready
            if ready is not None and not ready.query():
                if not is_late:
                    break
                ready.synchronize()
            self._pending.popleft().write(self.rows)
        self._end_written()

    def _end_written(self) -> None:
        if not self._ending:
            return
        unwritten = {span.key for step in self._pending for span in step.spans}
        for key in self._ending:
            if key not in unwritten:
                self.rows.end(key)
        self._ending = [key for key in self._ending if key in unwritten]


@dataclass(frozen=True)
class _Span:
    """A range of rows of one request in a step's batch."""

    key: str
    start: int
    stop: int


@dataclass(frozen=True)
class _Step:
    """Copies of a step's rows on the host, which may not be complete yet."""

    spans: list[_Span]
    inputs: Tensor
    """int64 [2, T]: positions and token ids of the whole batch."""
    hidden_TNH: Tensor
    """The rows of all spans, one after the other."""
    ready: torch.Event | None
    """Event that follows the copy on its stream; None on a CPU."""

    def write(self, rows: StateRows) -> None:
        """Write the rows of each request; leave a request out whose rows are not at consecutive positions."""
        positions, token_ids = self.inputs.tolist()
        start = 0
        for span in self.spans:
            stop = start + span.stop - span.start
            first = positions[span.start]
            ids = token_ids[span.start : span.stop]
            # In a tree of guesses, two guesses have the same position.
            if positions[span.start : span.stop] == list(range(first, first + len(ids))):
                rows.write(span.key, first, ids, self.hidden_TNH[start:stop])
            else:
                rows.leave_out([span.key], "error")
            start = stop


def _copied(spans: list[_Span], batch: StepBatch, states: Sequence[Tensor]) -> _Step:
    """Begin to copy the rows of ``spans`` to the host, without waiting for the device."""
    stop = spans[-1].stop
    inputs = torch.stack([part[:stop].to(torch.int64) for part in (batch.positions, batch.token_ids)])
    parts = [torch.stack([part[first:last] for part in states], 1) for first, last in _runs(spans)]
    hidden_TNH = parts[0] if len(parts) == 1 else torch.cat(parts)
    ready = None
    if not hidden_TNH.is_cpu:
        device = hidden_TNH.device
        # Without ``non_blocking`` this thread would wait; with it, host memory is pinned.
        hidden_TNH, inputs = (one.to(device="cpu", non_blocking=True) for one in (hidden_TNH, inputs))
        ready = torch.Event(device)
        ready.record()
    return _Step(spans, inputs, hidden_TNH, ready)


def _spans(rows: StateRows, batch: StepBatch) -> Iterator[_Span]:
    """Yield the rows of a step that must be captured, in the order of the batch."""
    start = 0
    for key, length in zip(batch.keys, batch.lengths, strict=True):
        if length and rows.wants(key):
            yield _Span(key, start, start + length)
        start += length


def _runs(spans: list[_Span]) -> list[tuple[int, int]]:
    """Return the rows of spans as few ranges, in which adjacent spans are merged."""
    runs: list[tuple[int, int]] = []
    for span in spans:
        first = runs.pop()[0] if runs and runs[-1][1] == span.start else span.start
        runs.append((first, span.stop))
    return runs
