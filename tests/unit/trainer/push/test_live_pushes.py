"""When a run pushes, what it leaves out, and that no failure of a push reaches its loop."""

import threading
from concurrent.futures import Future

import pytest
import torch

from spec_core import ServingStatus
from spec_core.errors import RunError
from spec_core.records import AcceptanceCounters
from spec_kit.weight_sync import PublishReport, ReplicaOutcome
from spec_trainer.push import live_pushes
from spec_trainer.push.live_pushes import LivePushes


class SlowPublisher:
    """Keeps each push until the test says how it ends."""

    def __init__(self, *args, **kwargs):
        self.committed = None
        self.newest = 0
        self.under_way: dict[int, Future[PublishReport]] = {}
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.begun = threading.Semaphore(0)
        self.closed = False

    def next_version(self, timeout_s):
        return self.newest + 1

    def publish(self, version, weights, **options):
        self.under_way[version], self.weights[version] = Future(), weights
        self.begun.release()
        if self.closed:
            self.under_way[version].cancel()
        return self.under_way[version]

    def finish(self, version, committed=True, replicas=None):
        self.committed = version if committed else self.committed
        outcome = {
            "committed": committed,
            "replicas": replicas or {},
            "seconds": {"transfer": 0.25, "total": 0.5},
        }
        report = PublishReport(version=version, digest="d", num_bytes=8, **outcome)
        self.under_way[version].set_result(report)

    def close(self):
        self.closed = True
        for future in self.under_way.values():
            future.cancel()


class Trainer:
    """A trainer of one weight, which is the number of times that it was gathered."""

    asked = gathered = 0
    size = 2

    def gather_weights(self):
        self.asked += 1
        yield "weight", torch.full((1,), float(self.asked)).expand(self.size)
        yield "bias", torch.zeros(2)
        self.gathered += 1

    def exported(self, weights, target):
        return {f"exported.{name}": tensor.clone() for name, tensor in weights.items()}


class Group:
    """One rank's view of a group whose ranks are all in this process."""

    def __init__(self, rank=0, size=1):
        self.rank, self.size = lambda: rank, lambda: size


@pytest.fixture
def broadcasts(monkeypatch):
    """Broadcasts of rank 0 of such a group, in order; another rank that calls after it takes the last."""
    sent = []

    def broadcast(tensor, source, group):
        sent.append(tensor.item()) if group.rank() == source else tensor.fill_(sent[-1])

    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    return sent


@pytest.fixture
def publisher(monkeypatch):
    made = SlowPublisher()
    monkeypatch.setattr(live_pushes, "connect_servers", lambda urls: {})
    monkeypatch.setattr(live_pushes, "open_publisher", lambda *args: made)
    return made


def pushes_of(spec):
    """The pushes of a run of one rank."""
    return LivePushes(spec, 0, torch.device("cpu"), Group())


def begin_one(pushes, publisher):
    """Begin the push of step 2, and wait until its weights are on their way."""
    pushes.begin(2, Trainer())
    assert publisher.begun.acquire(timeout=30)


@pytest.fixture
def spec(resolved):
    return resolved("train.push_every=2", "push.to=[http://127.0.0.1:1]", "train.steps=5")


def test_every_nth_step_and_the_last_is_due(spec, publisher, resolved):
    with pushes_of(spec) as pushes:
        assert [step for step in range(1, 6) if pushes.is_due(step)] == [2, 4, 5]
    with pushes_of(resolved()) as pushes:
        assert not any(map(pushes.is_due, range(1, 6)))
        assert (pushes.new_fields(), pushes.finish()) == ({}, [])


def test_a_push_is_left_out_while_one_is_under_way_but_for_the_last(spec, publisher):
    trainer = Trainer()
    with pushes_of(spec) as pushes:
        for step in (2, 4, 5):
            pushes.begin(step, trainer)
        assert publisher.begun.acquire(timeout=30)
        assert (trainer.gathered, list(publisher.under_way), pushes.new_fields()) == (2, [2], {})
        publisher.finish(2, committed=False)
        assert publisher.begun.acquire(timeout=30)
        assert list(publisher.under_way) == [2, 5]
        assert [publisher.weights[step]["exported.weight"].tolist() for step in (2, 5)] == [[1, 1], [2, 2]]
        assert pushes.new_fields() == {
            "push_version": 2, "push_committed": False, "push_bytes": 8, "push_s": 0.5, "push_transfer_s": 0.25,
        }  # fmt: skip
        publisher.finish(5)
        (last,) = pushes.finish()
        assert (last["push_version"], last["push_committed"]) == (5, True)
        assert pushes.new_fields() == {"serving_version": 5}


@pytest.mark.parametrize(("newest", "versions"), [(1, [2, 5]), (2, [3, 6]), (40, [41, 44])])
def test_versions_of_a_run_are_its_steps_above_what_servers_have_had(spec, publisher, newest, versions):
    publisher.newest = newest
    with pushes_of(spec) as pushes:
        for step, version in zip((2, 5), versions, strict=True):
            pushes.begin(step, Trainer())
            assert publisher.begun.acquire(timeout=30)
            publisher.finish(version)
            publisher.newest = version
        assert pushes.finish()[-1]["push_version"] == versions[-1]


def test_other_ranks_take_part_in_the_snapshots_alone_and_in_no_more_than_rank_0(spec, publisher, broadcasts):
    trainers = Trainer(), Trainer()
    device = torch.device("cpu")
    with (
        LivePushes(spec, 0, device, Group(0, 2)) as first,
        LivePushes(spec, 1, device, Group(1, 2)) as second,
    ):
        for step in (2, 4, 5):  # the second is left out, the last is not
            for pushes, trainer in zip((first, second), trainers, strict=True):
                pushes.begin(step, trainer)
        assert [trainer.gathered for trainer in trainers] == [2, 2]
        assert broadcasts == [1, 0]
        assert (second.new_fields(), second.finish()) == ({}, [])


