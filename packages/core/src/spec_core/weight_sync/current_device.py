"""The current device of a thread: a new thread begins with the first device, or, on some hardware, with none."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def use_device(device: torch.device) -> None:
    """Make ``device`` the current one of this thread, where there are several of its type."""
    import torch

    if str(device) != device.type:  # it has a number
        torch.get_device_module(device).set_device(device)
