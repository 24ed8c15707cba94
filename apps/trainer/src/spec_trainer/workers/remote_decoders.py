"""RemoteDecoders is the controller's interface to the decoders, worker processes that answer prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from spec_core.records import AcceptanceCounters, Generation
from spec_trainer.base.stop_request import StopRequest
from spec_trainer.workers.decoder import interrupted_decoding, portions
from spec_trainer.workers.passes import Pass
from spec_trainer.workers.protocol import Generate, Generated, Serve
from spec_trainer.workers.workers import Workers


class RemoteDecoders:
    """The decoders of a run. All serve the same draft, and each answers portions of prompts."""

    def __init__(self, workers: Workers, stop: StopRequest) -> None:
        """Prepare to decode with the workers whose names are later put into ``names``.

        ``stop``: the user's request to stop.
        """
        self.names: list[str] = []
        """Names of the workers that decode."""
        self._workers = workers
        self._stop = stop
        self._portion_of: dict[str, int] = {}
        """Worker that has not answered -> number of its portion."""
        self._decoded: dict[int, Pass] = {}
        """Number of a portion -> its answers."""

    def serve(self, version: int, folder: Path) -> None:
        """Let every decoder serve the draft in ``folder`` as ``version``, and wait until all serve it."""
        for name in self.names:
            self._send(name, 0, Serve(version, str(folder)))
        self._workers.until(lambda: not self._portion_of)

    def answer(self, prompts: Sequence[Sequence[int]], seed: int) -> Pass:
        """Answer prompts, in portions, on whichever workers are free.

        If a stop is requested, finish the portions in progress and raise Interrupted.
        """
        self._decoded = {}
        left = deque(enumerate(portions(prompts, seed)))
        while left:
            self._workers.until(lambda: len(self._portion_of) < len(self.names))
            if self._stop.requested:
                break
            free = next(name for name in self.names if name not in self._portion_of)
            number, portion = left.popleft()
            self._send(free, number, Generate(portion.prompts, portion.seed))
        self._workers.until(lambda: not self._portion_of)
        if left:
            raise interrupted_decoding()
        return Pass.of([self._decoded[number] for number in sorted(self._decoded)])

    def served(self, worker: str) -> None:
        """Handle the message Served of a worker: it serves the new draft."""
        del self._portion_of[worker]

    def generated(self, worker: str, message: Generated) -> None:
        """Store the answers that a worker has sent for its portion of the prompts."""
        self._decoded[self._portion_of.pop(worker)] = Pass(
            answers=[
                Generation(
                    token_ids=tuple(token_ids),
                    guess_depths=tuple(guess_depths),
                    verifications=tuple(accepted),
                )
                for token_ids, guess_depths, accepted in message.answers
            ],
            seconds=message.seconds,
            counters=_counters(message),
        )

    def _send(self, worker: str, portion: int, message: Serve | Generate) -> None:
        self._portion_of[worker] = portion
        self._workers.send(worker, message)


def _counters(message: Generated) -> AcceptanceCounters:
    positions = tuple(message.counters["accepted_per_position"])
    return AcceptanceCounters(**{**message.counters, "accepted_per_position": positions})
