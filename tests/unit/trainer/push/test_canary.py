"""A canary compares what servers count until chance is out of the question, where there is something to compare with.

In simulated traffic, answers differ: each has its own chance that a guess is accepted.
"""

import dataclasses
import math
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from spec_core.errors import EngineError
from spec_core.records import AcceptanceCounters
from spec_kit.hosting import AnswerCounts, AnswerRounds
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


def spread(number, full):
    """Return the counts of answers of one round each: ``full`` of them have accepted three guesses, others none."""
    return AcceptanceCounters(
        rounds=number,
        drafted=3 * number,
        accepted=3 * full,
        answers=number,
        squared_rounds=number,
        rounds_times_accepted=3 * full,
        squared_accepted=9 * full,
    )


def rounds(number, accepted):
    """Return the counts of equal answers of one round each: nothing is left to chance."""
    return AcceptanceCounters(
        rounds=number,
        drafted=3 * number,
        accepted=accepted,
        answers=number,
        squared_rounds=number,
        rounds_times_accepted=accepted,
        squared_accepted=accepted**2 // number if number else 0,
    )


class Traffic:
    """A server that answers all the time; ``lengths`` are mean verifications of the answers side by side."""

    def __init__(self, lengths, seed):
        self._draw, self._lengths = random.Random(seed), lengths
        self.serve(1.0)
        self._answers = [self._new(length) for length in lengths]

    def serve(self, quality):
        """Serve another draft; 0 is the quality of one whose guesses are never accepted."""
        self._quality, self._counts, self._rounds, self._begun = quality, AnswerCounts(), 0, set()

    def acceptance(self, rounds=0, wait_s=0.0):
        while self._rounds < rounds:
            self._step()
        return self._counts.counted(3)

    def _new(self, length):
        left = 1 + int(self._draw.expovariate(1 / length))
        return {"left": left, "share": self._draw.betavariate(2, 3), "had": AnswerRounds()}

    def _step(self):
        for index, answer in enumerate(self._answers):
            if answer["left"] == 0:
                self._answers[index] = answer = self._new(self._lengths[index])
                self._begun.add(index)
            answer["left"] -= 1
            if index in self._begun:
                accepted = 0
                while accepted < 3 and self._draw.random() < answer["share"] * self._quality:
                    accepted += 1
                answer["had"] = self._counts.add(answer["had"], accepted)
                self._rounds += 1


LOADS = pytest.mark.parametrize("lengths", [[20] * 12, [20] * 12 + [350] * 2], ids=["short", "mixed"])


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(canary_module, "_AGAIN_S", 0.001)


@pytest.mark.parametrize(("accepted", "has_fallen"), [(50, True), (91, False), (100, False), (200, False)])
def test_a_fall_by_more_than_the_margin_shows(accepted, has_fallen):
    server = Counting(rounds(100, 100))
    canary = Canary({"a": server}, margin=0.1, rounds=100)
    canary.look(["a"])
    server.counted = [rounds(0, 0), rounds(24, 0), rounds(100, accepted)]
    verdict = canary.judge(["a"])
    assert server.asked == [0, 25, 25, 25]
    assert verdict.has_fallen is has_fallen is not verdict.has_stayed
    assert (verdict.before.acceptance_length, verdict.after.acceptance_length) == (2.0, 1 + accepted / 100)


def test_a_fall_that_may_be_chance_reverts_nothing():
    """The mean falls by 0.4 over answers that accept three guesses in each verification, or none in any."""
    server = Counting(spread(40, 20))
    canary = Canary({"a": server}, margin=0.1, rounds=40)
    canary.look(["a"])
    server.counted = [spread(10, 4), spread(20, 8), spread(30, 11), spread(40, 15)]
    verdict = canary.judge(["a"])
    assert server.asked == [0, 10, 20, 30, 40]
    assert (verdict.has_fallen, verdict.has_stayed, verdict.after.rounds) == (False, False, 40)
    assert verdict.fall == pytest.approx(3 * 5 / 40)
    # Of n answers with variance p (1 - p) 3²; n - 6 in place of n - 1.
    expected = 3 * 3 * math.sqrt(0.5 * 0.5 / (40 - 6) + 0.375 * 0.625 / (40 - 6))
    assert verdict.chance == pytest.approx(expected)


def test_few_answers_lengthen_the_window_up_to_four_times():
    few = dataclasses.replace(rounds(100, 0), answers=6)
    server = Counting(rounds(100, 100))
    canary = Canary({"a": server}, margin=0.1, rounds=4)
    canary.look(["a"])
    server.counted = [few]
    assert not canary.judge(["a"]).has_fallen
    assert server.asked == list(range(17))
    server.counted, server.asked = [few] * 10 + [dataclasses.replace(few, answers=10)], []
    assert canary.judge(["a"]).has_fallen
    assert server.asked == list(range(1, 12))


@LOADS
def test_at_most_one_of_100_sane_versions_is_reverted(lengths):
    """Chance moves τ by more than the margin in many of the comparisons."""
    server = Traffic(lengths, seed=0)
    canary = Canary({"a": server}, margin=0.1, rounds=1000)
    server.acceptance(1000)
    verdicts = []
    for _ in range(100):
        canary.look(["a"])
        server.serve(1.0)
        verdicts.append(canary.judge(["a"]))
    assert sum(verdict.fall > 0.1 for verdict in verdicts) > 10
    assert sum(verdict.has_fallen for verdict in verdicts) <= 1


@LOADS
def test_every_diverged_version_is_reverted_within_half_the_window(lengths):
    server = Traffic(lengths, seed=0)
    canary = Canary({"a": server}, margin=0.1, rounds=1000)
    needed = Counter()
    for _ in range(50):
        server.acceptance(1000)
        canary.look(["a"])
        server.serve(0.0)
        verdict = canary.judge(["a"])
        needed[verdict.has_fallen, math.ceil(verdict.after.rounds / 500)] += 1
        server.serve(1.0)
    assert needed == {(True, 1): 50}


def test_servers_count_together_and_a_lost_one_not_at_all():
    servers = {
        "a": Counting(rounds(200, 200)),
        "b": Counting(rounds(200, 0)),
        "c": Counting(EngineError("gone")),
    }
    canary = Canary(servers, margin=0.1, rounds=400)
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


def test_a_version_with_too_little_traffic_is_no_reference():
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
    assert (verdict.before.rounds, verdict.before.accepted, verdict.has_fallen) == (400, 440, False)
    canary.look(["a"])
    server.counted = [rounds(100, 100)]
    assert canary.judge(["a"]).before == rounds(100, 101)
