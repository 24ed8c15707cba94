"""Define the head that scores paths through the candidates of a block, one candidate in each slot.

Layers compare all candidates of a block with each other. Each candidate then has a vector *out* and a vector *in*,
which also depend on the block's anchor: the target's states at the last token that the block sees. A step from one
candidate to a candidate of the next slot scores logit_scale · cos(out, in). Parameters are named as in the serving
format.

Shapes: A blocks, S slots that guess, C candidates of each, H width of the draft, D width of the head, N heads,
L = S · C.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_draft_dflash2.lilicorr.shape import NUM_FEATURES, LiLiCorrShape
from spec_kit.layers import INIT_STD, RmsNorm


class PathHead(nn.Module):
    """Scores the steps of paths through a block's candidates."""

    def __init__(self, shape: LiLiCorrShape) -> None:
        """Draw the matrices at random; what is added to candidates and to attention starts as 0."""
        super().__init__()
        h, d, f = shape.hidden_size, shape.lilicorr_hidden_size, shape.lilicorr_factor_dim
        slots = shape.block_size - 1
        heads = shape.lilicorr_num_heads
        self._scale, self._eps = shape.lilicorr_logit_scale, shape.lilicorr_vector_eps
        self.token_proj = nn.Identity() if h == d else nn.Linear(h, d)
        self.pass_hidden_proj = nn.Linear(h, d)
        self.feature_norm = nn.LayerNorm(NUM_FEATURES)
        self.feature_mlp = _Mlp(NUM_FEATURES, d, d)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, slots, 1, d))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, shape.num_candidates, d))
        self.relative_slot_bias = nn.Parameter(torch.zeros(heads, 2 * slots + 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(heads))
        self.context_proj = nn.Linear(h, d)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.lilicorr_num_layers))
        self.output_norm, self.anchor_norm = (RmsNorm(d, shape.norm_eps) for _ in range(2))
        self.factor_input_proj = nn.Linear(3 * d, d)
        self.out_head, self.in_head, self.anchor_out_head = (nn.Linear(d, f) for _ in range(3))
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=INIT_STD)
                nn.init.zeros_(layer.bias)

    def forward(
        self,
        embedded_ASCH: Tensor,
        log_prob_ASC: Tensor,
        states_ASH: Tensor,
        anchor_AH: Tensor,
        has_anchor_A: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the scores, float32 or wider: of the first candidates [A, C], and of steps [A, S − 1, C, C].

        A step's score is at [its slot, candidate before, candidate after]. ``embedded_ASCH``: the target's embeddings
        of the candidates. ``log_prob_ASC``: the head's log-probabilities, the largest first. ``anchor_AH``: the
        context at the last token before the block; ``has_anchor_A``: whether there is such a token.
        """
        num_slots = log_prob_ASC.shape[1]
        x_ASCD = self.token_proj(embedded_ASCH) + self.pass_hidden_proj(states_ASH)[:, :, None]
        x_ASCD = x_ASCD + self.feature_mlp(self.feature_norm(_features(log_prob_ASC).to(x_ASCD.dtype)))
        x_ASCD = x_ASCD + self.slot_embedding[0, :, :num_slots] + self.rank_embedding[0]
        x_ALD = x_ASCD.flatten(1, 2)
        bias_NLL = self._attention_bias(*log_prob_ASC.shape[1:])
        for layer in self.layers:
            x_ALD = layer(x_ALD, bias_NLL)
        x_ASCD = self.output_norm(x_ALD).view(x_ASCD.shape)
        anchor_AD = self.context_proj(anchor_AH) * has_anchor_A[:, None].to(anchor_AH.dtype)
        anchor_AD = self.anchor_norm(anchor_AD)
        anchor_ASCD = anchor_AD[:, None, None].expand_as(x_ASCD)
        both_ASCX = torch.cat([x_ASCD, anchor_ASCD, x_ASCD * anchor_ASCD], dim=-1)
        factor_ASCD = F.silu(self.factor_input_proj(both_ASCX))
        out_ASCF, in_ASCF = self._unit(self.out_head(factor_ASCD)), self._unit(self.in_head(factor_ASCD))
        first_AF = self._unit(self.anchor_out_head(anchor_AD))
        start_AC = (in_ASCF[:, 0] @ first_AF[..., None]).squeeze(-1)
        step_ASCC = out_ASCF[:, :-1] @ in_ASCF[:, 1:].transpose(-1, -2)
        wide = torch.promote_types(start_AC.dtype, torch.float32)
        return self._scale * start_AC.to(wide), self._scale * step_ASCC.to(wide)

    def _unit(self, vectors: Tensor) -> Tensor:
        return F.normalize(vectors, dim=-1, eps=self._eps)

    def _attention_bias(self, num_slots: int, num_candidates: int) -> Tensor:
        """Return what is added to the scores of attention, by the distance of slots and for the same slot."""
        weight_NX = self.relative_slot_bias
        slot_S = torch.arange(num_slots, device=weight_NX.device)
        # A product with zeros and ones: the gradient of an indexing would be summed in an arbitrary order.
        place_SS = slot_S[:, None] - slot_S + weight_NX.shape[1] // 2
        bias_SSN = F.one_hot(place_SS, weight_NX.shape[1]).to(weight_NX.dtype) @ weight_NX.T
        same_SS = torch.eye(num_slots, dtype=weight_NX.dtype, device=weight_NX.device)
        bias_NSS = bias_SSN.permute(2, 0, 1) + same_SS * self.same_slot_bias[:, None, None]
        wide = (-1, num_slots, num_candidates, num_slots, num_candidates)
        return bias_NSS[:, :, None, :, None].expand(wide).flatten(3, 4).flatten(1, 2)


def _features(log_prob_ASC: Tensor) -> Tensor:
    """Return what describes a candidate besides its token: [A, S, C, NUM_FEATURES]."""
    rank_C = torch.arange(log_prob_ASC.shape[-1], device=log_prob_ASC.device).to(log_prob_ASC.dtype)
    share_C = rank_C / max(len(rank_C) - 1, 1)
    is_first_C = (rank_C == 0).to(rank_C.dtype)
    behind_ASC = log_prob_ASC - log_prob_ASC[..., :1]
    parts = log_prob_ASC, log_prob_ASC.exp(), behind_ASC, share_C, is_first_C
    return torch.stack([part.expand_as(log_prob_ASC) for part in parts], dim=-1)


class _Mlp(nn.Module):
    def __init__(self, inputs: int, inner: int, outputs: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(inputs, inner), nn.Linear(inner, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.up_proj(x)))


class _Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.randn(3 * width, width) * INIT_STD)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x_ALD: Tensor, bias_NLL: Tensor) -> Tensor:
        projected = F.linear(x_ALD, self.in_proj_weight, self.in_proj_bias)
        q, k, v = projected.unflatten(-1, (3, self._num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias_NLL[None])
        return self.out_proj(attended.transpose(1, 2).flatten(2))


class _Layer(nn.Module):
    def __init__(self, shape: LiLiCorrShape) -> None:
        super().__init__()
        width = shape.lilicorr_hidden_size
        self.attn_norm, self.mlp_norm = (RmsNorm(width, shape.norm_eps) for _ in range(2))
        self.attn = _Attention(width, shape.lilicorr_num_heads)
        self.mlp = _Mlp(width, shape.mlp_width, width)

    def forward(self, x_ALD: Tensor, bias_NLL: Tensor) -> Tensor:
        x_ALD = x_ALD + self.attn(self.attn_norm(x_ALD), bias_NLL)
        return x_ALD + self.mlp(self.mlp_norm(x_ALD))
