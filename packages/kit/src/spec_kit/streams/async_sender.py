"""AsyncSender: the engine's end where a sample is still on its way after ``send`` has returned.

It has threads of its own: one announces the samples in their order; one waits for the end of the connection, so that
nothing on a device waits for a receiver that is gone; and one completes tickets, where samples overlap.
"""

from __future__ import annotations

import contextlib
import queue
import select
import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from spec_core.errors import DeadlineExceeded, ProtocolError, RunError
from spec_kit.streams.buffer_pool import SenderBuffer
from spec_kit.streams.sender import StreamSender
from spec_kit.streams.wire import Packet, PacketKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from spec_core.records import FeatureSample, FeatureSchema
    from spec_core.transport import Ticket
    from spec_kit.streams.buffer_pool import SenderConnector

CLOSE_S = 10.0
"""How long ``close`` waits until all samples are announced, in seconds."""
SETTLE_S = 0.5
"""How long it then waits for samples that the receiver has still to ask for."""
LINGER_S = 60.0
"""How long a closed sender keeps such samples for the receiver."""


class PendingSend(ABC):
    """A sample on its way. Both calls block, and raise RunError or torch's RuntimeError if it never gets there."""

    @abstractmethod
    def wait_sendable(self) -> None:
        """Return when the sample may be announced to the receiver."""

    @abstractmethod
    def wait_sent(self) -> None:
        """Return when the sample does not need this process any more: its ticket is done (T7)."""


class DeferredBuffer(SenderBuffer):
    """A buffer whose ``write`` returns before the sample is where it belongs."""

    overlapping: ClassVar[bool] = False
    """Whether a sample may be announced before the one before it is sent. Such a buffer keeps samples for the
    receiver when the sender closes."""

    def open(self) -> None:
        """Prepare the buffer; the first call of the announcing thread. It may block, and is part of ``connect``."""

    @abstractmethod
    def take_pending(self) -> PendingSend:
        """Return what the last ``write`` has begun; called once for each."""

    def abandon(self) -> None:
        """Make pending and future sends raise PeerLost; called from any thread when the receiver is gone."""


class _Send(NamedTuple):
    pending: PendingSend
    ready: Packet
    ticket: Ticket


