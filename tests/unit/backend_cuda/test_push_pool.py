"""PushPool without a GPU: the transport's contract and faults, with links that are sockets between processes."""

import time

import pytest

from spec_core import Transport
from spec_core.errors import DeadlineExceeded, PeerLost, RunError
from spec_testing import TransportSuite
from spec_testing.processes import Fault, run_ranks, watch_ranks
from spec_testing.transport_stage import LONG_S, SCHEMA, SHORT_S, UNIT_BYTES, Stage, take

from .socket_links import SLOW_S, BrokenLink, ImpatientLink, LateLink, PushTransport, SlowFirstLink, SlowLink


def slow() -> Transport:
    return PushTransport(SlowLink)


class TestPushPool(TransportSuite):
    @pytest.fixture
    def build(self):
        return PushTransport


def die_under_way(me, stage):
    if me.rank == 1:
        with stage.sender(me) as sender:
            sender.send(stage.sample(0), LONG_S).result(LONG_S)
            sender.send(stage.sample(1), LONG_S)
            sender.send(stage.sample(2), LONG_S)
            time.sleep(SLOW_S / 2)
            me.reach("fault")
        return None
    with stage.receiver(me) as receiver:
        take(stage, receiver, 0)
        with pytest.raises(PeerLost, match="has died"):
            receiver.receive(LONG_S)
        with pytest.raises(PeerLost, match="every sender"):
            receiver.receive(LONG_S)
        return "lost"


def test_a_sample_of_a_sender_killed_on_the_way_is_not_delivered():
    outcomes = watch_ranks(die_under_way, 2, Stage(slow, "cpu"), faults={(1, "fault"): Fault.KILL})
    assert outcomes[0].trace == ""
    assert outcomes[0].value == "lost"


def outlive_the_receiver(me, stage):
    if me.rank == 0:
        with stage.receiver(me):
            me.receive()
            me.reach("fault")
        return None
    with stage.sender(me) as sender:
        tickets = [sender.send(stage.sample(number), LONG_S) for number in range(3)]
        me.publish("sent")
        found = [type(ticket.exception(LONG_S)).__name__ for ticket in tickets]
        with pytest.raises(PeerLost):
            sender.send(stage.sample(3), LONG_S)
        return found


def test_a_killed_receiver_fails_the_tickets_of_all_that_travels():
    outcomes = watch_ranks(
        outlive_the_receiver, 2, Stage(slow, "cpu"), faults={(0, "fault"): Fault.KILL}, timeout_s=25
    )
    assert outcomes[1].trace == ""
    assert outcomes[1].value == ["PeerLost"] * 3


def close_at_once(me, stage):
    if me.rank == 1:
        sender = stage.sender(me)
        for number in range(3):
            sender.send(stage.sample(number), LONG_S)
        sender.close()
        me.publish("closed")
        return
    with stage.receiver(me) as receiver:
        me.receive()
        for number in range(3):
            take(stage, receiver, number)
        with pytest.raises(PeerLost):
            receiver.receive(LONG_S)


def test_what_travels_when_a_sender_closes_gets_there():
    run_ranks(close_at_once, 2, Stage(slow, "cpu"))


def test_a_sample_of_a_sender_that_closed_is_not_lost_while_another_one_is_received(monkeypatch):
    monkeypatch.setattr(SlowFirstLink, "num_receiving", 0)
    transport, stage = PushTransport(SlowFirstLink), Stage(PushTransport, "cpu")
    with (
        transport.listen(SCHEMA, 4 * UNIT_BYTES) as receiver,
        transport.connect(receiver.address, SCHEMA, LONG_S) as slow,
    ):
        slow.send(stage.sample(0), LONG_S).result(LONG_S)
        with transport.connect(receiver.address, SCHEMA, LONG_S) as other:
            other.send(stage.sample(1), LONG_S).result(LONG_S)
        take(stage, receiver, 0)
        take(stage, receiver, 1)


def hear_late(me, stage):
    """A sample is not received before it is there, and the caller of ``send`` does not wait for it."""
    if me.rank == 1:
        with stage.sender(me) as sender:
            started = time.monotonic()
            ticket = sender.send(stage.sample(0), LONG_S)
            assert time.monotonic() - started < SLOW_S / 2
            assert not ticket.done()
            me.publish("sent")
            with pytest.raises(DeadlineExceeded):
                sender.flush(SLOW_S / 4)
            sender.flush(LONG_S)
            assert ticket.done()
        return
    with stage.receiver(me, UNIT_BYTES) as receiver:
        me.receive()
        with pytest.raises(DeadlineExceeded):
            receiver.receive(SHORT_S)
        take(stage, receiver, 0)


def test_a_sample_is_received_when_it_is_all_there():
    run_ranks(hear_late, 2, Stage(slow, "cpu"))


def broken() -> Transport:
    return PushTransport(BrokenLink)


def fail_to_receive(me, stage):
    if me.rank == 1:
        with stage.sender(me) as sender:
            sender.send(stage.sample(0), LONG_S)
            sender.send(stage.sample(1), LONG_S)
            sender.flush(LONG_S)
            me.receive()
            with pytest.raises(PeerLost):
                sender.send(stage.sample(2), LONG_S)
        return
    with stage.receiver(me) as receiver:
        take(stage, receiver, 0)
        with pytest.raises(RunError, match="the device has failed"):
            receiver.receive(LONG_S)
        me.publish("failed")


def test_a_receiver_that_fails_says_why_and_its_sender_hears_of_it():
    run_ranks(fail_to_receive, 2, Stage(broken, "cpu"))


def late() -> Transport:
    return PushTransport(LateLink)


def connect_in_vain(me, stage):
    if me.rank == 0:
        with stage.receiver(me):
            me.receive()
        return
    address = me.receive()
    with pytest.raises(DeadlineExceeded, match="was not open in time"):
        stage.build().connect(address, SCHEMA, SHORT_S)
    me.publish("gave up")


def test_connect_raises_at_its_deadline_where_the_other_end_does_not_open():
    run_ranks(connect_in_vain, 2, Stage(late, "cpu"))


def test_a_link_that_gives_up_is_no_lost_peer():
    transport = PushTransport(ImpatientLink)
    with (
        transport.listen(SCHEMA, UNIT_BYTES) as receiver,
        pytest.raises(DeadlineExceeded, match="did not come"),
    ):
        transport.connect(receiver.address, SCHEMA, LONG_S)
