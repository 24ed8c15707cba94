"""DevicePool is a pool in device memory that the processes on one device share.

Neither process waits on the host for the device. Each block has an event that both processes use. The receiver
records it after the last read of the block's memory, and the sender's copy waits for it. A reader waits for the
sender's copy in one of two ways, which the vendor chooses (``DeviceSharing.records_copies``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from spec_core.errors import PeerLost, RunError
from spec_kit.own_stream import OwnStream
from spec_kit.streams.buffer_pool import Block, ReceiverPool, SenderBuffer, SenderConnector
from spec_kit.streams.device_arena import (
    DeviceArena,
    GrantInfo,
    ScatteredBlock,
    arena_bytes,
    first_address,
)
from spec_kit.streams.host_pool import HostConnector
from spec_kit.streams.wire import ConnectReply, SampleLayout

_own_events: dict[bytes, Any] = {}
"""Handle -> event that this process has exported; a process cannot open the handle of its own event."""


class SharingUnsupported(RunError):
    """The device, its driver or this environment does not let processes share device memory."""


class SharedMemory(NamedTuple):
    """Device memory that other processes can map."""

    bytes: Tensor
    """uint8 [bytes], contiguous. The memory is freed with the last view of it."""
    descriptor: int
    """File descriptor by which another process maps the memory."""
    size: int
    """Number of bytes of the memory behind the descriptor."""
    close: Callable[[], None]
    """Closes the descriptor and all other resources that were opened for it."""


class DeviceSharing(ABC):
    """Vendor-specific operations of a DevicePool: memory of ``device`` that several processes map."""

    device_type: ClassVar[str]
    """``torch.device.type`` of the vendor's devices."""
    records_copies: ClassVar[bool]
    """Whether the sender records the block's event after its copy, so that the reader's stream can wait for it.
    If not, a sample must only be announced when its copy is complete (``DeferredBuffer``)."""

    def __init__(self, device: torch.device) -> None:
        """Share memory of ``device``."""
        self.device = device

    @property
    @abstractmethod
    def device_id(self) -> str:
        """Return the name of the device, the same in every process."""

    @abstractmethod
    def create(self, size: int) -> SharedMemory:
        """Return new memory of at least ``size`` bytes. Raise SharingUnsupported if it cannot be shared."""

    @abstractmethod
    def attach(self, descriptor: int, size: int, layout: SampleLayout) -> SenderBuffer:
        """Return a sender's view of memory that another process has created; see ``PeerEvents``."""

    def bind_thread(self) -> None:  # noqa: B027 (not every vendor wants it)
        """Make ``device`` usable in the calling thread."""

    def submit(self, stream: Any) -> None:  # noqa: B027 (not every vendor wants it)
        """Submit the work queued on ``stream`` to the device, so that other processes can wait for it."""


class EventPool:
    """Interprocess events of one device that this process has created.

    Unused events are stored for the next pool, because a vendor may destroy events long after their last use.
    """

    _spare: ClassVar[defaultdict[torch.device, list[bytes]]] = defaultdict(list)

    def __init__(self, device: torch.device) -> None:
        """Start without events; ``allocate`` creates them on ``device``."""
        self._device = device
        self._lent: set[bytes] = set()

    def allocate(self) -> bytes:
        """Return the handle of an event that nobody waits for."""
        spare = self._spare[self._device]
        handle = spare.pop() if spare else self._new()
        self._lent.add(handle)
        return handle

    def free(self, handle: bytes) -> None:
        """Keep an event for reuse by a later block."""
        self._lent.remove(handle)
        self._spare[self._device].append(handle)

    def close(self) -> None:
        """Drop the events that were not freed; they are not reused, since a peer may still wait for them."""
        for handle in self._lent:
            del _own_events[handle]
        self._lent.clear()

    def _new(self) -> bytes:
        module = torch.get_device_module(self._device)
        with module.device(self._device):
            event = module.Event(interprocess=True)
            handle = event.ipc_handle()
        _own_events[handle] = event
        return handle


