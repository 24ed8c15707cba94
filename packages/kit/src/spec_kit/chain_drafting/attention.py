"""Compute the attention of the unrolled steps of a training-time test.

A query sees the causal keys of step 0, and of each later step only the key at its row. An ordinary kernel computes
the causal attention. Each later step adds one dot product per query. Both are merged by their log-sum-exp. No
[T, T] mask is ever allocated. Shapes are named as in ``kernels.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from spec_kit.chain_drafting.kernels import Bounds, ChainKernels, Pieces, grouped
from spec_kit.layers import ContextRows

SCORE_BYTES = 64 << 20
"""Bytes of the attention scores of one chunk, if no kernel computes the attention. It is large enough that matrix
products dominate, and small compared with the activations of a step."""


class UnrolledAttention:
    """One layer's attention over the unrolled steps of a batch. It keeps the keys and values of all steps so far."""

    def __init__(
        self, kernels: ChainKernels, bounds: Bounds, num_steps: int, window: int | None = None
    ) -> None:
        """Start before step 0.

        ``bounds``: first row of each document, and the row after its last row; queries outside the documents get
        finite values without meaning. ``window``: the largest number of positions to which a query attends, its own
        included; more than ``num_steps``, so that it reaches beyond the keys at the query's row.
        """
        self._kernels = kernels
        self._bounds = bounds
        self._num_steps = num_steps
        self._window = window
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._cache = None if kernels.causal_attention is None else _Cache(num_steps)

    @property
    def past(self) -> tuple[Tensor, ...]:
        """The tensors of earlier steps that a step needs as arguments, for activation checkpointing."""
        return () if self._cache is not None else (*self._keys, *self._values)

    def keep(self, k: Tensor, v: Tensor) -> None:
        """Keep a step's keys and values for later steps."""
        if self._cache is None:
            self._keys.append(k)
            self._values.append(v)

    def attend(
        self, step: int, qkv: tuple[Tensor, Tensor, Tensor], past: tuple[Tensor, ...], places: Places
    ) -> Tensor:
        """Return the attention [R, heads, width of values] of R queries over the keys of all steps so far.

        ``qkv``: q [R, heads, head_dim]; keys [T, kv_heads, head_dim] in step 0, for each of T rows (tokens), and [R,
        kv_heads, head_dim] in later steps; values like keys, but they may be narrower. ``past``: the property
        ``past``.
        """
        q, k, v = qkv
        # The query of step s is s positions behind its row.
        window = None if self._window is None else self._window - step
        if self._cache is not None:
            causal = _Causal.of(self._kernels, self._bounds, self._cache.num_rows(k), places, window)
            return _MergedAttention.apply(self._kernels, causal, self._cache, step, q, k, v)
        keys, values = (
            [first, *(part[: len(q)] for part in later)]
            for first, *later in ((*past[:step], k), (*past[step:], v))
        )
        row_R = places.row_R
        if row_R is None:
            return _chunked_attention(q, keys, values, self._bounds, window)
        whole_q, *rest = (_spread(part, row_R, len(keys[0])) for part in (q, *keys[1:], *values[1:]))
        later_keys, later_values = _halves(rest)
        whole = [keys[0], *later_keys], [values[0], *later_values]
        return take_rows(_chunked_attention(whole_q, *whole, self._bounds, window), row_R)


@dataclass(frozen=True)
class Places:
    """The rows of a step's queries."""

    row_R: Tensor | None = None
    """int64, distinct indices of the queries' rows among the T rows; None if all rows have a query."""
    rows: ContextRows | None = None
    """The rows that this rank computes, if ranks divide the rows."""
    local_R: Tensor | None = None
    """int64: indices of the queries' rows among the rows of this rank; None if each of these rows has a query."""


def take_rows(rows: Tensor, row_R: Tensor) -> Tensor:
    """Return ``rows[row_R]``. No index may be repeated, because backward copies gradients without sums."""
    result: Tensor = _TakenRows.apply(rows, row_R)
    return result


