"""A step's kernels by time, and the places where the host waits for the device."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile
from trace_table import longest_first

if TYPE_CHECKING:
    from collections.abc import Callable


def kernel_table(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Return one step's kernels, the longest first: milliseconds in all, calls, name. On the CPU: operators.

    On a device, the calls by which the host starts kernels take no time and are left out.
    """
    on_cpu = device.type == "cpu"
    activity = ProfilerActivity.CPU if on_cpu else getattr(ProfilerActivity, device.type.upper())
    with profile(activities=[activity], acc_events=True) as recorded:
        step()
    field = "self_cpu_time_total" if on_cpu else "self_device_time_total"
    rows = [(getattr(row, field) / 1e3, row.count, row.key) for row in recorded.key_averages()]
    return longest_first(row for row in rows if on_cpu or row[0] > 0)


def host_waits(step: Callable[[], object], device: torch.device) -> list[str]:
    """Return file:line of each place in one step where the host waits for the device, if torch can report it."""
    module = torch.get_device_module(device)
    if not hasattr(module, "set_sync_debug_mode"):
        return []
    module.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        module.set_sync_debug_mode("default")
    waits = [warning for warning in caught if "synchroniz" in str(warning.message)]
    return ["/".join(f"{warning.filename}:{warning.lineno}".split("/")[-2:]) for warning in waits]
