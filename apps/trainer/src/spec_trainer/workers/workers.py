"""Workers starts, watches, replaces and stops the processes of a run, on any launcher."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Protocol

from spec_core import WorkerEnded
from spec_core.errors import DeadlineExceeded, NoDevices, RunError
from spec_trainer.workers.failures import Failure, FailureReports
from spec_trainer.workers.protocol import Begin, Ready, Stop, from_json
from spec_trainer.workers.replacements import Replacements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from spec_core import Launcher, WorkerHandle, WorkerMessage, WorkerSpec
    from spec_trainer.run.spec import RunSpec
    from spec_trainer.workers.protocol import ControlMessage

log = logging.getLogger(__name__)

_LEAVING_S = 30.0
"""Shortest time, in seconds, that idle workers get to exit; an engine first stops its own processes."""
_HOST_CHECK_S = 0.5
"""Seconds between checks of the daemons that the launcher has started on the hosts."""
_ROOM_CHECK_S = 5.0
"""Seconds between attempts to find devices for an engine whose host is lost."""


class WorkerUser(Protocol):
    """Interface of the object that sends workers their tasks; ``Workers.until`` calls it."""

    engines: Mapping[str, object]
    """Name -> worker that is replaced if it fails."""

    @property
    def done_steps(self) -> int | None:
        """Number of optimizer steps done; None before training starts.

        While it is None, failed workers are not replaced, because their replacements would fail, too.
        """

    def handle(self, worker: str, message: ControlMessage) -> None:
        """Handle a worker's message."""

    def lost(self, engine: str) -> None:
        """Let other engines capture the batches of a lost engine."""

    def regained(self, engine: str) -> None:
        """Send tasks again to an engine that was lost and whose replacement is ready."""


