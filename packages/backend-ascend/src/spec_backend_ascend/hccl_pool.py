"""HcclPool receives samples by HCCL while its card trains.

Each sender shares a two-rank communicator with the receiver; the sender is rank 0 and makes the root info, by
which the receiver finds it. Only one thread of a process at a time may call HCCL, and torch's own groups
(FSDP's) do not share a lock with this module. The receiver therefore calls HcclRecv in the thread that calls
``receive``, which is the training thread: each call of ``receive`` queues the HcclRecv of every sample that was
announced, on a separate stream, and returns a sample whose HcclRecv has ended. So no other stream waits for a
sender. A sample that was announced but not asked for is lost if its sender dies.
"""

from __future__ import annotations

import base64
import contextlib
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import ClassVar

import torch
from torch import Tensor

from spec_backend_ascend.hccl import HcclCommunicator, root_info
from spec_backend_ascend.visible_devices import card_id, host_of
from spec_core.errors import PeerLost, RunError
from spec_core.records import FeatureSample
from spec_kit import OwnStream
from spec_kit.streams import (
    Arrived,
    Block,
    BufferPoolFactory,
    ConnectReply,
    DeferredBuffer,
    HostConnector,
    Packet,
    PendingSend,
    ReceiverPool,
    SampleLayout,
    SenderBuffer,
    SenderConnector,
    failure_of,
)

SENDER, RECEIVER = 0, 1
POLL_S = 1e-3
"""Seconds between a sender's checks of whether the receiver has started to receive a sample."""

GRACE_S = 0.2
"""Seconds for which an HcclRecv may continue when its sender has died, because the sample may be under way."""

COUNTER_BYTES = 8
"""Size in bytes of a counter in host memory that sender and receiver share. It counts the samples that the
receiver has started to receive."""


class HcclPoolFactory(BufferPoolFactory):
    """Makes one pool for each sender on another card of the same host."""

    def __init__(self, layout: SampleLayout, device: torch.device) -> None:
        """Make pools whose samples are received on ``device``."""
        self._layout = layout
        self._device = device
        self._admitted: list[HcclPool] = []

    def serves(self, device_id: str) -> bool:
        """Return whether a sender on the device ``device_id`` can use a pool of this factory."""
        kind, card, _ = _split(device_id)
        own = card_id(self._device)
        return kind == HcclPool.kind and card != own and host_of(card) == host_of(own)

    def admit(self, device_id: str, on_freed: Callable[[], None]) -> ReceiverPool:
        """Return the pool of a new sender."""
        _, _, root = _split(device_id)
        self._admitted.append(HcclPool(self._layout, self._device, base64.b64decode(root)))
        return self._admitted[-1]

    def close(self) -> None:
        """Close all pools that this factory made. Idempotent."""
        for pool in self._admitted:
            pool.close()


@dataclass
class _Incoming:
    """A sample that was announced and has not arrived."""

    block: Block
    arrived: Arrived
    received: torch.npu.Event | None = None
    """The end of the sample's HcclRecv, once that is queued."""


