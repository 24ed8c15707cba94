"""List the kernels that torch-npu's fused operators compute, by name (B10).

The operators, with their limits, are described in torch-npu's file ``_op_plugin_docs.py``. torch-npu has the backward
pass of each. It is asked which operators it has, because an older torch-npu has fewer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_backend_ascend.attention import (
    npu_block_attention,
    npu_causal_attention,
    npu_causal_attention_backward,
    npu_prefixed_attention,
    npu_prefixed_attention_backward,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spec_core import Kernel

_npu: Any = torch.ops.npu

Angles = tuple[Tensor, Tensor]

DTYPES = torch.float32, torch.bfloat16, torch.float16
MAX_ROTATED = 894
"""The largest even number of channels below 896, which ``npu_rotary_mul`` does not take."""
MAX_HEADS = 999


def npu_rotate(heads_TND: Tensor, angles: Angles) -> Tensor:
    """Return the heads with their first channels rotated, by ``npu_rotary_mul``."""
    cos, sin = angles
    tokens, heads, _ = heads_TND.shape
    rotated = 2 * cos.shape[-1]
    if (
        not _takes(heads_TND, cos, sin)
        or heads > MAX_HEADS
        or not 0 < rotated <= MAX_ROTATED
        or cos.shape[:2] != (tokens, 1)
    ):
        return NotImplemented
    # Layout BSND, with one batch: the angles are [1, T, 1, rotated].
    both = (torch.cat([part, part], dim=-1)[None] for part in angles)
    turned = _npu.npu_rotary_mul(heads_TND[None, ..., :rotated], *both)[0]
    rest = heads_TND[..., rotated:]
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def npu_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of the last dimension, times ``weight``."""
    return _npu.npu_rms_norm(x, weight, eps)[0] if _takes(x, weight) and x.dim() <= 8 else NotImplemented


def npu_norm_rotate(heads_TND: Tensor, weight_D: Tensor, eps: float, angles: Angles) -> Tensor:
    """Return each head's RMS norm, rotated, by ``npu_rms_norm`` and ``npu_rotary_mul``."""
    if not _takes(heads_TND, weight_D):
        return NotImplemented
    return npu_rotate(_npu.npu_rms_norm(heads_TND, weight_D, eps)[0], angles)


def npu_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up, by ``npu_swiglu``, which takes both in one tensor."""
    if not _takes(gate, up):
        return NotImplemented
    return _npu.npu_swiglu(torch.cat([gate, up], dim=-1))


def npu_swiglu_mlp(x: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor) -> Tensor:
    """Return down(silu(gate(x)) · up(x)); one product computes gate and up, so that only weights are copied."""
    if not _takes(x, gate_IH, up_IH, down_HI):
        return NotImplemented
    return F.linear(_npu.npu_swiglu(F.linear(x, torch.cat([gate_IH, up_IH]))), down_HI)


ATTENTION = "npu_fusion_attention", "npu_fusion_attention_grad"
OPERATORS: Mapping[str, tuple[Kernel, tuple[str, ...]]] = {
    "rms_norm": (npu_rms_norm, ("npu_rms_norm",)),
    "rotate": (npu_rotate, ("npu_rotary_mul",)),
    "norm_rotate": (npu_norm_rotate, ("npu_rms_norm", "npu_rotary_mul")),
    "swiglu": (npu_swiglu, ("npu_swiglu",)),
    "swiglu_mlp": (npu_swiglu_mlp, ("npu_swiglu",)),
    "causal_attention": (npu_causal_attention, ATTENTION),
    "causal_attention_backward": (npu_causal_attention_backward, ATTENTION),
    "prefixed_attention": (npu_prefixed_attention, ATTENTION),
    "prefixed_attention_backward": (npu_prefixed_attention_backward, ATTENTION),
    "block_attention": (npu_block_attention, ATTENTION),
}
"""Each kernel, and the operators that it needs."""


def npu_kernel(name: str) -> Kernel | None:
    """Return the kernel, or None if torch-npu does not have its operators."""
    kernel, operators = OPERATORS.get(name, (None, ()))
    return kernel if all(hasattr(_npu, operator) for operator in operators) else None


def _takes(first: Tensor, *others: Tensor) -> bool:
    """Return whether the operators take the dtype, which must be the same in all tensors, and there are values."""
    return (
        first.numel() > 0 and first.dtype in DTYPES and all(tensor.dtype == first.dtype for tensor in others)
    )
