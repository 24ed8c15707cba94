"""RemoteDecoders: the controller's end of the workers that decode."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from spec_core.records import AcceptanceCounters, Generation
from spec_trainer.controller.protocol import Generate, Generated, Serve
from spec_trainer.decode.decoder import interrupted_decoding, portions
from spec_trainer.decode.passes import Pass

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from spec_trainer.command_line.stop_request import StopRequest
    from spec_trainer.controller.workers import Workers


class RemoteDecoders:
    """One worker or several that decode: each serves every draft, and takes the next portion when it is free."""

    def __init__(self, workers: Workers, stop: StopRequest) -> None:
        """Decode by some of ``workers`` until ``stop`` is requested."""
        self.names: list[str] = []
        """The workers that decode."""
        self._workers, self._stop = workers, stop
        self._portion_of: dict[str, int] = {}
        """Workers that have not answered, and the number of the portion that each one has."""
        self._decoded: dict[int, Pass] = {}
        """Answers to each portion, by its number."""

    def serve(self, version: int, folder: Path) -> None:
        """Have every worker serve the draft in ``folder``, and wait for that."""
        for name in self.names:
            self._send(name, 0, Serve(version, str(folder)))
        self._workers.until(lambda: not self._portion_of)

    def answer(self, prompts: Sequence[Sequence[int]], seed: int) -> Pass:
        """Answer prompts, each portion by whoever is free; raise Interrupted once no portion is under way."""
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

    def serving(self, worker: str) -> None:
        """Note that a worker serves what it was to serve."""
        del self._portion_of[worker]

    def generated(self, worker: str, message: Generated) -> None:
        """Keep the answers of a worker."""
        self._decoded[self._portion_of.pop(worker)] = Pass(
            answers=[
                Generation(
                    token_ids=tuple(token_ids), guess_places=tuple(places), verifications=tuple(accepted)
                )
                for token_ids, places, accepted in message.answers
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