class PeerEvents:
    """Opens the receiver's events in a sender, each event once."""

    def __init__(self, device: torch.device) -> None:
        """Prepare to open events of another process on ``device``."""
        self._device = device
        self._opened: dict[bytes, Any] = {}

    def open(self, handle: bytes) -> Any:
        """Return the event of this handle. Raise PeerLost if the process that created it is gone."""
        if handle in _own_events:
            return _own_events[handle]
        if handle not in self._opened:
            event_type = torch.get_device_module(self._device).Event
            try:
                self._opened[handle] = event_type.from_ipc_handle(self._device, handle)
            except RuntimeError as error:  # torch's only error; the handle is valid while its process lives
                raise PeerLost(f"the receiver's event is gone: {error}") from error
        return self._opened[handle]

    def close(self) -> None:
        """Close all opened events."""
        self._opened.clear()


@dataclass(frozen=True)
class _DeviceBlock(ScatteredBlock):
    event: bytes
    dirty: bool


class DevicePool(ReceiverPool):
    """Pool for senders on the same device; readers and writers wait for each other on their streams."""

    def __init__(self, layout: SampleLayout, window_bytes: int, sharing: DeviceSharing) -> None:
        """Allocate memory for a window of ``window_bytes`` by ``sharing``."""
        self.kind = sharing.device_type
        self._sharing = sharing
        # Only the arena references the memory, so after ``close`` it is freed with the last view of a sample.
        memory, self.descriptor, self.size, self._close_memory = sharing.create(
            arena_bytes(layout, window_bytes)
        )
        self._arena = DeviceArena(memory, layout)
        self._events = EventPool(sharing.device)
        self._device_module = torch.get_device_module(sharing.device)
        self._own_stream = OwnStream(sharing.device)
        self._stream = self._own_stream.stream
        """Stream that only waits for readers and records events."""

    def serves(self, device_id: str) -> bool:
        """Return whether a sender is on the same device."""
        return device_id == self._sharing.device_id

    def allocate(self, num_tokens: int) -> Block | None:
        """Return a block for a sample of ``num_tokens`` tokens; None if other blocks must be freed first."""
        pieces = self._arena.allocate(num_tokens)
        if pieces is None:
            return None
        self._sharing.bind_thread()
        event = self._events.allocate()
        readers = self._arena.readers(pieces)
        for read in readers:
            self._stream.wait_event(read)
        if readers:
            _own_events[event].record(self._stream)
            self._sharing.submit(self._stream)
        return _DeviceBlock(first_address(pieces), num_tokens, pieces, event, bool(readers))

    def grant_payload(self, block: Block) -> bytes:
        """Return the block's ranges, its event, and whether to wait for the event, as bytes."""
        assert isinstance(block, _DeviceBlock)
        return GrantInfo(block.pieces, block.event, block.dirty).encode()

    def is_written(self, block: Block) -> bool:
        """Return whether a sender that is now dead had written the block completely."""
        assert isinstance(block, _DeviceBlock)
        return not self._sharing.records_copies or _own_events[block.event].query()

    def read(self, block: Block) -> tuple[Tensor, Tensor]:
        """Return a block's ``input_ids`` and ``hidden_TNH``, valid on the current stream until ``free``."""
        assert isinstance(block, _DeviceBlock)
        if self._sharing.records_copies:
            _own_events[block.event].wait(self._device_module.current_stream(self._sharing.device))
        return self._arena.view(block.pieces, block.num_tokens)

    def free(self, block: Block) -> None:
        """Free a block after the work queued on the current stream, which may still read the block."""
        assert isinstance(block, _DeviceBlock)
        read = self._device_module.Event()
        read.record(self._device_module.current_stream(self._sharing.device))
        self._arena.free(block.pieces, read)
        self._events.free(block.event)

    def reclaim(self, block: Block) -> None:
        """Free a block that was not read; its event is not reused, since its recorded work is unknown."""
        assert isinstance(block, _DeviceBlock)
        self._arena.free(block.pieces)

    def close(self) -> None:
        """Close the memory for senders; it is freed with the last view of a sample."""
        self._close_memory()
        self._events.close()
        self._arena.close()
        self._own_stream.close()


class DeviceConnector(SenderConnector):
    """Connector of a sender on a device; it uses host memory if the receiver is on another device."""

    def __init__(self, sharing: DeviceSharing) -> None:
        """Map the receiver's device memory by ``sharing``."""
        self._sharing = sharing
        self.device_id = sharing.device_id

    def attach(self, reply: ConnectReply, descriptor: int | None, layout: SampleLayout) -> SenderBuffer:
        """Return the view of the pool that the receiver offers."""
        if reply.pool != self._sharing.device_type or descriptor is None:
            return HostConnector().attach(reply, descriptor, layout)
        return self._sharing.attach(descriptor, reply.pool_bytes, layout)
