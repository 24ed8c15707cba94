"""Attention of blocks: each sees its document before its anchor, and itself; never another block.

``block_attention`` runs where the backend has no kernel for it. It takes some blocks at a time through torch's
fused attention, with a mask for these blocks only, and recomputes them in backward: memory is linear in the
batch.

Shapes: A blocks, B slots, T tokens of the batch; q ``[A, B, heads, D]``; keys and values ``[A, B, kv_heads, D]``
of the blocks and ``[T, kv_heads, D]`` of the context.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_core.host_tensors import to_device_async
from spec_kit.drafting import checkpointed

KeysValues = tuple[Tensor, Tensor]
"""Keys and values of the same positions."""

CHUNK_BLOCKS = 32
"""Blocks per call of the fused attention: some hundred queries keep it busy; their own keys, of which each query
needs one block's, are then still few next to a context of usual length."""


@dataclass(frozen=True)
class BlockLayout:
    """The places of blocks in a flat batch.

    They are on the CPU, so that ranges are known without waiting for a device.
    """

    anchor_A: Tensor
    """int64 [A]: index of each anchor, ascending; the block sees the context before it."""
    start_A: Tensor
    """int64 [A]: first token of the anchor's document."""
    device: torch.device

    def slot_positions(self, block_size: int) -> Tensor:
        """Return int64 [A, B], on the device: position of each slot in its document, also past its end."""
        anchor_A, start_A = self.places
        return (anchor_A - start_A)[:, None] + torch.arange(block_size, device=self.device)

    def chunk(self, first: int, window: int | None) -> _Chunk:
        """Return blocks ``first`` to ``first + CHUNK_BLOCKS`` with the context that any of them sees."""
        rows = slice(first, first + CHUNK_BLOCKS)
        anchors, starts = self.anchor_A[rows], self.start_A[rows]
        if window is not None:
            starts = starts.maximum(anchors + 1 - window)
        context = slice(int(starts.min()), int(anchors.max())) if len(anchors) else slice(0, 0)
        anchor_A, start_A = self.places
        return _Chunk(context, anchor_A[rows], start_A[rows])

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """Anchors and starts on the device."""
        return to_device_async(self.anchor_A, self.device), to_device_async(self.start_A, self.device)


@dataclass(frozen=True)
class _Chunk:
    context: slice
    anchor_C: Tensor
    start_C: Tensor

    def visible(self, block_size: int, window: int | None) -> Tensor:
        """Return bool [C · B, context + C · B]: which keys each slot sees."""
        device, num_blocks = self.anchor_C.device, len(self.anchor_C)
        slot_B = torch.arange(block_size, device=device)
        key = torch.arange(self.context.start, self.context.stop, device=device)
        oldest_CB = self.start_C[:, None].expand(-1, block_size)
        inside_BB = torch.ones(block_size, block_size, dtype=torch.bool, device=device)
        if window is not None:
            oldest_CB = oldest_CB.maximum(self.anchor_C[:, None] + slot_B - (window - 1))
            inside_BB = inside_BB.tril()
        seen = (key >= oldest_CB[..., None]) & (key < self.anchor_C[:, None, None])
        own = torch.eye(num_blocks, dtype=torch.bool, device=device)[:, None, :, None] & inside_BB[:, None, :]
        return torch.cat([seen.flatten(0, 1), own.flatten(2).flatten(0, 1)], dim=1)


def block_attention(
    q: Tensor, context: KeysValues, own: KeysValues, layout: BlockLayout, window: int | None
) -> Tensor:
    """Return the blocks' attention to their context and to themselves, [A, B, heads, D] like ``q``; differentiable.

    ``context``: k, v [T, kv_heads, D]; ``own``: k, v [A, B, kv_heads, D]; ``layout.places``: int64 [A] twice on the
    device, each block's anchor (ascending) and the start of its document: it sees tokens from start to anchor − 1.
    ``window`` None: a full layer, which looks both ways inside the block. Else a sliding layer: a query at position p
    sees positions from p − (window − 1) on, and its own block up to itself.
    """
    parts = zip(*(tensor.split(CHUNK_BLOCKS) for tensor in (q, *own)), strict=True)
    attend = checkpointed(_attend)
    pieces = [
        attend(layout.chunk(index * CHUNK_BLOCKS, window), window, context[0], context[1], *part)
        for index, part in enumerate(parts)
    ]
    return torch.cat(pieces)


def _attend(
    chunk: _Chunk, window: int | None, k_TND: Tensor, v_TND: Tensor, q_CBND: Tensor, *own: Tensor
) -> Tensor:
    """Return the attention of one chunk of blocks, given their q, keys and values, and those of the context."""
    pairs = zip((k_TND, v_TND), own, strict=True)
    k, v = (torch.cat([old[chunk.context], new.flatten(0, 1)]) for old, new in pairs)
    if not len(q_CBND):  # nothing to attend, but a gradient (of zero) must reach every input
        return q_CBND + k.sum() + v.sum()
    mask = chunk.visible(q_CBND.shape[1], window)
    group = q_CBND.shape[2] // k.shape[1]
    # Keys are repeated for their group: with enable_gqa and a mask, CUDA would materialise the scores.
    heads = (q_CBND.flatten(0, 1), k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
    out = F.scaled_dot_product_attention(*(tensor.transpose(0, 1)[None] for tensor in heads), attn_mask=mask)
    return out[0].transpose(0, 1).reshape(q_CBND.shape)
