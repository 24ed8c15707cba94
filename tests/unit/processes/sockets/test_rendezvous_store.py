"""The store that a rendezvous hosts for torch's groups."""

import contextlib
import datetime as dt
import gc
import os
import time

import psutil
import pytest

from spec_core.errors import DeadlineExceeded, PeerLost
from spec_processes.sockets.rendezvous import TcpRendezvous, store_file
from spec_testing.processes import Rank, run_ranks

from .meeting import LONG_S, SHORT_S, TOKEN, meet


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

    from spec_kit.collectives.gloo_members import prove_default_group

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
        file = rendezvous.broadcast(store_file()[0].encode(), src=0).decode()
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
        file = rendezvous.broadcast(store_file()[0].encode(), src=0).decode()
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
