"""The use of devices as the driver reports it, without a process of ours being on them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import psutil

from spec_backend_cuda import mps_owner, nvml

NOISE_BYTES = 64 << 20
"""The driver's own use varies."""
_INSUFFICIENT_SIZE = 7
"""nvmlReturn_t where the caller has given no room for a list, and there is one."""


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
    try:
        library = nvml._load()
        nvml._check(library, library.nvmlInit_v2())
    except nvml.DriverMissing:
        count = 0
    else:
        count = len(nvml.inventory().gpus)
    for index in range(count):
        handle = ctypes.c_void_p()
        nvml._check(library, library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)))
        used_bytes += _used_bytes(library, handle)
        processes += _num_processes(library, handle)
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


def _used_bytes(library: ctypes.CDLL, handle: ctypes.c_void_p) -> int:
    memory = nvml._Memory(version=nvml._MEMORY_VERSION)
    nvml._check(library, library.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(memory)))
    return memory.used


def _num_processes(library: ctypes.CDLL, handle: ctypes.c_void_p) -> int:
    found = ctypes.c_uint(0)
    status = library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(found), None)
    return found.value if status in (0, _INSUFFICIENT_SIZE) else 0
