"""The costs of rounds are those of an engine whose times are known."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from spec_core import Engine, EngineAbilities
from spec_core.records import AcceptanceCounters, Generation, SamplingParams
from spec_trainer.measure.evaluation.breakdown import break_down, breakdown_lines
from spec_trainer.measure.evaluation.workload import Workload
from spec_trainer.workers import passes

TOKENS = 24
WORK = Workload(
    prompts=[[1], [2], [3], [4]],
    sampling=SamplingParams(max_new_tokens=TOKENS, num_draft_tokens=5, concurrency=256),
    concurrency=(1, 2),
)


@dataclass
class Clock:
    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now


class Timed(Engine):
    """A pass over n tokens takes 10 + 2n ms, a guess 3 ms; each round yields two tokens with the draft, else one."""

    def __init__(self, clock: Clock, abilities: EngineAbilities) -> None:
        self.target = SimpleNamespace(eos_token_ids=())
        self.clock, self.abilities = clock, abilities
        self.guess_ms, self.tokens_of_a_round, self.rounds = 3, 1, 0

    def generate(self, prompts, sampling):
        count = sampling.num_draft_tokens
        rounds = len(prompts) * sampling.max_new_tokens // (self.tokens_of_a_round if count else 1)
        self.clock.now += (
            rounds / sampling.concurrency * (10 + 2 * (count + 1) + self.guess_ms * count) / 1000
        )
        self.rounds += rounds
        return [Generation(token_ids=(5,) * sampling.max_new_tokens) for _ in prompts]

    def use_proposer(self, new_proposer, layers=()):
        assert new_proposer().propose(3, 0.0, None).token_ids == (0, 0, 0)
        self.guess_ms, self.tokens_of_a_round = 0, 1

    def load_draft(self, folder):
        self.guess_ms, self.tokens_of_a_round = 3, 2

    def acceptance(self):
        return AcceptanceCounters(rounds=self.rounds, accepted=self.rounds * (self.tokens_of_a_round - 1))

    def generate_unordered(self, next_request, sampling): ...
    def start(self, schema): ...
    def capture(self, requests, schema): ...
    def health(self): ...
    def close(self): ...


@pytest.fixture
def measured(monkeypatch):
    def run(abilities):
        clock = Clock()
        monkeypatch.setattr(passes, "time", clock)
        return break_down(Timed(clock, abilities), Path("draft"), WORK)

    return run


def test_a_round_is_divided_into_the_targets_pass_and_the_guesses(measured):
    one, two = measured(EngineAbilities(proposers=True))
    assert (one["concurrency"], two["concurrency"]) == (1, 2)
    for part in (one, two):
        assert part["token_ms"] == pytest.approx(12)
        assert [row["num_draft_tokens"] for row in part["rounds"]] == [1, 2, 4, 5]
        for row in part["rounds"]:
            count = row["num_draft_tokens"]
            assert row["target_ms"] == pytest.approx(12 + 2 * count)
            assert row["guesses_ms"] == pytest.approx(3 * count)
            assert row["break_even"] == pytest.approx((12 + 5 * count) / 12)
            assert row["acceptance_length"] == pytest.approx(2)


def test_an_engine_that_takes_no_proposer_tells_whole_rounds(measured):
    rows = measured(EngineAbilities())[0]["rounds"]
    assert {(row["target_ms"], row["guesses_ms"]) for row in rows} == {(None, None)}
    assert [row["break_even"] for row in rows] == pytest.approx([17 / 12, 22 / 12, 32 / 12, 37 / 12])


@pytest.mark.parametrize(
    ("break_even", "verdict"),
    [
        (2.5, "no draft of this kind can pay here: a round takes longer than all tokens that it could yield"),
        (1.25, "with 1 draft token a round, a draft pays here if its tau is above 1.25"),
        (0.84, "with 1 draft token a round, a draft pays here if its tau is above 1.00"),
    ],
)
def test_the_verdict_compares_a_round_with_the_most_that_it_can_yield(break_even, verdict):
    row = {
        "num_draft_tokens": 1, "round_ms": 5.0, "target_ms": None, "guesses_ms": None, "break_even": break_even,
        "acceptance_length": 1.0,
    }  # fmt: skip
    document = {"target": "t", "draft": "d", "engine": "hf", "engine_versions": {}, "backend": "cpu"}
    lines = list(
        breakdown_lines(document | {"breakdown": [{"concurrency": 1, "token_ms": 2.0, "rounds": [row]}]})
    )
    assert lines[-1] == verdict
