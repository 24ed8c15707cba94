"""AnnouncingSender: says that a sample is there when the device has copied it, without a wait in ``send``."""

from __future__ import annotations

import queue
import select
import threading
import time
from abc import abstractmethod
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, NamedTuple, Protocol

from spec_core.errors import DeadlineExceeded, PeerLost, RunError
from spec_core.streams.block_memory import SenderMemory
from spec_core.streams.shared_memory_transport import SharedMemorySender
from spec_core.streams.shared_memory_wire import Kind, Record

if TYPE_CHECKING:
    import torch

    from spec_core.records import FeatureSample, FeatureSchema
    from spec_core.streams.block_memory import SenderEnd
    from spec_core.transport import Ticket

CLOSE_S = 10.0
"""How long ``close`` waits for copies that are under way."""
SETTLE_S = 0.5
"""How long it waits for the tickets of what has arrived."""
LOOK_MS = 1
"""Between two looks at a sample that is under way."""


class Mark(Protocol):
    """Something that will come to pass; ``torch.npu.Event`` is one."""

    def query(self) -> bool:
        """Whether it has."""

    def synchronize(self) -> None:
        """Waits for it. Raises RuntimeError if it has failed."""


class DeviceView(SenderMemory):
    """Memory that ``write`` fills on the current stream, some time after it has returned."""

    deserted: bool = False
    """The receiver has gone: nothing that is under way will arrive."""

    @property
    @abstractmethod
    def copied(self) -> torch.npu.Event:
        """The end of the last ``write``: its sample's memory may be used again, and it may be announced."""

    @property
    def safe(self) -> Mark:
        """From then on that sample does not need this process any more: its ticket is done (T7)."""
        return self.copied


class _Copy(NamedTuple):
    copied: torch.npu.Event
    safe: Mark
    ready: Record
    ticket: Ticket


class AnnouncingSender(SharedMemorySender):
    """One thread waits for the copies, in their order, and announces them: the receiver hears of a sample when it is
    all there. Another then keeps the ticket until the sample is safe, or the receiver has gone."""

    def __init__(self, address: str, schema: FeatureSchema, timeout_s: float, end: SenderEnd) -> None:
        super().__init__(address, schema, timeout_s, end)
        self._copies: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._announced: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._open: set[Ticket] = set()
        self._voice = self._socket.dup()  # its timeout is not that of the thread that sends
        self._announcer = threading.Thread(target=self._announce, name="announcer", daemon=True)
        self._keeper = threading.Thread(target=self._keep_tickets, name="ticket keeper", daemon=True)
        self._announcer.start()
        self._keeper.start()

    def send(self, sample: FeatureSample, timeout_s: float) -> Ticket:
        if not isinstance(self._memory, DeviceView):
            return super().send(sample, timeout_s)
        self._check(sample)
        with self._exclusive(timeout_s) as deadline, self._withdrawn_on_error():
            self._memory.write(self._reserve(len(sample.input_ids), deadline), sample)
            ready = Record(Kind.READY, self._number, sample.request_id)
            copy = _Copy(self._memory.copied, self._memory.safe, ready, Future())
            self._open.add(copy.ticket)
            copy.ticket.add_done_callback(self._open.discard)
            self._copies.put(copy)
        return copy.ticket

    def flush(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        super().flush(timeout_s)
        late = wait(list(self._open), max(0.0, deadline - time.monotonic())).not_done
        if late:
            raise DeadlineExceeded(
                f"{len(late)} samples to {self._name} were not handed over within {timeout_s} s"
            )

    def close(self) -> None:
        """A sample that the receiver has still to ask for may keep its ticket, and the keeper, for a while."""
        if self._closed:
            return
        self._copies.put(None)
        self._announcer.join(CLOSE_S)
        self._keeper.join(SETTLE_S)
        super().close()
        self._voice.close()

    def _announce(self) -> None:
        """A thread. A copy that failed, or whose receiver has gone, fails its ticket."""
        while (copy := self._copies.get()) is not None:
            try:
                copy.copied.synchronize()
                self._voice.settimeout(CLOSE_S)
                self._voice.send(copy.ready.encode())
            except (OSError, RuntimeError) as error:
                copy.ticket.set_exception(self._explained(error))
            else:
                self._announced.put(copy)
        self._announced.put(None)

    def _keep_tickets(self) -> None:
        """A thread."""
        hangup = select.poll()
        hangup.register(self._voice, 0)  # the end of a connection is told all the same
        while (copy := self._announced.get()) is not None:
            try:
                while not copy.safe.query():
                    self._look(hangup)
                copy.safe.synchronize()  # raises what it was waiting for has failed with
            except (OSError, RuntimeError) as error:
                copy.ticket.set_exception(self._explained(error))
            else:
                copy.ticket.set_result(None)

    def _look(self, hangup: select.poll) -> None:
        """A pause, or ConnectionError: once this end is closed, nobody can tell whether the other one is there."""
        if self._closed:
            time.sleep(LOOK_MS / 1000)
        elif hangup.poll(LOOK_MS) and not self._closed:
            self._memory.deserted = True
            raise ConnectionResetError("it hung up")

    def _explained(self, error: OSError | RuntimeError) -> RunError:
        if isinstance(error, OSError):
            return PeerLost(f"the receiver {self._name} has gone: {error}")
        return RunError(
            f"a sample did not reach {self._name}: {error}"
        )  # torch raises RuntimeError for everything
