"""The functions that ranks run in the tests of a process group, each in its own process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_core import ProcessGroup
from spec_core.errors import DeadlineExceeded, PeerLost, ProtocolError, RunError
from spec_processes.sockets.rendezvous import TcpRendezvous
from spec_testing.limits import patient
from spec_testing.processes import Fault, Outcome, Rank, watch_ranks
from spec_testing.resources import settled_resources

Build = Callable[[TcpRendezvous], ProcessGroup]

Guard = Callable[[], AbstractContextManager[None]]

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16),
    *(torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
]
SUMMABLE = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int32, torch.int64),
]
SHAPES = [(3, 5), (1,), (), (0,), (0, 4)]

LONG_S, SHORT_S = patient(20.0), 1.5
"""Timeouts of groups in seconds: the first for tests in which no call may time out, and the second for
tests that wait for the timeout."""

GRACE_S = patient(3.0)
"""Seconds that a busy machine may add to a timeout."""


@contextlib.contextmanager
def joined(me: Rank, timeout_s: float = LONG_S) -> Generator[TcpRendezvous]:
    """Yield a rendezvous that all ranks of the test have joined."""
    address = "127.0.0.1:0" if me.rank == 0 else me.receive()
    with TcpRendezvous(address, me.rank, me.world_size, "token of the suite", timeout_s) as rendezvous:
        if me.rank == 0:
            me.publish(rendezvous.address)
        yield rendezvous.join(LONG_S)


@contextlib.contextmanager
def _group(me: Rank, build: Build, timeout_s: float = LONG_S) -> Generator[ProcessGroup]:
    with joined(me, timeout_s) as rendezvous, build(rendezvous) as group:
        yield group


def _sample(shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Tensor:
    """Return random values for ``rank``, which are equal in every process and include NaNs."""
    generator = torch.Generator().manual_seed(rank)
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return (raw % 2).bool()[..., 0] if dtype == torch.bool else raw.view(dtype)[..., 0].contiguous()


def _same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.cpu().view(-1).view(torch.uint8), right.cpu().view(-1).view(torch.uint8))


def move_all(me: Rank, build: Build, move: str) -> None:
    """Move tensors of every dtype and shape with the collective ``move``, and compare each bit for bit."""
    last = me.world_size - 1
    with _group(me, build) as group:
        for dtype in DTYPES:
            for shape in SHAPES:
                expected = [_sample(shape, dtype, rank) for rank in range(me.world_size)]
                mine = expected[me.rank].to(group.device)
                case = f"{move} {dtype} {shape}"
                if move == "all_gather":
                    got = group.all_gather(mine)
                    assert len(got) == me.world_size, case
                    assert all(map(_same, got, expected)), case
                elif move == "broadcast":
                    group.broadcast(mine, src=last)
                    assert _same(mine, expected[last]), case
                else:
                    _send_or_recv(group, mine)
                    assert _same(mine, expected[last if me.rank == 0 else me.rank]), case


def _send_or_recv(group: ProcessGroup, tensor: Tensor) -> None:
    """Send the tensor from the last rank to the first; do nothing on other ranks."""
    if group.rank == group.world_size - 1:
        group.send(tensor, dst=0)
    elif group.rank == 0:
        group.recv(tensor, src=group.world_size - 1)


def sum_in_place(me: Rank, build: Build, dtype: torch.dtype) -> None:
    """Sum a tensor of ``dtype`` over all ranks, and compare with the sum that one process computes."""
    with _group(me, build) as group:
        tensor = (torch.arange(7) + me.rank).to(dtype).to(group.device)
        group.all_reduce(tensor)
        expected = sum(torch.arange(7) + rank for rank in range(me.world_size))
        assert isinstance(expected, torch.Tensor)
        assert torch.equal(tensor.cpu(), expected.to(dtype))


def refuse_sum(me: Rank, build: Build, dtype: torch.dtype) -> None:
    """Refuse to sum a tensor of ``dtype`` on rank 0, after which the group still works."""
    with _group(me, build) as group:
        if me.rank == 0:
            with pytest.raises(ProtocolError, match=str(dtype)):
                group.all_reduce(torch.zeros(4, device=group.device).to(dtype))
        _check_works(group)


def _check_works(group: ProcessGroup) -> None:
    tensor = torch.full((3,), group.rank + 1, dtype=torch.int64, device=group.device)
    group.all_reduce(tensor)
    assert tensor.tolist() == [sum(range(1, group.world_size + 1))] * 3


def chain(me: Rank, build: Build, no_synchronisation: Guard) -> None:
    """Sum in turn with other work of the device, without waiting for it on the host."""
    with _group(me, build) as group:
        tensor = torch.ones(1 << 16, device=group.device)
        _check_works(group)
        with no_synchronisation():
            for _ in range(10):
                tensor *= 2
                group.all_reduce(tensor)
                tensor /= me.world_size
                tensor -= 1
        assert tensor.unique().tolist() == [1.0]


def refuse_tensor(me: Rank, build: Build, wrong: str, call: str) -> None:
    """Refuse a strided or a meta tensor on rank 0, after which the group still works."""
    with _group(me, build) as group:
        strided = torch.zeros(4, 4, device=group.device).t()
        tensor = strided if wrong == "strided" else torch.zeros(4, device="meta")
        if me.rank == 0:
            with pytest.raises(ProtocolError):
                _calls(group, tensor)[call]()
        _check_works(group)


def _calls(group: ProcessGroup, tensor: Tensor) -> dict[str, Callable[[], Any]]:
    """Return name -> function, for every collective, and for ``send`` to and ``recv`` from rank 1."""
    return {
        "broadcast": lambda: group.broadcast(tensor, src=1),
        "send": lambda: group.send(tensor, dst=1),
        "recv": lambda: group.recv(tensor, src=1),
        "all_gather": lambda: group.all_gather(tensor),
        "all_reduce": lambda: group.all_reduce(tensor),
        "barrier": lambda: group.barrier(),
    }


def beside_default_group(me: Rank, build: Build) -> None:
    """Work without torch's default group, and beside one in which the ranks have other numbers."""
    import torch.distributed as dist

    with joined(me) as rendezvous, build(rendezvous) as group:
        assert not dist.is_initialized()
        _check_works(group)
        turned = me.world_size - 1 - me.rank
        dist.init_process_group(
            "gloo", store=rendezvous.store("default"), rank=turned, world_size=me.world_size
        )
        ranks = [torch.zeros(1) for _ in range(me.world_size)]
        dist.all_gather(ranks, torch.tensor([float(me.rank)]))
        assert [int(rank) for rank in ranks] == list(reversed(range(me.world_size)))
        assert group.rank == me.rank
        _check_works(group)
        dist.destroy_process_group()
        _check_works(group)


