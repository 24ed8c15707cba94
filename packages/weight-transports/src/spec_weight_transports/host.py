"""The host that a process is on, as others of its kind can compare it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from spec_core import Backend


def host_name() -> str:
    """Return a name that two processes share where they see each other's sockets, processes and files as one user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid")]
    return "/".join([boot, *spaces, str(os.geteuid())])


def device_name(backend: Backend, device: torch.device) -> str:
    """Return the vendor's name of a device; empty where processes cannot compare them."""
    return backend.device_id(device) if device.type == backend.device_type else ""


def elsewhere(place: str) -> str:
    """Return why a rank at ``place`` cannot be reached from here; empty if it is on this host."""
    same = place == host_name()
    return "" if same else "it is on another host, in another container, or another user's"
