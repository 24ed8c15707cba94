"""Log-sum-exp and arg-max of logits whose vocabulary axis may be sharded: every reduction goes through ``ops``.

Shapes: X any rows, V the local rows of the vocabulary (see ``spec_core.ops``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from spec_core.drafting.plain_kernels import DecoderKernels
    from spec_core.ops import VocabularyOps


def logsumexp_argmax(
    logits_XV: Tensor, ids_V: Tensor, ops: VocabularyOps, kernels: DecoderKernels
) -> tuple[Tensor, Tensor]:
    """Return each row's log-sum-exp, and the vocabulary id of its largest logit; of a tie the smallest id."""
    local_X, sum_X, index_X = kernels.logsumexp_argmax(logits_XV)
    top_X = ops.reduce_max(local_X)
    log_sum_X = top_X + ops.reduce_sum(sum_X * (local_X - top_X).exp()).log()
    # A NaN is not below anything: what such a row calls its largest is still an id of the vocabulary.
    best_X = torch.where(local_X < top_X, torch.iinfo(torch.int64).min, -ids_V[index_X])
    return log_sum_X, -ops.reduce_max(best_X)
