"""SharedMemoryTransport's own parts: its first records, its arena, what it leaves on the host."""

import gc
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch

from spec_core.errors import DeadlineExceeded, PeerLost, ProtocolError, SchemaMismatch
from spec_core.records import FeatureSample
from spec_kit.streams.host_pool import HostPool
from spec_kit.streams.receiver import StreamReceiver
from spec_kit.streams.shared_memory import Arena
from spec_kit.streams.shared_memory_transport import SharedMemoryTransport
from spec_kit.streams.wire import MAX_PACKET_BYTES, VERSION, ConnectReply, Packet, PacketKind, SampleLayout
from spec_processes.sockets import local_socket
from spec_processes.sockets.framed_socket import FramedSocket

from .small_samples import LONG_S, SCHEMA, SHORT_S, WINDOW, connect, sample


def raw_connection(receiver) -> FramedSocket:
    name = receiver.address.split(":")[1]
    return FramedSocket(local_socket.connect(name, LONG_S), MAX_PACKET_BYTES)


def answer_of(connection: FramedSocket) -> tuple[bytes, list[int]]:
    """Return the receiver's next packet, or nothing if it has closed the connection."""
    descriptors: list[int] = []
    try:
        return connection.receive(time.monotonic() + LONG_S, descriptors), descriptors
    except ConnectionError:
        return b"", descriptors


def request(receiver, **changes: object) -> bytes:
    schema = {"layers": [2, 5], "hidden_size": 8, "dtype": "bfloat16"}
    fields = {"version": VERSION, "token": receiver.address.split(":")[2], "schema": schema, **changes}
    return json.dumps(fields).encode()


def check_works(receiver) -> None:
    with connect(receiver) as sender:
        sender.send(sample(), LONG_S).result()
        got = receiver.receive(LONG_S)
        assert torch.equal(got.hidden_TNH, sample().hidden_TNH)
        receiver.release(got)


FIRST_RECORDS = {
    "garbage": lambda receiver: b"GET / HTTP/1.1\r\n\r\n",
    "truncated": lambda receiver: request(receiver)[:-9],
    "wrong token": lambda receiver: request(receiver, token="0" * 32),
    "no token": lambda receiver: request(receiver, token=""),
    "surrogate": lambda receiver: request(receiver, token="\ud800"),
    "version": lambda receiver: request(receiver, version=VERSION - 1),
    "no schema": lambda receiver: request(receiver, schema=None),
    "bad layers": lambda receiver: request(
        receiver, schema={"layers": [1e999], "hidden_size": 1, "dtype": "x"}
    ),
    "deep": lambda receiver: b"[" * 4_000,
    "not an object": lambda receiver: b"[]",
    "a record": lambda receiver: Packet(PacketKind.REQUEST, 1, 1).encode(),
}


@pytest.mark.parametrize("name", FIRST_RECORDS)
def test_a_wrong_first_record_is_refused_and_the_receiver_goes_on(receiver, name):
    with closing(raw_connection(receiver)) as stranger:
        stranger.send(FIRST_RECORDS[name](receiver))
        answer, descriptors = answer_of(stranger)
        assert descriptors == []
        assert b"window_bytes" not in answer or json.loads(answer)["refusal"]
    check_works(receiver)


def test_a_stranger_is_never_reported_as_a_lost_sender(receiver):
    raw_connection(receiver).close()
    check_works(receiver)


def test_a_silent_stranger_does_not_keep_senders_out(receiver):
    with closing(raw_connection(receiver)):
        check_works(receiver)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (b"short", "no packet"),
        (Packet(PacketKind.REQUEST, 1, 1 << 40).encode(), "room"),
        (Packet(PacketKind.REQUEST, 1, -1).encode(), "room"),
        (Packet(PacketKind.READY, 9, 1).encode(), "not given"),
        (Packet(PacketKind.GRANT, 1, 0).encode(), "does not send GRANT"),
    ],
)
def test_a_sender_that_breaks_the_protocol_is_named_and_dropped(receiver, record, words):
    with closing(raw_connection(receiver)) as sender:
        sender.send(request(receiver))
        answer, descriptors = answer_of(sender)
        os.close(*descriptors)
        assert json.loads(answer)["window_bytes"] == WINDOW
        sender.send(record)
        with pytest.raises(ProtocolError, match=f"process {os.getpid()}.*{words}"):
            receiver.receive(LONG_S)
        assert answer_of(sender) == (b"", [])
    check_works(receiver)


class WatchedPool(HostPool):
    """Its sender is gone, or its device fails, while a sender is admitted; it notes what it is told."""

    def __init__(self) -> None:
        super().__init__(SampleLayout(SCHEMA), WINDOW)
        self.sender: FramedSocket | None = None
        self.disconnected = threading.Event()

    def admit(self, device_id, on_freed):
        sender, self.sender = self.sender, None
        if sender is None:
            return self
        sender.close()
        if device_id:
            raise RuntimeError("the device has failed")
        return self

    def disconnect(self, ended):
        self.disconnected.set()
        super().disconnect(ended)


@pytest.mark.parametrize("device_id", ["", "broken"])
def test_a_sender_that_cannot_be_admitted_keeps_nobody_out(device_id):
    pool = WatchedPool()
    with StreamReceiver(SCHEMA, WINDOW, [pool]) as receiver:
        pool.sender = raw_connection(receiver)
        pool.sender.send(request(receiver, device_id=device_id))
        if not device_id:
            assert pool.disconnected.wait(LONG_S)
        check_works(receiver)


