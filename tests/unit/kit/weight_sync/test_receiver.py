"""A receiver refuses what it must, and its status says what is served."""

import math
import threading
import time

import pytest

from spec_core import Manifest, ServingStatus, UpdateId, UpdateRequest
from spec_core.errors import EngineError
from spec_kit.weight_sync import Publisher, ReceiverReplica, UpdateReceiver, open_weight_transports
from spec_kit.weight_sync.delivery import Delivery
from spec_kit.weight_sync.digest import tensor_entries
from spec_kit.weight_sync.finite import FiniteCheck
from spec_kit.weight_sync.messages import Endpoint, Offer
from spec_kit.weight_sync.publisher_link import PublisherLink
from spec_testing.reference import reference_backend
from spec_testing.weight_stage import TARGET, ToySlot, odd_weights
from spec_weight_transports.file import FileConfig, FileTransport

LONG_S = 20


def file_transports():
    return {"file": FileTransport(FileConfig(), reference_backend())}


@pytest.fixture
def slot():
    return ToySlot(odd_weights(0))


@pytest.fixture
def receiver(slot):
    with UpdateReceiver(slot, file_transports()) as receiver:
        yield receiver


@pytest.fixture
def publisher(receiver):
    with Publisher(file_transports(), TARGET, fence=5) as publisher:
        publisher.add("one", ReceiverReplica(receiver)).result(LONG_S)
        yield publisher


def has_ended(receiver):
    """Wait until an update that was prepared has failed."""
    deadline = time.monotonic() + LONG_S
    while receiver.status().state == "prepared":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def update(number, *, fence=5, group="default"):
    return UpdateId(group=group, fence=fence, number=number)


def update_request(number, **changes):
    return UpdateRequest(
        update=update(number, **changes), replica="one", address="127.0.0.1:1", token="t", seconds=LONG_S
    )


def test_token_of_a_request_is_not_in_its_text():
    secret = update_request(1).model_copy(update={"token": "sesame"})
    assert "sesame" not in f"{secret} {secret!r}"
    assert UpdateRequest.decode(secret.encode()) == secret


def test_new_receiver_serves_nothing_that_was_pushed(receiver):
    assert receiver.status() == ServingStatus()


def test_status_follows_commit_and_revert(receiver, publisher, slot):
    reports = [publisher.publish(version, odd_weights(version)).result(LONG_S) for version in (1, 2)]
    status = receiver.status()
    assert (status.state, status.version, status.digest) == ("committed", 2, reports[1].digest)
    receiver.revert(status.update)
    assert slot.serves(odd_weights(1))
    again = receiver.revert(status.update)  # idempotent
    assert (again.state, again.version, again.digest) == ("reverted", 1, reports[0].digest)
    assert slot.serves(odd_weights(1))


def test_commit_twice_is_one(receiver, publisher, slot):
    publisher.publish(1, odd_weights(1)).result(LONG_S)
    status = receiver.status()
    assert receiver.commit(status.update) == status
    assert slot.serves(odd_weights(1))


@pytest.mark.parametrize("call", ["commit", "revert"])
def test_only_a_received_update_is_committed_or_reverted(receiver, slot, call):
    with pytest.raises(EngineError, match="none was begun"):
        getattr(receiver, call)(update(1))
    assert slot.serves(odd_weights(0))


def test_abort_of_what_is_not_under_way_changes_nothing(receiver, publisher):
    publisher.publish(1, odd_weights(1)).result(LONG_S)
    before = receiver.status()
    assert receiver.abort(update(9)) == receiver.abort(before.update) == before


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (update_request(9, fence=4), "a trainer with fence 5 publishes here"),
        (update_request(0), "update 0 is not newer than update 1"),
        (update_request(9, group="other"), "update group 'other' is not this one, 'default'"),
    ],
)
def test_request_is_refused(receiver, publisher, slot, wrong, message):
    publisher.publish(1, odd_weights(1)).result(LONG_S)
    before = receiver.status()
    with pytest.raises(EngineError, match=message):
        receiver.prepare(wrong)
    assert receiver.status() == before
    assert slot.serves(odd_weights(1))


