"""What the ranks of TransportSuite do. Rank 0 receives, the others send; in one process they are threads."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pytest
import torch

from spec_core.errors import ConfigError, DeadlineExceeded, PeerLost, ProtocolError, RunError, SchemaMismatch
from spec_core.records import FeatureSample, FeatureSchema
from spec_core.testing.resources import Resources, settled_resources

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from spec_core.testing.processes import Fault, Rank
    from spec_core.transport import FeatureReceiver, FeatureSender, Transport

SCHEMA = FeatureSchema(layers=(1, 3, 8), hidden_size=16, dtype="float32")
UNIT = 10
"""Tokens of an ordinary sample."""
UNIT_BYTES = UNIT * (8 + 3 * 16 * 4)
LONG_S, SHORT_S, GRACE_S = 15.0, 0.4, 3.0
"""A timeout that nothing should reach, one that is waited for, and what a busy machine may add to it."""
FAULT = "the fault"


class Play(Protocol):
    def __call__(self, part: Callable[..., Any], world_size: int, /, *args: Any) -> list[Any]: ...


class Fail(Protocol):
    def __call__(
        self, part: Callable[..., Any], fault: Fault, victim: int, world_size: int = 2, /
    ) -> Any: ...


@dataclass(frozen=True)
class Stage:
    """What every part is given."""

    build: Callable[[], Transport]
    device: str

    @contextlib.contextmanager
    def receiver(
        self, me: Rank, window_bytes: int = 8 * UNIT_BYTES, schema: FeatureSchema = SCHEMA
    ) -> Generator[FeatureReceiver]:
        with self.build().listen(schema, window_bytes) as receiver:
            me.publish(receiver.address)
            yield receiver

    def sender(self, me: Rank, schema: FeatureSchema = SCHEMA) -> FeatureSender:
        return self.build().connect(me.receive(), schema, LONG_S)

    def sample(self, sample_id: int, num_tokens: int = UNIT, schema: FeatureSchema = SCHEMA) -> FeatureSample:
        """The same bits for the same arguments in every process; NaNs among them."""
        generator = torch.Generator().manual_seed(sample_id)
        ids = torch.randint(0, 1 << 40, (num_tokens,), generator=generator)
        size = num_tokens * schema.bytes_per_token()
        raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        hidden = raw.view(schema.torch_dtype()).view(schema.shape(num_tokens))
        return FeatureSample(
            sample_id=sample_id, input_ids=ids.to(self.device), hidden_TNH=hidden.to(self.device)
        )

    def check(self, got: FeatureSample, sample_id: int, num_tokens: int = UNIT) -> None:
        """``got`` is that sample of the default schema, bit for bit."""
        assert got.sample_id == sample_id
        assert same(got, self.sample(sample_id, num_tokens))


def same(left: FeatureSample, right: FeatureSample) -> bool:
    return (
        left.input_ids.dtype == right.input_ids.dtype
        and left.hidden_TNH.dtype == right.hidden_TNH.dtype
        and left.hidden_TNH.shape == right.hidden_TNH.shape
        and left.hidden_TNH.device.type == right.hidden_TNH.device.type
        and torch.equal(left.input_ids, right.input_ids)
        and torch.equal(
            left.hidden_TNH.reshape(-1).view(torch.uint8), right.hidden_TNH.reshape(-1).view(torch.uint8)
        )
    )


def take(stage: Stage, receiver: FeatureReceiver, sample_id: int, num_tokens: int = UNIT) -> None:
    """Receives one sample, checks it, releases it."""
    got = receiver.receive(LONG_S)
    stage.check(got, sample_id, num_tokens)
    receiver.release(got)


def connect_and_part(me: Rank, stage: Stage) -> str | None:
    if me.rank == 0:
        with stage.receiver(me) as receiver:
            me.receive()
            return receiver.address
    with stage.sender(me):
        me.publish("connected")
    return None


def connect_with_other_schema(me: Rank, stage: Stage, other: FeatureSchema) -> None:
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
    if me.rank == 0:
        with stage.receiver(me) as receiver:
            for sample_id in range(3):
                got = receiver.receive(LONG_S)
                time.sleep(0.2)
                stage.check(got, sample_id)
                receiver.release(got)
        return
    with stage.sender(me) as sender:
        for sample_id in range(3):
            sample = stage.sample(sample_id)
            sender.send(sample, LONG_S).result(LONG_S)
            sample.input_ids.zero_()
            sample.hidden_TNH.zero_()


def stream(me: Rank, stage: Stage, dtype: str) -> None:
    schema = FeatureSchema(layers=(1, 3, 8), hidden_size=16, dtype=dtype)
    samples = 40
    lengths = [1, 7, UNIT, 3 * UNIT, 0, 64]
    if me.rank > 0:
        with stage.sender(me, schema) as sender:
            me.publish("connected")
            me.receive()  # the other sender is, too
            for number in range(samples):
                sample_id = me.rank * samples + number
                sample = stage.sample(sample_id, lengths[sample_id % len(lengths)], schema)
                sender.send(sample, LONG_S)
            sender.flush(LONG_S)
        return
    arrived: dict[int, list[int]] = {1: [], 2: []}
    with stage.receiver(me, schema=schema) as receiver:
        for _ in range(2 * samples):
            got = receiver.receive(LONG_S)
            assert same(got, stage.sample(got.sample_id, lengths[got.sample_id % len(lengths)], schema))
            arrived[got.sample_id // samples].append(got.sample_id % samples)
            receiver.release(got)
    assert arrived == {1: list(range(samples)), 2: list(range(samples))}


def hold_one(me: Rank, stage: Stage) -> None:
    if me.rank > 0:
        with stage.sender(me) as sender:
            for sample_id in range(20):
                sender.send(stage.sample(sample_id), LONG_S)
            sender.flush(LONG_S)
        return
    with stage.receiver(me, 3 * UNIT_BYTES) as receiver:
        held = receiver.receive(LONG_S)
        for sample_id in range(1, 20):
            take(stage, receiver, sample_id)
            stage.check(held, 0)
        receiver.release(held)
        with pytest.raises(ProtocolError):
            receiver.release(held)


def fill_window(me: Rank, stage: Stage) -> None:
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
        for sample_id in range(4):
            take(stage, receiver, sample_id)
        # Nothing came twice: the sender closes, and that is all there is to report.
        with pytest.raises(PeerLost):
            receiver.receive(LONG_S)


def expect_deadline(call: Callable[[], object], timeout_s: float) -> None:
    """T6: ``call`` raises DeadlineExceeded, neither early nor late."""
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        call()
    assert timeout_s * 0.9 <= time.monotonic() - started < timeout_s + GRACE_S


def share_window(me: Rank, stage: Stage) -> None:
    if me.rank == 0:
        with stage.receiver(me, 2 * UNIT_BYTES) as receiver:
            assert [me.receive(), me.receive()] == ["full", "waited"]
            for sample_id in range(3):
                take(stage, receiver, sample_id)
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
    if me.rank > 0:
        with stage.sender(me) as sender:
            for sample_id in range(4):
                sender.send(stage.sample(sample_id), LONG_S)
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
        for sample_id in (1, 3):
            stage.check(held[sample_id], sample_id)
            receiver.release(held[sample_id])


def send_oversized(me: Rank, stage: Stage) -> None:
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


def fault_in_sender(me: Rank, stage: Stage) -> str | None:
    if me.rank > 0:
        with stage.sender(me) as sender:
            sender.send(stage.sample(0), LONG_S)
            sender.send(stage.sample(1), LONG_S)
            me.publish("sent")
            me.reach(FAULT)
        return None
    with stage.receiver(me) as receiver:
        me.receive()
        take(stage, receiver, 0)
        take(stage, receiver, 1)
        return error_of(lambda: receiver.receive(2 * SHORT_S), 2 * SHORT_S)


def error_of(call: Callable[[], object], timeout_s: float) -> str:
    """Name of the error that ``call`` raises within its timeout."""
    started = time.monotonic()
    with pytest.raises(RunError) as error:
        call()
    assert time.monotonic() - started < timeout_s + GRACE_S
    return error.type.__name__


def fault_in_receiver(me: Rank, stage: Stage) -> str | None:
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
    if me.rank == 0:
        with stage.receiver(me):
            me.reach(FAULT)
        return None
    address = me.receive()
    time.sleep(0.2)
    return error_of(lambda: stage.build().connect(address, SCHEMA, SHORT_S), SHORT_S)


def fault_in_one_of_two(me: Rank, stage: Stage) -> str | None:
    if me.rank == 1:
        with stage.sender(me) as sender:
            sender.send(stage.sample(0), LONG_S)
            threading.Thread(target=sender.send, args=(stage.sample(1), LONG_S), daemon=True).start()
            time.sleep(0.2)
            me.publish("the window is full, and one sample waits")
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
        me.receive()
        me.receive()
        time.sleep(0.3)
        seen: list[int | str] = []
        while 3 not in seen:
            try:
                got = receiver.receive(LONG_S)
            except PeerLost:
                seen.append("lost")
                continue
            stage.check(got, got.sample_id)
            seen.append(got.sample_id)
            receiver.release(got)
    assert sorted(map(str, seen)) == ["0", "2", "3", "lost"]
    return "others go on"


def close_sender(me: Rank, stage: Stage) -> None:
    if me.rank == 0:
        with stage.receiver(me) as receiver:
            assert {me.receive(), me.receive()} == {"closed", "connected"}
            take(stage, receiver, 0)
            expect_deadline(lambda: receiver.receive(SHORT_S), SHORT_S)
            me.publish("go on")
            take(stage, receiver, 1)
            with pytest.raises(PeerLost):
                receiver.receive(LONG_S)
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


def close_receiver(me: Rank, stage: Stage) -> None:
    if me.rank == 0:
        with stage.receiver(me, 2 * UNIT_BYTES) as receiver:
            receiver.receive(LONG_S)
            me.receive()
            time.sleep(0.2)
        return
    with stage.sender(me) as sender:
        tickets = [sender.send(stage.sample(sample_id), LONG_S) for sample_id in range(2)]
        me.publish("the window is full")
        for _ in range(2):
            with pytest.raises(PeerLost):
                sender.send(stage.sample(2), LONG_S)
        assert not wait(tickets, LONG_S).not_done
        assert {type(ticket.exception()) for ticket in tickets} <= {type(None), PeerLost}


def flush(me: Rank, stage: Stage) -> None:
    if me.rank == 0:
        with stage.receiver(me) as receiver:
            me.receive()
            for sample_id in range(3):
                take(stage, receiver, sample_id)
        return
    with stage.sender(me) as sender:
        tickets = [sender.send(stage.sample(sample_id), LONG_S) for sample_id in range(3)]
        with contextlib.suppress(DeadlineExceeded):
            sender.flush(SHORT_S)
            assert all(ticket.done() for ticket in tickets)
        me.publish("flushed, or waited in vain")
        sender.flush(LONG_S)
        assert all(ticket.done() for ticket in tickets)


def come_and_go(me: Rank, stage: Stage) -> None:
    """Two lives; both ranks count between them and after the second, when the other end is closed, too."""
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
        _meet(me)
        counts.append(settled_resources())
        _meet(me)
    assert counts[1] == counts[0]


def _meet(me: Rank) -> None:
    """Both ranks, because in one process each also counts what the other has."""
    me.publish("here")
    me.receive()
