"""Helpers that the benchmarks share: the machine, the time of a call, the growth of a cost."""

from __future__ import annotations

import math
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

MIB = 1 << 20


def machine() -> dict[str, Any]:
    """Return platform, processor, cores and load of this machine."""
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def device_name(device: torch.device) -> str:
    """Return the model of an accelerator, or ``cpu``."""
    import torch

    module = torch.get_device_module(device)
    return module.get_device_name(device) if hasattr(module, "get_device_name") else str(device)


def versions(*distributions: str) -> dict[str, str]:
    """Return the versions of Python and of those distributions that are installed."""
    installed = {found.name for found in metadata.distributions()}
    found = {name: metadata.version(name) for name in distributions if name in installed}
    return {"python": platform.python_version(), **found}


@dataclass(frozen=True)
class Timing:
    """Times of repeated runs of one call, in milliseconds."""

    wall_ms: list[float]
    cpu_ms: list[float]
    """User and system time of all threads of this process: hardly depends on what else the machine does."""

    def summary(self) -> dict[str, float]:
        """Return median and smallest time; their distance shows the noise."""
        series = {"wall_ms": self.wall_ms, "cpu_ms": self.cpu_ms}
        medians = {name: statistics.median(values) for name, values in series.items()}
        return medians | {f"{name}_min": min(values) for name, values in series.items()}


def timed(call: Callable[[], object], repeats: int) -> Timing:
    """Time ``call``, which must return only when its work is done, on a device too."""
    timing = Timing([], [])
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        timing.wall_ms.append(1e3 * (time.perf_counter() - wall))
        timing.cpu_ms.append(1e3 * (time.process_time() - cpu))
    return timing


def peak_rss_mib() -> float:
    """Return the largest resident memory of this process so far.

    A process inherits the number of the one that started it, so start it from a small one.
    """
    import resource

    unit = 1 if sys.platform == "darwin" else 1 << 10  # bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


def memory_mib(device: torch.device) -> tuple[float, float]:
    """Return memory now and its peak, of the device's allocator where there is one, else of the process."""
    import psutil
    import torch

    module = torch.get_device_module(device)
    if hasattr(module, "max_memory_allocated"):
        return module.memory_allocated(device) / MIB, module.max_memory_allocated(device) / MIB
    return psutil.Process().memory_info().rss / MIB, peak_rss_mib()


def forget_peak(device: torch.device) -> None:
    """Reset the device's peak, because setting up takes more than steps do; a process's own peak stays."""
    import torch

    module = torch.get_device_module(device)
    if hasattr(module, "reset_peak_memory_stats"):
        module.reset_peak_memory_stats(device)


def growth(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Return exponent a of the best fit cost = c · size^a: the slope of a line through the logarithms."""
    slope, _ = statistics.linear_regression([math.log(x) for x in sizes], [math.log(y) for y in costs])
    return slope


def line(sizes: Sequence[float], costs: Sequence[float]) -> dict[str, float]:
    """Return the best fit cost = fixed + size · per_unit, and its largest error relative to the cost."""
    per_unit, fixed = statistics.linear_regression(sizes, costs)
    errors = [abs(fixed + per_unit * x - y) / y for x, y in zip(sizes, costs, strict=True)]
    return {"fixed": fixed, "per_unit": per_unit, "largest_error": max(errors)}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
