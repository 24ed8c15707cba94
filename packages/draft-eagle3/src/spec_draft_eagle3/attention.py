"""Define the projections of grouped-query attention, as in Llama.

``LatentAttention`` of the library has the same methods. ``model.py`` computes the attention itself,
which spans the unrolled steps. These modules compute queries, keys and values from the projected input, and
project the attention's result. Shapes: T tokens; D channels of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from spec_kit.layers import AttentionProjections, RmsNorm

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from spec_draft_eagle3.shape import Eagle3Shape

    Turn = Callable[[Tensor], Tensor]
    """Rotates the heads [T, heads, D] of some tokens by the rotary angles of their positions."""


class GroupedQueryAttention(AttentionProjections):
    """Attention in which several query heads share each key-value head."""

    def __init__(self, shape: Eagle3Shape, inputs: int) -> None:
        """Make the projections; ``inputs``: width of their input."""
        super().__init__(shape, inputs)
        self.head_dim = shape.head_dim
        norm = RmsNorm if shape.qk_norm else nn.Identity
        self.q_norm, self.k_norm = (norm(shape.head_dim, eps=shape.norm_eps) for _ in range(2))

    @property
    def input_projections(self) -> tuple[nn.Linear, ...]:
        """The projections of the layer's input; the first projection makes the queries."""
        return self.q_proj, self.k_proj, self.v_proj

    def queries(self, projected: Tensor, turn: Turn) -> Tensor:
        """Return rotated queries [T, heads, D] from the first projection's output. ``turn`` rotates heads."""
        return turn(self.q_norm(projected.unflatten(-1, (-1, self.head_dim))))

    def keys_values(self, projected: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        """Return rotated keys, and values, [T, kv_heads, D] each, from the other projections' outputs."""
        k, v = projected.unflatten(-1, (-1, self.head_dim)).chunk(2, dim=1)
        return turn(self.k_norm(k)), v

    def output(self, attended: Tensor) -> Tensor:
        """Apply the output projection to the attention's result [T, heads, D]; return [T, H]."""
        return self.o_proj(attended.flatten(1))
