"""The contract of spec_core.rendezvous; docstrings quote its numbers."""

import threading
import time

import pytest

from spec_core.errors import DeadlineExceeded, PeerLost, ProtocolError
from spec_processes.sockets.addresses import parse_address
from spec_processes.sockets.rendezvous import TcpRendezvous
from spec_testing.processes import Fault, Rank, run_ranks, watch_ranks
from spec_testing.resources import check_released, settled_resources

from .meeting import LONG_S, SHORT_S, TOKEN, meet


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


def test_a_group_of_one_needs_nobody():
    """R3, R4."""
    with TcpRendezvous("127.0.0.1:0", 0, 1, TOKEN, LONG_S).join() as rendezvous:
        rendezvous.barrier()
        assert rendezvous.all_gather(b"me") == [b"me"]


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


def meet_faulty_rank(me: Rank, victim: int, timeout_s: float) -> tuple[str, str, float] | None:
    """The error of a barrier to which ``victim`` does not come, and how long it took."""
    with meet(me, timeout_s=timeout_s) as rendezvous:
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
    error, timeout_s, within_s = {
        Fault.KILL: ("PeerLost", LONG_S, LONG_S),
        Fault.STOP: ("DeadlineExceeded", SHORT_S, SHORT_S + LONG_S),
    }[fault]
    outcomes = watch_ranks(meet_faulty_rank, 3, victim, timeout_s, faults={(victim, "fault"): fault})
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
        if outcome.rank != victim:
            name, text, elapsed = outcome.value
            assert name == error
            assert f"rank {victim}" in text or str(victim) in text.split("[")[1].split("]")[0]
            assert elapsed < within_s


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
