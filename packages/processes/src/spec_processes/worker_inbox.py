"""A WorkerInbox receives the messages of workers over control channels, and detects silent workers.

The thread that calls ``receive`` waits for all channels at once and reads them, so thousands of workers
need no further threads or locks.
"""

from __future__ import annotations

import functools
import math
import os
import select
import selectors
import time
from abc import abstractmethod
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spec_core import LOOPBACK, WorkerEnded, WorkerHandle, WorkerMessage
from spec_core.errors import DeadlineExceeded, PeerLost

if TYPE_CHECKING:
    from spec_core import Message, WorkerSpec
    from spec_processes.control import ControlChannel

WORKER_MODULE = "spec_processes.worker_main"
"""Main module of a worker, for ``spawn``; its first argument is the worker's name."""
_CONFIRM_S = 1.0
"""Extra seconds before a silent worker counts as lost, because this process may have been stopped itself
(Ctrl-Z)."""


@dataclass(eq=False)
class ChannelWorker(WorkerHandle):
    """A worker process that runs WORKER_MODULE, and the launcher's side of its control channel."""

    name: str
    channel: ControlChannel
    received_s: float = field(default_factory=time.monotonic)
    """Time (``time.monotonic``) of the worker's last message or heartbeat."""
    watched: bool = False

    def begin(self, spec: WorkerSpec, peer_s: float, address: str = LOOPBACK, reap: bool = False) -> None:
        """Send the worker its first message, which names the entry that it runs.

        ``address``: the worker's ``RunLink.address``. ``reap``: whether the worker starts a Reaper for its
        descendants, because the launcher's Reaper is on another host.
        """
        start = {
            "entry": spec.entry,
            "arguments": dict(spec.arguments),
            "peer_s": peer_s,
            "address": address,
            "reap": reap,
        }
        self.send(start)

    def send(self, message: Message) -> None:
        """Send a message to the worker; do nothing if the worker has ended (L5)."""
        try:
            self.channel.send("message", message=message)
        except PeerLost:
            pass  # the inbox reports that the worker has ended
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{self.name}: {error}") from error

    def watch(self) -> None:
        """Watch the worker: from now on, it counts as ended if it is silent for ``peer_s`` seconds (L4)."""
        self.watched = True

    @abstractmethod
    def ending(self) -> WorkerEnded:
        """Return how the worker has ended. Called once, after the worker's channel was closed."""

    def has_exited(self) -> bool:
        """Return whether the worker's process has ended, although another process may hold its channel open."""
        return False


