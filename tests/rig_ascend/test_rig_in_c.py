"""The rig's libraries alone, through ctypes: no torch anywhere."""

import contextlib
import ctypes
import json
import multiprocessing
import os
import subprocess
import sys
import time

import pytest

FP32, FP64, UINT8, SUM = 4, 10, 7, 0
INTERNAL, PARAMETER, NOT_SUPPORTED, TIMEOUT = 4, 1, 5, 9
TASK_FAILED, SYNC_TIMEOUT = 507000, 107020
LONG_S = 20

acl, hccl = ctypes.CDLL("libascendcl.so"), ctypes.CDLL("libhccl.so")
acl.FakeCannCalls.restype = ctypes.c_long


class Memory:
    """Device memory, read and written without waiting for anything."""

    def __init__(self, data: bytes) -> None:
        self.address, self.size = ctypes.c_void_p(), ctypes.c_size_t(len(data))
        assert acl.aclrtMalloc(ctypes.byref(self.address), self.size, 0) == 0
        ctypes.memmove(self.address, data, len(data))

    def read(self) -> bytes:
        return ctypes.string_at(self.address, self.size.value)


@pytest.fixture
def stream():
    acl.aclrtSetDevice(0)
    handle = ctypes.c_void_p()
    assert acl.aclrtCreateStream(ctypes.byref(handle)) == 0
    yield handle
    acl.aclrtDestroyStream(handle)


@contextlib.contextmanager
def held(stream):
    """Keeps the stream busy until the block ends."""
    assert acl.FakeCannHold(stream) == 0
    try:
        yield
    finally:
        acl.FakeCannRelease()


def copy(target, source, stream):
    return acl.aclrtMemcpyAsync(target.address, target.size, source.address, source.size, 3, stream)


def test_a_copy_is_late_until_it_is_waited_for(stream):
    target, source = Memory(b"old "), Memory(b"new!")
    with held(stream):
        assert copy(target, source, stream) == 0
        assert target.read() == b"old "
    assert acl.aclrtSynchronizeStream(stream) == 0
    assert target.read() == b"new!"


def test_a_copy_comes_by_itself(stream):
    target, source = Memory(b"old "), Memory(b"new!")
    copy(target, source, stream)
    deadline = time.monotonic() + LONG_S
    while target.read() != b"new!":
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def streams():
    acl.aclrtSetDevice(0)
    handles = [ctypes.c_void_p() for _ in range(3)]
    for handle in handles:
        assert acl.aclrtCreateStream(ctypes.byref(handle)) == 0
    yield handles
    for handle in handles:
        acl.aclrtDestroyStream(handle)


@pytest.fixture
def event():
    handle = ctypes.c_void_p()
    assert acl.aclrtCreateEventWithFlag(ctypes.byref(handle), 0) == 0
    yield handle
    acl.aclrtDestroyEvent(handle)


def has_happened(event) -> bool:
    recorded = ctypes.c_int32()
    assert acl.aclrtQueryEventStatus(event, ctypes.byref(recorded)) == 0
    return recorded.value == 1


def test_an_event_has_happened_with_its_last_record(streams, event):
    busy, idle, _ = streams
    with held(busy):
        acl.aclrtRecordEvent(event, busy)
        acl.aclrtRecordEvent(event, idle)
        acl.aclrtSynchronizeStream(idle)
        assert has_happened(event)
    acl.aclrtSynchronizeStream(busy)
    assert has_happened(event)


def test_a_wait_is_for_the_record_before_it(streams, event):
    busy, idle, waiting = streams
    target, source = Memory(b"old "), Memory(b"new!")
    with held(busy):
        acl.aclrtRecordEvent(event, busy)
        acl.aclrtStreamWaitEvent(waiting, event)
        copy(target, source, waiting)
        acl.aclrtRecordEvent(event, idle)
        acl.aclrtSynchronizeStream(idle)
        time.sleep(0.01)  # ten times what a task is late
        assert target.read() == b"old "
    acl.aclrtSynchronizeStream(waiting)
    assert target.read() == b"new!"


def test_calls_are_counted_and_a_planted_fault_is_returned_once(stream):
    target, source = Memory(b"old "), Memory(b"new!")
    before = acl.FakeCannCalls(b"aclrtMemcpyAsync")
    acl.FakeCannFail(b"aclrtMemcpyAsync", ctypes.c_long(2), 207000, 0)
    assert [copy(target, source, stream) for _ in range(3)] == [0, 207000, 0]
    assert acl.FakeCannCalls(b"aclrtMemcpyAsync") == before + 3


@pytest.mark.parametrize(
    ("planted", "codes"),
    [("aclrtMalloc:2:207001", [0, 207001, 0]), ("aclrtMalloc:2:207001:forever", [0, 207001, 207001])],
)
def test_faults_are_planted_from_the_environment_too(planted, codes):
    code = (
        "import ctypes; acl = ctypes.CDLL('libascendcl.so'); acl.aclrtSetDevice(0); p = ctypes.c_void_p();"
        "print([acl.aclrtMalloc(ctypes.byref(p), ctypes.c_size_t(64), 0) for _ in range(3)])"
    )
    environ = {**os.environ, "FAKE_CANN_FAULTS": planted}
    child = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, check=True)
    assert json.loads(child.stdout) == codes


def test_a_wait_with_a_timeout_ends_with_it(stream):
    acl.FakeCannStall(stream, 200_000)
    assert acl.aclrtSynchronizeStreamWithTimeout(stream, 20) == SYNC_TIMEOUT
    assert acl.aclrtSynchronizeStreamWithTimeout(stream, -1) == 0


