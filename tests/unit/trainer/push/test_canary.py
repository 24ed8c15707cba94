"""A canary compares what servers count, over enough traffic, and only where there is something to compare with."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from spec_core.errors import EngineError
from spec_core.records import AcceptanceCounters
from spec_trainer.push import canary as canary_module
from spec_trainer.push.canary import Canary


class Counting:
    """A server whose counters are set by the test; an error is raised."""

    def __init__(self, *counted):
        self.counted, self.asked = list(counted), []

    def acceptance(self, rounds=0, wait_s=0.0):
        self.asked.append(rounds)
        now = self.counted[0] if len(self.counted) == 1 else self.counted.pop(0)
        if isinstance(now, Exception):
            raise now
        return now


def rounds(number, accepted):
    return AcceptanceCounters(rounds=number, drafted=3 * number, accepted=accepted)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(canary_module, "_AGAIN_S", 0.001)


@pytest.mark.parametrize(("accepted", "has_fallen"), [(50, True), (91, False), (100, False), (200, False)])
def test_a_fall_by_more_than_the_margin_shows(accepted, has_fallen):
    server = Counting(rounds(100, 100))
    canary = Canary({"a": server}, margin=0.1, rounds=100)
    canary.look(["a"])
    server.counted = [rounds(0, 0), rounds(99, 0), rounds(100, accepted)]
    verdict = canary.judge(["a"])
    assert server.asked == [0, 100, 100, 100]
    assert verdict.has_fallen is has_fallen
    assert (verdict.before.acceptance_length, verdict.after.acceptance_length) == (2.0, 1 + accepted / 100)


def test_servers_count_together_and_a_lost_one_not_at_all():
    servers = {
        "a": Counting(rounds(50, 50)),
        "b": Counting(rounds(50, 0)),
        "c": Counting(EngineError("gone")),
    }
    canary = Canary(servers, margin=0.1, rounds=100)
    canary.look(servers)
    servers["a"].counted = [rounds(100, 100)]
    assert canary.judge(["a"]).after.acceptance_length == 2.0
    servers["a"].counted, servers["b"].counted = [rounds(50, 50)], [rounds(50, 25)]
    verdict = canary.judge(["a", "b", "c"])
    assert (verdict.before.acceptance_length, verdict.after.acceptance_length) == (1.5, 1.75)


def test_without_traffic_before_nothing_is_judged():
    canary = Canary({"a": Counting(rounds(99, 99))}, margin=0.1, rounds=100)
    canary.look(["a"])
    assert canary.judge(["a"]) is None


def test_a_version_with_too_little_traffic_is_compared_with_nothing_and_is_no_reference():
    server = Counting(rounds(100, 100))
    canary = Canary({"a": server}, margin=0.1, rounds=100)
    canary.look(["a"])
    server.counted = [rounds(3, 0)]
    canary.look(["a"])
    server.counted = [rounds(100, 50)]
    assert canary.judge(["a"]).has_fallen
    server.counted, server.asked = [rounds(3, 0)], []
    with ThreadPoolExecutor(1) as judge:
        judging = judge.submit(canary.judge, ["a"])
        while len(server.asked) < 3:
            time.sleep(0.001)
        canary.end()
        assert judging.result(60) is None
    assert canary.judge(["a"]) is None


def test_after_a_revert_what_serves_again_is_counted_on():
    """A lucky count would else be the reference until a version is as lucky."""
    server = Counting(rounds(100, 150))
    canary = Canary({"a": server}, margin=0.1, rounds=100)
    canary.look(["a"])
    server.counted = [rounds(100, 100)]
    assert canary.judge(["a"]).has_fallen
    for _ in range(2):  # a push that is committed nowhere changes nothing
        server.counted = [rounds(300, 290)]
        canary.look(["a"])
    server.counted = [rounds(100, 101)]
    verdict = canary.judge(["a"])
    assert (verdict.before, verdict.has_fallen) == (rounds(400, 440), False)
    canary.look(["a"])
    server.counted = [rounds(100, 100)]
    assert canary.judge(["a"]).before == rounds(100, 101)
