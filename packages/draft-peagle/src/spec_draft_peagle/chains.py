"""Choose the guesses of a document on which the draft is trained (COD, arXiv 2602.01469).

COD means conditional drop. Row a of a document has the target's state at token a, and token a + 1, its last
known token. The row's chain consists of guesses k = 0, 1, … for tokens a + 2 + k. The row itself makes guess
0; each later guess has a mask token after the row. A guess can count only if its token and the tokens of all
earlier guesses of the chain are in the document and supervised. After each guess, a random share of the
chains continues and the others end there. The choice depends on the document's loss mask, and on no other
content.

Everything here runs on the CPU before any forward pass. Shapes: R rows, A chains with mask tokens, C mask
tokens, E guesses that count in the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from spec_core import to_device_async
from spec_core.records import DraftBatch, Supervision
from spec_kit.block_drafting import BlockLayout, sample_generator


@dataclass(frozen=True, kw_only=True)
class ChainRule:
    """Rule that determines how long chains can be and which share of chains continues after each guess."""

    num_guesses: int
    retention: float
    least_retention: float

    def draw(self, sample: Supervision) -> tuple[Tensor, Tensor]:
        """Return each row's number of guesses after the random drop, and before it, int64 [R] each.

        The random drop depends only on (seed, epoch, sample id, loss mask). If a sample records the depth at
        which each token was guessed, its chains are the engine's verification rounds, and no guess is
        dropped; nor is one in an evaluation.
        """
        reach_R = self._reach(sample)
        if sample.guess_depth is not None or sample.evaluates:
            return reach_R, reach_R
        count_R = reach_R.clamp(max=1)
        row_A = count_R.nonzero().squeeze(1)
        num_seeds = len(row_A)
        generator = sample_generator(sample)
        for guess in range(1, self.num_guesses):
            row_A = row_A[reach_R[row_A] > guess]
            share = max(self.retention**guess, self.least_retention)
            size = max(0, int((num_seeds - guess) * share))
            row_A = row_A[torch.randperm(len(row_A), generator=generator)[:size]]
            count_R[row_A] += 1
        return count_R, reach_R

    def _reach(self, sample: Supervision) -> Tensor:
        """Return int64 [R]: the number of guesses of each row that can count."""
        mask_T, guess_depth_T = sample.loss_mask, sample.guess_depth
        going_R = torch.ones(max(0, len(mask_T) - 1), dtype=torch.bool)
        reach_R = torch.zeros(len(going_R), dtype=torch.int64)
        for guess in range(min(self.num_guesses, len(going_R))):
            counts_T = mask_T[guess + 2 :]
            if guess_depth_T is not None:
                counts_T = counts_T & (guess_depth_T[guess + 2 :] == guess + 1)
            going_R[: len(counts_T)] &= counts_T
            going_R[len(counts_T) :] = False
            reach_R += going_R
        return reach_R


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Rows ``first`` to ``stop`` of a batch, and the mask tokens of the chains that start at these rows."""

    first: int
    stop: int
    bounds: tuple[tuple[int, int], ...]
    """Each document's first row, and the row after its last row."""
    anchor_A: Tensor
    """int64 [A]: row at which each chain with mask tokens starts. Short chains come first; the rows of chains of
    the same length ascend."""
    start_A: Tensor
    """int64 [A]: first row of the chain's document."""
    count_A: Tensor
    """int64 [A], ascending: number of mask tokens of the chain, at least 1."""
    device: torch.device
    """The device of the draft; the tensors above are on the CPU."""

    @property
    def chain_C(self) -> Tensor:
        """Index of each mask token's chain, int64 [C]."""
        return torch.arange(len(self.count_A)).repeat_interleave(self.count_A)

    @property
    def slot_C(self) -> Tensor:
        """Index of each mask token in its chain, from 0 on, int64 [C]."""
        chain_C = self.chain_C
        return torch.arange(len(chain_C)) - (self.count_A.cumsum(0) - self.count_A)[chain_C]

    @property
    def pieces(self) -> Sequence[tuple[int, int, int]]:
        """The documents in the segment: first row of the document, and the segment's range of its rows."""
        parts = ((start, max(start, self.first), min(stop, self.stop)) for start, stop in self.bounds)
        return [(start, first, stop) for start, first, stop in parts if first < stop]

    @cached_property
    def layouts(self) -> Sequence[tuple[int, BlockLayout]]:
        """The lengths that chains have, and the layout of the chains of each length as blocks."""
        lengths, sizes = (column.tolist() for column in self.count_A.unique_consecutive(return_counts=True))
        columns = zip(lengths, self.anchor_A.split(sizes), self.start_A.split(sizes), strict=True)
        return [(length, BlockLayout(row + 1, start, self.device)) for length, row, start in columns]

    @property
    def position(self) -> Tensor:
        """Position of each row, and then of each mask token, in its document, int64."""
        row = torch.arange(self.first, self.stop)
        for start, stop in self.bounds:
            row[max(start - self.first, 0) : max(stop - self.first, 0)] -= start
        behind_C = (self.anchor_A - self.start_A)[self.chain_C] + 1 + self.slot_C
        return torch.cat([row, behind_C])


