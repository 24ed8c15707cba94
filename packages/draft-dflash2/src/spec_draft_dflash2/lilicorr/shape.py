"""Define LiLiCorrShape: a LiLiCorr draft's sizes, read from and written to config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, NonNegativeInt

from spec_core import TargetSpec
from spec_draft_dflash2.shape import CandidateShape
from spec_kit.drafting import Json, Shapes, Size

NUM_FEATURES = 5
"""Numbers that describe a candidate besides its token (see ``head``)."""
_MOST_CANDIDATES = 16
_Positive = Annotated[float, Field(gt=0)]


class LiLiCorrShape(CandidateShape):
    """The sizes of one LiLiCorr draft."""

    architecture: ClassVar[str] = "LiLiCorrDraftModel"
    own_fields: ClassVar[tuple[str, ...]] = (
        "conv_kernel_size",
        "conv_group_size",
        "lilicorr_candidate_topk",
        "lilicorr_hidden_size",
        "lilicorr_num_layers",
        "lilicorr_num_heads",
        "lilicorr_mlp_ratio",
        "lilicorr_factor_dim",
        "lilicorr_logit_scale",
        "lilicorr_vector_eps",
    )

    conv_kernel_size: NonNegativeInt = 0
    conv_group_size: NonNegativeInt = 0
    lilicorr_candidate_topk: Size
    lilicorr_hidden_size: Size
    """Width D of the layers that compare candidates."""
    lilicorr_num_layers: Size
    lilicorr_num_heads: Size
    lilicorr_mlp_ratio: _Positive
    lilicorr_factor_dim: Size
    lilicorr_logit_scale: _Positive
    lilicorr_vector_eps: _Positive

    @property
    def num_candidates(self) -> int:
        """Number of candidates of a guess."""
        return self.lilicorr_candidate_topk

    @property
    def mlp_width(self) -> int:
        """Width of the MLP of these layers."""
        return int(self.lilicorr_hidden_size * self.lilicorr_mlp_ratio)

    def tensor_shapes(self) -> Shapes:
        """Return name and shape of every trained tensor, those that choose a path included."""
        h, d, f = self.hidden_size, self.lilicorr_hidden_size, self.lilicorr_factor_dim
        own: Shapes = {
            "slot_embedding": (1, 1, self.block_size - 1, 1, d),
            "rank_embedding": (1, 1, 1, self.num_candidates, d),
            "relative_slot_bias": (self.lilicorr_num_heads, 2 * self.block_size - 1),
            "same_slot_bias": (self.lilicorr_num_heads,),
            "feature_norm.weight": (NUM_FEATURES,),
            "feature_norm.bias": (NUM_FEATURES,),
            "output_norm.weight": (d,),
            "anchor_norm.weight": (d,),
        }
        linears = {
            **({} if h == d else {"token_proj": (d, h)}),
            "pass_hidden_proj": (d, h),
            "context_proj": (d, h),
            **_mlp("feature_mlp", NUM_FEATURES, d, d),
            "factor_input_proj": (d, 3 * d),
            **dict.fromkeys(("out_head", "in_head", "anchor_out_head"), (f, d)),
        }
        for index in range(self.lilicorr_num_layers):
            layer = f"layers.{index}"
            own |= {
                f"{layer}.attn_norm.weight": (d,),
                f"{layer}.mlp_norm.weight": (d,),
                f"{layer}.attn.in_proj_weight": (3 * d, d),
                f"{layer}.attn.in_proj_bias": (3 * d,),
            }
            linears |= {f"{layer}.attn.out_proj": (d, d), **_mlp(f"{layer}.mlp", d, self.mlp_width, d)}
        for name, size in linears.items():
            own |= {f"{name}.weight": size, f"{name}.bias": size[:1]}
        return super().tensor_shapes() | {f"lilicorr.{name}": size for name, size in own.items()}

    @classmethod
    def read_own(cls, fields: Json, own: Json, folder: Path) -> Json:
        """Return the fields that published drafts store in several forms: the width 0 means the draft's width."""
        width = own.get("lilicorr_hidden_size") or fields.get("hidden_size")
        return {**super().read_own(fields, own, folder), "lilicorr_hidden_size": width}

    def fixed_fields(self) -> Json:
        """Return fields of a published draft's config.json for which only the given value is supported."""
        return super().fixed_fields() | {
            "draft_vocab_size": self.target_vocab_size,  # engines take a candidate's row for its token
            "projector_type": "lilicorr",
            "lilicorr_enabled": True,
        }

    def problem(self) -> str | None:
        """Return why no draft can have this shape, or None."""
        count, width, heads = self.num_candidates, self.lilicorr_hidden_size, self.lilicorr_num_heads
        if count > _MOST_CANDIDATES or count & (count - 1):
            return f"lilicorr_candidate_topk={count}: engines need a power of two, at most {_MOST_CANDIDATES}"
        if count > self.target_vocab_size:
            return f"lilicorr_candidate_topk={count} is more than the vocabulary's {self.target_vocab_size}"
        if width % heads:
            return f"lilicorr_num_heads={heads} does not divide the width {width}"
        return super().problem()

    def to_json(self, target: TargetSpec) -> Json:
        """Return the fields of config.json that vLLM from 0.31 on and SGLang from 0.5.22 on read."""
        fields = super().to_json(target)
        named = {"projector_type": "lilicorr", "lilicorr_enabled": True}
        return fields | {self.nested: fields[self.nested] | named}


def _mlp(name: str, inputs: int, inner: int, outputs: int) -> dict[str, tuple[int, int]]:
    return {f"{name}.up_proj": (inner, inputs), f"{name}.down_proj": (outputs, inner)}
