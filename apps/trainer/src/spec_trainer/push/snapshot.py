"""WeightSnapshot: the draft's weights of one step, copied to the host while training goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spec_core.errors import RunError
from spec_core.foreign import cause

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from torch import Tensor


class WeightSnapshot:
    """Host memory for the weights of one step. The first copy allocates it, and each later one uses it again.

    A device copies in the order of its current stream: what a later step changes comes after, and one gathered tensor
    at a time is there. Whoever reads the copies waits for the device; whoever takes them does not.
    """

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._memory: dict[str, Tensor] = {}
        self._copied: Any = None
        """Event of the device behind the last copy; None where all tensors were on the CPU."""

    def take(self, gathered: Iterable[tuple[str, Tensor]]) -> None:
        """Copy every tensor, each before the next is asked for.

        Raise RunError where there is no memory for it, also then after the last one: other ranks help to gather them.
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
            raise RunError(f"no memory for a copy of the draft: {cause(failure)}") from failure
        self._copied = None if device is None else _recorded(device)

    def read(self) -> Mapping[str, Tensor]:
        """Return the copies once the device has made them; they are valid until the next ``take``."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._memory

    def _copy(self, name: str, tensor: Tensor) -> None:
        import torch

        if name not in self._memory:
            # From a device to memory that is not pinned, the CPU waits for every copy.
            self._memory[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=not tensor.is_cpu)
        self._memory[name].copy_(tensor, non_blocking=True)


def _recorded(device: torch.device) -> Any:
    """Return an event behind what is queued on the device's current stream; a thread that waits for it sleeps."""
    import torch

    module = torch.get_device_module(device)
    event = module.Event(blocking=True)
    event.record(module.current_stream(device))
    return event
