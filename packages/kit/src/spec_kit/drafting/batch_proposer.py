"""BatchProposer is the base class of proposers that draft for several sequences in one pass."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Generator, Tensor

from spec_core import Proposal, Proposer


class BatchProposer(Proposer):
    """Drafts for several sequences in one pass; a single sequence is a batch of one.

    A subclass defines ``extend_all`` and ``guess_all``.
    """

    def extend(self, next_ids: Sequence[int], hidden_TNH: Tensor) -> None:
        """Append the target's hidden states of T more positions of this sequence."""
        self.extend_all([self], [next_ids], [hidden_TNH])

    def propose(self, num_tokens: int, temperature: float, generator: Generator) -> Proposal:
        """Guess the ``num_tokens`` tokens after this sequence's last known token."""
        return self.propose_all([self], num_tokens, temperature, [generator])[0]

    @classmethod
    @abstractmethod
    def extend_all(  # pyright: ignore[reportIncompatibleMethodOverride] (Self is narrower)
        cls, proposers: Sequence[Self], next_ids: Sequence[Sequence[int]], hidden: Sequence[Tensor]
    ) -> None:
        """Append the target's hidden states of more positions of every sequence."""

    @classmethod
    @torch.no_grad()
    def propose_all(  # pyright: ignore[reportIncompatibleMethodOverride] (Self is narrower)
        cls, proposers: Sequence[Self], num_tokens: int, temperature: float, generators: Sequence[Generator]
    ) -> list[Proposal]:
        """Guess ``num_tokens`` tokens of every sequence; the drafting state stays as it is."""
        if num_tokens == 0:
            return [Proposal(token_ids=())] * len(proposers)
        return cls.guess_all(proposers, num_tokens, temperature, generators)

    @classmethod
    @abstractmethod
    def guess_all(
        cls, proposers: Sequence[Self], num_tokens: int, temperature: float, generators: Sequence[Generator]
    ) -> list[Proposal]:
        """Return ``num_tokens`` (at least 1) guesses of each proposer; called under ``torch.no_grad``."""
