"""Define the network of a draft that guesses blocks, without its head.

Parameters are named as in exported files.

Shapes: A blocks, B slots, T tokens of the batch, N captured layers, H width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from spec_core import VocabularyOps, to_device_async
from spec_core.records import DraftBatch
from spec_kit.block_drafting.attention import BlockLayout, KeysValues
from spec_kit.block_drafting.block_shape import BlockConfig, BlockShape
from spec_kit.block_drafting.blocks import Blocks
from spec_kit.block_drafting.kernels import Angles, BlockKernels
from spec_kit.drafting.vocabulary_module import VocabularyModule
from spec_kit.layers import AttentionProjections, ContextRows, Mlp, RmsNorm, Rope, checkpointed, linear

WORTH_A_COPY = 7 / 8
"""Fraction of a batch's tokens. If the blocks see a smaller fraction, the seen tokens are copied into a smaller
tensor. Otherwise it is cheaper to compute the few unseen tokens, too.
"""
MOST_AT_ONCE = 1024
"""Blocks that a layer computes at once without gradients, about as many as two samples train. An evaluation has all
blocks of long samples; the activations of all at once would need more memory than a step."""


@dataclass(frozen=True)
class Geometry:
    """The positions of blocks, the rotary angles of their slots [A · B] and of this rank's context [T]."""

    layout: BlockLayout
    slot_angles: Angles
    context_angles: Angles
    rows: ContextRows | None = None
    """The division of the context over ranks; None if it is not divided."""

    @cached_property
    def parts(self) -> list[tuple[slice, Geometry]]:
        """Ranges of at most ``MOST_AT_ONCE`` blocks, and the Geometry of each."""
        layout = self.layout
        parts = list[tuple[slice, Geometry]]()
        for first in range(0, len(layout.anchor_A), MOST_AT_ONCE):
            blocks = slice(first, first + MOST_AT_ONCE)
            own = BlockLayout(layout.anchor_A[blocks], layout.start_A[blocks], layout.device)
            cos, sin = (
                angle.unflatten(0, (len(layout.anchor_A), -1))[blocks].flatten(0, 1)
                for angle in self.slot_angles
            )
            parts.append((blocks, replace(self, layout=own, slot_angles=(cos, sin))))
        return parts


class BlockAttention(AttentionProjections):
    """The projections and norms of the attention of blocks.

    Queries come from the block; keys and values come, by the same weights, from the context and the block.
    """

    def __init__(self, shape: BlockShape, kernels: BlockKernels) -> None:
        """Create projections and norms with the sizes of ``shape``."""
        super().__init__(shape, shape.hidden_size)
        self.q_norm = RmsNorm(shape.head_dim, shape.norm_eps)
        self.k_norm = RmsNorm(shape.head_dim, shape.norm_eps)
        self.head_dim, self._norm_eps = shape.head_dim, shape.norm_eps
        self._norm_rotate = kernels.norm_rotate

    def queries(self, x_RH: Tensor, angles: Angles) -> Tensor:
        """Return the queries [R, heads, head_dim], normed per head and rotated."""
        q = self.q_proj(x_RH).unflatten(-1, (-1, self.head_dim))
        return self._norm_rotate(q, self.q_norm.weight, self._norm_eps, angles)

    def keys_values(self, x_RH: Tensor, angles: Angles) -> KeysValues:
        """Return keys and values, [R, kv_heads, head_dim] each; keys are normed per head and rotated."""
        k, v = (project(x_RH).unflatten(-1, (-1, self.head_dim)) for project in (self.k_proj, self.v_proj))
        return self._norm_rotate(k, self.k_norm.weight, self._norm_eps, angles), v


class BlockLayer(nn.Module):
    """One Qwen3-style decoder layer over blocks."""

    def __init__(self, shape: BlockShape, index: int, kernels: BlockKernels) -> None:
        """Create the layer with this index, which decides its window and whether it looks back alone."""
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = BlockAttention(shape, kernels)
        self.mlp = Mlp(shape.hidden_size, shape.intermediate_size, kernels.swiglu_mlp)
        self.window, self.is_causal = shape.windows[index], shape.causality[index]
        self._block_attention = kernels.block_attention

    def forward(
        self, x_ABH: Tensor, context_TH: Tensor, geometry: Geometry, *, recompute: bool = False
    ) -> Tensor:
        """Return the blocks' states after the layer; ``recompute`` means activation checkpointing.

        The input norm is applied to the block only, not to the context.
        """
        return checkpointed(self._compute, enabled=recompute)(x_ABH, context_TH, geometry)

    def _compute(self, x_ABH: Tensor, context_TH: Tensor, geometry: Geometry) -> Tensor:
        context = self.self_attn.keys_values(context_TH, geometry.context_angles)
        if geometry.rows is not None:
            keys, values = geometry.rows.gather(*context)
            context = keys, values
        if torch.is_grad_enabled():
            return self.advance(x_ABH, context, geometry)
        for blocks, part in geometry.parts:
            x_ABH[blocks] = self.advance(x_ABH[blocks], context, part)
        return x_ABH

    def advance(self, x_ABH: Tensor, context: KeysValues, geometry: Geometry) -> Tensor:
        """Return the blocks' states after the layer, given the keys and values of the context."""
        # All slots are normed, even if a rank has only some of them in x.
        x_ABH = x_ABH + self.attend(self.input_layernorm(x_ABH), context, geometry)
        return x_ABH + self.mlp(self.post_attention_layernorm(x_ABH))

    def attend(self, normed_ABH: Tensor, context: KeysValues, geometry: Geometry) -> Tensor:
        """Return the attention's output [A, B, H], given the blocks' normed states."""
        attention = self.self_attn
        angles = geometry.slot_angles
        blocks = normed_ABH.shape[:2]
        normed_RH = normed_ABH.flatten(0, 1)
        q = attention.queries(normed_RH, angles)
        k, v = attention.keys_values(normed_RH, angles)
        q, k, v = (rows.unflatten(0, blocks) for rows in (q, k, v))
        sight = self.window, self.is_causal
        attended = self._block_attention(q, context, (k, v), geometry.layout, *sight)
        return attention.o_proj(attended.flatten(2))


