"""NcclCommunicator wraps the calls of torch's NCCL library that this package needs.

No call blocks beyond its deadline: NCCL's calls return at once and are polled until the deadline, so that a
dead peer cannot block this process.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
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
"""Magic number and version of the first ncclConfig_t, which later libraries also accept."""
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
    """Return the name of a new communicator; one rank makes it and gives it to the others."""
    name = _UniqueId()
    _check("ncclGetUniqueId", _library().ncclGetUniqueId(ctypes.byref(name)))
    return bytes(name)


class NcclCommunicator:
    """An NCCL communicator. Calls are queued on the current stream.

    ``deadline``: time by ``time.monotonic`` by which the host's part of a call must be complete.
    """

    def __init__(self) -> None:
        """Make a communicator that is not yet connected with other ranks."""
        self._handle = ctypes.c_void_p()
        self._aborted = threading.Event()
        self._in_use = threading.Lock()
        """Held during a call, because NCCL frees an aborted communicator, so that no other call may run
        during the abort."""

    def join(
        self, name: bytes, rank: int, world_size: int, deadline: float, max_blocks: int = _UNDEFINED
    ) -> None:
        """Connect with the other ranks. This must be the first call.

        Each later call uses at most ``max_blocks`` thread blocks of a device.
        """
        few = (_UNDEFINED, _UNDEFINED, max_blocks)
        config = _Config(ctypes.sizeof(_Config), _CONFIG_MAGIC, _CONFIG_VERSION, 0, *few, None, _UNDEFINED)
        with self._in_use:
            self._check_open("ncclCommInitRankConfig")
            status = _library().ncclCommInitRankConfig(
                ctypes.byref(self._handle),
                world_size,
                _UniqueId.from_buffer_copy(name),
                rank,
                ctypes.byref(config),
            )
            self._finish("ncclCommInitRankConfig", status, deadline)

    def broadcast(self, raw: torch.Tensor, src: int, deadline: float) -> None:
        """Copy rank ``src``'s tensor into every rank's tensor."""
        address = _address(raw)
        self._call("ncclBroadcast", deadline, address, address, _count(raw), BYTE, src)

    def send(self, raw: torch.Tensor, dst: int, deadline: float) -> None:
        """Send a tensor to rank ``dst``."""
        self._call("ncclSend", deadline, _address(raw), _count(raw), BYTE, dst)

    def recv(self, raw: torch.Tensor, src: int, deadline: float) -> None:
        """Receive into ``raw`` the tensor that rank ``src`` sends."""
        self._call("ncclRecv", deadline, _address(raw), _count(raw), BYTE, src)

    def send_parts(self, parts: Sequence[torch.Tensor], dst: int, deadline: float) -> None:
        """Send several tensors to rank ``dst``, which calls ``recv_parts`` with tensors of the same sizes."""
        self._grouped("ncclSend", parts, dst, deadline)

    def recv_parts(self, parts: Sequence[torch.Tensor], src: int, deadline: float) -> None:
        """Receive tensors of the same sizes that rank ``src`` passes to ``send_parts``."""
        self._grouped("ncclRecv", parts, src, deadline)

    def all_gather(self, raw: torch.Tensor, gathered: torch.Tensor, deadline: float) -> None:
        """Gather every rank's tensor ``raw`` in ``gathered``, in rank order."""
        self._call("ncclAllGather", deadline, _address(raw), _address(gathered), _count(raw), BYTE)

    def all_reduce(self, tensor: torch.Tensor, deadline: float) -> None:
        """Sum the tensor over the ranks, in place."""
        address = _address(tensor)
        kind = SUMMABLE[tensor.dtype]
        self._call("ncclAllReduce", deadline, address, address, _count(tensor), kind, _SUM)

    def abort(self) -> None:
        """Abort the communicator and its queued calls, so that waiting streams continue. Thread-safe."""
        self._aborted.set()
        with self._in_use:
            handle, self._handle = self._handle, ctypes.c_void_p()
            if handle:
                _library().ncclCommAbort(handle)

    @property
    def aborted(self) -> bool:
        """Return whether the communicator was aborted. The results of queued calls are then undefined."""
        return self._aborted.is_set()

    def error(self) -> str:
        """Return the error that NCCL reports for this communicator; an empty string if there is none."""
        if self.aborted:
            return _reason(_REMOTE_ERROR)
        if not self._in_use.acquire(blocking=False):
            return ""  # the thread that runs a call will notice the error
        try:
            status = self._status()
        finally:
            self._in_use.release()
        return "" if status in (_SUCCESS, _IN_PROGRESS) else _reason(status)

    def check(self) -> None:
        """Raise PeerLost if NCCL reports an error of this communicator."""
        if reason := self.error():
            raise PeerLost(reason)

    def _call(self, name: str, deadline: float, *arguments: object) -> None:
        with self._in_use:
            self._check_open(name)
            status = getattr(_library(), name)(*arguments, self._handle, _stream())
            self._finish(name, status, deadline)

    def _grouped(self, name: str, parts: Sequence[torch.Tensor], peer: int, deadline: float) -> None:
        """Queue one transfer as a group of calls, one call for each tensor."""
        call = getattr(_library(), name)
        stream = _stream()
        with self._in_use:
            self._check_open(name)
            _check("ncclGroupStart", _library().ncclGroupStart())
            made = [call(_address(part), _count(part), BYTE, peer, self._handle, stream) for part in parts]
            ended = _library().ncclGroupEnd()
            for status in made:
                if status != _IN_PROGRESS:
                    _check(name, status)
            self._finish("ncclGroupEnd", ended, deadline)

    def _check_open(self, name: str) -> None:
        if self.aborted:
            raise PeerLost(f"{name}: the communicator was aborted")

    def _finish(self, name: str, status: int, deadline: float) -> None:
        """Poll until the host's part of a call is complete, because NCCL has no callback for it."""
        while status == _IN_PROGRESS:
            self._check_open(name)
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


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


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
    try:
        library = ctypes.CDLL("libnccl.so.2")  # torch has loaded it by this name
    except OSError as error:
        raise NcclError(f"no NCCL: {error}; install it, or a build of torch that brings it") from error
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library
