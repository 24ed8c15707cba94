"""Measure the memory that a trainer process uses, for the metrics of each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch


def memory_used(device: torch.device) -> dict[str, int]:
    """Return this process's resident host memory, and the peak so far of torch's device allocator.

    Both are in bytes. The second is missing for a CPU, which has no such allocator.
    """
    import torch

    used = {"memory_host_bytes": psutil.Process().memory_info().rss}
    peak = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    return used if peak is None else used | {"memory_device_bytes": peak(device)}
