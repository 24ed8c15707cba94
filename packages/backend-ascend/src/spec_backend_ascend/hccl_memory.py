"""HcclMemory: samples that stay in the sender's card until the receiver asks for them, and then travel over HCCL.

Each sender has a communicator of two with the receiver: the sender is rank 0 and its root. HCCL's calls may be
issued by one thread of a process at a time, and torch's own groups (FSDP's) know no lock of ours: so the receiver
posts its HcclRecv in the thread that calls ``receive``, which is the one that trains. Hence a sample that was
announced, and not received, is lost with its sender; its ticket is not done before it has been received.
"""

from __future__ import annotations

import base64
import contextlib
import mmap
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from spec_backend_ascend.announcing_sender import DeviceView, Mark
from spec_backend_ascend.hccl import Communicator, root_info
from spec_backend_ascend.place import place_of
from spec_core.errors import RunError
from spec_core.streams.block_memory import Block, MemoryProvider, ReceiverMemory, SenderEnd, SenderMemory
from spec_core.streams.host_memory import HostEnd

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from spec_core.records import FeatureSample
    from spec_core.streams.shared_memory_wire import Layout, Record, Welcome

SENDER, RECEIVER = 0, 1
LINGER_S, POLL_S = 60.0, 1e-3
"""How long a closed sender keeps samples for a receiver that has not asked for them, and how often it looks."""

COUNTER_BYTES = 8
"""What the two ends share on the host: how many samples the receiver has asked for."""

_spare_streams: list[torch.npu.Stream] = []
"""One per sender that is open, so that none waits for another's receiver; torch never gives a stream back."""


class OtherCards(MemoryProvider):
    """For senders of other cards: each gets memory of its own."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._admitted: list[HcclMemory] = []

    def serves(self, place: str) -> bool:
        kind, where, _ = _parts(place)
        return kind == HcclMemory.kind and where != place_of(self._device)

    def admit(self, place: str, room: Callable[[], None]) -> ReceiverMemory:
        _, _, root = _parts(place)
        self._admitted.append(HcclMemory(self._layout, self._device, base64.b64decode(root)))
        return self._admitted[-1]

    def close(self) -> None:
        for memory in self._admitted:
            memory.close()


class HcclMemory(ReceiverMemory):
    """One sender's. It has none until a sample is read; what is announced counts against the window all the same, and
    lies in the sender's card."""

    kind: ClassVar[str] = "hccl"
    descriptor: int

    def __init__(self, layout: Layout, device: torch.device, root: bytes) -> None:
        self._layout, self._device = layout, device
        self.size = COUNTER_BYTES
        self.descriptor = os.memfd_create("spec-taken", os.MFD_CLOEXEC)
        os.truncate(self.descriptor, self.size)
        self._taken = _counter(self.descriptor)
        self._communicator = _connected(root, RECEIVER, device)

    def allocate(self, num_tokens: int) -> Block | None:
        return Block(0, num_tokens)

    def is_written(self, block: Block) -> bool:
        return not block.num_tokens  # then nothing travels

    def read(self, block: Block) -> tuple[Tensor, Tensor]:
        communicator = self._communicator.result()
        communicator.check()
        size = self._layout.block_bytes(block.num_tokens)
        received = torch.empty(size, dtype=torch.uint8, device=self._device)
        if size:
            stream = torch.npu.current_stream(self._device)
            communicator.receive(received.data_ptr(), size, SENDER, stream.npu_stream)
            self._taken[0] += 1
        return self._layout.view(received, 0, block.num_tokens)

    def free(self, block: Block) -> None:
        """The memory goes with the sample."""

    def close(self) -> None:
        os.close(self.descriptor)
        del self._taken
        _destroy(self._communicator)


@dataclass(frozen=True)
class Received(Mark):
    """The receiver has asked for the sample, and its HcclSend has come to its end: HCCL may keep it in between."""

    sent: torch.npu.Event
    number: int
    taken: memoryview

    def query(self) -> bool:
        return self.taken[0] >= self.number and self.sent.query()

    def synchronize(self) -> None:
        self.sent.synchronize()


