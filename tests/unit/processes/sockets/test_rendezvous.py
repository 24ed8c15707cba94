"""The contract of spec_core.rendezvous; docstrings quote its numbers."""

import contextlib
import datetime as dt
import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from spec_core.errors import DeadlineExceeded, PeerLost, ProtocolError
from spec_processes.sockets.addresses import parse_address
from spec_processes.sockets.framed_socket import LENGTH
from spec_processes.sockets.rendezvous import TcpRendezvous, _store_file
from spec_processes.sockets.rendezvous_server import JOIN, Frame
from spec_testing.processes import Fault, Rank, run_ranks, watch_ranks
from spec_testing.resources import check_released, settled_resources

TOKEN, LONG_S, SHORT_S = "a secret of the run", 15.0, 0.5


def meet(me: Rank, address: str = "127.0.0.1:0", timeout_s: float = LONG_S) -> TcpRendezvous:
    where = address if me.rank == 0 else me.receive()
    rendezvous = TcpRendezvous(where, me.rank, me.world_size, TOKEN, timeout_s)
    if me.rank == 0:
        me.publish(rendezvous.address)
    return rendezvous.join(LONG_S)


def exchange(me: Rank, address: str) -> list[object]:
    with meet(me, address) as rendezvous:
        rendezvous.barrier()
        last = me.world_size - 1
        mine = bytes([me.rank]) * (1 << 20)
        return [
            rendezvous.broadcast(b"from the last" if me.rank == last else None, src=last),
            rendezvous.all_gather_json({"rank": me.rank, "none": None}),
            rendezvous.all_gather(mine) == [bytes([rank]) * (1 << 20) for rank in range(me.world_size)],
        ]


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0", "localhost:0"])
def test_all_ranks_get_the_same_records(address):
    """R1, R4: over IPv4, IPv6 and a name; payloads are arbitrary bytes."""
    ranks = [{"rank": rank, "none": None} for rank in range(3)]
    expected = [b"from the last", ranks, True]
    assert run_ranks(exchange, 3, address) == [expected] * 3


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


def test_a_group_of_one_needs_nobody():
    """R3, R4."""
    with TcpRendezvous("127.0.0.1:0", 0, 1, TOKEN, LONG_S).join() as rendezvous:
        rendezvous.barrier()
        assert rendezvous.all_gather(b"me") == [b"me"]


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


def different_calls(me: Rank) -> None:
    with meet(me) as rendezvous:
        call = rendezvous.barrier if me.rank == 0 else lambda: rendezvous.all_gather(b"")
        with pytest.raises(ProtocolError, match="different calls"):
            call()


def test_ranks_that_make_different_calls_learn_of_it():
    """R4."""
    run_ranks(different_calls, 2)


def test_a_call_before_join_and_an_oversized_record_are_refused():
    """R3, R4: and the rendezvous still works."""
    with TcpRendezvous("127.0.0.1:0", 0, 1, TOKEN, LONG_S) as rendezvous:
        with pytest.raises(ProtocolError, match="join"):
            rendezvous.barrier()
        rendezvous.join()
        with pytest.raises(ProtocolError, match="bytes"):
            rendezvous.all_gather(bytes((64 << 20) + 1))
        rendezvous.barrier()


def test_the_deadline_names_who_did_not_join():
    """R5."""
    with TcpRendezvous("127.0.0.1:0", 0, 3, TOKEN, SHORT_S) as rendezvous:
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"ranks \[1, 2\]"):
            rendezvous.join()
        assert time.monotonic() - started < SHORT_S + LONG_S
        with pytest.raises(DeadlineExceeded):
            rendezvous.barrier()


