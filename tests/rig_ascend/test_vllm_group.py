"""Beside vLLM: its StatelessProcessGroup carries the root info, vllm-ascend's communicator is the other rank."""

from __future__ import annotations

import pytest
import torch

from spec_core.testing.processes import run_ranks

pytest.importorskip("vllm.distributed.utils", reason="needs vllm and vllm-ascend", exc_type=ImportError)
pytest.importorskip("vllm_ascend.distributed.device_communicators.pyhccl", exc_type=ImportError)

SENT = torch.arange(40, dtype=torch.float32).to(torch.bfloat16)


def meet(me):
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.utils.network_utils import get_open_port

    if me.rank == 0:
        port = get_open_port()
        me.publish(port)
    else:
        port = me.receive()
    torch.npu.set_device(me.rank)
    group = StatelessProcessGroup.create("127.0.0.1", port, me.rank, 2)
    return theirs(group) if me.rank == 0 else ours(group)


def theirs(group):
    from vllm_ascend.distributed.device_communicators.pyhccl import PyHcclCommunicator

    communicator = PyHcclCommunicator(group, device=0, library_path="libhccl.so")
    assert communicator.available
    communicator.broadcast(SENT.view(torch.uint8).to("npu:0"), src=0)
    total = communicator.all_reduce(torch.ones(3, device="npu:0"))
    torch.npu.synchronize()
    return total.tolist()


def ours(group):
    """Rank 1: the communicator's first call is the other side's warm-up, a sum of one float."""
    from spec_backend_ascend import hccl

    root = bytes(group.broadcast_obj(None, src=0).internal)
    communicator = hccl.Communicator(root, 1, 2)
    stream = torch.npu.current_stream().npu_stream
    warm = torch.zeros(1, device="npu:1")
    got, total = torch.zeros(80, dtype=torch.uint8, device="npu:1"), torch.full((3,), 2.0, device="npu:1")
    communicator.all_reduce(warm.data_ptr(), 1, hccl.SUMMABLE["float32"], stream)
    communicator.broadcast(got.data_ptr(), 80, 0, stream)
    communicator.all_reduce(total.data_ptr(), 3, hccl.SUMMABLE["float32"], stream)
    assert torch.equal(got.cpu().view(torch.bfloat16), SENT)
    communicator.destroy()
    return total.tolist()


def test_our_communicator_and_vllms_are_one_group():
    assert run_ranks(meet, 2, timeout_s=90) == [[3.0] * 3, [3.0] * 3]
