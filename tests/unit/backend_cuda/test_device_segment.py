"""DeviceSegment without a GPU, on a driver that only counts."""

import os

import pytest
import torch

from spec_backend_cuda import driver
from spec_backend_cuda.device_segment import DeviceSegment

DEVICE = torch.device("cuda", 0)


def test_memory_that_cannot_be_mapped_is_not_kept_by_its_descriptor(monkeypatch):
    released, exported = [], []

    def export(handle: int) -> int:
        exported.append(os.memfd_create("device memory"))
        return exported[-1]

    def fail(handle: int, size: int, device: int) -> int:
        raise driver.CudaError("cuMemSetAccess", 801, "not supported")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: torch.cpu.Event())
    monkeypatch.setattr(driver, "granularity", lambda device: 2 << 20)
    monkeypatch.setattr(driver, "create_memory", lambda size, device: 7)
    monkeypatch.setattr(driver, "export", export)
    monkeypatch.setattr(driver, "map_", fail)
    monkeypatch.setattr(driver, "release", released.append)
    with pytest.raises(driver.CudaError, match="not supported"):
        DeviceSegment.create(1, DEVICE)
    assert released == [7]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(exported[0])
