"""ProcessGroupSuite tests the contract of ``spec_core.process_group`` with real processes.

::

    def build(rendezvous: TcpRendezvous) -> ProcessGroup: ...     # at the top level of the test module

    class TestMyGroup(ProcessGroupSuite):
        @pytest.fixture
        def build(self):
            return build
"""

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
from spec_testing.conformance import ConformanceSuite
from spec_testing.limits import patient
from spec_testing.processes import Fault, Outcome, Rank, run_ranks, watch_ranks
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


class ProcessGroupSuite(ConformanceSuite):
    """Tests of a process group.

    A subclass must define the fixture ``build``; other fixtures have defaults.
    """

    @pytest.fixture
    def build(self) -> Build:
        """Return a module's function ``(rendezvous) -> ProcessGroup``, which is called on every rank."""
        pytest.fail("a subclass of ProcessGroupSuite gives the fixture build")

    @pytest.fixture
    def world_size(self) -> int:
        """Return the number of ranks: at least 2, and at most the number of devices."""
        return 2

    @pytest.fixture
    def no_synchronisation(self) -> Guard:
        """Return a module's context manager, in which a call that waits for the device raises."""
        return contextlib.nullcontext

    @pytest.mark.parametrize("move", ["broadcast", "send_recv", "all_gather"])
    def test_every_dtype_and_shape_arrives_bit_for_bit(
        self, build: Build, world_size: int, move: str
    ) -> None:
        """P1: tensors of every torch dtype arrive bit for bit, empty tensors and scalars included."""
        run_ranks(_move_all, world_size, build, move)

    @pytest.mark.parametrize("dtype", SUMMABLE, ids=str)
    def test_all_reduce_sums_in_place(self, build: Build, world_size: int, dtype: torch.dtype) -> None:
        """P2: ``all_reduce`` is exact for small integers in every dtype that it can sum."""
        run_ranks(_sum, world_size, build, dtype)

    @pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.float8_e4m3fn], ids=str)
    def test_all_reduce_refuses_what_it_cannot_sum(
        self, build: Build, world_size: int, dtype: torch.dtype
    ) -> None:
        """P2: ``all_reduce`` of another dtype raises ProtocolError and sends nothing; the group still works."""
        run_ranks(_refuse_sum, world_size, build, dtype)

    def test_calls_follow_the_work_before_and_precede_the_work_after(
        self, build: Build, world_size: int, no_synchronisation: Guard
    ) -> None:
        """P3: calls are ordered on the current stream, without a device synchronization."""
        run_ranks(_chain, world_size, build, no_synchronisation)

    @pytest.mark.parametrize("wrong", ["strided", "elsewhere"])
    @pytest.mark.parametrize("call", ["broadcast", "send", "recv", "all_gather", "all_reduce"])
    def test_a_tensor_that_cannot_travel_is_refused_before_anything_is_sent(
        self, build: Build, wrong: str, call: str
    ) -> None:
        """P4: a tensor that is not contiguous, or on another device, raises ProtocolError."""
        run_ranks(_refuse_tensor, 2, build, wrong, call)

    def test_the_default_group_is_neither_needed_nor_touched(self, build: Build, world_size: int) -> None:
        """P5: the group works without a default group, and together with a default group of other ranks."""
        run_ranks(_beside_default_group, world_size, build)

    @pytest.mark.parametrize("call", ["recv", "all_reduce", "barrier"])
    def test_a_killed_peer_is_lost(self, build: Build, call: str) -> None:
        """P6: if a peer is killed, calls raise PeerLost long before the timeout; then the group is unusable."""
        survivor = _with_fault(build, call, Fault.KILL, LONG_S)
        assert isinstance(survivor.error, PeerLost), survivor.trace
        assert survivor.error.args[1] < LONG_S / 2

    @pytest.mark.parametrize("call", ["recv", "all_reduce", "barrier"])
    def test_a_stopped_peer_exceeds_the_deadline(self, build: Build, call: str) -> None:
        """P6: if a peer is stopped, calls raise DeadlineExceeded at the timeout; then the group is unusable."""
        survivor = _with_fault(build, call, Fault.STOP, SHORT_S)
        assert isinstance(survivor.error, DeadlineExceeded), survivor.trace
        assert SHORT_S <= survivor.error.args[1] < SHORT_S + GRACE_S

    def test_abort_from_another_thread_unblocks_everybody(self, build: Build, world_size: int) -> None:
        """P7: after ``abort``, this process and its peers get PeerLost long before the timeout."""
        assert max(run_ranks(_abort_while_waiting, world_size, build)) < LONG_S / 4

    def test_a_group_without_its_peers_fails_to_build(self, build: Build) -> None:
        """P8: building a group without its peers raises within the timeout."""
        assert run_ranks(_build_alone, 2, build)[0] < SHORT_S + GRACE_S

    @pytest.mark.parametrize("end", ["close", "abort"])
    def test_no_call_works_after_the_end(self, build: Build, end: str) -> None:
        """P8: every call raises after ``close`` or ``abort``."""
        run_ranks(_call_after_end, 2, build, end)

    def test_close_twice_leaves_no_socket_and_no_thread(self, build: Build, world_size: int) -> None:
        """P9: building and closing a second group leaves no further socket or thread in any process."""
        run_ranks(_come_and_go, world_size, build)


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


def _move_all(me: Rank, build: Build, move: str) -> None:
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


def _sum(me: Rank, build: Build, dtype: torch.dtype) -> None:
    with _group(me, build) as group:
        tensor = (torch.arange(7) + me.rank).to(dtype).to(group.device)
        group.all_reduce(tensor)
        expected = sum(torch.arange(7) + rank for rank in range(me.world_size))
        assert isinstance(expected, torch.Tensor)
        assert torch.equal(tensor.cpu(), expected.to(dtype))


def _refuse_sum(me: Rank, build: Build, dtype: torch.dtype) -> None:
    with _group(me, build) as group:
        if me.rank == 0:
            with pytest.raises(ProtocolError, match=str(dtype)):
                group.all_reduce(torch.zeros(4, device=group.device).to(dtype))
        _check_works(group)


def _check_works(group: ProcessGroup) -> None:
    tensor = torch.full((3,), group.rank + 1, dtype=torch.int64, device=group.device)
    group.all_reduce(tensor)
    assert tensor.tolist() == [sum(range(1, group.world_size + 1))] * 3


def _chain(me: Rank, build: Build, no_synchronisation: Guard) -> None:
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


def _refuse_tensor(me: Rank, build: Build, wrong: str, call: str) -> None:
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


def _beside_default_group(me: Rank, build: Build) -> None:
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


def _with_fault(build: Build, call: str, fault: Fault, timeout_s: float) -> Outcome:
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


def _abort_while_waiting(me: Rank, build: Build) -> float:
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


def _build_alone(me: Rank, build: Build) -> float:
    started = time.monotonic()
    with joined(me, SHORT_S) as rendezvous:
        if me.rank == 0:
            with pytest.raises(RunError):
                build(rendezvous)
            me.publish("done")
        else:
            me.receive()
    return time.monotonic() - started


def _call_after_end(me: Rank, build: Build, end: str) -> None:
    with _group(me, build) as group:
        _check_works(group)
        getattr(group, end)()
        _check_unusable(group)


def _come_and_go(me: Rank, build: Build) -> None:
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
