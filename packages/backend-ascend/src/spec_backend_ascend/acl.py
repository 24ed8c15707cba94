"""Wrap, by ctypes, the calls of the public ACL runtime API that torch_npu does not offer.

Signatures and values: https://www.hiascend.com/document/detail/en/canncommercial/850/API/appdevgapi/ (aclrt*).
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LIBRARY = "libascendcl.so"
KEY_BYTES = 65
"""Size in bytes of the key of exported memory."""
WITHOUT_PID_LIST = 1
"""ACL's flag ACL_RT_IPC_MEM_EXPORT_FLAG_DISABLE_PID_VALIDATION: any process of this user that has the key may
map the memory."""
DEVICE_TO_DEVICE = 3
"""ACL's kind of copy ACL_MEMCPY_DEVICE_TO_DEVICE."""


class AclError(RuntimeError):
    """A call of ACL failed with ``code``, an aclError."""

    def __init__(self, call: str, code: int) -> None:
        """Store the name of the call and its error code."""
        super().__init__(f"{call} failed with ACL error {code}")
        self.code = code


@cache
def acl_library() -> ctypes.CDLL:
    """Return ACL's library. Raise OSError if CANN's environment script has not been sourced."""
    return ctypes.CDLL(LIBRARY)


def device_count() -> int:
    """Return the number of NPUs that this process may use, without opening an NPU."""
    count = ctypes.c_uint32()
    _call("aclrtGetDeviceCount", ctypes.byref(count))
    return count.value


def export_memory(address: int, size: int) -> bytes:
    """Export the allocation that starts at ``address``; return its key."""
    key = ctypes.create_string_buffer(KEY_BYTES)
    _call(
        "aclrtIpcMemGetExportKey",
        *(ctypes.c_void_p(address), ctypes.c_size_t(size), key),
        *(ctypes.c_size_t(KEY_BYTES), ctypes.c_uint64(WITHOUT_PID_LIST)),
    )
    return key.raw


def import_memory(key: bytes) -> int:
    """Map memory that another process has exported from the same device; return its local address."""
    address = ctypes.c_void_p()
    _call(
        "aclrtIpcMemImportByKey", ctypes.byref(address), ctypes.create_string_buffer(key), ctypes.c_uint64(0)
    )
    assert address.value is not None
    return address.value


def close_memory(key: bytes) -> None:
    """Close exported memory. Importers must close it before the exporter does."""
    _call("aclrtIpcMemClose", ctypes.create_string_buffer(key))


def copy_on_stream(target: int, source: int, size: int, stream: int) -> None:
    """Queue a copy between addresses of one device on ``stream``."""
    _call(
        "aclrtMemcpyAsync",
        *(ctypes.c_void_p(target), ctypes.c_size_t(size), ctypes.c_void_p(source), ctypes.c_size_t(size)),
        *(DEVICE_TO_DEVICE, ctypes.c_void_p(stream)),
    )


def drain(stream: torch.npu.Stream) -> None:
    """Wait until torch_npu has passed all work of ``stream`` to the device.

    Reading the stream's handle drains torch_npu's queue.
    """
    _ = stream.npu_stream


def _call(name: str, *args: Any) -> None:
    code = getattr(acl_library(), name)(*args)
    if code:
        raise AclError(name, code)
