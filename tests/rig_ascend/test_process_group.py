"""HcclProcessGroup keeps the contract on the rig, with deferred streams; and what only HCCL can get wrong."""

import fake_cann
import pytest
import torch

from spec_backend_ascend.backend import AscendBackend
from spec_core.errors import ConfigError, DeadlineExceeded, PeerLost, ProtocolError
from spec_testing import ProcessGroupSuite
from spec_testing.process_group_ranks import joined
from spec_testing.processes import run_ranks


def build(rendezvous):
    backend = AscendBackend(AscendBackend.Config(name="ascend"))
    return backend.process_group(rendezvous, backend.device(rendezvous.rank))


class TestHcclProcessGroup(ProcessGroupSuite):
    @pytest.fixture
    def build(self):
        return build

    @pytest.fixture
    def no_synchronisation(self):
        return fake_cann.no_synchronisation


def on_one_card(me):
    backend = AscendBackend(AscendBackend.Config(name="ascend"))
    with joined(me) as rendezvous, pytest.raises(ConfigError, match="device of its own"):
        backend.process_group(rendezvous, backend.device(0))


def test_two_ranks_on_one_card_are_refused():
    run_ranks(on_one_card, 2)


def with_planted(me, call, code, error):
    fake_cann.fail(call, code, for_good=True)
    with joined(me, 3) as rendezvous, pytest.raises(error):
        build(rendezvous)


@pytest.mark.parametrize(
    ("call", "code", "error"),
    [
        ("HcclCommInitRootInfo", fake_cann.HCCL_TIMEOUT, DeadlineExceeded),
        ("HcclCommInitRootInfo", fake_cann.HCCL_TRANSFER, PeerLost),
        ("HcclAllReduce", fake_cann.HCCL_TRANSFER, PeerLost),
        ("HcclAllReduce on the stream", fake_cann.HCCL_TRANSFER, PeerLost),
    ],
)
def test_a_group_that_cannot_work_fails_to_build(call, code, error):
    run_ranks(with_planted, 2, call, code, error)


def after_lost_transfer(me):
    with joined(me) as rendezvous, build(rendezvous) as group:
        fake_cann.fail("HcclBroadcast on the stream", fake_cann.HCCL_TRANSFER)
        value = torch.zeros(3, device=group.device)
        group.broadcast(value, src=0)
        with pytest.raises(RuntimeError):
            torch.npu.current_stream().synchronize()
        with pytest.raises(PeerLost, match="HCCL error 13"):
            group.broadcast(value, src=0)
        with pytest.raises(PeerLost, match="cannot be used any more"):
            group.barrier()


def test_what_hccl_notices_later_ends_the_group():
    run_ranks(after_lost_transfer, 2)


def different_calls(me):
    with joined(me) as rendezvous, build(rendezvous) as group:
        value = torch.zeros(3 + me.rank, device=group.device)
        with pytest.raises((ProtocolError, PeerLost)):
            group.broadcast(value, src=0)
        return fake_cann.calls("HcclBroadcast")


def test_ranks_that_make_different_calls_learn_of_it_before_anything_is_sent():
    assert run_ranks(different_calls, 2) == [0, 0]


def follow_late_work(me):
    """A task still to run writes the tensor that is sent, and a later one reads the tensor that is received."""
    with joined(me) as rendezvous, build(rendezvous) as group:
        source = torch.full((64,), 7.0, device=group.device)
        moved, read = torch.zeros(64, device=group.device), torch.zeros(64, device=group.device)
        fake_cann.stall(torch.npu.current_stream(), 0.1)
        if me.rank == 0:
            moved.copy_(source)
            group.send(moved, dst=1)
        else:
            group.recv(moved, src=0)
        read.copy_(moved)
        assert read.tolist() == [7.0] * 64


def test_calls_wait_for_late_work_of_the_stream():
    run_ranks(follow_late_work, 2)


def close_at_once(me):
    with joined(me) as rendezvous:
        with build(rendezvous) as group:
            value = torch.full((1 << 16,), float(me.rank), device=group.device)
            fake_cann.stall(torch.npu.current_stream(), 0.1)
            fake_cann.slow("aclrtRecordEvent", 0.02)  # torch_npu's queue has it still to say
            group.broadcast(value, src=1)
        assert value.unique().tolist() == [1.0]


def test_close_lets_what_was_issued_arrive():
    run_ranks(close_at_once, 2)
