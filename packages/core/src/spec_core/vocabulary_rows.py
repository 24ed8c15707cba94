"""Log-sum-exp and arg-max of logits whose vocabulary axis may be sharded: every reduction goes through ``ops``.

Shapes: X any rows, V the local rows of the vocabulary (see ``spec_core.ops``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from spec_core.plain_kernels import PLAIN

if TYPE_CHECKING:
    from torch import Tensor

    from spec_core.ops import VocabularyOps


def summarize(logits_XV: Tensor, ids_V: Tensor, ops: VocabularyOps) -> tuple[Tensor, Tensor]:
    """(log-sum-exp, vocabulary id of the largest) of each row; over shards the smallest id of a tie."""
    local_X, sum_X, index_X = (ops.kernels or PLAIN).summarize(logits_XV)
    top_X = ops.reduce_max(local_X)
    log_sum_X = top_X + ops.reduce_sum(sum_X * (local_X - top_X).exp()).log()
    # A NaN is not below anything: what such a row calls its largest is still an id of the vocabulary.
    best_X = torch.where(local_X < top_X, torch.iinfo(torch.int64).min, -ids_V[index_X])
    return log_sum_X, -ops.reduce_max(best_X)
