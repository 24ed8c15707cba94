"""TransportSuite: the contract of ``spec_core.transport`` as tests, by real processes where the transport has two.

::

    def build() -> Transport: ...              # at the top level of the test module

    class TestMyTransport(TransportSuite):
        @pytest.fixture
        def build(self):
            return build

Rank 0 receives, the other ranks send. The parts that they play are in ``transport_parts`` and ``transport_endings``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from spec_core.records import FeatureSchema
from spec_testing import transport_endings as endings
from spec_testing import transport_parts as parts
from spec_testing.conformance import ConformanceSuite
from spec_testing.processes import Fault, run_ranks, watch_ranks
from spec_testing.transport_stage import FAULT, Fail, Play, Stage

if TYPE_CHECKING:
    from collections.abc import Callable

    from spec_core.transport import Transport

    Build = Callable[[], Transport]


class TransportSuite(ConformanceSuite):
    """Tests of a transport; subclass it and give ``build``, the other fixtures have defaults."""

    @pytest.fixture
    def build(self) -> Build:
        """Return a top-level function ``() -> Transport``, which is called in every process."""
        pytest.fail("a subclass of TransportSuite gives the fixture build")

    @pytest.fixture
    def in_process(self) -> bool:
        """Return whether both ends share one Transport in one process; tests that kill a peer are skipped then."""
        return False

    @pytest.fixture
    def device(self) -> str:
        """Return the device that samples are on, on both sides."""
        return "cpu"

    @pytest.fixture
    def play(self, build: Build, in_process: bool, device: str) -> Play:
        """Return a function that runs a part on N ranks."""

        def play(part: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
            shared = build() if in_process else None
            stage = Stage(build if shared is None else lambda: shared, device)
            return run_ranks(part, world_size, stage, *args, in_process=in_process)

        return play

    @pytest.fixture
    def fail(self, build: Build, in_process: bool, device: str) -> Fail:
        """Return a function that runs a part in which one rank suffers a fault, and returns a survivor's result."""
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
        """T1: the address is printable ASCII, whatever else it is."""
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
        """T1: SchemaMismatch on the sender, naming both sides; the receiver goes on with the next sender."""
        play(parts.connect_with_other_schema, 2, other)

    def test_an_address_where_nobody_listens_is_a_lost_peer(self, play: Play) -> None:
        """T1, T7: connecting after the receiver has closed raises PeerLost within the timeout."""
        play(parts.connect_too_late, 2)

    def test_memory_may_be_reused_once_the_ticket_is_done(self, play: Play) -> None:
        """T2: what is written over a sample after its ticket never reaches the receiver."""
        play(parts.overwrite_after_ticket, 2)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_samples_arrive_once_in_order_bit_for_bit(self, play: Play, dtype: str) -> None:
        """T3: from two senders at a time, sizes mixed, many more bytes than the window."""
        play(parts.stream, 3, dtype)

    def test_a_held_sample_stays_as_it_is(self, play: Play) -> None:
        """T4: valid until released, whatever comes and goes meanwhile; released twice is a ProtocolError."""
        play(parts.hold_one, 2)

    def test_a_send_beyond_the_window_waits_for_a_release(self, play: Play) -> None:
        """T5, T6: it raises at its deadline, and the same sample, sent again, arrives exactly once."""
        play(parts.fill_window, 2)

    def test_the_window_bounds_all_senders_together(self, play: Play) -> None:
        """T5: bytes that one sender uses are not there for the other."""
        play(parts.share_window, 3)

    def test_a_sample_that_fits_the_window_by_bytes_is_admitted(self, play: Play) -> None:
        """T5: also when what is free lies between samples that are held."""
        play(parts.fragment_window, 2)

    def test_a_sample_larger_than_the_window_is_refused_at_once(self, play: Play) -> None:
        """T5: ConfigError, and the sender still works."""
        play(parts.send_oversized, 2)

    def test_a_receive_that_timed_out_loses_nothing(self, play: Play) -> None:
        """T6: DeadlineExceeded in time; the sample that comes later is received."""
        play(parts.receive_early, 2)

    def test_a_stopped_sender_exceeds_the_deadline_of_receive(self, fail: Fail) -> None:
        """T6: silence is not death: DeadlineExceeded in time, after what had arrived."""
        assert fail(endings.fault_in_sender, Fault.STOP, 1) == "DeadlineExceeded"

    def test_a_stopped_receiver_exceeds_the_deadline_of_send(self, fail: Fail) -> None:
        """T6: DeadlineExceeded in time."""
        assert fail(endings.fault_in_receiver, Fault.STOP, 0) == "DeadlineExceeded"

    def test_a_stopped_receiver_exceeds_the_deadline_of_connect(self, fail: Fail) -> None:
        """T6: DeadlineExceeded in time."""
        assert fail(endings.fault_before_connect, Fault.STOP, 0) == "DeadlineExceeded"

    def test_a_killed_sender_is_lost_after_its_last_sample(self, fail: Fail) -> None:
        """T7: what a ticket was done for is delivered, then PeerLost, in time."""
        assert fail(endings.death_of_sender, Fault.KILL, 1) == "PeerLost"

    def test_a_killed_receiver_is_lost_to_a_sender_that_waits(self, fail: Fail) -> None:
        """T7: PeerLost in time."""
        assert fail(endings.fault_in_receiver, Fault.KILL, 0) == "PeerLost"

    def test_a_sender_killed_while_it_waits_leaves_room_for_the_others(self, fail: Fail) -> None:
        """T7: PeerLost once, at its place; the other sender's stream goes on."""
        assert fail(endings.fault_in_one_of_two, Fault.KILL, 1, 3) == "others go on"

    def test_a_closed_sender_is_lost_after_its_last_sample(self, play: Play) -> None:
        """T7: what had arrived is delivered, then PeerLost; not while another sender is connected."""
        play(endings.close_sender, 3)

    def test_a_closed_receiver_completes_tickets_and_unblocks_senders(self, play: Play) -> None:
        """T7: no ticket stays open; a send that waits, and every later one, raises PeerLost."""
        play(endings.close_receiver, 2)

    def test_flush_returns_when_every_ticket_is_done(self, play: Play) -> None:
        """T8: and raises DeadlineExceeded while one is not."""
        play(parts.flush, 2)

    def test_close_twice_leaves_nothing_behind(self, play: Play) -> None:
        """T9: descriptors, threads and shared mappings, counted around a second life on both sides."""
        play(endings.come_and_go, 2)
