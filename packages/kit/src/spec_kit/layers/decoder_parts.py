"""Define the modules of a draft's Llama-style decoder layer, with the names in exported files."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from spec_kit.drafting.decoder_shape import DecoderShape
from spec_kit.layers.plain_kernels import swiglu_mlp

INIT_STD = 0.02
"""Standard deviation of randomly drawn weights, as in Llama. A draft may scale the weights afterwards."""


class AttentionProjections(nn.Module):
    """The projections of an attention layer. A draft's subclass computes the attention between them."""

    def __init__(self, shape: DecoderShape, inputs: int) -> None:
        """Create the projections to queries, keys and values from ``inputs`` channels, and to the output."""
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
        """Create the three linear layers. ``swiglu_mlp``: the kernel that computes the MLP."""
        super().__init__()
        self._swiglu_mlp = swiglu_mlp
        self.gate_proj = linear(hidden_size, intermediate_size)
        self.up_proj = linear(hidden_size, intermediate_size)
        self.down_proj = linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return down(silu(gate(x)) · up(x)), with the shape of ``x`` [..., H]."""
        return self._swiglu_mlp(x, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)


class Linear(nn.Linear):
    """A linear layer without a bias. ``product(x, weight)`` computes it, and may be replaced."""

    product: Callable[[Tensor, Tensor], Tensor] = staticmethod(F.linear)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """Return the product of ``input`` [..., inputs] with the weight, [..., outputs]."""
        return self.product(input, self.weight)


def linear(inputs: int, outputs: int) -> Linear:
    """Return a linear layer without a bias; its weights are drawn from torch's global generator."""
    layer = Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=INIT_STD)
    return layer
