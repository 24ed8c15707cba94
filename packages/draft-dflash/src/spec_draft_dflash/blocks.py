"""Blocks: where a document is cut for training, drawn from its mask alone.

An anchor a is the last known token of a block, whose slot k guesses token a + k. Slot k counts iff tokens a + 1 to
a + k are all in the document and supervised. Where a sample has guess places, its blocks are the engine's rounds: one
began at a iff token a + 1 has place 1, and slot k counts iff tokens a + 1 to a + k have the places 1 to k, too.
Everything here happens on the CPU: the draw needs no features, so the denominators of a step are known before its
first forward pass, at any number of ranks.

Shapes: A anchors, R counted slots.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from spec_core.records import Supervision

if TYPE_CHECKING:
    from torch import Tensor

    from spec_core.records import DraftBatch

DEFAULT_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}


@dataclass(frozen=True)
class BlockRule:
    """The length of blocks, and how their anchors are drawn."""

    num_anchors: int
    block_size: int

    def draw(self, sample: Supervision) -> tuple[Tensor, Tensor]:
        """Return int64 [A] anchors of one document, ascending, and how many slots of each count (at least 1).

        The draw is uniform without replacement, a function of (seed, epoch, sample id, mask).
        """
        mask_T, place_T = sample.loss_mask, sample.guess_place
        if place_T is not None:
            starts_T, counted_T = _rounds(torch.where(mask_T, place_T, 0))
        else:
            starts_T, counted_T = mask_T[:-1] & mask_T[1:], _run_lengths(mask_T)
        anchor_A = starts_T.nonzero().squeeze(1)
        if len(anchor_A) > self.num_anchors:
            chosen = torch.randperm(len(anchor_A), generator=_generator(sample))[: self.num_anchors]
            anchor_A = anchor_A[chosen].sort().values
        return anchor_A, counted_T[anchor_A + 1].clamp(max=self.block_size - 1)


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


def slot_weights(block_size: int, gamma: float | None) -> Tensor:
    """Return float64 [block_size − 1]: exp(−(k − 1) / gamma) of slots k = 1, 2, and so on."""
    decay = gamma or DEFAULT_GAMMA.get(block_size, block_size / 2)
    return (-torch.arange(block_size - 1, dtype=torch.float64) / decay).exp()


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


def _generator(sample: Supervision) -> torch.Generator:
    """Return a generator seeded by a hash: neighbouring sample ids must not give related draws."""
    key = f"{sample.seed} {sample.epoch} {sample.sample_id}".encode()
    number = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "little")
    return torch.Generator().manual_seed(number)
