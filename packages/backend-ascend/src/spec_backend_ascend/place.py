"""Which card a process uses, by a name that is the same in every process of the host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from spec_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

NAME = "ASCEND_RT_VISIBLE_DEVICES"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def visible(environ: Mapping[str, str], num_devices: int) -> list[str]:
    """Physical ids of the NPUs that a process with this environment sees; ``num_devices`` without a list."""
    if NAME not in environ:
        return [str(index) for index in range(num_devices)]
    ids = [entry.strip() for entry in environ[NAME].split(",")]
    if not all(entry.isdigit() for entry in ids):
        raise ConfigError(
            f"{NAME}={environ[NAME]!r} is no list of NPUs; unset it to use all of them, or give ids as in 0,1"
        )
    return ids


def child_devices(
    environ: Mapping[str, str], total: int, local_rank: int, num_devices: int
) -> dict[str, str]:
    """What lets a child see ``num_devices`` of this process's devices from ``local_rank`` on, and no other.
    ConfigError if there are fewer."""
    ids = visible(environ, total)
    chosen = ids[local_rank : local_rank + num_devices]
    if len(chosen) < num_devices:
        asked = f"device {local_rank}" if num_devices == 1 else f"{num_devices} devices from {local_rank} on"
        raise ConfigError(
            f"a process was to get {asked}, but this host shows {len(ids)} ({NAME}="
            f"{environ.get(NAME, 'not set')}); lower train.ranks, engine.replicas or engine.tensor_parallel"
        )
    return {NAME: ",".join(chosen)}


def place_of(device: torch.device) -> str:
    """Host and card."""
    index = device.index or 0
    ids = visible(os.environ, index + 1)
    return f"NPU {ids[index]} of host {BOOT_ID.read_text().strip()}"
