"""WeightTransportSuite: the contract of spec_core.weight_transport (W1–W6) as tests, alone and in whole updates.

::

    from spec_core.testing.weight_stage import BUCKET_BYTES

    def build() -> WeightTransport:
        return MyTransport(MyConfig(bucket_bytes=BUCKET_BYTES), reference_backend())

    class TestMyTransport(WeightTransportSuite):
        @pytest.fixture
        def build(self): return build

``build`` is a function at the top level of a module: it is called in processes of its own.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

import pytest
import torch

from spec_core.errors import RunError
from spec_core.testing.conformance import ConformanceSuite
from spec_core.testing.processes import Fault, Rank, run_ranks, watch_ranks
from spec_core.testing.resources import settled_resources
from spec_core.testing.weight_faults import (
    FENCE,
    fault_in_publisher,
    fault_in_replica,
    publish_damaged,
    publisher_of,
    replica_of,
)
from spec_core.testing.weight_stage import TARGET, ToySlot, odd_weights, same_bytes
from spec_core.weight_manifest import Manifest
from spec_core.weight_sync.digest import tensor_entry

if TYPE_CHECKING:
    from collections.abc import Callable

    from spec_core.weight_transport import WeightTransport

    Build = Callable[[], WeightTransport]

LONG_S, SHORT_S = 20.0, 1.0
ROUNDS = 3


class WeightTransportSuite(ConformanceSuite):
    """Check a weight transport by the fixture ``build``; ranks are on ``device``."""

    @pytest.fixture
    def build(self) -> Build:
        """A function that returns the transport, with buckets of ``BUCKET_BYTES``."""
        raise pytest.UsageError("a WeightTransportSuite needs a fixture 'build': () -> WeightTransport")

    def test_w1_tensors_arrive_bit_for_bit(self, build: Build) -> None:
        """W1, W2, W3: two ranks get every tensor of each round, whatever its dtype, shape and size."""
        run_ranks(_round_trips, 3, build)

    def test_w4_receiver_to_which_nothing_is_sent_ends_at_its_deadline(self, build: Build) -> None:
        """W4: it knows the sender's address, but nothing comes from there."""
        run_ranks(_sender_that_leaves, 2, build)

    def test_w5_close_from_another_thread_ends_a_transfer(self, build: Build) -> None:
        """W5: an update in which a rank hangs ends when its publisher closes."""
        slot_entered, let_go = threading.Event(), threading.Event()

        def hang(point: str) -> None:
            if point.startswith("load"):
                slot_entered.set()
                let_go.wait(LONG_S)

        slot = ToySlot(odd_weights(0), reach=hang)
        with replica_of(build, slot) as (_, replica):
            publisher = publisher_of(build)
            publisher.add("stuck", replica).result(LONG_S)
            pushed = publisher.publish(1, odd_weights(1), timeout_s=LONG_S)
            assert slot_entered.wait(LONG_S)
            threading.Timer(SHORT_S / 4, let_go.set).start()
            started = time.monotonic()
            publisher.close()
            assert time.monotonic() - started < LONG_S / 2
            assert pushed.cancelled() or not pushed.result(0).committed
        assert slot.serves(odd_weights(0))

    def test_w5_thirty_updates_leave_nothing(self, build: Build) -> None:
        """W5: no descriptor, no thread, no mapping and no weights of an older version stay."""
        slot = ToySlot(odd_weights(0))
        with replica_of(build, slot) as (_, replica), publisher_of(build) as publisher:
            publisher.add("one", replica).result(LONG_S)
            first = odd_weights(1)
            old = weakref.ref(first["cut"])
            assert publisher.publish(1, first).result(LONG_S).committed
            del first
            before = settled_resources()
            for version in range(2, 32):
                report = publisher.publish(version, odd_weights(version)).result(LONG_S)
                assert report.committed, report
            assert slot.serves(odd_weights(31))
            assert settled_resources() == before
            assert old() is None

    def test_w6_it_says_whether_it_can_be_used(self, build: Build) -> None:
        """W6: the probe answers, and a rank of this very process is reached or refused with a reason."""
        transport = build()
        assert type(transport).probe().ok
        place = transport.place(torch.device("cpu"))
        assert place.isascii()
        assert isinstance(transport.obstacle(place, torch.device("cpu")), str)

    def test_damage_is_never_served(self, build: Build) -> None:
        """Whatever a tensor suffers on its way, the old version serves, and the next update succeeds."""
        publish_damaged(build)

    def test_rank_that_is_slow_ends_at_the_deadline(self, build: Build) -> None:
        """W4, U7: the update ends at its deadline on both sides; the old version serves, the next update succeeds."""
        let_go = threading.Event()

        def wait(point: str) -> None:
            if point == "load 1":
                let_go.wait(LONG_S)

        slot = ToySlot(odd_weights(0), reach=wait)
        with replica_of(build, slot) as (receiver, replica), publisher_of(build) as publisher:
            publisher.add("slow", replica).result(LONG_S)
            started = time.monotonic()
            report = publisher.publish(1, odd_weights(1), timeout_s=SHORT_S).result(LONG_S)
            assert SHORT_S * 0.9 < time.monotonic() - started < 4 * SHORT_S
            assert not report.committed
            assert slot.serves(odd_weights(0))
            assert receiver.status().state == "aborted"
            let_go.set()
            assert publisher.publish(2, odd_weights(2)).result(LONG_S).committed
            assert slot.serves(odd_weights(2))

    @pytest.mark.parametrize("point", ["load 2", "spare 2", "before swap 2", "after swap 2"])
    def test_killed_rank_leaves_the_others_of_one_version(self, build: Build, point: str) -> None:
        """U7, U8: one of two replicas dies; the other serves the old version, and what follows goes on without it."""
        outcomes = watch_ranks(fault_in_replica, 3, build, faults={(1, point): Fault.KILL}, timeout_s=LONG_S)
        assert [outcome.trace for outcome in outcomes] == ["", "", ""]

    def test_stopped_rank_leaves_the_others_of_one_version(self, build: Build) -> None:
        """W4, U7: as for one that is killed, once the deadline has passed."""
        outcomes = watch_ranks(
            fault_in_replica, 3, build, faults={(1, "load 2"): Fault.STOP}, timeout_s=LONG_S
        )
        assert [outcome.trace for outcome in outcomes] == ["", "", ""]

    @pytest.mark.parametrize("point", ["send 2", "commit 2"])
    def test_killed_publisher_leaves_the_old_version(self, build: Build, point: str) -> None:
        """U6, U7: the rank aborts by itself; the next publisher, of a higher fence, succeeds without a restart."""
        outcomes = watch_ranks(
            fault_in_publisher, 3, build, faults={(0, point): Fault.KILL}, timeout_s=LONG_S
        )
        assert [outcome.trace for outcome in outcomes] == ["", "", ""]


