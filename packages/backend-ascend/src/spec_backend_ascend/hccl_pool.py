"""HcclPool leaves samples on the sender's card until the receiver reads them by HCCL.

Each sender shares a two-rank communicator with the receiver; the sender is rank 0 and makes the root info, by
which the receiver finds it. Only one thread of a process at a time may call HCCL, and torch's own groups
(FSDP's) do not share a lock with this module. The receiver therefore calls HcclRecv in the thread that calls
``receive``, which is the training thread. As a consequence, a sample that was announced but not received is
lost if its sender dies, and a send is done only when the sample has been received.
"""

from __future__ import annotations

import base64
import contextlib
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ClassVar

import torch
from torch import Tensor

from spec_backend_ascend.hccl import HcclCommunicator, root_info
from spec_backend_ascend.visible_devices import card_id, host_of
from spec_core.errors import PeerLost, RunError
from spec_core.records import FeatureSample
from spec_kit import OwnStream
from spec_kit.streams import (
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
)

SENDER, RECEIVER = 0, 1
POLL_S = 1e-3
"""Seconds between a sender's checks of whether the receiver has started to read a sample."""

COUNTER_BYTES = 8
"""Size in bytes of a counter in host memory that sender and receiver share. It counts the samples that the
receiver has started to read."""


class HcclPoolFactory(BufferPoolFactory):
    """Makes one pool for each sender on another card of the same host."""

    def __init__(self, layout: SampleLayout, device: torch.device) -> None:
        """Make pools whose samples are received on ``device``."""
        self._layout, self._device = layout, device
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


class HcclPool(ReceiverPool):
    """One sender's pool. It has no memory until a sample is read.

    Announced samples still count against the receiver's window, although they are in the sender's memory.
    """

    kind = "hccl"
    descriptor: int

    def __init__(self, layout: SampleLayout, device: torch.device, root: bytes) -> None:
        """Begin to connect to the sender that made the root info ``root``."""
        self._layout, self._device = layout, device
        self.size = COUNTER_BYTES
        self.descriptor = os.memfd_create("spec-taken", os.MFD_CLOEXEC)
        os.truncate(self.descriptor, self.size)
        self._taken = _counter(self.descriptor)
        self._communicator = _connected(root, RECEIVER, device)

    def allocate(self, num_tokens: int) -> Block | None:
        """Return a block that has no memory yet, for a sample of ``num_tokens`` tokens.

        The method ``read`` allocates the memory. So this method never returns None.
        """
        return Block(0, num_tokens)

    def is_written(self, block: Block) -> bool:
        """Return whether the sample's bytes have arrived, which is true only for an empty sample.

        All other samples are transferred when they are read.
        """
        return not block.num_tokens  # an empty sample is not transferred

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
        """Do nothing, because the memory is freed with the sample's tensors."""

    def close(self) -> None:
        """Close the pool and free the communicator."""
        os.close(self.descriptor)
        del self._taken
        _destroy(self._communicator)


class _Transfer(PendingSend):
    """A staged sample, and its HcclSend, which waits for the receiver on a separate stream."""

    def __init__(self, buffer: HcclBuffer, copied: torch.npu.Event, staged: Tensor) -> None:
        self._buffer, self._copied, self._staged = buffer, copied, staged
        self._sent = buffer.enqueue(copied, staged) if staged.nbytes else copied
        self._number = buffer.num_enqueued

    def wait_sendable(self) -> None:
        self._copied.synchronize()

    def wait_sent(self) -> None:
        """Wait until the receiver has started to read the sample and its HcclSend is complete.

        The wait polls, so that the thread can end if the receiver has disconnected. The end of the HcclSend
        alone is not enough, because HCCL may buffer a sample before the receiver reads it.
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
        self._layout, self._device = layout, device
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
        """Return the number of samples that the receiver has started to read."""
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
        self._device, self._root = device, root_info()
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
