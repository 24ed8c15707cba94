"""The recipes of examples/, the config.json of their targets, and ``plan`` of a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from spec_trainer import cli

EXAMPLES = Path(__file__).parents[2] / "examples"

# As the models' own repositories have them, but for keys that say nothing of shapes (dropout, versions, …).
_QWEN3 = {
    "attention_bias": False, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 40960, "num_attention_heads": 32, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
CONFIGS = {
    "Qwen/Qwen3-8B": _QWEN3
    | {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288,
        "max_window_layers": 36, "model_type": "qwen3", "num_hidden_layers": 36, "num_key_value_heads": 8,
    },
    "Qwen/Qwen3-30B-A3B": _QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "hidden_size": 2048,
        "intermediate_size": 6144, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4,
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
RECIPES = [
    file for file in sorted(EXAMPLES.glob("*.yaml")) if yaml.safe_load(file.read_text())["target"] in CONFIGS
]


def write_tensors(folder: Path, config: dict[str, Any]) -> None:
    """Write the tensors that training reads of a target, in a file that is as long as they are and takes no room."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    header, position = {}, 0
    for name, shape in {
        "lm_head.weight": [vocab, hidden],
        "model.embed_tokens.weight": [vocab, hidden],
        "model.norm.weight": [hidden],
    }.items():
        end = position + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)


def plan(recipe: Path, target: Path, data: Path, capsys: Any) -> dict[str, Any]:
    """Return what ``plan`` prints of the recipe, with the target and the data here, for devices and engines here."""
    here = [f"target={target}", f"data.path={data}", "backend.name=cpu", "engine.name=hf"]
    code = cli.run(["plan", "--config", str(recipe), *here, "--json"])
    output = capsys.readouterr()
    assert code == 0, output.err
    return json.loads(output.out)
