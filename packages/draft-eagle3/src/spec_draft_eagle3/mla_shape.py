"""Define MlaShape: an Eagle3 draft with multi-head latent attention, as config.json describes it.

One class of each engine serves such a draft (vLLM ``deepseek_eagle3.py``, SGLang ``kimi_k25_eagle3.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from spec_core import TargetSpec
from spec_draft_eagle3.shape import Eagle3Shape
from spec_kit.drafting import DecoderConfig, Json, LatentShape

MLA_ARCHITECTURE = "Eagle3DeepseekV2ForCausalLM"
LATENT_SIZES: Mapping[str, int] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""Sizes of DeepSeek V3 and Kimi K2, used for targets without latent attention. Engines' kernels are written
for these sizes."""


class MlaShape(LatentShape, Eagle3Shape):
    """The sizes of one Eagle3 draft with multi-head latent attention."""

    architecture: ClassVar[str] = MLA_ARCHITECTURE
    model_type: ClassVar[str] = "deepseek_v2"
    """Model type that is written to config.json. vLLM would mistake a folder of type ``deepseek_v3`` for a target's
    MTP head (``config/speculative.py``)."""
    attention: ClassVar[str] = "mla"

    def fixed_fields(self) -> Json:
        """Return fields of config.json for which only the given value is supported. vLLM knows no joint norm here."""
        return super().fixed_fields() | {"norm_before_fc": False}

    @classmethod
    def for_target(cls, config: DecoderConfig, target: TargetSpec, **own: object) -> Self:
        """Return the shape of a new draft.

        Each size is taken from the options, else from the target's latent attention, else from
        ``LATENT_SIZES``.
        """
        latent = {
            key: getattr(config, key) or getattr(target.latent, key, None) or default
            for key, default in LATENT_SIZES.items()
        }
        sizes = {
            "head_dim": latent["qk_rope_head_dim"],
            "num_kv_heads": config.num_heads or target.num_heads,
            "rope": _as_yarn(target.rope, target.max_positions),
        }
        return super().for_target(config, target, **latent, **sizes, **own)

    def problem(self) -> str | None:
        """Return why no engine can serve a draft of this shape, or None."""
        if self.sliding_window is not None:
            return f"sliding_window={self.sliding_window}: engines have no window for latent attention"
        return super().problem()

    def to_json(self, target: TargetSpec) -> Json:
        """Return the config.json fields that both engines read.

        Unscaled rotary embeddings are written as YaRN.
        """
        yarn = self.model_copy(update={"rope": _as_yarn(self.rope, self.max_positions)})
        served = self if self.rope.get("rope_type") == "yarn" else yarn
        fields = super(MlaShape, served).to_json(target) | {key: getattr(self, key) for key in LATENT_SIZES}
        del fields["head_dim"]
        return fields


def _as_yarn(rope: Mapping[str, Any], max_positions: int) -> Json:
    """Return the target's YaRN parameters, or YaRN of factor 1 for unscaled rotary embeddings.

    YaRN of factor 1 rotates as unscaled rotary embeddings do.

    Engines support latent attention with unscaled rotary embeddings or with YaRN. vLLM 0.26 and 0.27 mistake
    unscaled embeddings for YaRN without a factor, and fail (vllm-project/vllm pull request 51092).
    """
    scaled = rope if rope.get("rope_type") == "yarn" else {}
    original = scaled.get("original_max_position_embeddings") or max_positions
    mscale = float(scaled.get("mscale_all_dim") or scaled.get("mscale") or 1.0)
    return {
        "rope_type": "yarn",
        "rope_theta": rope.get("rope_theta", 10_000.0),
        "factor": float(scaled.get("factor") or max_positions / original),
        "original_max_position_embeddings": original,
        "beta_fast": scaled.get("beta_fast") or 32,
        "beta_slow": scaled.get("beta_slow") or 1,
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }
