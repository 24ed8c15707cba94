from __future__ import annotations

import pytest
import torch
import transformers

from spec_kit.targets import read_target, read_target_tensors

SIZES = {
    **dict.fromkeys(
        ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_local_experts"), 4
    ),
    **dict.fromkeys(("head_dim", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("num_experts_per_tok", "eos_token_id"), 2),
    **dict.fromkeys(("moe_intermediate_size", "max_position_embeddings"), 64),
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rms_norm_eps": 0.03,
    "pad_token_id": 0,
}
IDS = torch.arange(3, 20)


@pytest.fixture
def model(tmp_path):
    """A small random model, which is saved, too; no weight of its norm is 1."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("bailing_hybrid", **SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    torch.nn.init.normal_(model.model.norm.weight)
    model.save_pretrained(tmp_path)
    return model


@torch.no_grad()
def test_embedding_norm_and_head_are_read_as_the_model_code_computes_them(model, tmp_path):
    target = read_target(tmp_path)
    tensors = read_target_tensors(target)
    states = []
    model.model.norm.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0][0]))
    model.model.layers[0].register_forward_pre_hook(lambda module, inputs: states.append(inputs[0][0]))
    logits_TV = model(IDS[None], use_cache=False).logits[0]
    first_TH, last_TH = states
    torch.testing.assert_close(target.embedding_scale * tensors.embedding_VH[IDS], first_TH)
    normed_TH = torch.nn.functional.rms_norm(last_TH, (32,), tensors.norm_H, target.norm_eps)
    torch.testing.assert_close(target.logit_scale * normed_TH @ tensors.head_VH.T, logits_TV)


def test_rotary_frequencies_are_the_model_codes(model, tmp_path):
    theta = read_target(tmp_path).rope["rope_theta"]
    powers = torch.arange(0, 8, 2) / 8
    torch.testing.assert_close(1 / theta**powers, model.model.rotary_emb.inv_freq)
