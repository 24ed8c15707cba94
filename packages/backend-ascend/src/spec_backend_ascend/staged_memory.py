"""StagedMemory: features through memory of the host, delivered on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_core.cpu.host_memory import HostMemory

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from spec_core.cpu.block_memory import Block
    from spec_core.cpu.shared_memory_wire import Layout


class StagedMemory(HostMemory):
    """For senders of other cards and of the host: through memory of the host, delivered on ``device``."""

    def __init__(self, layout: Layout, window_bytes: int, device: torch.device) -> None:
        super().__init__(layout, window_bytes)
        self._device = device

    def read(self, block: Block) -> tuple[Tensor, Tensor]:
        ids, hidden = super().read(block)
        return ids.to(self._device), hidden.to(self._device)
