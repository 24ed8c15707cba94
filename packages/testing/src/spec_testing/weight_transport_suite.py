"""WeightTransportSuite tests the contract of spec_core.weight_transport (W1–W8), and whole updates.

::

    from spec_testing import BUCKET_BYTES, WeightTransportSuite, reference_backend

    def build() -> WeightTransport:
        return MyTransport(MyConfig(bucket_bytes=BUCKET_BYTES), reference_backend())

    class TestMyTransport(WeightTransportSuite):
        @pytest.fixture
        def build(self): return build

``build`` is a function at the top level of a module, because each process of a test calls it.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from spec_core import Manifest, WeightMedium, WeightTransport
from spec_core.errors import EngineError, RunError
from spec_kit.weight_sync.digest import tensor_entry
from spec_testing.conformance import ConformanceSuite
from spec_testing.limits import patient
from spec_testing.processes import Fault, Rank, run_ranks, watch_ranks
from spec_testing.resources import Resources
from spec_testing.weight_faults import PUSH_S, fault_in_publisher, fault_in_replica, publish_damaged
from spec_testing.weight_stage import (
    BUCKET_BYTES,
    FENCE,
    TARGET,
    WAIT_S,
    StagedReceiver,
    WeightStage,
    odd_weights,
    replica_of_other_rank,
    same_bytes,
    serve_receiver,
)

Build = Callable[[], WeightTransport]

LONG_S = patient(60.0)
SHORT_S = 1.0
ROUNDS = 3
BROKEN_UPDATE = 15
LATE_EVENTS = 4
"""Number of device resources that may remain after thirty updates. Some vendors destroy them late, as
torch-npu does with events of other processes. A leak would leave one for each update."""


class WeightTransportSuite(ConformanceSuite):
    """Tests of a weight transport.

    A subclass must define the fixture ``build``. The sender and each receiver run in processes of their own.
    """

    @pytest.fixture
    def build(self) -> Build:
        """Return a function that returns the transport, with buckets of ``BUCKET_BYTES``."""
        raise pytest.UsageError("a WeightTransportSuite needs a fixture 'build': () -> WeightTransport")

    @pytest.fixture
    def device(self) -> str:
        """Return the type of device that has the tensors; ``build`` selects the process's current device."""
        return "cpu"

    @pytest.fixture
    def build_sender(self, build: Build) -> Build:
        """Return a function that returns the publisher's transport; by default ``build``."""
        return build

    @pytest.fixture
    def num_receivers(self) -> int:
        """Return the number of ranks of a replica in tests with several ranks; 1 if there are too few devices."""
        return 2

    @pytest.fixture
    def stage(self, build: Build, device: str, build_sender: Build) -> WeightStage:
        """Return the WeightStage by which each process of a test builds its transport."""
        return WeightStage(build, device, build_sender)

    def test_w1_tensors_arrive_bit_for_bit(self, stage: WeightStage, num_receivers: int) -> None:
        """W1, W2, W3: every rank gets every tensor of each round, whatever its dtype, shape and size."""
        run_ranks(_round_trips, 1 + num_receivers, stage)

    def test_w4_receiver_to_which_nothing_is_sent_ends_at_its_deadline(self, stage: WeightStage) -> None:
        """W4: ``receive`` ends at its deadline if the sender sends nothing."""
        run_ranks(_sender_that_leaves, 2, stage)

    def test_w5_close_from_another_thread_ends_a_transfer(self, stage: WeightStage) -> None:
        """W5: if a rank hangs during an update, closing the publisher from another thread ends the update."""
        run_ranks(_close_while_a_rank_hangs, 2, stage)

    def test_w5_w7_thirty_updates_leave_nothing(self, stage: WeightStage) -> None:
        """W5, W7: after thirty updates no descriptors, threads, mappings or old weights are left.

        A closed publisher leaves nothing either. One of the updates fails halfway, and the next succeeds.
        """
        run_ranks(_thirty_updates, 2, stage)

    def test_w6_it_says_whether_it_can_be_used(self, stage: WeightStage) -> None:
        """W6, W8: ``probe`` returns, options have defaults, ``obstacle`` works for a rank of this process."""
        transport = stage.build()
        assert type(transport).probe().ok
        assert type(transport).Config.model_validate({}), "W8: a server opens the transport without options"
        location = transport.location(stage.device)
        assert location.isascii()
        assert isinstance(transport.obstacle(location, stage.device), str)
        assert isinstance(transport.medium(location, stage.device), WeightMedium)

    def test_damage_is_never_served(self, stage: WeightStage) -> None:
        """If a tensor is damaged in a transfer, the old version is still served, and the next update succeeds."""
        run_ranks(publish_damaged, 2, stage)

    def test_rank_that_is_slow_ends_at_the_deadline(self, stage: WeightStage) -> None:
        """W4, U7: an update to a slow rank ends at its deadline on both sides; the next update succeeds."""
        run_ranks(_deadline_while_a_rank_hangs, 2, stage)

    @pytest.mark.parametrize("point", ["load 2", "before swap 2", "after swap 2"])
    def test_killed_rank_leaves_the_others_of_one_version(self, stage: WeightStage, point: str) -> None:
        """U7, U8: if one of two replicas dies, the other commits, and takes later updates, too."""
        outcomes = watch_ranks(fault_in_replica, 4, stage, WAIT_S, faults={(1, point): Fault.KILL})
        assert [outcome.trace for outcome in outcomes] == [""] * 4

    def test_stopped_rank_leaves_the_others_of_one_version(self, stage: WeightStage) -> None:
        """W4, U7: if one of two replicas is stopped, the other commits after the deadline; updates go on."""
        outcomes = watch_ranks(fault_in_replica, 4, stage, PUSH_S, faults={(1, "load 2"): Fault.STOP})
        assert [outcome.trace for outcome in outcomes] == [""] * 4

    @pytest.mark.parametrize("point", ["send 2", "commit 2"])
    def test_killed_publisher_leaves_the_old_version(self, stage: WeightStage, point: str) -> None:
        """U6, U7: if the publisher is killed, the rank aborts; a publisher with a higher fence then succeeds."""
        outcomes = watch_ranks(fault_in_publisher, 3, stage, faults={(0, point): Fault.KILL})
        assert [outcome.trace for outcome in outcomes] == [""] * 3


