"""When a run pushes, what it leaves out, and that no failure of a push reaches its loop."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest
import torch

from spec_core.errors import RunError
from spec_core.weight_sync import PublishReport
from spec_trainer.push import live_pushes
from spec_trainer.push.live_pushes import LivePushes


class SlowPublisher:
    """Keeps each push until the test says how it ends."""

    def __init__(self, *args, **kwargs):
        self.committed = None
        self.under_way: dict[int, Future[PublishReport]] = {}
        self.begun = threading.Semaphore(0)

    def publish(self, version, weights, **options):
        self.under_way[version] = Future()
        self.begun.release()
        return self.under_way[version]

    def finish(self, version, committed=True):
        self.committed = version if committed else self.committed
        self.under_way[version].set_result(
            PublishReport(
                version=version,
                digest="d",
                committed=committed,
                num_bytes=8,
                replicas={},
                seconds={"transfer": 0.25, "total": 0.5},
            )
        )

    def close(self):
        for future in self.under_way.values():
            future.cancel()


class Snapshots:
    """A trainer that counts how often it was asked for a snapshot."""

    asked = 0

    def snapshot(self, target):
        self.asked += 1
        return {"weight": torch.zeros(2)}


@pytest.fixture
def publisher(monkeypatch):
    made = SlowPublisher()
    monkeypatch.setattr(live_pushes, "connect_servers", lambda urls: {})
    monkeypatch.setattr(live_pushes, "open_weight_transports", lambda backend, names: {})
    monkeypatch.setattr(live_pushes, "Publisher", lambda *args, **kwargs: made)
    return made


@pytest.fixture
def spec(resolved):
    return resolved("train.push_every=2", "push.to=[http://127.0.0.1:1]", "train.steps=5")


def test_every_nth_step_and_the_last_is_due(spec, publisher, resolved):
    with LivePushes(spec, 0, torch.device("cpu")) as pushes:
        assert [step for step in range(1, 6) if pushes.is_due(step)] == [2, 4, 5]
    with LivePushes(resolved(), 0, torch.device("cpu")) as pushes:
        assert not any(map(pushes.is_due, range(1, 6)))
        assert (pushes.news(), pushes.finish()) == ({}, [])


def test_a_push_is_left_out_while_one_is_under_way_but_for_the_last(spec, publisher):
    trainer = Snapshots()
    with LivePushes(spec, 0, torch.device("cpu")) as pushes:
        for step in (2, 4, 5):
            pushes.begin(step, trainer)
        assert publisher.begun.acquire(timeout=30)
        assert (trainer.asked, list(publisher.under_way), pushes.news()) == (3, [2], {})
        publisher.finish(2, committed=False)
        assert publisher.begun.acquire(timeout=30)
        assert list(publisher.under_way) == [2, 5]
        assert pushes.news() == {
            "push_version": 2, "push_committed": False, "push_bytes": 8, "push_s": 0.5, "push_transfer_s": 0.25,
        }  # fmt: skip
        publisher.finish(5)
        (last,) = pushes.finish()
        assert (last["push_version"], last["push_committed"]) == (5, True)
        assert pushes.news() == {"serving_version": 5}


def test_other_ranks_take_part_in_the_snapshot_alone(spec, publisher):
    trainer = Snapshots()
    with LivePushes(spec, 1, torch.device("cpu")) as pushes:
        pushes.begin(2, trainer)
        assert (trainer.asked, pushes.news(), pushes.finish()) == (1, {}, [])
    assert not publisher.under_way


def test_a_push_that_fails_is_a_line_in_the_log(spec, publisher, caplog):
    with LivePushes(spec, 0, torch.device("cpu")) as pushes:
        pushes.begin(2, Snapshots())
        assert publisher.begun.acquire(timeout=30)
        publisher.under_way[2].set_exception(RunError("no room"))
        assert pushes.finish() == []
    assert [record.getMessage() for record in caplog.records] == [
        "push of version 2 failed: RunError: no room"
    ]


def test_closing_gives_up_what_is_under_way(spec, publisher):
    with LivePushes(spec, 0, torch.device("cpu")) as pushes:
        pushes.begin(2, Snapshots())
        assert publisher.begun.acquire(timeout=30)
    assert publisher.under_way[2].cancelled()
