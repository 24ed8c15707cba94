"""Define the selector, which scores a guess's candidates by how well they follow the previous token.

Candidates are the tokens with the head's largest logits. Parameters are named as in the serving format. Shapes: R
guesses, C candidates of each, H width, r rank, V vocabulary rows of this shard (see ``spec_core.ops``), X any number
of columns; ``...`` any leading dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from spec_core import VocabularyOps
from spec_draft_dflash2.shape import DFlash2Shape
from spec_kit.layers import INIT_STD, Distribution, linear, softmax

SET = 64
"""Number of columns of which ``largest`` takes the maximum first."""


class CandidateSelector(nn.Module):
    """Adds ⟨A[previous token] ⊙ P · state, B[candidate]⟩ to a candidate's logit.

    A and B are tables with a vector for each token; P is a projection.
    """

    def __init__(self, shape: DFlash2Shape) -> None:
        """Initialize both tables and the projection with random weights."""
        super().__init__()
        table = (shape.target_vocab_size, shape.selector_rank)
        self.predecessor_codebook = nn.Parameter(torch.randn(table) * INIT_STD)
        self.successor_codebook = nn.Parameter(torch.randn(table) * INIT_STD)
        self.hidden_projection = linear(shape.hidden_size, shape.selector_rank)

    def context(self, states: Tensor, before: Tensor) -> Tensor:
        """Return for each guess the vector A[previous token] ⊙ P · state, [..., r].

        A candidate's score is its logit plus the product of this vector and the candidate's row of B.
        """
        return nn.functional.embedding(before, self.predecessor_codebook) * self.hidden_projection(states)


def scores(logits_RC: Tensor, context_Rr: Tensor, successor_RCr: Tensor) -> Tensor:
    """Return scores [R, C], float32 or wider: the candidates' logits plus the selector's terms."""
    return logits_RC + (successor_RCr @ context_Rr[..., None]).squeeze(-1).to(logits_RC.dtype)


def sum_rows(table_Vr: Tensor, id_N: Tensor, rows_Nr: Tensor) -> Tensor:
    """Return a table like ``table_Vr`` in which row v is the sum of the rows whose token id in ``id_N`` is v.

    The order of the sums is fixed, so that equal runs give equal bits. On a CPU ``index_add_`` keeps it; elsewhere
    the gradient of an embedding does, which sorts the ids.
    """
    if table_Vr.is_cpu:
        return torch.zeros_like(table_Vr).index_add_(0, id_N, rows_Nr)
    return torch.ops.aten.embedding_dense_backward(rows_Nr, id_N, len(table_Vr), -1, False)


@dataclass(frozen=True)
class Candidates:
    """The candidates of guesses, and their logits in float32 or wider; equal on all vocabulary shards."""

    id_RC: Tensor
    logits_RC: Tensor

    @classmethod
    def of(cls, logits_RV: Tensor, ops: VocabularyOps, shape: DFlash2Shape) -> Self:
        """Return the candidates of each row of logits, the likeliest first."""
        first, stop = ops.vocab_range
        top_RC, column_RC = largest(logits_RV, min(shape.selector_top_k, stop - first))
        top_RC = top_RC.to(torch.promote_types(top_RC.dtype, torch.float32))
        if stop - first == shape.target_vocab_size:
            return cls(column_RC, top_RC)
        return cls(*_merged(top_RC, column_RC + first, ops, shape.selector_top_k))


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
    ids, tops, no_id = list[torch.Tensor](), list[torch.Tensor](), torch.iinfo(torch.int64).min
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
    """int64: the token's column; an arbitrary column if the token is on another shard."""
    here_RX: Tensor
    """bool: whether the token is on this shard."""
    id_RX: Tensor
    """int64: the id of the token in ``column_RX``."""

    @classmethod
    def of(cls, id_RX: Tensor, ops: VocabularyOps) -> Self:
        """Return the columns of the tokens ``id_RX``."""
        first, stop = ops.vocab_range
        column_RX = (id_RX - first).clamp(0, stop - first - 1)
        return cls(column_RX, column_RX + first == id_RX, column_RX + first)

    def probabilities(self, rows: Distribution) -> Tensor:
        """Return the tokens' probabilities [R, X], float32 or wider.

        ``rows``: R distributions, given by their logits and log-sum-exps.
        """
        logits_RV, log_sum_R = rows
        return softmax(logits_RV.gather(1, self.column_RX), log_sum_R)