class HcclPool(ReceiverPool):
    """One sender's pool. A sample gets memory when its HcclRecv is queued.

    Announced samples still count against the receiver's window, although they are in the sender's memory.
    """

    kind = "hccl"
    descriptor: int

    def __init__(self, layout: SampleLayout, device: torch.device, root: bytes) -> None:
        """Begin to connect to the sender that made the root info ``root``."""
        self._layout = layout
        self._device = device
        self.size = COUNTER_BYTES
        self.descriptor = os.memfd_create("spec-taken", os.MFD_CLOEXEC)
        os.truncate(self.descriptor, self.size)
        self._taken = _counter(self.descriptor)
        self._communicator = _connected(root, RECEIVER, device)
        self._own_stream = OwnStream(device)
        """A separate stream, so that neither training nor another sender's samples wait for this sender."""
        self._stream: torch.npu.Stream = self._own_stream.stream
        self._numbers = count()
        self._incoming: deque[_Incoming] = deque()
        self._memory: dict[int, Tensor] = {}
        """Number of a block -> memory of its sample, from the HcclRecv on until ``read``."""
        self._when_ended: Callable[[], None] | None = None
        self._dead_since: float | None = None
        self._failure: RunError | None = None

    def allocate(self, num_tokens: int) -> Block | None:
        """Return a block that has a number and no memory, for a sample of ``num_tokens`` tokens.

        So this method never returns None.
        """
        return Block(next(self._numbers), num_tokens)

    def fetch(self, block: Block, arrived: Arrived) -> None:
        """Remember an announced sample for ``advance``."""
        self._incoming.append(_Incoming(block, arrived))

    def disconnect(self, ended: Callable[[], None]) -> None:
        """Let ``advance`` call ``ended``."""
        self._when_ended = ended

    def advance(self, sender_died: bool) -> bool:
        """Queue the HcclRecv of announced samples, and report the samples whose HcclRecv has ended.

        After a failure no sample arrives any more, and the communicator is freed, so that HCCL ends what is queued.
        """
        if self._failure is None:
            self._failure = failure_of(partial(self._transfer, sender_died), "a sample could not be received")
            if self._failure is not None and self._communicator.done():
                _destroy(self._communicator)
        while self._failure is not None and self._incoming:
            self._incoming.popleft().arrived(self._failure)
        if self._when_ended is not None and not self._incoming:
            self._when_ended()
        return bool(self._incoming)

    def read(self, block: Block) -> tuple[Tensor, Tensor]:
        """Return a sample that has arrived. Its memory is reused after the current stream's work on it."""
        memory = self._memory.pop(block.offset)
        memory.record_stream(torch.npu.current_stream(self._device))
        return self._layout.view(memory, 0, block.num_tokens)

    def free(self, block: Block) -> None:
        """Do nothing, because the memory is freed with the sample's tensors."""

    def reclaim(self, block: Block) -> None:
        """Free the memory of a sample that is not read, if it has any."""
        self._memory.pop(block.offset, None)

    def close(self) -> None:
        """Close the pool, free the communicator, and keep the stream for another pool unless a call on it failed."""
        os.close(self.descriptor)
        del self._taken
        _destroy(self._communicator)
        if self._failure is None and not self._incoming:
            self._own_stream.close()

    def _transfer(self, sender_died: bool) -> None:
        """Begin and end transfers. Raise RunError or RuntimeError if one has failed or will not end."""
        for incoming in self._incoming:
            if incoming.received is None:
                if incoming.block.num_tokens and (sender_died or not self._communicator.done()):
                    break
                incoming.received = self._receive(incoming.block)
        while self._incoming and (received := self._incoming[0].received) is not None:
            has_ended = received.query()
            if self._communicator.done():
                self._communicator.result().check()
            if not has_ended:
                break
            received.synchronize()  # raises the error of a transfer that has failed
            self._incoming.popleft().arrived(None)
        if self._incoming and sender_died:
            self._dead_since = self._dead_since or time.monotonic()
            if time.monotonic() - self._dead_since > GRACE_S:
                raise PeerLost("the sender died before its samples were received")

    def _receive(self, block: Block) -> torch.npu.Event:
        """Queue the HcclRecv of a sample, except an empty one, which is not transferred; return its end."""
        size = self._layout.block_bytes(block.num_tokens)
        with torch.npu.stream(self._stream):
            self._memory[block.offset] = torch.empty(size, dtype=torch.uint8, device=self._device)
            if block.num_tokens:
                self._communicator.result().recv(self._memory[block.offset], SENDER)
                self._taken[0] += 1
        received = torch.npu.Event()
        received.record(self._stream)
        return received


class _Transfer(PendingSend):
    """A staged sample, and its HcclSend, which waits for the receiver on a separate stream."""

    def __init__(self, buffer: HcclBuffer, copied: torch.npu.Event, staged: Tensor) -> None:
        self._buffer = buffer
        self._copied = copied
        self._staged = staged
        self._sent = buffer.enqueue(copied, staged) if staged.nbytes else copied
        self._number = buffer.num_enqueued

    def wait_sendable(self) -> None:
        self._copied.synchronize()

    def wait_sent(self) -> None:
        """Wait until the receiver has started to receive the sample and its HcclSend is complete.

        The wait polls, so that the thread can end if the receiver has disconnected. The end of the HcclSend
        alone is not enough, because HCCL may buffer a sample before the receiver receives it.
        """
        while self._buffer.num_taken < self._number or not self._sent.query():
            self._buffer.pause()
        self._sent.synchronize()  # raises the error of a transfer that has failed


