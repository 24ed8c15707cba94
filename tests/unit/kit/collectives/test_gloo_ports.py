"""Ports that gloo leaves open are closed, without a privilege, and its groups work and end as before."""

import logging
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from spec_kit.collectives import gloo_ports
from spec_kit.collectives.gloo_ports import closed_afterwards, gloo_device
from spec_processes.sockets.addresses import bind
from spec_testing.processes import Rank, run_ranks

LIMIT_S = 20.0
ME = psutil.Process()


def listening() -> set[tuple[str, int]]:
    return {one.laddr for one in ME.net_connections("tcp") if one.status == psutil.CONN_LISTEN}


def gloo(store: dist.Store, rank: int = 0, world_size: int = 1) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
    return ProcessGroupGloo(store, rank, world_size, options)


def work_behind_closed_ports(me: Rank, folder: str) -> None:
    before = listening()
    with closed_afterwards():
        group = gloo(dist.FileStore(f"{folder}/store"), me.rank, me.world_size)
        (port,) = listening() - before
        with socket.create_connection(port, LIMIT_S):
            pass
    assert listening() == before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(port, LIMIT_S)
    ones = torch.ones(1000)
    group.allreduce([ones]).wait()
    assert ones.eq(me.world_size).all()
    descriptors = len(os.listdir("/proc/self/fd"))
    del group
    assert len(os.listdir("/proc/self/fd")) < descriptors


def test_a_group_works_and_ends_after_its_ports_are_closed(tmp_path):
    run_ranks(work_behind_closed_ports, 3, str(tmp_path))


def test_ports_of_others_stay_open():
    with bind("127.0.0.1", 0) as before:
        with closed_afterwards():
            group = gloo(dist.HashStore())
        with bind("127.0.0.1", 0) as after:
            for others in (before, after):
                socket.create_connection(others.getsockname(), LIMIT_S).close()
    del group


def test_port_that_another_thread_opens_while_gloo_does_still_hears(monkeypatch):
    create_device = ProcessGroupGloo.create_device

    def create_slowly(**options):
        opened.append(pool.submit(bind, "127.0.0.1", 0))
        wait(opened, 0.3)
        return create_device(**options)

    opened: list[Future[socket.socket]] = []
    monkeypatch.setattr(gloo_ports, "ProcessGroupGloo", SimpleNamespace(create_device=create_slowly))
    with ThreadPoolExecutor(1) as pool:
        with gloo_device("127.0.0.1"):
            pass
        with opened[0].result(LIMIT_S) as listener:
            socket.create_connection(listener.getsockname(), 1).close()


def knock_without_end(port: tuple[str, int], ended: threading.Event) -> None:
    while not ended.is_set():
        try:
            socket.create_connection(port, LIMIT_S).close()
        except ConnectionRefusedError:
            return


def test_a_port_is_closed_while_strangers_connect_all_the_time():
    for _ in range(20):
        before, ended = listening(), threading.Event()
        with ThreadPoolExecutor(2) as pool:
            try:
                with closed_afterwards():
                    group = gloo(dist.HashStore())
                    (port,) = listening() - before
                    strangers = [pool.submit(knock_without_end, port, ended) for _ in range(2)]
                assert not wait(strangers, LIMIT_S).not_done
            finally:
                ended.set()
        group.barrier().wait()
        del group


def test_a_listener_that_nobody_waits_for_stays_open_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        with closed_afterwards():
            inside = bind("127.0.0.1", 0)
        with inside:
            socket.create_connection(inside.getsockname(), LIMIT_S).close()
    assert "stays open" in caplog.text


PROGRAM = """
import torch.distributed as dist
from spec_kit.collectives.gloo_ports import closed_afterwards
with closed_afterwards():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="another user has no privilege in the first place")
def test_no_privilege_is_needed():
    without = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    done = subprocess.run(
        [*without, sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
