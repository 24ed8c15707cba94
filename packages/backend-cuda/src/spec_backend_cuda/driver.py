"""Wrap the calls of the CUDA driver's virtual memory management that this package uses.

Device memory is exported as a file descriptor. A process that gets the descriptor, for example over a Unix
socket, can map the memory. The driver frees the memory when the last process unmaps it. Memory of the older
handles (cudaIpcGetMemHandle) has an owner, which must not free it while another process has it open.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from cuda.bindings import driver as cuda

from spec_core.errors import RunError

UNSUPPORTED = frozenset(
    map(int, (cuda.CUresult.CUDA_ERROR_NOT_PERMITTED, cuda.CUresult.CUDA_ERROR_NOT_SUPPORTED))
)
"""Error codes of a driver or device that cannot share memory by file descriptors."""
_DESCRIPTOR = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class CudaError(RunError):
    """A driver call failed with the error ``code``."""

    def __init__(self, call: str, code: int, reason: str) -> None:
        """Store the error code of the driver call ``call``."""
        super().__init__(f"{call}: {reason} (CUDA error {code})")
        self.code = code


def create_memory(size: int, device: int) -> int:
    """Return the handle of new memory on a device. ``size``: bytes, a multiple of ``granularity``."""
    return int(_call(cuda.cuMemCreate, size, _properties(device), 0))


def granularity(device: int) -> int:
    """Return the number of bytes of which every size of device memory must be a multiple."""
    minimum = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return _call(cuda.cuMemGetAllocationGranularity, _properties(device), minimum)


def export(handle: int) -> int:
    """Return a file descriptor by which other processes can import the memory."""
    return int(_call(cuda.cuMemExportToShareableHandle, handle, _DESCRIPTOR, 0))


def import_(descriptor: int) -> int:
    """Return the handle of the memory that was exported as ``descriptor``."""
    return int(_call(cuda.cuMemImportFromShareableHandle, descriptor, _DESCRIPTOR))


def release(handle: int) -> None:
    """Release a handle; the memory stays for as long as it is mapped or exported."""
    _call(cuda.cuMemRelease, handle)


def map_(handle: int, size: int, device: int) -> int:
    """Map the memory; return the address at which ``device`` reads and writes it."""
    address = int(_call(cuda.cuMemAddressReserve, size, 0, 0, 0))
    try:
        _call(cuda.cuMemMap, address, size, 0, handle, 0)
        access = cuda.CUmemAccessDesc()
        access.location = _location(device)
        access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _call(cuda.cuMemSetAccess, address, size, [access], 1)
    except CudaError:
        with suppress(CudaError):
            _call(cuda.cuMemUnmap, address, size)
        with suppress(CudaError):
            _call(cuda.cuMemAddressFree, address, size)
        raise
    return address


def unmap(address: int, size: int) -> None:
    """Unmap the memory at an address and free the address."""
    _call(cuda.cuMemUnmap, address, size)
    _call(cuda.cuMemAddressFree, address, size)


def _properties(device: int) -> cuda.CUmemAllocationProp:
    properties = cuda.CUmemAllocationProp()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = _DESCRIPTOR
    properties.location = _location(device)
    return properties


def _location(device: int) -> cuda.CUmemLocation:
    location = cuda.CUmemLocation()
    location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device
    return location


def _call(function: Callable[..., tuple[Any, ...]], *arguments: object) -> Any:
    """Return a driver call's result without its status, or None. Raise CudaError if the call failed."""
    status, *values = function(*arguments)
    if status != cuda.CUresult.CUDA_SUCCESS:
        _, reason = cuda.cuGetErrorString(status)
        raise CudaError(function.__name__, int(status), (reason or b"unknown error").decode())
    return values[0] if values else None
