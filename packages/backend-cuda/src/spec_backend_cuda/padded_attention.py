"""Compute cuDNN's causal attention, with every document of a batch padded to the length of the longest.

On Hopper it takes half of flash attention's time, but computes the pairs of padding, too, and builds a plan for each
number and length of documents. Only documents of about equal length are worth that. Rows outside every document,
and rows of padding, have queries of zeros.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from spec_core import to_device_async

_forward = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default

Bounds = tuple[tuple[int, int], ...]

WIDTHS = frozenset({(64, 64), (128, 128), (192, 128)})
"""Channels of queries, and of values, for which cuDNN has both passes."""
CUDNN_VERSION = 91_900
"""The version that was measured."""
HOPPER = (9, 0)
WORTH_PADDING = 1.25
"""Largest ratio of computed pairs to pairs inside documents."""
LENGTH_MULTIPLE = 256
"""Documents are padded to a multiple of this many rows, so that there are few plans."""


class Padding(NamedTuple):
    """Places of documents' rows in a batch of padded documents."""

    documents: int
    length: int
    rows: slice | Tensor
    """The documents' rows on the token axis."""
    places: Tensor | None
    """int64: place of each of these rows among all padded rows; None without padding."""

    def batch(self, tensor: Tensor) -> Tensor:
        """Return [documents, heads, length, D] of a tensor [T, heads, D]; rows of padding are 0."""
        rows = tensor[self.rows]
        if self.places is not None:
            padded = rows.new_zeros(self.documents * self.length, *rows.shape[1:])
            rows = padded.index_copy_(0, self.places, rows)
        return rows.unflatten(0, (self.documents, self.length)).transpose(1, 2)

    def tokens(self, batch: Tensor, num_tokens: int) -> Tensor:
        """Return [T, heads, D] of a tensor [documents, heads, length, D]; rows outside documents are 0."""
        rows = batch.transpose(1, 2).flatten(0, 1)
        if self.places is not None:
            rows = rows.index_select(0, self.places)
        if isinstance(self.rows, slice) and self.rows == slice(0, num_tokens):
            return rows
        whole = rows.new_zeros(num_tokens, *rows.shape[1:])
        whole[self.rows] = rows
        return whole


def padding(bounds: Bounds, q: Tensor, v: Tensor) -> Padding | None:
    """Return how the documents are padded, or None if flash attention suits them better."""
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    if not q.is_cuda or not is_half or (q.shape[-1], v.shape[-1]) not in WIDTHS:
        return None
    return _padding(bounds, q.device) if _has_kernels(q.device) else None


def padded_attention(q: Tensor, k: Tensor, v: Tensor, pad: Padding) -> tuple[Tensor, Tensor]:
    """Return causal self-attention within each document, and its log-sum-exp."""
    out, lse, *_ = _forward(*map(pad.batch, (q, k, v)), None, True, 0.0, True, False)
    return pad.tokens(out, len(q)), pad.tokens(lse, len(q)).squeeze(-1)


def padded_attention_backward(
    grad_out: Tensor, saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], pad: Padding
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients (dq, dk, dv). ``saved``: (q, k, v, out, lse), also over more keys than ``k`` has."""
    q, k, v, out, lse = saved
    inputs = (*map(pad.batch, (grad_out, q, k, v, out)), pad.batch(lse[..., None]).contiguous())
    lengths = None, None, pad.length, pad.length
    grads = _backward(*inputs, *_no_dropout(q.device), None, *lengths, 0.0, True)
    dq, dk, dv = (pad.tokens(grad, len(of)) for grad, of in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


@lru_cache(maxsize=16)  # a step uses the same few arguments again and again
def _padding(bounds: Bounds, device: torch.device) -> Padding | None:
    lengths = [stop - start for start, stop in bounds]
    length = -(-max(lengths, default=0) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    if not length or len(lengths) * length**2 > WORTH_PADDING * sum(one**2 for one in lengths):
        return None
    touching = all(left[1] == right[0] for left, right in pairwise(bounds))
    rows: slice | Tensor = slice(bounds[0][0], bounds[-1][1])
    if not touching:
        rows = to_device_async(torch.cat([torch.arange(*bound) for bound in bounds]), device)
    places = None
    if min(lengths) < length:
        starts = range(0, len(lengths) * length, length)
        filled = [torch.arange(start, start + one) for start, one in zip(starts, lengths, strict=True)]
        places = to_device_async(torch.cat(filled), device)
    return Padding(len(lengths), length, rows, places)


@lru_cache(maxsize=8)
def _has_kernels(device: torch.device) -> bool:
    version = torch.backends.cudnn.version() or 0
    return version >= CUDNN_VERSION and torch.cuda.get_device_capability(device) == HOPPER


@lru_cache(maxsize=8)
def _no_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a seed and an offset, which the operator requires even without dropout."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return zero, zero
