"""Find the candidates of guesses, which are the tokens with the head's largest logits.

Shapes: R guesses, C candidates of each, V vocabulary rows of this shard (see ``spec_core.ops``), X any number of
columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from spec_core import VocabularyOps
from spec_draft_dflash2.shape import CandidateShape
from spec_kit.layers import Distribution, softmax

SET = 64
"""Number of columns of which ``largest`` takes the maximum first."""


@dataclass(frozen=True)
class Candidates:
    """The candidates of guesses, and their logits in float32 or wider; equal on all vocabulary shards."""

    id_RC: Tensor
    logits_RC: Tensor

    @classmethod
    def of(cls, logits_RV: Tensor, ids_V: Tensor, ops: VocabularyOps, shape: CandidateShape) -> Self:
        """Return the candidates of each row of logits, the likeliest first. ``ids_V``: the token of each column."""
        count = shape.num_candidates
        top_RC, column_RC = largest(logits_RV, min(count, len(ids_V)))
        top_RC = top_RC.to(torch.promote_types(top_RC.dtype, torch.float32))
        id_RC = ids_V[column_RC]
        if len(ids_V) == shape.vocab_size:
            return cls(id_RC, top_RC)
        return cls(*_merged(top_RC, id_RC, ops, count))


def largest(logits_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` largest logits of each row and their columns, the largest first.

    Columns are divided into sets of equal size. The largest logits are in the ``count`` sets with the largest maxima.
    Finding these takes one pass over the logits, and ``topk`` over a whole vocabulary takes several.
    """
    rows, width = logits_RV.shape
    if width % SET or width < 4 * SET * count:
        return logits_RV.topk(count)
    # A set's columns are equally far apart, so that neighbouring columns are compared at the same time.
    num_sets = width // SET
    set_RC = logits_RV.view(rows, SET, num_sets).amax(1).topk(count).indices
    column_RX = (set_RC[..., None] + num_sets * torch.arange(SET, device=set_RC.device)).flatten(1)
    top_RC, place_RC = logits_RV.gather(1, column_RX).topk(count)
    return top_RC, column_RX.gather(1, place_RC)


def _merged(top_RC: Tensor, id_RC: Tensor, ops: VocabularyOps, count: int) -> tuple[Tensor, Tensor]:
    """Return ids and logits [R, count] of the likeliest of all shards' candidates.

    If two logits are equal, the smaller token id comes first.
    """
    ids = list[torch.Tensor]()
    tops = list[torch.Tensor]()
    no_id = torch.iinfo(torch.int64).min
    for _ in range(count):
        local_R, column_R = top_RC.max(-1)
        best_R = ops.reduce_max(local_R)
        own_R = torch.where(local_R < best_R, no_id, -id_RC.gather(1, column_R[:, None]).squeeze(1))
        ids.append(-ops.reduce_max(own_R))
        tops.append(best_R)
        top_RC = top_RC.masked_fill(id_RC == ids[-1][:, None], -torch.inf)
    return torch.stack(ids, dim=1), torch.stack(tops, dim=1)


@dataclass(frozen=True)
class LocalColumns:
    """The column indices of tokens in this shard's rows of the vocabulary."""

    column_RX: Tensor
    """int64: the token's column; an arbitrary column if the token has none on this shard."""
    here_RX: Tensor
    """bool: whether the token has a column on this shard."""
    id_RX: Tensor
    """int64: the id of the token in ``column_RX``."""

    @classmethod
    def of(cls, id_RX: Tensor, ids_V: Tensor) -> Self:
        """Return the columns of the tokens ``id_RX``. ``ids_V``: int64, ascending, the token of each column."""
        column_RX = torch.searchsorted(ids_V, id_RX).clamp_(max=len(ids_V) - 1)
        found_RX = ids_V[column_RX]
        return cls(column_RX, found_RX == id_RX, found_RX)

    def probabilities(self, rows: Distribution) -> Tensor:
        """Return the tokens' probabilities [R, X], float32 or wider.

        ``rows``: R distributions, given by their logits and log-sum-exps.
        """
        logits_RV, log_sum_R = rows
        return softmax(logits_RV.gather(1, self.column_RX), log_sum_R)

    def logits(self, rows: Distribution) -> Tensor:
        """Return the tokens' logits [R, X], float32 or wider, or 0 on another shard; their sum is the logit."""
        logits_RV, log_sum_R = rows
        return logits_RV.gather(1, self.column_RX).to(log_sum_R) * self.here_RX


def over_vocabulary(prob_BC: Tensor, id_BC: Tensor, vocab_size: int) -> Tensor:
    """Return probabilities [B, V] over the target's vocabulary; every token that is no candidate has 0."""
    return prob_BC.new_zeros(len(prob_BC), vocab_size).scatter_(1, id_BC, prob_BC)
