"""List this host's GPUs with NVML, without opening a CUDA context or allocating memory."""

from __future__ import annotations

from dataclasses import dataclass

import pynvml


class DriverMissing(RuntimeError):
    """This host has no working NVIDIA driver; the message says what to do."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, as the driver describes it."""

    uuid: str
    """UUID in the form of CUDA_VISIBLE_DEVICES: ``GPU-`` and 36 characters."""
    compute_capability: tuple[int, int]
    memory_bytes: int | None = None
    """Memory that processes can allocate, in bytes; None if it is not known."""


@dataclass(frozen=True)
class Inventory:
    """The GPUs of this host and the driver's version."""

    driver: str
    gpus: tuple[Gpu, ...]
    """The host's GPUs in PCI order."""


def inventory() -> Inventory:
    """Return this host's GPUs. Raise DriverMissing if there is no driver."""
    try:
        pynvml.nvmlInit()
        try:
            gpus = tuple(_gpu(index) for index in range(pynvml.nvmlDeviceGetCount()))
            return Inventory(pynvml.nvmlSystemGetDriverVersion(), gpus)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError_LibraryNotFound as error:
        raise DriverMissing(
            "no NVIDIA driver was found (libnvidia-ml.so.1): install one, or give the container its GPUs "
            "(docker run --gpus all)"
        ) from error
    except pynvml.NVMLError as error:
        raise DriverMissing(
            f"the NVIDIA driver does not answer: {error}; see what nvidia-smi says"
        ) from error


def _gpu(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(pynvml.nvmlDeviceGetUUID(handle), (major, minor), _memory_bytes(handle))


def _memory_bytes(handle: object) -> int | None:
    """Return a GPU's memory in bytes, without the memory that the driver reserves.

    CUDA's total does not include the reserved memory either. The result is None for a GPU that shares the
    host's memory, and for drivers before 510, which lack version 2 of ``nvmlDeviceGetMemoryInfo``.
    """
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return None
    return memory.total - memory.reserved
