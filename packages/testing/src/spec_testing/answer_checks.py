"""Check an engine's answers against an independent run of the same target.

Shapes: T tokens, N layers of the target, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from spec_core import Engine, Proposal, Proposer
from spec_core.records import AcceptanceCounters, Generation, GenerationRequest, SamplingParams

KOLMOGOROV_LIMIT = 1.95
"""Limit of the Kolmogorov-Smirnov test: sqrt(n) times the largest distance of the distribution functions.

A correct engine exceeds the limit by chance once in a thousand tests.
"""

_MOST_AHEAD = 5000
"""Largest number of requests that an engine may take before it yields three short answers."""


class FirstToken(Proposer):
    """A proposer that always guesses token 0."""

    def extend(self, next_ids: Sequence[int], hidden_TNH: Tensor) -> None:
        """Ignore the hidden states."""

    def propose(self, num_tokens: int, temperature: float, generator: torch.Generator) -> Proposal:
        """Return ``num_tokens`` guesses of token 0."""
        return Proposal(token_ids=(0,) * num_tokens)


class ReferenceTarget(Protocol):
    """The engine's target, run by code that is independent of the engine."""

    def hidden(self, token_ids: Sequence[int]) -> Tensor:
        """Return [T, N + 1, H]: the residual stream that enters each of N layers and, last, the final norm."""
        ...

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Return the logits, float32 [T, V]."""
        ...


def token_rows(engine: Engine, lengths: Sequence[int]) -> list[list[int]]:
    """Return a prompt with each of the numbers of tokens in ``lengths``; equal lengths give equal prompts."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(engine.target.vocab_size, (n,), generator=generator).tolist() for n in lengths]


