"""Compute attention of blocks of draft tokens to their document and to their own block, on CPUs.

torch's fused attention computes the attention to the context, document by document. The attention to the few
keys of the same block is computed separately, and the two results are merged by log-sum-exp. In this way no
query is compared with the keys of another block, and the backward pass recomputes nothing.

Shapes: A blocks of B slots, T tokens. Heads of D channels are viewed as K key-value heads, each with G query
heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spec_backend_cpu.attention import fused_attention, fused_attention_backward, heads_first

KeysValues = tuple[Tensor, Tensor]

PIECE_QUERIES = 256
"""Number of queries in one call of the fused attention, which belong to neighbouring blocks. The number is
large enough to be efficient, and so small that these blocks attend to nearly the same context."""


class DeviceBlocks(Protocol):
    """Positions of the blocks in a batch; the draft computes them."""

    @property
    def on_device(self) -> tuple[Tensor, Tensor]:
        """Return two tensors, int64 [A]: each block's anchor and the start of its document.

        An anchor is a token index. Anchors ascend.
        """
        ...


def merged_block_attention(
    q: Tensor,
    context: KeysValues,
    own: KeysValues,
    layout: DeviceBlocks,
    window: int | None,
    is_causal: bool,
) -> Tensor:
    """Return the blocks' attention, shaped like ``q`` [A, B, heads, D]; it is differentiable.

    ``context``: k, v [T, kv_heads, D]; ``own``: k, v [A, B, kv_heads, D]. A block attends to the tokens of
    its document before its anchor, with a ``window`` only to tokens less than ``window`` positions before
    the query. A query attends to its whole block, or with ``is_causal`` to its block up to itself.
    """
    if not q.numel():
        return NotImplemented
    return _BlockAttention.apply(q, *context, *own, layout, window, is_causal)  # pyright: ignore[reportReturnType]


class _BlockAttention(torch.autograd.Function):
    """Attention with a backward pass that uses the output and log-sum-exp over context and block together."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        own_k: Tensor,
        own_v: Tensor,
        layout: DeviceBlocks,
        window: int | None,
        is_causal: bool,
    ) -> Tensor:
        pieces = list(_pieces(layout, q.shape[1], window, q.dtype))
        own = _OwnKeys(q, own_k, is_causal=is_causal)
        seen = torch.zeros_like(q)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=own.scores.dtype)
        for piece in pieces:
            rows = q[piece.blocks].flatten(0, 1)
            inputs = (heads_first(rows), heads_first(k[piece.context]), heads_first(v[piece.context]))
            out_1NRD, lse_1NR = fused_attention(*inputs, 0.0, False, attn_mask=piece.mask)
            # A row that attends to no context has no valid number.
            out_RND = out_1NRD[0].transpose(0, 1).masked_fill(piece.blind_R[:, None, None], 0)
            lse_RN = lse_1NR[0].transpose(0, 1).masked_fill(piece.blind_R[:, None], -torch.inf)
            seen[piece.blocks] = out_RND.view_as(seen[piece.blocks])
            lse[piece.blocks] = lse_RN.view_as(lse[piece.blocks])
        merged = torch.logaddexp(lse, own.scores.logsumexp(-1).flatten(2))
        out = seen * (lse - merged).exp()[..., None] + own.values(merged, own_v)
        out = out.to(q.dtype)
        ctx.pieces = pieces
        ctx.is_causal = is_causal
        ctx.save_for_backward(q, k, v, own_k, own_v, out, merged)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, own_k, own_v, out, merged = ctx.saved_tensors
        own = _OwnKeys(q, own_k, is_causal=ctx.is_causal)
        grad_q, grad_k, grad_v = own.gradients(grad_out, out, merged, own_v)
        grad_context = torch.zeros_like(k), torch.zeros_like(v)
        for piece in ctx.pieces:
            of_rows = [
                heads_first(tensor[piece.blocks].flatten(0, 1)) for tensor in (grad_out, q, out, merged)
            ]
            of_context = heads_first(k[piece.context]), heads_first(v[piece.context])
            given = (*of_rows[:2], *of_context, *of_rows[2:])
            from_rows, *found = fused_attention_backward(*given, 0.0, False, attn_mask=piece.mask)
            grad_q[piece.blocks] += from_rows[0].transpose(0, 1).view_as(q[piece.blocks])
            for total, grad in zip(grad_context, found, strict=True):
                total[piece.context] += grad[0].transpose(0, 1)
        return grad_q.to(q.dtype), *grad_context, grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None


