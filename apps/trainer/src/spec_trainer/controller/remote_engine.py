"""RemoteEngine is the controller's interface to an engine worker."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

from spec_core.errors import DeadlineExceeded
from spec_trainer.controller.protocol import Capture, CaptureTokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spec_trainer.controller.workers import Workers
    from spec_trainer.data.dataset import Dataset
    from spec_trainer.run.dispatch import SampleReference


class RemoteEngine:
    """A Capturer that sends the ids and destinations of samples to an engine worker, which captures them."""

    def __init__(self, name: str, workers: Workers) -> None:
        """``name``: the engine worker to which ``capture`` sends its requests, through ``workers``."""
        self._name, self._workers = name, workers
        self._running: dict[int, Future[None]] = {}
        self._next_batch = 0
        self.carried: Dataset | None = None
        """Dataset whose token ids are sent with each batch; None if the engine reads them from disk."""

    def capture(self, samples: Sequence[SampleReference]) -> Future[None]:
        """Send a batch of samples to the engine; the future is done when the engine has captured them."""
        done = self._running[self._next_batch] = Future[None]()
        with suppress(DeadlineExceeded):  # it reads nothing: its silence ends it for the run
            self._workers.send(self._name, self._message(samples))
        self._next_batch += 1
        return done

    def _message(self, samples: Sequence[SampleReference]) -> Capture | CaptureTokens:
        if self.carried is None:
            return Capture(
                self._next_batch,
                [(sample.request_id, sample.sample_id, list(sample.destinations)) for sample in samples],
            )
        sample_of = self.carried.sample
        return CaptureTokens(
            self._next_batch,
            [
                (one.request_id, sample_of(one.sample_id).input_ids.tolist(), list(one.destinations))
                for one in samples
            ],
        )

    def expect_nothing(self) -> None:
        """Drop the futures of all batches in progress, because the engine worker has been replaced."""
        self._running.clear()

    def captured(self, batch: int) -> None:
        """Complete the future of a batch, because the engine has captured it."""
        self._running.pop(batch).set_result(None)
