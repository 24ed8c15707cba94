"""A random Llama in bfloat16 whose next token is far from uniform, and an Eagle3 draft that often guesses it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
import transformers
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path

MATCH = 0.25
"""Share of the previous token's embedding in a row of the head: about every second token follows it."""
SHARPNESS = 0.2


def write_models(output: Path, sizes, engine: str = "vllm") -> tuple[Path, Path]:
    """Write a target whose states depend on all tokens before, and a draft that knows which token often follows."""
    torch.manual_seed(3)
    width, heads = sizes["width"], sizes["width"] // sizes["head"]
    common = {
        "vocab_size": sizes["vocab"],
        "hidden_size": width,
        "intermediate_size": sizes["inner"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": sizes["head"],
        "max_position_embeddings": sizes["positions"],
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = transformers.LlamaConfig(num_hidden_layers=sizes["layers"], **common)
    model = transformers.LlamaForCausalLM(config)
    scales = {"q_proj": 1.5, "k_proj": 1.5, "v_proj": 1.0, "o_proj": 0.6, "gate_proj": 1.0, "up_proj": 1.0}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                scale = scales.get(name.split(".")[-2], 0.6)
                weight.normal_(0, scale / weight.shape[1] ** 0.5)
        embeddings = model.model.embed_tokens.weight
        embeddings.normal_(0, 1)
        before = torch.randperm(sizes["vocab"])
        head = model.lm_head.weight
        head.copy_(SHARPNESS * (MATCH * embeddings[before] + torch.randn_like(head)))
    model.to(torch.bfloat16).save_pretrained(output / "target")
    draft = output / "draft"
    draft.mkdir(exist_ok=True)
    fields = {
        **common,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "draft_vocab_size": sizes["vocab"],
        "eagle_aux_hidden_state_layer_ids": sizes["drafted"],
        "norm_before_residual": engine == "vllm",  # SGLang has no such draft, so it accepts fewer guesses
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in sizes["drafted"]],  # SGLang's numbers
            "use_aux_hidden_state": True,
        },
        "dtype": "bfloat16",
    }
    (draft / "config.json").write_text(json.dumps(fields, indent=1))
    save_file(
        {name: part.to(torch.bfloat16).contiguous() for name, part in draft_tensors(sizes, head).items()},
        draft / "model.safetensors",
    )
    return output / "target", draft


@torch.no_grad()
def draft_tensors(sizes, head: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of a draft whose attention copies the embedding of the token itself."""
    width = sizes["width"]
    copied = torch.cat([torch.eye(width), torch.zeros(width, width)], 1)  # of the embedding, not of the state
    layer = {
        "self_attn.q_proj": 1.5 * copied,
        "self_attn.k_proj": 1.5 * copied,
        "self_attn.v_proj": copied,
        "self_attn.o_proj": torch.eye(width),
        "mlp.gate_proj": 0.02 * torch.randn(sizes["inner"], width),
        "mlp.up_proj": 0.02 * torch.randn(sizes["inner"], width),
        "mlp.down_proj": 0.02 * torch.randn(width, sizes["inner"]),
        "input_layernorm": torch.ones(width),
        "hidden_norm": torch.full((width,), 0.3),
        "post_attention_layernorm": torch.ones(width),
    }
    states = len(sizes["drafted"]) * width
    return {
        "fc.weight": torch.randn(width, states) / states**0.5,
        "norm.weight": torch.ones(width),
        "lm_head.weight": head.detach().clone(),
        **{f"midlayer.{name}.weight": part for name, part in layer.items()},
    }