def meet_faulty_rank(me: Rank, victim: int) -> tuple[str, str, float] | None:
    """The error of a barrier to which ``victim`` does not come, and how long it took."""
    with meet(me, timeout_s=SHORT_S) as rendezvous:
        if me.rank == victim:
            time.sleep(0.1)
            me.reach("fault")
        started = time.monotonic()
        with pytest.raises((DeadlineExceeded, PeerLost)) as error:
            rendezvous.barrier()
        elapsed = time.monotonic() - started
        with pytest.raises(error.type):
            rendezvous.barrier()
        me.publish("found out")
        me.receive()  # the other survivor is to see the fault, not that this rank leaves
        return error.type.__name__, str(error.value), elapsed


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("fault", list(Fault))
def test_a_dead_rank_is_lost_and_a_silent_one_exceeds_the_deadline(fault, victim):
    """R5, R6: on every other rank, naming it, within the timeout; rank 0, which serves, is no exception."""
    outcomes = watch_ranks(meet_faulty_rank, 3, victim, faults={(victim, "fault"): fault})
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
        if outcome.rank != victim:
            name, text, elapsed = outcome.value
            assert name == ("PeerLost" if fault is Fault.KILL else "DeadlineExceeded")
            assert f"rank {victim}" in text or str(victim) in text.split("[")[1].split("]")[0]
            assert elapsed < SHORT_S + LONG_S


def leave_early(me: Rank) -> str:
    with meet(me) as rendezvous:
        rendezvous.barrier()
        if me.rank == 1:
            return ""
        with pytest.raises(PeerLost, match="rank 1") as error:
            rendezvous.barrier()
        return error.type.__name__


def test_a_rank_that_closes_is_lost_to_the_others_after_what_it_took_part_in():
    """R6: the last call that all have made succeeds everywhere."""
    assert run_ranks(leave_early, 3) == ["PeerLost", "", "PeerLost"]


def use_stores(me: Rank, far: bool) -> tuple[bytes, bool, int]:
    with meet(me) as rendezvous, as_on_another_host(far and me.rank == 1):
        first, second = rendezvous.store("x"), rendezvous.store("x")
        if me.rank == 1:
            first.set("key", b"\x00value\xff")
        value = first.get("key")
        apart = not second.check(["key"])
        first.add("number", 3)
        rendezvous.barrier()
        number = first.add("number", 0)
        rendezvous.barrier()
        return value, apart, number


@contextlib.contextmanager
def as_on_another_host(far: bool):
    """See no file of rank 0's memory, as a process of another host does."""
    with pytest.MonkeyPatch.context() as patch:
        if far:
            patch.setattr("spec_processes.sockets.rendezvous._sees", lambda file, name: False)
        yield


def miss_a_key(me: Rank) -> None:
    with meet(me, timeout_s=LONG_S) as rendezvous, as_on_another_host(me.rank == 1):
        store = rendezvous.store("x")
        with pytest.raises(DeadlineExceeded, match=r"has set \['.*x/nothing'\] within 0\.5 s"):
            store.wait(["nothing"], dt.timedelta(seconds=SHORT_S))
        store.set(f"of {me.rank}", "still works")
        store.wait([f"of {1 - me.rank}"])
        rendezvous.barrier()


def test_a_key_that_nobody_sets_exceeds_the_deadline_between_hosts():
    """R7: and the rendezvous still works."""
    run_ranks(miss_a_key, 2)


def test_a_request_that_the_store_cannot_do_ends_the_member_at_once():
    """R6, R7: and not at its deadline."""
    with TcpRendezvous("127.0.0.1:0", 0, 1, TOKEN, LONG_S).join() as rendezvous, as_on_another_host(True):
        store = rendezvous.store("x")
        store.set("key", "text")
        with pytest.raises(PeerLost):
            store.add("key", 1)


def sum_between_hosts(me: Rank) -> float:
    import torch
    import torch.distributed as dist

    from spec_kit.collectives import prove_default_group

    with meet(me) as rendezvous, as_on_another_host(me.rank == 1):
        store = rendezvous.store("x")
        dist.init_process_group("gloo", store=store, rank=me.rank, world_size=me.world_size)
        prove_default_group(store, LONG_S)
        number = torch.tensor([1.0 + me.rank])
        dist.all_reduce(number, group=dist.new_group([0, 1]))
        gc.collect()
        dist.destroy_process_group()
        return number.item()


