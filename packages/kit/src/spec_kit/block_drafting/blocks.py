"""Sample the training blocks of each document, from its loss mask and without features.

The anchor of a block is its last known token. Guess k of the block with anchor a predicts token a + k. Guess k
counts in the loss iff tokens a + 1 to a + k are all in the document and supervised.

A sample may record the depth at which the engine guessed each token (``guess_depth``). Then its blocks are the
rounds of the engine. A round began at a iff token a + 1 has depth 1. Guess k counts only if tokens a + 1 to a + k
also have the depths 1 to k.

Everything here runs on the CPU. No features are needed, so the denominators of a step are known before its first
forward pass, for any number of ranks.

Shapes: A anchors, S guesses of a block, R guesses that count in the loss ("counted guesses").
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from spec_core import ContextGroup, VocabularyOps, to_device_async
from spec_core.records import DraftBatch, Supervision
from spec_kit.block_drafting.block_shape import BlockConfig
from spec_kit.block_drafting.head import BlockHead


@dataclass(frozen=True)
class BlockRule:
    """The rule by which the anchors of a document's blocks are drawn."""

    options: BlockConfig
    num_guesses: int

    def draw(self, sample: Supervision) -> tuple[Tensor, Tensor]:
        """Return one document's anchors and the number of counted guesses of each (≥ 1), both int64 [A].

        Anchors ascend. They are drawn uniformly without replacement; an engine's rounds are all taken, up to
        ``num_anchors``, and an evaluation takes all anchors. The draw depends only on seed, epoch, sample id, loss
        mask and ``guess_depth``.
        """
        mask_T, guess_depth_T = sample.loss_mask, sample.guess_depth
        if guess_depth_T is not None:
            starts_T, counted_T = _rounds(torch.where(mask_T, guess_depth_T, 0))
        else:
            starts_T = mask_T[:-1] & mask_T[1:]
            counted_T = _run_lengths(mask_T)
        anchor_A = starts_T.nonzero().squeeze(1)
        options = self.options
        most = options.num_blocks(len(anchor_A)) if guess_depth_T is None else options.num_anchors
        if len(anchor_A) > most and not sample.evaluates:
            chosen = torch.randperm(len(anchor_A), generator=sample_generator(sample))[:most]
            anchor_A = anchor_A[chosen].sort().values
        return anchor_A, counted_T[anchor_A + 1].clamp(max=self.num_guesses)


