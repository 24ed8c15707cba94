"""Detect failures of workers, and find the root cause among failures that arrive together."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from spec_core import Launcher, WorkerEnded, WorkerMessage
from spec_core.errors import HostLost, PeerLost, RunError, SpecError, UsageError
from spec_trainer.workers.protocol import Failed, from_json

_ROOT_CAUSE_S = {1: 2.0, 2: 3.0}
"""``Failure.distance`` -> seconds to wait for the failure's cause. A worker may report a lost connection before the
kernel reports the death of its peer, and a GPU driver may take seconds to let a process exit."""
_SECONDARY_ERRORS = ("PeerLost", "DeadlineExceeded", "AcceleratorError")
"""Names of errors that another worker's failure may cause. torch raises AcceleratorError in every process that shares
a device when one of them crashes during a kernel."""


@dataclass(frozen=True)
class Failure:
    """A failed worker, its error, and how likely the error is the root cause."""

    worker: str
    error: SpecError
    distance: int
    """Distance from the root cause. 0: the worker was killed or went silent. 1: it exited or reports an error of its
    own. 2: it reports an error that another worker's failure may have caused."""


class FailureReports:
    """Finds failures among the messages and process exits that a launcher receives."""

    def __init__(self, launcher: Launcher) -> None:
        """Create the object that receives all events of ``launcher``."""
        self._launcher = launcher
        self._settled: set[str] = set()
        self._delayed: deque[WorkerMessage | WorkerEnded] = deque()
        """Events without a failure that arrived while ``with_causes`` waited."""

    def receive(self, deadline_s: float) -> WorkerMessage | WorkerEnded | None:
        """Return the next event of a worker.

        Return None at ``deadline_s`` (``time.monotonic``), or earlier if the launcher is woken.
        """
        return self._delayed.popleft() if self._delayed else self._launcher.receive(deadline_s)

    def expect_end(self, worker: str) -> None:
        """Treat the exit of a worker as expected, not as a failure, from now on."""
        self._settled.add(worker)

    def failure_in(self, event: WorkerMessage | WorkerEnded) -> Failure | None:
        """Return the failure that an event reports, or None."""
        name = event.worker.name
        if isinstance(event, WorkerEnded):
            if name in self._settled:
                return None
            error_type = HostLost if event.host_lost else PeerLost
            return Failure(name, error_type(f"{name} {event.how}"), 0 if event.killed else 1)
        if event.message["kind"] != Failed.__name__:
            return None
        report = from_json(event.message)
        assert isinstance(report, Failed)
        self._settled.add(name)
        if report.usage:
            return Failure(name, UsageError(report.message), 1)
        error = RunError(f"{name}: {report.error}: {report.message}")
        return Failure(name, error, 2 if report.error in _SECONDARY_ERRORS else 1)

    def replaced(self, worker: str) -> None:
        """Treat the exit of a worker as a failure again, because a replacement now has its name."""
        self._settled.discard(worker)

    def with_causes(self, first: Failure) -> list[Failure]:
        """Return ``first`` and the failures that arrive soon after it, the root cause first.

        There is at most one failure per worker; among failures with equal ``distance`` the earliest comes
        first. If no worker was killed, raise RunError if the launcher finds that a daemon which it started on
        a host has died. Other events that arrive meanwhile are returned by ``receive`` later.
        """
        failures = [first]
        deadline = time.monotonic() + _ROOT_CAUSE_S.get(first.distance, 0.0)
        while failures[-1].distance > 0:
            event = self._launcher.receive(deadline)
            if event is None:
                if time.monotonic() < deadline:
                    continue
                self._launcher.check_hosts()
                break
            if (failure := self.failure_in(event)) is not None:
                failures.append(failure)
            else:
                self._delayed.append(event)
        of_worker: dict[str, Failure] = {}
        for failure in sorted(failures, key=lambda failure: failure.distance):
            of_worker.setdefault(failure.worker, failure)
        return list(of_worker.values())
