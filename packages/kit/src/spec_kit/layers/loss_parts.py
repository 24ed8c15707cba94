"""Reduce logits over a sharded vocabulary, and attach precomputed gradients, for a draft's loss.

Shapes: X any rows, V the local rows of the vocabulary (see ``spec_core.ops``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from spec_core import VocabularyOps
    from spec_kit.layers.plain_kernels import DecoderKernels, Distribution


def sharded_logsumexp_argmax(
    logits_XV: Tensor, ids_V: Tensor, ops: VocabularyOps, kernels: DecoderKernels
) -> tuple[Tensor, Tensor]:
    """Return each row's log-sum-exp, and the id of its largest logit (the smallest id of a tie)."""
    local_X, sum_X, index_X = kernels.logsumexp_argmax(logits_XV)
    top_X = ops.reduce_max(local_X)
    if top_X is local_X:  # there is one shard (O3)
        return local_X + sum_X.log(), ids_V[index_X]
    log_sum_X = top_X + ops.reduce_sum(sum_X * (local_X - top_X).exp()).log()
    # Comparisons with NaN are false, so a row with NaN still gets a valid id of the vocabulary.
    best_X = torch.where(local_X < top_X, torch.iinfo(torch.int64).min, -ids_V[index_X])
    return log_sum_X, -ops.reduce_max(best_X)


def probabilities(id_RX: Tensor, ids_V: Tensor, distribution: Distribution, ops: VocabularyOps) -> Tensor:
    """Return the probability of each token, [R, X]; 0 for a token without a row.

    ``id_RX``: int64, X tokens for each row of ``distribution``. ``ids_V``: int64, ascending, the token of each local
    row of the vocabulary.
    """
    logits_RV, log_sum_R = distribution
    column_RX = torch.searchsorted(ids_V, id_RX).clamp_(max=len(ids_V) - 1)
    there_RX = logits_RV.gather(1, column_RX).to(log_sum_R.dtype) - log_sum_R[:, None]
    return ops.reduce_sum(there_RX.exp() * (ids_V[column_RX] == id_RX))


@dataclass(frozen=True)
class LabelColumns:
    """The column of each label in logits over the local rows of the vocabulary, and whether it has one."""

    column_R1: Tensor
    """int64: column of the label; any column if the label has none on this shard."""
    here_R1: Tensor
    """bool: whether the label has a column on this shard."""

    @classmethod
    def of(cls, id_R: Tensor, ids_V: Tensor) -> Self:
        """Return the columns of the labels ``id_R``. ``ids_V``: int64, ascending, the token of each column."""
        column_R = torch.searchsorted(ids_V, id_R).clamp_(max=len(ids_V) - 1)
        return cls(column_R[:, None], (ids_V[column_R] == id_R)[:, None])

    def logits(self, logits_RV: Tensor, dtype: torch.dtype) -> Tensor:
        """Return each label's logit [R], or 0 without a column; the sum over shards is the logit."""
        return (logits_RV.gather(1, self.column_R1).to(dtype) * self.here_R1).squeeze(1)


def with_gradients(value: Tensor, grads: Sequence[Tensor], inputs: Sequence[Tensor]) -> Tensor:
    """Return the scalar ``value``, attached to autograd so that its gradients by ``inputs`` are ``grads``."""
    result: Tensor = _KnownGradients.apply(value, tuple(grads), *inputs)
    return result


class _KnownGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, grads: tuple[Tensor, ...], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*grads)
        ctx.dtypes = [tensor.dtype for tensor in inputs]
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_value: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return None, None, *((grad * grad_value).to(dtype) for grad, dtype in pairs)