class BlockBackbone(VocabularyModule):
    """Base of a draft's module. It computes the inputs of the head from captured states and anchors.

    The subclass of each draft defines ``forward``.
    """

    layer_type: ClassVar[type[BlockLayer]] = BlockLayer
    """Class of the decoder layers."""

    def __init__(
        self, shape: BlockShape, config: BlockConfig, embedding_scale: float, kernels: BlockKernels
    ) -> None:
        """Create the network. ``embedding_scale``: factor by which the target's embedding is multiplied."""
        super().__init__()
        self.shape: BlockShape = shape
        self.config = config
        self.kernels = kernels
        self.embedding_scale = embedding_scale
        self.rope = Rope(shape.rope, shape.head_dim, shape.max_positions)
        self.fc = linear(len(shape.layers) * shape.hidden_size, shape.hidden_size)
        self.hidden_norm = RmsNorm(shape.hidden_size, shape.norm_eps)
        self.layers = nn.ModuleList(
            self.layer_type(shape, index, kernels) for index in range(shape.num_layers)
        )
        self.norm = RmsNorm(shape.hidden_size, shape.norm_eps)
        self.add_vocabulary(shape)

    @property
    def decoder_layers(self) -> list[BlockLayer]:
        """The decoder layers, first to last."""
        return [cast("BlockLayer", layer) for layer in self.layers]

    def states(self, batch: DraftBatch, blocks: Blocks, ops: VocabularyOps) -> Tensor:
        """Return the inputs of the head, [A, B, H], after the final norm.

        Context-parallel ranks divide blocks and context: each computes the keys and values of its part.
        """
        return self.slot_states(batch, blocks, ops, *self.surroundings(batch, blocks))

    def surroundings(self, batch: DraftBatch, blocks: Blocks) -> tuple[Tensor, Geometry]:
        """Return what the blocks attend to: this rank's context states [C, H], not yet normed, and the Geometry."""
        hidden_TNH = batch.hidden_TNH
        position_T = batch.position_T
        device = batch.input_ids_T.device
        anchor_A = blocks.anchor_A
        start_A = blocks.start_A
        seen_C = blocks.context_rows(batch)
        if len(seen_C) < WORTH_A_COPY * len(position_T):
            # All tokens between a block's start and its anchor are kept, so that positions do not change.
            anchor_A, start_A = (torch.searchsorted(seen_C, places_A) for places_A in (anchor_A, start_A))
            row_C = to_device_async(seen_C, device)
            rows = ContextRows.evenly(len(seen_C), batch)
            row_C = rows.take(row_C)
            hidden_TNH, position_T = hidden_TNH[row_C], position_T[row_C]
        else:
            rows = ContextRows.evenly(len(position_T), batch)
            hidden_TNH, position_T = rows.take(hidden_TNH), rows.take(position_T)
        fused_CH = self.fused(hidden_TNH)
        layout = BlockLayout(anchor_A, start_A, device)
        geometry = self.geometry(layout, self.shape.block_size, position_T, fused_CH.dtype)
        return fused_CH, replace(geometry, rows=rows)

    def slot_states(
        self, batch: DraftBatch, blocks: Blocks, ops: VocabularyOps, fused_CH: Tensor, geometry: Geometry
    ) -> Tensor:
        """Return the inputs of the head, [A, B, H], given the results of ``surroundings``."""
        context_CH = self.hidden_norm(fused_CH)
        known_A = batch.input_ids_T[to_device_async(blocks.anchor_A, fused_CH.device)]
        x_ABH = self.embed(known_A, self.shape.block_size, ops)
        for layer in self.decoder_layers:
            x_ABH = layer(x_ABH, context_CH, geometry, recompute=self.config.checkpoint_activations)
        return self.norm(x_ABH)

    def context(self, hidden_TNH: Tensor) -> Tensor:
        """Return the context [T, H] that every layer attends to, computed from captured states."""
        return self.hidden_norm(self.fused(hidden_TNH))

    def fused(self, hidden_TNH: Tensor) -> Tensor:
        """Return the context [T, H] before its norm.

        Captured layers beyond the first N, which the draft does not use, are ignored.
        """
        own = hidden_TNH[:, : len(self.shape.layers)].to(self.fc.weight.dtype)
        return self.fc(own.flatten(1))

    def embed(self, anchor_ids_A: Tensor, block_size: int, ops: VocabularyOps) -> Tensor:
        """Return the scaled embeddings [A, B, H] of blocks: the known token, then mask tokens."""
        ids_AB = anchor_ids_A.new_full((len(anchor_ids_A), block_size), self.shape.mask_token_id)
        ids_AB[:, 0] = anchor_ids_A
        embedded = ops.embed(ids_AB)
        return embedded if self.embedding_scale == 1 else embedded * self.embedding_scale

    def geometry(
        self, layout: BlockLayout, block_size: int, position_T: Tensor, dtype: torch.dtype
    ) -> Geometry:
        """Return the Geometry, positions and rotary angles, of blocks of ``block_size`` slots.

        ``position_T``: position in its document of each token of the context.
        """
        slot_R = layout.slot_positions(block_size).flatten()
        return Geometry(layout, self.rope.angles(slot_R, dtype), self.rope.angles(position_T, dtype))
