"""Peers that have not authenticated in front of an AcceptLimiter, and peers that are admitted beside them."""

import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress

import pytest

from spec_processes.sockets import local_socket, peer_admission
from spec_processes.sockets.addresses import bind
from spec_processes.sockets.framed_socket import LENGTH
from spec_processes.sockets.peer_admission import AcceptLimiter, same_token
from spec_testing.resources import check_released, settled_resources

LIMIT_S = 10.0
MB = 1 << 20


def framed(record: bytes) -> bytes:
    return LENGTH.pack(len(record)) + record


@pytest.fixture(params=["tcp", "unix"])
def doors(request) -> tuple[socket.socket, Callable[[], socket.socket]]:
    """A listener, and what connects to it."""
    if request.param == "tcp":
        listener = bind("127.0.0.1", 0)
        where = listener.getsockname()
        return listener, lambda: socket.create_connection(where, LIMIT_S)
    listener, name = local_socket.listen("spec-test")
    return listener, lambda: local_socket.connect(name, LIMIT_S)


@pytest.fixture
def visitors(doors) -> Iterator[Iterator[tuple[socket.socket, bytes]]]:
    with closing(AcceptLimiter(doors[0]).first_packets()) as visitors:
        yield visitors


def assert_admitted(doors, visitors, record: bytes = b"a member") -> None:
    with doors[1]() as member:
        member.sendall(framed(record) + b"what follows")
        end, heard = next(visitors)
        with end:
            assert heard == record
            assert end.recv(100) == b"what follows"


def test_a_record_comes_whole_and_what_follows_it_stays(doors, visitors):
    assert_admitted(doors, visitors)
    assert_admitted(doors, visitors, b"x" * peer_admission.MAX_FIRST_PACKET_BYTES)


@pytest.mark.parametrize("said", [b"", b"\0\0", framed(b"cut short")[:-1], framed(b""), LENGTH.pack(1 << 31)])
def test_strangers_keep_nobody_out(doors, visitors, said):
    with ExitStack() as crowd:
        for _ in range(10):
            crowd.enter_context(doors[1]()).sendall(said)
        started = time.monotonic()
        assert_admitted(doors, visitors)
        assert time.monotonic() - started < peer_admission.FIRST_PACKET_S / 2


def test_a_byte_now_and_then_does_not_extend_the_deadline(doors, monkeypatch):
    monkeypatch.setattr(peer_admission, "FIRST_PACKET_S", 0.3)
    limiter = AcceptLimiter(doors[0])
    with doors[1]() as stranger:
        stranger.sendall(LENGTH.pack(1000))

        def drip() -> None:
            with suppress(OSError):
                while True:
                    stranger.sendall(b"\0")
                    time.sleep(0.1)
            limiter.close()

        thread = threading.Thread(target=drip)
        thread.start()
        started = time.monotonic()
        assert list(limiter.first_packets()) == []
        thread.join()
    assert time.monotonic() - started < LIMIT_S / 2


def test_an_announced_length_is_not_believed(doors, visitors):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with doors[1]() as stranger:
        stranger.setblocking(False)
        with suppress(OSError):
            stranger.send(LENGTH.pack((1 << 32) - 1) + bytes(MB))
        assert_admitted(doors, visitors)
        stranger.setblocking(True)
        with suppress(ConnectionError):
            assert stranger.recv(1) == b""
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # in KiB


def test_who_comes_last_takes_the_place_of_who_has_waited_longest(doors, visitors, monkeypatch):
    monkeypatch.setattr(peer_admission, "MAX_PENDING", 3)
    with ExitStack() as crowd:
        strangers = [crowd.enter_context(doors[1]()) for _ in range(6)]
        assert_admitted(doors, visitors)
        assert [is_open(stranger) for stranger in strangers[:3]] == [False] * 3
        assert is_open(strangers[-1])


def is_open(end: socket.socket) -> bool:
    end.settimeout(0.1)
    try:
        return end.recv(1) != b""
    except TimeoutError:
        return True
    except ConnectionError:
        return False


def test_a_full_table_of_descriptors_is_waited_out(doors, visitors, caplog):
    assert_admitted(doors, visitors)
    with doors[1]() as member:
        member.sendall(framed(b"late"))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (member.fileno() + 1, hard))
        timer = threading.Timer(0.2, resource.setrlimit, (resource.RLIMIT_NOFILE, (soft, hard)))
        timer.start()
        try:
            end, heard = next(visitors)
        finally:
            timer.join()
        end.close()
    assert heard == b"late"
    assert "Too many open files" in caplog.text


def test_the_wait_ends_when_the_limiter_is_closed(doors):
    listener, connect = doors
    limiter = AcceptLimiter(listener)
    threading.Timer(0.2, limiter.close).start()
    with connect():
        started = time.monotonic()
        assert list(limiter.first_packets()) == []
    assert time.monotonic() - started < LIMIT_S / 2


def test_nothing_is_left_of_a_limiter():
    def come_and_go():
        with bind("127.0.0.1", 0) as never_asked:
            AcceptLimiter(never_asked).first_packets().close()
        limiter = AcceptLimiter(bind("127.0.0.1", 0))
        limiter.close()
        assert list(limiter.first_packets()) == []

    come_and_go()
    before = settled_resources()
    come_and_go()
    check_released(before)


@pytest.mark.parametrize("claimed", ["", "tokeN", "\ud800", None, 5, ["token"], "ä"])
def test_only_the_token_is_the_token(claimed):
    assert not same_token(claimed, "token")
    assert same_token("token", "token")
