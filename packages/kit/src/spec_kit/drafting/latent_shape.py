"""Define LatentShape: the sizes of multi-head latent attention in a draft's decoder layer.

Importing this module imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spec_kit.drafting.decoder_shape import DecoderShape
from spec_kit.drafting.draft_files import (
    Json,
    Shapes,
    Size,
)
from spec_kit.sharding import TensorParallelHints


class LatentShape(DecoderShape):
    """The sizes of a draft whose layers have multi-head latent attention.

    ``head_dim`` is the number of rotated channels, as in Transformers. Each query head has separate keys.
    """

    q_lora_rank: Size
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size

    @classmethod
    def read_own(cls, fields: Json, own: Json, folder: Path) -> Json:
        """Return the fields that every draft of decoder layers has.

        Fields of grouped-query attention are derived from other fields.
        """
        read = super().read_own(fields, own, folder)
        derived = {"num_key_value_heads": "num_attention_heads", "head_dim": "qk_rope_head_dim"}
        return read | {key: fields[source] for key, source in derived.items() if source in fields}

    @property
    def cache_shape(self) -> tuple[int, int]:
        """Number of heads of a token's keys and values, and number of channels of each key."""
        return self.num_heads, self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def value_width(self) -> int:
        """Number of channels of each head of values."""
        return self.v_head_dim

    @property
    def score_scale(self) -> float:
        """Factor on attention scores in addition to D ** −½: the square of YaRN's mscale, as in both engines."""
        factor, mscale = self.rope.get("factor") or 1.0, self.rope.get("mscale_all_dim") or 0.0
        return (1.0 + 0.1 * mscale * math.log(max(factor, 1.0))) ** 2

    def attention_shapes(self, inputs: int) -> Shapes:
        """Return name and shape of each tensor of LatentAttention; ``inputs``: width of its input."""
        heads, rope, nope = self.num_heads, self.qk_rope_head_dim, self.qk_nope_head_dim
        return {
            "q_a_proj.weight": (self.q_lora_rank, inputs),
            "q_a_layernorm.weight": (self.q_lora_rank,),
            "q_b_proj.weight": (heads * (nope + rope), self.q_lora_rank),
            "kv_a_proj_with_mqa.weight": (self.kv_lora_rank + rope, inputs),
            "kv_a_layernorm.weight": (self.kv_lora_rank,),
            "kv_b_proj.weight": (heads * (nope + self.v_head_dim), self.kv_lora_rank),
            "o_proj.weight": (self.hidden_size, heads * self.v_head_dim),
        }

    def attention_hints(self, attention: str) -> TensorParallelHints:
        """Return how tensor-parallel ranks divide the heads.

        Each rank computes the latents completely, because they are narrow.
        """
        return TensorParallelHints(
            columns={f"{attention}.q_b_proj": self.num_heads, f"{attention}.kv_b_proj": self.num_heads},
            rows={f"{attention}.o_proj": self.num_heads},
            enters=tuple(
                f"{attention}.{name}" for name in ("q_a_layernorm", "kv_a_layernorm", "rotated_key")
            ),
            leaves=(f"{attention}.o_proj",),
        )

    def norm_hints(self, norm: str) -> TensorParallelHints:
        """Return hints that make each rank compute the latents of all tokens from the output of ``norm``."""
        return TensorParallelHints(all_tokens_out=(norm,), each_token=(norm,))

    def fixed_fields(self) -> Json:
        """Return fields of a published draft's config.json for which only the given value is supported.

        The values mean that neighbouring channels are rotated in pairs, and that attention has no window.
        """
        return super().fixed_fields() | {"rope_interleave": True, "index_topk": None}

    def problem(self) -> str | None:
        """Return why no engine can serve a draft of this shape, or None."""
        width = self.qk_nope_head_dim + self.qk_rope_head_dim
        if self.v_head_dim > width:
            return f"v_head_dim={self.v_head_dim} exceeds the {width} channels of a query's head"
        return super().problem() or _rope_problem(self.rope)


def _rope_problem(rope: Mapping[str, Any]) -> str | None:
    """Return which rotary setting of a folder has another meaning in engines' latent attention, or None."""
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "yarn"):
        return f"rotary embedding type {kind!r}: expected default or yarn for latent attention"
    if kind == "yarn" and None in (rope.get("factor"), rope.get("original_max_position_embeddings")):
        return "yarn without factor and original_max_position_embeddings: latent attention needs both"
    if rope.get("mscale_all_dim") in (None, 0) and rope.get("mscale") not in (None, 1):
        return f"mscale={rope['mscale']} without mscale_all_dim: expected both or none"
    usual = {"attention_factor": None, "partial_rotary_factor": 1.0, "truncate": True}
    for key, value in usual.items():
        if rope.get(key) not in (None, value):
            return f"{key}={rope[key]} of rotary embeddings, which engines do not read for latent attention"
    return None
