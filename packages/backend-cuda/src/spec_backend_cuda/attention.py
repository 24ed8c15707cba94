"""Flash attention: torch's fused causal attention, with all documents of a batch in one call.

It supports half precision; wider dtypes use the slower ``dense_attention``. Rows outside every document are ignored.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from spec_backend_cuda import dense_attention
from spec_core import to_device_async

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from spec_core import Kernel

# The operators behind scaled_dot_product_attention; only they return the log-sum-exp and take documents of
# different lengths without padding.
_forward = torch.ops.aten._flash_attention_forward.default
_backward = torch.ops.aten._flash_attention_backward.default

MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8


class Documents(NamedTuple):
    """The documents of a batch in the form that the kernel takes."""

    rows: slice | Tensor
    """Rows of the token axis that belong to documents; a slice if the documents are adjacent."""
    starts: Tensor
    """int32 [documents + 1]: first row of each document among ``rows``, then the number of rows."""
    longest: int


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: Sequence[tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    """Return causal self-attention inside each document, and its log-sum-exp; for any dtype and shape."""
    if bounds and _is_fused(q):
        documents = _documents(tuple(bounds), q.device)
        inputs = (tensor[documents.rows] for tensor in (q, k, v))
        out, lse, *_ = _forward(*inputs, *_lengths(documents), 0.0, True, False)
        return _spread(out, documents, len(q)), _spread(lse.T, documents, len(q))
    out = torch.zeros_like(q)
    lse = q.new_zeros(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    for rows in (slice(*bound) for bound in bounds):
        out[rows], lse[rows] = dense_attention.dense_forward(q[rows], k[rows], v[rows])
    return out, lse


def flash_attention_backward(
    grad_out: Tensor,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    bounds: Sequence[tuple[int, int]],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv). ``saved``: (q, k, v, out, lse); out and lse may be over these and further keys."""
    if bounds and _is_fused(grad_out):
        documents = _documents(tuple(bounds), grad_out.device)
        *inputs, lse = (tensor[documents.rows] for tensor in (grad_out, *saved))
        no_dropout = _no_dropout(grad_out.device)
        parts = _backward(*inputs, lse.T.contiguous(), *_lengths(documents), 0.0, True, *no_dropout)
        dq, dk, dv = (_spread(part, documents, len(grad_out)) for part in parts)
        return dq, dk, dv
    grads = torch.zeros_like(saved[0]), torch.zeros_like(saved[1]), torch.zeros_like(saved[2])
    for rows in (slice(*bound) for bound in bounds):
        q, k, v, out, lse = (tensor[rows] for tensor in saved)
        parts = dense_attention.dense_backward(grad_out[rows], (q, k, v, out, lse))
        for grad, part in zip(grads, parts, strict=True):
            grad[rows] = part
    return grads


KERNELS: Mapping[str, Kernel] = {
    "causal_attention": flash_attention,
    "causal_attention_backward": flash_attention_backward,
}


def _is_fused(q: Tensor) -> bool:
    width = q.shape[-1]
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and width <= MAX_HEAD_DIM
        and width % HEAD_DIM_MULTIPLE == 0
    )


def _spread(part: Tensor, documents: Documents, num_tokens: int) -> Tensor:
    """Scatter the documents' rows to their indices among all tokens; other rows are 0."""
    if isinstance(documents.rows, slice) and documents.rows == slice(0, num_tokens):
        return part
    whole = part.new_zeros(num_tokens, *part.shape[1:])
    whole[documents.rows] = part
    return whole


def _lengths(documents: Documents) -> tuple[Tensor, Tensor, int, int]:
    return documents.starts, documents.starts, documents.longest, documents.longest


@lru_cache(maxsize=16)  # a step asks again and again for the same few
def _documents(bounds: tuple[tuple[int, int], ...], device: torch.device) -> Documents:
    lengths = [stop - start for start, stop in bounds]
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    touching = all(left[1] == right[0] for left, right in pairwise(bounds))
    rows: slice | Tensor = slice(bounds[0][0], bounds[-1][1])
    if not touching:
        rows = to_device_async(torch.cat([torch.arange(*bound) for bound in bounds]), device)
    return Documents(rows, to_device_async(starts, device), max(lengths))


@lru_cache(maxsize=1)
def _no_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the random state of dropout, which the operator requires even without dropout."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)
