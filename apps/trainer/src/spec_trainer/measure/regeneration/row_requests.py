"""RowRequests hands the turns of many rows to an engine, and collects the answers of each row."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spec_core.records import GenerationRequest
from spec_trainer.workers.passes import pass_seed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from spec_core.records import Generation
    from spec_trainer.measure.regeneration.conversation import Conversation


@dataclass
class RowInProgress:
    """A row of the data, its index in the data, and its conversation so far."""

    number: int
    content: Mapping[str, Any]
    conversation: Conversation
    turn: int = 0
    """Number of answered turns."""


class RowRequests:
    """Requests for the next turn of each row; the first turns of few rows are read ahead."""

    def __init__(self, rows: Iterator[RowInProgress], seed: int | None) -> None:
        """Ask the turns of ``rows``, which is read as the engine takes requests."""
        self._rows = rows
        self._seed = seed
        self._next_turns: deque[RowInProgress] = deque()
        self._asked: dict[GenerationRequest, RowInProgress] = {}

    def next_request(self) -> GenerationRequest | None:
        """Return a request for the next turn of a row in progress, or else for a new row; None if there is none.

        A seed of an answer depends on its row and turn, and not on the order of answers.
        """
        row = self._next_turns.popleft() if self._next_turns else next(self._rows, None)
        if row is None:
            return None
        seed = None if self._seed is None else pass_seed(self._seed, row.number, row.turn)
        request = GenerationRequest(prompt=row.conversation.prompt, seed=seed)
        self._asked[request] = row
        return request

    def take(
        self, request: GenerationRequest, answer: Generation, max_new_tokens: int
    ) -> RowInProgress | None:
        """Store an answer of at most ``max_new_tokens``; return its row if this was the row's last turn."""
        row = self._asked.pop(request)
        row.conversation.take(answer.token_ids, max_new_tokens)
        row.turn += 1
        if not row.conversation.prompt:
            return row
        self._next_turns.append(row)
        return None
