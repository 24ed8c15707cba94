"""LiveAnswer stores a served request when its answer ends; ``passed_on`` passes answers to the client.

An engine's adapter makes a LiveAnswer for each request that ``LiveRequests.admits``, and ends it with the answer.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable

    from spec_kit.live_traffic.live_requests import LiveRequests


class LiveAnswer:
    """The answer to an admitted request, which is stored at its end, or counted by why it is not stored."""

    def __init__(self, requests: LiveRequests, states: str | None = None) -> None:
        """Begin in the task that answers the request. ``states``: name of the request's states, if captured."""
        self._requests = requests
        self._label = requests.label
        self.states = states
        self._is_over = False

    def end(self, prompt: Iterable[int], tokens: Iterable[int]) -> None:
        """Store the request: the answer has ended normally, by a stop token or its length limit."""
        self._is_over = True
        self._requests.add(prompt, tokens, self._label, self.states)

    def leave_out(self, reason: str) -> None:
        """Count the request under ``reason``, unless it was stored or counted before."""
        if not self._is_over:
            self._is_over = True
            self._requests.leave_out(reason)


async def passed_on(
    begin: Callable[[], AsyncGenerator[Any, None]],
    requests: LiveRequests,
    note: Callable[[Any], None],
    running: Iterable[LiveAnswer],
) -> AsyncGenerator[Any, None]:
    """Yield the messages that ``begin`` returns; ``note`` is called with each message beforehand.

    ``begin`` is called when the first message is asked for, in the task that asks. ``running`` has the
    answers of these messages; at the end, answers that have not ended are counted as unfinished.
    """
    try:
        async with aclosing(begin()) as messages:
            async for message in messages:
                with requests.guarded():
                    note(message)
                yield message
    finally:
        with requests.guarded():
            for answer in running:
                answer.leave_out("unfinished")
