"""WorkerInbox: what a launcher receives from workers with control channels, and how silence counts as their end.

One thread for each worker reads its channel into one inbox. The run takes from the inbox in one thread, so no state
needs a lock.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spec_core.errors import DeadlineExceeded, PeerLost
from spec_core.launcher import LOOPBACK, WorkerEnded, WorkerHandle, WorkerMessage

if TYPE_CHECKING:
    from spec_core.launcher import Message, WorkerSpec
    from spec_core.processes.control import ControlChannel

WORKER_MODULE = "spec_core.processes.worker_main"
"""Program of a worker for ``spawn``; its first word is the worker's name."""
_CONFIRM_S = 1.0
"""Pause before a silent worker counts as lost: this process may itself have been stopped (Ctrl-Z)."""


@dataclass(eq=False)
class ChannelWorker(WorkerHandle):
    """A worker that runs WORKER_MODULE, and this end of its control channel."""

    name: str
    channel: ControlChannel
    received_s: float = field(default_factory=time.monotonic)
    """Monotonic time of its last message or heartbeat."""
    watched: bool = False
    ended: bool = False

    def begin(self, spec: WorkerSpec, peer_s: float, address: str = LOOPBACK, reap: bool = False) -> None:
        """Send what the worker is to do.

        ``address`` is its ``RunLink.address``. ``reap`` has a process of its own end whatever it leaves behind, for
        launchers whose own Reaper is on another host.
        """
        start = {
            "entry": spec.entry,
            "order": dict(spec.order),
            "peer_s": peer_s,
            "address": address,
            "reap": reap,
        }
        self.send(start)

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

    @abstractmethod
    def ending(self) -> WorkerEnded:
        """Return how the worker has ended; called once, after its channel was closed."""

    def has_exited(self) -> bool:
        """Return whether its process has ended though something still holds its channel open."""
        return False


class WorkerInbox:
    """Messages and endings of workers, in the order in which they arrive."""

    def __init__(self, peer_s: float) -> None:
        """``peer_s``: seconds of silence after which a watched worker counts as lost (L4)."""
        self._peer_s = peer_s
        self._arrived: queue.SimpleQueue[WorkerMessage | ChannelWorker | None] = queue.SimpleQueue()
        self._workers: list[ChannelWorker] = []
        self._readers: list[threading.Thread] = []

    def add(self, worker: ChannelWorker) -> None:
        """Begin to read the worker's channel."""
        self._workers.append(worker)
        reader = threading.Thread(target=self._read, args=(worker,), name=f"read {worker.name}", daemon=True)
        reader.start()
        self._readers.append(reader)

    def receive(self, deadline_s: float = math.inf) -> WorkerMessage | WorkerEnded | None:
        """Return what comes next from any worker (L3)."""
        while True:
            if (lost := self._silent_worker()) is not None:
                return lost
            wait_s = min(deadline_s, self._next_check_s()) - time.monotonic()
            try:
                event = self._arrived.get(timeout=min(max(0.0, wait_s), threading.TIMEOUT_MAX))
            except queue.Empty:
                if time.monotonic() >= deadline_s:
                    return None
                continue
            if not isinstance(event, ChannelWorker):
                return event
            if not event.ended:
                return self._ending(event)

    def wake(self) -> None:
        """Make ``receive`` return None."""
        self._arrived.put(None)

    def close(self) -> None:
        """Forget the workers, whose channels the launcher has closed."""
        for reader in self._readers:
            reader.join()
        self._workers, self._readers = [], []

    def _read(self, worker: ChannelWorker) -> None:
        for envelope in worker.channel.messages():
            worker.received_s = time.monotonic()
            if envelope["kind"] == "message":  # not a heartbeat
                self._arrived.put(WorkerMessage(worker, envelope["message"]))
        self._arrived.put(worker)

    def _ending(self, worker: ChannelWorker) -> WorkerEnded:
        worker.ended = True
        return worker.ending()

    def _silent_worker(self) -> WorkerEnded | None:
        if time.monotonic() < self._next_check_s():
            return None
        time.sleep(_CONFIRM_S)
        now = time.monotonic()
        for worker in self._watched():
            if now - worker.received_s >= self._peer_s:
                if worker.has_exited():
                    return self._ending(worker)
                worker.ended = True
                silence = f"has been silent for timeouts.peer_s={self._peer_s} s"
                return WorkerEnded(worker, silence, killed=True)
        return None

    def _next_check_s(self) -> float:
        """Return when the watched worker that has been silent for longest will have been so for ``peer_s``."""
        return min((worker.received_s for worker in self._watched()), default=math.inf) + self._peer_s

    def _watched(self) -> list[ChannelWorker]:
        return [worker for worker in self._workers if worker.watched and not worker.ended]