def _manifest(version: int) -> Manifest:
    entries = tuple(tensor_entry(name, tensor) for name, tensor in odd_weights(version).items())
    return Manifest(group="suite", version=version, fence=FENCE, target=TARGET, tensors=entries)


class _Mail:
    """Exchanges values between the ranks of a test, with a queue for each sender."""

    def __init__(self, me: Rank) -> None:
        self._me = me
        self._waiting: defaultdict[int, deque[Any]] = defaultdict(deque)

    def send(self, value: Any) -> None:
        self._me.publish((self._me.rank, value))

    def take(self, rank: int) -> Any:
        """Wait for the next value that rank ``rank`` has sent, and return it."""
        while not self._waiting[rank]:
            sender, value = self._me.receive()
            self._waiting[sender].append(value)
        return self._waiting[rank].popleft()


def _round_trips(me: Rank, stage: WeightStage) -> None:
    """Send tensors from rank 0 to all others and compare them.

    New memory is filled with a pattern, so that missing bytes are noticed.
    """
    torch.use_deterministic_algorithms(True)
    transport = stage.build() if me.rank else stage.build_publishers()
    mail = _Mail(me)
    device = stage.device
    receivers = range(1, me.world_size)
    for version in range(ROUNDS):
        manifest = _manifest(version)
        weights = stage.weights(version)
        deadline = time.monotonic() + LONG_S
        if me.rank == 0:
            addresses = [mail.take(rank) for rank in receivers]
            with transport.sender(manifest, weights, addresses, device, "replica") as sender:
                mail.send(sender.open(deadline))
                sender.send(deadline)
                assert [mail.take(rank) for rank in receivers] == ["done"] * len(receivers)
            continue
        with transport.receiver(manifest, device, BUCKET_BYTES) as receiver:
            mail.send(receiver.address)
            arrived = {
                name: tensor.clone() for name, tensor in receiver.receive(mail.take(0)[me.rank - 1], deadline)
            }
        assert sorted(arrived) == sorted(weights)
        assert [name for name in weights if not same_bytes(arrived[name], weights[name])] == []
        mail.send("done")