class BrokenPool(HostPool):
    """No sample can be read until it is mended; it notes when a sender has ended."""

    def __init__(self) -> None:
        super().__init__(SampleLayout(SCHEMA), WINDOW)
        self.mended, self.ended = False, threading.Event()

    def disconnect(self, ended):
        super().disconnect(ended)
        self.ended.set()

    def read(self, block):
        if not self.mended:
            raise PeerLost("the link is broken")
        return super().read(block)


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_sender_whose_samples_cannot_be_read_is_lost_with_all_of_them(is_closed):
    """Whether it is there or has closed: it is reported once, and the room of its samples is free again."""
    pool = BrokenPool()
    with StreamReceiver(SCHEMA, WINDOW, [pool]) as receiver:
        with connect(receiver) as sender:
            for number in range(3):
                sender.send(sample(number), LONG_S)
            if is_closed:
                sender.close()
                assert pool.ended.wait(LONG_S)
            with pytest.raises(PeerLost, match="the link is broken"):
                receiver.receive(LONG_S)
            if not is_closed:
                with pytest.raises(PeerLost):
                    sender.send(sample(), LONG_S)
        with pytest.raises(PeerLost, match="every sender"):
            receiver.receive(LONG_S)
        pool.mended = True
        whole = sample(num_tokens=WINDOW // sample(num_tokens=1).num_bytes)
        with connect(receiver) as sender:
            sender.send(whole, LONG_S)
            assert torch.equal(receiver.receive(LONG_S).hidden_TNH, whole.hidden_TNH)


def test_a_sender_counts_as_soon_as_it_is_connected(receiver, monkeypatch):
    """Another one that leaves is not the last, however late the receiver's thread goes on after its reply."""
    first, go_on, send = connect(receiver), threading.Event(), FramedSocket.send

    def late(channel, *data, **fields):
        send(channel, *data, **fields)
        if threading.current_thread() is receiver._thread:
            go_on.wait(LONG_S)

    monkeypatch.setattr(FramedSocket, "send", late)
    with connect(receiver):
        first.close()
        with pytest.raises(DeadlineExceeded):
            receiver.receive(0.5)
        go_on.set()


def test_a_wrong_address_says_so_without_the_token(receiver):
    kind, name, token = receiver.address.split(":")
    with pytest.raises(ProtocolError, match="token") as error:
        SharedMemoryTransport().connect(f"{kind}:{name}:{'0' * 32}", SCHEMA, LONG_S)
    assert token not in str(error.value)
    with pytest.raises(ProtocolError, match="not the address"):
        SharedMemoryTransport().connect("tcp:somewhere", SCHEMA, LONG_S)
    with pytest.raises(PeerLost):
        SharedMemoryTransport().connect(f"shm:spec-nobody:{token}", SCHEMA, LONG_S)


def test_a_sample_that_is_not_what_was_agreed_is_refused_by_the_sender(receiver):
    with connect(receiver) as sender:
        wrong = FeatureSample(request_id=1, input_ids=torch.arange(3), hidden_TNH=torch.zeros(3, 2, 8))
        with pytest.raises(SchemaMismatch, match="float32"):
            sender.send(wrong, LONG_S)
    check_works(receiver)


def test_strided_tensors_travel_too(receiver):
    strided = sample(num_tokens=12).hidden_TNH[::3]
    with connect(receiver) as sender:
        sender.send(FeatureSample(request_id=1, input_ids=torch.arange(12)[::3], hidden_TNH=strided), LONG_S)
        got = receiver.receive(LONG_S)
        assert torch.equal(got.hidden_TNH, strided)
        assert got.input_ids.tolist() == [0, 3, 6, 9]
        receiver.release(got)


def test_what_is_held_outlives_the_receiver(receiver):
    with connect(receiver) as sender:
        sender.send(sample(), LONG_S)
        got = receiver.receive(LONG_S)
    receiver.close()
    gc.collect()
    assert torch.equal(got.hidden_TNH, sample().hidden_TNH)


def test_a_grant_that_came_too_late_is_not_used():
    """The grant of a withdrawn request is passed over: its room has been given to another sender since."""
    arena = Arena(WINDOW)
    name = f"spec-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind(f"\0{name}")
        listener.listen()
        connecting = pool.submit(SharedMemoryTransport().connect, f"shm:{name}:token", SCHEMA, LONG_S)
        with closing(FramedSocket(listener.accept()[0], MAX_PACKET_BYTES)) as connection:
            connection.receive()
            connection.send(ConnectReply(WINDOW, arena.size).encode(), descriptor=arena.descriptor)
            with connecting.result(LONG_S) as sender:
                with pytest.raises(DeadlineExceeded):
                    sender.send(sample(1), SHORT_S)
                connection.send(Packet(PacketKind.GRANT, 1, 0).encode())
                connection.send(Packet(PacketKind.GRANT, 2, 4096).encode())
                sender.send(sample(2), LONG_S)
                packets = [Packet.decode(connection.receive()) for _ in range(4)]
    assert [(packet.kind, packet.number) for packet in packets] == [
        (PacketKind.REQUEST, 1),
        (PacketKind.WITHDRAW, 1),
        (PacketKind.REQUEST, 2),
        (PacketKind.READY, 2),
    ]
    assert not arena.bytes[:4096].any()
    assert torch.equal(SampleLayout(SCHEMA).view(arena.bytes, 4096, 5)[1], sample(2).hidden_TNH)
    arena.close()
