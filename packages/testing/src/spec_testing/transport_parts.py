"""This module has the test functions of TransportSuite in which no process fails (T1-T6, T8).

Rank 0 receives, and the other ranks send. If the transport works in one process, ranks are threads.
"""

from __future__ import annotations

import contextlib
import time

import pytest

from spec_core.errors import ConfigError, DeadlineExceeded, PeerLost, ProtocolError, SchemaMismatch
from spec_core.records import FeatureSchema
from spec_testing.processes import Rank
from spec_testing.transport_stage import (
    GRACE_S,
    LONG_S,
    SCHEMA,
    SHORT_S,
    UNIT,
    UNIT_BYTES,
    Stage,
    expect_deadline,
    same,
    take,
)


def connect_and_part(me: Rank, stage: Stage) -> str | None:
    """Connect a sender to the receiver's address, and close the sender; rank 0 returns the address (T1)."""
    if me.rank == 0:
        with stage.receiver(me) as receiver:
            me.receive()
            return receiver.address
    with stage.sender(me):
        me.publish("connected")
    return None


def connect_with_other_schema(me: Rank, stage: Stage, other: FeatureSchema) -> None:
    """Connect with another schema and expect SchemaMismatch (T1)."""
    if me.rank == 0:
        with stage.receiver(me) as receiver:
            take(stage, receiver, 5)
        return
    address = me.receive()
    with pytest.raises(SchemaMismatch) as mismatch:
        stage.build().connect(address, other, LONG_S)
    assert str(SCHEMA) in str(mismatch.value)
    assert str(other) in str(mismatch.value)
    with stage.build().connect(address, SCHEMA, LONG_S) as sender:
        sender.send(stage.sample(5), LONG_S)
        sender.flush(LONG_S)


def connect_too_late(me: Rank, stage: Stage) -> None:
    """Connect to a receiver that was closed and expect PeerLost (T1)."""
    if me.rank == 0:
        with stage.receiver(me):
            pass
        me.publish("closed")
        return
    address = me.receive()
    me.receive()
    with pytest.raises(PeerLost):
        stage.build().connect(address, SCHEMA, LONG_S)


def overwrite_after_ticket(me: Rank, stage: Stage) -> None:
    """Overwrite a sample's memory after its ticket is done, and check that the original bytes arrive (T2)."""
    if me.rank == 0:
        with stage.receiver(me) as receiver:
            for request_id in range(3):
                got = receiver.receive(LONG_S)
                time.sleep(0.2)
                stage.check(got, request_id)
                receiver.release(got)
        return
    with stage.sender(me) as sender:
        for request_id in range(3):
            sample = stage.sample(request_id)
            sender.send(sample, LONG_S).result(LONG_S)
            sample.input_ids.zero_()
            sample.hidden_TNH.zero_()


