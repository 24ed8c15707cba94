"""This module has TransportSuite's test functions in which a side dies, stops or closes (T6, T7, T9)."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import wait

import pytest

from spec_core import FeatureReceiver, FeatureSender
from spec_core.errors import DeadlineExceeded, PeerLost
from spec_testing.processes import Rank
from spec_testing.resources import Resources, settled_resources
from spec_testing.transport_stage import (
    FAULT,
    LONG_S,
    SCHEMA,
    SHORT_S,
    UNIT_BYTES,
    Stage,
    error_of,
    expect_deadline,
    take,
)

SAFE = "the window is full of a sample whose ticket is done, and one waits"


def _let_arrive(sender: FeatureSender) -> None:
    """Flush the sender, so that its samples have arrived if the transport copies them.

    Otherwise tickets are done only when the receiver releases the samples, and the flush times out.
    """
    with contextlib.suppress(DeadlineExceeded):
        sender.flush(SHORT_S)


def fault_in_sender(me: Rank, stage: Stage) -> str | None:
    """Kill or stop the sender after it has sent samples; return the name of the error of ``receive``."""
    if me.rank > 0:
        with stage.sender(me) as sender:
            sender.send(stage.sample(0), LONG_S)
            sender.send(stage.sample(1), LONG_S)
            _let_arrive(sender)
            me.publish("sent")
            me.reach(FAULT)
        return None
    with stage.receiver(me) as receiver:
        me.receive()
        take(stage, receiver, 0)
        take(stage, receiver, 1)
        return error_of(lambda: receiver.receive(2 * SHORT_S), 2 * SHORT_S)


def death_of_sender(me: Rank, stage: Stage) -> str | None:
    """Kill a sender that waits because the window is full.

    Check that samples whose ticket was done still arrive before PeerLost. Return the name of the error of
    ``receive`` after that.
    """
    if me.rank > 0:
        with stage.sender(me) as sender:
            sender.send(stage.sample(0), LONG_S).result(LONG_S)  # copied, or received and released
            tickets = [sender.send(stage.sample(request_id), LONG_S) for request_id in (1, 2)]
            _let_arrive(sender)
            me.publish(1 + sum(ticket.done() for ticket in tickets))
            me.reach(FAULT)
        return None
    with stage.receiver(me) as receiver:
        take(stage, receiver, 0)
        num_safe = me.receive()
        time.sleep(SHORT_S)  # until the receiver knows of the death
        num_taken = _take_until_lost(stage, receiver, 1)
        assert num_safe <= num_taken <= 3
        return error_of(lambda: receiver.receive(2 * SHORT_S), 2 * SHORT_S)


def _take_until_lost(stage: Stage, receiver: FeatureReceiver, num_taken: int) -> int:
    """Receive samples in order until PeerLost, from number ``num_taken`` on; return the total number."""
    while True:
        try:
            got = receiver.receive(2 * SHORT_S)
        except PeerLost:
            return num_taken
        stage.check(got, num_taken)
        receiver.release(got)
        num_taken += 1


def fault_in_receiver(me: Rank, stage: Stage) -> str | None:
    """Kill or stop the receiver while a sender waits; return the name of the error of ``send``."""
    if me.rank == 0:
        with stage.receiver(me, UNIT_BYTES):
            me.receive()
            time.sleep(0.2)
            me.reach(FAULT)
        return None
    sender = stage.sender(me)
    sender.send(stage.sample(0), LONG_S)
    me.publish("the window is full")
    name = error_of(lambda: sender.send(stage.sample(1), 2 * SHORT_S), 2 * SHORT_S)
    sender.close()
    return name


def fault_before_connect(me: Rank, stage: Stage) -> str | None:
    """Kill or stop the receiver before a sender connects; return the name of the error of ``connect``."""
    if me.rank == 0:
        with stage.receiver(me):
            me.reach(FAULT)
        return None
    address = me.receive()
    time.sleep(0.2)
    return error_of(lambda: stage.build().connect(address, SCHEMA, SHORT_S), SHORT_S)


def fault_in_one_of_two(me: Rank, stage: Stage) -> str | None:
    """Kill or stop one of two senders, and check that all samples of the other sender arrive."""
    if me.rank == 1:
        with stage.sender(me) as sender:
            ticket = sender.send(stage.sample(0), LONG_S)
            _let_arrive(sender)
            threading.Thread(target=sender.send, args=(stage.sample(1), LONG_S), daemon=True).start()
            time.sleep(0.2)
            me.publish(SAFE if ticket.done() else "the window is full, and one sample waits")
            me.receive()  # the other sender is connected
            me.reach(FAULT)
    elif me.rank == 2:
        with stage.sender(me) as sender:
            me.publish("connected")
            me.receive()
            sender.send(stage.sample(2), LONG_S)
            sender.send(stage.sample(3), LONG_S)
            sender.flush(LONG_S)
    else:
        return _outlive_a_sender(me, stage)
    return None


def _outlive_a_sender(me: Rank, stage: Stage) -> str:
    with stage.receiver(me, UNIT_BYTES) as receiver:
        expected = {"2", "3", "lost"} | ({"0"} if SAFE in (me.receive(), me.receive()) else set[str]())
        time.sleep(0.3)
        seen: list[int | str] = []
        while 3 not in seen:
            try:
                got = receiver.receive(LONG_S)
            except PeerLost:
                seen.append("lost")
                continue
            stage.check(got, got.request_id)
            seen.append(got.request_id)
            receiver.release(got)
    assert len(seen) == len(set(seen))
    assert expected <= set(map(str, seen)) <= expected | {"0"}
    return "others go on"


def close_sender(me: Rank, stage: Stage) -> None:
    """Close the sender, and check the samples and errors that the receiver gets (T7)."""
    if me.rank == 0:
        with stage.receiver(me) as receiver:
            assert {me.receive(), me.receive()} == {"closed", "connected"}
            take(stage, receiver, 0)
            expect_deadline(lambda: receiver.receive(SHORT_S), SHORT_S)
            me.publish("go on")
            take(stage, receiver, 1)
            with pytest.raises(PeerLost):
                receiver.receive(LONG_S)
            expect_deadline(lambda: receiver.receive(SHORT_S), SHORT_S)
            me.publish(receiver.address)
            take(stage, receiver, 2)
        return
    sender = stage.sender(me)
    if me.rank == 1:
        sender.send(stage.sample(0), LONG_S)
        sender.close()
        me.publish("closed")
        return
    me.publish("connected")
    assert [me.receive(), me.receive()] == ["closed", "go on"]
    sender.send(stage.sample(1), LONG_S)
    sender.close()
    with stage.sender(me) as another:
        another.send(stage.sample(2), LONG_S)
        another.flush(LONG_S)


def close_receiver(me: Rank, stage: Stage) -> None:
    """Close the receiver, and check that the sender's tickets end and its calls raise PeerLost (T7)."""
    if me.rank == 0:
        with stage.receiver(me, 2 * UNIT_BYTES) as receiver:
            receiver.receive(LONG_S)
            me.receive()
            time.sleep(0.2)
        return
    with stage.sender(me) as sender:
        tickets = [sender.send(stage.sample(request_id), LONG_S) for request_id in range(2)]
        me.publish("the window is full")
        for _ in range(2):
            with pytest.raises(PeerLost):
                sender.send(stage.sample(2), LONG_S)
        assert not wait(tickets, LONG_S).not_done
        assert {type(ticket.exception()) for ticket in tickets} <= {type(None), PeerLost}


def come_and_go(me: Rank, stage: Stage) -> None:
    """Open and close both sides twice, and check that the second time leaves no further resources (T9).

    Each rank counts its resources after both sides are closed.
    """
    counts: list[Resources] = []
    for _ in range(2):
        if me.rank == 0:
            with stage.receiver(me) as receiver:
                take(stage, receiver, 0)
                me.receive()
            receiver.close()
        else:
            sender = stage.sender(me)
            sender.send(stage.sample(0), LONG_S)
            sender.flush(LONG_S)
            sender.close()
            sender.close()
            me.publish("closed")
        _wait_for_other(me)
        counts.append(settled_resources())
        _wait_for_other(me)
    assert counts[1] == counts[0]


def _wait_for_other(me: Rank) -> None:
    """Wait until both ranks have called this, since ranks of one process count each other's resources."""
    me.publish("here")
    me.receive()
