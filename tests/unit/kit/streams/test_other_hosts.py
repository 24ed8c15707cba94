"""Feature streams over TCP. (``TransportSuite`` over it: ``tests/contract/test_cpu_transports.py``.)"""

import contextlib
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest

from spec_core.errors import ConfigError, DeadlineExceeded, PeerLost, ProtocolError, SchemaMismatch
from spec_core.records import FeatureSchema
from spec_kit.streams.connection import open_port
from spec_kit.streams.shared_memory_transport import SharedMemoryTransport
from spec_kit.streams.wire import MAX_DATA_BYTES, MAX_PACKET_BYTES, ConnectReply, Packet, PacketKind
from spec_processes.sockets.addresses import parse_address
from spec_processes.sockets.framed_socket import FramedSocket
from spec_testing.resources import check_released, settled_resources
from spec_testing.transport_stage import LONG_S, SCHEMA, SHORT_S, UNIT, UNIT_BYTES, Stage, take

STAGE = Stage(SharedMemoryTransport, "cpu")


def listen(where):
    return SharedMemoryTransport().listen(SCHEMA, 4 * UNIT_BYTES, where)


@pytest.fixture(params=["127.0.0.1", "::1"])
def receiver(request):
    with listen(request.param) as receiver:
        yield receiver


def far(address: str) -> str:
    """Return the address as a sender of another host sees it: no socket of that name is there."""
    kind, name, rest = address.split(":", 2)
    return f"{kind}:not-{name}:{rest}"


def test_a_sender_of_the_receivers_host_takes_its_unix_socket(receiver):
    with SharedMemoryTransport().connect(receiver.address, SCHEMA, LONG_S) as sender:
        sender.send(STAGE.sample(3), LONG_S)
        take(STAGE, receiver, 3)


def test_a_sample_of_another_host_comes_in_pieces_of_bounded_size():
    num_tokens = 3 * MAX_DATA_BYTES // 8
    window = 2 * num_tokens * (8 + SCHEMA.bytes_per_token())
    with (
        SharedMemoryTransport().listen(SCHEMA, window, "127.0.0.1") as receiver,
        SharedMemoryTransport().connect(far(receiver.address), SCHEMA, LONG_S) as sender,
    ):
        sender.send(STAGE.sample(3, num_tokens), LONG_S)
        take(STAGE, receiver, 3, num_tokens)


@pytest.mark.parametrize(
    ("packet", "words"),
    [
        (Packet(PacketKind.DATA, 1, 2 * UNIT_BYTES, b"outside"), "outside of its room"),
        (Packet(PacketKind.DATA, 1, -1, b"outside"), "outside of its room"),
        (Packet(PacketKind.DATA, 2, 0, b"no room"), "not given"),
    ],
)
def test_a_sender_of_another_host_writes_to_its_room_only(receiver, packet, words):
    with SharedMemoryTransport().connect(far(receiver.address), SCHEMA, LONG_S) as sender:
        channel = sender._channel
        channel.send(Packet(PacketKind.REQUEST, 1, UNIT).encode())
        channel.receive()
        channel.send(packet.encode())
        with pytest.raises(ProtocolError, match=words):
            receiver.receive(LONG_S)


def test_a_sender_whose_receiver_takes_in_nothing_ends_at_its_deadline():
    """Its room would never come back: the connection ends, and with it the room."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        address = f"shm:spec-nobody:token@127.0.0.1:{listener.getsockname()[1]}"
        connecting = pool.submit(SharedMemoryTransport().connect, address, SCHEMA, LONG_S)
        with contextlib.closing(FramedSocket(listener.accept()[0], MAX_PACKET_BYTES)) as receiver:
            receiver.receive()
            receiver.send(ConnectReply(1 << 30, 1 << 30).encode())
            with connecting.result(LONG_S) as sender:
                receiver.send(Packet(PacketKind.GRANT, 1, 0).encode())
                with pytest.raises(DeadlineExceeded):
                    sender.send(STAGE.sample(1, 200_000), SHORT_S)
                with pytest.raises(PeerLost):
                    sender.send(STAGE.sample(2), LONG_S)


def test_what_the_receiver_refuses_is_told_at_the_other_host(receiver):
    other = FeatureSchema(layers=(1,), hidden_size=8, dtype="float32")
    with pytest.raises(SchemaMismatch):
        SharedMemoryTransport().connect(far(receiver.address), other, LONG_S)
    with pytest.raises(ProtocolError, match="token"):
        SharedMemoryTransport().connect(far(receiver.address).replace("@", "x@"), SCHEMA, LONG_S)


def test_a_port_where_nobody_listens_is_a_lost_peer(receiver):
    receiver.close()
    with pytest.raises(PeerLost):
        SharedMemoryTransport().connect(far(receiver.address), SCHEMA, LONG_S)


@pytest.mark.parametrize(
    "bytes_sent",
    [b"", b"GET / HTTP/1.1\r\n\r\n", struct.pack("!I", 0), struct.pack("!I", 1 << 31), struct.pack("!I", 9)],
)
def test_a_stranger_at_the_port_disturbs_nobody(receiver, bytes_sent):
    with socket.create_connection(parse_address(receiver.address.partition("@")[2])) as stranger:
        stranger.sendall(bytes_sent)
        stranger.settimeout(LONG_S)
        with contextlib.suppress(OSError):  # it may have been refused already
            stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            assert stranger.recv(1) == b""
    with SharedMemoryTransport().connect(receiver.address, SCHEMA, LONG_S) as sender:
        sender.send(STAGE.sample(3), LONG_S)
        take(STAGE, receiver, 3)
        with pytest.raises(DeadlineExceeded):
            receiver.receive(SHORT_S)


def test_an_address_that_is_none_of_this_host_is_refused():
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0: .*name an address of this host"):
        open_port("192.0.2.1")


def test_nothing_is_left_of_a_receiver_with_a_port():
    def come_and_go():
        with (
            listen("127.0.0.1") as receiver,
            SharedMemoryTransport().connect(far(receiver.address), SCHEMA, LONG_S) as sender,
        ):
            sender.send(STAGE.sample(3), LONG_S)

    come_and_go()
    before = settled_resources()
    come_and_go()
    check_released(before)
