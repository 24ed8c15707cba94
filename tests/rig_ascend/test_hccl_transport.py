"""Features over HCCL: the contract, on the rig with deferred streams."""

import time
from contextlib import suppress

import fake_cann
import pytest
import torch
from cards import free_card
from late_work import deliver, overwrite_once_done, send_late_work

from spec_backend_ascend.backend import AscendBackend
from spec_core.errors import DeadlineExceeded, PeerLost, RunError
from spec_kit import OwnStream
from spec_testing import TransportSuite
from spec_testing.processes import Fault, run_ranks, watch_ranks
from spec_testing.transport_stage import LONG_S, SCHEMA, Stage, take


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


def test_a_sample_follows_the_work_that_makes_it():
    run_ranks(deliver, 2, Stage(build, "npu"), send_late_work)


def test_a_ticket_is_done_when_the_device_has_copied():
    run_ranks(deliver, 2, Stage(build, "npu"), overwrite_once_done)


def send_ahead(me, stage):
    """Several samples wait in the sender's card before the first is asked for; then the sender closes."""
    if me.rank == 0:
        with stage.receiver(me) as receiver:
            assert me.receive() == "closed"
            for request_id in range(4):
                got = receiver.receive(LONG_S)
                stage.check(got, request_id)
                receiver.release(got)
        me.publish("received")
        return
    fake_cann.slow("HcclSend on the stream", 0.3)  # the next sample is there before this one has left
    sender = stage.sender(me)
    for request_id in range(4):
        sender.send(stage.sample(request_id), LONG_S)
    sender.close()
    me.publish("closed")
    assert me.receive() == "received"


def test_samples_that_wait_with_a_closed_sender_arrive_as_they_were():
    run_ranks(send_ahead, 2, Stage(build, "npu"))


def two_on_one_card(me):
    backend = AscendBackend(AscendBackend.Config(name="ascend"))
    backend.device(0)
    deliver(me, Stage(lambda: backend.transport("disaggregated"), "npu"))
    assert fake_cann.calls("HcclCommInitRootInfo") == 0


def test_two_ends_on_one_card_go_through_the_host():
    run_ranks(two_on_one_card, 2)


def receive_during_a_step(me, stage):
    """The card is busy with a step. The step's stream still has to read a sample when the next one comes."""
    if me.rank == 0:
        with stage.receiver(me) as receiver:
            read = torch.zeros_like(stage.sample(0).hidden_TNH)
            with fake_cann.held(torch.npu.current_stream()):
                got = receiver.receive(LONG_S)
                read.copy_(got.hidden_TNH)
                receiver.release(got)
                del got
                me.publish("released")
                got = receiver.receive(LONG_S)
                assert fake_cann.calls("HcclRecv on the stream") == 2
            stage.check(got, 1)
            expected = stage.sample(0).hidden_TNH
            assert torch.equal(read.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8))
        return
    with stage.sender(me) as sender:
        sender.send(stage.sample(0), LONG_S)
        assert me.receive() == "released"
        sender.send(stage.sample(1), LONG_S)
        sender.flush(LONG_S)


def test_samples_are_received_while_the_card_computes():
    run_ranks(receive_during_a_step, 2, Stage(build, "npu"))


SLOW_S = 0.2


def ask_for(receiver, number):
    """Call ``receive`` until HcclRecv was called so often; return the samples that came meanwhile."""
    got = []
    while fake_cann.calls("HcclRecv") < number:
        with suppress(DeadlineExceeded):
            got.append(receiver.receive(0.01))
    return got


def die_once_done(me, stage):
    """The sender is killed as soon as the tickets of all samples are done that it was slow to send."""
    if me.rank == 0:
        with stage.receiver(me) as receiver:
            got = ask_for(receiver, 3)
            assert me.receive() == "done"
            time.sleep(SLOW_S)  # its death is known
            got += [receiver.receive(LONG_S) for _ in range(3 - len(got))]
            for request_id, sample in enumerate(got):
                stage.check(sample, request_id)
        return "whole"
    fake_cann.slow("HcclSend on the stream", SLOW_S)
    with stage.sender(me) as sender:
        for ticket in [sender.send(stage.sample(request_id), LONG_S) for request_id in range(3)]:
            ticket.result(LONG_S)
        me.publish("done")
        me.reach("killed")
    return None


def test_samples_that_have_left_a_card_outlive_its_process():
    outcomes = watch_ranks(die_once_done, 2, Stage(build, "npu"), faults={(1, "killed"): Fault.KILL})
    assert outcomes[0].value == "whole", outcomes[0].trace


def send_in_vain(me, stage):
    """HcclSend fails on the device; another sender of the same process then works."""
    if me.rank == 0:
        with stage.receiver(me) as receiver:
            with pytest.raises(PeerLost):
                receiver.receive(LONG_S)
            assert me.receive() == "failed"
            stage.check(receiver.receive(LONG_S), 2)
        return
    fake_cann.fail("HcclSend on the stream", fake_cann.HCCL_TRANSFER)
    address = me.receive()
    with (
        stage.build().connect(address, SCHEMA, LONG_S) as first,
        pytest.raises(RunError, match="did not reach"),
    ):
        first.send(stage.sample(1), LONG_S).result(LONG_S)
    with stage.build().connect(address, SCHEMA, LONG_S) as second:
        me.publish("failed")
        second.send(stage.sample(2), LONG_S).result(LONG_S)


