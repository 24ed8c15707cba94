"""Our binding of HCCL: one issue at a time, one creation at a time, errors as ours."""

import threading
from concurrent.futures import ThreadPoolExecutor

import fake_cann
import pytest
import torch
import torch_npu  # noqa: F401 (torch.npu)

from spec_backend_ascend import hccl
from spec_core.errors import DeadlineExceeded, PeerLost, ProtocolError

THREADS = 3


@pytest.fixture
def slow_issue(monkeypatch):
    """Long enough for two threads to meet in HCCL."""
    monkeypatch.setenv("FAKE_CANN_ISSUE_US", "20000")


def alone():
    torch.npu.set_device(0)
    return hccl.HcclCommunicator(hccl.root_info(), 0, 1)


def in_threads(function):
    """Return the results of several threads that start together."""
    start = threading.Barrier(THREADS)

    def run():
        torch.npu.set_device(0)
        start.wait()
        return function()

    with ThreadPoolExecutor(THREADS) as pool:
        return [future.result() for future in [pool.submit(run) for _ in range(THREADS)]]


def test_communicators_are_made_one_after_the_other(slow_issue):
    torch.npu.set_device(0)
    roots = [hccl.root_info() for _ in range(THREADS)]
    for communicator in in_threads(lambda: hccl.HcclCommunicator(roots.pop(), 0, 1)):
        communicator.abort()


def test_root_infos_are_made_one_after_the_other(slow_issue):
    roots = in_threads(hccl.root_info)
    assert len(set(roots)) == THREADS


def test_a_communicator_is_not_destroyed_while_another_thread_issues(slow_issue):
    communicators = [alone() for _ in range(THREADS)]

    def end():
        communicators.pop().abort()

    in_threads(end)


def test_calls_of_several_threads_are_issued_one_after_the_other(slow_issue):
    communicator = alone()
    value = torch.ones(4, device="npu")

    def issue():
        communicator.broadcast(value, 0)

    in_threads(issue)
    torch.npu.synchronize()
    communicator.abort()


@pytest.mark.parametrize(("code", "error"), [(9, DeadlineExceeded), (13, PeerLost), (1, ProtocolError)])
def test_errors_of_hccl_are_ours_and_say_what_it_said(code, error):
    communicator = alone()
    fake_cann.fail("HcclSend", code)
    with pytest.raises(error, match=f"HcclSend: HCCL error {code}"):
        communicator.send(torch.ones(1, device="npu"), 0)
    communicator.abort()
