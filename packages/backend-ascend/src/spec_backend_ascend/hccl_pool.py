"""HcclPool: samples that stay in the sender's card until the receiver asks for them, and then travel over HCCL.

Each sender has a communicator of two with the receiver: the sender is rank 0 and its root. HCCL's calls may be
issued by one thread of a process at a time, and torch's own groups (FSDP's) do not share a lock with this one: so
the receiver posts its HcclRecv in the thread that calls ``receive``, which is the one that trains. Hence a sample
that was announced, and not received, is lost with its sender; its ticket is not done before it has been received.
"""

from __future__ import annotations

import base64
import contextlib
import mmap
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, ClassVar

import torch

from spec_backend_ascend.hccl import HcclCommunicator, root_info
from spec_backend_ascend.visible_devices import card_id, host_of
from spec_core.errors import PeerLost, RunError
from spec_kit import OwnStream
from spec_kit.streams import (
    Block,
    BufferPoolFactory,
    DeferredBuffer,
    HostConnector,
    PendingSend,
    ReceiverPool,
    SenderBuffer,
    SenderConnector,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from spec_core.records import FeatureSample
    from spec_kit.streams import ConnectReply, Packet, SampleLayout

SENDER, RECEIVER = 0, 1
POLL_S = 1e-3
"""How often a sender looks whether the receiver has asked for a sample, in seconds."""

COUNTER_BYTES = 8
"""Size of what the two ends share on the host: how many samples the receiver has asked for."""


class HcclPoolFactory(BufferPoolFactory):
    """Factory for senders of the host's other cards, each of which gets a pool of its own."""

    def __init__(self, layout: SampleLayout, device: torch.device) -> None:
        """Make pools that deliver on ``device``."""
        self._layout, self._device = layout, device
        self._admitted: list[HcclPool] = []

    def serves(self, device_id: str) -> bool:
        """Return whether a sender on that device can write to its pools."""
        kind, card, _ = _split(device_id)
        own = card_id(self._device)
        return kind == HcclPool.kind and card != own and host_of(card) == host_of(own)

    def admit(self, device_id: str, has_room: Callable[[], None]) -> ReceiverPool:
        """Return the pool for one more sender."""
        _, _, root = _split(device_id)
        self._admitted.append(HcclPool(self._layout, self._device, base64.b64decode(root)))
        return self._admitted[-1]

    def close(self) -> None:
        """Close it and give back what it holds. Idempotent."""
        for pool in self._admitted:
            pool.close()


class HcclPool(ReceiverPool):
    """One sender's pool. It has no memory until a sample is read.

    What is announced counts against the window all the same, and lies in the sender's card.
    """

    kind = "hccl"
    descriptor: int

    def __init__(self, layout: SampleLayout, device: torch.device, root: bytes) -> None:
        """Begin to connect to the sender that has made ``root``."""
        self._layout, self._device = layout, device
        self.size = COUNTER_BYTES
        self.descriptor = os.memfd_create("spec-taken", os.MFD_CLOEXEC)
        os.truncate(self.descriptor, self.size)
        self._taken = _counter(self.descriptor)
        self._communicator = _connected(root, RECEIVER, device)

    def allocate(self, num_tokens: int) -> Block | None:
        """Return room for a sample of that many tokens, or None until other blocks are freed."""
        return Block(0, num_tokens)

    def is_written(self, block: Block) -> bool:
        """Return whether the sample has no bytes: others travel only when they are read."""
        return not block.num_tokens  # then nothing travels

    def read(self, block: Block) -> tuple[Tensor, Tensor]:
        """Receive the sample into new memory, on the current stream."""
        communicator = self._communicator.result()
        communicator.check()
        size = self._layout.block_bytes(block.num_tokens)
        received = torch.empty(size, dtype=torch.uint8, device=self._device)
        if size:
            communicator.recv(received, SENDER)
            self._taken[0] += 1
        return self._layout.view(received, 0, block.num_tokens)

    def free(self, block: Block) -> None:
        """Do nothing: the memory goes with the sample."""

    def close(self) -> None:
        """Close it and give back what it holds. Idempotent."""
        os.close(self.descriptor)
        del self._taken
        _destroy(self._communicator)


class _Transfer(PendingSend):
    """A staged sample, and its HcclSend, which waits on a stream of its own for the receiver."""

    def __init__(self, buffer: HcclBuffer, copied: torch.npu.Event, staged: Tensor) -> None:
        self._buffer, self._copied, self._staged = buffer, copied, staged
        self._sent = buffer.enqueue(copied, staged) if staged.nbytes else copied
        self._number = buffer.num_enqueued

    def wait_sendable(self) -> None:
        self._copied.synchronize()

    def wait_sent(self) -> None:
        """Wait until the receiver has asked for the sample and its HcclSend is complete.

        HCCL may keep a sample in between. Asking again and again lets the thread end with the receiver.
        """
        while self._buffer.num_taken < self._number or not self._sent.query():
            self._buffer.pause()
        self._sent.synchronize()  # raises what the transfer has failed with


class HcclBuffer(DeferredBuffer):
    """``write`` copies a sample aside on the current stream.

    From there it is sent on a stream of its own, which waits for the receiver without delaying any other stream.
    """

    overlapping: ClassVar[bool] = True

    def __init__(self, layout: SampleLayout, root: bytes, device: torch.device, descriptor: int) -> None:
        """Begin to connect to the receiver, whose counter is behind ``descriptor``."""
        self._layout, self._device = layout, device
        self._communicator = _connected(root, SENDER, device)
        self._taken = _counter(descriptor)
        self.num_enqueued = 0
        """Number of samples that were given to HCCL."""
        self._own_stream = OwnStream(device)
        """None waits for another sender's receiver."""
        self._stream: torch.npu.Stream = self._own_stream.stream
        self._pending: list[_Transfer] = []
        self._abandoned = threading.Event()

    @property
    def num_taken(self) -> int:
        """Return how many samples the receiver has asked for."""
        return self._taken[0]

    def write(self, grant: Packet, sample: FeatureSample) -> None:
        """Copy a sample aside and queue its transfer."""
        num_tokens = len(sample.input_ids)
        staged = torch.empty(self._layout.block_bytes(num_tokens), dtype=torch.uint8, device=self._device)
        ids, hidden = self._layout.view(staged, 0, num_tokens)
        ids.copy_(sample.input_ids)
        hidden.copy_(sample.hidden_TNH)
        copied = torch.npu.Event()
        copied.record(torch.npu.current_stream(self._device))
        self._pending.append(_Transfer(self, copied, staged))

    def take_pending(self) -> PendingSend:
        """Return what the last ``write`` has begun."""
        return self._pending.pop()

    def enqueue(self, copied: torch.npu.Event, staged: Tensor) -> torch.npu.Event:
        """Queue the HcclSend of a staged sample; return the event of its end."""
        communicator = self._communicator.result()
        self._stream.wait_event(copied)
        with torch.npu.stream(self._stream):
            communicator.send(staged, RECEIVER)
        sent = torch.npu.Event()
        sent.record(self._stream)
        self.num_enqueued += 1
        return sent

    def pause(self) -> None:
        """Wait for a moment. Raise PeerLost if the receiver has gone."""
        if self._abandoned.wait(POLL_S):
            raise PeerLost("the receiver hung up")

    def settle(self) -> None:
        """Return at once: nothing of the receiver's is ever written to."""

    def abandon(self) -> None:
        """Make pending and future sends raise PeerLost."""
        self._abandoned.set()

    def close(self) -> None:
        """Free the communicator, and keep the stream for another sender."""
        _destroy(self._communicator)
        del self._taken
        if not self._abandoned.is_set():
            with contextlib.suppress(RuntimeError):  # a stream on which a call has failed is of no use
                self._stream.synchronize()
                self._own_stream.close()


class HcclConnector(SenderConnector):
    """A sender whose tensors are on ``device``."""

    def __init__(self, device: torch.device) -> None:
        """Make the root of a new communicator on ``device``."""
        self._device, self._root = device, root_info()
        self.device_id = f"{HcclPool.kind}|{card_id(device)}|{base64.b64encode(self._root).decode()}"

    def attach(self, reply: ConnectReply, descriptor: int | None, layout: SampleLayout) -> SenderBuffer:
        """Return the view of the pool that the receiver offers."""
        if reply.pool != HcclPool.kind or descriptor is None:
            return HostConnector().attach(reply, descriptor, layout)
        return HcclBuffer(layout, self._root, self._device, descriptor)


def _split(device_id: str) -> tuple[str, str, str]:
    """Return the parts of ``HcclConnector.device_id``: kind, card, root info."""
    kind, _, rest = device_id.partition("|")
    card, _, root = rest.partition("|")
    return kind, card, root


def _connected(root: bytes, rank: int, device: torch.device) -> Future[HcclCommunicator]:
    """Make the communicator in a thread that ends with it: both ends do so at the same time."""

    def connect() -> HcclCommunicator:
        torch.npu.set_device(device)
        return HcclCommunicator(root, rank, 2)

    with contextlib.ExitStack() as stack:
        pool = ThreadPoolExecutor(1, "hccl-connect")
        stack.callback(pool.shutdown, wait=False)
        return pool.submit(connect)


def _counter(descriptor: int) -> memoryview:
    """Return the shared number, at index 0; it is written and read whole."""
    return memoryview(mmap.mmap(descriptor, COUNTER_BYTES)).cast("Q")


def _destroy(communicator: Future[HcclCommunicator]) -> None:
    with contextlib.suppress(RunError):
        communicator.result().abort()