class _TakenRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, row_R: Tensor) -> Tensor:
        ctx.save_for_backward(row_R)
        ctx.num_rows = len(rows)
        return rows.index_select(0, row_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (row_R,) = ctx.saved_tensors
        return _spread(grad, row_R, ctx.num_rows), None


@dataclass(frozen=True)
class _Causal:
    """The causal attention of step 0, computed by a kernel. The results of rows without a query are dropped."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    parts: Bounds | Pieces
    """The documents, or their pieces, that the kernel is given."""
    num_rows: int
    """Number of rows for which the kernel takes a query."""
    local_R: Tensor | None
    """int64: index of each query's row among the ``num_rows`` rows; None if every row has a query."""

    @classmethod
    def of(
        cls,
        kernels: ChainKernels,
        bounds: Bounds,
        num_keys: int,
        places: Places,
        window: int | None,
    ) -> _Causal:
        """Return the attention that calls one of ``kernels``, in which a query sees the last ``window`` rows.

        With context parallelism (``rows`` has a group) and without a window, prefer a kernel that computes only this
        rank's rows. Any other kernel computes all rows.
        """
        rows, local_R = places.rows, places.local_R
        forward, backward = kernels.prefixed_attention, kernels.prefixed_attention_backward
        if rows is not None and (rows.group is None or window is not None):
            rows = None
        if rows is not None and forward is not None and backward is not None:
            return cls(forward, backward, rows.pieces, len(rows.row_P), local_R)
        forward, backward = kernels.causal_attention, kernels.causal_attention_backward
        assert forward is not None
        assert backward is not None
        if window is not None:
            forward, backward = partial(forward, window=window), partial(backward, window=window)
        return cls(forward, backward, bounds, num_keys, places.row_R)

    def attend(self, q: Tensor, cache: _Cache) -> tuple[Tensor, Tensor]:
        """Return the attention's output and log-sum-exp for each query."""
        (whole_q,) = self._whole(cache.queries, q)
        out, lse = self.forward(whole_q, *cache.first, self.parts)
        return _take(out, self.local_R), _take(lse, self.local_R)

    def gradients(
        self, grad_out: Tensor, saved: tuple[Tensor, Tensor, Tensor], cache: _Cache
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, and of the keys and values of step 0. ``saved``: q, output, log-sum-exp."""
        grad_whole, q, out, lse = self._whole(cache.saved, grad_out, *saved)
        grad_q, grad_key, grad_value = self.backward(grad_whole, (q, *cache.first, out, lse), self.parts)
        return _take(grad_q, self.local_R), grad_key, grad_value

    def _whole(self, buffers: list[Tensor], *parts: Tensor) -> Sequence[Tensor]:
        """Return ``num_rows`` rows of each tensor: its rows at the indices ``local_R``, in ``buffers``.

        A later step has only some of an earlier step's rows. So in the forward pass, rows without a query have a
        query of an earlier step. In the backward pass, which starts with the last step, they are 0 in every tensor.
        """
        if self.local_R is None:
            return parts
        if not buffers:
            buffers += [part.new_zeros(self.num_rows, *part.shape[1:]) for part in parts]
        return [
            buffer.index_copy_(0, self.local_R, part) for buffer, part in zip(buffers, parts, strict=True)
        ]


class _Cache:
    """The keys and values of all steps of a layer, and in the backward pass their gradients.

    Autograd would slice the keys of each earlier step for each later step, and add up the gradients of all these
    slices. Instead every step adds the gradients of all keys here. The backward pass takes the steps from last to
    first, because a step's input is the output of the step before. So after a step's own summand, the gradients of
    its keys and values are complete.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_later = num_steps - 1
        self.first: list[Tensor] = []
        """Keys and values of step 0."""
        self._later: list[Tensor] = []
        """Keys and values of the later steps, [later steps, rows of step 1, kv_heads, D]."""
        self._first_grads: list[Tensor] = []
        self._later_grads: list[Tensor] = []
        self.queries: list[Tensor] = []
        self.saved: list[Tensor] = []
        """Memory for the rows that the causal kernel is given, in the forward pass and in the backward pass."""

    def num_rows(self, k: Tensor) -> int:
        """Return the number of rows of step 0, given its keys or those of a later step."""
        return len(self.first[0] if self.first else k)

    def put(self, step: int, *own: Tensor) -> None:
        """Store a step's keys and values. If activations are computed again, equal ones overwrite them."""
        if step == 0:
            self.first = list(own)
            return
        if not self._later:
            self._later = [part.new_empty(self._num_later, *part.shape) for part in own]
        for buffer, part in zip(self._later, own, strict=True):
            buffer[step - 1, : len(part)] = part

    def later(self, step: int, num_rows: int) -> list[Tensor]:
        """Return keys and values [steps, rows, kv_heads, D] of the steps 1 to ``step``."""
        return [buffer[:step, :num_rows] for buffer in self._later]

    def add_first(self, grads: Sequence[Tensor]) -> None:
        """Add gradients of the keys and values of step 0."""
        if not self._first_grads:
            self._first_grads = list(grads)
            return
        for total, grad in zip(self._first_grads, grads, strict=True):
            total += grad

    def add_later(self, step: int, grads: Sequence[Tensor]) -> None:
        """Add gradients of the keys and values of the steps 1 to ``step``."""
        if not self._later_grads:
            self._later_grads = [torch.zeros_like(buffer) for buffer in self._later]
        for total, grad in zip(self._later_grads, grads, strict=True):
            total[:step, : grad.shape[1]] += grad

    def take_grads(self, step: int, num_rows: int) -> list[Tensor]:
        """Return the gradients of the keys and values of ``step``; after step 0 nothing is kept."""
        if step > 0:
            return [total[step - 1, :num_rows] for total in self._later_grads]
        for tensors in (self.first, self._later, self._later_grads, self.queries, self.saved):
            tensors.clear()
        return self._first_grads


class _MergedAttention(torch.autograd.Function):
    """The causal attention of a kernel, merged with the keys of the later steps.

    A key's gradient depends on its attention weight exp(score − lse) and on grad · out. lse and out must be over
    *all* keys of the query. So the kernel's backward pass gets the merged out and lse, and the gradients of the
    later keys are computed here from the same out and lse. Differentiating the merge would be wrong, because the
    kernel treats its lse as a constant.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kernels: ChainKernels,
        causal: _Causal,
        cache: _Cache,
        step: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        cache.put(step, k, v)
        out, lse = causal.attend(q, cache)
        if step > 0:
            out, lse = kernels.ttt_attention(q, (out, lse), *cache.later(step, len(q)))
        ctx.kernels = kernels
        ctx.causal = causal
        ctx.cache = cache
        ctx.step = step
        # The cache is no saved tensor, because later steps write into it.
        ctx.save_for_backward(q, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, out, lse = ctx.saved_tensors
        cache: _Cache = ctx.cache
        grad_q, *grads = ctx.causal.gradients(grad_out, (q, out, lse), cache)
        cache.add_first(grads)
        if ctx.step > 0:
            later = cache.later(ctx.step, len(q))
            grad_q, *grads = ctx.kernels.ttt_attention_backward(grad_out, (q, out, lse), *later, grad_q)
            cache.add_later(ctx.step, grads)
        return None, None, None, None, grad_q, *cache.take_grads(ctx.step, len(q))


def _chunked_attention(
    q: Tensor, keys: list[Tensor], values: list[Tensor], bounds: Bounds, window: int | None
) -> Tensor:
    """Return the attention without a kernel: dense, a few queries at a time, recomputed in backward."""
    pieces: list[Tensor] = []
    cursor = 0
    # Without a document, one row of padding is computed, so that every parameter gets a (zero) gradient.
    for start, stop in bounds or [(0, min(1, len(q)))]:
        pieces.append(q.new_zeros(max(0, start - cursor), q.shape[1], values[0].shape[-1]))
        rows = max(1, SCORE_BYTES // (4 * q.shape[1] * max(1, stop - start)))
        for first in range(start, max(stop, start + 1), rows):
            last = min(first + rows, stop)
            local = [tensor[first:last] for tensor in (*keys[1:], *values[1:])]
            seen = slice(start if window is None else max(start, first - window + 1), last)
            causal = keys[0][seen], values[0][seen]
            pieces.append(
                checkpoint(_dense_chunk, window, q[first:last], *causal, *local, use_reentrant=False)
            )
        cursor = stop
    return torch.cat([*pieces, q.new_zeros(max(0, len(q) - cursor), q.shape[1], values[0].shape[-1])])


def _dense_chunk(
    window: int | None, q: Tensor, key: Tensor, value: Tensor, *own_keys_values: Tensor
) -> Tensor:
    """Return the attention of consecutive queries of one document.

    ``key``, ``value``: of step 0, up to the last query, from the document's start or the first row that a query's
    window has. ``own_keys_values``: keys, then values of the later steps, each with one row per query.
    """
    keys, values = _halves(own_keys_values)
    q_TKGD = grouped(q, key) * q.shape[-1] ** -0.5
    causal = torch.einsum("tkgd,ukd->tkgu", q_TKGD, key.to(q_TKGD.dtype))
    index = torch.arange(len(key), device=q.device)
    distance = index[len(key) - len(q) :, None] - index
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    scores = [causal.masked_fill(hidden[:, None, None], -torch.inf)]
    scores += [(q_TKGD * own[:, :, None]).sum(-1, keepdim=True) for own in keys]
    causal_probs, *own_probs = (
        torch.cat(scores, dim=-1).softmax(-1).split([len(key)] + [1] * len(keys), dim=-1)
    )
    out = torch.einsum("tkgu,ukd->tkgd", causal_probs, value.to(causal_probs.dtype))
    for weight, own in zip(own_probs, values, strict=True):
        out = out + weight * own[:, :, None]
    return out.reshape(*q.shape[:2], -1).to(q.dtype)


def _take(rows: Tensor, row_R: Tensor | None) -> Tensor:
    return rows if row_R is None else rows.index_select(0, row_R)


def _spread(rows: Tensor, row_R: Tensor | None, num_rows: int) -> Tensor:
    """Return ``num_rows`` rows: ``rows`` at the indices ``row_R``, and 0 elsewhere."""
    if row_R is None:
        return rows
    return rows.new_zeros(num_rows, *rows.shape[1:]).index_copy_(0, row_R, rows)


def _halves(keys_values: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    half = len(keys_values) // 2
    return list(keys_values[:half]), list(keys_values[half:])