def test_torchs_groups_meet_in_the_store_between_hosts():
    """R7."""
    assert run_ranks(sum_between_hosts, 2) == [3.0, 3.0]


def look_for_the_store(me: Rank, far: bool) -> int:
    with meet(me) as rendezvous, as_on_another_host(far and me.rank == 1):
        store = rendezvous.store("x")
        store.set(f"of {me.rank}", "")
        rendezvous.barrier()
        return len(tcp_ports_of_this_process())


def tcp_ports_of_this_process() -> set[int]:
    connections = psutil.Process().net_connections("tcp")
    return {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("far", [False, True])
def test_a_store_listens_nowhere(far):
    """R7."""
    assert run_ranks(look_for_the_store, 2, far) == [0, 0]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_cannot_open_the_file_of_a_store():
    """R7: it is of rank 0's memory. Only a member that knows the token is served otherwise."""
    assert run_ranks(store_of_another_user, 2) == [(True, "RendezvousStore"), (False, "RendezvousStore")]


def store_of_another_user(me: Rank) -> tuple[bool, str]:
    with meet(me) as rendezvous:
        file = rendezvous.broadcast(_store_file()[0].encode(), src=0).decode()
        if me.rank == 1:
            os.setuid(65534)
        store = rendezvous.store("x")
        rendezvous.barrier()
        return os.access(file, os.R_OK), type(store.underlying_store).__name__


@pytest.mark.parametrize("far", [False, True])
def test_stores_are_namespaces_of_their_own(far):
    """R7."""
    assert run_ranks(use_stores, 2, far) == [(b"\x00value\xff", True, 6)] * 2


def let_the_store_go(me: Rank) -> None:
    with meet(me) as rendezvous:
        store = rendezvous.store("x")
        store.set(f"of {me.rank}", "")
        file = rendezvous.broadcast(_store_file()[0].encode(), src=0).decode()
    if me.rank == 1:
        deadline = time.monotonic() + LONG_S
        while os.access(file, os.F_OK):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        del store
        gc.collect()


def test_a_store_may_go_after_rank_0():
    """R7: torch's own end of such a store opens the file again, and aborts where it cannot."""
    run_ranks(let_the_store_go, 2)


def come_and_go(me: Rank) -> None:
    meet(me).close()
    counts = []
    for _ in range(2):
        rendezvous = meet(me)
        rendezvous.barrier()
        rendezvous.close()
        rendezvous.close()
        with pytest.raises(ProtocolError):
            rendezvous.barrier()
        counts.append(settled_resources())
    assert counts[0] == counts[1]


def test_close_leaves_no_socket_and_no_thread():
    """R8."""
    run_ranks(come_and_go, 2)


def test_close_before_anybody_joined_leaves_no_socket_and_no_thread():
    """R8."""
    TcpRendezvous("127.0.0.1:0", 0, 2, TOKEN, LONG_S).close()
    before = settled_resources()
    TcpRendezvous("127.0.0.1:0", 0, 2, TOKEN, LONG_S).close()
    check_released(before)


def test_close_unblocks_a_call_of_another_thread():
    """R8."""
    rendezvous = TcpRendezvous("127.0.0.1:0", 0, 2, TOKEN, LONG_S)
    timer = threading.Timer(0.2, rendezvous.close)
    timer.start()
    started = time.monotonic()
    with pytest.raises(PeerLost):
        rendezvous.join()
    assert time.monotonic() - started < LONG_S / 2
    timer.join()


@pytest.mark.parametrize("address", ["", "localhost", ":1", "host:port"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ProtocolError, match="host:port"):
        parse_address(address)
