"""WeightSnapshot is a copy of the draft's weights after one step, made while training continues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spec_core.errors import RunError
from spec_core.foreign import cause
from spec_kit.weight_sync import queued_before

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from torch import Tensor


_COPIES = 4
"""Number of copies of a tensor for which there must be memory: the snapshot, and its current, newest and
previous exports."""


class WeightSnapshot:
    """A copy of the draft's weights; the first ``take`` allocates its memory, and later calls reuse it.

    It is on the weights' device if there is enough memory, else on the host. Copies run on the device's current
    stream, so they are made before a later step changes the weights. Only one gathered tensor exists at a time.
    ``take`` does not wait for the device; ``read`` does.
    """

    def __init__(self) -> None:
        """Allocate no memory yet."""
        self._memory: dict[str, Tensor] = {}
        self._room: int | None = None
        """Bytes of device memory that are left for copies; None before the first copy."""
        self._copied: Any = None
        """Device event recorded after the last copy; None if all tensors were on the CPU."""

    def take(self, gathered: Iterable[tuple[str, Tensor]]) -> None:
        """Copy each tensor that ``gathered`` yields, before the next tensor is gathered.

        Raise RunError if memory does not suffice, but only after all tensors are gathered: gathering is
        collective.
        """
        device: torch.device | None = None
        failure: Exception | None = None
        for name, tensor in gathered:
            device = device if tensor.is_cpu else tensor.device
            if failure is None:
                try:
                    self._copy(name, tensor)
                except (MemoryError, RuntimeError) as error:  # RuntimeError: torch's allocators raise it
                    failure = error
            del tensor  # before the next one is gathered
        if failure is not None:
            self._memory.clear()
            self._room = None
            raise RunError(f"no memory for a copy of the draft: {cause(failure)}") from failure
        self._copied = None if device is None else queued_before(device)

    def read(self) -> Mapping[str, Tensor]:
        """Wait for the device and return the copies, which are valid until the next ``take``."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._memory

    def _copy(self, name: str, tensor: Tensor) -> None:
        if name not in self._memory:
            self._memory[name] = self._memory_for(tensor)
        self._memory[name].copy_(tensor, non_blocking=True)

    def _memory_for(self, tensor: Tensor) -> Tensor:
        import torch

        if tensor.is_cpu:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        room = _room(tensor.device) if self._room is None else self._room
        self._room = room - _COPIES * tensor.nbytes
        if self._room >= 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        # A copy from a device to memory that is not pinned blocks the CPU.
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def _room(device: torch.device) -> int:
    """Return how many bytes of device memory this process can allocate beyond its highest use so far."""
    import torch

    module = torch.get_device_module(device)
    try:
        free, total = module.mem_get_info(device)
        limit = int(module.get_per_process_memory_fraction(device) * total)
        peak, reserved = module.max_memory_allocated(device), module.memory_reserved(device)
    except AttributeError:  # a vendor's extension may lack some of them
        return 0
    return min(limit, free + reserved) - peak