class _OwnKeys:
    """Scores of each block's queries against the keys of the same block, float32 or wider [A, B, K, G, B].

    K: key-value heads; G: query heads for each key-value head.
    """

    def __init__(self, q: Tensor, k: Tensor, *, is_causal: bool) -> None:
        self._scale = q.shape[-1] ** -0.5
        self._q = _grouped(q, k)
        self._k = _wide(k)
        self.scores = torch.einsum("abkgd,aukd->abkgu", self._q, self._k) * self._scale
        if is_causal:
            later = torch.ones(2 * (q.shape[1],), dtype=torch.bool).triu(1)
            self.scores.masked_fill_(later[:, None, None], -torch.inf)

    def values(self, merged: Tensor, v: Tensor) -> Tensor:
        """Return the values, weighted and summed over the keys of the same block, [A, B, heads, D].

        ``merged``: log-sum-exp over context and block, [A, B, heads].
        """
        return torch.einsum("abkgu,aukd->abkgd", self._weights(merged), _wide(v)).flatten(2, 3)

    def gradients(
        self, grad_out: Tensor, out: Tensor, merged: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the block's queries, keys and values.

        The queries' gradient is only the share that comes from the keys of the same block.
        """
        weights = self._weights(merged)
        grad = _grouped(grad_out, v)
        row = (grad * _grouped(out, v)).sum(-1, keepdim=True)
        from_value = torch.einsum("abkgd,aukd->abkgu", grad, _wide(v))
        score = weights * (from_value - row) * self._scale
        return (
            torch.einsum("abkgu,aukd->abkgd", score, self._k).flatten(2, 3),
            torch.einsum("abkgu,abkgd->aukd", score, self._q),
            torch.einsum("abkgu,abkgd->aukd", weights, grad),
        )

    def _weights(self, merged: Tensor) -> Tensor:
        return (self.scores - merged.view(*self.scores.shape[:-1], 1)).exp()


class _Piece(NamedTuple):
    """Neighbouring blocks of one document, and the context tokens to which at least one block attends."""

    blocks: slice
    context: slice
    mask: Tensor
    """Additive mask [1, 1, queries, context]: 0 if a query attends to a token, else −∞."""
    blind_R: Tensor
    """bool [queries]: True for queries that attend to no context token."""


def _pieces(layout: DeviceBlocks, slots: int, window: int | None, dtype: torch.dtype) -> Iterator[_Piece]:
    """Yield pieces of all blocks that attend to at least one context token."""
    anchor_A, start_A = layout.on_device
    turns = (start_A[1:] != start_A[:-1]).nonzero().flatten() + 1
    size = max(1, PIECE_QUERIES // slots)
    for first, stop in pairwise([0, *turns.tolist(), len(start_A)]):
        for block in range(first, stop, size):
            blocks = slice(block, min(block + size, stop))
            oldest = int(start_A[block])
            newest = int(anchor_A[blocks][-1])
            if window is not None:
                oldest = max(oldest, int(anchor_A[block]) + 1 - window)
            if oldest >= newest:
                continue
            hidden_CBU = _hidden(anchor_A[blocks], slots, torch.arange(oldest, newest), window)
            hidden_RU = hidden_CBU.flatten(0, 1)
            mask = torch.zeros(hidden_RU.shape, dtype=dtype).masked_fill_(hidden_RU, -torch.inf)
            yield _Piece(blocks, slice(oldest, newest), mask[None, None], hidden_RU.all(1))


def _hidden(anchor_C: Tensor, slots: int, token_U: Tensor, window: int | None) -> Tensor:
    """Return bool [C, B, U]: True if query b of block c does not attend to token u of the document."""
    hidden = (token_U >= anchor_C[:, None])[:, None].expand(-1, slots, -1)
    if window is None:
        return hidden
    oldest_CB = anchor_C[:, None] + torch.arange(slots) - (window - 1)
    return hidden | (token_U < oldest_CB[..., None])


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _grouped(heads: Tensor, like_kv: Tensor) -> Tensor:
    """Reshape [A, B, heads, D] to [A, B, K, G, D], in float32 or wider.

    K is the number of key-value heads in ``like_kv``, and G the number of query heads for each of them.
    """
    return _wide(heads).unflatten(2, (like_kv.shape[2], -1))
