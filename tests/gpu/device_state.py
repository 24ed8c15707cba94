"""The use of devices as the driver reports it, without a process of ours being on them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pynvml

from spec_backend_cuda import mps_owner

NOISE_BYTES = 64 << 20
"""The driver's own use varies."""


@dataclass(frozen=True)
class DeviceState:
    used_bytes: int
    """Bytes in use, summed over all devices."""
    processes: int
    """Processes that have a context; in a container the driver may list none."""
    mps_folders: frozenset[str]
    mps_processes: frozenset[int]

    def beyond(self, before: DeviceState) -> list[str]:
        """Return all that was not there before."""
        found = [*self.mps_folders - before.mps_folders, *self.mps_processes - before.mps_processes]
        if (more := self.used_bytes - before.used_bytes) > NOISE_BYTES:
            found.append(f"{more} bytes of device memory")
        if (more := self.processes - before.processes) > 0:
            found.append(f"{more} processes on the devices")
        return [str(each) for each in found]


def device_state() -> DeviceState:
    used_bytes = processes = 0
    with suppress(pynvml.NVMLError_LibraryNotFound):
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            used_bytes += pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used
            processes += len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
        pynvml.nvmlShutdown()
    return DeviceState(used_bytes, processes, _mps_folders(), frozenset(mps_processes()))


def mps_processes(name: str = "nvidia-cuda-mps-") -> list[int]:
    """Ids of those that run; a dead one is listed until its parent looks."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "status"])
        if any(Path(word).name.startswith(name) for word in process.info["cmdline"] or ())
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def _mps_folders() -> frozenset[str]:
    return frozenset(str(folder) for folder in mps_owner.folders().glob(f"*{mps_owner.PREFIX}*"))
