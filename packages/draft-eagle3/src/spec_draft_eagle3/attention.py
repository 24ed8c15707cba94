"""The attention of a layer: grouped queries, as Llama's. ``mla.py`` has the other kind, with the same methods.

The attention itself spans the unrolled steps; these modules turn the projected input into queries, keys and values,
and what was attended into the layer's output. Shapes: T tokens; D channels of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_kit.drafting import AttentionProjections

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from spec_draft_eagle3.shape import Eagle3Shape

    Turn = Callable[[Tensor], Tensor]
    """Rotates the heads [T, heads, D] of some tokens by the angles of their positions."""


class GroupedQueryAttention(AttentionProjections):
    """Attention whose key-value heads serve several query heads each."""

    def __init__(self, shape: Eagle3Shape, inputs: int) -> None:
        """Make the projections of ``inputs`` channels."""
        super().__init__(shape, inputs)
        self.head_dim = shape.head_dim

    @property
    def input_projections(self) -> tuple[nn.Linear, ...]:
        """The projections of the layer's input; the first is that of the queries."""
        return self.q_proj, self.k_proj, self.v_proj

    def queries(self, projected: Tensor, turn: Turn) -> Tensor:
        """Return rotated queries [T, heads, D] from the first projection's output."""
        return turn(projected.unflatten(-1, (-1, self.head_dim)))

    def keys_values(self, projected: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        """Return rotated keys, and values, [T, kv_heads, D] each, from the other projections' outputs."""
        k, v = projected.unflatten(-1, (-1, self.head_dim)).chunk(2, dim=1)
        return turn(k), v

    def output(self, attended: Tensor) -> Tensor:
        """Return [T, H] from attention over values, [T, heads, D]."""
        return self.o_proj(attended.flatten(1))
