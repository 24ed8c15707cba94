"""Folders that read_target refuses, each in one line."""

import json
import shutil

import pytest
import torch
from tests.unit.kit.targets.target_changes import assert_refused, rewrite_weights, set_config

from spec_core.errors import TargetError
from spec_kit.targets.target_reader import read_target, read_target_tensors


@pytest.fixture
def damaged(tiny_llama, tmp_path):
    """A copy of the tiny Llama that a test may break."""
    return shutil.copytree(tiny_llama, tmp_path / "target")


@pytest.fixture
def resharded(make_target, tmp_path):
    return shutil.copytree(make_target("llama", shard_bytes=30_000), tmp_path / "sharded")


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