def with_fault(build: Build, call: str, fault: Fault, timeout_s: float) -> Outcome:
    """Return how rank 0 ends if rank 1 is killed or stopped while rank 0 calls ``call``."""
    faults = {(1, "while rank 0 calls"): fault}
    return watch_ranks(_call_faulty_peer, 2, build, call, timeout_s, faults=faults)[0]


def _call_faulty_peer(me: Rank, build: Build, call: str, timeout_s: float) -> None:
    with _group(me, build, timeout_s) as group:
        _check_works(group)
        if me.rank == 1:
            time.sleep(0.2)
            me.reach("while rank 0 calls")
        started = time.monotonic()
        tensor = torch.zeros(4, device=group.device)
        try:
            _calls(group, tensor)[call]()
            tensor.cpu()
        except (PeerLost, DeadlineExceeded) as error:
            _check_unusable(group)
            raise type(error)(str(error), time.monotonic() - started) from None
        raise AssertionError(f"{call} returned although the peer is gone")


def _check_unusable(group: ProcessGroup) -> None:
    for name, call in _calls(group, torch.zeros(4, device=group.device)).items():
        try:
            call()
        except (RunError, ValueError):
            continue
        raise AssertionError(f"{name} did not raise on a group that has ended")


def abort_while_waiting(me: Rank, build: Build) -> float:
    """Abort a group on rank 0 while every rank waits; return the seconds until the waiting ended."""
    with _group(me, build) as group:
        _check_works(group)
        started = time.monotonic()
        timer = threading.Timer(0.3, group.abort)
        if me.rank == 0:
            timer.start()
        with pytest.raises(PeerLost):
            # Nobody ever sends: every rank waits until rank 0 aborts.
            group.recv(torch.zeros(4, device=group.device), src=(me.rank + 1) % me.world_size)
        elapsed = time.monotonic() - started
        timer.cancel()
        return elapsed


def build_alone(me: Rank, build: Build) -> float:
    """Build a group on rank 0 alone, which fails; return the seconds until it did."""
    started = time.monotonic()
    with joined(me, SHORT_S) as rendezvous:
        if me.rank == 0:
            with pytest.raises(RunError):
                build(rendezvous)
            me.publish("done")
        else:
            me.receive()
    return time.monotonic() - started


def call_after_end(me: Rank, build: Build, end: str) -> None:
    """Call every collective after ``abort`` or ``close``, which fails."""
    with _group(me, build) as group:
        _check_works(group)
        getattr(group, end)()
        _check_unusable(group)


def build_twice(me: Rank, build: Build) -> None:
    """Build and close a group twice; the second time leaves no socket and no thread behind."""
    with joined(me) as rendezvous:
        _live_once(rendezvous, build)
        before = settled_resources()
        _live_once(rendezvous, build)
        after = settled_resources()
        rendezvous.barrier()  # a rank that leaves earlier would lower rank 0's count of connections
        assert after == before, f"{before} -> {after}"


def _live_once(rendezvous: TcpRendezvous, build: Build) -> None:
    group = build(rendezvous)
    _check_works(group)
    rendezvous.barrier()
    group.close()
    group.close()
    del group
    rendezvous.barrier()  # counting starts when all have closed, because a peer's connection counts here, too
