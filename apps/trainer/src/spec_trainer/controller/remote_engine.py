"""RemoteEngine: the controller's end of an engine worker."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

from spec_core.errors import DeadlineExceeded
from spec_trainer.controller.protocol import Capture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spec_core.launcher import WorkerHandle
    from spec_trainer.run.dispatch import SampleReference


class RemoteEngine:
    """A Capturer for the dispatcher: sends references, and completes when the engine reports a batch."""

    def __init__(self, worker: WorkerHandle) -> None:
        """Send captures to ``worker``, an engine worker of the run."""
        self._worker = worker
        self._running: dict[int, Future[None]] = {}
        self._next_batch = 0

    def capture(self, samples: Sequence[SampleReference]) -> Future[None]:
        """Send a batch to the engine; the future is done when the engine reports it captured."""
        done = self._running[self._next_batch] = Future[None]()
        references = [(sample.request_id, sample.sample_id, list(sample.destinations)) for sample in samples]
        with suppress(DeadlineExceeded):  # it is stopped: its silence ends it for the run
            self._worker.send(Capture(self._next_batch, references).to_json())
        self._next_batch += 1
        return done

    def replace(self, worker: WorkerHandle) -> None:
        """Send captures to another worker from now on, and expect nothing of the one before."""
        self._worker = worker
        self._running.clear()

    def captured(self, batch: int) -> None:
        """Finish the future of a batch."""
        self._running.pop(batch).set_result(None)