def test_more_bytes_than_fit_are_refused(stream):
    target, source = Memory(b"old"), Memory(b"new!")
    assert copy(target, source, stream) != 0
    assert target.read() == b"old"


def test_memory_of_another_process_is_seen_there_and_gone_with_it(stream):
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=export, args=(theirs,))
    child.start()
    key = ours.recv()
    address = ctypes.c_void_p()
    assert acl.aclrtIpcMemImportByKey(ctypes.byref(address), key, ctypes.c_uint64(0)) == 0
    assert ctypes.string_at(address, 4) == b"mine"
    ctypes.memmove(address, b"ours", 4)
    ours.send("written")
    assert ours.recv() == b"ours"
    assert acl.aclrtIpcMemClose(key) == 0
    child.join(LONG_S)
    assert acl.aclrtIpcMemImportByKey(ctypes.byref(address), key, ctypes.c_uint64(0)) != 0


def export(line):
    acl.aclrtSetDevice(0)
    memory, key = Memory(b"mine"), ctypes.create_string_buffer(65)
    acl.aclrtIpcMemGetExportKey(memory.address, memory.size, key, ctypes.c_size_t(65), ctypes.c_uint64(1))
    line.send(key.raw)
    line.recv()
    line.send(memory.read())


def ranks(function, size=2):
    """Return the result of ``function(rank, size, root info)`` on each rank; rank 0 makes the root info."""
    context = multiprocessing.get_context("spawn")
    lines, children = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        child = context.Process(target=run_rank, args=(function, rank, size, theirs), daemon=True)
        child.start()
        lines.append(ours)
        children.append(child)
    root = lines[0].recv()
    for line in lines:
        line.send(root)
    results = [line.recv() if line.poll(LONG_S) else "silent" for line in lines]
    for child in children:
        child.kill()
        child.join()
    return results


def run_rank(function, rank, size, line):
    acl.aclrtSetDevice(0 if function is meet_on_one_card else rank)
    root = ctypes.create_string_buffer(4108)
    if rank == 0:
        assert hccl.HcclGetRootInfo(root) == 0
        line.send(root.raw)
    line.send(function(rank, size, line.recv()))
    line.poll(LONG_S)


def join(rank, size, root):
    communicator = ctypes.c_void_p()
    code = hccl.HcclCommInitRootInfo(size, root, rank, ctypes.byref(communicator))
    return code, communicator


def meet_on_one_card(rank, size, root):
    return join(rank, size, root)[0]


def test_two_ranks_on_one_card_are_refused():
    assert ranks(meet_on_one_card) == [PARAMETER, PARAMETER]


def add(rank, size, root):
    code, communicator = join(rank, size, root)
    value = (ctypes.c_float * 3)(1, 2, rank)
    memory = Memory(bytes(value))
    count = ctypes.c_uint64(3)
    call = (memory.address, memory.address, count)
    wide = hccl.HcclAllReduce(*call, FP64, SUM, communicator, None)
    codes = [code, wide, hccl.HcclAllReduce(*call, FP32, SUM, communicator, None)]
    codes.append(acl.aclrtSynchronizeStream(None))
    return codes, list((ctypes.c_float * 3).from_buffer_copy(memory.read()))


def test_a_sum_is_everybodys_and_wide_floats_are_refused():
    codes = [0, NOT_SUPPORTED, 0, 0]
    assert ranks(add, 3) == [(codes, [3.0, 6.0, 3.0])] * 3


def lose_a_peer(rank, size, root):
    _, communicator = join(rank, size, root)
    if rank == 1:
        os._exit(0)
    memory, noticed = Memory(b"12345678"), ctypes.c_int()
    issued = hccl.HcclRecv(memory.address, ctypes.c_uint64(8), UINT8, 1, communicator, None)
    failed = acl.aclrtSynchronizeStream(None)
    hccl.HcclGetCommAsyncError(communicator, ctypes.byref(noticed))
    return issued, failed, noticed.value


def test_a_lost_peer_fails_the_stream_and_is_noticed_by_the_communicator():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    first = context.Process(target=run_rank, args=(lose_a_peer, 0, 2, theirs), daemon=True)
    first.start()
    root = ours.recv()
    other, line = context.Pipe()
    second = context.Process(target=run_rank, args=(lose_a_peer, 1, 2, line), daemon=True)
    second.start()
    ours.send(root)
    other.send(root)
    assert ours.poll(LONG_S)
    assert ours.recv() == (0, TASK_FAILED, 13)
    for child in (first, second):
        child.kill()
        child.join()


def wait_in_vain(rank, size, root):
    os.environ["FAKE_CANN_EXEC_TIMEOUT_MS"] = "200"
    _, communicator = join(rank, size, root)
    if rank == 1:
        return None
    memory, noticed = Memory(b"12345678"), ctypes.c_int()
    issued = hccl.HcclRecv(memory.address, ctypes.c_uint64(8), UINT8, 1, communicator, None)
    failed = acl.aclrtSynchronizeStream(None)
    hccl.HcclGetCommAsyncError(communicator, ctypes.byref(noticed))
    return issued, failed, noticed.value


def test_a_silent_peer_is_a_timeout():
    assert ranks(wait_in_vain)[0] == (0, TASK_FAILED, TIMEOUT)


def be_alone(rank, size, root):
    os.environ["FAKE_CANN_CONNECT_TIMEOUT_MS"] = "200"
    return join(0, 2, root)[0] if rank == 0 else None


def test_a_rank_that_does_not_come_is_a_timeout():
    assert ranks(be_alone)[0] == TIMEOUT
