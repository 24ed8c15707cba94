"""Tensors that are worked out on the host and used on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``: copied behind what its current stream has to do, while the host goes on."""
    if tensor.device == device:
        return tensor
    # From memory that is not pinned the driver copies with the host's help, and may make it wait.
    return tensor.pin_memory().to(device, non_blocking=True)
