"""Supervisor: starts child processes, hears every one of them, and lets none outlive the run.

One thread per child reads its control channel into one queue; the launcher handles events one at a time, so there
is no state to lock. The first failure is the run's: the others are ended because of it.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from spec_core.errors import DeadlineExceeded, PeerLost, RunError, SpecError, UsageError
from spec_core.launcher import Event, Launcher, Worker
from spec_core.processes.guardian import Guardian, end_group
from spec_core.processes.spawn import spawn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from spec_core.processes.control import ControlChannel

log = logging.getLogger(__name__)

_CHILD = "spec_launcher_local.child"
_GRACE_S = 3.0
"""Between asking the children to end and killing them."""
_BLAME_S = {1: 2.0, 2: 3.0}
"""Remoteness of a failure -> time for its cause to be heard of too. A peer may report a lost connection before the
kernel has told of the process that died; a driver may take seconds to let one go."""
_HOST_CHECK_S = 0.5
"""Between looks at what the backend has started on the host."""
_UNKILLABLE_S = 10.0
"""For a process that dies to be gone: one that waits inside a driver is not."""
_FOLLOWS = ("PeerLost", "DeadlineExceeded", "AcceleratorError")
"""Errors that another process may be the cause of. The last one is torch's for a device that has failed, which a
process that dies in the middle of its work makes of a device for the others on it."""
_CONFIRM_S = 1.0
"""A silent child is heard once more: this process itself may have been stopped (Ctrl-Z), not the child."""


@dataclass(eq=False)
class Child(Worker):
    """One process of the run, as the launcher sees it."""

    name: str
    process: subprocess.Popen[bytes]
    channel: ControlChannel
    heard_s: float
    """Monotonic time of its last record."""
    ready: bool = False
    """It has loaded. Before that it may be silent for longer: imports and drivers stop every thread of a process."""
    finished: bool = False
    """It may end now."""
    reported: bool = False
    """It has told of its failure itself."""

    def tell(self, kind: str, **fields: Any) -> None:
        """A child that is gone hears nothing: its end is an event of its own, which says why."""
        try:
            self.channel.send(kind, **fields)
        except PeerLost:
            pass
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{self.name}: {error}") from error


@dataclass(frozen=True)
class _Failure:
    error: SpecError
    remoteness: int
    """0: a process was killed or went silent; 1: it ended by itself, or told why it fails; 2: it may fail because
    another one does."""


class Supervisor(Launcher):
    """Leaving it, by an exception or not, ends every child and waits for it."""

    name: ClassVar[str] = "local"
    api_version: ClassVar[int] = 2

    def __init__(self, logs: Path, peer_s: float, check_host: Callable[[], None] = lambda: None) -> None:
        """``check_host``: Backend.check_host."""
        self._logs = logs
        self._peer_s = peer_s
        self._check_host = check_host
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._listeners: list[threading.Thread] = []
        self._guardian = Guardian()
        self.children: dict[str, Child] = {}

    def spawn(self, name: str, order: Mapping[str, object], env: Mapping[str, str]) -> Child:
        """Starts a child with ``env`` over this process's environment; its output goes to ``logs/NAME.log``."""
        with (self._logs / f"{name}.log").open("ab") as output:
            process, channel = spawn([_CHILD, name], {**os.environ, **env}, output, self._peer_s)
        child = self.children[name] = Child(name, process, channel, time.monotonic())
        self._guardian.guard(process.pid)
        child.tell("order", peer_s=self._peer_s, **order)
        listener = threading.Thread(target=self._listen, args=(child,), name=f"hear {name}", daemon=True)
        listener.start()
        self._listeners.append(listener)
        return child

    def wake(self) -> None:
        """Makes ``next_event`` return None; safe in a signal handler."""
        self._events.put(None)

    def next_event(self, deadline_s: float = math.inf) -> Event | None:
        """The next record of any child; None when woken, or at ``deadline_s`` (monotonic).

        Raises the run's failure: what a child reports, a child that ended early (PeerLost), or one that was ready
        and has been silent for ``timeouts.peer_s`` (PeerLost).
        """
        while True:
            self._check_host()
            self._check_silence()
            wait_s = min(deadline_s, self._next_check_s()) - time.monotonic()
            try:
                event = self._events.get(timeout=min(max(0.0, wait_s), _HOST_CHECK_S))
            except queue.Empty:
                if time.monotonic() >= deadline_s:
                    return None
                continue
            if event is None:
                return None
            if (failure := self._failure(event)) is not None:
                raise self._cause(failure)
            if event.record is not None:
                event.child.ready |= event.record["kind"] == "ready"
                event.child.finished |= event.record["kind"] in ("finished", "interrupted")
                return event

    def wait_all(self, timeout_s: float) -> None:
        """Until the children have ended by themselves. Raises DeadlineExceeded."""
        deadline = time.monotonic() + timeout_s
        for child in self.children.values():
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired as error:
                raise DeadlineExceeded(f"{child.name} did not end within {timeout_s} s") from error

    def __enter__(self) -> Self:
        self._guardian.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        """Closes the channels, which tells every child to end; then kills what is left and whatever they started."""
        for child in self.children.values():
            child.channel.close()
        deadline = time.monotonic() + _GRACE_S
        for child in self.children.values():
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("%s did not end when asked and is killed", child.name)
            end_group(child.process.pid)
            self._bury(child)
        for listener in self._listeners:
            listener.join()
        self._guardian.__exit__(*exc)

    def _bury(self, child: Child) -> None:
        try:
            child.process.wait(_UNKILLABLE_S)
        except subprocess.TimeoutExpired:
            log.error(
                "%s (pid %d) does not die of kill -9: it waits in a driver", child.name, child.process.pid
            )

    def _listen(self, child: Child) -> None:
        for record in child.channel.records():
            child.heard_s = time.monotonic()
            if record["kind"] != "alive":
                self._events.put(Event(child, record))
        self._events.put(Event(child, None))

    def _failure(self, event: Event) -> _Failure | None:
        child, record = event.child, event.record
        if record is None:
            if child.finished or child.reported:
                return None
            death = self._death(child)
            return _Failure(death, 0 if child.process.returncode == -signal.SIGKILL else 1)
        if record["kind"] != "failed":
            return None
        child.reported = True
        if record["usage"]:
            return _Failure(UsageError(record["message"]), 1)
        remoteness = 2 if record["error"] in _FOLLOWS else 1
        return _Failure(RunError(f"{child.name}: {record['error']}: {record['message']}"), remoteness)

    def _cause(self, first: _Failure) -> SpecError:
        """The failure closest to the root of all that follow at once; of equals, the first. Raises that of the host
        unless a process was killed."""
        failures = [first]
        deadline = time.monotonic() + _BLAME_S.get(first.remoteness, 0.0)
        while failures[-1].remoteness > 0:
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self._check_host()
                break
            if event is not None and (failure := self._failure(event)) is not None:
                failures.append(failure)
        return min(failures, key=lambda failure: failure.remoteness).error

    def _death(self, child: Child) -> PeerLost:
        try:
            code = child.process.wait(_UNKILLABLE_S)
        except subprocess.TimeoutExpired:
            how = "has let go of the launcher and does not end"
        else:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return PeerLost(f"{child.name} {how}; see {self._logs / child.name}.log")

    def _next_check_s(self) -> float:
        """When the child that has been silent for longest will have been so for ``peer_s``."""
        return min((child.heard_s for child in self._watched()), default=time.monotonic()) + self._peer_s

    def _check_silence(self) -> None:
        if time.monotonic() < self._next_check_s():
            return
        time.sleep(_CONFIRM_S)
        now = time.monotonic()
        for child in self._watched():
            if now - child.heard_s >= self._peer_s:
                if child.process.poll() is not None:  # what it had started holds its channel open
                    raise self._death(child)
                raise PeerLost(f"{child.name} has been silent for timeouts.peer_s={self._peer_s} s")

    def _watched(self) -> list[Child]:
        return [c for c in self.children.values() if c.ready and not (c.finished or c.reported)]
