"""Name hosts and devices, so that two processes can check whether they share them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from spec_core import Backend


def host_name() -> str:
    """Return a name that is equal in processes of one user, kernel, network namespace and PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid")]
    return "/".join([boot, *spaces, str(os.geteuid())])


def device_name(backend: Backend, device: torch.device) -> str:
    """Return the vendor's id of a device; empty if processes cannot compare ids."""
    return backend.device_id(device) if device.type == backend.device_type else ""


def elsewhere(location: str) -> str:
    """Return why a rank at ``location`` is not on this host; empty if it is here."""
    same = location == host_name()
    return "" if same else "it is on another host, in another container, or another user's"
