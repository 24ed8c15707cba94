"""Beside vLLM: its StatelessProcessGroup carries the root info, and vllm-ascend's communicator is the other rank.

Where they are not installed, this is skipped; how to install them for the rig: docs/ascend.md.
"""

import importlib.util
import os

import pytest
import torch

from spec_backend_ascend import hccl
from spec_testing.processes import run_ranks

MISSING = [name for name in ("vllm", "vllm_ascend") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

SENT = torch.arange(40, dtype=torch.float32).to(torch.bfloat16)
LONG_S = 120


def meet(me, our_rank):
    """One rank is ours, the other one vLLM's; rank 0 makes the root info."""
    os.environ["VLLM_PLUGINS"] = ""  # of vllm-ascend, the communicator is all that the rig can run
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.utils.network_utils import get_open_port

    port = get_open_port() if me.rank == 0 else me.receive()
    if me.rank == 0:
        me.publish(port)
    torch.npu.set_device(me.rank)
    group = StatelessProcessGroup.create("127.0.0.1", port, me.rank, 2)
    return (ours if me.rank == our_rank else theirs)(group)


def theirs(group):
    from vllm_ascend.distributed.device_communicators.pyhccl import PyHcclCommunicator

    device = torch.device("npu", group.rank)
    communicator = PyHcclCommunicator(group, device=group.rank, library_path="libhccl.so")
    assert communicator.available
    value = as_bytes(SENT if group.rank == 0 else torch.zeros_like(SENT)).to(device)
    communicator.broadcast(value, src=0)
    total = communicator.all_reduce(torch.full((3,), group.rank + 1.0, device=device))
    torch.npu.synchronize()
    return value.tolist(), total.tolist()


def ours(group):
    from vllm_ascend.distributed.device_communicators.pyhccl_wrapper import hcclUniqueId

    device = torch.device("npu", group.rank)
    root = hcclUniqueId()
    if group.rank == 0:
        root.internal[:] = hccl.root_info()
    root = bytes(group.broadcast_obj(root, src=0).internal)
    communicator = hccl.HcclCommunicator(root, group.rank, 2)

    communicator.all_reduce(torch.zeros(1, device=device))  # their communicator begins with this
    value = as_bytes(SENT if group.rank == 0 else torch.zeros_like(SENT)).to(device)
    communicator.broadcast(value, 0)
    total = torch.full((3,), group.rank + 1.0, device=device)
    communicator.all_reduce(total)
    torch.npu.synchronize()
    communicator.abort()
    return value.tolist(), total.tolist()


def as_bytes(tensor):
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("our_rank", [0, 1])
def test_our_communicator_and_vllms_are_one_group(our_rank):
    expected = as_bytes(SENT).tolist(), [3.0] * 3
    assert run_ranks(meet, 2, our_rank, timeout_s=LONG_S) == [expected] * 2
