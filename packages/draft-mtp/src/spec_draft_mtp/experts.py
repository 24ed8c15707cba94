"""Define feed-forward networks with a mixture of experts, with the names that Transformers gives the tensors.

Shapes: T tokens, H width, E experts, K experts of each token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_draft_mtp.expert_shapes import ExpertShape, LayerShape, QwenExpertShape
from spec_kit.layers import INIT_STD, Mlp, linear

Chosen = tuple[Tensor, Tensor]
"""The experts of each token, int64 [T, K], and the weights of their outputs [T, K]."""


class Experts(nn.Module):
    """The routed experts: SwiGLU MLPs whose weights are stacked."""

    def __init__(self, shape: ExpertShape) -> None:
        """Draw the weights from torch's global generator."""
        super().__init__()
        experts, inner, width = shape.num_experts, shape.intermediate_size, shape.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, inner))
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.normal_(weight, std=INIT_STD)

    def forward(self, x_TH: Tensor, chosen: Chosen) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, [T, H].

        The pairs of token and expert are sorted by expert. An expert without a token gets zeros as gradient.
        """
        index_TK, weight_TK = chosen
        per_token = index_TK.shape[1]
        expert_P, order_P = index_TK.flatten().sort(stable=True)
        counts: list[int] = torch.bincount(expert_P, minlength=len(self.down_proj)).tolist()
        rows = x_TH[order_P // per_token].split(counts)
        outputs: list[Tensor] = []
        for row, gate_up, down in zip(rows, self.gate_up_proj.unbind(), self.down_proj.unbind(), strict=True):
            gate, up = F.linear(row, gate_up).chunk(2, dim=-1)
            outputs.append(F.linear(F.silu(gate) * up, down))
        output_PH = torch.cat(outputs)
        output_PH = torch.empty_like(output_PH).index_copy(0, order_P, output_PH)
        return torch.einsum("tkh,tk->th", output_PH.unflatten(0, (-1, per_token)), weight_TK.to(x_TH.dtype))


class SoftmaxRouter(nn.Module):
    """Qwen's router: the K largest probabilities, scaled to the sum 1."""

    def __init__(self, shape: ExpertShape) -> None:
        """Draw the weights from torch's global generator."""
        super().__init__()
        self.weight = linear(shape.hidden_size, shape.num_experts).weight
        self._per_token = shape.experts_per_token

    def forward(self, x_TH: Tensor) -> Chosen:
        """Return each token's experts and their weights."""
        weight_TK, index_TK = _scores(x_TH, self.weight).softmax(-1).topk(self._per_token, dim=-1)
        return index_TK, weight_TK / weight_TK.sum(-1, keepdim=True)


class SigmoidRouter(nn.Module):
    """The router of DeepSeek V3 and GLM: sigmoids, of which a constant for each expert corrects the order.

    The constant only decides which experts are chosen. It is not trained: its authors move it by the experts' load.
    """

    e_score_correction_bias: Tensor

    def __init__(self, shape: LayerShape) -> None:
        """Draw the weights from torch's global generator; the constant starts as zero."""
        super().__init__()
        self.weight = linear(shape.hidden_size, shape.num_experts).weight
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.num_experts))
        self._shape = shape

    def forward(self, x_TH: Tensor) -> Chosen:
        """Return each token's experts and their weights."""
        shape = self._shape
        score_TE = _scores(x_TH, self.weight).sigmoid()
        with torch.no_grad():
            order_TGE = (score_TE + self.e_score_correction_bias).unflatten(-1, (shape.num_groups, -1))
            best_TG = order_TGE.topk(2, dim=-1)[0].sum(-1).topk(shape.groups_per_token, dim=-1)[1]
            left_out_TG = torch.ones_like(order_TGE[..., 0], dtype=torch.bool).scatter(
                -1, best_TG, value=False
            )
            order_TE = order_TGE.masked_fill(left_out_TG[..., None], -torch.inf).flatten(1)
            index_TK = order_TE.topk(shape.experts_per_token, dim=-1)[1]
        weight_TK = score_TE.gather(1, index_TK)
        return index_TK, weight_TK / (weight_TK.sum(-1, keepdim=True) + 1e-20) * shape.routed_scale

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the module, but leave the constant in float32: its sums with scores are compared with each other."""
        constant = self.e_score_correction_bias
        super()._apply(fn, recurse)
        self.e_score_correction_bias = constant.to(self.e_score_correction_bias.device)
        return self


class SoftmaxExperts(nn.Module):
    """Qwen3.5 MoE's network: routed experts, and one that is always used, with a gate for each token."""

    def __init__(self, shape: QwenExpertShape, swiglu_mlp: Callable[..., Tensor]) -> None:
        """Make the router and the experts; ``swiglu_mlp``: kernel of the expert that is always used."""
        super().__init__()
        self.gate, self.experts = SoftmaxRouter(shape), Experts(shape)
        self.shared_expert = Mlp(shape.hidden_size, shape.shared_width, swiglu_mlp)
        self.shared_expert_gate = linear(shape.hidden_size, 1)

    def forward(self, x_TH: Tensor) -> Tensor:
        """Return the network's output [T, H]."""
        shared_TH = self.shared_expert_gate(x_TH).sigmoid() * self.shared_expert(x_TH)
        return self.experts(x_TH, self.gate(x_TH)) + shared_TH


class SigmoidExperts(nn.Module):
    """The network of DeepSeek V3 and GLM: routed experts, and one that is always used."""

    def __init__(self, shape: LayerShape, swiglu_mlp: Callable[..., Tensor]) -> None:
        """Make the router and the experts; ``swiglu_mlp``: kernel of the expert that is always used."""
        super().__init__()
        self.gate, self.experts = SigmoidRouter(shape), Experts(shape)
        self.shared_experts = Mlp(shape.hidden_size, shape.shared_width, swiglu_mlp)

    def forward(self, x_TH: Tensor) -> Tensor:
        """Return the network's output [T, H]."""
        return self.experts(x_TH, self.gate(x_TH)) + self.shared_experts(x_TH)


def _scores(x_TH: Tensor, weight_EH: Tensor) -> Tensor:
    """Return the router's scores before its activation [T, E], in float32 or wider."""
    wide = torch.promote_types(x_TH.dtype, torch.float32)
    return F.linear(x_TH.to(wide), weight_EH.to(wide))
