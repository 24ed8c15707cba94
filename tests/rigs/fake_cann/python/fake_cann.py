"""Controls of the rig in a test's own process: counters, faults, busy streams."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Generator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

OUT_OF_MEMORY = 207001
NOT_SUPPORTED = 207000
TASK_FAILED = 507000
HCCL_TIMEOUT = 9
HCCL_TRANSFER = 13
WAITS = (
    *("aclrtSynchronizeStream", "aclrtSynchronizeStreamWithTimeout"),
    *("aclrtSynchronizeDevice", "aclrtSynchronizeDeviceWithTimeout", "aclrtSynchronizeEvent"),
)

_acl = ctypes.CDLL("libascendcl.so")
_acl.FakeCannCalls.restype = ctypes.c_long


def calls(name: str) -> int:
    """How often this process has called a function of ACL or HCCL; ``HcclSend on the stream`` when it ran."""
    return _acl.FakeCannCalls(name.encode())


def fail(name: str, code: int, *, calls_from_now: int = 1, for_good: bool = False) -> None:
    """Lets a call to come return ``code``."""
    _acl.FakeCannFail(name.encode(), ctypes.c_long(calls_from_now), code, for_good)


def stall(stream: torch.npu.Stream, seconds: float) -> None:
    """Keeps a stream busy: what comes after on it is late, whoever waits."""
    _acl.FakeCannStall(ctypes.c_void_p(stream.npu_stream), ctypes.c_uint32(int(seconds * 1e6)))


@contextlib.contextmanager
def held(stream: torch.npu.Stream) -> Generator[None]:
    """Keeps a stream busy until the block ends, however slow the machine is."""
    _acl.FakeCannHold(ctypes.c_void_p(stream.npu_stream))
    try:
        yield
    finally:
        _acl.FakeCannRelease()


def slow(name: str, seconds: float) -> None:
    """Each call takes that long before it does anything: what torch_npu's queue calls is late then."""
    _acl.FakeCannSlow(name.encode(), ctypes.c_uint32(int(seconds * 1e6)))


@contextlib.contextmanager
def no_synchronisation() -> Generator[None]:
    """AssertionError if the host waits for the device meanwhile. What operators' bodies do does not count."""
    before = {name: calls(name) for name in WAITS}
    yield
    assert {name: calls(name) for name in WAITS} == before, "the host waited for the device"
