"""Parts of a Llama-style decoder layer that drafts are built of. Parameter names are the serving formats'."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from spec_kit.drafting.plain_kernels import swiglu_mlp

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from spec_kit.drafting.decoder_shape import DecoderShape

INIT_STD = 0.02
"""Standard deviation of drawn weights, as Llama's. A draft that starts better otherwise scales what was drawn."""


class AttentionProjections(nn.Module):
    """The projections of an attention; what lies between them is the draft's own."""

    def __init__(self, shape: DecoderShape, inputs: int) -> None:
        """Make the projections to queries, keys and values of ``inputs`` channels, and the one of the output."""
        super().__init__()
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = linear(inputs, queries)
        self.k_proj = linear(inputs, keys)
        self.v_proj = linear(inputs, keys)
        self.o_proj = linear(queries, shape.hidden_size)


class Mlp(nn.Module):
    """A SwiGLU MLP."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        swiglu_mlp: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = swiglu_mlp,
    ) -> None:
        """Make the three layers; ``swiglu_mlp`` is the kernel of that name."""
        super().__init__()
        self._swiglu_mlp = swiglu_mlp
        self.gate_proj = linear(hidden_size, intermediate_size)
        self.up_proj = linear(hidden_size, intermediate_size)
        self.down_proj = linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return down(silu(gate(x)) · up(x)), like ``x`` [..., H]."""
        return self._swiglu_mlp(x, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a linear layer without a bias, drawn from torch's global generator."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=INIT_STD)
    return layer
