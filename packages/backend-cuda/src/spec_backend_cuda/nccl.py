"""The NCCL calls that a process group needs, from the library that torch brings. Communicators never block the host:
a call that takes its time is asked about until its deadline, so that a peer that is gone cannot hold this process."""

from __future__ import annotations

import ctypes
import time
from functools import cache
from typing import ClassVar

import torch

from spec_core.errors import DeadlineExceeded, PeerLost, RunError

# nccl.h
UNIQUE_ID_BYTES = 128
_SUCCESS, _REMOTE_ERROR, _IN_PROGRESS = 0, 6, 7
_SUM = 0
_UNDEFINED = -(1 << 31)
_CONFIG_MAGIC, _CONFIG_VERSION = 0xCAFEBEEF, 21700
"""The first version of ncclConfig_t; later libraries read it as it was."""
BYTE = 1
SUMMABLE = {
    torch.int8: 0,
    torch.uint8: BYTE,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_ASK_AGAIN_S = 50e-6


class NcclError(RunError):
    """A call of NCCL failed."""


class _UniqueId(ctypes.Structure):
    _fields_: ClassVar = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


class _Config(ctypes.Structure):
    _fields_: ClassVar = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    ]


def unique_id() -> bytes:
    """Names a new communicator; one rank makes it and gives it to the others."""
    name = _UniqueId()
    _check("ncclGetUniqueId", _library().ncclGetUniqueId(ctypes.byref(name)))
    return bytes(name)


class Communicator:
    """Calls are queued on ``stream``; ``deadline`` is when the host's part of a call must be over."""

    def __init__(self, name: bytes, rank: int, world_size: int, deadline: float) -> None:
        self._handle = ctypes.c_void_p()
        undefined = (_UNDEFINED,) * 3
        config = _Config(
            ctypes.sizeof(_Config), _CONFIG_MAGIC, _CONFIG_VERSION, 0, *undefined, None, _UNDEFINED
        )
        status = _library().ncclCommInitRankConfig(
            ctypes.byref(self._handle),
            world_size,
            _UniqueId.from_buffer_copy(name),
            rank,
            ctypes.byref(config),
        )
        try:
            self._finish("ncclCommInitRankConfig", status, deadline)
        except RunError:
            self.abort()
            raise

    def broadcast(self, tensor: torch.Tensor, src: int, deadline: float) -> None:
        address = _address(tensor)
        self._call("ncclBroadcast", deadline, address, address, _count(tensor), BYTE, src)

    def send(self, tensor: torch.Tensor, dst: int, deadline: float) -> None:
        self._call("ncclSend", deadline, _address(tensor), _count(tensor), BYTE, dst)

    def recv(self, tensor: torch.Tensor, src: int, deadline: float) -> None:
        self._call("ncclRecv", deadline, _address(tensor), _count(tensor), BYTE, src)

    def all_gather(self, tensor: torch.Tensor, gathered: torch.Tensor, deadline: float) -> None:
        self._call("ncclAllGather", deadline, _address(tensor), _address(gathered), _count(tensor), BYTE)

    def all_reduce(self, tensor: torch.Tensor, deadline: float) -> None:
        address, kind = _address(tensor), SUMMABLE[tensor.dtype]
        self._call("ncclAllReduce", deadline, address, address, _count(tensor), kind, _SUM)

    def abort(self) -> None:
        """Ends what is queued, too: streams that wait in a call go on. Any thread may call it."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:
            _library().ncclCommAbort(handle)

    def error(self) -> str:
        """What has gone wrong while nobody looked; empty if nothing."""
        status = self._status()
        return "" if status in (_SUCCESS, _IN_PROGRESS) else _reason(status)

    def _call(self, name: str, deadline: float, *arguments: object) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._finish(name, getattr(_library(), name)(*arguments, self._handle, stream), deadline)

    def _finish(self, name: str, status: int, deadline: float) -> None:
        """Until the host's part is over. NCCL has no callback for that."""
        while status == _IN_PROGRESS:
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"{name}: the peers did not answer in time")
            time.sleep(_ASK_AGAIN_S)
            status = self._status()
        _check(name, status)

    def _status(self) -> int:
        status = ctypes.c_int()
        if not self._handle:
            return _REMOTE_ERROR
        _check("ncclCommGetAsyncError", _library().ncclCommGetAsyncError(self._handle, ctypes.byref(status)))
        return status.value


def _address(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _count(tensor: torch.Tensor) -> ctypes.c_size_t:
    return ctypes.c_size_t(tensor.numel())


def _check(name: str, status: int) -> None:
    if status == _REMOTE_ERROR:
        raise PeerLost(f"{name}: {_reason(status)}")
    if status != _SUCCESS:
        raise NcclError(f"{name}: {_reason(status)}")


def _reason(status: int) -> str:
    return _library().ncclGetErrorString(status).decode()


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libnccl.so.2")  # torch has loaded it: the loader knows it by this name
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library
