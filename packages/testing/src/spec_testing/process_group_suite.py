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

import pytest
import torch

from spec_core.errors import DeadlineExceeded, PeerLost
from spec_testing.conformance import ConformanceSuite
from spec_testing.process_group_ranks import (
    GRACE_S,
    LONG_S,
    SHORT_S,
    SUMMABLE,
    Build,
    Guard,
    abort_while_waiting,
    beside_default_group,
    build_alone,
    build_twice,
    call_after_end,
    chain,
    move_all,
    refuse_sum,
    refuse_tensor,
    sum_in_place,
    with_fault,
)
from spec_testing.processes import Fault, run_ranks


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
        run_ranks(move_all, world_size, build, move)

    @pytest.mark.parametrize("dtype", SUMMABLE, ids=str)
    def test_all_reduce_sums_in_place(self, build: Build, world_size: int, dtype: torch.dtype) -> None:
        """P2: ``all_reduce`` is exact for small integers in every dtype that it can sum."""
        run_ranks(sum_in_place, world_size, build, dtype)

    @pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.float8_e4m3fn], ids=str)
    def test_all_reduce_refuses_what_it_cannot_sum(
        self, build: Build, world_size: int, dtype: torch.dtype
    ) -> None:
        """P2: ``all_reduce`` of another dtype raises ProtocolError and sends nothing; the group still works."""
        run_ranks(refuse_sum, world_size, build, dtype)

    def test_calls_follow_the_work_before_and_precede_the_work_after(
        self, build: Build, world_size: int, no_synchronisation: Guard
    ) -> None:
        """P3: calls are ordered on the current stream, without a device synchronization."""
        run_ranks(chain, world_size, build, no_synchronisation)

    @pytest.mark.parametrize("wrong", ["strided", "elsewhere"])
    @pytest.mark.parametrize("call", ["broadcast", "send", "recv", "all_gather", "all_reduce"])
    def test_a_tensor_that_cannot_travel_is_refused_before_anything_is_sent(
        self, build: Build, wrong: str, call: str
    ) -> None:
        """P4: a tensor that is not contiguous, or on another device, raises ProtocolError."""
        run_ranks(refuse_tensor, 2, build, wrong, call)

    def test_the_default_group_is_neither_needed_nor_touched(self, build: Build, world_size: int) -> None:
        """P5: the group works without a default group, and together with a default group of other ranks."""
        run_ranks(beside_default_group, world_size, build)

    @pytest.mark.parametrize("call", ["recv", "all_reduce", "barrier"])
    def test_a_killed_peer_is_lost(self, build: Build, call: str) -> None:
        """P6: if a peer is killed, calls raise PeerLost long before the timeout; then the group is unusable."""
        survivor = with_fault(build, call, Fault.KILL, LONG_S)
        assert isinstance(survivor.error, PeerLost), survivor.trace
        assert survivor.error.args[1] < LONG_S / 2

    @pytest.mark.parametrize("call", ["recv", "all_reduce", "barrier"])
    def test_a_stopped_peer_exceeds_the_deadline(self, build: Build, call: str) -> None:
        """P6: if a peer is stopped, calls raise DeadlineExceeded at the timeout; then the group is unusable."""
        survivor = with_fault(build, call, Fault.STOP, SHORT_S)
        assert isinstance(survivor.error, DeadlineExceeded), survivor.trace
        assert SHORT_S <= survivor.error.args[1] < SHORT_S + GRACE_S

    def test_abort_from_another_thread_unblocks_everybody(self, build: Build, world_size: int) -> None:
        """P7: after ``abort``, this process and its peers get PeerLost long before the timeout."""
        assert max(run_ranks(abort_while_waiting, world_size, build)) < LONG_S / 4

    def test_a_group_without_its_peers_fails_to_build(self, build: Build) -> None:
        """P8: building a group without its peers raises within the timeout."""
        assert run_ranks(build_alone, 2, build)[0] < SHORT_S + GRACE_S

    @pytest.mark.parametrize("end", ["close", "abort"])
    def test_no_call_works_after_the_end(self, build: Build, end: str) -> None:
        """P8: every call raises after ``close`` or ``abort``."""
        run_ranks(call_after_end, 2, build, end)

    def test_close_twice_leaves_no_socket_and_no_thread(self, build: Build, world_size: int) -> None:
        """P9: building and closing a second group leaves no further socket or thread in any process."""
        run_ranks(build_twice, world_size, build)
