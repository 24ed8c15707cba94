"""Features over HCCL: the contract, on the rig with deferred streams."""

from __future__ import annotations

import fake_cann
import pytest
import torch
from cards import free_card

from spec_backend_ascend.backend import AscendBackend
from spec_core.records import FeatureSample
from spec_core.testing import TransportSuite
from spec_core.testing.processes import run_ranks
from spec_core.testing.transport_stage import LONG_S, Stage

PULLED = "a sample stays with its sender until it is received: HCCL's calls belong to the thread that trains"


def build():
    backend = AscendBackend(AscendBackend.Config(name="ascend"))
    backend.device(free_card())
    return backend.transport("disaggregated")


class TestHcclTransport(TransportSuite):
    @pytest.fixture
    def build(self):
        return build

    @pytest.fixture
    def device(self):
        return "npu"

    @pytest.mark.xfail(reason=PULLED)
    def test_a_killed_sender_is_lost_after_its_last_sample(self, fail):
        super().test_a_killed_sender_is_lost_after_its_last_sample(fail)

    @pytest.mark.xfail(reason=PULLED)
    def test_a_sender_killed_while_it_waits_leaves_room_for_the_others(self, fail):
        super().test_a_sender_killed_while_it_waits_leaves_room_for_the_others(fail)


def send_late_work(me, stage):
    """The sample is written by a task of the sender's stream that has not run when ``send`` is called."""
    if me.rank == 0:
        with stage.receiver(me) as receiver:
            stage.check(receiver.receive(LONG_S), 3)
        return
    with stage.sender(me) as sender:
        real = stage.sample(3)
        late = FeatureSample(
            sample_id=3,
            input_ids=torch.zeros_like(real.input_ids),
            hidden_TNH=torch.zeros_like(real.hidden_TNH),
        )
        fake_cann.stall(torch.npu.current_stream(), 0.15)
        late.input_ids.copy_(real.input_ids)
        late.hidden_TNH.copy_(real.hidden_TNH)
        sender.send(late, LONG_S)
        sender.flush(LONG_S)


def test_a_sample_follows_the_work_that_makes_it():
    run_ranks(send_late_work, 2, Stage(build, "npu"))


def overwrite_once_done(me, stage):
    """As soon as its ticket is done the sample's memory is overwritten, from a stream that waits for nothing."""
    if me.rank == 0:
        with stage.receiver(me) as receiver:
            stage.check(receiver.receive(LONG_S), 3)
        return
    with stage.sender(me) as sender:
        sample = stage.sample(3)
        nothing = torch.zeros_like(sample.hidden_TNH)
        elsewhere = torch.npu.Stream()
        fake_cann.stall(torch.npu.current_stream(), 0.15)
        sender.send(sample, LONG_S).result(LONG_S)
        with torch.npu.stream(elsewhere):
            sample.hidden_TNH.copy_(nothing)
        elsewhere.synchronize()
        sender.flush(LONG_S)


def test_a_ticket_is_done_when_the_device_has_copied():
    run_ranks(overwrite_once_done, 2, Stage(build, "npu"))


def send_ahead(me, stage):
    """Several samples wait in the sender's card before the first is asked for; then the sender closes."""
    if me.rank == 0:
        with stage.receiver(me) as receiver:
            assert me.receive() == "closed"
            for sample_id in range(4):
                got = receiver.receive(LONG_S)
                stage.check(got, sample_id)
                receiver.release(got)
        me.publish("received")
        return
    sender = stage.sender(me)
    for sample_id in range(4):
        sender.send(stage.sample(sample_id), LONG_S)
    sender.close()
    me.publish("closed")
    assert me.receive() == "received"


def test_samples_that_wait_with_a_closed_sender_arrive_as_they_were():
    run_ranks(send_ahead, 2, Stage(build, "npu"))


def two_on_one_card(me):
    backend = AscendBackend(AscendBackend.Config(name="ascend"))
    backend.device(0)
    stage = Stage(lambda: backend.transport("disaggregated"), "npu")
    if me.rank == 0:
        with stage.receiver(me) as receiver:
            stage.check(receiver.receive(LONG_S), 5)
        return
    with stage.sender(me) as sender:
        sender.send(stage.sample(5), LONG_S)
        sender.flush(LONG_S)
    assert fake_cann.calls("HcclCommInitRootInfo") == 0


def test_two_ends_on_one_card_go_through_the_host():
    run_ranks(two_on_one_card, 2)