@dataclass(frozen=True)
class Blocks:
    """The blocks of a flat batch, on the CPU; indices count the tokens of the batch."""

    anchor_A: Tensor
    start_A: Tensor
    """Index of the first token of the block's document."""
    counted_A: Tensor
    everyones: Blocks | None = None
    """The blocks of all ranks of the context-parallel group; None if this object already holds all blocks."""

    @classmethod
    def of(cls, batch: DraftBatch, rule: BlockRule) -> Self:
        """Draw the blocks of every document of a batch; return the blocks that this rank trains."""
        columns = [torch.zeros(3, 0, dtype=torch.int64)]
        for span in batch.spans:
            anchor_A, counted_A = rule.draw(batch.supervision(span))
            start_A = torch.full_like(anchor_A, span.start)
            columns.append(torch.stack([anchor_A + span.start, start_A, counted_A]))
        anchor_A, start_A, counted_A = torch.cat(columns, dim=1)
        blocks = cls(anchor_A, start_A, counted_A)
        return blocks if batch.context is None else blocks.dealt(batch.context)

    def dealt(self, ranks: ContextGroup) -> Self:
        """Return the blocks of this rank.

        Blocks are sorted by the number of tokens that they see, and dealt to the ranks back and forth. So every
        rank has about equally many blocks and seen tokens.
        """
        order_A = (self.anchor_A - self.start_A).argsort(stable=True)
        turn_A = torch.arange(len(order_A)) % (2 * ranks.size)
        own_A = order_A[turn_A.minimum(2 * ranks.size - 1 - turn_A) == ranks.rank].sort().values
        return type(self)(self.anchor_A[own_A], self.start_A[own_A], self.counted_A[own_A], everyones=self)

    def tokens_before(self, batch: DraftBatch, num_guesses: int) -> Tensor:
        """Return the token that precedes each guess in the data, int64 [A, S], on the batch's device.

        The token is arbitrary for a guess that does not count in the loss.
        """
        device = batch.input_ids_T.device
        anchor_A = to_device_async(self.anchor_A, device)
        place_AS = anchor_A[:, None] + torch.arange(num_guesses, device=device)
        return batch.input_ids_T[place_AS.clamp(max=len(batch.input_ids_T) - 1)]

    def context_rows(self, batch: DraftBatch) -> Tensor:
        """Return the tokens that any block of any rank sees before its anchor, int64 [C], ascending.

        Further tokens are added until C is a multiple of ``batch.rows_multiple``. C is at least 1 if the batch
        has any token, so that every parameter gets a gradient.
        """
        every = self.everyones or self
        num_tokens = len(batch.loss_mask_T)
        one_A = torch.ones_like(every.anchor_A)
        begun_T = torch.zeros(num_tokens + 1, dtype=torch.int64)
        begun_T.index_add_(0, every.start_A, one_A).index_add_(0, every.anchor_A, -one_A)
        seen_T = begun_T.cumsum(0)[:num_tokens] > 0
        count = max(min(1, num_tokens), int(seen_T.sum()))
        missing = count + -count % batch.rows_multiple - int(seen_T.sum())
        seen_T[(~seen_T).nonzero().squeeze(1)[:missing]] = True
        return seen_T.nonzero().squeeze(1)


