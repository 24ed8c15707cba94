"""Feature streams over TCP. (``TransportSuite`` over it: ``tests/unit/backend_cuda/test_push_pool.py``.)"""

from __future__ import annotations

import contextlib
import socket
import struct

import pytest

from spec_core.errors import ConfigError, DeadlineExceeded, PeerLost, ProtocolError, SchemaMismatch
from spec_core.records import FeatureSchema
from spec_core.rendezvous import parse_address
from spec_core.streams.host_pool import HostPool
from spec_core.streams.receiver import StreamReceiver, open_port
from spec_core.streams.shared_memory_transport import SharedMemoryTransport
from spec_core.streams.wire import SampleLayout
from spec_core.testing.resources import settled_resources
from spec_core.testing.transport_stage import LONG_S, SCHEMA, SHORT_S, UNIT_BYTES, Stage, take

STAGE = Stage(SharedMemoryTransport, "cpu")


def listen(where: str) -> StreamReceiver:
    port = open_port(where)
    return StreamReceiver(SCHEMA, 4 * UNIT_BYTES, [HostPool(SampleLayout(SCHEMA), 4 * UNIT_BYTES)], port)


@pytest.fixture(params=["127.0.0.1:0", "[::1]:0"])
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


def test_host_memory_is_not_for_a_sender_of_another_host(receiver):
    with pytest.raises(ProtocolError, match="memory of kind 'host'"):  # there is no descriptor for it
        SharedMemoryTransport().connect(far(receiver.address), SCHEMA, LONG_S)


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
        open_port("192.0.2.1:0")


def test_nothing_is_left_of_a_receiver_with_a_port():
    counts = []
    for _ in range(3):
        with listen("127.0.0.1:0") as receiver, pytest.raises(ProtocolError):
            SharedMemoryTransport().connect(far(receiver.address), SCHEMA, LONG_S)
        counts.append(settled_resources())
    assert counts[2] == counts[1]
