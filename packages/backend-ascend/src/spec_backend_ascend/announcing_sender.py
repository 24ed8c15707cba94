"""AnnouncingSender: says that a sample is there when the device has copied it, without a wait in ``send``."""

from __future__ import annotations

import queue
import threading
import time
from abc import abstractmethod
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, NamedTuple

from spec_core.cpu.block_memory import SenderMemory
from spec_core.cpu.shared_memory_transport import SharedMemorySender
from spec_core.cpu.shared_memory_wire import Kind, Record
from spec_core.errors import DeadlineExceeded, PeerLost, RunError

if TYPE_CHECKING:
    import torch

    from spec_core.cpu.block_memory import SenderEnd
    from spec_core.records import FeatureSample, FeatureSchema
    from spec_core.transport import Ticket

CLOSE_S = 10.0
"""How long ``close`` waits for copies that are under way."""


class DeviceView(SenderMemory):
    """Memory that ``write`` fills on the current stream, some time after it has returned."""

    @property
    @abstractmethod
    def copied(self) -> torch.npu.Event:
        """The end of the last ``write``: its sample's memory may be used again."""


class _Copy(NamedTuple):
    done: torch.npu.Event
    ready: Record
    ticket: Ticket


class AnnouncingSender(SharedMemorySender):
    """A thread of its own waits for the copies, in their order: a ticket is done when the bytes were copied (T2), and
    the receiver hears of a sample when it is all there, whatever becomes of this process then."""

    def __init__(self, address: str, schema: FeatureSchema, timeout_s: float, end: SenderEnd) -> None:
        super().__init__(address, schema, timeout_s, end)
        self._copies: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._open: set[Ticket] = set()
        self._voice = self._socket.dup()  # its timeout is not that of the thread that sends
        self._thread = threading.Thread(target=self._announce, name="announcer", daemon=True)
        self._thread.start()

    def send(self, sample: FeatureSample, timeout_s: float) -> Ticket:
        if not isinstance(self._memory, DeviceView):
            return super().send(sample, timeout_s)
        self._check(sample)
        with self._exclusive(timeout_s) as deadline, self._withdrawn_on_error():
            self._memory.write(self._reserve(len(sample.input_ids), deadline), sample)
            copy = _Copy(self._memory.copied, Record(Kind.READY, self._number, sample.sample_id), Future())
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
                f"{len(late)} samples to {self._name} were not copied within {timeout_s} s"
            )

    def close(self) -> None:
        if self._closed:
            return
        self._copies.put(None)
        self._thread.join(CLOSE_S)
        super().close()
        self._voice.close()

    def _announce(self) -> None:
        """The thread. A copy that failed, or whose receiver has gone, fails its ticket."""
        while (copy := self._copies.get()) is not None:
            try:
                copy.done.synchronize()
                self._voice.settimeout(CLOSE_S)
                self._voice.send(copy.ready.encode())
            except OSError as error:
                copy.ticket.set_exception(PeerLost(f"the receiver {self._name} has gone: {error}"))
            except RuntimeError as error:  # what torch raises for everything
                copy.ticket.set_exception(RunError(f"the copy to {self._name} failed: {error}"))
            else:
                copy.ticket.set_result(None)
