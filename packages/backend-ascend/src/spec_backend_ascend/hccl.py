"""Communicator: the public HCCL API by ctypes, for groups that are not torch's.

Signatures and values: hccl.h and hccl_types.h,
https://www.hiascend.com/document/detail/en/canncommercial/850/API/hcclapiref/. HCCL wants the communicators of a
process made one after the other and its calls issued by one thread at a time: ``ISSUE`` sees to both, for ours.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any

from spec_core.errors import DeadlineExceeded, PeerLost, ProtocolError, RunError

LIBRARY = "libhccl.so"
ROOT_INFO_BYTES = 4108
UINT8 = 7
SUM = 0
SUMMABLE = {"int8": 0, "int32": 2, "float16": 3, "float32": 4, "int64": 5, "bfloat16": 11}
"""Dtypes that HcclAllReduce adds up on Atlas A2, as HcclDataType."""

ISSUE = threading.Lock()

_TIMEOUT = 9
_MISUSE = {1: "a parameter error", 2: "an empty pointer", 5: "an unsupported feature"}


@cache
def library() -> ctypes.CDLL:
    """OSError where CANN's environment script has not been sourced."""
    loaded = ctypes.CDLL(LIBRARY)
    loaded.HcclGetErrorString.restype = ctypes.c_char_p
    return loaded


def root_info() -> bytes:
    """What the first rank of a new communicator hands to the others; made on the device that is current."""
    raw = ctypes.create_string_buffer(ROOT_INFO_BYTES)
    with ISSUE:
        _call("HcclGetRootInfo", raw)
    return raw.raw


class Communicator:
    """Its calls take addresses on the device that was current when it was made, and are ordered on ``stream``."""

    def __init__(self, root: bytes, rank: int, world_size: int) -> None:
        """Collective; waits for the other ranks for as long as HCCL_CONNECT_TIMEOUT says."""
        self._handle = ctypes.c_void_p()
        raw = ctypes.create_string_buffer(root, ROOT_INFO_BYTES)
        with ISSUE:
            _call("HcclCommInitRootInfo", *(world_size, raw, rank), ctypes.byref(self._handle))

    def broadcast(self, address: int, size: int, root: int, stream: int) -> None:
        self._issue("HcclBroadcast", *(_at(address), _count(size), UINT8, root), stream=stream)

    def send(self, address: int, size: int, peer: int, stream: int) -> None:
        self._issue("HcclSend", *(_at(address), _count(size), UINT8, peer), stream=stream)

    def receive(self, address: int, size: int, peer: int, stream: int) -> None:
        self._issue("HcclRecv", *(_at(address), _count(size), UINT8, peer), stream=stream)

    def all_gather(self, source: int, target: int, size: int, stream: int) -> None:
        """``size`` bytes of each rank, in rank order."""
        self._issue("HcclAllGather", *(_at(source), _at(target), _count(size), UINT8), stream=stream)

    def all_reduce(self, address: int, count: int, dtype: int, stream: int) -> None:
        where = _at(address)
        self._issue("HcclAllReduce", *(where, where, _count(count), dtype, SUM), stream=stream)

    def check(self) -> None:
        """Raises what HCCL has noticed since, PeerLost for one."""
        code = ctypes.c_int()
        _call("HcclGetCommAsyncError", self._handle, ctypes.byref(code))
        if code.value:
            raise _error("a call that was under way", code.value)

    def destroy(self) -> None:
        """Once; what is still under way fails."""
        with ISSUE:
            _call("HcclCommDestroy", self._handle)

    def _issue(self, name: str, *args: Any, stream: int) -> None:
        with ISSUE:
            _call(name, *args, self._handle, ctypes.c_void_p(stream))


def _call(name: str, *args: Any) -> None:
    code = getattr(library(), name)(*args)
    if code:
        raise _error(name, code)


def _error(call: str, code: int) -> RunError:
    words = f"{call}: HCCL error {code} ({library().HcclGetErrorString(code).decode()})"
    if code == _TIMEOUT:
        return DeadlineExceeded(words)
    return ProtocolError(words) if code in _MISUSE else PeerLost(words)


def _at(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address)


def _count(size: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(size)
