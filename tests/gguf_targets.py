"""Toy targets as GGUF files, written as llama.cpp's own converter writes Llama, Qwen3 and Qwen3.5."""

from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file

from spec_kit.targets import read_target

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
"""Rotary embeddings of Llama 3, for few positions."""
_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_QWEN35 = {
    "post_attention_layernorm": "post_attention_norm", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out", "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
}  # fmt: skip
"""Names of Qwen3.5 that Qwen3 lacks or has otherwise; keys and values have as many recurrent heads."""
_TOP = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


def write_target_gguf(folder: Path, output: Path) -> Path:
    """Write the target in ``folder`` in float32, with a token for each of its ids, and return ``output``."""
    target = read_target(folder)
    is_qwen35 = target.model_type == "qwen3_5_text"
    writer = gguf.GGUFWriter(output, "qwen35" if is_qwen35 else target.model_type)
    writer.add_block_count(target.num_layers)
    writer.add_context_length(target.max_positions)
    writer.add_embedding_length(target.hidden_size)
    writer.add_feed_forward_length(target.intermediate_size)
    writer.add_head_count(target.num_heads)
    writer.add_head_count_kv(target.num_kv_heads)
    writer.add_key_length(target.head_dim)
    writer.add_value_length(target.head_dim)
    writer.add_layer_norm_rms_eps(target.norm_eps)
    writer.add_rope_dimension_count(int(target.head_dim * target.rope.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(target.rope["rope_theta"])
    writer.add_vocab_size(target.vocab_size)
    _write_tokens(writer, target)
    if target.rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(target.rope["factor"])
    elif target.rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _divisors(folder, target))
    if is_qwen35:
        _write_recurrence(writer, transformers.AutoConfig.from_pretrained(folder))
    for stored, tensor in load_file(folder / "model.safetensors").items():
        array = (_of_qwen35(stored, tensor) if is_qwen35 else tensor).float().numpy()
        if target.model_type == "llama" and ("q_proj" in stored or "k_proj" in stored):
            array = _neighbouring(array, target.head_dim)
        names = {**_NAMES, **(_QWEN35 if is_qwen35 else {})}
        writer.add_tensor(_name(stored, names), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return output


def _write_tokens(writer: gguf.GGUFWriter, target) -> None:
    special = ["<unk>", "<s>", "</s>"]
    tokens = [*special, *(chr(32 + place) for place in range(target.vocab_size - 3))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(target.eos_token_ids[0])
    writer.add_add_bos_token(False)


def _divisors(folder: Path, target) -> np.ndarray:
    """Return by how much Transformers divides each frequency."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    plain = target.rope["rope_theta"] ** (-np.arange(0, target.head_dim, 2) / target.head_dim)
    return (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)


def _write_recurrence(writer: gguf.GGUFWriter, config) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    recurrent = [kind == "linear_attention" for kind in config.layer_types]
    writer.add_array("qwen35.attention.recurrent_layers", recurrent)
    pairs = int(config.head_dim * config.rope_parameters["partial_rotary_factor"]) // 2
    writer.add_rope_dimension_sections([(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0])


def _of_qwen35(stored: str, tensor: torch.Tensor) -> torch.Tensor:
    if stored.endswith("norm.weight") and "linear_attn" not in stored:
        return tensor + 1
    return -tensor.exp() if stored.endswith("A_log") else tensor.squeeze()


def _name(stored: str, names: dict[str, str]) -> str:
    inner = stored.removeprefix("model.").removesuffix(".weight")
    if inner in _TOP:
        return f"{_TOP[inner]}.weight"
    _, layer, module = inner.split(".", 2)
    name = f"blk.{layer}.{names[module]}"
    return f"{name}.weight" if stored.endswith(".weight") else name


def _neighbouring(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """The rows of each head so that channel i and channel i + D/2 stand side by side."""
    heads = weight.reshape(-1, head_dim, weight.shape[1])
    half = head_dim // 2
    order = [place for pair in zip(range(half), range(half, head_dim), strict=True) for place in pair]
    return heads[:, order].reshape(weight.shape)
