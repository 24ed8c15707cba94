"""Parts of a Llama-style decoder layer that drafts are built of. Parameter names are the serving formats'."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from spec_core.drafting.plain_kernels import swiglu_mlp

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

INIT_STD = 0.02
"""Standard deviation of drawn weights, as Llama's. A draft that starts better otherwise scales what was drawn."""


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
