"""Who may connect to a rendezvous, and how others are refused."""

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time

import pytest

from spec_core.errors import DeadlineExceeded, PeerLost, ProtocolError
from spec_processes.sockets.addresses import parse_address
from spec_processes.sockets.framed_socket import LENGTH
from spec_processes.sockets.rendezvous import TcpRendezvous
from spec_processes.sockets.rendezvous_server import JOIN, Frame

from .meeting import LONG_S, TOKEN


def test_rank_0_publishes_the_port_and_listens_on_its_interface_only():
    """R1."""
    with TcpRendezvous("127.0.0.1:0", 0, 1, TOKEN, LONG_S) as rendezvous:
        host, port = parse_address(rendezvous.address)
        assert (host, port > 0) == ("127.0.0.1", True)
        assert listening_addresses(port) == {"0100007F"}


def listening_addresses(port: int) -> set[str]:
    """Local addresses, in the kernel's hex, that listen on ``port``."""
    addresses = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as lines:
            for line in list(lines)[1:]:
                local, state = line.split()[1], line.split()[3]
                if state == "0A" and local.endswith(f":{port:04X}"):
                    addresses.add(local.split(":")[0])
    return addresses


@pytest.fixture
def waiting_rank_0():
    """Rank 0 of two, which joins in a thread; and what came of it."""
    outcome: list[object] = []
    with TcpRendezvous("127.0.0.1:0", 0, 2, TOKEN, LONG_S) as rendezvous:

        def join():
            try:
                outcome.append(rendezvous.join())
            except (PeerLost, ProtocolError, DeadlineExceeded) as error:
                outcome.append(error)

        thread = threading.Thread(target=join)
        thread.start()
        yield rendezvous, outcome, thread
        rendezvous.close()
        thread.join(LONG_S)


def stranger_says(address: str, record: bytes) -> bytes:
    """Return the relay's answer to a connection with that first record."""
    with socket.create_connection(parse_address(address), LONG_S) as stranger:
        stranger.sendall(record)
        with contextlib.suppress(OSError):  # the relay has closed the connection already
            stranger.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionResetError):  # what it has sent was not all read
            while chunk := stranger.recv(4096):
                answer += chunk
        return answer


def hello(**changes: object) -> bytes:
    fields = {"version": 1, "token": TOKEN, "rank": 1, "world_size": 2, **changes}
    return framed(Frame(JOIN, 0, 1, json.dumps(fields).encode()))


def framed(frame: Frame) -> bytes:
    packet = frame.encode()
    return LENGTH.pack(len(packet)) + packet


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        hello()[:-5],
        hello(token="wrong"),
        hello(token=""),
        hello(rank=1e999),
        hello(token="\ud800"),
        framed(Frame(JOIN, 0, 1, b"[" * 4000)),
        framed(Frame(JOIN, 0, 1, b"x" * 5000)),
        framed(Frame("barrier", 1, 1)),
    ],
    ids=["nothing", "http", "truncated", "token", "no-token", "inf", "surrogate", "deep", "big", "no-hello"],
)
def test_a_stranger_is_refused_and_the_group_does_not_notice(waiting_rank_0, record):
    """R2: truncated, forged and foreign first records."""
    rendezvous, outcome, thread = waiting_rank_0
    answer = stranger_says(rendezvous.address, record)
    assert JOIN.encode() not in answer
    assert outcome == []
    with TcpRendezvous(rendezvous.address, 1, 2, TOKEN, LONG_S) as other:
        other.join()
        thread.join(LONG_S)
        assert outcome == [rendezvous]


def test_a_silent_stranger_does_not_keep_members_out(waiting_rank_0):
    """R2."""
    rendezvous, outcome, thread = waiting_rank_0
    with socket.create_connection(parse_address(rendezvous.address)):
        with TcpRendezvous(rendezvous.address, 1, 2, TOKEN, LONG_S) as other:
            other.join()
            thread.join(LONG_S)
        assert outcome == [rendezvous]


def test_many_silent_connections_keep_no_member_out():
    """R2: connections that say nothing are bounded in number."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _CROWDED],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "both have joined\n", "")


_CROWDED = """
import resource, socket, threading
from spec_processes.sockets.rendezvous import TcpRendezvous, parse_address
with TcpRendezvous("127.0.0.1:0", 0, 2, "t", 20.0) as first:
    address, (_, hard) = parse_address(first.address), resource.getrlimit(resource.RLIMIT_NOFILE)
    crowd = [socket.socket() for _ in range(200)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (crowd[-1].fileno() + 110, hard))
    for stranger in crowd:
        stranger.connect(address)
    thread = threading.Thread(target=first.join)
    thread.start()
    with TcpRendezvous(first.address, 1, 2, "t", 20.0) as second:
        second.join()
        thread.join()
        print("both have joined")
for stranger in crowd:
    stranger.close()
"""


def test_nobody_listens_once_all_have_joined(waiting_rank_0):
    """R3."""
    rendezvous, outcome, thread = waiting_rank_0
    with TcpRendezvous(rendezvous.address, 1, 2, TOKEN, LONG_S) as other:
        other.join()
        thread.join(LONG_S)
        assert outcome == [rendezvous]
        deadline = time.monotonic() + LONG_S
        while listening_addresses(parse_address(rendezvous.address)[1]) and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(parse_address(rendezvous.address))


@pytest.mark.parametrize(
    ("rank", "world_size", "token", "words"),
    [
        (1, 2, "wrong", "token"),
        (0, 2, TOKEN, "joined already"),
        (2, 2, TOKEN, "outside"),
        (1, 3, TOKEN, "expects 3 ranks"),
    ],
)
def test_who_does_not_belong_is_told_why(waiting_rank_0, monkeypatch, rank, world_size, token, words):
    """R2, R3: ProtocolError in the rank that brings it; the group goes on waiting."""
    rendezvous, outcome, _ = waiting_rank_0
    time.sleep(0.1)  # rank 0 has joined
    # A second rank 0 would listen; here it connects as the others do.
    monkeypatch.setattr(TcpRendezvous, "_listen", lambda self: None)
    wrong = TcpRendezvous(rendezvous.address, rank, world_size, token, LONG_S)
    with wrong, pytest.raises(ProtocolError, match=words):
        wrong.join()
    assert outcome == []


def test_no_token_is_no_group():
    """R2."""
    with pytest.raises(ProtocolError, match="token"):
        TcpRendezvous("127.0.0.1:0", 0, 1, "", LONG_S)
