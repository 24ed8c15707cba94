"""Failures of workers: which failure is the root of those that follow from it, and what a run does about it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_core.errors import HostLost, PeerLost, RunError, SpecError, UsageError
from spec_core.launcher import WorkerEnded, WorkerMessage
from spec_trainer.controller.protocol import Failed, from_json

if TYPE_CHECKING:
    from spec_core.launcher import Launcher

_ROOT_CAUSE_S = {1: 2.0, 2: 3.0}
"""Distance of a failure -> seconds in which its cause must arrive. A worker may report a lost connection before the
kernel reports the death of the worker at its other end, and a driver may take seconds to let a process end."""
_SECONDARY_ERRORS = ("PeerLost", "DeadlineExceeded", "AcceleratorError")
"""Errors that another worker's failure may cause. torch raises the last one in every process that shares a device
when one of them crashes in the middle of a kernel."""


@dataclass(frozen=True)
class Failure:
    """The failure of a worker."""

    worker: str
    error: SpecError
    distance: int
    """0 for a worker that was killed or went silent, 1 for one that ended by itself or reports its own error, 2 for
    one that reports an error which another worker's failure may have caused."""


class FailureReports:
    """Recognises failures among what a launcher receives."""

    def __init__(self, launcher: Launcher) -> None:
        """Take everything that ``launcher`` receives."""
        self._launcher = launcher
        self._settled: set[str] = set()
        self._kept: deque[WorkerMessage | WorkerEnded] = deque()
        """Events that came while ``with_causes`` waited and report no failure."""

    def receive(self, deadline_s: float) -> WorkerMessage | WorkerEnded | None:
        """Return what comes next, as ``Launcher.receive`` does."""
        return self._kept.popleft() if self._kept else self._launcher.receive(deadline_s)

    def expect_end(self, worker: str) -> None:
        """Take the end of a worker as no failure from now on."""
        self._settled.add(worker)

    def failure_in(self, event: WorkerMessage | WorkerEnded) -> Failure | None:
        """Return the failure that an event reports; None for any other event."""
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
        """Take the end of a worker as a failure again: another one has its name."""
        self._settled.discard(worker)

    def with_causes(self, first: Failure) -> list[Failure]:
        """Return ``first`` and the failures that arrive soon after it, one of each worker, the root cause first.

        Of equals the first one counts. Raise RunError for what has died on a host, unless a worker was killed. What
        reports no failure comes out of ``receive`` afterwards.
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
                self._kept.append(event)
        of_worker: dict[str, Failure] = {}
        for failure in sorted(failures, key=lambda failure: failure.distance):
            of_worker.setdefault(failure.worker, failure)
        return list(of_worker.values())
