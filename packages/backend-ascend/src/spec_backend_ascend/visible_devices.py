"""Read and write ASCEND_RT_VISIBLE_DEVICES, which selects the cards that a process sees; name cards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from spec_core.errors import ConfigError
from spec_processes import child_devices

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

NAME = "ASCEND_RT_VISIBLE_DEVICES"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def visible_npus(environ: Mapping[str, str], num_devices: int) -> list[str]:
    """Return the physical ids of the NPUs that a process with this environment sees, by default all NPUs."""
    if NAME not in environ:
        return [str(index) for index in range(num_devices)]
    ids = [entry.strip() for entry in environ[NAME].split(",")]
    if not all(entry.isdigit() for entry in ids):
        raise ConfigError(
            f"{NAME}={environ[NAME]!r} is no list of NPUs; unset it to use all of them, or give ids as in 0,1"
        )
    return ids


def npus_visible_to_child(
    environ: Mapping[str, str], total: int, local_rank: int, num_devices: int
) -> dict[str, str]:
    """Return the variable that lets a child see only ``num_devices`` devices from ``local_rank`` on.

    Raise ConfigError if this process sees fewer devices.
    """
    return child_devices(NAME, environ, visible_npus(environ, total), local_rank, num_devices)


def card_id(device: torch.device) -> str:
    """Return a name that consists of host and card, and is the same in every process."""
    index = device.index or 0
    ids = visible_npus(os.environ, index + 1)
    return f"NPU {ids[index]} of host {BOOT_ID.read_text().strip()}"


def host_of(card: str) -> str:
    """Return the host's name, which is a part of a card's name."""
    return card.rpartition(" of host ")[2]
