"""The exported folder: fields and names of the serving format, the way back, and damaged or foreign folders."""

from functools import partial
from hashlib import sha256
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from spec_core.errors import ArtifactError
from spec_draft_dflash.config import DFlashConfig
from spec_draft_dflash.draft import DFlashDraft
from spec_kit.drafting import write_draft
from spec_kit.targets import read_target, read_target_tensors

from .. import draft_folders
from ..draft_batches import LLAMA3
from ..draft_folders import (
    DraftFolderSuite,
    assert_damaged,
    edit_tensors,
    merge_fields,
    read_fields,
    write_ramps,
)
from ..draft_parts import make_target
from . import cases

LAYER = [
    "input_layernorm",
    "post_attention_layernorm",
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
]


FULL, SLIDING = "full_attention", "sliding_attention"


SMALL = {"num_layers": 2, "block_size": 4}


MIXED = {"layer_types": (SLIDING, FULL), "sliding_window": 9, "block_size": 8}


EVERY_OPTION = {
    **MIXED, "layers": (1, 3, 6), "head_dim": 6, "num_heads": 2, "intermediate_size": 20, "mask_token_id": 5,
}  # fmt: skip


export = partial(draft_folders.export, cases)


class TestDFlashFolder(DraftFolderSuite):
    cases = cases
    plain_options = SMALL
    exports = (SMALL, MIXED, EVERY_OPTION)
    contradictions = (
        ("block_size", 8),
        ("num_layers", 3),
        ("mask_token_id", 1),
        ("layers", (1, 2)),
        ("num_features", 4),
        ("sliding_window", 9),
        ("layer_types", (FULL,)),
        ("num_heads", 2),
    )
    agreements: ClassVar = {"block_size": 4, "num_layers": 2, "layers": (2, 3, 4, 5, 6), "loss": "dpace"}
    other_targets = (
        ({"hidden_size": 32}, "it was made for hidden size 16, this target has 32"),
        ({"vocab_size": 31}, "made for vocabulary size 29, this target has 31"),
        ({"num_layers": 9}, "made for number of layers 8, this target has 9"),
    )
    foreign = tuple(
        {"architectures": names} for names in (["LlamaForCausalLMEagle3"], ["Qwen3ForCausalLM"], None)
    )
    damaged = (
        ({"hidden_size": None}, "hidden_size=None"),
        ({"hidden_size": "wide"}, "hidden_size='wide'"),
        ({"hidden_size": 32}, "config.json says"),
        ({"num_hidden_layers": 3}, "num_hidden_layers=3"),
        ({"dflash_config": {"target_layer_ids": [1, 2, 3, 4, 5]}}, "mask_token_id=None"),
        ({"dflash_config": {"mask_token_id": 29}}, "not below the vocabulary's 29"),
        ({"dflash_config": {"mask_token_id": 2, "target_layer_ids": [1, 2]}}, "do not name the same layers"),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 3, 4, 6, 5], "dflash_config": {"mask_token_id": 2}},
            "ascending",
        ),
        ({"eagle_aux_hidden_state_layer_ids": "2"}, "expected a valid array"),
        ({"block_size": 1, "dflash_config": {"mask_token_id": 2}}, "block_size=1 leaves no slot"),
        ({"dflash_config": {"mask_token_id": 2, "block_size": 0}}, "block_size=0"),
        ({"is_causal": "no"}, "causal='no', expected a valid boolean"),
        ({"dflash_config": {"mask_token_id": 2, "causal": True}}, "causal=True: expected False"),
        ({"layer_types": [SLIDING, FULL]}, "sliding_window=None"),
        ({"layer_types": [SLIDING] * 2, "sliding_window": 3, "is_causal": True}, "at least a block, 4"),
        ({"layer_types": ["chunked", FULL]}, "'chunked'"),
        ({"layer_types": 5}, "layer_types=5"),
        ({"dflash_config": 5}, "dflash_config=5"),
        ({"draft_vocab_size": 7}, "lacks d2t"),
        ({"draft_vocab_size": 30}, "a draft vocabulary of 30 exceeds the target's 29"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"dflash_config": {"mask_token_id": 2, "attention_sink_bias": True}}, "attention_sink_bias=True"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small'"),
    )


