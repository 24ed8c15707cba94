"""RemoteEngine is the controller's interface to an engine worker."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress

from spec_core.errors import DeadlineExceeded
from spec_trainer.run.dispatch import SampleReference
from spec_trainer.workers.protocol import Capture, ControlMessage
from spec_trainer.workers.workers import Workers


class RemoteEngine:
    """Sends the ids and destinations of samples to an engine worker, which captures them."""

    def __init__(self, name: str, workers: Workers) -> None:
        """``name``: the engine worker to which messages are sent, through ``workers``."""
        self._name = name
        self._workers = workers
        self._running: dict[int, Future[None]] = {}
        self._next_batch = 0

    def capture(self, samples: Sequence[SampleReference]) -> Future[None]:
        """Send a batch of samples to the engine; the future is done when the engine has captured them."""
        done = self._running[self._next_batch] = Future[None]()
        wanted = [(sample.request_id, sample.sample_id, list(sample.destinations)) for sample in samples]
        self.send(Capture(self._next_batch, wanted))
        self._next_batch += 1
        return done

    def send(self, message: ControlMessage) -> None:
        """Send a message to the engine worker; drop it on a timeout: missing heartbeats then end the worker."""
        with suppress(DeadlineExceeded):
            self._workers.send(self._name, message)

    def expect_nothing(self) -> None:
        """Drop the futures of all batches in progress, because the engine worker has been replaced."""
        self._running.clear()

    def captured(self, batch: int) -> None:
        """Complete the future of a batch, because the engine has captured it."""
        self._running.pop(batch).set_result(None)