def test_a_push_that_fails_is_a_line_in_the_log(spec, publisher, caplog):
    with pushes_of(spec) as pushes:
        begin_one(pushes, publisher)
        publisher.under_way[2].set_exception(RunError("no room"))
        assert pushes.finish() == []
    # Whether it was still waited for is a matter of time; that is another line.
    failures = [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]
    assert failures == ["push of version 2 failed: no room"]


def test_memory_that_cannot_be_had_ends_a_push_and_no_run(spec, publisher, caplog):
    trainer = Trainer()
    with pushes_of(spec) as pushes:
        trainer.size = 1 << 50
        pushes.begin(2, trainer)
        assert (trainer.gathered, publisher.under_way) == (1, {})
        trainer.size = 2
        pushes.begin(4, trainer)
        assert publisher.begun.acquire(timeout=30)
    (line,) = (record.getMessage() for record in caplog.records if "version 2" in record.getMessage())
    assert line.startswith("no push of version 2: no memory for a copy of the draft: RuntimeError: ")


class Hanging:
    """A server that answers nothing until its connection is cut."""

    def __init__(self):
        self.is_cut = threading.Event()
        self.close = self.is_cut.set


def test_closing_cuts_the_connections_to_a_server_that_does_not_answer(spec, publisher, monkeypatch):
    server = Hanging()
    monkeypatch.setattr(live_pushes, "_LEAVING_S", 0.05)
    monkeypatch.setattr(live_pushes, "connect_servers", lambda urls: {"http://a:1": server})
    publisher.add = lambda name, replica: None
    publisher.close = lambda: server.is_cut.wait(30) and SlowPublisher.close(publisher)
    with pushes_of(spec) as pushes:
        begin_one(pushes, publisher)
    assert publisher.under_way[2].cancelled()


@pytest.fixture
def watched(resolved):
    """A run whose pushes a canary judges."""
    canary = "push.canary_margin=0.1", "push.canary_rounds=100"
    return resolved("train.push_every=2", "push.to=[http://a:1]", "train.steps=5", *canary)


def test_a_server_that_could_not_revert_is_named(watched, publisher, monkeypatch, caplog):
    means = iter([1, 0])  # before and after

    class Counting(Hanging):
        def acceptance(self, rounds=0, wait_s=0.0):
            mean = next(means)
            sums = {
                "squared_rounds": 100,
                "squared_accepted": 100 * mean**2,
                "rounds_times_accepted": 100 * mean,
            }
            return AcceptanceCounters(rounds=100, drafted=300, accepted=100 * mean, answers=100, **sums)

    def revert(timeout_s):
        outcomes = Future()
        outcomes.set_result({"http://a:1": ReplicaOutcome(state="quarantined", reason="it has gone")})
        return outcomes

    monkeypatch.setattr(live_pushes, "connect_servers", lambda urls: {"http://a:1": Counting()})
    publisher.add, publisher.revert = lambda name, replica: None, revert
    publisher.serving = lambda: {"http://a:1": ServingStatus()}
    with pushes_of(watched) as pushes:
        begin_one(pushes, publisher)
        publisher.finish(2, replicas={"http://a:1": ReplicaOutcome(state="committed")})
        pushes.finish()
    assert "version 2 may still be served: http://a:1 quarantined: it has gone" in caplog.text


def test_a_server_that_counts_no_answers_reverts_nothing_and_the_log_says_why(
    watched, publisher, monkeypatch, caplog
):
    accepted = iter([100, *[0] * 16])  # before, and in four windows of four looks

    class Counting(Hanging):
        def acceptance(self, rounds=0, wait_s=0.0):
            return AcceptanceCounters(rounds=400, drafted=1200, accepted=next(accepted))

    monkeypatch.setattr(live_pushes, "connect_servers", lambda urls: {"http://a:1": Counting()})
    publisher.add = lambda name, replica: None
    publisher.serving = lambda: {"http://a:1": ServingStatus()}
    caplog.set_level("INFO")
    with pushes_of(watched) as pushes:
        begin_one(pushes, publisher)
        publisher.finish(2, replicas={"http://a:1": ReplicaOutcome(state="committed")})
        assert [fields["push_reverted"] for fields in pushes.finish() if "push_reverted" in fields] == [False]
    assert "version 2 stays: " in caplog.text
    assert "too few answers were counted to compare: 0, 0 before" in caplog.text


@pytest.mark.parametrize(
    ("committed", "versions", "asked"),
    [
        (None, {"a": None, "b": None}, ["a", "b"]),
        (None, {"a": None, "b": 7}, []),
        (4, {"a": 4, "b": 3, "c": 4}, ["a", "c"]),
        (4, {"a": 3, "b": None}, []),
    ],
)
def test_the_canary_compares_with_servers_of_the_kept_version_alone(
    watched, publisher, monkeypatch, committed, versions, asked
):
    looked = []
    monkeypatch.setattr(live_pushes, "connect_servers", lambda urls: {})
    monkeypatch.setattr(live_pushes.Canary, "look", lambda self, names: looked.append(list(names)))
    publisher.committed = committed
    publisher.serving = lambda: {url: ServingStatus(version=found) for url, found in versions.items()}
    with pushes_of(watched) as pushes:
        begin_one(pushes, publisher)
        publisher.finish(2, committed=False)
        pushes.finish()
    assert looked == [asked]


def test_closing_gives_up_what_is_under_way(spec, publisher):
    with pushes_of(spec) as pushes:
        begin_one(pushes, publisher)
    assert publisher.under_way[2].cancelled()