class HcclView(DeviceView):
    """``write`` copies a sample aside on the current stream; from there it is sent on a stream of its own, which
    waits for the receiver without anybody else's waiting for it."""

    def __init__(self, layout: Layout, root: bytes, device: torch.device, descriptor: int) -> None:
        self._layout, self._device = layout, device
        self._communicator = _connected(root, SENDER, device)
        self._taken, self._count = _counter(descriptor), 0
        self._stream = _spare_streams.pop() if _spare_streams else torch.npu.Stream(device)
        self._copied = torch.npu.Event()
        self._safe: Mark = self._copied
        self._staged: list[tuple[torch.npu.Event, Tensor]] = []

    def write(self, grant: Record, sample: FeatureSample) -> None:
        size = self._layout.block_bytes(len(sample.input_ids))
        staged = torch.empty(size, dtype=torch.uint8, device=self._device)
        ids, hidden = self._layout.view(staged, 0, len(sample.input_ids))
        ids.copy_(sample.input_ids)
        hidden.copy_(sample.hidden_TNH)
        self._copied = self._safe = torch.npu.Event()
        self._copied.record(torch.npu.current_stream(self._device))
        if size:
            self._count += 1
            self._safe = Received(self._send(staged), self._count, self._taken)

    @property
    def copied(self) -> torch.npu.Event:
        return self._copied

    @property
    def safe(self) -> Mark:
        return self._safe

    def settle(self) -> None:
        """Nothing of the receiver's is ever written to."""

    def close(self) -> None:
        """What the receiver has not asked for yet stays for it, for a while; the process does not end before."""
        if self.deserted or self._is_sent():
            self._end()
        else:
            threading.Thread(target=self._linger, name="hccl-linger").start()

    def _send(self, staged: Tensor) -> torch.npu.Event:
        communicator = self._communicator.result()
        self._stream.wait_event(self._copied)
        communicator.send(staged.data_ptr(), staged.nbytes, RECEIVER, self._stream.npu_stream)
        sent = torch.npu.Event()
        sent.record(self._stream)
        self._staged = [(event, kept) for event, kept in self._staged if not event.query()] + [(sent, staged)]
        return sent

    def _is_sent(self) -> bool:
        return all(sent.query() for sent, _ in self._staged)

    def _linger(self) -> None:
        deadline = time.monotonic() + LINGER_S
        while not self._is_sent() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self._end()

    def _end(self) -> None:
        sent = self._is_sent()
        _destroy(self._communicator)
        self._safe = self._copied
        del self._taken
        if sent:
            with contextlib.suppress(RuntimeError):  # a stream on which a call has failed is of no use
                self._stream.synchronize()
                _spare_streams.append(self._stream)


class HcclEnd(SenderEnd):
    """A sender whose tensors are on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._root = device, root_info()
        self.place = f"{HcclMemory.kind}|{place_of(device)}|{base64.b64encode(self._root).decode()}"

    def attach(self, welcome: Welcome, descriptor: int | None, layout: Layout) -> SenderMemory:
        if welcome.memory != HcclMemory.kind or descriptor is None:
            return HostEnd().attach(welcome, descriptor, layout)
        return HcclView(layout, self._root, self._device, descriptor)


def _parts(place: str) -> tuple[str, str, str]:
    """Of ``HcclEnd.place``: kind, card, root info."""
    kind, _, rest = place.partition("|")
    where, _, root = rest.partition("|")
    return kind, where, root


def _connected(root: bytes, rank: int, device: torch.device) -> Future[Communicator]:
    """Both ends make the communicator at the same time, each in a thread that ends with it."""

    def connect() -> Communicator:
        torch.npu.set_device(device)
        return Communicator(root, rank, 2)

    with contextlib.ExitStack() as stack:
        pool = ThreadPoolExecutor(1, "hccl-connect")
        stack.callback(pool.shutdown, wait=False)
        return pool.submit(connect)


def _counter(descriptor: int) -> memoryview:
    """The shared number, at index 0; written and read whole."""
    return memoryview(mmap.mmap(descriptor, COUNTER_BYTES)).cast("Q")


def _destroy(communicator: Future[Communicator]) -> None:
    with contextlib.suppress(RunError):
        communicator.result().destroy()
