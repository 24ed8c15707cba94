"""LocalLauncher: the workers of a run as child processes on this host.

One thread for each worker reads its control channel into one inbox. The run takes from the inbox in one thread, so no
state needs a lock.
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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from spec_core import Launcher, WorkerEnded, WorkerHandle, WorkerMessage
from spec_core.errors import DeadlineExceeded, PeerLost, RunError
from spec_core.processes import Reaper, end_group, ending, spawn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from spec_core import LaunchContext, LauncherConfig, Message, WorkerSpec
    from spec_core.processes import ControlChannel

log = logging.getLogger(__name__)

_WORKER = "spec_launcher_local.worker_main"
_ONE_HOST = {"GLOO_SOCKET_IFNAME": "lo"}
"""Every worker is on this host; by itself gloo listens where the host's name points to. The user's value wins."""
_UNKILLABLE_S = 10.0
"""Longest wait for a process that is ending; one that waits inside a driver does not end."""
_CONFIRM_S = 1.0
"""Pause before a silent worker counts as lost: this process may itself have been stopped (Ctrl-Z)."""


@dataclass(eq=False)
class LocalWorker(WorkerHandle):
    """A child process and this end of its control channel."""

    name: str
    process: subprocess.Popen[bytes]
    channel: ControlChannel
    received_s: float = field(default_factory=time.monotonic)
    """Monotonic time of its last message or heartbeat."""
    watched: bool = False
    ended: bool = False

    def send(self, message: Message) -> None:
        """Send a message; do nothing if the worker has ended (L5)."""
        try:
            self.channel.send("message", message=message)
        except PeerLost:
            pass  # its end is in the inbox
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{self.name}: {error}") from error

    def watch(self) -> None:
        """Count silence as the worker's end from now on (L4)."""
        self.watched = True


class LocalLauncher(Launcher):
    """Starts each worker as ``python -m spec_launcher_local.worker_main`` with a control channel."""

    name: ClassVar[str] = "local"
    api_version: ClassVar[int] = 2

    def __init__(self, config: LauncherConfig, context: LaunchContext) -> None:
        """Prepare; no process starts before ``start``."""
        super().__init__(config, context)
        self._inbox: queue.SimpleQueue[WorkerMessage | LocalWorker | None] = queue.SimpleQueue()
        self._workers: list[LocalWorker] = []
        self._readers: list[threading.Thread] = []
        self._reaper: Reaper | None = None

    def start(self, workers: Sequence[WorkerSpec]) -> Mapping[str, WorkerHandle]:
        """Start every worker; where one cannot be started, end the others (L2)."""
        self._reaper = self._reaper or Reaper()
        try:
            return {spec.name: self._start(spec, self._reaper) for spec in workers}
        except BaseException:
            self.close()
            raise

    def receive(self, deadline_s: float = math.inf) -> WorkerMessage | WorkerEnded | None:
        """Return what comes next from any worker (L3)."""
        while True:
            if (lost := self._silent_worker()) is not None:
                return lost
            wait_s = min(deadline_s, self._next_check_s()) - time.monotonic()
            try:
                event = self._inbox.get(timeout=min(max(0.0, wait_s), threading.TIMEOUT_MAX))
            except queue.Empty:
                if time.monotonic() >= deadline_s:
                    return None
                continue
            if not isinstance(event, LocalWorker):
                return event
            if not event.ended:
                return self._ending(event)

    def wake(self) -> None:
        """Make ``receive`` return None."""
        self._inbox.put(None)

    def stop(self, grace_s: float) -> None:
        """Close the channels, wait, and kill what is left of each process group (L7)."""
        for worker in self._workers:
            worker.channel.close()
        deadline = time.monotonic() + grace_s
        for worker in self._workers:
            if worker.process.returncode is not None:
                continue  # its group was killed then; the number may be another group's by now
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("%s did not end when asked and is killed", worker.name)
            end_group(worker.process.pid)
            _wait_killed(worker)
        for reader in self._readers:
            reader.join()
        self._workers, self._readers = [], []
        if self._reaper is not None:
            self._reaper.close()
            self._reaper = None

    def _start(self, spec: WorkerSpec, reaper: Reaper) -> LocalWorker:
        env = {**_ONE_HOST, **os.environ, **spec.env(self.context.backend)}
        peer_s = self.context.peer_s
        try:
            with self._log(spec.name).open("ab") as output:
                process, channel = spawn([_WORKER, spec.name], env, output, peer_s)
        except OSError as error:
            raise RunError(f"{spec.name} cannot be started: {error}") from error
        worker = LocalWorker(spec.name, process, channel)
        self._workers.append(worker)
        reaper.add(process.pid)
        worker.send({"entry": spec.entry, "order": dict(spec.order), "peer_s": peer_s})
        reader = threading.Thread(target=self._read, args=(worker,), name=f"read {spec.name}", daemon=True)
        reader.start()
        self._readers.append(reader)
        return worker

    def _log(self, name: str) -> Path:
        return self.context.logs / f"{name}.log"

    def _read(self, worker: LocalWorker) -> None:
        for envelope in worker.channel.messages():
            worker.received_s = time.monotonic()
            if envelope["kind"] == "message":  # not a heartbeat
                self._inbox.put(WorkerMessage(worker, envelope["message"]))
        self._inbox.put(worker)

    def _ending(self, worker: LocalWorker) -> WorkerEnded:
        """Return the end of a worker that has closed its channel."""
        worker.ended = True
        try:
            code = worker.process.wait(_UNKILLABLE_S)
        except subprocess.TimeoutExpired:
            code, how = None, "has closed its connection to the launcher and does not end"
        else:
            end_group(worker.process.pid)
            how = ending(code)
        return WorkerEnded(worker, f"{how}; see {self._log(worker.name)}", killed=code == -signal.SIGKILL)

    def _silent_worker(self) -> WorkerEnded | None:
        if time.monotonic() < self._next_check_s():
            return None
        time.sleep(_CONFIRM_S)
        now = time.monotonic()
        for worker in self._watched():
            if now - worker.received_s >= self.context.peer_s:
                if worker.process.poll() is not None:  # a process that it has started holds its channel open
                    return self._ending(worker)
                worker.ended = True
                silence = f"has been silent for timeouts.peer_s={self.context.peer_s} s"
                return WorkerEnded(worker, silence, killed=True)
        return None

    def _next_check_s(self) -> float:
        """Return when the watched worker that has been silent for longest will have been so for ``peer_s``."""
        return min((worker.received_s for worker in self._watched()), default=math.inf) + self.context.peer_s

    def _watched(self) -> list[LocalWorker]:
        return [worker for worker in self._workers if worker.watched and not worker.ended]


def _wait_killed(worker: LocalWorker) -> None:
    try:
        worker.process.wait(_UNKILLABLE_S)
    except subprocess.TimeoutExpired:
        pid = worker.process.pid
        log.error("%s (pid %d) does not die of kill -9: it waits in a driver", worker.name, pid)