@dataclass(frozen=True)
class CountedGuesses:
    """The guesses that count in the loss, block by block: the first ``counted_A[a]`` guesses of block a."""

    counted_A: Tensor
    """int64 [A], on the CPU, so that chunks are cut without waiting for the device."""
    block_R: Tensor
    """int64 [R], on the device: index of the guess's block in the batch."""
    guess_R: Tensor
    """int64 [R], on the device: index of the guess in its block, from 0 on."""
    anchor_R: Tensor
    """int64 [R], on the device: index of the anchor in the flat batch."""
    before_R: Tensor
    """int64 [R], on the CPU: index, in the flat batch, of the token before the guess."""
    first: int = 0
    """Index, in the batch, of the first of these blocks."""

    @classmethod
    def of(cls, blocks: Blocks, device: torch.device) -> Self:
        """Return the counted guesses of some blocks, on the device."""
        counted_A = blocks.counted_A
        block_R = torch.arange(len(counted_A)).repeat_interleave(counted_A)
        guess_R = torch.arange(len(block_R)) - (counted_A.cumsum(0) - counted_A)[block_R]
        anchor_R = blocks.anchor_A[block_R]
        columns = torch.stack([block_R, guess_R, anchor_R])
        return cls(counted_A, *to_device_async(columns, device), before_R=anchor_R + guess_R)

    @property
    def place_R(self) -> tuple[Tensor, Tensor]:
        """Indices of the guesses in a tensor [A, S, …] of all blocks of the batch."""
        return self.block_R, self.guess_R

    @property
    def label_R(self) -> Tensor:
        """Indices, in the flat batch, of the tokens that are guessed, int64 [R]."""
        return self.anchor_R + 1 + self.guess_R

    def tokens_before(self) -> tuple[Tensor, Tensor]:
        """Return the distinct tokens before the guesses, int64 [U], and each guess's index among them, int64 [R].

        Blocks overlap, so several guesses have the same token before them, and share what is computed from it.
        """
        device = self.anchor_R.device
        least = int(self.before_R.min())
        shifted_R = self.before_R - least
        is_there_X = torch.zeros(int(shifted_R.max()) + 1, dtype=torch.bool).index_fill_(
            0, shifted_R, value=True
        )
        token_U = is_there_X.nonzero().squeeze(1) + least
        index_R = (is_there_X.cumsum(0) - 1)[shifted_R]
        return to_device_async(token_U, device), to_device_async(index_R, device)

    def chunks(
        self, ops: VocabularyOps, head: BlockHead, num_guesses: int, *, has_teacher: bool = True
    ) -> list[CountedGuesses]:
        """Divide the guesses into chunks of whole blocks.

        A chunk has at least one block, and otherwise at most ``ops.chunk_bytes`` of logits. ``num_guesses``: number
        of guesses of a block. ``has_teacher``: whether a guess also has the logits of its teacher.
        """
        # Ranks have equally many rows of a reduced vocabulary, but not of a whole one.
        num_rows = ops.shard_rows if head.vocab_mask_V is None else len(head.ids_V)
        teacher_bytes = 4 * has_teacher  # in float32; or in half precision, for the guess and for its token
        row_bytes = num_rows * ops.head_VH.element_size() + ops.shard_rows * teacher_bytes
        size = max(1, ops.chunk_bytes // row_bytes // num_guesses)
        ends = [0, *self.counted_A.cumsum(0).tolist()]
        edges = [*range(0, len(self.counted_A), size), len(self.counted_A)]
        return [
            self._chunk(slice(a, b), slice(ends[a], ends[b])) for a, b in pairwise(edges) if ends[a] < ends[b]
        ]

    def table(self, value_RX: Tensor, num_guesses: int) -> Tensor:
        """Return a table [A, S, …] of the counted guesses' values [R, …]; all other guesses get 0."""
        zeros = value_RX.new_zeros(len(self.counted_A), num_guesses, *value_RX.shape[1:])
        return zeros.index_put_((self.block_R - self.first, self.guess_R), value_RX)

    def _chunk(self, blocks: slice, rows: slice) -> CountedGuesses:
        return CountedGuesses(
            self.counted_A[blocks],
            self.block_R[rows],
            self.guess_R[rows],
            self.anchor_R[rows],
            self.before_R[rows],
            blocks.start,
        )


def guess_weights(num_guesses: int, decay: float) -> Tensor:
    """Return float64 [S]: the weight exp(−(k − 1) / decay) of each guess k = 1, 2, …, S."""
    return (-torch.arange(num_guesses, dtype=torch.float64) / decay).exp()


def _run_lengths(mask_T: Tensor) -> Tensor:
    """Return int64 [T]: the number of consecutive True entries that start at each index."""
    index_T = torch.arange(len(mask_T))
    end_T = torch.where(mask_T, len(mask_T), index_T).flip(0).cummin(0).values.flip(0)
    return end_T - index_T


def _rounds(guess_depth_T: Tensor) -> tuple[Tensor, Tensor]:
    """Find the rounds of an engine in the depths at which it guessed the tokens.

    ``guess_depth_T``: depth of each token, from 1; 0 for tokens that the engine did not guess. Return for
    each index t whether a round began at token t, bool [T − 1]. Return also how many tokens, from t on, have
    depths that rise by 1 from token to token, int64 [T].
    """
    goes_on_T = torch.zeros(len(guess_depth_T), dtype=torch.bool)
    goes_on_T[1:] = (guess_depth_T[1:] > 1) & (guess_depth_T[1:] == guess_depth_T[:-1] + 1)
    following_T = torch.cat([_run_lengths(goes_on_T)[1:], torch.zeros(1, dtype=torch.int64)])
    return guess_depth_T[1:] == 1, 1 + following_T


def sample_generator(sample: Supervision) -> torch.Generator:
    """Return a generator seeded by a hash, so that the draws of neighbouring sample ids are unrelated."""
    key = f"{sample.seed} {sample.epoch} {sample.sample_id}".encode()
    number = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "little")
    return torch.Generator().manual_seed(number)
