"""Read and write CUDA_VISIBLE_DEVICES: which of a host's GPUs a process sees, and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_processes import child_devices

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from spec_backend_cuda.nvml import Gpu

NAME = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"


def visible_gpus(environ: Mapping[str, str], gpus: Sequence[Gpu]) -> list[str]:
    """Return the entries of the devices that ``environ`` lets a process see.

    As in CUDA, the list of the variable is read up to its first invalid entry, and counts as empty if it
    names a device twice. If the variable is not set, every GPU is named by its index.
    """
    if NAME not in environ:
        return [str(index) for index in range(len(gpus))]
    entries: list[str] = []
    for entry in environ[NAME].split(","):
        found = _in_full(entry.strip(), gpus)
        if found is None:
            break
        entries.append(found)
    return entries if len(set(entries)) == len(entries) else []


def gpu_of(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    """Return the GPU that an entry names; None for a MIG slice, whose name does not contain its GPU."""
    if entry.isdigit():
        return gpus[int(entry)]
    return next((gpu for gpu in gpus if gpu.uuid == entry), None)


def gpus_visible_to_child(
    environ: Mapping[str, str], gpus: Sequence[Gpu], local_rank: int, num_devices: int
) -> dict[str, str]:
    """Return variables that let a child see only ``num_devices`` devices from ``local_rank`` on.

    Raise ConfigError if this process sees fewer devices.
    """
    chosen = child_devices(NAME, environ, visible_gpus(environ, gpus), local_rank, num_devices)
    # Without a list, indices are the driver's, in PCI order. CUDA's default order has the fastest GPU first.
    order = {} if NAME in environ or ORDER in environ else {ORDER: "PCI_BUS_ID"}
    return {**chosen, **order}


def _in_full(entry: str, gpus: Sequence[Gpu]) -> str | None:
    """Return the full name of an entry's device; None if the entry names no device.

    CUDA accepts the first characters of a UUID as an entry, but vLLM does not.
    """
    if entry.isdigit():
        return str(int(entry)) if int(entry) < len(gpus) else None
    if entry.startswith("MIG-"):
        return entry
    meant = [gpu.uuid for gpu in gpus if gpu.uuid.startswith(entry)] if entry.startswith("GPU-") else []
    return meant[0] if len(meant) == 1 else None
