"""The conversation over TCP. (``TransportSuite`` over it: ``tests/unit/backend_cuda/test_pushed_memory.py``.)"""

from __future__ import annotations

import contextlib
import socket
import struct

import pytest

from spec_core.errors import ConfigError, DeadlineExceeded, PeerLost, ProtocolError, SchemaMismatch
from spec_core.records import FeatureSchema
from spec_core.rendezvous import parse_address
from spec_core.streams.packet_relay import ReachableReceiver, address_from_here, relayed
from spec_core.streams.shared_memory_transport import SharedMemoryTransport
from spec_core.testing.resources import settled_resources
from spec_core.testing.transport_stage import LONG_S, SCHEMA, SHORT_S, UNIT_BYTES, Stage, take

STAGE = Stage(SharedMemoryTransport, "cpu")


@pytest.fixture(params=["127.0.0.1:0", "[::1]:0"])
def receiver(request):
    with ReachableReceiver(SharedMemoryTransport().listen(SCHEMA, 4 * UNIT_BYTES), request.param) as receiver:
        yield receiver


def parts_of(address: str) -> tuple[str, str]:
    own, _, remote = address.partition("@")
    return own, remote


def test_a_sender_of_the_receivers_host_takes_its_own_address(receiver):
    assert address_from_here(receiver.address, LONG_S) == parts_of(receiver.address)[0]
    with SharedMemoryTransport().connect(
        address_from_here(receiver.address, LONG_S), SCHEMA, LONG_S
    ) as sender:
        sender.send(STAGE.sample(3), LONG_S)
        take(STAGE, receiver, 3)


def test_a_receiver_without_a_port_has_the_address_that_it_has():
    with SharedMemoryTransport().listen(SCHEMA, UNIT_BYTES) as receiver:
        assert address_from_here(receiver.address, LONG_S) == receiver.address


def test_an_address_that_is_not_of_this_host_leads_to_a_relay(receiver):
    own, remote = parts_of(receiver.address)
    kind, name, token = own.split(":")
    found = address_from_here(f"{kind}:not-{name}:{token}@{remote}", LONG_S)
    assert found.split(":")[1].startswith("spec-relay-")
    assert found.split(":")[2] == token
    with pytest.raises(ProtocolError, match="memory of kind 'host'"):  # there is no descriptor for it
        SharedMemoryTransport().connect(found, SCHEMA, LONG_S)


def test_what_the_receiver_refuses_is_told_at_the_other_host(receiver):
    own, remote = parts_of(receiver.address)
    other = FeatureSchema(layers=(1,), hidden_size=8, dtype="float32")
    with pytest.raises(SchemaMismatch):
        SharedMemoryTransport().connect(relayed(own, remote, LONG_S), other, LONG_S)
    with pytest.raises(ProtocolError, match="token"):
        SharedMemoryTransport().connect(relayed(own + "x", remote, LONG_S), SCHEMA, LONG_S)


def test_a_port_where_nobody_listens_is_a_lost_peer(receiver):
    own, remote = parts_of(receiver.address)
    receiver.close()
    with pytest.raises(PeerLost, match=r"127\.0\.0\.1|::1"):
        address_from_here(f"{own}@{remote}", LONG_S)


@pytest.mark.parametrize(
    "bytes_sent",
    [b"", b"GET / HTTP/1.1\r\n\r\n", struct.pack("<I", 0), struct.pack("<I", 1 << 31), struct.pack("<I", 9)],
)
def test_a_stranger_at_the_port_disturbs_nobody(receiver, bytes_sent):
    with socket.create_connection(parse_address(parts_of(receiver.address)[1])) as stranger:
        stranger.sendall(bytes_sent)
        stranger.settimeout(LONG_S)
        with contextlib.suppress(OSError):  # it may have been refused already
            stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            assert stranger.recv(1) == b""
    with SharedMemoryTransport().connect(parts_of(receiver.address)[0], SCHEMA, LONG_S) as sender:
        sender.send(STAGE.sample(3), LONG_S)
        take(STAGE, receiver, 3)
        with pytest.raises(DeadlineExceeded):
            receiver.receive(SHORT_S)


def test_an_address_that_is_none_of_this_host_is_refused_and_nothing_left():
    inner = SharedMemoryTransport().listen(SCHEMA, UNIT_BYTES)
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0: .*name an address of this host"):
        ReachableReceiver(inner, "192.0.2.1:0")
    with pytest.raises(ProtocolError, match="closed"):
        inner.receive(SHORT_S)


def test_nothing_is_left_of_a_relay():
    counts = []
    for _ in range(3):
        with ReachableReceiver(SharedMemoryTransport().listen(SCHEMA, UNIT_BYTES), "127.0.0.1:0") as receiver:
            own, remote = parts_of(receiver.address)
            with pytest.raises(ProtocolError):
                SharedMemoryTransport().connect(relayed(own, remote, LONG_S), SCHEMA, LONG_S)
        counts.append(settled_resources())
    assert counts[2] == counts[1]
