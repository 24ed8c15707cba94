"""TransportSuite tests whether a transport keeps the contract of ``spec_core.transport``.

The ranks are processes, or threads if the transport works within one process.

::

    def build() -> Transport: ...              # at the top level of the test module

    class TestMyTransport(TransportSuite):
        @pytest.fixture
        def build(self):
            return build

Rank 0 receives, and the other ranks send. The functions that the ranks run are in ``transport_parts`` and
``transport_endings``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from spec_core import Transport
from spec_core.records import FeatureSchema
from spec_testing import transport_endings as endings
from spec_testing import transport_parts as parts
from spec_testing.conformance import ConformanceSuite
from spec_testing.processes import Fault, run_ranks, watch_ranks
from spec_testing.transport_stage import FAULT, Fail, Play, Stage

Build = Callable[[], Transport]


class TransportSuite(ConformanceSuite):
    """Tests of a transport. A subclass must define the fixture ``build``; other fixtures have defaults."""

    @pytest.fixture
    def build(self) -> Build:
        """Return a module's function ``() -> Transport``, which is called in every process."""
        pytest.fail("a subclass of TransportSuite gives the fixture build")

    @pytest.fixture
    def in_process(self) -> bool:
        """Return whether sender and receiver share one process; tests that kill a peer are then skipped."""
        return False

    @pytest.fixture
    def device(self) -> str:
        """Return the name of the device that samples are on, for both the sender and the receiver."""
        return "cpu"

    @pytest.fixture
    def play(self, build: Build, in_process: bool, device: str) -> Play:
        """Return a function that runs a test function on N ranks."""

        def play(part: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
            shared = build() if in_process else None
            stage = Stage(build if shared is None else lambda: shared, device)
            return run_ranks(part, world_size, stage, *args, in_process=in_process)

        return play

    @pytest.fixture
    def fail(self, build: Build, in_process: bool, device: str) -> Fail:
        """Return a function that runs a test with a fault in one rank, and returns a survivor's result."""
        if in_process:
            pytest.skip("both peers are in one process: neither can be killed or stopped alone")

        def fail(part: Callable[..., Any], fault: Fault, victim: int, world_size: int = 2) -> Any:
            stage = Stage(build, device)
            outcomes = watch_ranks(part, world_size, stage, faults={(victim, FAULT): fault})
            for outcome in outcomes:
                assert outcome.error is None, outcome.trace
            return next(outcome.value for outcome in outcomes if outcome.value is not None)

        return fail

    def test_a_sender_connects_by_a_printable_address(self, play: Play) -> None:
        """T1: the receiver's address is printable ASCII, and a sender can connect to it."""
        address = play(parts.connect_and_part, 2)[0]
        assert address.isascii()
        assert address.isprintable()

    @pytest.mark.parametrize(
        "other",
        [
            FeatureSchema(layers=(1, 4), hidden_size=16, dtype="float32"),
            FeatureSchema(layers=(1, 3, 8), hidden_size=32, dtype="float32"),
            FeatureSchema(layers=(1, 3, 8), hidden_size=16, dtype="bfloat16"),
        ],
        ids=["layers", "hidden_size", "dtype"],
    )
    def test_a_schema_mismatch_fails_at_connect(self, play: Play, other: FeatureSchema) -> None:
        """T1: a sender with another schema gets SchemaMismatch; the receiver accepts the next sender."""
        play(parts.connect_with_other_schema, 2, other)

    def test_an_address_where_nobody_listens_is_a_lost_peer(self, play: Play) -> None:
        """T1, T7: connecting after the receiver has closed raises PeerLost within the timeout."""
        play(parts.connect_too_late, 2)

    def test_memory_may_be_reused_once_the_ticket_is_done(self, play: Play) -> None:
        """T2: data written into a sample's memory after its ticket is done never reaches the receiver."""
        play(parts.overwrite_after_ticket, 2)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_samples_arrive_once_in_order_bit_for_bit(self, play: Play, dtype: str) -> None:
        """T3: samples of two concurrent senders, many times the window, arrive once, in order, bit for bit."""
        play(parts.stream, 3, dtype)

    def test_a_held_sample_stays_as_it_is(self, play: Play) -> None:
        """T4: a sample is valid until its release while others arrive; a second release raises ProtocolError."""
        play(parts.hold_one, 2)

    def test_a_send_beyond_the_window_waits_for_a_release(self, play: Play) -> None:
        """T5, T6: ``send`` raises DeadlineExceeded if the window is full; sent again, the sample arrives once."""
        play(parts.fill_window, 2)

    def test_the_window_bounds_all_senders_together(self, play: Play) -> None:
        """T5: bytes of the window that one sender uses are not available to the other."""
        play(parts.share_window, 3)

    def test_a_sample_that_fits_the_window_by_bytes_is_admitted(self, play: Play) -> None:
        """T5: a sample that fits by bytes is admitted, even if the free memory is fragmented."""
        play(parts.fragment_window, 2)

    def test_a_sample_larger_than_the_window_is_refused_at_once(self, play: Play) -> None:
        """T5: ``send`` raises ConfigError for too large a sample, and the sender still works."""
        play(parts.send_oversized, 2)

    def test_a_receive_that_timed_out_loses_nothing(self, play: Play) -> None:
        """T6: ``receive`` raises DeadlineExceeded at its deadline; a later sample is received."""
        play(parts.receive_early, 2)

    def test_a_stopped_sender_exceeds_the_deadline_of_receive(self, fail: Fail) -> None:
        """T6: if the sender is stopped, ``receive`` returns arrived samples, then raises DeadlineExceeded."""
        assert fail(endings.fault_in_sender, Fault.STOP, 1) == "DeadlineExceeded"

    def test_a_stopped_receiver_exceeds_the_deadline_of_send(self, fail: Fail) -> None:
        """T6: if the receiver is stopped, ``send`` raises DeadlineExceeded within its timeout."""
        assert fail(endings.fault_in_receiver, Fault.STOP, 0) == "DeadlineExceeded"

    def test_a_stopped_receiver_exceeds_the_deadline_of_connect(self, fail: Fail) -> None:
        """T6: if the receiver is stopped, ``connect`` raises DeadlineExceeded within its timeout."""
        assert fail(endings.fault_before_connect, Fault.STOP, 0) == "DeadlineExceeded"

    def test_a_killed_sender_is_lost_after_its_last_sample(self, fail: Fail) -> None:
        """T7: after a sender is killed, samples with a done ticket are received, then PeerLost is raised."""
        assert fail(endings.death_of_sender, Fault.KILL, 1) == "PeerLost"

    def test_a_killed_receiver_is_lost_to_a_sender_that_waits(self, fail: Fail) -> None:
        """T7: if the receiver is killed, a waiting ``send`` raises PeerLost within its timeout."""
        assert fail(endings.fault_in_receiver, Fault.KILL, 0) == "PeerLost"

    def test_a_sender_killed_while_it_waits_leaves_room_for_the_others(self, fail: Fail) -> None:
        """T7: ``receive`` raises PeerLost once for a killed sender; samples of the other sender still arrive."""
        assert fail(endings.fault_in_one_of_two, Fault.KILL, 1, 3) == "others go on"

    def test_a_closed_sender_is_lost_after_its_last_sample(self, play: Play) -> None:
        """T7: all samples of a closed sender are received; PeerLost is raised only if no other sender is left."""
        play(endings.close_sender, 3)

    def test_a_closed_receiver_completes_tickets_and_unblocks_senders(self, play: Play) -> None:
        """T7: if the receiver closes, open tickets end; a waiting and every later ``send`` raises PeerLost."""
        play(endings.close_receiver, 2)

    def test_flush_returns_when_every_ticket_is_done(self, play: Play) -> None:
        """T8: ``flush`` waits until every ticket is done, and raises DeadlineExceeded if one is not."""
        play(parts.flush, 2)

    def test_close_twice_leaves_nothing_behind(self, play: Play) -> None:
        """T9: on both sides, a second opening and closing leaves no descriptors, threads or shared mappings."""
        play(endings.come_and_go, 2)
