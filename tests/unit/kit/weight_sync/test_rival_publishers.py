"""Publishers one after the other, and at the same moment: the later one is committed everywhere."""

import contextlib
import threading
import time

import pytest

from spec_core.errors import DeadlineExceeded, PeerLost
from spec_kit.weight_sync import Publisher, ReceiverReplica, UpdateReceiver
from spec_kit.weight_sync.messages import UpdateChannel
from spec_kit.weight_sync.publisher_link import ExpectedRanks
from spec_testing.weight_stage import TARGET, ToySlot, odd_weights

from .fleet import LONG_S, break_once, file_transports


@pytest.mark.parametrize("method", ["load", "swap"])
def test_first_push_that_fails_is_followed_by_others(alone, monkeypatch, method):
    break_once(alone.slots[0], monkeypatch, method)
    assert not alone.publish(9).committed
    assert alone.slots[0].serves(odd_weights(8))
    assert alone.publish(10).committed
    assert alone.slots[0].serves(odd_weights(10))


def test_first_version_that_is_reverted_is_followed_by_others(alone):
    alone.publish(9)
    assert alone.publisher.revert().result(LONG_S)["0"].state == "reverted"
    assert alone.slots[0].serves(odd_weights(8))
    assert alone.publish(10).committed


def test_rank_that_gives_up_before_it_has_greeted_ends_the_push(alone, monkeypatch):
    """The publisher learns of it at once: this push has an hour."""
    (receiver,), connect = alone.receivers, UpdateChannel.connect

    def connect_late(address, deadline):
        receiver.abort(receiver.status().update)
        return connect(address, deadline)

    with monkeypatch.context() as patch:
        patch.setattr(UpdateChannel, "connect", connect_late)
        report = alone.publish(9, timeout_s=3600)
    assert "rank 0 of replica '0' has gone" in report.replicas["0"].reason
    assert alone.slots[0].serves(odd_weights(8))
    assert alone.publish(10).committed


def test_rank_that_cannot_reach_the_publisher_says_why(alone, monkeypatch):
    """The publisher learns of it when the time of the push is over; here that is as soon as the rank gives up."""

    def connect(address, deadline):
        raise PeerLost("the publisher has gone: Connection refused")

    def wait(ranks, deadline):
        while alone.receivers[0].status().state != "aborted":
            time.sleep(0.01)
        raise DeadlineExceeded("ranks [0] did not connect")

    monkeypatch.setattr(UpdateChannel, "connect", connect)
    monkeypatch.setattr(ExpectedRanks, "wait", wait)
    reason = alone.publish(9).replicas["0"].reason
    assert reason == "ranks [0] did not connect (the publisher has gone: Connection refused)"


def test_fence_is_one_more_than_any_that_replicas_have_seen(alone):
    """A clock that runs ahead locks nobody out: here that of a trainer of an earlier release."""
    ahead_ns = time.time_ns() + 3600 * 10**9
    with (
        Publisher(file_transports(), TARGET, fence=ahead_ns) as ahead,
        Publisher(file_transports(), TARGET) as later,
    ):
        ahead.add("0", ReceiverReplica(alone.receivers[0])).result(LONG_S)
        assert ahead.publish(9, odd_weights(9)).result(LONG_S).committed
        later.add("0", ReceiverReplica(alone.receivers[0])).result(LONG_S)
        assert later.publish(10, odd_weights(10)).result(LONG_S).committed
        report = ahead.publish(11, odd_weights(11)).result(LONG_S)
        assert "publishes here; the one with fence" in report.replicas["0"].reason
    assert alone.slots[0].serves(odd_weights(10))


def test_of_two_that_begin_at_the_same_moment_one_is_the_later_everywhere(fleet):
    with contextlib.ExitStack() as stack:
        rivals = [stack.enter_context(Publisher(file_transports(), TARGET)) for _ in range(2)]
        for rival in rivals:
            for index, receiver in enumerate(fleet.receivers):
                rival.add(str(index), ReceiverReplica(receiver)).result(LONG_S)
        for number, rival in enumerate(rivals):  # each is the first, then the second
            rival.publish(1 + number, odd_weights(1 + number)).result(LONG_S)
        earlier, later = sorted(rivals, key=lambda rival: rival.fence)
        assert later.publish(3, odd_weights(3)).result(LONG_S).committed
        report = earlier.publish(4, odd_weights(4)).result(LONG_S)
        reasons = {outcome.reason for outcome in report.replicas.values()}
        assert reasons == {
            f"a trainer with fence {later.fence} publishes here; the one with fence {earlier.fence} is over"
        }
    assert fleet.versions() == [3] * 3


