"""AnnouncingSender: the engine's end where a sample travels on after ``send`` has returned.

Two threads of its own: one sees the samples off in their order, the other waits for the end of the connection, so
that nothing on a device waits for a receiver that is gone.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
import time
from abc import abstractmethod
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from spec_core.errors import DeadlineExceeded, PeerLost, ProtocolError, RunError
from spec_core.streams.block_memory import SenderMemory
from spec_core.streams.shared_memory_transport import SharedMemorySender
from spec_core.streams.shared_memory_wire import Kind, Record

if TYPE_CHECKING:
    from collections.abc import Callable

    from spec_core.records import FeatureSample, FeatureSchema
    from spec_core.streams.block_memory import SenderEnd
    from spec_core.transport import Ticket

CLOSE_S = 10.0
"""How long ``close`` waits for samples that are on their way."""


class Delivery(NamedTuple):
    """A sample on its way. Both calls block; they raise RunError, or torch's RuntimeError, if it never gets there."""

    start: Callable[[], None]
    """Returns when the receiver may be told that it comes."""
    finish: Callable[[], None]
    """Returns when it is all there."""


class TravellingMemory(SenderMemory):
    """Memory that ``write`` does not fill itself."""

    @abstractmethod
    def open(self) -> None:
        """The first call of the thread that sees samples off; it may block, and is part of ``connect``."""

    @abstractmethod
    def take_delivery(self) -> Delivery:
        """Of the last ``write``; asked for once."""

    @abstractmethod
    def abandon(self) -> None:
        """By any thread: the connection is over. Deliveries that are open raise PeerLost soon, and later ones."""


class _Parcel(NamedTuple):
    delivery: Delivery
    ready: Record
    ticket: Ticket


class AnnouncingSender(SharedMemorySender):
    """A ticket is done when the sample is all there, whatever becomes of this process then. Where the receiver offers
    memory that is not travelling, it is a SharedMemorySender."""

    def __init__(self, address: str, schema: FeatureSchema, timeout_s: float, end: SenderEnd) -> None:
        deadline = time.monotonic() + timeout_s
        super().__init__(address, schema, timeout_s, end)
        self._open: set[Ticket] = set()
        self._parcels: queue.SimpleQueue[_Parcel | None] = queue.SimpleQueue()
        self._voice = self._socket.dup()  # its timeout is not that of the thread that sends
        self._threads: list[threading.Thread] = []
        if isinstance(self._memory, TravellingMemory):
            self._set_off(self._memory, deadline)

    def send(self, sample: FeatureSample, timeout_s: float) -> Ticket:
        if not isinstance(self._memory, TravellingMemory):
            return super().send(sample, timeout_s)
        self._check(sample)
        with self._exclusive(timeout_s) as deadline, self._withdrawn_on_error():
            self._memory.write(self._reserve(len(sample.input_ids), deadline), sample)
            ready = Record(Kind.READY, self._number, sample.request_id)
            parcel = _Parcel(self._memory.take_delivery(), ready, Future())
            self._open.add(parcel.ticket)
            parcel.ticket.add_done_callback(self._open.discard)
            self._parcels.put(parcel)
        return parcel.ticket

    def flush(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        super().flush(timeout_s)
        late = wait(list(self._open), max(0.0, deadline - time.monotonic())).not_done
        if late:
            raise DeadlineExceeded(f"{len(late)} samples to {self._name} were not there within {timeout_s} s")

    def close(self) -> None:
        """What is on its way gets there first, if it does within ``CLOSE_S``."""
        if self._closed:
            return
        self._parcels.put(None)
        if isinstance(self._memory, TravellingMemory):
            self._threads[0].join(CLOSE_S)
            if self._threads[0].is_alive():
                self._memory.abandon()
                self._threads[0].join()
        super().close()
        for thread in self._threads:
            thread.join()
        self._voice.close()
        self._fail_the_rest()

    def _set_off(self, memory: TravellingMemory, deadline: float) -> None:
        """Starts the threads, and waits until the memory is open."""
        opened: Future[RunError | None] = Future()
        for name, work in (
            ("deliveries", partial(self._see_off, memory, opened)),
            ("hang-up", partial(self._watch, memory)),
        ):
            self._threads.append(threading.Thread(target=work, name=f"{name} {self._name}", daemon=True))
            self._threads[-1].start()
        try:
            failure = opened.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            failure = DeadlineExceeded(f"the way to the receiver {self._name} was not open in time")
        if failure is not None:
            memory.abandon()
            self.close()
            raise failure

    def _see_off(self, memory: TravellingMemory, opened: Future[RunError | None]) -> None:
        """One thread. What fails ends the connection: nothing that comes later could arrive in its place."""
        failure = self._attempt(memory.open)
        opened.set_result(failure)
        while (parcel := self._parcels.get()) is not None:
            failure = failure or self._attempt(partial(self._deliver, parcel))
            if failure is None:
                parcel.ticket.set_result(None)
            else:
                parcel.ticket.set_exception(failure)
            del parcel  # and the memory that it holds

    def _deliver(self, parcel: _Parcel) -> None:
        parcel.delivery.start()
        self._voice.settimeout(CLOSE_S)
        self._voice.send(parcel.ready.encode())
        parcel.delivery.finish()

    def _attempt(self, step: Callable[[], None]) -> RunError | None:
        try:
            step()
        except OSError as error:
            failure: RunError = PeerLost(f"the receiver {self._name} has gone: {error}")
        except RunError as error:
            failure = error
        except RuntimeError as error:  # what torch raises for everything
            failure = RunError(f"the copy to {self._name} failed: {error}")
        else:
            return None
        with contextlib.suppress(OSError):
            self._voice.shutdown(socket.SHUT_RDWR)
        return failure

    def _watch(self, memory: TravellingMemory) -> None:
        """The other thread, until either end closes the connection."""
        ended = select.poll()
        ended.register(self._voice, select.POLLRDHUP)
        ended.poll()
        memory.abandon()

    def _fail_the_rest(self) -> None:
        """A send of another thread may have come in while ``close`` waited."""
        with contextlib.suppress(queue.Empty):
            while True:
                if (parcel := self._parcels.get_nowait()) is not None:
                    parcel.ticket.set_exception(ProtocolError("the sender was closed"))
