"""Define the kernels of drafts that guess chains, in plain torch (see ``spec_core.kernels``).

Training-time test: in step s a query sees the causal keys of step 0, and of each later step only the key at the
query's row.

Shapes: q ``[T, heads, D]``; keys and values ``[T, kv_heads, D]``. Values, and thus outputs, may be narrower than
queries and keys, in every kernel. For grouped-query attention, heads are viewed as ``[T, kv_heads, group, D]``
(suffix TKGD), so that keys broadcast over their group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_kit.layers import DecoderKernels, rotate

Attended = tuple[Tensor, Tensor]
"""Output [T, heads, D], and the natural log-sum-exp of the scores [T, heads], float32 or wider."""
Bounds = Sequence[tuple[int, int]]
"""Index of the first token of each document, and of the token after its last token."""
Pieces = Sequence[tuple[int, int, int]]
"""Pieces of documents: index of the document's first token, and the first and last + 1 token of the piece."""
Three = tuple[Tensor, Tensor, Tensor]


def added_linear(rows_RK: Tensor, weight_NK: Tensor, added_RN: Tensor | None = None) -> Tensor:
    """Return rows · weightᵀ, [R, N], plus ``added_RN`` if it is given; differentiable."""
    if added_RN is None:
        return F.linear(rows_RK, weight_NK)
    return torch.addmm(added_RN, rows_RK, weight_NK.T)


def ttt_attention(q: Tensor, attended: Attended, keys: Tensor, values: Tensor) -> Attended:
    """Merge the attention ``attended`` with S further keys of each query, at the query's row.

    ``keys`` and ``values``: [S, T, kv_heads, D] each; each [T, kv_heads, D] is contiguous. Scores are scaled by
    ``D ** -0.5``. The memory of ``attended`` may be overwritten.
    """
    out, lse = attended
    scores_TKGS = _own_scores(q, keys)
    lse_TKG = lse.reshape(scores_TKGS.shape[:-1])
    merged = torch.logaddexp(lse_TKG, scores_TKGS.logsumexp(-1))
    total = out.reshape(*merged.shape, out.shape[-1]) * (lse_TKG - merged).exp()[..., None]
    for weight, value in zip((scores_TKGS - merged[..., None]).exp().unbind(-1), values, strict=True):
        total += weight[..., None] * value[:, :, None]
    return total.reshape(out.shape).to(out.dtype), merged.reshape(lse.shape)


def ttt_attention_backward(
    grad_out: Tensor,
    saved: tuple[Tensor, Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    grad_q: Tensor,
) -> Three:
    """Return the gradients (dq, dk, dv) of ``ttt_attention``.

    ``saved``: (q, out, lse), with out and lse over all keys. ``grad_q``: the gradient of q through the causal keys;
    it is added to dq, and its memory may be overwritten.
    """
    q, out, lse = saved
    q_TKGD, grad_TKGD = grouped(q, keys[0]), grouped(grad_out, keys[0])
    weights = (_own_scores(q, keys) - lse.reshape(*q_TKGD.shape[:-1], 1)).exp()
    row_TKG = (grad_TKGD * grouped(out, keys[0])).sum(-1)
    added = torch.zeros_like(q_TKGD)
    grad_keys: list[Tensor] = []
    grad_values: list[Tensor] = []
    for weight, key, value in zip(weights.unbind(-1), keys, values, strict=True):
        from_value = (grad_TKGD * value[:, :, None]).sum(-1)
        score = (weight * (from_value - row_TKG) * q.shape[-1] ** -0.5)[..., None]
        added += score * key[:, :, None]
        grad_keys.append((score * q_TKGD).sum(2).to(key.dtype))
        grad_values.append((weight[..., None] * grad_TKGD).sum(2).to(value.dtype))
    total = (added + grad_q.reshape(added.shape)).reshape(grad_q.shape).to(grad_q.dtype)
    return total, torch.stack(grad_keys), torch.stack(grad_values)


@dataclass(frozen=True, kw_only=True)
class ChainKernels(DecoderKernels):
    """The kernels that a draft of chains can use.

    ``causal_attention`` has no plain version: without it, the attention of all steps is dense, a few queries at a
    time.
    """

    rotate: Callable[[Tensor, tuple[Tensor, Tensor]], Tensor] = rotate
    added_linear: Callable[..., Tensor] = added_linear
    ttt_attention: Callable[[Tensor, Attended, Tensor, Tensor], Attended] = ttt_attention
    ttt_attention_backward: Callable[[Tensor, Three, Tensor, Tensor, Tensor], Three] = ttt_attention_backward
    causal_attention: Callable[..., Attended] | None = None
    """(q, k, v, bounds, window=None) -> ``Attended``: causal attention inside each document, with scores scaled by
    ``D ** -0.5``; any dtype and shape. Rows outside every document are 0 in every result. With a ``window``, a row
    attends to itself and the window − 1 rows before it."""
    causal_attention_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None
    """(grad_out, (q, k, v, out, lse), bounds, window=None) -> (dq, dk, dv). out and lse may be over these and further
    keys."""
    prefixed_attention: Callable[[Tensor, Tensor, Tensor, Pieces], Attended] | None = None
    """(q [P], k [T], v [T], pieces) -> ``Attended`` [P]: ``causal_attention`` for the P tokens of some pieces of
    documents, which are the rows of q, one piece after the other. Each token attends to its document up to itself.
    Without this kernel, a rank that computes a share of the tokens runs ``causal_attention`` with queries for all
    tokens."""
    prefixed_attention_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None
    """(grad_out, (q, k, v, out, lse), pieces) -> (dq [P], dk [T], dv [T]), as ``causal_attention_backward``."""

    @classmethod
    def examples(cls, draw: Callable[..., Tensor]) -> Mapping[str, tuple[object, ...]]:
        """Return, for each kernel, arguments on which it is compared with its version in plain torch."""
        angle, q, grad_out, grad_q = draw(7, 1, 16), *(draw(7, 4, 32) for _ in range(3))
        keys, values = draw(3, 7, 2, 32), draw(3, 7, 2, 32)
        attended = draw(7, 4, 32), draw(7, 4)
        merged = ttt_attention(q, attended, keys, values)
        return {
            **super().examples(draw),
            "added_linear": tuple(draw(*shape).requires_grad_() for shape in ((7, 16), (24, 16), (7, 24))),
            "rotate": (draw(7, 3, 32).requires_grad_(), (angle.cos(), angle.sin())),
            "ttt_attention": (q, attended, keys, values),
            "ttt_attention_backward": (grad_out, (q, *merged), keys, values, grad_q),
        }


def grouped(heads: Tensor, like_kv: Tensor) -> Tensor:
    """Return ``heads`` [T, heads, D] as [T, kv_heads, group, D], in float32 or wider.

    So sums of bfloat16 products are computed in float32.
    """
    wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
    rows, num_heads, head_dim = heads.shape
    return wide.reshape(rows, like_kv.shape[1], num_heads // like_kv.shape[1], head_dim)


def _own_scores(q: Tensor, keys: Tensor) -> Tensor:
    """Return each query's scaled scores with S keys at its row, [T, kv_heads, group, S]; float32 or wider."""
    q_TKGD = grouped(q, keys[0])
    scores = [(q_TKGD * key[:, :, None]).sum(-1) for key in keys]
    return torch.stack(scores, dim=-1) * q.shape[-1] ** -0.5
