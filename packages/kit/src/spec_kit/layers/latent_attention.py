"""Define multi-head latent attention, whose queries, keys and values come from low-rank latents.

The source is DeepSeek-V2 (arXiv 2405.04434). Training and reference drafting expand the latents; engines
cache them. Shapes: T tokens; a query's or key's head has D = nope + rope channels, of which the rope channels
are rotated.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from spec_kit.drafting.latent_shape import LatentShape
from spec_kit.layers.decoder_parts import linear
from spec_kit.layers.plain_kernels import RmsNorm

Turn = Callable[[Tensor], Tensor]
"""Rotates the heads [T, heads, D] of some tokens by the rotary angles of their positions."""


class LatentAttention(nn.Module):
    """The attention of DeepSeek V3 and Kimi K2, with their tensor names.

    A draft computes the attention itself, between ``queries``, ``keys_values`` and ``output``.
    """

    def __init__(self, shape: LatentShape, inputs: int) -> None:
        """Make the projections; ``inputs``: width of their input."""
        super().__init__()
        heads, self._nope, self._rope = shape.num_heads, shape.qk_nope_head_dim, shape.qk_rope_head_dim
        self._value, self._latent, self._score_scale = shape.v_head_dim, shape.kv_lora_rank, shape.score_scale
        self.q_a_proj = linear(inputs, shape.q_lora_rank)
        self.q_a_layernorm = RmsNorm(shape.q_lora_rank, shape.norm_eps)
        self.q_b_proj = linear(shape.q_lora_rank, heads * (self._nope + self._rope))
        self.kv_a_proj_with_mqa = linear(inputs, self._latent + self._rope)
        self.kv_a_layernorm = RmsNorm(self._latent, shape.norm_eps)
        self.kv_b_proj = linear(self._latent, heads * (self._nope + self._value))
        self.o_proj = linear(heads * self._value, shape.hidden_size)
        self.rotated_key = nn.Identity()  # hints name this submodule to sum gradients over heads

    @property
    def input_projections(self) -> tuple[nn.Linear, ...]:
        """The projections of the layer's input; the first projection makes the queries."""
        return self.q_a_proj, self.kv_a_proj_with_mqa

    def queries(self, projected: Tensor, turn: Turn) -> Tensor:
        """Return queries [T, heads, D], rotated channels first, from the first projection's output.

        ``turn`` rotates channels.
        """
        # Attention divides scores by √D; any further factor on scores is applied to the narrow latent here.
        latent = self.q_a_layernorm(projected) * self._score_scale
        heads = self.q_b_proj(latent).unflatten(-1, (-1, self._nope + self._rope))
        nope, rope = heads.split([self._nope, self._rope], dim=-1)
        return torch.cat([turn(_in_halves(rope)), nope], dim=-1)

    def keys_values(self, projected: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        """Return keys [T, heads, D], rotated channels first, and values, which are narrower.

        ``projected`` has the output of the second projection.
        """
        latent, rope = projected.split([self._latent, self._rope], dim=-1)
        heads = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (-1, self._nope + self._value))
        nope, v = heads.split([self._nope, self._value], dim=-1)
        shared = turn(_in_halves(self.rotated_key(rope))[:, None]).expand(-1, nope.shape[1], -1)
        k = torch.cat([shared, nope], dim=-1)
        return k, v.contiguous()  # a view would keep the projection's whole output for the backward pass

    def output(self, attended: Tensor) -> Tensor:
        """Apply the output projection to the attention's result, as wide as values; return [T, H]."""
        return self.o_proj(attended.flatten(1))


def _in_halves(channels: Tensor) -> Tensor:
    """Reorder channels: the pair (2i, 2i + 1), which engines rotate, becomes (i, i + half) for ``rotate``.

    A score is a sum over channels, so their order does not matter if queries and keys have the same order.
    """
    return channels.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
