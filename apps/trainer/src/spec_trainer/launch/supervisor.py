"""Supervisor: starts child processes, hears every one of them, and lets none outlive the run.

One thread per child reads its control channel into one queue; the launcher handles events one at a time, so there
is no state to lock. The first failure is the run's: the others are ended because of it.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from spec_core.errors import DeadlineExceeded, PeerLost, RunError
from spec_trainer.launch.control import ControlChannel

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from spec_trainer.launch.control import Record

log = logging.getLogger(__name__)

_GRACE_S = 3.0
"""Between asking a child to end and killing it."""


@dataclass
class Child:
    """One process of the run, as the launcher sees it."""

    name: str
    process: subprocess.Popen[bytes]
    channel: ControlChannel
    heard_s: float
    """Monotonic time of its last record."""
    finished: bool = False


@dataclass(frozen=True)
class Event:
    child: Child
    record: Record | None
    """None: the child's channel ended."""


class Supervisor(AbstractContextManager["Supervisor"]):
    """Leaving it, by an exception or not, ends every child and waits for it."""

    def __init__(self, logs: Path, peer_s: float) -> None:
        self._logs = logs
        self._peer_s = peer_s
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self.children: dict[str, Child] = {}

    def spawn(self, name: str, order: Mapping[str, object], env: Mapping[str, str]) -> Child:
        """Starts a child with ``env`` over this process's environment; its output goes to ``logs/NAME.log``."""
        ours, theirs = socket.socketpair()
        with theirs, (self._logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "spec_trainer.launch.child", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                start_new_session=True,
            )
        child = Child(name, process, ControlChannel(ours), time.monotonic())
        self.children[name] = child
        child.channel.send("order", name=name, peer_s=self._peer_s, **order)
        threading.Thread(target=self._listen, args=(child,), name=f"hear {name}", daemon=True).start()
        return child

    def wake(self) -> None:
        """Makes ``next_event`` return None; safe in a signal handler."""
        self._events.put(None)

    def next_event(self) -> Event | None:
        """The next record of any child. Raises the run's first failure: what a child reports, a child that ended
        early (PeerLost), or one that has been silent for ``timeouts.peer_s`` (PeerLost)."""
        while True:
            try:
                event = self._events.get(timeout=self._until_silent())
            except queue.Empty:
                self._check_silence()
                continue
            if event is None:
                return None
            event.child.heard_s = time.monotonic()
            if event.record is None:
                self._check_end(event.child)
            elif event.record["kind"] == "failed":
                raise RunError(f"{event.child.name}: {event.record['error']}: {event.record['message']}")
            elif event.record["kind"] != "alive":
                event.child.finished |= event.record["kind"] in ("finished", "interrupted")
                return event
            self._check_silence()

    def wait_all(self, names: list[str], timeout_s: float) -> None:
        """Until these children have ended by themselves. Raises DeadlineExceeded."""
        deadline = time.monotonic() + timeout_s
        for name in names:
            try:
                self.children[name].process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired as error:
                raise DeadlineExceeded(f"{name} did not end within {timeout_s} s") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Asks all, waits a little, kills the rest with everything that they started."""
        for child in self.children.values():
            _signal(child, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        for child in self.children.values():
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("%s did not end when asked and is killed", child.name)
            _signal(child, signal.SIGKILL)
            child.process.wait()
            child.channel.close()

    def _listen(self, child: Child) -> None:
        for record in child.channel.records():
            self._events.put(Event(child, record))
        self._events.put(Event(child, None))

    def _check_end(self, child: Child) -> None:
        code = child.process.wait()
        if not child.finished:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise PeerLost(f"{child.name} {how}; see {self._logs / child.name}.log")

    def _until_silent(self) -> float:
        watched = [child.heard_s for child in self.children.values() if child.process.poll() is None]
        return max(0.0, min(watched, default=time.monotonic()) + self._peer_s - time.monotonic()) + 0.01

    def _check_silence(self) -> None:
        now = time.monotonic()
        for child in self.children.values():
            if child.process.poll() is None and not child.finished and now - child.heard_s > self._peer_s:
                raise PeerLost(f"{child.name} has been silent for timeouts.peer_s={self._peer_s} s")


def _signal(child: Child, number: signal.Signals) -> None:
    """To the child's whole session: an engine may have started processes of its own."""
    with suppress(ProcessLookupError):
        os.killpg(child.process.pid, number)
