"""Guesses chooses the guesses of several sequences one after the other, and returns them as proposals.

Shape suffixes: B sequences, R rows of the draft's head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from spec_core import Proposal
from spec_kit.drafting.drawing import draw, uniform_numbers


class Guesses:
    """The guesses of several sequences, and the distributions from which they were drawn."""

    def __init__(self, num_tokens: int, temperature: float, generators: Sequence[Generator]) -> None:
        """Prepare for ``num_tokens`` guesses of each sequence; temperature 0 takes the likeliest tokens."""
        self._temperature = temperature
        self._uniform_BK = uniform_numbers(generators, num_tokens) if temperature > 0 else None
        self._ids: list[Tensor] = []
        self._probs: list[Tensor] = []

    def choose(self, logits_BR: Tensor, tokens: tuple[Tensor, int] | None = None) -> Tensor:
        """Choose the next guess of each sequence, and return its token id, int64 [B].

        ``tokens``: token id of each row of the head, int64 [R], and the size of the target's vocabulary; None if row
        and token id are the same.
        """
        if self._uniform_BK is None:
            row_B = logits_BR.argmax(-1)
            probs_BR = None
        else:
            probs_BR = (logits_BR.float() / self._temperature).softmax(-1)
            row_B = self.draw(probs_BR)
        if tokens is None:
            return self.add(row_B, probs_BR)
        ids_R, vocab_size = tokens
        if probs_BR is not None:
            probs_BR = probs_BR.new_zeros(len(probs_BR), vocab_size).index_copy(1, ids_R, probs_BR)
        return self.add(ids_R[row_B], probs_BR)

    def draw(self, probs_BV: Tensor) -> Tensor:
        """Return a token of each sequence, int64 [B], drawn by the random numbers of the next guess."""
        assert self._uniform_BK is not None
        return draw(probs_BV, self._uniform_BK[:, len(self._ids)].to(probs_BV.device))

    def add(self, id_B: Tensor, probs_BV: Tensor | None) -> Tensor:
        """Add the next guess of each sequence, with its distribution if it was drawn; return the token ids."""
        self._ids.append(id_B)
        if probs_BV is not None:
            self._probs.append(probs_BV)
        return id_B

    def proposals(self) -> list[Proposal]:
        """Return the guesses of each sequence so far."""
        rows: list[list[int]] = torch.stack(self._ids, dim=1).tolist()
        probs_BKV = torch.stack(self._probs, dim=1) if self._probs else [None] * len(rows)
        return [
            Proposal(token_ids=tuple(row), probs_KV=probs_KV)
            for row, probs_KV in zip(rows, probs_BKV, strict=True)
        ]