def test_version_names_one_draft_for_good(receiver, publisher, slot):
    """A reverted version keeps its draft too, also for another trainer."""
    digests = [publisher.publish(version, odd_weights(version)).result(LONG_S).digest for version in (1, 2)]
    publisher.revert().result(LONG_S)
    assert receiver.status().newest == 2
    with Publisher(file_transports(), TARGET) as later:
        later.add("one", ReceiverReplica(receiver)).result(LONG_S)
        report = later.publish(2, odd_weights(3)).result(LONG_S)
        assert not report.committed
        assert f"version 2 is another draft here, of digest {digests[1]}" in report.replicas["one"].reason
        assert slot.serves(odd_weights(1))
        assert later.next_version() == 3
        assert later.publish(3, odd_weights(2)).result(LONG_S).committed
    with Publisher(file_transports(), TARGET) as again:
        again.add("one", ReceiverReplica(receiver)).result(LONG_S)
        assert again.publish(1, odd_weights(1)).result(LONG_S).committed  # the same draft as before
    assert (receiver.status().version, receiver.status().newest) == (1, 3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_arrives_with_nan_or_infinity_is_not_committed(receiver, publisher, slot, monkeypatch, value):
    """The receiver looks by itself, even if the publisher has found nothing."""
    publisher.publish(1, odd_weights(1)).result(LONG_S)
    monkeypatch.setattr("spec_kit.weight_sync.publisher.FiniteCheck", NoCheck)
    weights = odd_weights(2)
    weights["odd"][3, 1] = value
    report = publisher.publish(2, weights).result(LONG_S)
    assert not report.committed
    assert "odd holds values that are not finite" in report.replicas["one"].reason
    assert slot.serves(odd_weights(1))
    assert receiver.status().version == 1


class NoCheck(FiniteCheck):
    """A publisher's check that finds nothing."""

    def problem(self):
        return ""


def test_reasons_of_another_update_are_none_of_its_own(receiver):
    receiver.prepare(update_request(1))
    receiver.prepare(update_request(1, fence=6))
    has_ended(receiver)
    assert "has gone" in receiver.status().reason
    for call in (receiver.commit, receiver.revert):
        with pytest.raises(
            EngineError, match=r"1 cannot be .*: a later trainer's update has taken its place$"
        ):
            call(update(1))
        with pytest.raises(EngineError, match=r"0 cannot be .*: another update has taken its place$"):
            call(update(0, fence=6))


def test_publisher_that_is_not_there_ends_in_the_status(receiver):
    assert receiver.prepare(update_request(1)).state == "prepared"
    has_ended(receiver)
    status = receiver.status()
    assert status.state == "aborted"
    assert "the publisher at 127.0.0.1:1 has gone" in status.reason


def test_publisher_that_goes_before_it_sends_is_noticed_at_once(slot):
    """Its rank waits for the weights in the transport then, which does not say so."""
    with (
        UpdateReceiver(slot, open_weight_transports(reference_backend(), ["ipc"])) as receiver,
        PublisherLink("127.0.0.1:0") as link,
        link.expect(update(1), "one", 1) as expected,
    ):
        given = update_request(1).model_copy(
            update={"address": link.address, "token": expected.token, "seconds": 3600.0}
        )
        receiver.prepare(given)
        (end,) = expected.wait(time.monotonic() + LONG_S)
        deadline = time.monotonic() + LONG_S
        entries = tuple(tensor_entries(odd_weights(1).items()))
        manifest = Manifest(group="default", version=1, fence=5, target=TARGET, tensors=entries)
        end.post(Offer(manifest=manifest, transport="ipc", bucket_bytes=4096), deadline)
        end.expect(Endpoint, deadline)
        end.post(Endpoint(address=""), deadline)
        end.shutdown()
        has_ended(receiver)
        assert receiver.status().state == "aborted"


def test_update_that_fails_after_a_failed_swap_leaves_the_quarantine(receiver, publisher, slot, monkeypatch):
    publisher.publish(1, odd_weights(1)).result(LONG_S)
    swap = slot.swap

    def failing():
        raise RuntimeError("out of memory")

    monkeypatch.setattr(slot, "swap", failing)
    publisher.publish(2, odd_weights(2)).result(LONG_S)
    publisher.remove("one").result(LONG_S)  # the repair has failed too
    assert receiver.status().state == "quarantined"
    receiver.prepare(update_request(receiver.status().update.number + 1))
    has_ended(receiver)
    assert receiver.status().state == "quarantined"
    assert "out of memory" in receiver.status().reason
    assert "has gone" in receiver.status().reason
    monkeypatch.setattr(slot, "swap", swap)
    with Publisher(file_transports(), TARGET, fence=6) as later:
        later.add("one", ReceiverReplica(receiver)).result(LONG_S)
        assert later.publish(3, odd_weights(3)).result(LONG_S).committed
    assert receiver.status().state == "committed"


def test_engine_that_leaves_a_tensor_out_does_not_get_the_version(receiver, publisher, slot, monkeypatch):
    monkeypatch.setattr(slot, "load", lambda weights: next(weights))
    report = publisher.publish(1, odd_weights(1)).result(LONG_S)
    assert "the engine did not load d2t" in report.replicas["one"].reason


def test_loader_may_raise_anything(receiver, publisher, slot, monkeypatch):
    def load(weights):
        raise KeyError("qkv")

    monkeypatch.setattr(slot, "load", load)
    assert "KeyError: 'qkv'" in publisher.publish(1, odd_weights(1)).result(LONG_S).replicas["one"].reason


def test_forgotten_memory_is_pushed_anew(receiver, publisher, slot):
    publisher.publish(1, odd_weights(1)).result(LONG_S)
    receiver.forget()
    assert (receiver.status().version, receiver.status().digest) == (None, "")
    assert publisher.publish(2, odd_weights(2)).result(LONG_S).committed


def test_close_ends_an_update_under_way(slot):
    entered, go = threading.Event(), threading.Event()
    slot = ToySlot(odd_weights(0), reach=lambda point: (entered.set(), go.wait(LONG_S)))
    receiver = UpdateReceiver(slot, file_transports())
    with Publisher(file_transports(), TARGET) as publisher:
        publisher.add("one", ReceiverReplica(receiver)).result(LONG_S)
        pushed = publisher.publish(1, odd_weights(1))
        assert entered.wait(LONG_S)
        threading.Timer(0.1, go.set).start()
        receiver.close()
        assert not pushed.result(LONG_S).committed
        with pytest.raises(EngineError, match="closes"):
            receiver.prepare(update_request(9))


def test_closed_receiver_goes_back_to_nothing(receiver, publisher, slot):
    publisher.publish(1, odd_weights(1)).result(LONG_S)
    receiver.close()
    with pytest.raises(EngineError, match="cannot be reverted"):
        receiver.revert(receiver.status().update)
    assert slot.serves(odd_weights(1))


def test_close_does_not_wait_for_a_publisher_that_is_silent_after_the_commit(
    receiver, publisher, monkeypatch
):
    asked, let_go = threading.Event(), threading.Event()
    monkeypatch.setattr(Delivery, "_confirm", lambda self: (asked.set(), let_go.wait(LONG_S)))
    publisher.publish(1, odd_weights(1), timeout_s=LONG_S)
    assert asked.wait(LONG_S)
    started = time.monotonic()
    receiver.close()
    assert time.monotonic() - started < LONG_S / 4
    let_go.set()
