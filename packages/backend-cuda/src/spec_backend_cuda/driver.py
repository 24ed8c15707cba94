"""The CUDA driver's virtual memory management, as far as this package needs it.

Device memory behind a file descriptor: whoever gets the descriptor, over a Unix socket for one, can map the memory,
and the driver frees it with the last process that has it. Handles of the older kind (cudaIpcGetMemHandle) have an
owner: what it frees must not be open anywhere else.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import ClassVar

from spec_core.errors import RunError

# cuda.h
_PINNED, _DEVICE, _POSIX_FD, _READ_WRITE = 1, 1, 1, 3
_MINIMUM_GRANULARITY = 0
UNSUPPORTED = frozenset({800, 801})
"""CUDA_ERROR_NOT_PERMITTED, CUDA_ERROR_NOT_SUPPORTED."""


class CudaError(RunError):
    """A call of the driver failed with ``code``."""

    def __init__(self, call: str, code: int, reason: str) -> None:
        """Keep the error code."""
        super().__init__(f"{call}: {reason} (CUDA error {code})")
        self.code = code


class _Location(ctypes.Structure):
    _fields_: ClassVar = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationProp(ctypes.Structure):
    _fields_: ClassVar = [
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _AccessDesc(ctypes.Structure):
    _fields_: ClassVar = [("location", _Location), ("flags", ctypes.c_int)]


def create_memory(size: int, device: int) -> int:
    """Return the handle of new memory on a device; ``size`` is a multiple of ``granularity``."""
    handle = ctypes.c_uint64()
    _call(
        "cuMemCreate",
        ctypes.byref(handle),
        ctypes.c_size_t(size),
        ctypes.byref(_prop(device)),
        ctypes.c_uint64(0),
    )
    return handle.value


def granularity(device: int) -> int:
    """Return the number of bytes that sizes of device memory are multiples of."""
    size = ctypes.c_size_t()
    _call(
        "cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(_prop(device)), _MINIMUM_GRANULARITY
    )
    return size.value


def export(handle: int) -> int:
    """Return a file descriptor that stands for the memory."""
    descriptor = ctypes.c_int()
    _call(
        "cuMemExportToShareableHandle",
        ctypes.byref(descriptor),
        ctypes.c_uint64(handle),
        _POSIX_FD,
        ctypes.c_uint64(0),
    )
    return descriptor.value


def import_(descriptor: int) -> int:
    """Return the handle of the memory that a descriptor stands for."""
    handle = ctypes.c_uint64()
    _call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(descriptor), _POSIX_FD)
    return handle.value


def release(handle: int) -> None:
    """Release a handle; the memory stays for as long as it is mapped or exported."""
    _call("cuMemRelease", ctypes.c_uint64(handle))


def map_(handle: int, size: int, device: int) -> int:
    """Map the memory; return the address at which ``device`` reads and writes it."""
    address = ctypes.c_uint64()
    length, zero = ctypes.c_size_t(size), ctypes.c_uint64(0)
    _call("cuMemAddressReserve", ctypes.byref(address), length, ctypes.c_size_t(0), zero, zero)
    try:
        _call("cuMemMap", address, length, ctypes.c_size_t(0), ctypes.c_uint64(handle), zero)
        access = _AccessDesc(_Location(_DEVICE, device), _READ_WRITE)
        _call("cuMemSetAccess", address, length, ctypes.byref(access), ctypes.c_size_t(1))
    except CudaError:
        _library().cuMemUnmap(address, length)
        _library().cuMemAddressFree(address, length)
        raise
    return address.value


def unmap(address: int, size: int) -> None:
    """Unmap the memory at an address and free the address."""
    _call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size))
    _call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size))


def _prop(device: int) -> _AllocationProp:
    return _AllocationProp(_PINNED, _POSIX_FD, _Location(_DEVICE, device))


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    code = getattr(_library(), name)(*arguments)
    if code != 0:
        reason = ctypes.c_char_p()
        _library().cuGetErrorString(code, ctypes.byref(reason))
        raise CudaError(name, code, (reason.value or b"unknown error").decode())
