"""A publisher commits wherever it can, brings the replicas to one version, and says who is at fault."""

import contextlib
import math
import socket
import threading
import time
from concurrent.futures import Future

import pytest
import torch

from spec_core import ServingStatus, UpdateId
from spec_core.errors import ConfigError, EngineError
from spec_kit.weight_sync import Publisher, ReceiverReplica, UpdateReceiver
from spec_kit.weight_sync.messages import Greeting
from spec_kit.weight_sync.publisher_link import PublisherLink
from spec_processes.sockets.addresses import parse_address
from spec_processes.sockets.framed_socket import FramedSocket
from spec_testing.limits import patient
from spec_testing.reference import reference_backend
from spec_testing.weight_stage import TARGET, ToySlot, odd_weights
from spec_weight_transports.file import FileConfig, FileTransport

from .fleet import LONG_S, SHORT_S, break_once, file_transports


class Noting(FileTransport):
    """Notes what it is to release."""

    def __init__(self):
        super().__init__(FileConfig(), reference_backend())
        self.released = []

    def forget(self, replica):
        self.released.append(replica)

    def close(self):
        self.released.append("all")
        super().close()


@pytest.mark.parametrize(("method", "state"), [("load", "aborted"), ("swap", "quarantined")])
def test_each_of_three_commits_for_itself(fleet, monkeypatch, method, state):
    fleet.publish(1)
    break_once(fleet.slots[1], monkeypatch, method)
    report = fleet.publish(2)
    assert report.committed
    assert [report.replicas[name].state for name in "012"] == ["committed", state, "committed"]
    assert "planted" in report.replicas["1"].reason
    assert ("commit" in report.replicas["1"].seconds) == (method == "swap")  # asked only if it has received
    fleet.settle()  # the one at fault is repaired: all serve the same
    assert fleet.versions() == [2] * 3
    assert fleet.publisher.committed == 2
    assert fleet.publish(3).committed
    assert fleet.versions() == [3] * 3


@pytest.mark.parametrize("method", ["load", "swap"])
def test_a_version_that_no_replica_commits_is_not_the_newest(fleet, monkeypatch, method):
    fleet.publish(1)
    for slot in fleet.slots:
        break_once(slot, monkeypatch, method)
    assert not fleet.publish(2).committed
    fleet.settle()
    assert fleet.versions() == [1] * 3
    assert all(slot.serves(odd_weights(1)) for slot in fleet.slots)
    assert fleet.publisher.committed == 1


def test_report_has_times_and_sizes(fleet):
    report = fleet.publish(1)
    assert report.num_bytes == sum(tensor.nbytes for tensor in odd_weights(1).values())
    assert {"manifest", "transfer", "commit", "total"} <= report.seconds.keys()
    outcome = report.replicas["0"]
    assert (outcome.state, outcome.transport, outcome.reason) == ("committed", "file", "")
    own, ranks = ({"prepare", "send", "load", "commit", "confirm"}, {"receive", "swap"})
    assert outcome.seconds.keys() == own | ranks


def test_versions_must_rise(fleet):
    fleet.publish(2)
    with pytest.raises(ConfigError, match="version 2 is not higher than 2"):
        fleet.publish(2)


def test_publish_returns_before_anything_is_sent(fleet):
    entered, go = threading.Event(), threading.Event()
    fleet.slots[0]._reach = lambda point: (entered.set(), go.wait(LONG_S))
    pushed = fleet.publisher.publish(1, odd_weights(1))
    assert entered.wait(LONG_S)
    assert not pushed.done()
    go.set()
    assert pushed.result(LONG_S).committed


def test_slow_callback_holds_nothing_up(fleet):
    go, ended = threading.Event(), []
    for version in (1, 2):
        pushed = fleet.publisher.publish(version, odd_weights(version))
        pushed.add_done_callback(lambda _, version=version: (go.wait(LONG_S), ended.append(version)))
    while fleet.versions() != [2] * 3:
        time.sleep(0.01)
    assert ended == []
    go.set()
    fleet.settle()
    while ended != [1, 2]:
        time.sleep(0.01)


def test_late_replica_catches_up(fleet):
    fleet.publish(1)
    slot = ToySlot(odd_weights(0))
    with UpdateReceiver(slot, file_transports()) as receiver:
        outcome = fleet.publisher.add("late", ReceiverReplica(receiver)).result(LONG_S)
        assert outcome.state == "committed"
        assert slot.serves(odd_weights(1))
        with pytest.raises(ConfigError, match="known already"):
            fleet.publisher.add("late", ReceiverReplica(receiver)).result(LONG_S)


def test_revert_goes_back_to_the_version_before_where_a_replica_has_none(fleet):
    fleet.publish(1)
    fleet.publish(2)
    late = ToySlot(odd_weights(0))
    with UpdateReceiver(late, file_transports()) as receiver:
        fleet.publisher.add("late", ReceiverReplica(receiver)).result(LONG_S)
        outcomes = fleet.publisher.revert().result(LONG_S)
        assert [outcomes[name].state for name in "012"] == ["reverted"] * 3
        # What the late one served before version 2 is none of the publisher's: version 1 is pushed to it.
        assert outcomes["late"].state == "quarantined"
        fleet.settle()
        assert late.serves(odd_weights(1))
        assert fleet.versions() == [1] * 3
        assert fleet.publisher.committed == 1


def test_nothing_to_revert(fleet):
    with pytest.raises(ConfigError, match="none can be reverted"):
        fleet.publisher.revert().result(LONG_S)


