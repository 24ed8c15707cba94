"""read_target and read_target_tensors on tiny targets that transformers itself has saved, and on damaged folders."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

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


@pytest.fixture
def resharded(make_target, tmp_path):
    return shutil.copytree(make_target("llama", shard_bytes=30_000), tmp_path / "sharded")


def set_config(folder, **values):
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


def rewrite_weights(folder, **changed):
    """Replaces tensors (dots as ``__``); None removes one."""
    weights = load_file(folder / "model.safetensors")
    for name, value in changed.items():
        weights[name.replace("__", ".")] = value
    save_file({k: v for k, v in weights.items() if v is not None}, folder / "model.safetensors")


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
        "head_dim": 4,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 8,
        "q_lora_rank": 12,
        **LATENT,
    }
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
            {
                "rope_theta": 1e6,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 256,
            },
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


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "novel"}, ["model_type='novel'", "docs/targets.md"]),
        (
            {"model_type": "step3p5"},
            ["model_type='step3p5'"],
        ),  # a norm of 1 + w, which nothing in its config says
        ({"model_type": "absent"}, ["model_type=None"]),
        ({"model_type": ["llama"]}, ["model_type=['llama']"]),
        ({"model_type": "novel", "text_config": {"model_type": "llama"}}, ["'novel'", "text_config"]),
        ({"model_type": "granite", "embedding_multiplier": True}, ["embedding_multiplier=True", "a number"]),
        ({"model_type": "granite", "logits_scaling": 0}, ["logits_scaling=0", "positive"]),
        ({"model_type": "afmoe", "mup_enabled": 1}, ["mup_enabled=1", "true or false"]),
        (
            {"model_type": "gpt_oss", "rope_parameters": "absent"},
            ["rope_parameters=None", "gpt_oss", '"rope_theta"'],
        ),
        ({"rms_norm_eps": 0}, ["rms_norm_eps=0", "a positive number"]),
        ({"rms_norm_eps": 10**400}, ["rms_norm_eps=1000", "a number"]),
        ({"rms_norm_eps": True}, ["rms_norm_eps=True"]),
        ({"tie_word_embeddings": None}, ["tie_word_embeddings=None", "true or false"]),
        ({"attention_bias": "x"}, ["attention_bias='x'", "true or false"]),
        ({"pad_token_id": 97}, ["pad_token_id=97", "below vocab_size=97"]),
        ({"eos_token_id": [None]}, ["eos_token_id=[None]", "token ids"]),
        ({"eos_token_id": "2"}, ["eos_token_id='2'"]),
        ({"architectures": 5}, ["architectures=5", "a list of names"]),
        ({"architectures": {}, "rope_parameters": 5}, ["rope_parameters=5", "an object"]),
        ({"architectures": {"a": 1}}, ["architectures={'a': 1}"]),
        ({"rope_parameters": "x"}, ["rope_parameters='x'", "an object"]),
        ({"rope_parameters": {"rope_type": ["x"]}}, ["rope_type=['x']"]),
        ({"rope_parameters": {"local": {"rope_theta": 1.0}}}, ["rope_parameters=", "full_attention"]),
        ({"rope_parameters": "absent", "rope_theta": "x"}, ["rope_theta='x'", "a positive number"]),
        ({"rope_parameters": "absent", "rope_theta": [1]}, ["rope_theta=[1]"]),
        ({"rope_parameters": "absent", "rope_theta": 10**400}, ["rope_theta=1000"]),
        ({"partial_rotary_factor": "x"}, ["partial_rotary_factor='x'"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers=True"]),
        ({"hidden_size": 10**400}, ["hidden_size=1000"]),
        ({"hidden_size": 33}, ["model.embed_tokens.weight", "[97, 32]", "[97, 33]"]),
        ({"vocab_size": 98}, ["[97, 32]", "vocab_size 98"]),
        ({"num_hidden_layers": "absent", "rope_parameters": 5}, ["num_hidden_layers=None"]),
        ({"vocab_size": "absent"}, ["[97, 32]", "vocab_size 32000"]),
        ({"num_hidden_layers": "eight"}, ["num_hidden_layers='eight'"]),
        ({"hidden_act": 5}, ["hidden_activation=5", "a name"]),
    ],
)
def test_config_that_cannot_be_trusted_is_refused_in_one_line(damaged, values, words):
    set_config(damaged, **values)
    assert_refused(damaged, *words)


DEEP = '{"a":' * 100_000


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "text", [DEEP, "[]", "\xff", '{"a": ' + "9" * 5000 + "}"], ids=["deep", "list", "bytes", "digits"]
)
def test_json_that_is_no_object_is_refused_in_one_line(damaged, name, text):
    (damaged / name).write_bytes(text.encode("latin-1"))
    assert_refused(damaged, name)


@pytest.mark.parametrize("weight_map", [5, None, [], {}, {"a": 5}, {"a": None}, {"a": ["b"]}, {"a": "../b"}])
def test_weight_map_of_another_kind_is_refused(resharded, weight_map):
    (resharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_refused(resharded, "model.safetensors.index.json", "weight_map")


def test_deep_index_is_refused(resharded):
    (resharded / "model.safetensors.index.json").write_text(DEEP)
    assert_refused(resharded, "nested too deeply")


@pytest.mark.parametrize(
    "lie",
    [
        lambda one, other: one.update(data_offsets=other["data_offsets"]),
        lambda one, other: one.update(data_offsets=one["data_offsets"][::-1]),
        lambda one, other: one["data_offsets"].append(9),
        lambda one, other: one.update(dtype="Q7"),
        lambda one, other: one.update(dtype=["F32"]),
        lambda one, other: one.update(dtype={}),
        lambda one, other: one.update(dtype="F16"),
        lambda one, other: one.update(shape=-1),
        lambda one, other: one.pop("shape"),
    ],
    ids=[
        "same place",
        "reversed",
        "three offsets",
        "unknown",
        "list",
        "object",
        "F16 for F32",
        "shape",
        "no shape",
    ],
)
def test_header_that_lies_is_refused_before_anything_starts(damaged, lie):
    def change(header):
        lie(header["model.layers.0.mlp.up_proj.weight"], header["model.layers.1.mlp.up_proj.weight"])

    rewrite_header(damaged / "model.safetensors", change)
    assert_refused(damaged, "model.safetensors", "not a safetensors file")


def rewrite_header(file, change):
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    change(header)
    written = json.dumps(header).encode()
    file.write_bytes(len(written).to_bytes(8, "little") + written + content[8 + size :])


def test_header_nested_deeply_is_refused(damaged):
    text = DEEP.encode()
    (damaged / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    assert_refused(damaged, "not a safetensors file")


def test_missing_folder_and_config_are_named(tmp_path):
    assert_refused(tmp_path / "nowhere", "nowhere", "not a folder")
    assert_refused(tmp_path, "no config.json")


def test_folder_of_an_adapter_alone_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    assert_refused(tmp_path, "only an adapter", "merge the adapter into its base model")


def test_config_that_is_not_json(damaged):
    (damaged / "config.json").write_text("{")
    assert_refused(damaged, "config.json", "not JSON")


def test_pickled_weights_are_named(damaged):
    (damaged / "model.safetensors").rename(damaged / "pytorch_model.bin")
    assert_refused(damaged, "pytorch_model.bin", "safetensors")


def test_file_cut_short(damaged):
    content = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(content[:-10])
    assert_refused(damaged, "cut short")
    (damaged / "model.safetensors").write_bytes(b"1234")
    assert_refused(damaged, "cut short")


def test_missing_shard(resharded):
    gone = next(resharded.glob("model-00003-*"))
    gone.unlink()
    assert_refused(resharded, gone.name, "missing")


def test_shard_that_disappears_between_the_two_readings(resharded):
    target = read_target(resharded)
    next(resharded.glob("model-00001-*")).unlink()
    with pytest.raises(TargetError, match="missing"):
        read_target_tensors(target)


@pytest.mark.parametrize(
    ("name", "tried"),
    [
        ("model__embed_tokens__weight", "embed_tokens.weight"),
        ("model__norm__weight", "model.norm.weight"),
        ("lm_head__weight", "lm_head.weight"),
    ],
)
def test_missing_tensor_is_refused_with_the_names_tried(damaged, name, tried):
    rewrite_weights(damaged, **{name: None})
    assert_refused(damaged, "looked for", tried)


def test_quantised_head_is_not_taken_for_a_tied_one(damaged):
    set_config(damaged, tie_word_embeddings="absent")
    rewrite_weights(damaged, lm_head__weight=None, lm_head__qweight=torch.zeros(4, dtype=torch.int32))
    assert_refused(damaged, "lm_head.qweight", "use a target whose embedding and head are not quantised")


def test_quantised_embedding_is_refused(damaged):
    rewrite_weights(damaged, model__embed_tokens__weight=torch.zeros(97, 32, dtype=torch.int8))
    assert_refused(damaged, "I8", "quantised")


def assert_refused(folder, *words):
    with pytest.raises(TargetError) as caught:
        read_target(folder)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
