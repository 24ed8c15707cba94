"""NcclCommunicator without a GPU, on a library that answers as NCCL's nonblocking communicators do."""

import threading
import time

import pytest
import torch

from spec_backend_cuda import nccl
from spec_backend_cuda.nccl import NcclCommunicator, NcclError
from spec_core.errors import DeadlineExceeded, PeerLost

SUCCESS, INVALID, REMOTE, IN_PROGRESS = 0, 4, 6, 7
NAME = bytes(range(128))


class Library:
    """``status`` is what every question is answered with; ``made`` is what was called."""

    def __init__(self) -> None:
        self.status = SUCCESS
        self.refused = ""
        self.made: list[str] = []
        self.inside = threading.Semaphore(0)

    def ncclCommInitRankConfig(self, handle, world_size, name, rank, config) -> int:
        handle._obj.value = 17
        fields = config._obj
        assert (bytes(name), world_size, fields.magic, fields.blocking) == (NAME, 2, 0xCAFEBEEF, 0)
        self.made.append(f"join as {rank}, {fields.max_ctas} blocks")
        return IN_PROGRESS

    def ncclCommGetAsyncError(self, handle, status) -> int:
        assert handle.value == 17
        self.inside.release()
        status._obj.value = self.status
        return SUCCESS

    def ncclGroupStart(self) -> int:
        self.made.append("group")
        return SUCCESS

    def ncclGroupEnd(self) -> int:
        self.made.append("end")
        return IN_PROGRESS

    def ncclSend(self, address, count, kind, peer, handle, stream) -> int:
        self.made.append(f"send {count.value} to {peer}")
        return INVALID if self.refused == "send" else SUCCESS

    def ncclRecv(self, address, count, kind, peer, handle, stream) -> int:
        self.made.append(f"recv {count.value} from {peer}")
        return SUCCESS

    def ncclCommAbort(self, handle) -> int:
        self.made.append(f"abort {handle.value}")
        return SUCCESS

    def ncclGetErrorString(self, status) -> bytes:
        return f"error {status}".encode()


@pytest.fixture
def library(monkeypatch):
    library = Library()
    monkeypatch.setattr(nccl, "_library", lambda: library)
    monkeypatch.setattr(nccl, "_stream", lambda: None)
    return library


@pytest.fixture
def joined(library):
    communicator = NcclCommunicator()
    communicator.join(NAME, 1, 2, soon(), 8)
    return communicator


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def parts(*sizes: int) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=torch.uint8) for size in sizes]


def test_a_transfer_is_one_group_of_as_many_calls_as_it_has_parts(library, joined):
    joined.send_parts(parts(3, 5), 1, soon())
    joined.recv_parts(parts(7), 0, soon())
    assert library.made == [
        "join as 1, 8 blocks",
        *("group", "send 3 to 1", "send 5 to 1", "end"),
        *("group", "recv 7 from 0", "end"),
    ]


def test_a_group_that_refuses_a_call_is_ended_all_the_same(library, joined):
    library.refused = "send"
    with pytest.raises(NcclError, match="ncclSend: error 4"):
        joined.send_parts(parts(3), 1, soon())
    assert library.made[-1] == "end"


def test_a_call_whose_peer_does_not_come_ends_at_its_deadline(library, joined):
    library.status = IN_PROGRESS
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        joined.recv_parts(parts(3), 0, soon(0.2))
    assert time.monotonic() - started < 1


def test_an_abort_ends_a_call_of_another_thread_and_comes_after_it(library):
    library.status = IN_PROGRESS
    communicator = NcclCommunicator()
    errors: list[BaseException] = []

    def join() -> None:
        try:
            communicator.join(NAME, 0, 2, soon(60))
        except PeerLost as error:
            errors.append(error)
        library.made.append("left")

    thread = threading.Thread(target=join)
    thread.start()
    assert library.inside.acquire(timeout=5)
    assert communicator.error() == ""  # nobody is kept waiting by the question
    communicator.abort()
    thread.join(5)
    assert len(errors) == 1
    assert sorted(library.made[1:]) == ["abort 17", "left"]


def test_after_an_abort_nothing_reaches_the_library(library, joined):
    joined.abort()
    joined.abort()
    before = list(library.made)
    assert before.count("abort 17") == 1
    assert joined.aborted
    assert joined.error() == f"error {REMOTE}"
    for call in (joined.send_parts, joined.recv_parts):
        with pytest.raises(PeerLost):
            call(parts(3), 1, soon())
    with pytest.raises(PeerLost):
        joined.join(NAME, 0, 2, soon())
    assert library.made == before


def test_what_nccl_notices_by_itself_is_an_error(library, joined):
    assert joined.error() == ""
    library.status = REMOTE
    assert joined.error() == f"error {REMOTE}"


def test_a_missing_library_is_an_error_of_ours(monkeypatch):
    def load(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(nccl.ctypes, "CDLL", load)
    nccl._library.cache_clear()
    with pytest.raises(NcclError, match=r"libnccl\.so\.2: cannot open.*install"):
        nccl.unique_id()
