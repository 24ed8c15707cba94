"""Tiny targets that ship with an MTP head with experts: their config.json, and a random head under their names."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from spec_core import TargetSpec

CONSTANT = "e_score_correction_bias"
"""How the names of the router's constants end, which are not trained."""
COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""How the names of a head's copies of the target's own weights end."""
_LATENT = {
    "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
}  # fmt: skip
_CORRECTED = {
    "moe_intermediate_size": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
}  # fmt: skip
KINDS: Mapping[str, dict[str, Any]] = {
    "qwen3_5_moe": {
        "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 12, "num_experts": 5, "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 10, "mtp_num_hidden_layers": 1, "attn_output_gate": True,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "n_group": 4,
        "topk_group": 2, **_CORRECTED, **_LATENT,
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "n_group": 1, "topk_group": 1,
        "attention_bias": True, "use_qk_norm": True, **_CORRECTED,
    },
    "glm4_moe_lite": {
        "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "n_group": 1,
        "topk_group": 1, **_CORRECTED, **_LATENT,
    },
}  # fmt: skip
"""Model type -> fields of config.json besides the target's own."""


def write_config(kind: str, target: TargetSpec, **changes: object) -> dict[str, Any]:
    """Write the target's config.json, and return its fields."""
    is_latent = "kv_lora_rank" in KINDS[kind]
    fields = {
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "vocab_size": target.vocab_size,
        "num_hidden_layers": target.num_layers,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_heads if is_latent else target.num_kv_heads,
        **({} if is_latent else {"head_dim": target.head_dim}),
        "rms_norm_eps": target.norm_eps,
        "rope_parameters": dict(target.rope),
        "max_position_embeddings": target.max_positions,
        **KINDS[kind],
        **changes,
    }
    target.folder.mkdir(exist_ok=True, parents=True)
    (target.folder / "config.json").write_text(json.dumps(fields))
    return fields


def shapes_of(fields: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The head's tensors, named as in published checkpoints, with a target's copies where it has some."""
    h, heads, d = fields["hidden_size"], fields["num_attention_heads"], fields.get("head_dim", 0)
    is_qwen = "num_experts" in fields
    layer = "mtp.layers.0." if is_qwen else f"model.layers.{fields['num_hidden_layers']}."
    joined = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    if not is_qwen:
        joined = tuple(layer + name for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm"))
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (h,) for name in joined[1:]}
    shapes[f"{joined[0]}.weight"] = (h, 2 * h)
    shapes |= {f"{layer}{name}.weight": (h,) for name in ("input_layernorm", "post_attention_layernorm")}
    if "kv_lora_rank" in fields:
        latent, rope, nope = fields["kv_lora_rank"], fields["qk_rope_head_dim"], fields["qk_nope_head_dim"]
        value, queries = fields["v_head_dim"], fields["q_lora_rank"]
        attention = {
            "q_a_proj.weight": (queries, h),
            "q_a_layernorm.weight": (queries,),
            "q_b_proj.weight": (heads * (nope + rope), queries),
            "kv_a_proj_with_mqa.weight": (latent + rope, h),
            "kv_a_layernorm.weight": (latent,),
            "kv_b_proj.weight": (heads * (nope + value), latent),
            "o_proj.weight": (h, heads * value),
        }
    else:
        kv = fields["num_key_value_heads"] * d
        attention = {
            "q_proj.weight": ((2 if is_qwen else 1) * heads * d, h),
            "k_proj.weight": (kv, h),
            "v_proj.weight": (kv, h),
            "o_proj.weight": (h, heads * d),
        }
        if not is_qwen and fields["attention_bias"]:
            attention |= {f"{name}_proj.bias": attention[f"{name}_proj.weight"][:1] for name in "qkv"}
        if is_qwen or fields["use_qk_norm"]:
            attention |= {f"{name}_norm.weight": (d,) for name in "qk"}
    shapes |= {f"{layer}self_attn.{name}": shape for name, shape in attention.items()}
    inner = fields["moe_intermediate_size"]
    if is_qwen:
        experts, shared, wide = (
            fields["num_experts"],
            "shared_expert",
            fields["shared_expert_intermediate_size"],
        )
        shapes[f"{layer}mlp.shared_expert_gate.weight"] = (1, h)
    else:
        experts, shared = fields["n_routed_experts"], "shared_experts"
        wide = fields["n_shared_experts"] * inner
        shapes[f"{layer}mlp.gate.{CONSTANT}"] = (experts,)
        shapes |= {layer + name: (fields["vocab_size"], h) for name in COPIES}
    shapes[f"{layer}mlp.gate.weight"] = (experts, h)
    widths = {f"experts.{expert}": inner for expert in range(experts)} | {shared: wide}
    for name, width in widths.items():
        shapes |= {f"{layer}mlp.{name}.{part}_proj.weight": (width, h) for part in ("gate", "up")}
        shapes[f"{layer}mlp.{name}.down_proj.weight"] = (h, width)
    return shapes


def random_head(fields: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A head whose weights are large enough that every part of it matters; the constants stay float32."""
    generator, head = torch.Generator().manual_seed(7), dict[str, "Tensor"]()
    for name, shape in sorted(shapes_of(fields).items()):
        drawn = torch.randn(shape, generator=generator)
        if name.endswith(CONSTANT):
            head[name] = 10 + 0.1 * drawn
        elif len(shape) == 2:
            head[name] = (drawn * 0.6 / shape[1] ** 0.5).to(dtype)
        else:
            plain = "norm" in name and "num_experts" not in fields
            head[name] = (float(plain) + 0.2 * drawn).to(dtype)
    return head


def write_head(folder: Path, head: Mapping[str, Tensor]) -> None:
    """Write the head as the only tensors of the folder."""
    save_file({name: tensor.contiguous() for name, tensor in head.items()}, folder / "model.safetensors")
