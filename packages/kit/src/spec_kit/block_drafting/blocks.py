"""Blocks: where a document is cut for training, drawn from its mask alone.

An anchor a is the last known token of a block, whose guess k is for token a + k. Guess k counts iff tokens a + 1 to
a + k are all in the document and supervised. Where a sample has guess places, its blocks are the engine's rounds: one
began at a iff token a + 1 has place 1, and guess k counts iff tokens a + 1 to a + k have the places 1 to k, too.
Everything here happens on the CPU: the draw needs no features, so the denominators of a step are known before its
first forward pass, at any number of ranks.

Shapes: A anchors, S guesses of a block, R counted guesses.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Self

import torch

from spec_core.host_tensors import to_device_async
from spec_core.records import Supervision

if TYPE_CHECKING:
    from torch import Tensor

    from spec_core.records import DraftBatch


@dataclass(frozen=True)
class BlockRule:
    """The guesses of a block, and how anchors are drawn."""

    num_anchors: int
    """Most blocks of one document."""
    num_guesses: int

    def draw(self, sample: Supervision) -> tuple[Tensor, Tensor]:
        """Return int64 [A] anchors of one document, ascending, and how many guesses of each count (at least 1).

        The draw is uniform without replacement, a function of (seed, epoch, sample id, mask).
        """
        mask_T, place_T = sample.loss_mask, sample.guess_place
        if place_T is not None:
            starts_T, counted_T = _rounds(torch.where(mask_T, place_T, 0))
        else:
            starts_T, counted_T = mask_T[:-1] & mask_T[1:], _run_lengths(mask_T)
        anchor_A = starts_T.nonzero().squeeze(1)
        if len(anchor_A) > self.num_anchors:
            chosen = torch.randperm(len(anchor_A), generator=sample_generator(sample))[: self.num_anchors]
            anchor_A = anchor_A[chosen].sort().values
        return anchor_A, counted_T[anchor_A + 1].clamp(max=self.num_guesses)


@dataclass(frozen=True)
class Blocks:
    """The blocks of a flat batch, on the CPU; indices count along the batch."""

    anchor_A: Tensor
    start_A: Tensor
    """First token of the block's document."""
    counted_A: Tensor

    @classmethod
    def of(cls, batch: DraftBatch, rule: BlockRule) -> Self:
        """Draw the blocks of every document of a batch."""
        mask_T, place_T = batch.loss_mask_T.cpu(), batch.guess_place_T
        columns = [torch.zeros(3, 0, dtype=torch.int64)]
        for span in batch.spans:
            sample = Supervision(
                sample_id=span.sample_id,
                epoch=span.epoch,
                loss_mask=mask_T[span.start : span.stop],
                guess_place=None if place_T is None else place_T[span.start : span.stop],
                seed=batch.seed,
            )
            anchor_A, counted_A = rule.draw(sample)
            start_A = torch.full_like(anchor_A, span.start)
            columns.append(torch.stack([anchor_A + span.start, start_A, counted_A]))
        return cls(*torch.cat(columns, dim=1))

    def context_rows(self, batch: DraftBatch) -> Tensor:
        """Return int64 [C], ascending: the tokens that some block sees before its anchor.

        Further ones make them at least one where the batch has any, for every parameter to get a gradient, and a
        multiple of ``batch.rows_multiple``.
        """
        num_tokens, one_A = len(batch.loss_mask_T), torch.ones_like(self.anchor_A)
        begun_T = torch.zeros(num_tokens + 1, dtype=torch.int64)
        begun_T.index_add_(0, self.start_A, one_A).index_add_(0, self.anchor_A, -one_A)
        seen_T = begun_T.cumsum(0)[:num_tokens] > 0
        count = max(min(1, num_tokens), int(seen_T.sum()))
        missing = count + -count % batch.rows_multiple - int(seen_T.sum())
        seen_T[(~seen_T).nonzero().squeeze(1)[:missing]] = True
        return seen_T.nonzero().squeeze(1)