def _manifest(version: int) -> Manifest:
    entries = tuple(tensor_entry(name, tensor) for name, tensor in odd_weights(version).items())
    return Manifest(group="suite", version=version, fence=FENCE, target=TARGET, tensors=entries)


class _Mail:
    """Values between the ranks of a test, kept apart by who has published them."""

    def __init__(self, me: Rank) -> None:
        self._me = me
        self._waiting: defaultdict[int, deque[Any]] = defaultdict(deque)

    def send(self, value: Any) -> None:
        self._me.publish((self._me.rank, value))

    def take(self, rank: int) -> Any:
        """Return the next value of that rank."""
        while not self._waiting[rank]:
            sender, value = self._me.receive()
            self._waiting[sender].append(value)
        return self._waiting[rank].popleft()


def _round_trips(me: Rank, build: Build) -> None:
    """Rank 0 sends, the others receive; new memory is filled, so that what does not arrive shows."""
    torch.use_deterministic_algorithms(True)
    transport, device, mail = build(), torch.device("cpu"), _Mail(me)
    receivers = range(1, me.world_size)
    for version in range(ROUNDS):
        manifest, weights = _manifest(version), odd_weights(version)
        deadline = time.monotonic() + LONG_S
        if me.rank == 0:
            addresses = [mail.take(rank) for rank in receivers]
            with transport.sender(manifest, weights, addresses, device) as sender:
                mail.send(sender.open(deadline))
                sender.send(deadline)
                assert [mail.take(rank) for rank in receivers] == ["done"] * len(receivers)
            continue
        with transport.receiver(manifest, device) as receiver:
            mail.send(receiver.address)
            arrived = {
                name: tensor.clone() for name, tensor in receiver.receive(mail.take(0)[me.rank - 1], deadline)
            }
        assert sorted(arrived) == sorted(weights)
        assert [name for name in weights if not same_bytes(arrived[name], weights[name])] == []
        mail.send("done")


def _sender_that_leaves(me: Rank, build: Build) -> None:
    """Rank 0 opens its end and sends nothing."""
    transport, manifest, device, mail = build(), _manifest(1), torch.device("cpu"), _Mail(me)
    if me.rank == 0:
        address = mail.take(1)
        with transport.sender(manifest, odd_weights(1), [address], device) as sender:
            mail.send(sender.open(time.monotonic() + LONG_S))
            mail.take(1)
        return
    with transport.receiver(manifest, device) as receiver:
        mail.send(receiver.address)
        sender_address = mail.take(0)[0]
        started = time.monotonic()
        try:
            arrived = dict(receiver.receive(sender_address, started + SHORT_S))
        except RunError:
            assert time.monotonic() - started < 3 * SHORT_S
        else:  # a transport whose sender has written all when it opens
            assert len(arrived) == len(manifest.tensors)
    mail.send("done")