class WorkerInbox:
    """Returns messages of workers, and a WorkerEnded for each worker that ends, in the order of arrival."""

    def __init__(self, peer_s: float) -> None:
        """Start without workers. A watched worker counts as lost after ``peer_s`` seconds of silence (L4)."""
        self._peer_s = peer_s
        self._arrived: deque[WorkerMessage | WorkerEnded | ChannelWorker | None] = deque()
        """Queue of the events that ``receive`` has not returned yet. A worker in the queue means that its channel
        has ended. None means that ``wake`` was called."""
        self._selector: selectors.EpollSelector | None = None
        """Selector of the channels that have not ended; None if no channel is read."""
        self._waker: int | None = None
        self._next_check_s = time.monotonic() + peer_s

    def add(self, worker: ChannelWorker) -> None:
        """Begin to read the worker's channel."""
        worker.channel.wait = functools.partial(self._read_meanwhile, worker.channel)
        self._opened().register(worker.channel, selectors.EVENT_READ, worker)

    def receive(self, deadline_s: float = math.inf) -> WorkerMessage | WorkerEnded | None:
        """Wait for the next event of any worker and return it (L3)."""
        while not self._arrived:
            self._read(min(deadline_s, self._next_check_s))
            if time.monotonic() >= self._next_check_s:
                self._end_silent_workers()
            elif not self._arrived and time.monotonic() >= deadline_s:
                return None
        event = self._arrived.popleft()
        return event.ending() if isinstance(event, ChannelWorker) else event

    def forget(self, worker: ChannelWorker) -> None:
        """Drop the events of a worker and stop reading its channel, which the launcher then closes (L11)."""
        with suppress(KeyError):  # its channel has ended already
            self._opened().unregister(worker.channel)
        for _ in range(len(self._arrived)):  # ``wake`` may add to it meanwhile
            event = self._arrived.popleft()
            if not _is_of(event, worker):
                self._arrived.append(event)

    def wake(self) -> None:
        """Make the current or the next call of ``receive`` return None."""
        self._arrived.append(None)
        if (waker := self._waker) is not None:
            os.eventfd_write(waker, 1)

    def close(self) -> None:
        """Forget all workers. The launcher has closed their channels."""
        if self._selector is not None and self._waker is not None:
            self._selector.close()
            waker, self._selector, self._waker = self._waker, None, None
            os.close(waker)

    def _opened(self) -> selectors.EpollSelector:
        if self._selector is None:
            self._waker = os.eventfd(0)
            self._selector = selectors.EpollSelector()
            self._selector.register(self._waker, selectors.EVENT_READ)
        return self._selector

    def _read(self, deadline_s: float) -> None:
        """Wait until data arrives on any channel or ``deadline_s`` passes, and read the data."""
        for key, _ in self._opened().select(max(0.0, deadline_s - time.monotonic())):
            if key.data is None:
                os.eventfd_read(key.fd)
            else:
                self._read_channel(key.data)

    def _read_meanwhile(self, channel: ControlChannel, limit_s: float | None) -> None:
        """Wait until ``channel`` is writable or any channel has data, and read the data.

        Reading prevents a deadlock: a worker reads nothing while it waits until its own messages are read.
        """
        waiting = select.poll()
        waiting.register(channel, select.POLLOUT)
        waiting.register(self._opened(), select.POLLIN)
        waiting.poll(None if limit_s is None else 1e3 * limit_s)
        self._read(time.monotonic())

    def _read_channel(self, worker: ChannelWorker) -> None:
        worker.received_s = time.monotonic()
        try:
            for envelope in worker.channel.arrived():
                if envelope["kind"] == "message":  # not a heartbeat
                    self._arrived.append(WorkerMessage(worker, envelope["message"]))
        except PeerLost:
            self._opened().unregister(worker.channel)
            self._arrived.append(worker)

    def _end_silent_workers(self) -> None:
        """Report watched workers that have been silent for ``peer_s`` as ended, and set the next check's time."""
        if self._silent_workers():
            deadline_s = time.monotonic() + _CONFIRM_S
            while time.monotonic() < deadline_s:
                self._read(deadline_s)
        for worker in self._silent_workers():
            self._opened().unregister(worker.channel)
            self._arrived.append(self._silence(worker))
        oldest_s = min((worker.received_s for worker in self._watched()), default=math.inf)
        self._next_check_s = min(oldest_s, time.monotonic()) + self._peer_s

    def _silent_workers(self) -> list[ChannelWorker]:
        limit_s = time.monotonic() - self._peer_s
        return [worker for worker in self._watched() if worker.received_s <= limit_s]

    def _watched(self) -> list[ChannelWorker]:
        workers = (key.data for key in self._opened().get_map().values())
        return [worker for worker in workers if worker is not None and worker.watched]

    def _silence(self, worker: ChannelWorker) -> WorkerEnded:
        if worker.has_exited():
            return worker.ending()
        silence = f"has been silent for timeouts.peer_s={self._peer_s} s"
        return WorkerEnded(worker, silence, killed=True)


def _is_of(event: WorkerMessage | WorkerEnded | ChannelWorker | None, worker: ChannelWorker) -> bool:
    """Return whether an event of the inbox came from ``worker``."""
    return event is worker or (isinstance(event, WorkerMessage | WorkerEnded) and event.worker is worker)