class HcclBuffer(DeferredBuffer):
    """A sender's buffer: ``write`` copies a sample to a staging buffer on the current stream.

    The staged sample is sent on a separate stream, which waits for the receiver without delaying other
    streams.
    """

    overlapping: ClassVar[bool] = True

    def __init__(self, layout: SampleLayout, root: bytes, device: torch.device, descriptor: int) -> None:
        """Begin to connect to the receiver.

        ``descriptor``: file descriptor of the shared memory that has the receiver's counter.
        """
        self._layout = layout
        self._device = device
        self._communicator = _connected(root, SENDER, device)
        self._taken = _counter(descriptor)
        self.num_enqueued = 0
        """Number of samples passed to HCCL."""
        self._own_stream = OwnStream(device)
        """A separate stream, so that this sender does not wait for the receiver of another sender."""
        self._stream: torch.npu.Stream = self._own_stream.stream
        self._pending: list[_Transfer] = []
        self._abandoned = threading.Event()

    @property
    def num_taken(self) -> int:
        """Return the number of samples that the receiver has started to receive."""
        return self._taken[0]

    def write(self, grant: Packet, sample: FeatureSample) -> None:
        """Copy a sample to a staging buffer and queue its transfer."""
        num_tokens = len(sample.input_ids)
        staged = torch.empty(self._layout.block_bytes(num_tokens), dtype=torch.uint8, device=self._device)
        ids, hidden = self._layout.view(staged, 0, num_tokens)
        ids.copy_(sample.input_ids)
        hidden.copy_(sample.hidden_TNH)
        copied = torch.npu.Event()
        copied.record(torch.npu.current_stream(self._device))
        self._pending.append(_Transfer(self, copied, staged))

    def take_pending(self) -> PendingSend:
        """Return the pending send that the last ``write`` started."""
        return self._pending.pop()

    def enqueue(self, copied: torch.npu.Event, staged: Tensor) -> torch.npu.Event:
        """Queue the HcclSend of a staged sample; return an event that is complete when the send is complete."""
        communicator = self._communicator.result()
        self._stream.wait_event(copied)
        with torch.npu.stream(self._stream):
            communicator.send(staged, RECEIVER)
        sent = torch.npu.Event()
        sent.record(self._stream)
        self.num_enqueued += 1
        return sent

    def pause(self) -> None:
        """Wait for a moment. Raise PeerLost if the receiver has disconnected."""
        if self._abandoned.wait(POLL_S):
            raise PeerLost("the receiver hung up")

    def settle(self) -> None:
        """Do nothing: the sender never writes to the receiver's memory, so there is nothing to wait for."""

    def abandon(self) -> None:
        """Make pending and future sends raise PeerLost."""
        self._abandoned.set()

    def close(self) -> None:
        """Free the communicator, and keep the stream for another sender."""
        _destroy(self._communicator)
        del self._taken
        if not self._abandoned.is_set():
            with contextlib.suppress(RuntimeError):  # a stream on which a call has failed is not reused
                self._stream.synchronize()
                self._own_stream.close()


class HcclConnector(SenderConnector):
    """A sender whose tensors are on ``device``."""

    def __init__(self, device: torch.device) -> None:
        """Make the root info of a new communicator on ``device``."""
        self._device = device
        self._root = root_info()
        self.device_id = f"{HcclPool.kind}|{card_id(device)}|{base64.b64encode(self._root).decode()}"

    def attach(self, reply: ConnectReply, descriptor: int | None, layout: SampleLayout) -> SenderBuffer:
        """Return the sender's buffer for the pool that the receiver offers."""
        if reply.pool != HcclPool.kind or descriptor is None:
            return HostConnector().attach(reply, descriptor, layout)
        return HcclBuffer(layout, self._root, self._device, descriptor)


def _split(device_id: str) -> tuple[str, str, str]:
    """Split ``HcclConnector.device_id`` into kind, card and root info."""
    kind, _, rest = device_id.partition("|")
    card, _, root = rest.partition("|")
    return kind, card, root


def _connected(root: bytes, rank: int, device: torch.device) -> Future[HcclCommunicator]:
    """Make the communicator in a temporary thread, because both sides must connect at the same time."""

    def connect() -> HcclCommunicator:
        torch.npu.set_device(device)
        return HcclCommunicator(root, rank, 2)

    with contextlib.ExitStack() as stack:
        pool = ThreadPoolExecutor(1, "hccl-connect")
        stack.callback(pool.shutdown, wait=False)
        return pool.submit(connect)


def _counter(descriptor: int) -> memoryview:
    """Return a view whose index 0 is the shared counter, which is read and written atomically."""
    return memoryview(mmap.mmap(descriptor, COUNTER_BYTES)).cast("Q")


def _destroy(communicator: Future[HcclCommunicator]) -> None:
    with contextlib.suppress(RunError):
        communicator.result().abort()
