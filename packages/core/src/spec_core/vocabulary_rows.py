"""Softmax and arg-max of logits whose vocabulary axis may be sharded: every reduction goes through ``ops``.

Shapes: X any rows, V the local rows of the vocabulary (see ``spec_core.ops``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from spec_core.ops import VocabularyOps


def softmax_(logits_XV: Tensor, ops: VocabularyOps) -> Tensor:
    """Turns logits into their softmax in place; returns their log-sum-exp."""
    top_X = ops.reduce_max(logits_XV.amax(-1))
    sum_X = ops.reduce_sum(logits_XV.sub_(top_X[..., None]).exp_().sum(-1))
    logits_XV.div_(sum_X[..., None])
    return top_X + sum_X.log()


def arg_max(values_XV: Tensor, ids_V: Tensor, ops: VocabularyOps) -> Tensor:
    """Vocabulary id of the largest value; over shards the smallest id of a tie."""
    top_X, index_X = values_XV.max(-1)
    best_X = ops.reduce_max(top_X)
    return -ops.reduce_max(torch.where(top_X == best_X, -ids_V[index_X], torch.iinfo(torch.int64).min))
