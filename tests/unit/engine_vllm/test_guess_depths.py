"""Depths of tokens are noted from what vLLM's scheduler schedules and yields, step by step."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from spec_engine_vllm.guess_depths import DepthNotes, guess_depths_of

GUESSES = 3


@dataclass
class Scheduler:
    """vLLM's scheduler, as far as its notes are concerned. A step is given as what it runs and yields."""

    longest: int = 1000
    computed: dict[str, int] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    found: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._update = DepthNotes(self.longest).around(lambda scheduled, outputs: outputs)

    def step(self, finished=(), resumed=(), invalid=None, **requests) -> None:
        """``requests``: for each, the guesses that the target verifies, the tokens that come out, and the end."""
        self.known -= set(finished)
        new = [name for name in requests if name not in self.known]
        running = [name for name in requests if name in self.known]
        self.known |= requests.keys()
        scheduled = SimpleNamespace(
            num_scheduled_tokens={name: 1 + guesses for name, (guesses, *_) in requests.items()},
            scheduled_spec_decode_tokens={
                name: [-1] * guesses for name, (guesses, *_) in requests.items() if guesses
            },
            num_invalid_spec_tokens=invalid,
            finished_req_ids=set(finished),
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, num_computed_tokens=self.computed.get(name, 0)) for name in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=running,
                resumed_req_ids=set(resumed),
                num_computed_tokens=[self.computed.get(name, 0) for name in running],
            ),
        )
        outputs = [
            SimpleNamespace(
                request_id=name,
                new_token_ids=[7] * tokens,
                finish_reason=(*end, None)[0],
                kv_transfer_params=None,
            )
            for name, (_, tokens, *end) in requests.items()
            if tokens or end
        ]
        (message,) = self._update(scheduled, {0: SimpleNamespace(outputs=outputs)}).values()
        for output in message.outputs:
            if output.finish_reason is not None:
                self.found[output.request_id] = guess_depths_of(output)


def test_each_round_begins_at_one_and_the_token_behind_all_guesses_has_none() -> None:
    vllm = Scheduler()
    vllm.step(a=(0, 0))  # a chunk of its prompt
    vllm.step(a=(0, 1), b=(0, 1))
    vllm.step(a=(GUESSES, 1), b=(GUESSES, 4))
    vllm.step(a=(GUESSES, 3), b=(GUESSES, 2, "stop"))  # the stop token may be an accepted guess
    vllm.step(a=(2, 3, "length"))
    assert vllm.found == {"a": [0, 1, 1, 2, 3, 1, 2, 0], "b": [0, 1, 2, 3, 0, 1, 2]}


def test_steps_that_verify_nothing_yield_tokens_that_were_not_guessed() -> None:
    """A preempted request is computed again, and its next token comes without a guess."""
    vllm = Scheduler()
    vllm.step(a=(0, 1))
    vllm.step(a=(GUESSES, 2))
    vllm.step(b=(0, 1))
    vllm.step(a=(0, 1), b=(GUESSES, 1))
    vllm.step(a=(GUESSES, 0), b=(GUESSES, 0))  # stale, and dropped
    vllm.step(a=(GUESSES, 1, "length"), b=(GUESSES, 1, "length"))
    assert vllm.found == {"a": [0, 1, 2, 0, 1], "b": [0, 1, 1]}


def test_a_request_that_begins_or_resumes_may_be_padded_with_guesses_of_nobody() -> None:
    vllm = Scheduler()
    vllm.step(a=(GUESSES, 1))
    vllm.step(a=(GUESSES, 2))
    vllm.step(a=(GUESSES, 1), resumed=["a"])
    vllm.step(a=(GUESSES, 1, "length"))
    assert vllm.found == {"a": [0, 1, 2, 0, 1]}


def test_guesses_that_a_grammar_refuses_are_not_judged() -> None:
    vllm = Scheduler()
    vllm.step(a=(0, 1))
    vllm.step(a=(GUESSES, 3, "length"), invalid={"a": 1})
    assert vllm.found == {"a": [0, 1, 2, 0]}


@pytest.mark.parametrize(("before", "depths"), [(7, [0, 1]), (8, [0, 0])])
def test_what_vllm_guesses_instead_of_the_draft_is_no_guess(before, depths) -> None:
    """One sequence near the model's length keeps vLLM from drafting for any other in the same step."""
    vllm = Scheduler(longest=8, computed={"b": before})
    vllm.step(a=(0, 1), b=(0, 1, "length"))
    vllm.step(a=(GUESSES, 1, "length"))
    assert vllm.found["a"] == depths


def test_an_aborted_request_leaves_nothing_to_the_next_of_its_name() -> None:
    vllm = Scheduler()
    vllm.step(a=(0, 1))
    vllm.step(b=(0, 1), finished=["a"])
    vllm.step(a=(0, 1))
    vllm.step(a=(GUESSES, 1, "length"))
    assert vllm.found["a"] == [0, 1]


def test_an_answer_without_notes_has_no_depths() -> None:
    assert guess_depths_of(SimpleNamespace(kv_transfer_params=None)) == []