def stream(me: Rank, stage: Stage, dtype: str) -> None:
    """Send samples from two senders and check that all arrive in each sender's order (T3)."""
    schema = FeatureSchema(layers=(1, 3, 8), hidden_size=16, dtype=dtype)
    samples = 40
    lengths = [1, 7, UNIT, 3 * UNIT, 0, 64]
    if me.rank > 0:
        with stage.sender(me, schema) as sender:
            me.publish("connected")
            me.receive()  # the other sender is connected, too
            for number in range(samples):
                request_id = me.rank * samples + number
                sample = stage.sample(request_id, lengths[request_id % len(lengths)], schema)
                sender.send(sample, LONG_S)
            sender.flush(LONG_S)
        return
    arrived: dict[int, list[int]] = {1: [], 2: []}
    with stage.receiver(me, schema=schema) as receiver:
        for _ in range(2 * samples):
            got = receiver.receive(LONG_S)
            assert same(got, stage.sample(got.request_id, lengths[got.request_id % len(lengths)], schema))
            arrived[got.request_id // samples].append(got.request_id % samples)
            receiver.release(got)
    assert arrived == {1: list(range(samples)), 2: list(range(samples))}


def hold_one(me: Rank, stage: Stage) -> None:
    """Check that a received sample stays unchanged while others are received and released (T4).

    Releasing it twice must raise ProtocolError.
    """
    if me.rank > 0:
        with stage.sender(me) as sender:
            for request_id in range(20):
                sender.send(stage.sample(request_id), LONG_S)
            sender.flush(LONG_S)
        return
    with stage.receiver(me, 3 * UNIT_BYTES) as receiver:
        held = receiver.receive(LONG_S)
        for request_id in range(1, 20):
            take(stage, receiver, request_id)
            stage.check(held, 0)
        receiver.release(held)
        with pytest.raises(ProtocolError):
            receiver.release(held)


def fill_window(me: Rank, stage: Stage) -> None:
    """Check that ``send`` to a full window raises DeadlineExceeded, and that no sample arrives twice (T5)."""
    if me.rank > 0:
        with stage.sender(me) as sender:
            sender.send(stage.sample(0), LONG_S)
            sender.send(stage.sample(1), LONG_S)
            for _ in range(2):
                expect_deadline(lambda: sender.send(stage.sample(2), SHORT_S), SHORT_S)
            me.publish("full")
            sender.send(stage.sample(2), LONG_S)
            sender.send(stage.sample(3), LONG_S)
            sender.flush(LONG_S)
        return
    with stage.receiver(me, 2 * UNIT_BYTES + UNIT_BYTES // 2) as receiver:
        me.receive()
        for request_id in range(4):
            take(stage, receiver, request_id)
        # No sample arrives twice: the next event is the end of the sender.
        with pytest.raises(PeerLost):
            receiver.receive(LONG_S)


def share_window(me: Rank, stage: Stage) -> None:
    """Check that a sender must wait while the samples of another sender fill the window (T5)."""
    if me.rank == 0:
        with stage.receiver(me, 2 * UNIT_BYTES) as receiver:
            assert [me.receive(), me.receive()] == ["full", "waited"]
            for request_id in range(3):
                take(stage, receiver, request_id)
        return
    with stage.sender(me) as sender:
        if me.rank == 1:
            sender.send(stage.sample(0), LONG_S)
            sender.send(stage.sample(1), LONG_S)
            me.publish("full")
            sender.flush(LONG_S)
        else:
            me.receive()
            expect_deadline(lambda: sender.send(stage.sample(2), SHORT_S), SHORT_S)
            me.publish("waited")
            sender.send(stage.sample(2), LONG_S)
            sender.flush(LONG_S)


def fragment_window(me: Rank, stage: Stage) -> None:
    """Check that a sample can be sent if it fits only into two separate free areas of the window (T5)."""
    if me.rank > 0:
        with stage.sender(me) as sender:
            for request_id in range(4):
                sender.send(stage.sample(request_id), LONG_S)
            me.receive()
            sender.send(stage.sample(4, 2 * UNIT), SHORT_S)
            sender.flush(LONG_S)
        return
    with stage.receiver(me, 4 * UNIT_BYTES) as receiver:
        held = [receiver.receive(LONG_S) for _ in range(4)]
        receiver.release(held[0])
        receiver.release(held[2])
        me.publish("two units are free, apart")
        take(stage, receiver, 4, 2 * UNIT)
        for request_id in (1, 3):
            stage.check(held[request_id], request_id)
            receiver.release(held[request_id])


def send_oversized(me: Rank, stage: Stage) -> None:
    """Send a sample larger than the window and expect ConfigError (T5)."""
    if me.rank > 0:
        with stage.sender(me) as sender:
            started = time.monotonic()
            with pytest.raises(ConfigError, match="window_bytes"):
                sender.send(stage.sample(0, 2 * UNIT), LONG_S)
            assert time.monotonic() - started < GRACE_S
            sender.send(stage.sample(1), LONG_S)
            sender.flush(LONG_S)
        return
    with stage.receiver(me, 2 * UNIT_BYTES - 1) as receiver:
        take(stage, receiver, 1)


def receive_early(me: Rank, stage: Stage) -> None:
    """Receive before a sample was sent and expect DeadlineExceeded (T6)."""
    if me.rank > 0:
        with stage.sender(me) as sender:
            me.receive()
            sender.send(stage.sample(0), LONG_S)
            sender.flush(LONG_S)
        return
    with stage.receiver(me) as receiver:
        expect_deadline(lambda: receiver.receive(SHORT_S), SHORT_S)
        me.publish("waited")
        take(stage, receiver, 0)


def flush(me: Rank, stage: Stage) -> None:
    """Check that ``flush`` returns only after every sent sample's ticket (a future) is done (T8)."""
    if me.rank == 0:
        with stage.receiver(me) as receiver:
            me.receive()
            for request_id in range(3):
                take(stage, receiver, request_id)
        return
    with stage.sender(me) as sender:
        tickets = [sender.send(stage.sample(request_id), LONG_S) for request_id in range(3)]
        with contextlib.suppress(DeadlineExceeded):
            sender.flush(SHORT_S)
            assert all(ticket.done() for ticket in tickets)
        me.publish("flushed, or waited in vain")
        sender.flush(LONG_S)
        assert all(ticket.done() for ticket in tickets)
