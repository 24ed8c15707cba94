"""AsyncSender is a stream's sender whose samples may still be in transfer when ``send`` returns.

It starts up to three threads. One announces the samples to the receiver in order. One waits until the
connection ends, so that no device work waits for a receiver that is gone. If samples overlap, one completes
tickets (the futures that ``send`` returns).
"""

from __future__ import annotations

import contextlib
import queue
import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import ClassVar, NamedTuple

from spec_core.errors import DeadlineExceeded, ProtocolError, RunError
from spec_core.records import FeatureSample, FeatureSchema
from spec_core.transport import Ticket
from spec_kit.streams.buffer_pool import SenderBuffer, SenderConnector
from spec_kit.streams.sender import StreamSender
from spec_kit.streams.wire import Packet, PacketKind

CLOSE_S = 10.0
"""Seconds that ``close`` waits until all samples are announced."""
SETTLE_S = 0.5
"""Seconds that ``close`` waits, after the announcements, until the receiver has requested all samples."""
LINGER_S = 60.0
"""Seconds for which a closed sender stores samples that the receiver has not requested yet."""


class PendingSend(ABC):
    """A sample in transfer. Both methods block; they raise RunError or RuntimeError if the transfer fails."""

    @abstractmethod
    def wait_sendable(self) -> None:
        """Wait until the sample may be announced to the receiver."""

    @abstractmethod
    def wait_sent(self) -> None:
        """Wait until the transfer no longer needs this process, so that the ticket is done (T7)."""


class DeferredBuffer(SenderBuffer):
    """A buffer whose ``write`` returns before the sample is in the receiver's memory."""

    overlapping: ClassVar[bool] = False
    """Whether a sample may be announced before the previous sample is sent. Such a buffer still stores samples
    for the receiver after the sender has closed."""

    def open(self) -> None:
        """Prepare the buffer on the announcing thread. The call may block; ``connect`` waits for it."""

    @abstractmethod
    def take_pending(self) -> PendingSend:
        """Return the transfer that the last ``write`` has started; called once after each ``write``."""

    def abandon(self) -> None:
        """Make pending and future transfers raise PeerLost; called, on any thread, if the receiver is gone."""


class _Send(NamedTuple):
    pending: PendingSend
    ready: Packet
    ticket: Ticket


class AsyncSender(StreamSender):
    """A StreamSender that returns before a sample is sent; the ticket is done when the sample is sent.

    If the receiver offers memory without a DeferredBuffer, it works like a StreamSender.
    """

    def __init__(
        self, address: str, schema: FeatureSchema, timeout_s: float, connector: SenderConnector
    ) -> None:
        """Connect, and start the threads if the receiver's memory has a DeferredBuffer."""
        deadline = time.monotonic() + timeout_s
        super().__init__(address, schema, timeout_s, connector)
        self._open_tickets: set[Ticket] = set()
        self._to_announce: queue.SimpleQueue[_Send | None] = queue.SimpleQueue()
        self._to_complete: queue.SimpleQueue[_Send | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        if isinstance(self._buffer, DeferredBuffer):
            self._start(self._buffer, deadline)

    def send(self, sample: FeatureSample, timeout_s: float) -> Ticket:
        """Start to send a sample; the returned ticket is done when the sample is sent (T2, T5, T6)."""
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
        """Wait until every ticket is done (T8)."""
        deadline = time.monotonic() + timeout_s
        super().flush(timeout_s)
        late = wait(list(self._open_tickets), max(0.0, deadline - time.monotonic())).not_done
        if late:
            raise DeadlineExceeded(f"samples to {self._name} not sent within {timeout_s} s: {len(late)}")

    def close(self) -> None:
        """Announce the remaining samples, within ``CLOSE_S`` seconds, and end the connection.

        The ticket of a sample that the receiver has not requested yet may stay pending for up to ``LINGER_S``
        seconds.
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
        with contextlib.suppress(queue.Empty):  # another thread may have called ``send`` meanwhile
            while (send := self._to_announce.get_nowait()) is not None:
                send.ticket.set_exception(ProtocolError("the sender was closed"))

    def _close_buffer(self) -> None:
        """Store samples that the receiver has not requested yet for up to ``LINGER_S`` seconds, on a thread.

        The process does not exit before this thread ends.
        """
        for thread in self._threads[1:2]:
            thread.join()  # the watching thread ends, because the connection has ended
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
        """Start the threads, and wait until ``buffer.open`` has returned."""
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
        """Announce samples in the order of their sends; runs on a separate thread.

        A failure ends the connection, because samples must arrive without gaps.
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
            del send  # this frees the memory that it holds
        self._to_complete.put(None)

    def _announce(self, send: _Send) -> None:
        send.pending.wait_sendable()
        self._send_packet(send.ready, time.monotonic() + CLOSE_S)

    def _complete_all(self) -> None:
        """Complete the tickets of overlapping samples in order; runs on a separate thread."""
        while (send := self._to_complete.get()) is not None:
            _settle(send.ticket, self._failure_of(send.pending.wait_sent))
            del send

    def _failure_of(self, step: Callable[[], None]) -> RunError | None:
        return failure_of(step, f"a sample did not reach {self._name}")

    def _watch(self, buffer: DeferredBuffer) -> None:
        """Wait, on a separate thread, until either side closes the connection; then abandon the buffer.

        If this sender has closed it and samples may overlap, the receiver may still read samples from the buffer, so
        the buffer is not abandoned.
        """
        ended = select.poll()
        ended.register(self._channel.end, select.POLLRDHUP)
        ended.poll()
        if not (self._closed and buffer.overlapping):
            buffer.abandon()


def failure_of(step: Callable[[], None], problem: str) -> RunError | None:
    """Call ``step``; return None, or its error as a RunError. ``problem`` is put before torch's messages."""
    try:
        step()
    except RunError as error:
        return error
    except RuntimeError as error:  # torch raises it for all errors
        return RunError(f"{problem}: {error}")
    return None


def _settle(ticket: Ticket, failure: RunError | None) -> None:
    if failure is None:
        ticket.set_result(None)
    else:
        ticket.set_exception(failure)
