"""Connections of workers of other hosts to their launcher."""

import json
import socket

import pytest

from spec_processes import ChannelListener, connect_channel, connect_output
from spec_processes.sockets.addresses import parse_address
from spec_processes.sockets.framed_socket import LENGTH

LONG_S = 15.0


@pytest.fixture
def listener(tmp_path):
    listener = ChannelListener("127.0.0.1", tmp_path)
    yield listener
    listener.close()


def test_output_is_appended_to_the_log_of_its_worker_and_nothing_else(listener, tmp_path):
    (tmp_path / "engine-0.log").write_text("earlier\n")
    for name in ("engine-0", "../engine-1"):
        with connect_output(listener.address, listener.token, name, LONG_S) as output:
            output.sendall(b"later\n")
    with connect_channel(listener.address, listener.token, "engine-0", LONG_S):
        found = listener.accept(LONG_S)
    assert found is not None
    assert found[0] == "engine-0"
    found[1].close()
    listener.close()
    assert (tmp_path / "engine-0.log").read_text() == "earlier\nlater\n"
    assert (tmp_path / "engine-1.log").read_text() == "later\n"


@pytest.mark.parametrize("packet", [b"7", b"{}", b"[]", b'["wrong", "engine-0", "output"]', b"\xff"])
def test_a_stranger_is_refused_and_the_listener_goes_on(listener, tmp_path, packet):
    with socket.create_connection(parse_address(listener.address), LONG_S) as stranger:
        stranger.sendall(LENGTH.pack(len(packet)) + packet)
        assert stranger.recv(1) == b""
    with connect_channel(listener.address, listener.token, "engine-0", LONG_S):
        found = listener.accept(LONG_S)
    assert found is not None
    found[1].close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("use", "keeps_logs"), [("output", False), ("input", True)])
def test_a_connection_that_nobody_takes_is_closed(tmp_path, use, keeps_logs):
    listener = ChannelListener("127.0.0.1", tmp_path if keeps_logs else None)
    packet = json.dumps([listener.token, "engine-0", use]).encode()
    with socket.create_connection(parse_address(listener.address), LONG_S) as worker:
        worker.sendall(LENGTH.pack(len(packet)) + packet)
        assert worker.recv(1) == b""
    listener.close()
    assert list(tmp_path.iterdir()) == []
