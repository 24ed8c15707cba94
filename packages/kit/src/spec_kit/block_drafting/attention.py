"""Compute the attention of a block's slots to the tokens before its anchor and to the block itself.

``block_attention`` runs if the backend has no kernel for it. It computes ``CHUNK_BLOCKS`` blocks at a time by
torch's fused attention, with a mask for these blocks only, and recomputes them in backward. So memory is linear in
the number of tokens of the batch.

Shapes: A blocks, B slots, T tokens of the batch; q ``[A, B, heads, D]``; keys and values ``[A, B, kv_heads, D]``
of the blocks and ``[T, kv_heads, D]`` of the context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_core import to_device_async
from spec_kit.layers import checkpointed

KeysValues = tuple[Tensor, Tensor]
"""Keys and values of the same positions."""
MaskedAttention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

CHUNK_BLOCKS = 32
"""Number of blocks in one call of the fused attention (a chunk): some hundred queries, which keep the device busy.
A query attends to the keys of its own block, but is multiplied with the keys of all blocks of the chunk. Compared
with the tokens of a usual context, these keys are few."""


@dataclass(frozen=True)
class BlockLayout:
    """The positions of blocks in a flat batch.

    The tensors are on the CPU, so that slices are known without waiting for a device.
    """

    anchor_A: Tensor
    """int64 [A]: index of each anchor, ascending; the block sees the context before it."""
    start_A: Tensor
    """int64 [A]: index of the first token of the anchor's document."""
    device: torch.device

    def slot_positions(self, block_size: int) -> Tensor:
        """Return int64 [A, B], on the device: each slot's position in its document, even past the end."""
        anchor_A, start_A = self.on_device
        return (anchor_A - start_A)[:, None] + torch.arange(block_size, device=self.device)

    def chunk(self, first: int, window: int | None) -> _Chunk:
        """Return ``CHUNK_BLOCKS`` blocks from ``first`` on, with the context tokens that any of them sees."""
        rows = slice(first, first + CHUNK_BLOCKS)
        anchors, starts = self.anchor_A[rows], self.start_A[rows]
        if window is not None:
            starts = starts.maximum(anchors + 1 - window)
        context = slice(int(starts.min()), int(anchors.max())) if len(anchors) else slice(0, 0)
        anchor_A, start_A = self.on_device
        return _Chunk(context, anchor_A[rows], start_A[rows])

    @cached_property
    def on_device(self) -> tuple[Tensor, Tensor]:
        """``anchor_A`` and ``start_A`` on the device."""
        anchor_A, start_A = to_device_async(torch.stack([self.anchor_A, self.start_A]), self.device)
        return anchor_A, start_A

    @cached_property
    def derived(self) -> dict[object, tuple[Tensor, Tensor]]:
        """Tensors that a kernel computes from the positions once, for all layers."""
        return {}


@dataclass(frozen=True)
class _Chunk:
    context: slice
    anchor_C: Tensor
    start_C: Tensor

    def visible(self, block_size: int, window: int | None, *, is_causal: bool) -> Tensor:
        """Return bool [C · B, context + C · B]: which keys each slot sees."""
        device = self.anchor_C.device
        num_blocks = len(self.anchor_C)
        slot_B = torch.arange(block_size, device=device)
        key = torch.arange(self.context.start, self.context.stop, device=device)
        oldest_CB = self.start_C[:, None].expand(-1, block_size)
        inside_BB = torch.ones(block_size, block_size, dtype=torch.bool, device=device)
        if window is not None:
            oldest_CB = oldest_CB.maximum(self.anchor_C[:, None] + slot_B - (window - 1))
        if is_causal:
            inside_BB = inside_BB.tril()
        seen = (key >= oldest_CB[..., None]) & (key < self.anchor_C[:, None, None])
        own = torch.eye(num_blocks, dtype=torch.bool, device=device)[:, None, :, None] & inside_BB[:, None, :]
        return torch.cat([seen.flatten(0, 1), own.flatten(2).flatten(0, 1)], dim=1)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Return the attention [Q, heads, D] of queries to the keys that ``visible``, bool [Q, keys], names for each."""
    group = q.shape[1] // k.shape[1]
    # Keys are repeated for their group: with enable_gqa and a mask, CUDA would materialise the scores.
    heads = q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    out = F.scaled_dot_product_attention(
        *(tensor.transpose(0, 1)[None] for tensor in heads), attn_mask=visible
    )
    return out[0].transpose(0, 1)


def block_attention(
    q: Tensor,
    context: KeysValues,
    own: KeysValues,
    layout: BlockLayout,
    window: int | None,
    is_causal: bool,
    masked: MaskedAttention = masked_attention,
) -> Tensor:
    """Return the blocks' attention to their context and to themselves, [A, B, heads, D]; differentiable.

    ``context``: k, v [T, kv_heads, D]; ``own``: k, v [A, B, kv_heads, D]; ``layout.on_device``: int64 [A] twice on
    the device, each block's anchor (ascending) and the start of its document. A block sees tokens start to anchor
    − 1, and of its own slots all, or with ``is_causal`` only earlier ones and itself. With a sliding ``window`` of
    at least a block, a query at position p sees no token before position p − (window − 1). ``masked`` computes the
    attention of a few blocks.
    """
    parts = zip(*(tensor.split(CHUNK_BLOCKS) for tensor in (q, *own)), strict=True)
    attend = checkpointed(_attend)
    pieces = [
        attend(
            masked,
            layout.chunk(index * CHUNK_BLOCKS, window),
            (window, is_causal),
            context[0],
            context[1],
            *part,
        )
        for index, part in enumerate(parts)
    ]
    return torch.cat(pieces)


def _attend(
    masked: MaskedAttention,
    chunk: _Chunk,
    sight: tuple[int | None, bool],
    k_TND: Tensor,
    v_TND: Tensor,
    q_CBND: Tensor,
    *own: Tensor,
) -> Tensor:
    """Return the attention of one chunk of blocks to the context's keys and to the blocks' keys (``own``).

    ``sight``: the window, and whether attention is causal inside a block.
    """
    pairs = zip((k_TND, v_TND), own, strict=True)
    k, v = (torch.cat([old[chunk.context], new.flatten(0, 1)]) for old, new in pairs)
    if not len(q_CBND):  # no queries, but every input must get a (zero) gradient
        return q_CBND + k.sum() + v.sum()
    mask = chunk.visible(q_CBND.shape[1], sight[0], is_causal=sight[1])
    return masked(q_CBND.flatten(0, 1), k, v, mask).reshape(q_CBND.shape)
