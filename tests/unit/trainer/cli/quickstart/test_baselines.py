"""The two drafts without training: their probabilities and their guesses."""

import itertools

import pytest
import torch

from spec_trainer.cli.quickstart.baselines import BigramModel, BigramProposer, PromptLookupProposer

NO_STATES = torch.empty(0, 0, 8)
SEQUENCES = [[0, 1, 2, 1, 2, 1, 3], [1, 2]]


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def guess(proposer, ids, num_tokens, generator, temperature=0.0):
    proposer.extend(ids, NO_STATES)
    return proposer.propose(num_tokens, temperature, generator)


def dense_probs(vocab_size, strength):
    pairs = torch.zeros(vocab_size, vocab_size, dtype=torch.float64)
    unigram = torch.ones(vocab_size, dtype=torch.float64)
    for sequence in SEQUENCES:
        for token in sequence:
            unigram[token] += 1
        for a, b in itertools.pairwise(sequence):
            pairs[a, b] += 1
    unigram /= unigram.sum()
    return (pairs + strength * unigram) / (pairs.sum(1, keepdim=True) + strength)


@pytest.mark.parametrize("strength", [1.0, 0.25])
def test_bigram_model_is_the_smoothed_conditional_frequency(strength):
    bigram = BigramModel(SEQUENCES, vocab_size=6, strength=strength)
    probs = torch.stack([bigram.after(token) for token in range(6)])
    torch.testing.assert_close(probs, dense_probs(6, strength))
    assert (probs > 0).all()


def test_bigram_without_data_is_uniform():
    torch.testing.assert_close(BigramModel([], 4).after(3), torch.full((4,), 0.25, dtype=torch.float64))


def test_greedy_bigram_follows_the_likeliest_pairs(generator):
    proposal = guess(BigramProposer(BigramModel(SEQUENCES, 6)), [5, 0], 3, generator)
    assert proposal.token_ids == (1, 2, 1)
    assert proposal.probs_KV is None


def test_sampled_bigram_states_the_laws_that_it_drew_from(generator):
    bigram = BigramModel(SEQUENCES, 6)
    proposal = guess(BigramProposer(bigram), [0], 2, generator, temperature=0.5)
    sharpened = bigram.after(0) ** 2 / (bigram.after(0) ** 2).sum()
    torch.testing.assert_close(proposal.probs_KV[0], sharpened.float())
    draws = [
        guess(BigramProposer(bigram), [0], 1, generator, temperature=1.0).token_ids[0] for _ in range(3000)
    ]
    frequency = torch.bincount(torch.tensor(draws), minlength=6) / 3000
    assert (frequency - bigram.after(0)).abs().max() < 0.04


def test_prompt_lookup_copies_what_followed_the_latest_longest_match(generator):
    ids = [1, 2, 3, 7, 8, 9, 4, 2, 3, 5, 5, 1, 2, 3]
    assert guess(PromptLookupProposer(), ids, 2, generator).token_ids == (7, 8)
    assert guess(PromptLookupProposer(longest_ngram=2), ids, 2, generator).token_ids == (5, 5)


def test_prompt_lookup_guesses_no_more_than_the_text_says(generator):
    assert guess(PromptLookupProposer(), [4, 6, 4], 5, generator).token_ids == (6, 4)
    assert guess(PromptLookupProposer(), [4, 6, 5], 5, generator).token_ids == ()


def test_prompt_lookup_sees_what_was_generated(generator):
    proposer = PromptLookupProposer()
    proposer.extend([1, 2, 3], NO_STATES)
    assert guess(proposer, [9, 1], 2, generator).token_ids == (2, 3)
