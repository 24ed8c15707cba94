"""HcclCommunicator wraps the public HCCL API by ctypes, for groups outside ``torch.distributed``.

Signatures and values: hccl.h and hccl_types.h,
https://www.hiascend.com/document/detail/en/canncommercial/850/API/hcclapiref/. HCCL requires that a process
creates its communicators one after the other, and calls HCCL from one thread at a time. The lock ``ISSUE``
ensures both requirements in this package.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import TYPE_CHECKING, Any

from spec_core.errors import DeadlineExceeded, PeerLost, ProtocolError, RunError

if TYPE_CHECKING:
    from torch import Tensor

LIBRARY = "libhccl.so"
ROOT_INFO_BYTES = 4108
UINT8 = 7
SUM = 0
SUMMABLE = {"int8": 0, "int32": 2, "float16": 3, "float32": 4, "int64": 5, "bfloat16": 11}
"""Map each dtype that HcclAllReduce can sum on Atlas A2 to its HcclDataType."""

ISSUE = threading.Lock()

_TIMEOUT = 9
_NOT_CONNECTED = 11
_MISUSE = {1: "a parameter error", 2: "an empty pointer", 5: "an unsupported feature"}


@cache
def hccl_library() -> ctypes.CDLL:
    """Return HCCL's library. Raise OSError if CANN's environment script has not been sourced."""
    loaded = ctypes.CDLL(LIBRARY)
    loaded.HcclGetErrorString.restype = ctypes.c_char_p
    return loaded


def root_info() -> bytes:
    """Return the root info of a new communicator on the current device.

    Rank 0 makes it and sends it to the other ranks.
    """
    raw = ctypes.create_string_buffer(ROOT_INFO_BYTES)
    with ISSUE:
        _call("HcclGetRootInfo", raw)
    return raw.raw


class HcclCommunicator:
    """A communicator of all ranks, on the device that was current when it was made.

    Calls take tensors of that device and are queued on the current stream. ``deadline`` is ignored, because HCCL
    returns as soon as a call is queued.
    """

    def __init__(self, root: bytes, rank: int, world_size: int) -> None:
        """Connect with the other ranks, which must also connect, within HCCL_CONNECT_TIMEOUT."""
        self._handle = ctypes.c_void_p()
        self._aborted = threading.Lock()
        """Acquired by the first call of ``abort``, and never released."""
        raw = ctypes.create_string_buffer(root, ROOT_INFO_BYTES)
        with ISSUE:
            _call("HcclCommInitRootInfo", *(world_size, raw, rank), ctypes.byref(self._handle))

    def broadcast(self, raw: Tensor, src: int, deadline: float = 0.0) -> None:
        """Copy rank ``src``'s tensor into every rank's tensor."""
        self._issue("HcclBroadcast", *(_at(raw), _count(raw.nbytes), UINT8, src))

    def send(self, raw: Tensor, dst: int, deadline: float = 0.0) -> None:
        """Send a tensor to rank ``dst``."""
        self._issue("HcclSend", *(_at(raw), _count(raw.nbytes), UINT8, dst))

    def recv(self, raw: Tensor, src: int, deadline: float = 0.0) -> None:
        """Receive into ``raw`` the tensor that rank ``src`` sends."""
        self._issue("HcclRecv", *(_at(raw), _count(raw.nbytes), UINT8, src))

    def all_gather(self, raw: Tensor, gathered: Tensor, deadline: float = 0.0) -> None:
        """Gather every rank's tensor ``raw`` in ``gathered``, in rank order."""
        self._issue("HcclAllGather", *(_at(raw), _at(gathered), _count(raw.nbytes), UINT8))

    def all_reduce(self, tensor: Tensor, deadline: float = 0.0) -> None:
        """Sum the tensor over the ranks, in place."""
        where = _at(tensor)
        dtype = SUMMABLE[str(tensor.dtype).removeprefix("torch.")]
        self._issue("HcclAllReduce", *(where, where, _count(tensor.numel()), dtype, SUM))

    def check(self) -> None:
        """Raise the error, such as PeerLost, that HCCL reports for this communicator, if any."""
        code = ctypes.c_int()
        _call("HcclGetCommAsyncError", self._handle, ctypes.byref(code))
        if code.value:
            raise _error("a call that was under way", code.value)

    def abort(self) -> None:
        """Free the communicator; operations that are still queued fail. Idempotent."""
        if self._aborted.acquire(blocking=False):
            with ISSUE:
                _call("HcclCommDestroy", self._handle)

    def _issue(self, name: str, *args: Any) -> None:
        import torch

        stream = torch.npu.current_stream().npu_stream
        with ISSUE:
            _call(name, *args, self._handle, ctypes.c_void_p(stream))


def _call(name: str, *args: Any) -> None:
    code = getattr(hccl_library(), name)(*args)
    if code:
        raise _error(name, code)


def _error(call: str, code: int) -> RunError:
    words = f"{call}: HCCL error {code} ({hccl_library().HcclGetErrorString(code).decode()})"
    if code == _NOT_CONNECTED:
        words += (
            "; if CANN's log says EJ0003 or EI0019, another process listens on HCCL's ports: set HCCL_IF_BASE_PORT "
            "to the first of 16 free ports (its default is 60000)"
        )
    if code == _TIMEOUT:
        return DeadlineExceeded(words)
    return ProtocolError(words) if code in _MISUSE else PeerLost(words)


def _at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _count(size: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(size)