def test_a_transfer_that_fails_fails_its_ticket_and_no_later_sender():
    run_ranks(send_in_vain, 2, Stage(build, "npu"))


def receive_in_vain(me, stage, call, code, error):
    """A transfer fails on the device: nobody reads that sample, and the stream of training works."""
    if me.rank == 0:
        fake_cann.fail(call, code)
        with stage.receiver(me) as receiver:
            deadline = time.monotonic() + LONG_S
            with pytest.raises(RunError, match=error):
                receiver.receive(LONG_S)
            assert time.monotonic() < deadline
            torch.npu.current_stream().synchronize()
            me.publish("noticed")
        return
    with stage.sender(me) as sender:
        sender.send(stage.sample(0), LONG_S)
        assert me.receive() == "noticed"


@pytest.mark.parametrize(
    "failure",
    [
        pytest.param(
            ("HcclRecv on the stream", fake_cann.HCCL_TRANSFER, "under way: HCCL error 13"), id="hccl"
        ),
        pytest.param(("aclrtSynchronizeEvent", fake_cann.TASK_FAILED, "could not be received"), id="event"),
    ],
)
def test_a_transfer_that_fails_later_fails_receive(failure):
    run_ranks(receive_in_vain, 2, Stage(build, "npu"), *failure)


def die_while_asked(me, stage):
    """Killed when its sample is asked for. HCCL does not notice it; another sender's sample comes all the same."""
    if me.rank == 0:
        stage.build()
        first = OwnStream(torch.device("npu", free_card()))
        first.close()  # the pool of the first sender takes it
        with stage.receiver(me) as receiver, fake_cann.held(first.stream):
            assert not ask_for(receiver, 1)
            me.publish("asked")
            take(stage, receiver, 2)
            me.publish("go")
            with pytest.raises(PeerLost, match="has died"):
                receiver.receive(LONG_S)
            torch.npu.current_stream().synchronize()
            return fake_cann.calls("HcclCommDestroy")
    address = me.receive()
    assert me.rank == 1 or me.receive() == "asked"
    with stage.build().connect(address, SCHEMA, LONG_S) as sender:
        sender.send(stage.sample(me.rank), LONG_S)
        assert me.rank == 2 or me.receive() == "asked"
        assert me.receive() == "go"
        if me.rank == 1:
            me.reach("killed")
        sender.flush(LONG_S)
    return None


def test_nobody_waits_for_a_sender_that_died_while_it_was_asked():
    parts = die_while_asked, 3, Stage(build, "npu")
    outcomes = watch_ranks(*parts, faults={(1, "killed"): Fault.KILL})
    assert outcomes[0].value == 1, outcomes[0].trace


def die_before_it_is_asked(me, stage):
    """Killed with one sample announced, which the receiver then does not wait for on its device."""
    if me.rank == 0:
        with stage.receiver(me) as receiver:
            assert me.receive() == "announced"
            time.sleep(2 * SLOW_S)  # its death is known
            with pytest.raises(PeerLost):
                receiver.receive(LONG_S)
        return fake_cann.calls("HcclRecv")
    fake_cann.slow("HcclSend on the stream", LONG_S)
    with stage.sender(me) as sender:
        sender.send(stage.sample(3), LONG_S)
        time.sleep(SLOW_S)
        me.publish("announced")
        me.reach("killed")
    return None


def test_a_sample_that_died_with_its_sender_is_not_waited_for():
    parts = die_before_it_is_asked, 2, Stage(build, "npu")
    outcomes = watch_ranks(*parts, faults={(1, "killed"): Fault.KILL})
    assert outcomes[0].value == 0, outcomes[0].trace


def close_once_taken(me, stage):
    if me.rank == 0:
        with stage.receiver(me) as receiver:
            stage.check(receiver.receive(LONG_S), 3)
            me.publish("taken")
            assert me.receive() == "closed"
        return
    fake_cann.slow("aclrtSynchronizeEvent", SLOW_S)  # by which a ticket is settled
    sender = stage.sender(me)
    ticket = sender.send(stage.sample(3), LONG_S)
    assert me.receive() == "taken"
    sender.close()
    settled = ticket.done()
    me.publish("closed")
    assert settled


def test_close_settles_the_tickets_of_what_was_taken():
    run_ranks(close_once_taken, 2, Stage(build, "npu"))


def lose_the_receiver(me, stage):
    """The receiver goes while a sample is on its way, and the sender's device does not notice."""
    if me.rank == 0:
        with stage.receiver(me) as receiver:
            ask_for(receiver, 1)
            time.sleep(SLOW_S)  # the sender has seen that it was asked
        me.publish("gone")
        return
    fake_cann.slow("HcclSend on the stream", 5.0)
    with stage.sender(me) as sender:
        ticket = sender.send(stage.sample(3), LONG_S)
        assert me.receive() == "gone"
        with pytest.raises(PeerLost):
            ticket.result(2.5)


def test_a_ticket_ends_with_its_receiver_whatever_the_device_does():
    run_ranks(lose_the_receiver, 2, Stage(build, "npu"))
