"""The rig itself, with the genuine torch_npu: late streams, events, memory, what is refused."""

import ctypes
import subprocess
import sys
import threading

import fake_cann
import pytest
import torch
import torch_npu  # noqa: F401 (torch.npu)

from spec_backend_ascend import hccl
from spec_testing.processes import run_ranks


@pytest.fixture(autouse=True)
def quiet_card():
    torch.npu.set_device(0)
    yield
    torch.npu.synchronize()


def copies(source):
    return torch.zeros_like(source), torch.npu.Stream()


def test_what_another_stream_brings_is_late():
    source = torch.ones(64, device="npu")
    late, side = copies(source)
    with fake_cann.held(side):
        with torch.npu.stream(side):
            late.copy_(source)
        assert late.sum().item() == 0
    side.synchronize()
    assert late.sum().item() == 64


def test_an_event_orders_two_streams():
    source = torch.ones(64, device="npu")
    late, side = copies(source)
    with fake_cann.held(side):
        with torch.npu.stream(side):
            late.copy_(source)
            done = side.record_event()
        assert not done.query()
        torch.npu.current_stream().wait_event(done)
    assert late.sum().item() == 64
    assert done.query()


def test_waiting_for_one_stream_hurries_no_other():
    source = torch.ones(64, device="npu")
    late, side = copies(source)
    mine = torch.zeros_like(source)
    with fake_cann.held(side):
        with torch.npu.stream(side):
            late.copy_(source)
        mine.copy_(source)
        torch.npu.current_stream().synchronize()
        assert mine.sum().item() == 64
        assert late.sum().item() == 0


def test_training_equals_the_cpu():
    torch.manual_seed(0)
    reference = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)
    )
    batch, labels = torch.randn(5, 8), torch.randint(0, 4, (5,))
    curves = []
    for device in ("cpu", "npu"):
        module = mlp().to(device)
        module.load_state_dict(reference.state_dict())
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        curve = []
        for _ in range(5):
            loss = torch.nn.functional.cross_entropy(module(batch.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        curves.append(curve)
    assert curves[0] == curves[1]


def mlp():
    layers = torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)
    return torch.nn.Sequential(*layers)


@pytest.mark.parametrize(
    "view_of",
    [
        lambda x: x[:, None],
        lambda x: x.unsqueeze(0),
        lambda x: x[:, :1].squeeze(1),
        lambda x: x.unfold(0, 2, 2),
    ],
    ids=["index", "unsqueeze", "squeeze", "unfold"],
)
def test_what_is_written_to_a_view_is_in_the_tensor(view_of):
    whole, reference = torch.zeros(4, 3, device="npu"), torch.zeros(4, 3)
    view_of(whole).copy_(torch.ones_like(view_of(whole)))
    view_of(reference).fill_(1)
    assert torch.equal(whole.cpu(), reference)


def test_memory_ends_where_the_card_does():
    total = torch.npu.mem_get_info()[1]
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total + 1, dtype=torch.uint8, device="npu")


def test_a_planted_fault_comes_when_it_was_planted():
    torch.npu.empty_cache()
    fake_cann.fail("aclrtMalloc", fake_cann.OUT_OF_MEMORY, for_good=True)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(100 << 20, dtype=torch.uint8, device="npu")
    fake_cann.fail("aclrtMalloc", 0)
    assert torch.empty(100 << 20, dtype=torch.uint8, device="npu").nbytes == 100 << 20


@pytest.mark.parametrize(("listed", "count"), [("0", 1), ("2,1", 2), ("", 0), ("9", 0), ("0,", 0), ("x", 0)])
def test_visible_devices(listed, count):
    code = (
        "import ctypes; n = ctypes.c_uint32(); acl = ctypes.CDLL('libascendcl.so');"
        "print(0 if acl.aclrtGetDeviceCount(ctypes.byref(n)) else n.value)"
    )
    child = subprocess.run(
        ["env", f"ASCEND_RT_VISIBLE_DEVICES={listed}", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(child.stdout) == count


def test_what_is_not_implemented_returns_an_error():
    acl = ctypes.CDLL("libascendcl.so")
    assert acl.aclrtReserveMemAddress() == fake_cann.NOT_SUPPORTED
    assert (
        acl.aclopCompileAndExecute(b"Softmax", 0, None, None, 0, None, None, None, 0, 0, None, None) == 500001
    )


def wait_for_the_other(me):
    torch.npu.set_device(0)
    if me.rank == 0:
        event = torch.npu.Event(interprocess=True)
        with fake_cann.held(torch.npu.current_stream()):
            handle = event.ipc_handle()
            event.record()
            assert torch.npu.current_stream().npu_stream  # the record has left torch_npu's queue
            me.publish(handle)
            assert me.receive() == "asked"
        assert me.receive() == "waited"
        return None
    event = torch.npu.Event.from_ipc_handle(torch.device("npu", 0), me.receive())
    early = event.query()
    event.wait(torch.npu.current_stream())
    me.publish("asked")
    torch.npu.current_stream().synchronize()
    me.publish("waited")
    return early, event.query()


def test_an_event_of_another_process_is_waited_for():
    assert run_ranks(wait_for_the_other, 2)[1] == (False, True)


def issue_at_once():
    torch.npu.set_device(0)
    communicator = hccl.HcclCommunicator(hccl.root_info(), 0, 1)
    stream = torch.npu.current_stream().npu_stream
    value = torch.ones(4, device="npu")
    raw, codes = hccl.hccl_library(), []

    def issue():
        codes.append(raw.HcclBroadcast(*_arguments(communicator, value, stream)))

    threads = [threading.Thread(target=issue) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(codes)


def _arguments(communicator, value, stream):
    address, count = ctypes.c_void_p(value.data_ptr()), ctypes.c_uint64(value.nbytes)
    return address, count, 7, 0, communicator._handle, ctypes.c_void_p(stream)


@pytest.fixture
def long_calls(monkeypatch):
    """Two threads meet in HCCL."""
    monkeypatch.setenv("FAKE_CANN_ISSUE_US", "50000")


def test_two_threads_that_issue_at_once_are_refused(long_calls):
    assert issue_at_once() == [0, 4]


def test_two_communicators_that_are_made_at_once_are_refused(long_calls):
    raw, start, codes = hccl.hccl_library(), threading.Barrier(2), []
    roots = [hccl.root_info() for _ in range(2)]

    def create(root):
        torch.npu.set_device(0)
        start.wait()
        codes.append(raw.HcclCommInitRootInfo(1, root, 0, ctypes.byref(ctypes.c_void_p())))

    threads = [threading.Thread(target=create, args=(root,)) for root in roots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == [0, 4]
