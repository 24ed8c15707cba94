"""PushPool receives samples in its device's memory, into which senders on other devices push them.

A sample is transferred as soon as possible, independently of the trainer's progress. A thread for each sender
receives the sample, and ``receive`` returns it when it has arrived completely. Transfers cannot deadlock with
collectives on the same devices, for three reasons:

1. The sender announces a sample when the sample's data is complete and its send is queued, with only completed
   sends before it.
2. The receiver grants memory only when the last reader of that memory is done, so a queued receive waits for
   nothing on the receiver's device.
3. No stream of the engine waits for a send, because it reads a copy. No stream of the trainer waits for a receive.

Therefore the two kernels of a transfer wait only for each other and for free SMs of their devices. No kernel
that occupies SMs indefinitely waits for a transfer. A receiver receives one sample at a time, so only one
receiving kernel occupies SMs.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from spec_backend_cuda.p2p_link import P2PLink
from spec_kit.streams import (
    Arrived,
    Block,
    BufferPoolFactory,
    DeviceArena,
    GrantInfo,
    Range,
    ReceiverPool,
    ScatteredBlock,
    failure_of,
    first_address,
)

log = logging.getLogger(__name__)

GRACE_S = 0.2
"""Maximum seconds that a transfer may continue after its sender has disconnected, because the sender may have
finished its part. A transfer that waits for its turn has not begun."""
CLOSE_S = 5.0
"""Maximum seconds that ``close`` waits for queued reads of blocks that the device has not run yet."""
_PROBLEM = "a sample could not be received"


class PushPool(BufferPoolFactory):
    """Gives each sender a separate channel; all channels share one region of device memory (``arena``)."""

    kind: ClassVar[str] = "pushed"

    def __init__(
        self, arena: DeviceArena, device: torch.device, new_link: Callable[[], tuple[str, P2PLink]]
    ) -> None:
        """Make the pool. ``new_link`` makes a link; it returns the link's name and its receiving side."""
        self.arena = arena
        self.device = device
        self.receiving = threading.Lock()
        """Held by the channel that is receiving."""
        self._new_link = new_link
        self._channels: list[_SenderChannel] = []
        self._freed: queue.SimpleQueue[_Freed | None] = queue.SimpleQueue()
        self._sweeper = threading.Thread(target=self._sweep, name="push-sweep", daemon=True)
        self._sweeper.start()

    def admit(self, device_id: str, on_freed: Callable[[], None]) -> ReceiverPool:
        """Return a channel for a new sender."""
        offer, link = self._new_link()
        self._channels = [channel for channel in self._channels if not channel.ended]
        self._channels.append(_SenderChannel(self, link, offer, on_freed))
        return self._channels[-1]

    def sweep(self, freed: _Freed) -> None:
        """Free the block of ``freed`` once the device has read it."""
        self._freed.put(freed)

    def close(self) -> None:
        """End all channels and free the pool's memory."""
        for channel in self._channels:
            channel.close()
        for channel in self._channels:  # each may have waited for its turn to receive
            channel.join()
        self._freed.put(None)
        self._sweeper.join(CLOSE_S)
        self.arena.close()

    def _sweep(self) -> None:
        """Free blocks after the device has read them; this runs in a thread of its own.

        If a block were granted earlier, a send could wait on the sender's device for a read on this device.
        """
        while (freed := self._freed.get()) is not None:
            try:
                freed.read.synchronize()
            except RuntimeError:
                log.exception("the device has failed: no block is freed any more")
                return
            self.arena.free(freed.pieces)
            freed.on_freed()


class _Freed(NamedTuple):
    pieces: Sequence[Range]
    read: torch.cuda.Event
    on_freed: Callable[[], None]


class _SenderChannel(ReceiverPool):
    """One sender's channel into a push pool. Its thread ends with the sender."""

    kind = PushPool.kind

    def __init__(self, pool: PushPool, link: P2PLink, offer: str, on_freed: Callable[[], None]) -> None:
        self.descriptor = None
        self.size = pool.arena.size
        self.offer = offer
        self._pool = pool
        self._link = link
        self._on_freed = on_freed
        self._fetches: queue.SimpleQueue[tuple[ScatteredBlock, Arrived] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._busy = False
        """Whether a transfer of this channel is in flight."""
        self._disconnected = False
        """Whether the sender has disconnected."""
        self._abort_timer: threading.Timer | None = None
        """Timer that aborts a transfer; it runs while a transfer is in flight after the sender has
        disconnected."""
        self._when_ended: Callable[[], None] = _nothing
        self._thread = threading.Thread(target=self._receive_all, name="push-channel", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def allocate(self, num_tokens: int) -> Block | None:
        pieces = self._pool.arena.allocate(num_tokens)
        return None if pieces is None else ScatteredBlock(first_address(pieces), num_tokens, pieces)

    def grant_payload(self, block: Block) -> bytes:
        assert isinstance(block, ScatteredBlock)
        return GrantInfo(block.pieces).encode()

    def fetch(self, block: Block, arrived: Arrived) -> None:
        assert isinstance(block, ScatteredBlock)
        self._fetches.put((block, arrived))

    def disconnect(self, ended: Callable[[], None]) -> None:
        self._when_ended = ended
        with self._lock:
            self._disconnected = True
            self._start_abort_timer()
        self._fetches.put(None)

    def read(self, block: Block) -> tuple[Tensor, Tensor]:
        assert isinstance(block, ScatteredBlock)
        return self._pool.arena.view(block.pieces, block.num_tokens)

    def free(self, block: Block) -> None:
        assert isinstance(block, ScatteredBlock)
        read = self._link.new_event()
        read.record(torch.get_device_module(self._pool.device).current_stream(self._pool.device))
        self._pool.sweep(_Freed(block.pieces, read, self._on_freed))

    def reclaim(self, block: Block) -> None:
        """Free a block that was never read. The transfer into the block is complete or aborted."""
        assert isinstance(block, ScatteredBlock)
        self._pool.arena.free(block.pieces)

    def close(self) -> None:
        self._fetches.put(None)
        self._link.abort()

    def join(self) -> None:
        self._thread.join()

    def _receive_all(self) -> None:
        """Receive samples until the sender has disconnected; this runs in a thread of its own."""
        with self._transferring():
            failure = failure_of(self._link.open, _PROBLEM)
        while (fetch := self._fetches.get()) is not None:
            block, arrived = fetch
            failure = failure or failure_of(partial(self._receive, block), _PROBLEM)
            arrived(failure)
        self._when_ended()
        self._link.close()

    def _receive(self, block: ScatteredBlock) -> None:
        if block.pieces:
            with self._pool.receiving, self._transferring():
                self._link.start(self._pool.arena.parts(block.pieces))
                self._link.finish()

    @contextlib.contextmanager
    def _transferring(self) -> Generator[None]:
        """Mark a transfer as in flight; if its sender has disconnected, abort the transfer after ``GRACE_S``."""
        with self._lock:
            self._busy = True
            self._start_abort_timer()
        try:
            yield
        finally:
            with self._lock:
                self._busy = False
                if self._abort_timer is not None:
                    self._abort_timer.cancel()
                    self._abort_timer.join()

    def _start_abort_timer(self) -> None:
        if self._busy and self._disconnected:
            self._abort_timer = threading.Timer(GRACE_S, self._link.abort)
            self._abort_timer.start()


def _nothing() -> None:
    """Do nothing; the default callback while the sender is connected."""
