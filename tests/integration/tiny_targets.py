"""Small random models of any causal type that transformers knows, whose weights and options show a mistake."""

import re
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LAYERS, HIDDEN, VOCABULARY = 4, 32, 61
EPSILON = 0.03  # about the variance of the states: another epsilon would show

_SIZES = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "num_experts_per_tok", "num_experts_per_token"), 2
    ),
    **dict.fromkeys(
        ("moe_topk", "moe_k", "linear_num_key_heads", "linear_num_value_heads", "index_n_heads"), 2
    ),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "index_topk"), 4
    ),
    **dict.fromkeys(
        ("n_group", "topk_group", "num_expert_group", "num_shared_experts", "n_shared_experts"), 1
    ),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_num_shared_experts", "n_groups"), 1),
    **dict.fromkeys(("mamba_n_groups",), 1),
    **dict.fromkeys(("head_dim", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "mamba_head_dim", "ssm_state_size", "index_head_dim", "state_size"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "qk_head_dim"), 16),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size", "mamba_d_head"), 16),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "chunk_size", "mamba_chunk_size"), 16),
    **dict.fromkeys(("intermediate_size", "dense_intermediate_size", "intermediate_size_mlp", "n_inner"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length"), 128),
    **dict.fromkeys(("image_token_id", "video_token_id", "boi_token_id", "eoi_token_id"), VOCABULARY - 1),
    **dict.fromkeys(("depth",), 2),
    "out_hidden_size": HIDDEN,
    "deepstack_visual_indexes": [0],
    "q_lora_rank": 12,
    "rotary_dim": 4,
    "mamba_expand": 2,
    "moe_latent_size": 16,
    "block_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_PER_LAYER = {"layer_types", "layers_block_type", "no_rope_layers", "mlp_layer_types"}
_LATENT_ATTENTION = "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa minicpm3 youtu"
_MIXED = ["linear_attention", "full_attention"] * 2
_SPECIAL: dict[str, dict[str, Any]] = {
    **{name: {"num_key_value_heads": 4} for name in _LATENT_ATTENTION.split()},
    "bailing_hybrid": {"layer_types": _MIXED, "num_key_value_heads": 4},
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "falcon_h1": {"mamba_d_ssm": 64},
    "youtu": {
        "num_key_value_heads": 4,
        "pad_token_id": None,
    },  # its code sets the padding's row to 0 in every load
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "qwen2_5_vl_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
    },
    **{
        name: {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [2, 1, 1]}}
        for name in ("qwen3_vl_text", "qwen3_vl_moe_text")
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
}
# Options that may change what stands before the first layer or behind the last.
_AT_THE_ENDS = re.compile(
    r"(logit|lm_head|emb|output)\w*(scal|mult|cap)|(scal|mult)\w*(logit|lm_head|emb|output)|mup|dim_model_base"
)
_INSIDE = re.compile(r"att(n|ention)|router|vision|image|audio|num_")


def small_config(model_type: str, **changed: object) -> Any:
    """A config of transformers; ``changed`` goes to its text model."""
    fields = CONFIG_MAPPING[model_type]().to_dict()
    text = fields.get("text_config")
    if not isinstance(text, dict):
        return CONFIG_MAPPING[model_type](**{**_small(fields), **changed})
    parts = {
        key: {"model_type": value["model_type"], **_small(value), **(changed if key == "text_config" else {})}
        for key, value in fields.items()
        if isinstance(value, dict) and "model_type" in value
    }
    return CONFIG_MAPPING[model_type](**{**_small(fields), **parts})


def telling_options(model_type: str) -> dict[str, object]:
    """Values other than the usual for every option that may change embedding or head, the tie included."""
    fields = CONFIG_MAPPING[model_type]().to_dict()
    found: dict[str, object] = {}
    for number, (key, value) in enumerate(sorted(fields.items())):
        if key == "tie_word_embeddings" or (_AT_THE_ENDS.search(key) and not _INSIDE.search(key)):
            if isinstance(value, bool):
                found[key] = not value
            elif isinstance(value, int) or key == "dim_model_base":
                found[key] = 20
            elif isinstance(value, float) or "cap" in key:
                found[key] = 1.3 + number / 64
    return found


def save_small_target(folder: Path, config: Any) -> None:
    """Random weights of every kind: a norm's 1 + w, a bias and an epsilon must not pass for nothing."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForImageTextToText
        model = kind.from_config(config)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.3 * noise if parameter.dim() < 2 else 0.15 * noise)
    model.save_pretrained(folder)


def _small(fields: dict[str, Any]) -> dict[str, Any]:
    sizes = {key: value for key, value in _SIZES.items() if key in fields}
    epsilons = {key: EPSILON for key in fields if key.endswith(("norm_eps", "norm_epsilon"))}
    per_layer = {key: None for key in _PER_LAYER if isinstance(fields.get(key), list)}
    return {**sizes, **epsilons, **per_layer, **_SPECIAL.get(fields.get("model_type", ""), {})}
