"""Compute attention of blocks to their context and to themselves (kernel ``block_attention``).

A Triton program handles a few neighbouring blocks and one key-value head. Each of its ROWS is one query: a
block, a slot and a query head of the key-value head's group. One tile of keys thus serves the whole group.
Softmax uses base 2. There are three kernels: the forward pass, the gradients of the blocks' queries, keys and
values, and the gradients of the context. A program of the last kernel handles a tile of KEYS context tokens
and one of SPLITS shares of the blocks that attend to these tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from spec_backend_cuda.kernels.block_kernels import blocks_forward, context_backward, own_backward

MAX_ROWS = 128
"""Maximum number of rows of a tile of queries. More rows do not fit into the registers together with their
sums."""


class BlockPositions(Protocol):
    """Positions of the blocks in a batch; the draft computes them."""

    @property
    def on_device(self) -> tuple[Tensor, Tensor]:
        """Return the token indices of each block's anchor and of its document's start.

        Both tensors are int64 [A] on the device.
        """
        ...

    @property
    def derived(self) -> dict[object, tuple[Tensor, Tensor]]:
        """Return a dictionary for tensors that are computed from the positions, and that all layers share."""
        ...


class Tiling(NamedTuple):
    """Tile sizes and launch options of a kernel.

    They were measured on an H200, with blocks of 16 slots, 32 query heads and 8 key-value heads.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        """Triton's launch options."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


class Tilings(NamedTuple):
    """The tilings of the three kernels."""

    forward: Tiling
    own_backward: Tiling
    context_backward: Tiling


NARROW = Tilings(Tiling(128, 64, 8, 3), Tiling(64, 64, 4, 2), Tiling(64, 128, 8, 3))
WIDE = Tilings(Tiling(128, 64, 8, 3), Tiling(128, 64, 8, 3), Tiling(128, 64, 8, 2))
"""Tilings for blocks of more than 64 rows."""
SHARED_BYTES = 172_032
"""Bytes of shared memory that the largest tiles need with heads of 128 channels. Hopper GPUs have as much,
smaller GPUs do not."""
PROGRAMS = 1024
"""Minimum number of programs for the context's gradients, enough for several waves on the largest GPUs."""

EVERYWHERE = 1 << 30
"""A window wider than any document."""
Sight = tuple[int | None, bool]
"""The window of a layer, and whether its attention is causal inside a block."""


def takes_blocks(q: Tensor, context: tuple[Tensor, Tensor], *_: object) -> bool:
    """Return whether the kernels support dtype and sizes, and tiles fit into the GPU's shared memory."""
    slots, heads, width = q.shape[1:]
    return (
        q.numel() > 0
        and q.dtype in (torch.bfloat16, torch.float16)
        and width in (32, 64, 128)
        and slots * (heads // context[0].shape[1]) <= MAX_ROWS
        and _shared_bytes(q.device) >= SHARED_BYTES
    )


def fused_block_attention(
    q: Tensor,
    context: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    layout: BlockPositions,
    window: int | None,
    is_causal: bool,
) -> Tensor:
    """Return the blocks' attention to their context and themselves; arguments as in the plain version."""
    return _BlockAttention.apply((window, is_causal), layout, q, *context, *own)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sight: Sight, layout: BlockPositions, *tensors: Tensor) -> Tensor:
        q, *keys_values = (tensor.contiguous() for tensor in tensors)
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        tiling = _tilings(q, keys_values[0]).forward
        shape = _shape(tiling, q, keys_values[0], sight)
        blocks_forward[_grid(shape)](q, *keys_values, out, lse, *layout.on_device, **shape, **tiling.options)
        ctx.sight = sight
        ctx.layout = layout
        ctx.save_for_backward(q, *keys_values, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, key, value, own_key, own_value, out, lse = ctx.saved_tensors
        tiling = _tilings(q, key).own_backward
        grad_out = grad_out.contiguous()
        shape = _shape(tiling, q, key, ctx.sight)
        drift = torch.empty_like(lse)
        grads = torch.empty_like(q), torch.empty_like(own_key), torch.empty_like(own_value)
        inputs = grad_out, q, key, value, own_key, own_value, out, lse, drift
        own_backward[_grid(shape)](*inputs, *grads, *ctx.layout.on_device, **shape, **tiling.options)
        saved = grad_out, q, key, value, lse, drift
        context_grads = _context_gradients(saved, ctx.layout, ctx.sight)
        return None, None, grads[0], *context_grads, *grads[1:]


@lru_cache(maxsize=8)
def _shared_bytes(device: torch.device) -> int:
    """Return the number of bytes of shared memory that a program may use.

    Triton's interpreter, which runs on the CPU, has no limit.
    """
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    return SHARED_BYTES if properties is None else properties(device).shared_memory_per_block_optin


def _tilings(q: Tensor, key: Tensor) -> Tilings:
    return NARROW if q.shape[1] * (q.shape[2] // key.shape[1]) <= NARROW.context_backward.rows else WIDE


def _context_gradients(saved: tuple[Tensor, ...], layout: BlockPositions, sight: Sight) -> tuple[Tensor, ...]:
    _, q, key, *_ = saved
    tiling = _tilings(q, key).context_backward
    shape = _shape(tiling, q, key, sight)
    tiles = triton.cdiv(len(key), tiling.keys)
    splits = max(1, min(8, PROGRAMS // max(1, tiles * key.shape[1])))
    shares = key.new_empty(2, splits, *key.shape, dtype=torch.float32)
    if tiles:
        blocks = layout.on_device, _seen_by(layout, shape)
        grid = tiles, key.shape[1], splits
        context_backward[grid](*saved, *shares, *blocks[0], *blocks[1], **shape, **tiling.options)
    return shares.sum(1).to(key.dtype).unbind()


def _seen_by(layout: BlockPositions, shape: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return for each tile of context tokens the range of blocks that attend to it, int64 [tiles] each.

    The range is the first block, and the block after the last. Anchors and starts of documents must ascend.
    """
    name = shape["tokens"], shape["KEYS"], shape["window"]
    if name not in layout.derived:
        anchor, start = layout.on_device
        first_token = torch.arange(0, shape["tokens"], shape["KEYS"], device=anchor.device)
        end = first_token + shape["KEYS"]
        first = torch.searchsorted(anchor, first_token, right=True)
        last = torch.searchsorted(start, end)
        last = last.minimum(torch.searchsorted(anchor, end + (shape["window"] - 1)))
        layout.derived[name] = first, last
    return layout.derived[name]


def _shape(tiling: Tiling, q: Tensor, key: Tensor, sight: Sight) -> dict[str, Any]:
    window, is_causal = sight
    num_blocks, slots, heads, width = q.shape
    tokens, kv_heads, _ = key.shape
    group = heads // kv_heads
    together = max(1, tiling.rows // (slots * group))
    return {
        "num_blocks": num_blocks,
        "tokens": tokens,
        "kv_heads": kv_heads,
        "window": EVERYWHERE if window is None else window,
        "scale": width**-0.5,
        "SLIDING": window is not None,
        "CAUSAL": is_causal,
        "SLOTS": slots,
        "GROUP": group,
        "TOGETHER": together,
        "ROWS": max(16, triton.next_power_of_2(together * slots * group)),
        "OWN": max(16, triton.next_power_of_2(together * slots)),
        "WIDTH": width,
        "KEYS": tiling.keys,
    }


def _grid(shape: dict[str, Any]) -> tuple[int, int]:
    return triton.cdiv(shape["num_blocks"], shape["TOGETHER"]), shape["kv_heads"]