class AsyncSender(StreamSender):
    """A ticket is done when the sample is sent, whatever becomes of this process then.

    Where the receiver offers memory that is not deferred, it works as a StreamSender.
    """

    def __init__(
        self, address: str, schema: FeatureSchema, timeout_s: float, connector: SenderConnector
    ) -> None:
        """Connect, and start the threads if the receiver's memory is deferred."""
        deadline = time.monotonic() + timeout_s
        super().__init__(address, schema, timeout_s, connector)
        self._open_tickets: set[Ticket] = set()
        self._to_announce: queue.SimpleQueue[_Send | None] = queue.SimpleQueue()
        self._to_complete: queue.SimpleQueue[_Send | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        if isinstance(self._buffer, DeferredBuffer):
            self._start(self._buffer, deadline)

    def send(self, sample: FeatureSample, timeout_s: float) -> Ticket:
        """Hand over a sample; its ticket is done when it is sent (T2, T5, T6)."""
        if not isinstance(self._buffer, DeferredBuffer):
            return super().send(sample, timeout_s)
        self._check(sample)
        with self._exclusive(timeout_s) as deadline, self._withdrawn_on_error():
            self._buffer.write(self._reserve(len(sample.input_ids), deadline), sample)
            ready = Packet(PacketKind.READY, self._number, sample.request_id)
            send = _Send(self._buffer.take_pending(), ready, Future())
            self._open_tickets.add(send.ticket)
            send.ticket.add_done_callback(self._open_tickets.discard)
            self._to_announce.put(send)
        return send.ticket

    def flush(self, timeout_s: float) -> None:
        """Return when every ticket is done (T8)."""
        deadline = time.monotonic() + timeout_s
        super().flush(timeout_s)
        late = wait(list(self._open_tickets), max(0.0, deadline - time.monotonic())).not_done
        if late:
            raise DeadlineExceeded(f"{len(late)} samples to {self._name} were not sent within {timeout_s} s")

    def close(self) -> None:
        """Announce what is still to be announced, within ``CLOSE_S``, and end the connection.

        A sample that the receiver has still to ask for may keep its ticket for a while.
        """
        if self._closed:
            return
        self._to_announce.put(None)
        if isinstance(self._buffer, DeferredBuffer):
            announcing, _, *completing = self._threads
            announcing.join(CLOSE_S)
            if announcing.is_alive():
                self._buffer.abandon()
                announcing.join(CLOSE_S)
            for thread in completing:
                thread.join(SETTLE_S)
        super().close()
        with contextlib.suppress(queue.Empty):  # a send of another thread may have come in meanwhile
            while (send := self._to_announce.get_nowait()) is not None:
                send.ticket.set_exception(ProtocolError("the sender was closed"))

    def _close_buffer(self) -> None:
        """Keep what the receiver has not asked for yet for ``LINGER_S``; the process does not end before."""
        for thread in self._threads[1:2]:
            thread.join()  # it watches a connection that has ended
        if any(thread.is_alive() for thread in self._threads[2:]):
            threading.Thread(target=self._linger, name=f"linger {self._name}").start()
        else:
            super()._close_buffer()

    def _linger(self) -> None:
        assert isinstance(self._buffer, DeferredBuffer)
        completing = self._threads[2]
        completing.join(LINGER_S)
        self._buffer.abandon()
        completing.join(LINGER_S)
        super()._close_buffer()

    def _start(self, buffer: DeferredBuffer, deadline: float) -> None:
        """Start the threads, and wait until the buffer is open."""
        opened: Future[RunError | None] = Future()
        work: dict[str, Callable[[], None]] = {
            "announce": partial(self._announce_all, buffer, opened),
            "watch": partial(self._watch, buffer),
        }
        if buffer.overlapping:
            work["complete"] = self._complete_all
        for name, target in work.items():
            self._threads.append(threading.Thread(target=target, name=f"{name} {self._name}", daemon=True))
            self._threads[-1].start()
        try:
            failure = opened.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            failure = DeadlineExceeded(f"the way to the receiver {self._name} was not open in time")
        if failure is not None:
            buffer.abandon()
            self.close()
            raise failure

    def _announce_all(self, buffer: DeferredBuffer, opened: Future[RunError | None]) -> None:
        """Announce samples in their order; runs in a thread of its own.

        What fails here ends the connection: nothing that comes later could arrive in its place.
        """
        failure = self._failure_of(buffer.open)
        opened.set_result(failure)
        while (send := self._to_announce.get()) is not None:
            failure = failure or self._failure_of(partial(self._announce, send))
            if failure is None and buffer.overlapping:
                self._to_complete.put(send)
                continue
            failure = failure or self._failure_of(send.pending.wait_sent)
            if failure is not None:
                self._channel.shutdown()
            _settle(send.ticket, failure)
            del send  # and the memory that it holds
        self._to_complete.put(None)

    def _announce(self, send: _Send) -> None:
        send.pending.wait_sendable()
        self._send_packet(send.ready, time.monotonic() + CLOSE_S)

    def _complete_all(self) -> None:
        """Complete the tickets of overlapping samples in their order; runs in a thread of its own."""
        while (send := self._to_complete.get()) is not None:
            _settle(send.ticket, self._failure_of(send.pending.wait_sent))
            del send

    def _failure_of(self, step: Callable[[], None]) -> RunError | None:
        return failure_of(step, f"a sample did not reach {self._name}")

    def _watch(self, buffer: DeferredBuffer) -> None:
        """Wait until either end closes the connection; runs in a thread of its own."""
        ended = select.poll()
        ended.register(self._channel.end, select.POLLRDHUP)
        ended.poll()
        if not (
            self._closed and buffer.overlapping
        ):  # then it is not known whether the receiver is still there
            buffer.abandon()


def failure_of(step: Callable[[], None], problem: str) -> RunError | None:
    """Do a step of a transfer; return why it failed, with ``problem`` before an error of torch's, or None."""
    try:
        step()
    except RunError as error:
        return error
    except RuntimeError as error:  # what torch raises for everything
        return RunError(f"{problem}: {error}")
    return None


def _settle(ticket: Ticket, failure: RunError | None) -> None:
    if failure is None:
        ticket.set_result(None)
    else:
        ticket.set_exception(failure)