def test_folder_holds_exactly_the_serving_formats_files_and_tensors(tmp_path):
    export(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    tensors = load_file(tmp_path / "model.safetensors")
    layers = [f"layers.{index}.{name}.weight" for index in range(2) for name in LAYER]
    assert sorted(tensors) == sorted([*layers, "fc.weight", "hidden_norm.weight", "norm.weight"])
    assert tensors["fc.weight"].shape == (16, 5 * 16)
    assert tensors["layers.1.self_attn.q_proj.weight"].shape == (4 * 8, 16)
    assert tensors["layers.0.self_attn.k_norm.weight"].shape == (8,)


def test_an_exports_bytes_do_not_change(tmp_path):
    """The format is in use: a change here must be meant."""
    target = make_target(dtype="bfloat16", rope=LLAMA3)
    write_ramps(DFlashDraft(DFlashConfig(**EVERY_OPTION)), target, tmp_path)
    digests = {file.name: sha256(file.read_bytes()).hexdigest()[:16] for file in tmp_path.iterdir()}
    assert digests == {"config.json": "dac6a3d7f172a50c", "model.safetensors": "f37d9185da0e78a7"}


def test_config_fields_satisfy_both_engines(tmp_path):
    target = make_target(num_layers=36, head_name="model.embed_tokens.weight")
    export(tmp_path, target, num_layers=3, block_size=None)
    expected = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 3,
        "num_target_layers": 36,
        "vocab_size": 29,
        "hidden_size": 16,
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "eos_token_id": 3,
        "max_position_embeddings": 64,
        "rope_theta": 100.0,
        "rope_scaling": None,
        "block_size": 16,
        "layer_types": [FULL] * 3,
        "sliding_window": None,
        "use_sliding_window": False,
        "is_causal": False,
        # One list counts outputs of layers, as published drafts do, the other streams entering a layer.
        "dflash_config": {"block_size": 16, "mask_token_id": 28, "target_layer_ids": [1, 9, 17, 25, 33]},
        "eagle_aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
    }
    fields = read_fields(tmp_path)
    assert {key: fields[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("options", "causal", "types"),
    [
        ({"num_layers": 2}, False, [FULL, FULL]),
        ({"num_layers": 2, "sliding_window": 16}, True, [SLIDING, SLIDING]),
        ({**MIXED}, None, [SLIDING, FULL]),
    ],
    ids=["full", "sliding", "mixed"],
)
def test_causality_is_explicit_where_all_layers_agree(tmp_path, options, causal, types):
    export(tmp_path, **options)
    fields = read_fields(tmp_path)
    assert fields.get("is_causal") is causal
    assert ("is_causal" in fields) == (causal is not None)
    assert fields["layer_types"] == types
    # As the engines see it: transformers drops a window that is not declared as used.
    seen = AutoConfig.from_pretrained(tmp_path)
    assert seen.layer_types == types
    assert seen.sliding_window == options.get("sliding_window")
    assert seen.dflash_config == fields["dflash_config"]


@pytest.mark.parametrize(
    ("fields", "causal"),
    [
        ({"is_causal": True}, (True, True)),
        ({"is_causal": None, "dflash_config": {"causal": True}}, (True, True)),
        ({"is_causal": False, "layer_types": [SLIDING, FULL], "sliding_window": 9}, (False, False)),
        ({"is_causal": None, "layer_types": [SLIDING, FULL], "sliding_window": 9}, (True, False)),
    ],
)
def test_causality_of_published_drafts_is_kept(tmp_path, fields, causal):
    """Engines read it in either place; an export names it in both, where layer types do not say the same."""
    module = export(tmp_path)
    merge_fields(tmp_path, **fields)
    draft = DFlashDraft.from_folder(tmp_path)
    assert draft.shape(make_target()).causality == causal
    written = draft.exported_config(make_target())
    assert written.get("is_causal") is (causal[0] if len(set(causal)) == 1 else None)
    assert written["dflash_config"].get("causal") is draft.shape(make_target()).causal
    assert "llamacpp" not in draft.serving_methods
    write_draft(draft, module.state_dict(), make_target(), tmp_path)
    assert DFlashDraft.from_folder(tmp_path).shape(make_target()) == draft.shape(make_target())


def test_transformers_reads_the_same_rotary_embeddings(tmp_path):
    """All channels turn: SGLang 0.5.16 knows nothing else for DFlash."""
    rope = {**LLAMA3, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
    module = export(tmp_path, make_target(rope=rope))
    config = AutoConfig.from_pretrained(tmp_path)
    assert {key: config.rope_parameters[key] for key in LLAMA3} == LLAMA3
    fields = read_fields(tmp_path)
    for place in (fields, fields["rope_parameters"], fields["rope_scaling"]):
        assert not {"partial_rotary_factor", "mrope_section"} & place.keys()
    cos, _ = module.rope.angles(torch.arange(3), torch.float32)
    assert cos.shape == (3, 1, 4)


@pytest.fixture
def make_target_folder(request):
    """``make_target`` of the root's conftest; the name is taken here."""
    return request.getfixturevalue("make_target")


def test_scaled_embedding_travels_along_for_vllm(make_target_folder, tmp_path):
    """SGLang shares the target's embedding module, scale and all; vLLM shares bare rows, or takes the draft's own."""
    target, draft = (
        read_target(make_target_folder("gemma", tie_word_embeddings=True)),
        DFlashDraft(DFlashConfig(**SMALL)),
    )
    assert target.embedding_scale > 1
    tensors = read_target_tensors(target)
    module = draft.build(target, tensors, None)
    write_draft(draft, module.state_dict(), target, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    torch.testing.assert_close(stored["embed_tokens.weight"], tensors.embedding_VH * target.embedding_scale)
    again = DFlashDraft.from_folder(tmp_path).build(target, tensors, None)
    assert again.state_dict().keys() == module.state_dict().keys()
    edit_tensors(tmp_path, lambda stored: stored["embed_tokens.weight"].mul_(1.5))
    with pytest.raises(ArtifactError, match="is not the embedding of target"):
        DFlashDraft.from_folder(tmp_path).check_target(target)


def test_a_tensor_stored_twice_is_named(tmp_path):
    export(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(16)}))
    assert_damaged(DFlashDraft, tmp_path, "the same tensor, stored twice")


NAMES = [f"layers.1.{name}.weight" for name in LAYER] + ["fc.weight", "hidden_norm.weight", "norm.weight"]


@pytest.mark.parametrize("name", NAMES)
def test_every_missing_or_misshapen_tensor_is_named(tmp_path, name):
    export(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: torch.zeros(3, 2)}))
    assert_damaged(DFlashDraft, tmp_path, f"{name} has shape [3, 2]")
    edit_tensors(tmp_path, lambda tensors: tensors.pop(name))
    assert_damaged(DFlashDraft, tmp_path, f"lacks {name}")


@pytest.mark.parametrize("name", ["lm_head.weight", "mask_hidden", "layers.2.mlp.up_proj.weight", "fc.bias"])
def test_every_unknown_tensor_is_named(tmp_path, name):
    export(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: torch.zeros(3)}))
    assert_damaged(DFlashDraft, tmp_path, f"unknown tensors {name}")


def test_trained_mask_vector_is_refused(tmp_path):
    export(tmp_path)
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    assert_damaged(DFlashDraft, tmp_path, "mask_embedding.pt")