class Workers:
    """Starts, watches, replaces and stops the worker processes of one run."""

    def __init__(self, spec: RunSpec, launcher: Launcher, user: WorkerUser) -> None:
        """Prepare the workers of a run; no process starts before ``start``. ``user`` gets their messages."""
        self._timeouts = spec.config.timeouts
        self._launcher = launcher
        self._user = user
        self._failures = FailureReports(launcher)
        self._replacements = Replacements(spec.config.engine.replacements, spec.directory.replacements)
        self._handles: dict[str, WorkerHandle] = {}
        self._running: set[str] = set()
        """Names of the workers that have not exited."""
        self._loading: dict[int, set[str]] = {}
        """``WorkerOrder.init_order`` -> workers with this number that are not ready."""
        self._waiting_for_begin: set[str] = set()
        """Names of the workers that wait for Begin when they start."""
        self._starting: dict[str, float] = {}
        """Replaced engine that is not ready -> deadline (``time.monotonic``)."""
        self.without_devices: dict[str, float] = {}
        """Lost engine without devices -> time (``time.monotonic``) after which the run fails if no engine is left."""
        self._next_check_s = 0.0
        """Time (``time.monotonic``) of the next check of the hosts."""
        self._next_room_check_s = 0.0
        """Time (``time.monotonic``) of the next attempt to find devices."""

    def start(self, workers: Sequence[WorkerSpec]) -> None:
        """Start every worker.

        Workers load in parallel, but workers on the same device begin to use it one after the other.
        """
        self._handles = dict(self._launcher.start(workers))
        self._running = set(self._handles)
        for spec in workers:
            self._loading.setdefault(spec.arguments["init_order"], set()).add(spec.name)
        self._waiting_for_begin = {spec.name for spec in workers if spec.arguments["init_order"] > 0}

    def send(self, name: str, message: ControlMessage) -> None:
        """Send a message to the worker ``name``, or to the replacement of this worker if it has one.

        Raise DeadlineExceeded if the process does not read the message in time (L5).
        """
        self._handles[name].send(message.to_json())

    def expect_ready(self, names: Iterable[str]) -> None:
        """Expect each of the workers ``names`` to load new data and then to send Ready again."""
        self._loading = {0: set(names)}

    def await_ready(self, no_more: Callable[[], bool] = lambda: False) -> bool:
        """Wait until every loading worker is ready or ``no_more()`` is true; return whether all are ready.

        Raise DeadlineExceeded after ``timeouts.start_s``.
        """
        start_s = self._timeouts.start_s
        if not self.until(lambda: not self._loading or no_more(), time.monotonic() + start_s):
            missing = ", ".join(sorted(set[str]().union(*self._loading.values())))
            raise DeadlineExceeded(f"{missing} not ready within timeouts.start_s={start_s} s")
        return not self._loading

    def await_replaced(self) -> None:
        """Wait until every engine that replaces another is ready."""
        self.until(lambda: not self._starting)

    def until(self, done: Callable[[], bool], deadline_s: float = math.inf) -> bool:
        """Handle messages and exits of workers until ``done()`` is true.

        Return False if ``deadline_s`` (``time.monotonic``) comes first. Raise the error of a failure that
        ends the run.
        """
        while not done():
            now = time.monotonic()
            if now >= self._next_check_s:
                self._launcher.check_hosts()
                self._check_starting()
                self._check_devices()
                self._next_check_s = now + _HOST_CHECK_S
            event = self._failures.receive(min(deadline_s, self._next_check_s))
            if event is not None:
                self._handle(event)
            elif time.monotonic() >= deadline_s:
                return False
        return True

    def expect_end(self, name: str) -> None:
        """Treat the exit of a worker as expected, not as a failure, from now on."""
        self._failures.expect_end(name)

    def stop(self) -> None:
        """Ask every worker to exit, and wait until all have; failures are ignored."""
        for name in self._handles:
            self.send(name, Stop())
        limit_s = max(self._timeouts.peer_s, _LEAVING_S)
        deadline = time.monotonic() + limit_s
        self._running -= self._starting.keys()  # starting workers are not waited for: the launcher ends them
        while self._running:
            event = self._failures.receive(deadline)
            if isinstance(event, WorkerEnded):
                self._running.discard(event.worker.name)
            elif event is None and time.monotonic() >= deadline:
                raise DeadlineExceeded(f"{', '.join(sorted(self._running))} did not end within {limit_s} s")

    def _handle(self, event: WorkerMessage | WorkerEnded) -> None:
        name = event.worker.name
        if event.worker is not self._handles[name] or name in self.without_devices:
            return  # the worker was lost after it had sent this message
        if isinstance(event, WorkerEnded):
            self._running.discard(name)
        if (failure := self._failures.failure_in(event)) is not None:
            self._treat(self._failures.with_causes(failure))
        elif not isinstance(event, WorkerEnded):
            message = from_json(event.message)
            self._user.handle(name, message)
            if isinstance(message, Ready):
                self._on_ready(event.worker)

    def _on_ready(self, worker: WorkerHandle) -> None:
        worker.watch()
        log.info("%s is ready", worker.name)
        if self._starting.pop(worker.name, None) is not None:
            self._user.regained(worker.name)
            return
        self._loading[done := min(self._loading)].remove(worker.name)
        if not self._loading[done]:
            del self._loading[done]
            for name in self._loading[min(self._loading)] if self._loading else ():
                self.send(name, Begin())  # now they may use their devices

    def _treat(self, failures: Sequence[Failure]) -> None:
        """Start failed workers again, or wait for free devices for them.

        If a failure must end the run instead, raise the first such error.
        """
        while failures:
            self._replacements.note(failures, self._user.engines, self._user.done_steps)
            names = [failure.worker for failure in failures]
            for name in names:
                self._user.lost(name)
                self._running.discard(name)
                self._starting.pop(name, None)
            failures = [refused for name in names if (refused := self._start_again(name)) is not None]

    def _start_again(self, name: str) -> Failure | None:
        """Start a lost engine again, now or as soon as devices are free.

        If neither is possible, return a Failure.
        """
        try:
            worker = self._launcher.replace(self._handles[name])
        except NoDevices as error:
            self._wait_for_devices(name, error)
            return None
        except RunError as error:
            self.without_devices.pop(name, None)
            return Failure(name, error, 0)
        self.without_devices.pop(name, None)
        self._handles[name] = worker
        self._failures.replaced(name)
        self._running.add(name)
        self._starting[name] = time.monotonic() + self._timeouts.start_s
        if name in self._waiting_for_begin:
            self.send(name, Begin())
        return None

    def _wait_for_devices(self, name: str, error: NoDevices) -> None:
        """Continue without an engine; raise RunError if no engine is left and no device becomes free in time."""
        now = time.monotonic()
        start_s = self._timeouts.start_s
        waiting = self.without_devices
        if name not in waiting:
            log.warning("%s; the run goes on without %s until a host has room", error, name)
            waiting[name] = now + start_s
        self._next_room_check_s = now + _ROOM_CHECK_S
        if waiting.keys() == self._user.engines.keys() and now >= max(waiting.values()):
            raise RunError(
                f"{error} within timeouts.start_s={start_s} s, and no other engine is left"
            ) from error

    def _check_devices(self) -> None:
        """Try to start the engines that wait for devices."""
        if time.monotonic() >= self._next_room_check_s:
            names = list(self.without_devices)
            self._treat([refused for name in names if (refused := self._start_again(name)) is not None])

    def _check_starting(self) -> None:
        """If the replacement of an engine is not ready in time, treat the engine as failed again."""
        start_s = self._timeouts.start_s
        for name in [name for name, limit in self._starting.items() if time.monotonic() >= limit]:
            late = DeadlineExceeded(f"{name} not ready within timeouts.start_s={start_s} s")
            self._treat([Failure(name, late, 0)])
