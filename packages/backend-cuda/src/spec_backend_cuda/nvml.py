"""This host's GPUs by the driver's monitoring library: no CUDA context is opened, nothing is allocated."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME_BYTES = 96
"""NVML_DEVICE_UUID_V2_BUFFER_SIZE; versions are shorter."""


class _Memory(ctypes.Structure):
    """nvmlMemory_v2_t. It names the driver's own share, which CUDA counts in no device's memory."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


_MEMORY_VERSION = ctypes.sizeof(_Memory) | 2 << 24


class DriverMissing(RuntimeError):
    """No NVIDIA driver that answers; the message says what to do."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, as the driver describes it."""

    uuid: str
    """As in CUDA_VISIBLE_DEVICES: ``GPU-`` and 36 characters."""
    compute_capability: tuple[int, int]
    memory_bytes: int | None = None
    """Memory that processes can allocate, in bytes; None where it is not known."""


@dataclass(frozen=True)
class Inventory:
    """The GPUs of this host and the driver's version."""

    driver: str
    gpus: tuple[Gpu, ...]
    """The host's GPUs in PCI order."""


def inventory() -> Inventory:
    """Return this host's GPUs. Raise DriverMissing without a driver."""
    nvml = _load()
    _check(nvml, nvml.nvmlInit_v2())
    try:
        count = ctypes.c_uint()
        _check(nvml, nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
        gpus = tuple(_gpu(nvml, index) for index in range(count.value))
        return Inventory(_text(nvml, nvml.nvmlSystemGetDriverVersion), gpus)
    finally:
        nvml.nvmlShutdown()


def _load() -> ctypes.CDLL:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        raise DriverMissing(
            "no NVIDIA driver was found (libnvidia-ml.so.1): install one, or give the container its GPUs "
            "(docker run --gpus all)"
        ) from error
    nvml.nvmlErrorString.restype = ctypes.c_char_p
    return nvml


def _gpu(nvml: ctypes.CDLL, index: int) -> Gpu:
    handle = ctypes.c_void_p()
    _check(nvml, nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)))
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(nvml, nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)))
    return Gpu(
        _text(nvml, nvml.nvmlDeviceGetUUID, handle), (major.value, minor.value), _memory_bytes(nvml, handle)
    )


def _memory_bytes(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> int | None:
    """Return a GPU's memory; None for one that shares the host's, and for drivers before 510, which lack the call."""
    memory = _Memory(version=_MEMORY_VERSION)
    ask = getattr(nvml, "nvmlDeviceGetMemoryInfo_v2", None)
    if ask is None or ask(handle, ctypes.byref(memory)) != 0:
        return None
    return memory.total - memory.reserved


def _text(nvml: ctypes.CDLL, function: Callable[..., int], *handle: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(_NAME_BYTES)
    _check(nvml, function(*handle, buffer, _NAME_BYTES))
    return buffer.value.decode()


def _check(nvml: ctypes.CDLL, status: int) -> None:
    if status != 0:
        reason = nvml.nvmlErrorString(status).decode()
        raise DriverMissing(f"the NVIDIA driver does not answer: {reason}; see what nvidia-smi says")