def greedy_answer(reference: ReferenceTarget, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return the target's greedy answer, computed token by token without a draft."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(reference.logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def assert_guess_depths(engine: Engine, answers: Sequence[Generation], counted: AcceptanceCounters) -> None:
    """Check that ``guess_depths`` of the answers agree with the counters.

    Guess 1 of each round was verified, and guess k + 1 if guess k was accepted and the answer did not end. A new
    round begins behind a refused guess.
    """
    if not engine.abilities.guess_depths:
        assert not any(answer.guess_depths for answer in answers)
        return
    for answer in answers:
        assert len(answer.guess_depths) == len(answer.token_ids)
        for refused, depths in zip(answer.refused_guesses, pairwise(answer.guess_depths), strict=False):
            assert (refused >= 0) == (depths[0] > 0 and depths[1] == 1)
    guess_depths = [guess_depth for answer in answers for guess_depth in answer.guess_depths]
    assert guess_depths.count(1) == counted.rounds
    for guess_depth, accepted in enumerate(counted.accepted_per_position[:-1], start=2):
        assert accepted - len(answers) <= guess_depths.count(guess_depth) <= accepted


def assert_times(answers: Sequence[Generation]) -> None:
    """Check that each answer has no times, or one time for each token in ascending order."""
    for answer in filter(lambda answer: answer.times_s, answers):
        assert len(answer.times_s) == len(answer.token_ids)
        assert [0, *answer.times_s] == sorted([0, *answer.times_s])


def assert_follows_distribution(engine: Engine, reference: ReferenceTarget, num_draft_tokens: int) -> None:
    """Check that sampled tokens follow the target's distribution.

    The total probability of all likelier tokens (randomized for ties) must be uniform on [0, 1).
    """
    prompts = token_rows(engine, [3] * 80)
    sampling = SamplingParams(
        max_new_tokens=8, temperature=1.0, seed=1, num_draft_tokens=num_draft_tokens, stop_at_eos=False
    )
    answers = engine.generate(prompts, sampling)
    generator = torch.Generator().manual_seed(5)
    values = torch.cat(
        [
            _rank_in_distribution(reference, prompt, answer, generator)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
    ).sort()[0]
    uniform = (torch.arange(len(values)) + 0.5) / len(values)
    distance = float((values - uniform).abs().max()) * math.sqrt(len(values))
    assert distance < KOLMOGOROV_LIMIT, (
        f"sampled tokens do not follow the target's distribution: {distance:.2f}"
    )


def assert_ends_at_end_tokens(engine: Engine, num_draft_tokens: int) -> None:
    """Check that an answer's first end token is its last token, and that only a full answer has none."""
    ends = set(engine.target.eos_token_ids)
    sampling = SamplingParams(max_new_tokens=32, temperature=1.0, seed=1, num_draft_tokens=num_draft_tokens)
    answers = [answer.token_ids for answer in engine.generate(token_rows(engine, [3] * 40), sampling)]
    assert not any(ends.intersection(ids[:-1]) for ids in answers)
    ended = [ids[-1] in ends for ids in answers]
    assert all(ended[place] or len(ids) == sampling.max_new_tokens for place, ids in enumerate(answers))
    assert any(ended) or not ends, "no answer has an end token; use a target with a smaller vocabulary"


def assert_takes_requests_as_answers_end(
    engine: Engine, reference: ReferenceTarget, concurrency: int
) -> None:
    """Check that a request can depend on an answer, and that at most ``concurrency`` are in progress (E13, E19).

    Two prompts are asked, and twice again with their answers appended. Every answer is the target's greedy answer.
    The engine takes few of many requests ahead.
    """
    sampling = SamplingParams(max_new_tokens=6, stop_at_eos=False, concurrency=concurrency)
    waiting = deque(GenerationRequest(prompt=row) for row in token_rows(engine, (4, 9)))
    in_progress = 0
    answered = {}
    thread = threading.get_ident()

    def next_request() -> GenerationRequest | None:
        nonlocal in_progress
        assert threading.get_ident() == thread
        assert in_progress < concurrency
        in_progress += bool(waiting)
        return waiting.popleft() if waiting else None

    for request, answer in engine.generate_unordered(next_request, sampling):
        in_progress -= 1
        answered[request] = answer.token_ids
        if len(answered) <= 4:
            waiting.append(GenerationRequest(prompt=[*request.prompt, *answer.token_ids]))
    assert len(answered) == 6
    assert [list(ids) for ids in answered.values()] == [
        greedy_answer(reference, request.prompt, sampling.max_new_tokens) for request in answered
    ]
    _assert_takes_few_requests_ahead(engine)


def assert_samples_without_seeds(engine: Engine) -> None:
    """Check that requests without a seed get different answers to one prompt (E20)."""
    sampling = SamplingParams(max_new_tokens=8, temperature=1.0, stop_at_eos=False)
    (prompt,) = token_rows(engine, (4,))
    requests = [GenerationRequest(prompt=prompt, seed=None) for _ in range(4)]
    answers = engine.generate_unordered(lambda: requests.pop() if requests else None, sampling)
    assert len({answer.token_ids for _, answer in answers}) > 1


def _assert_takes_few_requests_ahead(engine: Engine) -> None:
    """Check that the engine answers requests without an end, and that closing the iterator drops the rest."""
    sampling = SamplingParams(max_new_tokens=2, stop_at_eos=False)
    (prompt,) = token_rows(engine, (4,))
    taken = 0

    def next_request() -> GenerationRequest:
        nonlocal taken
        taken += 1
        assert taken < _MOST_AHEAD, "the engine takes requests without need"
        return GenerationRequest(prompt=prompt)

    answers = engine.generate_unordered(next_request, sampling)
    found = [next(answers)[1].token_ids for _ in range(3)]
    answers.close()
    (after,) = engine.generate([prompt], sampling)
    assert found == [after.token_ids] * 3


def _rank_in_distribution(
    reference: ReferenceTarget, prompt: Sequence[int], answer: Generation, generator: torch.Generator
) -> Tensor:
    """Return for each new token the probability of all likelier tokens, plus a random part of its own."""
    tokens = [*prompt, *answer.token_ids]
    probs_TV = reference.logits(tokens)[len(prompt) - 1 : -1].double().softmax(-1)
    own_T1 = probs_TV.gather(1, torch.tensor(answer.token_ids)[:, None])
    likelier_T = probs_TV.where(probs_TV > own_T1, 0).sum(-1)
    return likelier_T + own_T1[:, 0] * torch.rand(len(own_T1), generator=generator)
