"""read_target and read_target_tensors on tiny targets that transformers itself has saved, and on damaged folders."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.kit.targets.target_changes import assert_refused, rewrite_weights, set_config

from spec_core.errors import TargetError
from spec_core.target import LatentSizes
from spec_kit.targets.target_reader import read_target, read_target_tensors

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def damaged(tiny_llama, tmp_path):
    """A copy of the tiny Llama that a test may break."""
    return shutil.copytree(tiny_llama, tmp_path / "target")


def test_llama_spec_holds_shapes_names_and_numbers(tiny_llama):
    target = read_target(tiny_llama)
    assert (target.num_layers, target.hidden_size, target.intermediate_size) == (8, 32, 48)
    assert (target.num_heads, target.num_kv_heads, target.head_dim) == (4, 2, 8)
    assert (target.vocab_size, target.max_positions, target.dtype) == (97, 256, "float32")
    assert (target.architecture, target.model_type) == ("LlamaForCausalLM", "llama")
    assert (target.embedding_name, target.norm_name) == ("model.embed_tokens.weight", "model.norm.weight")
    assert target.head_name == "lm_head.weight"
    assert not target.tied
    assert (target.norm, target.norm_eps, target.hidden_act) == ("rms", 1e-6, "silu")
    assert (target.embedding_scale, target.logit_scale, target.logit_softcap) == (1.0, 1.0, None)
    assert target.rope == {"rope_theta": 10000.0, "rope_type": "default"}
    assert target.eos_token_ids == (2,)


def test_published_form_of_mimo_v2_flash_is_read(damaged):
    """Its rotary values are flat; ``swa_rope_theta`` is that of the layers with a sliding window."""
    published = {"rope_theta": 5000000, "swa_rope_theta": 10000, "partial_rotary_factor": 0.334}
    unnamed = dict.fromkeys(("rope_parameters", "rope_scaling", "rms_norm_eps"), "absent")
    set_config(damaged, model_type="mimo_v2_flash", layernorm_epsilon=1e-05, **published, **unnamed)
    target = read_target(damaged)
    assert target.rope == {"rope_type": "default", "rope_theta": 5000000, "partial_rotary_factor": 0.334}
    assert target.norm_eps == 1e-05


LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}


@pytest.mark.parametrize("q_lora_rank", [12, None])
def test_sizes_of_latent_attention_are_those_of_its_keys(make_target, q_lora_rank):
    sizes = {**LATENT, "q_lora_rank": q_lora_rank}
    target = read_target(
        make_target("deepseek_v3", head_dim=4, num_key_value_heads=4, first_k_dense_replace=8, **sizes)
    )
    assert target.latent == LatentSizes(**sizes)


@pytest.mark.parametrize("value", [None, 0, "absent"])
def test_a_target_with_a_part_of_these_keys_has_another_attention(damaged, value):
    set_config(damaged, **{**LATENT, "v_head_dim": value})
    assert read_target(damaged).latent is None


def test_a_size_that_is_no_number_is_refused(damaged):
    set_config(damaged, **{**LATENT, "v_head_dim": "wide"})
    with pytest.raises(TargetError, match="v_head_dim='wide', expected a positive integer"):
        read_target(damaged)


def test_kimi_k2_is_read_as_deepseek_v3(make_target, tmp_path):
    """Transformers reads its folders by code inside them alone; both engines take them for a DeepSeek V3."""
    options = {
        "head_dim": 4, "num_key_value_heads": 4, "first_k_dense_replace": 8, "q_lora_rank": 12, **LATENT,
    }  # fmt: skip
    folder = shutil.copytree(make_target("deepseek_v3", **options), tmp_path / "kimi")
    expected = read_target(folder)
    set_config(folder, model_type="kimi_k2")
    found = read_target(folder)
    assert found.model_type == "kimi_k2"
    assert replace(found, model_type=expected.model_type, digest=expected.digest) == expected


def test_reading_a_target_imports_neither_torch_nor_transformers(tiny_llama):
    code = (
        "import sys, pathlib; from spec_kit.targets.target_reader import read_target; "
        f"read_target(pathlib.Path({str(tiny_llama)!r})); "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_tied_head_is_the_embedding_itself(tiny_qwen3):
    target = read_target(tiny_qwen3)
    tensors = read_target_tensors(target)
    assert target.tied
    assert tensors.head_VH is tensors.embedding_VH


def test_head_is_tied_where_neither_the_config_nor_the_weights_name_one(damaged):
    set_config(damaged, tie_word_embeddings="absent")
    rewrite_weights(damaged, lm_head__weight=None)
    assert read_target(damaged).tied


def test_sharded_tensors_equal_those_of_a_single_file(make_target, tiny_llama):
    sharded_folder = make_target("llama", shard_bytes=30_000)
    assert not (sharded_folder / "model.safetensors").exists()
    single = read_target_tensors(read_target(tiny_llama))
    sharded = read_target_tensors(read_target(sharded_folder))
    for name in ("embedding_VH", "head_VH", "norm_H"):
        assert torch.equal(getattr(sharded, name), getattr(single, name))


def test_scaled_rope_is_read_in_the_new_spelling(make_target):
    assert read_target(make_target("llama", rope_parameters=LLAMA3_ROPE)).rope == LLAMA3_ROPE


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope_theta": 1e6, "rope_type": "linear", "factor": 4.0},
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
        ),
        (
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
            {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5},
        ),
        ({}, {"rope_theta": 1e4, "rope_type": "default"}),
    ],
)
def test_older_rope_spellings_give_the_same_mapping(damaged, values, expected):
    set_config(damaged, rope_parameters="absent", **values)
    assert read_target(damaged).rope == expected


def test_rope_that_differs_by_layer_is_that_of_full_attention(damaged):
    nested = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    set_config(damaged, rope_parameters=nested)
    assert read_target(damaged).rope == {"rope_theta": 1e6, "rope_type": "default"}


def test_scaling_without_theta_is_read(damaged):
    set_config(
        damaged, model_type="qwen2", rope_parameters="absent", rope_scaling={"type": "linear", "factor": 4.0}
    )
    assert read_target(damaged).rope == {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0}


def test_gpt2_is_read_with_its_layer_norm(make_target):
    target = read_target(make_target("gpt2"))
    assert target.norm == "layer"
    assert target.tied
    assert (target.num_layers, target.hidden_size, target.intermediate_size) == (8, 32, 128)
    assert (target.embedding_name, target.norm_name) == ("transformer.wte.weight", "transformer.ln_f.weight")
    assert target.rope == {}


def test_scales_of_granite_and_cohere_are_read(damaged):
    set_config(damaged, model_type="granite", logits_scaling=8.0, embedding_multiplier=12.0)
    granite = read_target(damaged)
    assert (granite.logit_scale, granite.embedding_scale) == (0.125, 12.0)
    set_config(damaged, model_type="cohere", logit_scale=0.0625)
    cohere = read_target(damaged)
    assert (cohere.logit_scale, cohere.norm) == (0.0625, "layer")


def test_head_bias_is_named(damaged):
    rewrite_weights(damaged, lm_head__bias=torch.zeros(97))
    assert read_target(damaged).head_bias_name == "lm_head.bias"


def test_attention_bias_shows_in_the_weights_alone(make_target, tmp_path):
    assert read_target(make_target("qwen3", attention_bias=True)).attention_bias
    folder = shutil.copytree(make_target("llama", attention_bias=True), tmp_path / "biased")
    set_config(folder, model_type="qwen2", attention_bias="absent")
    assert read_target(folder).attention_bias


def test_nested_text_config_lies_over_the_top_level(damaged):
    flat = json.loads((damaged / "config.json").read_text())
    text = {key: flat.pop(key) for key in list(flat) if key not in ("architectures", "tie_word_embeddings")}
    outer = {**flat, "model_type": "llama4", "hidden_size": 7}
    text |= {"model_type": "llama4_text"}
    (damaged / "config.json").write_text(json.dumps({**outer, "text_config": text}))
    target = read_target(damaged)
    assert (target.model_type, target.hidden_size) == ("llama4_text", 32)
    (damaged / "config.json").write_text(
        json.dumps({**outer, "text_config": {**text, "model_type": "llama"}})
    )
    assert_refused(damaged, "text_config.model_type='llama'", "'llama4_text'")


def test_multimodal_names_are_found(damaged):
    weights = load_file(damaged / "model.safetensors")
    moved = {name.replace("model.", "model.language_model."): value for name, value in weights.items()}
    moved["model.visual.norm.weight"] = torch.ones(5)
    save_file(moved, damaged / "model.safetensors")
    target = read_target(damaged)
    assert target.embedding_name == "model.language_model.embed_tokens.weight"
    assert target.norm_name == "model.language_model.norm.weight"


def test_generation_config_decides_where_generation_stops(damaged):
    (damaged / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert read_target(damaged).eos_token_ids == (2, 5)


def test_digest_tells_targets_apart_and_is_stable(damaged, tiny_llama):
    before = read_target(tiny_llama).digest
    assert read_target(damaged).digest == before
    rewrite_weights(damaged, model__norm__weight=torch.full((32,), 2.0))
    assert read_target(damaged).digest != before