class Held(ReceiverReplica):
    """Gives the orders of a push when it may go on; until then its publisher has only asked for the version."""

    def __init__(self, receiver):
        super().__init__(receiver)
        self.asked, self.may_go_on, self.given = threading.Event(), threading.Event(), threading.Event()

    def call(self, name, argument):
        if name != "prepare":
            return super().call(name, argument)
        self.asked.set()
        assert self.may_go_on.wait(LONG_S)
        answer = super().call(name, argument)
        self.given.set()
        return answer


class Interrupted(ReceiverReplica):
    """Lets something else happen before a call, or after it and before its answer."""

    def __init__(self, receiver, moment, then):
        super().__init__(receiver)
        self._moment, self._then = moment, then

    def call(self, name, argument):
        if self._moment == f"before {name}":
            self._then()
        answer = super().call(name, argument)
        if self._moment == f"after {name}":
            self._then()
        return answer


@pytest.mark.parametrize("moment", ["before prepare", "after prepare", "before commit", "after commit", ""])
def test_of_two_that_push_at_the_same_moment_the_later_is_committed_everywhere(fleet, moment):
    """Both have taken the same version; the later's orders come to all replicas at one moment of the earlier's push.

    The earlier may have committed it at some of them, and have to learn at the others that it is over.
    """
    with contextlib.ExitStack() as stack:
        rivals = [stack.enter_context(Publisher(file_transports(), TARGET)) for _ in range(2)]
        earlier, later = sorted(rivals, key=lambda rival: rival._random_bits)
        held = [Held(receiver) for receiver in fleet.receivers]

        def interrupt():
            for replica in held:
                replica.may_go_on.set()
            assert all(replica.given.wait(LONG_S) for replica in held)

        for name, receiver, replica in zip("012", fleet.receivers, held, strict=True):
            here = Interrupted(receiver, moment, interrupt) if name == "1" else ReceiverReplica(receiver)
            earlier.add(name, here).result(LONG_S)
            later.add(name, replica).result(LONG_S)
        pushed = later.publish(None, odd_weights(2), timeout_s=LONG_S)
        assert all(replica.asked.wait(LONG_S) for replica in held)
        lost = earlier.publish(None, odd_weights(1), timeout_s=LONG_S).result(LONG_S)
        interrupt()
        won = pushed.result(LONG_S)
        assert (won.committed, {outcome.state for outcome in won.replicas.values()}) == (True, {"committed"})
        assert all(slot.serves(odd_weights(2)) for slot in fleet.slots)
        assert lost.version == 1
        assert won.version in ((2,) if lost.committed else (1, 2))
        reason = (
            f"a trainer with fence {later.fence} publishes here; the one with fence {earlier.fence} is over"
        )
        for outcome in lost.replicas.values():
            assert reason in outcome.reason or outcome.state == "committed"


def test_version_that_is_taken_at_one_replica_is_committed_at_none(fleet):
    """It would name two drafts."""
    with Publisher(file_transports(), TARGET) as other:
        other.add("0", ReceiverReplica(fleet.receivers[0])).result(LONG_S)
        assert other.publish(1, odd_weights(9)).result(LONG_S).committed
    with Publisher(file_transports(), TARGET) as later:
        for index, receiver in enumerate(fleet.receivers):
            later.add(str(index), ReceiverReplica(receiver)).result(LONG_S)
        report = later.publish(1, odd_weights(1)).result(LONG_S)
        assert {outcome.state for outcome in report.replicas.values()} == {"aborted"}
        assert all("version 1 is another draft here" in out.reason for out in report.replicas.values())
    assert fleet.versions() == [1, None, None]


def test_replica_that_is_added_late_is_taken_over_and_no_other_with_it(fleet):
    fleet.publish(1)
    late = ToySlot(odd_weights(0))
    with UpdateReceiver(late, file_transports()) as receiver:
        for version in (1, 2, 3):
            with Publisher(file_transports(), TARGET) as other:
                other.add("late", ReceiverReplica(receiver)).result(LONG_S)
                other.add("0", ReceiverReplica(fleet.receivers[0])).result(LONG_S)
                assert other.publish(version, odd_weights(version)).result(LONG_S).committed
        fleet.publisher.add("late", ReceiverReplica(receiver)).result(LONG_S)
        assert late.serves(odd_weights(1))
        report = fleet.publish(4)
        assert "publishes here; the one with fence" in report.replicas["0"].reason
        assert report.replicas["late"].state == "committed"