def test_groups_are_independent():
    with contextlib.ExitStack() as stack:
        slots = {group: ToySlot(odd_weights(0)) for group in ("a", "b")}
        for number, (group, slot) in enumerate(slots.items(), start=1):
            receiver = stack.enter_context(UpdateReceiver(slot, file_transports(), group=group))
            publisher = stack.enter_context(Publisher(file_transports(), TARGET, group=group))
            publisher.add("one", ReceiverReplica(receiver)).result(LONG_S)
            assert publisher.publish(number, odd_weights(number)).result(LONG_S).committed
        assert slots["a"].serves(odd_weights(1))
        assert slots["b"].serves(odd_weights(2))


class Deaf(ReceiverReplica):
    """Says that it prepares, but one of its ranks never connects."""

    num_ranks = 2


def test_rank_that_does_not_connect_is_named(fleet):
    fleet.publisher.add("deaf", Deaf(UpdateReceiver(ToySlot(odd_weights(0)), file_transports()))).result(
        LONG_S
    )
    report = fleet.publish(1, timeout_s=patient(4.0))
    assert report.replicas["deaf"].state == "aborted"
    assert "ranks [1] of replica 'deaf' did not connect" in report.replicas["deaf"].reason
    assert fleet.versions() == [1] * 3


class Silent(ReceiverReplica):
    """Answers no call."""

    def prepare(self, order):
        return Future()

    def status(self):
        return Future()


def test_replica_that_does_not_answer_is_named_and_then_left_out(fleet):
    fleet.publish(1)
    fleet.publisher.add("silent", Silent(fleet.receivers[0]), timeout_s=SHORT_S).result(LONG_S)
    assert fleet.publisher.serving(SHORT_S)["silent"].state == "quarantined"
    report = fleet.publish(2)
    assert report.committed
    assert report.replicas["silent"].state == "quarantined"


@pytest.mark.parametrize("change", [{"token": "wrong"}, {"replica": "two"}, {"rank": 1}, {"rank": -1}])
def test_intruder_learns_nothing_and_disturbs_nobody(change):
    update = UpdateId(group="g", fence=1, number=1)
    with PublisherLink("127.0.0.1:0") as link, link.expect(update, "one", 1) as ranks:

        def connect(**changes):
            words = {"token": ranks.token, "replica": "one", "rank": 0, **changes}
            end = socket.create_connection(parse_address(link.address), LONG_S)
            FramedSocket(end, 100).send(Greeting(update=update, locations={}, **words).encode())
            return end

        with contextlib.closing(connect(**change)) as intruder:
            assert intruder.recv(1) == b""
        with contextlib.closing(connect()):
            (rank,) = ranks.wait(time.monotonic() + LONG_S)
            assert rank.rank == 0


def test_closed_publisher_takes_no_push(fleet):
    fleet.publisher.close()
    with pytest.raises(RuntimeError):
        fleet.publisher.publish(1, odd_weights(1))


def test_replica_that_raises_is_at_fault(fleet):
    class Broken(ReceiverReplica):
        def prepare(self, order):
            future = Future()
            future.set_exception(EngineError("no room for a spare copy"))
            return future

        def abort(self, update):  # of its own: the receiver is that of replica 0
            return self.status()

    fleet.publisher.add("broken", Broken(fleet.receivers[0])).result(LONG_S)
    assert fleet.publish(1).replicas["broken"].reason == "no room for a spare copy"
    assert fleet.versions() == [1] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_draft_with_nan_or_infinity_is_sent_nowhere(fleet, dtype, value):
    weights = odd_weights(1) | {"left": torch.full((5, 5), value).to(dtype)}
    report = fleet.publisher.publish(1, weights).result(LONG_S)
    assert not report.committed
    assert {outcome.state for outcome in report.replicas.values()} == {"aborted"}
    assert {outcome.reason[:40] for outcome in report.replicas.values()} == {
        "left holds values that are not finite (N"
    }
    assert [receiver.status() for receiver in fleet.receivers] == [ServingStatus()] * 3
    assert fleet.publish(2).committed


class LosesAnAnswer(ReceiverReplica):
    """Commits, and answers with an error that nobody foresaw."""

    def commit(self, update):
        super().commit(update)
        future = Future()
        future.set_exception(KeyError("status"))
        return future


def test_replica_whose_commit_answer_is_lost_counts_again_after_its_status(fleet):
    slot = ToySlot(odd_weights(0))
    with UpdateReceiver(slot, file_transports()) as receiver:
        fleet.publisher.add("lost", LosesAnAnswer(receiver)).result(LONG_S)
        outcome = fleet.publish(1).replicas["lost"]
        assert (outcome.state, outcome.reason) == ("quarantined", "KeyError: 'status'")
        fleet.settle()
        assert slot.serves(odd_weights(1))
        assert slot.num_loads == 1
        assert fleet.publish(2).replicas["lost"].reason == outcome.reason  # it was not left out


def test_what_transports_keep_is_released():
    there, here = Noting(), Noting()
    with Publisher({"file": there}, TARGET) as publisher:
        receiver = UpdateReceiver(ToySlot(odd_weights(0)), {"file": here})
        publisher.add("one", ReceiverReplica(receiver)).result(LONG_S)
        assert publisher.publish(1, odd_weights(1)).result(LONG_S).committed
        publisher.remove("one").result(LONG_S)
        assert there.released == ["one"]
        assert here.released == []
        receiver.close()
    assert (there.released, here.released) == (["one", "all"], ["all"])
