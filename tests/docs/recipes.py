"""The recipes of examples/, the config.json of their targets, and ``plan`` of a recipe."""

import json
from pathlib import Path
from typing import Any

import yaml

from spec_trainer.cli import app as cli

EXAMPLES = Path(__file__).parents[2] / "examples"

# As the models' own repositories have them, but for keys that say nothing of shapes (dropout, versions, …).
_QWEN3 = {
    "attention_bias": False, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 40960, "num_attention_heads": 32, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
_DEEPSEEK_V3 = {
    "attention_bias": False, "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432,
    "kv_lora_rank": 512, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_experts_per_tok": 8, "num_hidden_layers": 61, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "quantization_config": {"quant_method": "fp8"},
    "rms_norm_eps": 1e-06, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16", "v_head_dim": 128,
}  # fmt: skip
CONFIGS = {
    "Qwen/Qwen3-0.6B": _QWEN3
    | {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072,
        "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-8B": _QWEN3
    | {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288,
        "max_window_layers": 36, "model_type": "qwen3", "num_hidden_layers": 36, "num_key_value_heads": 8,
    },
    "Qwen/Qwen3-8B-FP8": _QWEN3
    | {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288,
        "max_window_layers": 36, "model_type": "qwen3", "num_hidden_layers": 36, "num_key_value_heads": 8,
        "quantization_config": {"quant_method": "fp8"},
    },
    "Qwen/Qwen3-30B-A3B": _QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "hidden_size": 2048,
        "intermediate_size": 6144, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4,
    },
    "Qwen/Qwen3-235B-A22B": _QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "hidden_size": 4096,
        "intermediate_size": 12288, "max_window_layers": 94, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 1536, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 94, "num_key_value_heads": 4,
    },
    "Qwen/Qwen3.5-27B": {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
        "tie_word_embeddings": False,
        "text_config": {
            "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
            "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
            "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 17408,
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * 16, "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
            "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
            "mlp_only_layers": [], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False, "num_attention_heads": 24, "num_hidden_layers": 64,
            "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
            "rope_parameters": {
                "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                "rope_theta": 10000000, "rope_type": "default",
            },
            "use_cache": True, "vocab_size": 248320,
        },
    },
    "Qwen/Qwen3-VL-8B-Instruct": {
        "architectures": ["Qwen3VLForConditionalGeneration"], "image_token_id": 151655, "model_type": "qwen3_vl",
        "text_config": {
            "attention_bias": False, "dtype": "bfloat16", "eos_token_id": 151645, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288,
            "max_position_embeddings": 262144, "model_type": "qwen3_vl_text", "num_attention_heads": 32,
            "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default",
            },
            "rope_theta": 5000000, "vocab_size": 151936,
        },
        "tie_word_embeddings": False, "video_token_id": 151656,
        "vision_config": {
            "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1152, "in_channels": 3, "intermediate_size": 4304, "model_type": "qwen3_vl",
            "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 4096, "patch_size": 16,
            "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
        "vision_end_token_id": 151653, "vision_start_token_id": 151652,
    },
    "deepseek-ai/DeepSeek-V3": _DEEPSEEK_V3
    | {
        "architectures": ["DeepseekV3ForCausalLM"], "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3,
        "max_position_embeddings": 163840, "model_type": "deepseek_v3", "n_group": 8, "n_routed_experts": 256,
        "num_attention_heads": 128, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "topk_group": 4, "vocab_size": 129280,
    },
    "moonshotai/Kimi-K2-Instruct": _DEEPSEEK_V3
    | {
        "architectures": ["DeepseekV3ForCausalLM"], "eos_token_id": 163585, "first_k_dense_replace": 1,
        "max_position_embeddings": 131072, "model_type": "kimi_k2", "n_group": 1, "n_routed_experts": 384,
        "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
        "rope_scaling": {
            "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "seq_aux": True, "topk_group": 1,
        "vocab_size": 163840,
    },
    "zai-org/GLM-4.7-Flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False,
        "eos_token_id": [154820, 154827, 154829], "first_k_dense_replace": 1, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 10240, "kv_lora_rank": 512, "max_position_embeddings": 202752,
        "model_type": "glm4_moe_lite", "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 20, "num_experts_per_tok": 4,
        "num_hidden_layers": 47, "num_key_value_heads": 20, "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.8,
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 256,
        "vocab_size": 154880,
    },
    "google/gemma-3-12b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "model_type": "gemma3",
        "text_config": {
            "hidden_size": 3840, "intermediate_size": 15360, "model_type": "gemma3_text",
            "num_attention_heads": 16, "num_hidden_layers": 48, "num_key_value_heads": 8,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
    },
    "meta-llama/Llama-3.1-8B-Instruct": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "eos_token_id": [128001, 128008, 128009],
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072,
        "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 128256,
    },
    "openai/gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "eos_token_id": 200002,
        "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
        "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "num_key_value_heads": 8, "num_local_experts": 32, "pad_token_id": 199999,
        "quantization_config": {"quant_method": "mxfp4"}, "rms_norm_eps": 1e-05, "rope_theta": 150000,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088,
    },
}  # fmt: skip
_GEMMA_3_VOCABULARY = 262208
"""Gemma 3's own files leave it out."""
RECIPES = [
    file for file in sorted(EXAMPLES.glob("*.yaml")) if yaml.safe_load(file.read_text())["target"] in CONFIGS
]


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the text model."""
    return {"vocab_size": _GEMMA_3_VOCABULARY} | config.get("text_config", config)


def write_tensors(folder: Path, config: dict[str, Any]) -> None:
    """Write the tensors that training reads of a target, in a file that is as long as they are and takes no room."""
    text = text_config(config)
    vocab, hidden = text["vocab_size"], text["hidden_size"]
    shapes = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden]}
    if not config.get("tie_word_embeddings", "gemma" in config["model_type"]):
        shapes["lm_head.weight"] = [vocab, hidden]
    write_shapes(folder / "model.safetensors", shapes)


def write_shapes(file: Path, shapes: dict[str, list[int]]) -> None:
    """Write a safetensors file of bfloat16 tensors with these names and shapes, which holds no data."""
    header, position = {}, 0
    for name, shape in shapes.items():
        end = position + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, end]}
        position = end
    encoded = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        stream.truncate(8 + len(encoded) + position)


def plan(recipe: Path, target: Path, data: Path, capsys: Any) -> dict[str, Any]:
    """Return what ``plan`` prints of the recipe, with the target and the data here, for a CPU and the engine hf.

    The target counts as not quantised: the recipe's own engine reads such weights, and hf would ask for a library.
    """
    config = json.loads((target / "config.json").read_text())
    if config.pop("quantization_config", None):
        (target / "config.json").unlink()  # it may be a link to the genuine file
        (target / "config.json").write_text(json.dumps(config))
    here = [f"target={target}", f"data.path={data}", "backend.name=cpu", "engine.name=hf"]
    here += ["engine.tensor_parallel=1", "train.ranks=1"]
    code = cli.run(["plan", "--config", str(recipe), *here, "--json"])
    output = capsys.readouterr()
    assert code == 0, output.err
    return json.loads(output.out)
