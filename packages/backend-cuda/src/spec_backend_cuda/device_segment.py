"""DeviceSegment provides device memory that several processes map as a tensor."""

from __future__ import annotations

import os
import weakref
from typing import Any, Self

import torch
from torch import Tensor

from spec_backend_cuda import driver


class DeviceSegment:
    """A mapping of shared device memory in this process.

    The mapping ends when the last tensor that uses it is freed. The memory is freed when the last process
    unmaps it.
    """

    def __init__(self, handle: int, size: int, device: torch.device) -> None:
        """Map the memory of the driver's ``handle``, and release the handle."""
        self._size = size
        self._device = device
        try:
            self._address = driver.map_(handle, size, device.index)
        finally:
            driver.release(handle)
        weakref.finalize(self, _unmap, self._address, size, device).atexit = False

    @classmethod
    def create(cls, min_bytes: int, device: torch.device) -> tuple[Self, int]:
        """Return a new segment, and a file descriptor by which other processes open it.

        The caller closes the descriptor.
        """
        torch.cuda.current_stream(device).query()  # makes the device's context if none exists yet
        unit = driver.granularity(device.index)
        size = -(-max(1, min_bytes) // unit) * unit
        handle = driver.create_memory(size, device.index)
        try:
            descriptor = driver.export(handle)
        except driver.CudaError:
            driver.release(handle)
            raise
        try:
            return cls(handle, size, device), descriptor
        except driver.CudaError:
            os.close(descriptor)  # an open descriptor would keep the memory
            raise

    @classmethod
    def open(cls, descriptor: int, size: int, device: torch.device) -> Self:
        """Map the segment of ``size`` bytes that another process has created and exported as ``descriptor``."""
        torch.cuda.current_stream(device).query()
        return cls(driver.import_(descriptor), size, device)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Return the memory in the form of the CUDA array interface, version 2.

        https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
        """
        return {"shape": (self._size,), "typestr": "|u1", "data": (self._address, False), "version": 2}

    def bytes(self) -> Tensor:
        """Return the memory as uint8 ``[size]``; this tensor and its views keep the mapping alive."""
        return torch.as_tensor(self, device=self._device)


def _unmap(address: int, size: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # work on the memory may still be queued
    driver.unmap(address, size)
