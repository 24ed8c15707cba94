"""Define the selector, which scores a guess's candidates by how well they follow the previous token.

Parameters are named as in the serving format. Shapes: R guesses, C candidates of each, H width, r rank, V tokens of
the vocabulary; ``...`` any leading dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spec_draft_dflash2.shape import DFlash2Shape
from spec_kit.layers import INIT_STD, linear


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