@dataclass(frozen=True)
class CountedGuesses:
    """The guesses that count, block by block: the first ``counted`` of each."""

    counted_A: Tensor
    """int64 [A], on the CPU: chunks are cut without waiting for the device."""
    block_R: Tensor
    guess_R: Tensor
    """int64 [R], on the device: 0 for the first guess of a block."""
    anchor_R: Tensor
    """int64 [R], on the device: index of the anchor in the flat batch."""

    @classmethod
    def of(cls, blocks: Blocks, device: torch.device) -> Self:
        """Return the counted guesses of some blocks, on the device."""
        counted_A = blocks.counted_A
        block_R = torch.arange(len(counted_A)).repeat_interleave(counted_A)
        guess_R = torch.arange(len(block_R)) - (counted_A.cumsum(0) - counted_A)[block_R]
        columns = torch.stack([block_R, guess_R, blocks.anchor_A[block_R]])
        return cls(counted_A, *to_device_async(columns, device))

    @property
    def label_R(self) -> Tensor:
        """Indices, in the flat batch, of the tokens that are guessed, int64 [R]."""
        return self.anchor_R + 1 + self.guess_R

    def chunks(self, num_rows: int, num_guesses: int) -> list[tuple[slice, CountedGuesses]]:
        """Return the blocks of each chunk, and their counted guesses, with blocks numbered within the chunk.

        A chunk is whole blocks, of at most ``num_rows`` guesses where one block has no more.
        """
        size = max(1, num_rows // num_guesses)
        ends = [0, *self.counted_A.cumsum(0).tolist()]
        edges = [*range(0, len(self.counted_A), size), len(self.counted_A)]
        return [
            (slice(a, b), self._chunk(slice(a, b), slice(ends[a], ends[b])))
            for a, b in pairwise(edges)
            if a < b
        ]

    def table(self, value_R: Tensor, num_guesses: int) -> Tensor:
        """Return [A, S]: the guesses' values at their places, 0 elsewhere."""
        zeros = value_R.new_zeros(len(self.counted_A), num_guesses)
        return zeros.index_put((self.block_R, self.guess_R), value_R)

    def _chunk(self, blocks: slice, rows: slice) -> CountedGuesses:
        return CountedGuesses(
            self.counted_A[blocks],
            self.block_R[rows] - blocks.start,
            self.guess_R[rows],
            self.anchor_R[rows],
        )


def guess_weights(num_guesses: int, decay: float) -> Tensor:
    """Return float64 [S]: exp(−(k − 1) / decay) of guesses k = 1, 2, and so on."""
    return (-torch.arange(num_guesses, dtype=torch.float64) / decay).exp()


def _run_lengths(mask_T: Tensor) -> Tensor:
    """Return int64 [T]: how many supervised tokens follow one another from each token on."""
    index_T = torch.arange(len(mask_T))
    end_T = torch.where(mask_T, len(mask_T), index_T).flip(0).cummin(0).values.flip(0)
    return end_T - index_T


def _rounds(place_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return bool [T − 1], where a round began, and int64 [T]: how many tokens from each on have ascending places."""
    goes_on_T = torch.zeros(len(place_T), dtype=torch.bool)
    goes_on_T[1:] = (place_T[1:] > 1) & (place_T[1:] == place_T[:-1] + 1)
    following_T = torch.cat([_run_lengths(goes_on_T)[1:], torch.zeros(1, dtype=torch.int64)])
    return place_T[1:] == 1, 1 + following_T


def sample_generator(sample: Supervision) -> torch.Generator:
    """Return a generator seeded by a hash: neighbouring sample ids must not give related draws."""
    key = f"{sample.seed} {sample.epoch} {sample.sample_id}".encode()
    number = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "little")
    return torch.Generator().manual_seed(number)
