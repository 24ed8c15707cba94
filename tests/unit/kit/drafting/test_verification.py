"""verify: greedy matching, and rejection sampling whose output follows the target's distribution."""

from collections import Counter

import pytest
import torch

from spec_core import Proposal
from spec_kit.drafting import distribution, uniform_numbers, verify_greedy, verify_sampled

V = 5
LOGITS = torch.tensor([[1.0, -1.0, 0.5, 2.0, 0.0], [0.0, 1.5, -2.0, 0.3, 0.3], [-0.5, 0.0, 1.0, 0.0, 2.0]])
# The draft's distributions: close to the target's, far from it, and with a token that it never guesses.
DRAFT_DISTRIBUTIONS = torch.tensor([[0.2, 0.1, 0.1, 0.5, 0.1], [0.05, 0.0, 0.85, 0.05, 0.05]])

# Upper 1e-4 quantiles of the chi-square distribution, by degrees of freedom; the seed is fixed, so nothing is flaky.
CHI_SQUARE_LIMIT = {4: 23.5, 24: 59.0}


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(1)


def verify(logits, proposal, temperature, generator, top_p=1.0):
    """Verify one sequence's guesses."""
    probs = distribution(logits, temperature, top_p)[None]
    return verify_sampled(probs, [proposal], uniform_numbers([generator], len(logits)))[0]


def chi_square(counts, expected_probs, total):
    return sum((counts[cell] - total * p) ** 2 / (total * p) for cell, p in expected_probs.items())


def verify_all(logits, proposals, temperature, generator):
    """Verify guesses of as many sequences at once."""
    probs = distribution(logits, temperature).expand(len(proposals), -1, -1)
    uniform = torch.rand(len(proposals), len(logits), dtype=torch.float64, generator=generator)
    return verify_sampled(probs, proposals, uniform)


def draft_guesses(total, generator):
    ids = torch.multinomial(DRAFT_DISTRIBUTIONS, total, replacement=True, generator=generator).T.tolist()
    return [Proposal(token_ids=tuple(pair), probs_KV=DRAFT_DISTRIBUTIONS) for pair in ids]


def test_greedy_accepts_the_longest_matching_prefix():
    best = LOGITS.argmax(dim=-1).tolist()
    assert best == [3, 1, 4]
    for guess, accepted, next_token in [
        ((3, 1), 2, 4),
        ((3, 2), 1, 1),
        ((0, 1), 0, 3),
        ((3,), 1, 1),
        ((), 0, 3),
    ]:
        verdict = verify_greedy(best, Proposal(token_ids=guess))
        assert (verdict.accepted, verdict.next_token) == (accepted, next_token)


def test_distribution_is_softmax_at_the_temperature():
    assert distribution(LOGITS, 0.5).dtype == torch.float64
    torch.testing.assert_close(distribution(LOGITS, 0.5), torch.softmax(2 * LOGITS.double(), -1))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", ["drawn", "certain"])
def test_output_follows_the_targets_distribution(generator, temperature, kind):
    """The pair (first token, second token), with the second one drawn anew where the first was replaced."""
    total = 6000
    p = distribution(LOGITS, temperature)
    pairs, firsts = Counter(), Counter()
    certain = [Proposal(token_ids=(0, 2))] * total
    proposals = draft_guesses(total, generator) if kind == "drawn" else certain
    verdicts = verify_all(LOGITS, proposals, temperature, generator)
    # Of the target's next round, here with the same second row.
    seconds = torch.multinomial(p[1], total, replacement=True, generator=generator).tolist()
    for proposal, verdict, second in zip(proposals, verdicts, seconds, strict=True):
        tokens = [*proposal.token_ids[: verdict.accepted], verdict.next_token, second]
        pairs[tuple(tokens[:2])] += 1
        firsts[tokens[0]] += 1
    assert chi_square(firsts, dict(enumerate(p[0].tolist())), total) < CHI_SQUARE_LIMIT[V - 1]
    joint = {(a, b): float(p[0, a] * p[1, b]) for a in range(V) for b in range(V)}
    assert chi_square(pairs, joint, total) < CHI_SQUARE_LIMIT[V * V - 1]


def test_naive_acceptance_would_fail_the_same_test(generator):
    """The statistic has power: taking every guess as it comes is caught."""
    total = 6000
    firsts = Counter(guess.token_ids[0] for guess in draft_guesses(total, generator))
    expected = dict(enumerate(distribution(LOGITS, 1.0)[0].tolist()))
    assert chi_square(firsts, expected, total) > 10 * CHI_SQUARE_LIMIT[V - 1]


def test_acceptance_rate_is_the_overlap_of_the_two_laws(generator):
    total = 6000
    verdicts = verify_all(LOGITS, draft_guesses(total, generator), 1.0, generator)
    accepted = sum(verdict.accepted >= 1 for verdict in verdicts)
    overlap = float(torch.minimum(distribution(LOGITS, 1.0)[0], DRAFT_DISTRIBUTIONS[0].double()).sum())
    assert accepted / total == pytest.approx(overlap, abs=4 * (overlap * (1 - overlap) / total) ** 0.5)


def test_guesses_from_the_targets_own_law_are_always_accepted(generator):
    p = distribution(LOGITS, 1.0)
    for _ in range(200):
        ids = tuple(int(torch.multinomial(row, 1, generator=generator)) for row in p[:2])
        assert verify(LOGITS, Proposal(token_ids=ids, probs_KV=p[:2]), 1.0, generator).accepted == 2


def test_guess_that_the_target_excludes_is_never_accepted(generator):
    logits = LOGITS.clone()
    logits[0, 2] = -torch.inf
    for _ in range(200):
        verdict = verify(logits, Proposal(token_ids=(2, 0)), 1.0, generator)
        assert verdict.accepted == 0
        assert verdict.next_token != 2


def test_top_p_keeps_the_fewest_tokens_that_have_the_probability():
    logits = torch.log(torch.tensor([[0.1, 0.5, 0.15, 0.25], [0.97, 0.01, 0.01, 0.01]]))
    torch.testing.assert_close(
        distribution(logits, 1.0, top_p=0.7),
        torch.tensor([[0, 2 / 3, 0, 1 / 3], [1, 0, 0, 0]], dtype=torch.float64),
        rtol=1e-6,
        atol=0,
    )
    torch.testing.assert_close(
        distribution(logits, 1.0, top_p=1.0), distribution(logits, 1.0), rtol=0, atol=0
    )


def test_output_follows_the_law_of_top_p_with_guesses_outside_of_it(generator):
    logits = torch.log(torch.tensor([[0.1, 0.5, 0.15, 0.25]] * 2))
    guess = Proposal(token_ids=(0,), probs_KV=torch.tensor([[0.4, 0.2, 0.2, 0.2]]))
    firsts = []
    for _ in range(2000):
        guess = Proposal(
            token_ids=(int(torch.multinomial(guess.probs_KV[0], 1, generator=generator)),),
            probs_KV=guess.probs_KV,
        )
        verdict = verify(logits, guess, 1.0, generator, top_p=0.7)
        firsts.append(guess.token_ids[0] if verdict.accepted else verdict.next_token)
    counts = torch.bincount(torch.tensor(firsts), minlength=4) / len(firsts)
    assert counts[[0, 2]].tolist() == [0, 0]
    torch.testing.assert_close(counts[1], torch.tensor(2 / 3), rtol=0.06, atol=0)
