"""PushPool without a GPU: the transport's contract and faults, with links that are sockets between processes."""

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from spec_backend_cuda.p2p_link import P2PLink
from spec_backend_cuda.push_buffer import PushBuffer
from spec_backend_cuda.push_pool import PushPool
from spec_core import Transport
from spec_core.errors import DeadlineExceeded, PeerLost, RunError
from spec_kit.streams.async_sender import AsyncSender
from spec_kit.streams.buffer_pool import SenderConnector
from spec_kit.streams.connection import open_port
from spec_kit.streams.device_arena import DeviceArena, arena_bytes
from spec_kit.streams.receiver import StreamReceiver
from spec_kit.streams.wire import SampleLayout
from spec_testing import TransportSuite
from spec_testing.processes import Fault, run_ranks, watch_ranks
from spec_testing.transport_stage import LONG_S, SCHEMA, SHORT_S, UNIT_BYTES, Stage, take

CPU = torch.device("cpu")
SLOW_S = 2.0


class SocketLink(P2PLink):
    """Like NCCL it does not notice that the other end is gone: it waits, until it is aborted."""

    def __init__(self, name: str, *, receives: bool) -> None:
        self._name, self._receives = name, receives
        self._aborted = threading.Event()
        self._parts: Sequence[Tensor] = ()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._end: socket.socket | None = None
        if receives:
            self._socket.bind(f"\0{name}")
            self._socket.listen()

    def open(self) -> None:
        self._attempt(self._open)

    def start(self, parts: Sequence[Tensor]) -> None:
        self._parts = parts

    def finish(self) -> None:
        self._attempt(self._transfer)
        if self._aborted.is_set():  # as with NCCL, nobody knows then what has been transferred
            raise PeerLost("the link was aborted")

    def abort(self) -> None:
        self._aborted.set()
        for end in (self._socket, self._end):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.abort()
        for end in (self._socket, self._end):
            if end is not None:
                end.close()

    def new_event(self) -> torch.cpu.Event:
        return torch.cpu.Event()

    def _open(self) -> None:
        if self._receives:
            self._end, _ = self._socket.accept()
        else:
            self._socket.connect(f"\0{self._name}")
            self._end = self._socket

    def _transfer(self) -> None:
        assert self._end is not None
        for part in self._parts:
            raw = memoryview(part.numpy())
            if not self._receives:
                self._end.sendall(raw)
            while self._receives and raw:
                count = self._end.recv_into(raw)
                if not count:
                    raise ConnectionResetError
                raw = raw[count:]

    def _attempt(self, step) -> None:
        try:
            step()
        except OSError as error:
            assert self._aborted.wait(LONG_S)
            raise PeerLost("the link was aborted") from error


class SlowLink(SocketLink):
    """Its transfers take their time."""

    def finish(self) -> None:
        time.sleep(SLOW_S)
        super().finish()


class SocketConnector(SenderConnector):
    def __init__(self, link: type[SocketLink]) -> None:
        self._link = link

    def attach(self, reply, descriptor, layout):
        assert descriptor is None
        return PushBuffer(layout, self._link(reply.offer, receives=False), CPU)


class PushTransport(Transport):
    def __init__(self, link: type[SocketLink] = SocketLink) -> None:
        self._link = link

    def listen(self, schema, window_bytes, host=""):
        layout = SampleLayout(schema)
        memory = torch.empty(arena_bytes(layout, window_bytes), dtype=torch.uint8)
        pool = PushPool(DeviceArena(memory, layout), CPU, self._new_link)
        return StreamReceiver(schema, window_bytes, [pool], open_port(host))

    def connect(self, address, schema, timeout_s):
        return AsyncSender(address, schema, timeout_s, SocketConnector(self._link))

    def _new_link(self):
        name = secrets.token_hex(8)
        return name, self._link(name, receives=True)


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


class SlowFirstLink(SocketLink):
    """The first receiving end takes its time."""

    num_receiving = 0

    def __init__(self, name: str, *, receives: bool) -> None:
        super().__init__(name, receives=receives)
        SlowFirstLink.num_receiving += receives
        self._slow = receives and SlowFirstLink.num_receiving == 1

    def finish(self) -> None:
        if self._slow:
            time.sleep(SLOW_S)
        super().finish()


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


class BrokenLink(SocketLink):
    """Its receiving end fails at the second sample."""

    num_finished = 0

    def finish(self) -> None:
        super().finish()
        self.num_finished += 1
        if self._receives and self.num_finished == 2:
            raise RunError("the device has failed")


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


class LateLink(SocketLink):
    """Its receiving end does not come."""

    def open(self) -> None:
        if self._receives:
            assert self._aborted.wait(LONG_S)
            raise PeerLost("the link was aborted")
        super().open()
        super().start([torch.empty(1, dtype=torch.uint8)])
        assert self._aborted.wait(LONG_S)
        raise PeerLost("the link was aborted")


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


class ImpatientLink(LateLink):
    """Its sending end gives up by itself."""

    def open(self) -> None:
        if not self._receives:
            raise DeadlineExceeded("the other end did not come")
        super().open()


def test_a_link_that_gives_up_is_no_lost_peer():
    transport = PushTransport(ImpatientLink)
    with (
        transport.listen(SCHEMA, UNIT_BYTES) as receiver,
        pytest.raises(DeadlineExceeded, match="did not come"),
    ):
        transport.connect(receiver.address, SCHEMA, LONG_S)