def _sender_that_leaves(me: Rank, stage: WeightStage) -> None:
    """Open the sender on rank 0 and send nothing; other ranks expect DeadlineExceeded."""
    transport = stage.build() if me.rank else stage.build_publishers()
    manifest = _manifest(1)
    mail = _Mail(me)
    device = stage.device
    if me.rank == 0:
        address = mail.take(1)
        with transport.sender(manifest, stage.weights(1), [address], device, "replica") as sender:
            mail.send(sender.open(time.monotonic() + LONG_S))
            mail.take(1)
        return
    with transport.receiver(manifest, device, BUCKET_BYTES) as receiver:
        mail.send(receiver.address)
        sender_address = mail.take(0)[0]
        started = time.monotonic()
        try:
            arrived = dict(receiver.receive(sender_address, started + SHORT_S))
        except RunError:
            assert time.monotonic() - started < LONG_S / 2
        else:  # a transport whose sender has written all tensors when it opens
            assert len(arrived) == len(manifest.tensors)
    mail.send("done")


def _close_while_a_rank_hangs(me: Rank, stage: WeightStage) -> None:
    if me.rank == 1:
        serve_receiver(me, StagedReceiver(stage, stage.build()))
        return
    with replica_of_other_rank(me) as replica:
        publisher = stage.publisher()
        publisher.add("stuck", replica).result(LONG_S)
        pushed = publisher.publish(1, stage.weights(1), timeout_s=LONG_S)
        while not replica.ask("is_held"):
            assert not pushed.done()
            time.sleep(0.02)
        started = time.monotonic()
        publisher.close()
        assert time.monotonic() - started < LONG_S / 2
        assert pushed.cancelled() or not pushed.result(0).committed
        replica.ask("let_go")
        assert replica.ask("serves", 0)


def _deadline_while_a_rank_hangs(me: Rank, stage: WeightStage) -> None:
    if me.rank == 1:
        serve_receiver(me, StagedReceiver(stage, stage.build()))
        return
    with replica_of_other_rank(me) as replica, stage.publisher() as publisher:
        publisher.add("slow", replica).result(LONG_S)
        started = time.monotonic()
        report = publisher.publish(1, stage.weights(1), timeout_s=SHORT_S).result(LONG_S)
        assert SHORT_S * 0.9 < time.monotonic() - started < LONG_S / 2
        assert not report.committed
        assert replica.ask("serves", 0)
        assert replica.status().result(LONG_S).state == "aborted"
        replica.ask("let_go")
        assert publisher.publish(2, stage.weights(2)).result(LONG_S).committed
        assert replica.ask("serves", 2)


def _thirty_updates(me: Rank, stage: WeightStage) -> None:
    if me.rank == 1:
        serve_receiver(me, StagedReceiver(stage, stage.build(), _fail_once))
        return
    with replica_of_other_rank(me) as replica:
        with stage.publisher() as publisher:
            publisher.add("one", replica).result(LONG_S)
            first = stage.weights(1)
            old = weakref.ref(first["cut"])
            first_is_on_host = first["cut"].is_cpu
            assert publisher.publish(1, first).result(LONG_S).committed
            del first
            before = [stage.resources(), replica.ask("resources")]
            for version in range(2, 32):
                report = publisher.publish(version, stage.weights(version)).result(LONG_S)
                assert report.committed == (version != BROKEN_UPDATE), report
            assert replica.ask("serves", 31)
            num_late = 0 if first_is_on_host else LATE_EVENTS
            _check_no_more([stage.resources(), replica.ask("resources")], before, num_late)
            assert old() is None
        with stage.publisher(FENCE + 1) as later:
            later.add("one", replica).result(LONG_S)
            assert later.publish(32, stage.weights(32)).result(LONG_S).committed
            _check_no_more([stage.resources(), replica.ask("resources")], before, num_late)


def _fail_once(point: str) -> None:
    if point == f"load {BROKEN_UPDATE}":
        raise EngineError("planted")


def _check_no_more(after: Sequence[Resources], before: Sequence[Resources], num_late: int) -> None:
    for then, now in zip(before, after, strict=True):
        assert all(left <= had + num_late for had, left in zip(then, now, strict=True)), (then, now)
