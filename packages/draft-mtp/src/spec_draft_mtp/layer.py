"""Define the modules of an MTP head: its norms, the kinds of attention, the decoder layer and the head.

``experts.py`` has the feed-forward networks with experts. Shapes: T tokens, H width, N heads, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_draft_mtp.expert_shapes import DeepseekShape, GlmShape
from spec_draft_mtp.experts import SigmoidExperts, SoftmaxExperts
from spec_draft_mtp.shape import MtpShape
from spec_kit.chain_drafting import ChainKernels
from spec_kit.layers import INIT_STD, LatentAttention, Mlp, RmsNorm, linear

Turn = Callable[[Tensor], Tensor]
"""Rotates the heads [T, N, D] of some tokens by the rotary angles of their positions."""


def wide_rms_norm(x: Tensor, weight: Tensor, shift: float, eps: float) -> Tensor:
    """Return the RMS norm x̂ · (weight + shift), computed in float32 or wider, in the dtype of ``x``."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.rms_norm(wide, weight.shape, weight.to(wide.dtype) + shift, eps).to(x.dtype)


class CentredNorm(nn.Module):
    """An RMS norm that stores its weight minus 1."""

    def __init__(self, width: int, eps: float) -> None:
        """Start with weight 1."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed channels, shaped like ``x`` [..., width]."""
        return wide_rms_norm(x, self.weight, 1.0, self._eps)


def new_norm(shape: MtpShape, width: int) -> nn.Module:
    """Return a norm of ``width`` channels, as the head's kind has it."""
    return (RmsNorm if shape.stored_as_layer else CentredNorm)(width, shape.norm_eps)


class GatedAttention(nn.Module):
    """The projections of Qwen3.5's attention, which multiplies each head's output by a separate gate."""

    def __init__(self, shape: MtpShape) -> None:
        """Make the projections, and the norms of each head's query and key."""
        super().__init__()
        h, d = shape.hidden_size, shape.head_dim
        self.q_proj = linear(h, 2 * shape.num_heads * d)
        self.k_proj = linear(h, shape.num_kv_heads * d)
        self.v_proj = linear(h, shape.num_kv_heads * d)
        self.o_proj = linear(shape.num_heads * d, h)
        self.q_norm, self.k_norm = CentredNorm(d, shape.norm_eps), CentredNorm(d, shape.norm_eps)

    def qkv(self, x_TH: Tensor, turn: Turn) -> tuple[Tensor, ...]:
        """Return rotated queries and keys, values, and gates, each [T, N, D]."""
        d = len(self.q_norm.weight)
        q, gate = self.q_proj(x_TH).unflatten(-1, (-1, 2 * d)).chunk(2, dim=-1)
        k, v = (project(x_TH).unflatten(-1, (-1, d)) for project in (self.k_proj, self.v_proj))
        return turn(self.q_norm(q)), turn(self.k_norm(k)), v, gate

    def output(self, attended_TND: Tensor, gate_TND: Tensor) -> Tensor:
        """Apply the gates and the output projection; return [T, H]."""
        return self.o_proj((attended_TND * gate_TND.sigmoid()).flatten(1))


class BiasedLinear(nn.Linear):
    """A linear layer with a bias that starts as zero."""

    def __init__(self, inputs: int, outputs: int) -> None:
        """Draw the weights from torch's global generator."""
        super().__init__(inputs, outputs)
        nn.init.zeros_(self.bias)
        nn.init.normal_(self.weight, std=INIT_STD)


