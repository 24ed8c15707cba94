"""The few calls of the public ACL runtime API that torch_npu does not offer, by ctypes.

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
"""Of the name that exported memory gets."""
WITHOUT_PID_LIST = 1
"""ACL_RT_IPC_MEM_EXPORT_FLAG_DISABLE_PID_VALIDATION: any process of this user that knows the key may import."""
DEVICE_TO_DEVICE = 3
"""ACL_MEMCPY_DEVICE_TO_DEVICE"""


class AclError(RuntimeError):
    """A call failed; ``code`` is its aclError."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} failed with ACL error {code}")
        self.code = code


@cache
def acl_library() -> ctypes.CDLL:
    """OSError where CANN's environment script has not been sourced."""
    return ctypes.CDLL(LIBRARY)


def device_count() -> int:
    """NPUs that this process may use; opens none."""
    count = ctypes.c_uint32()
    _call("aclrtGetDeviceCount", ctypes.byref(count))
    return count.value


def export_memory(address: int, size: int) -> bytes:
    """Key of an allocation that starts at ``address``."""
    key = ctypes.create_string_buffer(KEY_BYTES)
    _call(
        "aclrtIpcMemGetExportKey",
        *(ctypes.c_void_p(address), ctypes.c_size_t(size), key),
        *(ctypes.c_size_t(KEY_BYTES), ctypes.c_uint64(WITHOUT_PID_LIST)),
    )
    return key.raw


def import_memory(key: bytes) -> int:
    """Address in this process of memory that another process of the same device has exported."""
    address = ctypes.c_void_p()
    _call(
        "aclrtIpcMemImportByKey", ctypes.byref(address), ctypes.create_string_buffer(key), ctypes.c_uint64(0)
    )
    assert address.value is not None
    return address.value


def close_memory(key: bytes) -> None:
    """Importers first, then the exporter."""
    _call("aclrtIpcMemClose", ctypes.create_string_buffer(key))


def copy_on_stream(target: int, source: int, size: int, stream: int) -> None:
    """Between addresses of one device, in the order of ``stream``."""
    _call(
        "aclrtMemcpyAsync",
        *(ctypes.c_void_p(target), ctypes.c_size_t(size), ctypes.c_void_p(source), ctypes.c_size_t(size)),
        *(DEVICE_TO_DEVICE, ctypes.c_void_p(stream)),
    )


def drain(stream: torch.npu.Stream) -> None:
    """Return when what was recorded so far is on the device: asking for the handle drains torch_npu's queue."""
    _ = stream.npu_stream


def _call(name: str, *args: Any) -> None:
    code = getattr(acl_library(), name)(*args)
    if code:
        raise AclError(name, code)
