"""Copy tensors that are computed on the CPU to a device, without waiting for the copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def to_device_async(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``; the copy is asynchronous, on the device's current stream."""
    if tensor.device == device:
        return tensor
    import torch

    # A copy from memory that is not pinned needs the CPU, and may block it. ``Tensor.pin_memory`` would first ask the
    # driver whether the memory is pinned, which takes longer than the copy.
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor).to(device, non_blocking=True)
