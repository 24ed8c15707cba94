"""Which failure is the root of those that follow from it."""

import time

import pytest

from spec_core import WorkerEnded, WorkerMessage
from spec_core.errors import PeerLost, RunError, UsageError
from spec_trainer.workers.failures import FailureReports
from spec_trainer.workers.protocol import ControlMessage, Failed, Finished, Ready


class Worker:
    def __init__(self, name: str) -> None:
        self.name = name


class Events:
    """A launcher that receives what it is given, and nothing more."""

    def __init__(self, *events, check_hosts=lambda: None) -> None:
        self.events = list(events)
        self.check_hosts = check_hosts

    def receive(self, deadline_s):
        if self.events:
            return self.events.pop(0)
        time.sleep(max(0.0, deadline_s - time.monotonic()))
        return None


def message(name: str, told: ControlMessage) -> WorkerMessage:
    return WorkerMessage(Worker(name), told.to_json())


def failed(name: str, error: str, message: str = "text", usage: bool = False) -> WorkerMessage:
    return WorkerMessage(Worker(name), Failed(error, message, usage).to_json())


def ended(name: str, how: str, killed: bool = False) -> WorkerEnded:
    return WorkerEnded(Worker(name), how, killed)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr("spec_trainer.workers.failures._ROOT_CAUSE_S", {1: 0.2, 2: 0.3})


def blamed(first, *rest, check_hosts=lambda: None) -> str:
    reports = FailureReports(Events(*rest, check_hosts=check_hosts))
    failure = reports.failure_in(first)
    return str(reports.with_causes(failure)[0].error)


def test_an_end_without_a_report_is_the_workers_own():
    assert (
        blamed(ended("engine-0", "ended with exit code 3; see LOG"))
        == "engine-0 ended with exit code 3; see LOG"
    )


def test_a_report_names_the_worker_and_the_error():
    assert (
        blamed(failed("engine-0", "ValueError", "what went wrong")) == "engine-0: ValueError: what went wrong"
    )


def test_bad_usage_found_in_a_worker_is_bad_usage():
    failure = FailureReports(Events()).failure_in(
        failed("engine-0", "ConfigError", "engine.colour=blue: expected red", usage=True)
    )
    assert isinstance(failure.error, UsageError)
    assert str(failure.error) == "engine.colour=blue: expected red"


@pytest.mark.parametrize("error", ["PeerLost", "DeadlineExceeded", "AcceleratorError"])
@pytest.mark.parametrize(
    ("cause", "told"),
    [
        (failed("engine-0", "ValueError"), "engine-0: ValueError: text"),
        (ended("engine-0", "ended with exit code 3"), "engine-0 ended with exit code 3"),
        (ended("engine-0", "was killed by signal 9", killed=True), "engine-0 was killed by signal 9"),
    ],
)
def test_the_cause_is_told_rather_than_what_follows_from_it(error, cause, told):
    assert blamed(failed("trainer-0", error), failed("trainer-1", error), cause) == told


@pytest.mark.parametrize(
    "first", [failed("trainer-0", "ValueError"), ended("trainer-0", "was killed by signal 6")]
)
def test_a_worker_that_somebody_killed_is_the_cause_of_what_others_report_before(first):
    assert (
        blamed(first, ended("engine-0", "was killed by signal 9", killed=True))
        == "engine-0 was killed by signal 9"
    )


def test_of_equals_the_first_is_told():
    assert blamed(failed("trainer-0", "ValueError", "one"), failed("engine-0", "ValueError", "two")).endswith(
        "one"
    )


def test_wakes_do_not_end_the_search_for_the_cause():
    told = blamed(failed("trainer-0", "PeerLost"), None, None, ended("engine-0", "was killed", killed=True))
    assert told == "engine-0 was killed"


@pytest.mark.parametrize(
    "collateral", [failed("trainer-0", "ValueError"), failed("trainer-0", "AcceleratorError")]
)
def test_what_has_died_on_the_host_is_the_cause(collateral):
    def check_hosts() -> None:
        raise RunError("the daemon died")

    with pytest.raises(RunError, match=r"^the daemon died$"):
        blamed(collateral, check_hosts=check_hosts)


def test_what_comes_during_the_search_and_is_no_failure_is_kept():
    """The run must not wait for a message that it has received already. Each counts once."""
    first, others = (
        failed("trainer-0", "PeerLost"),
        [message("engine-0", Ready()), message("engine-1", Ready())],
    )
    failing = [failed("engine-2", "PeerLost"), failed("engine-2", "DeadlineExceeded")]
    reports = FailureReports(Events(others[0], *failing, others[1]))
    found = reports.with_causes(reports.failure_in(first))
    assert [failure.worker for failure in found] == ["trainer-0", "engine-2"]
    assert [reports.receive(0.0) for _ in range(3)] == [*others, None]


def test_the_end_after_a_report_and_the_expected_end_are_no_failures():
    reports = FailureReports(Events())
    assert isinstance(reports.failure_in(failed("engine-0", "PeerLost")).error, RunError)
    assert reports.failure_in(ended("engine-0", "ended with exit code 1")) is None
    reports.expect_end("trainer-0")
    assert reports.failure_in(ended("trainer-0", "ended with exit code 0")) is None
    assert reports.failure_in(WorkerMessage(Worker("trainer-1"), Finished().to_json())) is None
    assert isinstance(reports.failure_in(ended("trainer-1", "ended with exit code 0")).error, PeerLost)
