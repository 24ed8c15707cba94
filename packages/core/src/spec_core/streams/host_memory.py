"""HostMemory: samples in an arena of host memory that both processes map (see ``shared_memory``); StagedMemory, for a
receiver on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from spec_core.errors import ProtocolError
from spec_core.streams.block_memory import Block, ReceiverMemory, SenderEnd, SenderMemory
from spec_core.streams.shared_memory import Arena, attach

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from spec_core.records import FeatureSample
    from spec_core.streams.shared_memory_wire import Layout, Record, Welcome


class HostMemory(ReceiverMemory):
    kind: ClassVar[str] = "host"

    def __init__(self, layout: Layout, window_bytes: int) -> None:
        self._layout = layout
        self._arena = Arena(window_bytes)
        self.descriptor, self.size = self._arena.descriptor, self._arena.size

    def allocate(self, num_tokens: int) -> Block | None:
        offset = self._arena.allocate(self._layout.block_bytes(num_tokens))
        return None if offset is None else Block(offset, num_tokens)

    def read(self, block: Block) -> tuple[Tensor, Tensor]:
        return self._layout.view(self._arena.bytes, block.offset, block.num_tokens)

    def free(self, block: Block) -> None:
        self._arena.free(block.offset)

    def close(self) -> None:
        self._arena.close()


class StagedMemory(HostMemory):
    """For senders of other devices and of the host: through memory of the host, delivered on ``device``."""

    def __init__(self, layout: Layout, window_bytes: int, device: torch.device) -> None:
        super().__init__(layout, window_bytes)
        self._device = device

    def read(self, block: Block) -> tuple[Tensor, Tensor]:
        ids, hidden = super().read(block)
        return ids.to(self._device), hidden.to(self._device)


class HostView(SenderMemory):
    """A sample that lies on a device is copied from there; ``write`` then waits for it."""

    def __init__(self, layout: Layout, descriptor: int, size: int) -> None:
        self._layout = layout
        self._mapping, self._bytes = attach(descriptor, size)

    def write(self, grant: Record, sample: FeatureSample) -> None:
        ids, hidden = self._layout.view(self._bytes, grant.value, len(sample.input_ids))
        ids.copy_(sample.input_ids)
        hidden.copy_(sample.hidden_TNH)

    def settle(self) -> None:
        """``write`` has copied when it returns."""

    def close(self) -> None:
        del self._mapping, self._bytes


class HostEnd(SenderEnd):
    def attach(self, welcome: Welcome, descriptor: int | None, layout: Layout) -> SenderMemory:
        if welcome.memory != HostMemory.kind or descriptor is None:
            raise ProtocolError(
                f"the receiver offers memory of kind {welcome.memory!r}, which is unknown here"
            )
        return HostView(layout, descriptor, welcome.arena_bytes)