class GroupedAttention(nn.Module):
    """The projections of GLM's grouped-query attention, with biases and norms of heads if the target has them."""

    def __init__(self, shape: GlmShape) -> None:
        """Make the projections."""
        super().__init__()
        h, d = shape.hidden_size, shape.head_dim
        project = BiasedLinear if shape.attention_bias else linear
        self.q_proj = project(h, shape.num_heads * d)
        self.k_proj = project(h, shape.num_kv_heads * d)
        self.v_proj = project(h, shape.num_kv_heads * d)
        self.o_proj = linear(shape.num_heads * d, h)
        self.q_norm, self.k_norm = (
            new_norm(shape, d) if shape.head_norms else nn.Identity() for _ in range(2)
        )
        self._head_dim = d

    def qkv(self, x_TH: Tensor, turn: Turn) -> tuple[Tensor, ...]:
        """Return rotated queries and keys, and values, each [T, N, D]."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(x_TH).unflatten(-1, (-1, self._head_dim)) for project in projections)
        return turn(self.q_norm(q)), turn(self.k_norm(k)), v

    def output(self, attended_TND: Tensor) -> Tensor:
        """Apply the output projection; return [T, H]."""
        return self.o_proj(attended_TND.flatten(1))


class HeadLatentAttention(LatentAttention):
    """Multi-head latent attention with the methods of the other kinds of attention here."""

    def __init__(self, shape: DeepseekShape) -> None:
        """Make the projections."""
        super().__init__(shape, shape.hidden_size)

    def qkv(self, x_TH: Tensor, turn: Turn) -> tuple[Tensor, ...]:
        """Return rotated queries and keys, each [T, N, D], and values, which are narrower."""
        q = self.queries(self.q_a_proj(x_TH), turn)
        return q, *self.keys_values(self.kv_a_proj_with_mqa(x_TH), turn)


class DenseMlp(Mlp):
    """The MLP of a head without experts."""

    def __init__(self, shape: MtpShape, swiglu_mlp: Callable[..., Tensor]) -> None:
        """Make the layers; ``swiglu_mlp``: the kernel that computes the MLP."""
        super().__init__(shape.hidden_size, shape.intermediate_size, swiglu_mlp)


ATTENTIONS: Mapping[str, Any] = {
    "gated": GatedAttention,
    "grouped": GroupedAttention,
    "latent": HeadLatentAttention,
}
"""``MtpShape.attention`` -> module."""
FEED_FORWARDS: Mapping[str, Any] = {
    "dense": DenseMlp,
    "softmax": SoftmaxExperts,
    "sigmoid": SigmoidExperts,
}
"""``MtpShape.feed_forward`` -> module."""


class MtpLayer(nn.Module):
    """One decoder layer without the attention itself, which ``MtpModel`` computes over the unrolled steps."""

    def __init__(self, shape: MtpShape, kernels: ChainKernels) -> None:
        """Make the layer; its MLP uses the backend's kernel."""
        super().__init__()
        self.input_layernorm = new_norm(shape, shape.hidden_size)
        self.self_attn = ATTENTIONS[shape.attention](shape)
        self.post_attention_layernorm = new_norm(shape, shape.hidden_size)
        self.mlp = FEED_FORWARDS[shape.feed_forward](shape, kernels.swiglu_mlp)

    def qkv(self, x_TH: Tensor, turn: Turn) -> tuple[Tensor, ...]:
        """Return queries, keys and values from the layer's input, and further arguments of ``finish``.

        ``turn`` rotates heads.
        """
        return self.self_attn.qkv(self.input_layernorm(x_TH), turn)

    def finish(self, x_TH: Tensor, attended_TND: Tensor, *gate_TND: Tensor) -> Tensor:
        """Apply output projection and MLP with their residual connections, and return the output."""
        x_TH = x_TH + self.self_attn.output(attended_TND, *gate_TND)
        return x_TH + self.mlp(self.post_attention_layernorm(x_TH))


class MtpHead(nn.Module):
    """The modules whose tensor names begin with ``mtp``."""

    def __init__(self, shape: MtpShape, kernels: ChainKernels) -> None:
        """Make the decoder layer, its input projection and the norms."""
        super().__init__()
        width = shape.hidden_size
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = new_norm(shape, width), new_norm(shape, width)
        self.fc = linear(2 * width, width)
        self.layers = nn.ModuleList([MtpLayer(shape, kernels)])
        self.norm = new_norm(shape, width)
        self._skips_first = shape.stored_as_layer

    @property
    def layer(self) -> MtpLayer:
        """The only decoder layer."""
        layer = self.layers[0]
        assert isinstance(layer, MtpLayer)
        return layer

    def join(self, embedded_TH: Tensor, state_TH: Tensor, position_T: Tensor) -> Tensor:
        """Return the layer's input, from a token's embedding and the state at the previous token.

        DeepSeek's and GLM's heads get zeros for the embedding at position 0, as in vLLM (``deepseek_mtp.py``,
        ``glm4_moe_mtp.py``). SGLang gives them the embedding.
        """
        if self._skips_first:
            embedded_TH = embedded_TH.masked_fill((position_T == 0)[:, None], 0)
        both = [self.pre_fc_norm_embedding(embedded_TH), self.pre_fc_norm_hidden(state_TH)]
        return self.fc(torch.cat(both, dim=-1))
