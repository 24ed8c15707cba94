"""Acceptance is counted of requests alone that began after the draft has changed."""

import time
from types import SimpleNamespace

import pytest

from spec_engine_vllm.acceptance_counts import RoundCounter


class Steps:
    """vLLM's frontend: its states of requests after each step, and the counter that is told."""

    def __init__(self) -> None:
        self.counter = RoundCounter(3)
        self._states: dict[str, SimpleNamespace] = {}

    def begin(self, *names: str) -> None:
        """Let requests arrive; vLLM has scheduled none of them yet."""
        for name in names:
            self._states[name] = SimpleNamespace(
                stats=SimpleNamespace(scheduled_ts=0.0, num_generation_tokens=0)
            )

    def step(self, *ended: str, has_verified: bool = True, **new_tokens: int) -> None:
        for name, number in new_tokens.items():
            stats = self._states[name].stats
            stats.scheduled_ts = stats.scheduled_ts or time.monotonic()
            stats.num_generation_tokens += number
        for name in ended:
            del self._states[name]
        self.counter.note(self._states, has_verified)

    def counted(self) -> tuple[int, int, tuple[int, ...]]:
        found = self.counter.counted()
        return found["rounds"], found["accepted"], found["accepted_per_position"]


@pytest.fixture
def steps() -> Steps:
    return Steps()


def test_a_verification_that_yields_n_tokens_has_accepted_one_less(steps) -> None:
    steps.begin("a", "b")
    steps.step(a=1)
    steps.step(a=4, b=1)
    steps.step(a=1, b=2)
    assert steps.counted() == (3, 4, (2, 1, 1))
    assert steps.counter.counted()["drafted"] == 9


def test_a_prompts_first_token_and_steps_without_drafts_are_no_verifications(steps) -> None:
    steps.begin("a")
    steps.step()
    steps.step(a=1)
    assert steps.counted()[0] == 0
    steps.step(a=1, has_verified=False)
    assert steps.counted()[0] == 0
    steps.step(a=2)
    assert steps.counted() == (1, 1, (1, 0, 0))


def test_the_last_verification_of_an_answer_may_be_cut_and_does_not_count(steps) -> None:
    steps.begin("a")
    steps.step(a=1)
    steps.step(a=4)
    steps.step("a", a=1)
    assert steps.counted() == (1, 3, (1, 1, 1))


def test_an_answer_that_was_running_when_the_draft_changed_never_counts(steps) -> None:
    """Nothing of it counts even if vLLM's frontend hears of its steps later; a request that was waiting counts."""
    steps.begin("running", "waiting")
    steps.step(running=1)
    steps.step(running=4)
    steps.counter.begin()
    assert steps.counted() == (0, 0, ())
    steps.begin("new")
    for _ in range(80):
        steps.step(running=1)
    assert steps.counted()[0] == 0
    steps.step(running=1, waiting=1, new=1)
    steps.step(running=1, waiting=4, new=3)
    assert steps.counted() == (2, 5, (2, 2, 1))


def test_requests_without_statistics_do_not_count(steps) -> None:
    steps.counter.note({"a": SimpleNamespace(stats=None)}, has_verified=True)
    assert steps.counted()[0] == 0
