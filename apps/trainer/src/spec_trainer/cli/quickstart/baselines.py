"""This module has two baseline drafts that use no hidden states: a bigram model and prompt lookup.

The engine decodes both with the same code as a trained draft (``Engine.use_proposer``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Generator, Tensor

from spec_core import Proposal, Proposer


class BigramModel:
    """A bigram model: the probability p(b | a) of token b after token a, counted in token sequences.

    p(b | a) = (count(a, b) + strength · p(b)) / (count(a) + strength). p(b) is the unigram distribution with
    one added count per token, so that no probability is 0. Counts are stored only for pairs that occur, not
    for all V². Shape suffix: V vocabulary.
    """

    def __init__(self, sequences: Iterable[Sequence[int]], vocab_size: int, strength: float = 1.0) -> None:
        """Count the bigrams of ``sequences``, which are lists of token ids."""
        self._vocab_size = vocab_size
        self._strength = strength
        unigram_V = torch.ones(vocab_size, dtype=torch.float64)
        keys = [torch.empty(0, dtype=torch.int64)]
        for sequence in sequences:
            ids = torch.tensor(sequence, dtype=torch.int64)
            unigram_V += torch.bincount(ids, minlength=vocab_size)
            keys.append(ids[:-1] * vocab_size + ids[1:])
        self._unigram_V = unigram_V / unigram_V.sum()
        self._keys, self._counts = torch.unique(torch.cat(keys), return_counts=True)

    def after(self, token_id: int) -> Tensor:
        """Return the distribution of the token that follows ``token_id``: float64 [V]."""
        edges = torch.tensor([token_id, token_id + 1]) * self._vocab_size
        start, stop = torch.searchsorted(self._keys, edges).tolist()
        probs_V = self._strength * self._unigram_V
        probs_V[self._keys[start:stop] % self._vocab_size] += self._counts[start:stop]
        return probs_V / probs_V.sum()


class BigramProposer(Proposer):
    """Guesses each token from the previous token."""

    def __init__(self, bigram: BigramModel) -> None:
        """Create a proposer that guesses with ``bigram``."""
        self._bigram = bigram
        self._last = 0

    def extend(self, next_ids: Sequence[int], hidden_TNH: Tensor) -> None:
        """Store the last token that the target has accepted."""
        self._last = next_ids[-1]

    def propose(self, num_tokens: int, temperature: float, generator: Generator) -> Proposal:
        """Guess the next ``num_tokens`` tokens, greedily or by sampling at ``temperature``."""
        token_ids: list[int] = []
        probs: list[Tensor] = []
        for _ in range(num_tokens):
            probs_V = self._bigram.after(token_ids[-1] if token_ids else self._last)
            if temperature == 0:
                token_ids.append(int(probs_V.argmax()))
                continue
            probs_V = torch.softmax(probs_V.log() / temperature, dim=-1).to(generator.device)
            token_ids.append(int(torch.multinomial(probs_V, 1, generator=generator)))
            probs.append(probs_V.float())
        return Proposal(token_ids=tuple(token_ids), probs_KV=torch.stack(probs) if probs else None)


class PromptLookupProposer(Proposer):
    """Guesses the tokens that followed an earlier occurrence of the last three, two or one tokens.

    The latest occurrence is taken. It guesses fewer tokens, or none, if the text has no more. Method: prompt
    lookup decoding, A. Saxena, 2023, https://github.com/apoorvumang/prompt-lookup-decoding.
    """

    def __init__(self, longest_ngram: int = 3) -> None:
        """Create a proposer that searches for at most the last ``longest_ngram`` tokens."""
        self._longest_ngram = longest_ngram
        self._ids: list[int] = []

    def extend(self, next_ids: Sequence[int], hidden_TNH: Tensor) -> None:
        """Append the tokens that the target has accepted to the text."""
        # No caller passes the prompt's first token, which hardly matters.
        self._ids.extend(next_ids)

    def propose(self, num_tokens: int, temperature: float, generator: Generator) -> Proposal:
        """Return at most ``num_tokens`` guesses, which are copied from the text."""
        for length in range(self._longest_ngram, 0, -1):
            found = self._end_of_latest(self._ids[-length:])
            if found is not None:
                return Proposal(token_ids=tuple(self._ids[found : found + num_tokens]))
        return Proposal(token_ids=())

    def _end_of_latest(self, ngram: list[int]) -> int | None:
        """Return where ``ngram``, the text's last tokens, occurred last before; None if it did not.

        The result is the index after that occurrence.
        """
        for start in range(len(self._ids) - len(ngram) - 1, -1, -1):
            if self._ids[start : start + len(ngram)] == ngram:
                return start + len(ngram)
        return None