@dataclass(frozen=True, kw_only=True)
class Chains:
    """The rows of a batch, one document after the other without padding, and their chains."""

    token_R: Tensor
    """int64 [R]: index of each row's token in the flat batch."""
    bounds: tuple[tuple[int, int], ...]
    count_R: Tensor
    """int64 [R]: number of the row's guesses that count in the loss."""
    reach_R: Tensor
    """int64 [R]: number of the row's guesses that would count if none were dropped."""
    device: torch.device
    """The device of the draft; the tensors above are on the CPU."""

    @classmethod
    def of(cls, batch: DraftBatch, rule: ChainRule) -> Self:
        """Choose the chains of every document of a batch, and drop guesses at random (COD)."""
        columns = [torch.zeros(3, 0, dtype=torch.int64)]
        bounds = list[tuple[int, int]]()
        cursor = 0
        for span in batch.spans:
            count_R, reach_R = rule.draw(batch.supervision(span))
            columns.append(torch.stack([torch.arange(len(count_R)) + span.start, count_R, reach_R]))
            bounds.append((cursor, cursor + len(count_R)))
            cursor += len(count_R)
        token_R, count_R, reach_R = torch.cat(columns, dim=1)
        return cls(
            token_R=token_R,
            bounds=tuple(bounds),
            count_R=count_R,
            reach_R=reach_R,
            device=batch.input_ids_T.device,
        )

    def segments(self, num_rows: int | None) -> Iterator[Segment]:
        """Yield the batch in segments of ``num_rows`` rows; None means one segment.

        An empty batch yields one empty segment.
        """
        start_R = torch.zeros_like(self.count_R)
        for start, stop in self.bounds:
            start_R[start:stop] = start
        total = len(self.count_R)
        size = num_rows or max(1, total)
        for first in range(0, max(1, total), size):
            stop = min(first + size, total)
            anchor_A = first + (self.count_R[first:stop] > 1).nonzero().squeeze(1)
            anchor_A = anchor_A[self.count_R[anchor_A].argsort(stable=True)]
            yield Segment(
                first=first,
                stop=stop,
                bounds=self.bounds,
                anchor_A=anchor_A,
                start_A=start_R[anchor_A],
                count_A=self.count_R[anchor_A] - 1,
                device=self.device,
            )

    def guesses(self, num_rows: int | None) -> Tensor:
        """Return int64 [3, E]: each guess's chain, its index in the chain, and the token before the guess.

        The teacher needs the state at the token before the guess. Guesses are ordered like the segments' rows
        and mask tokens. A chain is given by the number of its row, a token by its index in the flat batch.
        """
        columns = [torch.zeros(3, 0, dtype=torch.int64)]
        for segment in self.segments(num_rows):
            row = torch.arange(segment.first, segment.stop)[self.count_R[segment.first : segment.stop] > 0]
            chain = torch.cat([row, segment.anchor_A[segment.chain_C]])
            guess = torch.cat([torch.zeros_like(row), segment.slot_C + 1])
            columns.append(torch.stack([chain, guess, self.token_R[chain] + 1 + guess]))
        return torch.cat(columns, dim=1)


@dataclass(frozen=True, kw_only=True)
class GuessesByToken:
    """The guesses that count in the loss, ordered by the token before the guess, whose state is the teacher's.

    About as many guesses as a chain has share a token, so they also share the teacher's distribution. Shapes: U
    tokens.
    """

    token_U: Tensor
    """int64, ascending, on the device like all tensors of this class but ``count_U``."""
    count_U: Tensor
    """int64, on the CPU: number of guesses after the token."""
    state_E: Tensor
    """int64: index of the guess in ``Chains.guesses``."""
    chain_E: Tensor
    guess_E: Tensor
    teacher_E: Tensor
    """int64: index of the guess's token in ``token_U``."""

    @classmethod
    def of(cls, guesses_3E: Tensor, device: torch.device) -> Self:
        """Order the guesses that ``Chains.guesses`` returns."""
        order_E = guesses_3E[2].argsort(stable=True)
        chain_E, guess_E, token_E = guesses_3E[:, order_E]
        token_U, teacher_E, count_U = token_E.unique_consecutive(return_inverse=True, return_counts=True)
        columns = to_device_async(torch.stack([order_E, chain_E, guess_E, teacher_E]), device)
        names = ("state_E", "chain_E", "guess_E", "teacher_E")
        return cls(
            token_U=to_device_async(token_U, device),
            count_U=count_U,
            **dict(zip(names, columns, strict=True)),
        )

    def chunks(self, most: int, token_cost: int, guess_cost: int) -> Iterator[tuple[slice, slice]]:
        """Yield ranges of tokens and of their guesses, each of a cost of about ``most`` at the most."""
        reached_U = (token_cost + guess_cost * self.count_U).cumsum(0)
        sizes = ((reached_U - 1) // most).unique_consecutive(return_counts=True)[1]
        tokens = [0, *sizes.cumsum(0).tolist()]
        guesses = [0, *self.count_U.cumsum(0).tolist()]
        for first, stop in pairwise(tokens):
            yield slice(first, stop), slice(guesses[first], guesses[stop])
