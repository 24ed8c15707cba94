"""Sort kernels by time: rows of a profile, or a Chrome trace that torch.profiler has written."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

ROWS = 40
NAME_LENGTH = 120
DEVICE_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""Categories of events on the device, as torch.profiler names them."""


def longest_first(rows: Iterable[tuple[float, int, str]]) -> dict[str, Any]:
    """Return the longest of ``rows`` (milliseconds in all, calls, name) and the sums of all."""
    ordered = sorted(rows, reverse=True)
    return {
        "total_ms": sum(row[0] for row in ordered),
        "calls": sum(row[1] for row in ordered),
        "kernels": [(round(ms, 3), calls, name[:NAME_LENGTH]) for ms, calls, name in ordered[:ROWS]],
    }


def trace_table(file: Path) -> dict[str, Any]:
    """Return the device's work, the longest first; ``span_ms``: from the first to the last.

    Without a device: operators, each with all that it calls.
    """
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event.get("ph") == "X"]
    found = [event for event in events if event.get("cat") in DEVICE_WORK]
    found = found or [event for event in events if event.get("cat") == "cpu_op"]
    durations: defaultdict[str, list[float]] = defaultdict(list)
    for event in found:
        durations[event["name"]].append(event["dur"] / 1e3)
    span_us = max(event["ts"] + event["dur"] for event in found) - min(event["ts"] for event in found)
    rows = ((sum(parts), len(parts), name) for name, parts in durations.items())
    return {"span_ms": span_us / 1e3, **longest_first(rows)}
