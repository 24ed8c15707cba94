"""List the model types that can be targets, and how their code treats embedding, head and positions.

Every entry is compared with the model code: tests/integration/test_target_types.py builds each type as a small
random model and compares logits, embeddings, states and rotary frequencies. A type without an entry here or in a
plugin is refused, because its head could only be guessed. docs/targets.md shows this table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from spec_core import TargetType, TargetValues, plugins

Scale = Callable[[TargetValues], float]
Cap = Callable[[TargetValues], float | None]


def _root_of_hidden_size(values: TargetValues) -> float:
    return math.sqrt(values.integer("hidden_size"))


def _afmoe(values: TargetValues) -> float:
    return _root_of_hidden_size(values) if values.flag("mup_enabled") else 1.0


def _factor(key: str, default: float = 1.0) -> Scale:
    return lambda values: values.number(key, default=default)


def _divisor(key: str) -> Scale:
    return lambda values: 1.0 / values.positive(key, default=1.0)


def _minicpm(values: TargetValues) -> float:
    """Return the factor on the head's input: dim_model_base / hidden_size, or 1 if the former is null."""
    hidden_size = values.integer("hidden_size")
    null = values.is_null("dim_model_base")
    return (hidden_size if null else values.integer("dim_model_base", default=256)) / hidden_size


def _cap(default: float | None = None) -> Cap:
    """Return a function that reads ``final_logit_softcapping``.

    It returns None (no cap) if the value is null, and ``default`` if the key is absent.
    """
    key = "final_logit_softcapping"

    def cap(values: TargetValues) -> float | None:
        absent_or_null = default is None or values.is_null(key)
        return None if absent_or_null and values.get(key) is None else values.positive(key, default=default)

    return cap


def _all(names: str, **described: Any) -> dict[str, TargetType]:
    return dict.fromkeys(names.split(), TargetType(**described))


_GRANITE: dict[str, Scale] = {
    "embedding_scale": _factor("embedding_multiplier"),
    "logit_scale": _divisor("logits_scaling"),
}
_GEMMA: dict[str, Any] = {"norm": "rms_plus_one", "embedding_scale": _root_of_hidden_size}
_GEMMA_4: dict[str, Any] = {
    "embedding_scale": _root_of_hidden_size,
    "logit_softcap": _cap(),
    "needs_rope": True,
}
_LAYER: dict[str, Any] = {"norm": "layer", "theta": None}

TARGET_TYPES: Mapping[str, TargetType] = {
    **_all("llama qwen2 qwen2_moe qwen3 qwen3_moe mistral ministral olmo2 olmoe phi3 seed_oss"),
    **_all("deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2 glm4_moe_lite glm_moe_dsa exaone4 exaone_moe youtu"),
    **_all("hunyuan_v1_dense hunyuan_v1_moe arcee aria_text axk1 axk2 diffllama doge dots1"),
    **_all("internlm3 iquestcoder jetmoe kolibri1"),
    **_all("olmo_hybrid zamba2 flint"),
    **_all("glm glm4 glm4_moe bamba", partial=0.5),
    **_all("jamba", theta=None),
    **_all("helium", theta=100_000.0),
    **_all("gpt_oss apertus cwm laguna mellum ministral3", needs_rope=True),
    **_all("mimo_v2_flash", theta=5_000_000.0, partial=0.334),
    **_all("llama4_text ernie4_5 ernie4_5_moe flex_olmo olmo3 bitnet", theta=500_000.0),
    **_all("mixtral minimax solar_open", theta=1_000_000.0),
    **_all("smollm3", theta=2_000_000.0),
    **_all("minimax_m2", theta=5_000_000.0),
    **_all("hy_v3", theta=11_158_840.0),
    **_all("lfm2 lfm2_moe", eps="norm_eps", theta=1_000_000.0),
    **_all("lfm3", eps="norm_eps", needs_rope=True),
    **_all("minimax_m3_vl_text", norm="rms_plus_one", theta=5_000_000.0),
    **_all("qwen3_next", norm="rms_plus_one", partial=0.25),
    **_all(
        "qwen3_5_text qwen3_5_moe_text",
        norm="rms_plus_one",
        partial=0.25,
        image_token="image_token_id",
    ),
    **_all("gemma", **_GEMMA),
    **_all("gemma2 vaultgemma", **_GEMMA, logit_softcap=_cap(30.0)),
    **_all("gemma3_text", **_GEMMA, logit_softcap=_cap(), theta=1_000_000.0),
    **_all(
        "gemma4_text",
        **_GEMMA_4,
        image_token="image_token_id",
        image_ends=("boi_token_id", "eoi_token_id"),
    ),
    **_all("gemma4_unified_text", **_GEMMA_4),
    **_all("granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared", **_GRANITE),
    **_all(
        "hyperclovax",
        embedding_scale=_factor("embedding_multiplier"),
        logit_scale=_factor("logits_scaling"),
    ),
    **_all(
        "falcon_h1",
        embedding_scale=_factor("embedding_multiplier"),
        logit_scale=_factor("lm_head_multiplier"),
    ),
    **_all(
        "qwen2_5_vl_text",
        theta=1_000_000.0,
        image_token="image_token_id",
        may_be_flat=True,
    ),
    **_all("qwen3_vl_text qwen3_vl_moe_text", theta=500_000.0, image_token="image_token_id"),
    **_all("minicpm3", embedding_scale=_factor("scale_emb", 12.0), logit_scale=_minicpm),
    **_all("afmoe", embedding_scale=_afmoe),
    **_all("cohere2_moe", logit_scale=_factor("logit_scale", 0.0625)),
    # Types with layer norms: engines can run them, but no draft supports their head.
    **_all("gpt2 gpt_neox gptj opt phi falcon bloom mpt stablelm starcoder2 nemotron phimoe", **_LAYER),
    **_all("persimmon jais2 gpt_bigcode", **_LAYER),
    **_all("cohere cohere2", **_LAYER, logit_scale=_factor("logit_scale", 0.0625)),
}

WRAPPERS: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "got_ocr2": "qwen2",
    "llama4": "llama4_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""Model type with a text model under ``text_config`` -> the only supported type of that text model."""


def target_type(name: str) -> TargetType | str | None:
    """Return the description of a model type, or the name of its text model's type; None if unknown.

    Raise PluginError if the plugin that adds the type is broken.
    """
    return plugins.find_target_type(name, {**TARGET_TYPES, **WRAPPERS})
