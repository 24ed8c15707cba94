"""The exported folder: fields and names of the serving format, the way back, and damaged or foreign folders."""

from functools import partial
from hashlib import sha256
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from spec_core.errors import ArtifactError, TargetError
from spec_draft_eagle3.config import Eagle3Config
from spec_draft_eagle3.draft import Eagle3Draft

from .. import draft_folders
from ..draft_batches import LLAMA3
from ..draft_folders import (
    DraftFolderSuite,
    assert_damaged,
    assert_same_angles,
    assert_same_weights,
    edit_fields,
    edit_tensors,
    read_fields,
    rename_tensors,
    write_ramps,
)
from ..draft_parts import make_target, make_tensors
from . import cases
from .cases import MLA, PUBLISHED

LAYER = [
    "midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight", "midlayer.mlp.down_proj.weight",
    "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight",
    "midlayer.post_attention_layernorm.weight", "midlayer.self_attn.k_proj.weight",
    "midlayer.self_attn.o_proj.weight", "midlayer.self_attn.q_proj.weight",
    "midlayer.self_attn.v_proj.weight",
]  # fmt: skip
REDUCED = {"vocab_size": 11, "num_steps": 3}
WITHOUT_NORMS = {"fc_norm": False, "norm_output": False}
TWO_LAYERS = {"num_layers": 2, **REDUCED}
WINDOW = {"sliding_window": 8, **TWO_LAYERS}
EVERY_OPTION = {"fc_norm": True, "norm_output": True, "layers": (1, 3, 4, 6), "head_dim": 6, **REDUCED}


export = partial(draft_folders.export, cases)


class TestEagle3Folder(DraftFolderSuite):
    cases = cases
    plain_options = REDUCED
    training: ClassVar = {"num_steps": 3}
    exports = (
        REDUCED,
        {**WITHOUT_NORMS, **REDUCED},
        EVERY_OPTION,
        TWO_LAYERS,
        {"num_steps": 3, **MLA},
        {"num_steps": 3, **PUBLISHED},
    )
    contradictions = (
        *(
            ("vocab_size", 12),
            ("fc_norm", False),
            ("norm_output", False),
            ("num_heads", 2),
            ("num_layers", 2),
            ("sliding_window", 7),
        ),
        *(("attention", "mla"), ("v_head_dim", 8), ("qk_norm", True), ("norm_before_residual", True)),
    )
    other_targets = (
        ({"vocab_size": 31}, "made for vocabulary size 29, this target has 31"),
        ({"hidden_size": 32}, "made for hidden size 16, this target has 32"),
        ({"num_layers": 5}, "layers [2, 4, 5] must lie between 1 and 4"),
        ({"head_bias_name": "lm_head.bias"}, "its head has a bias"),
    )
    foreign = tuple(
        {"architectures": names} for names in (["DFlashDraftModel"], ["LlamaForCausalLM"], None, 3, [3])
    )
    damaged = (
        ({"hidden_size": None}, "hidden_size=None"),
        ({"hidden_size": "wide"}, "hidden_size='wide'"),
        ({"draft_vocab_size": 12}, "config.json says"),
        ({"draft_vocab_size": 30}, "exceeds"),
        ({"num_hidden_layers": 2}, "model.safetensors lacks layers.1.input_layernorm.weight"),
        ({"num_hidden_layers": 17}, "num_hidden_layers=17, expected less than or equal to 16"),
        ({"norm_before_residual": 1}, "norm_before_residual=1, expected a valid boolean"),
        ({"norm_before_fc": True}, "model.safetensors lacks input_norm.weight"),
        ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, "lacks midlayer.self_attn.k_norm.weight"),
        ({"target_hidden_size": 32}, "target_hidden_size=32"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}, "do not name the same layers"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ({"rope_parameters": "default"}, "rope_parameters='default', expected an object"),
        ({"eagle_config": [1]}, "eagle_config=[1], expected an object"),
        ({"eagle_aux_hidden_state_layer_ids": 2}, "=2, expected a valid array"),
        ({"eagle_aux_hidden_state_layer_ids": [4, 2, 5], "eagle_config": None}, "unique and ascending"),
        (
            {"num_aux_hidden_states": 4},
            "num_aux_hidden_states=4: expected 3 for a draft of this kind and shape",
        ),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small', expected a valid number"),
        ({"logit_scale": 0.5}, "logit_scale=0.5"),
        ({"layer_types": ["sliding_attention"]}, "sliding_window=None, expected a valid integer"),
        (
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
            "layer_types=['full_attention', 'sliding_attention'], expected one kind",
        ),
    )


def test_folder_holds_exactly_the_serving_formats_files_and_tensors(tmp_path):
    export(tmp_path, **REDUCED)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    tensors = load_file(tmp_path / "model.safetensors")
    others = ["fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"]
    assert sorted(tensors) == sorted([*LAYER, *others, *(f"fc_norm.{i}.weight" for i in range(3))])
    assert (tensors["d2t"].dtype, tensors["d2t"].shape) == (torch.int64, (11,))
    assert (tensors["t2d"].dtype, tensors["t2d"].shape) == (torch.bool, (29,))
    assert tensors["lm_head.weight"].shape == (11, 16)
    assert tensors["fc.weight"].shape == (16, 48)


def test_an_exports_bytes_do_not_change(tmp_path):
    """The format is in use: a change here must be meant."""
    target = make_target(dtype="bfloat16", rope=LLAMA3)
    write_ramps(Eagle3Draft(Eagle3Config(**EVERY_OPTION)), target, tmp_path)
    digests = {file.name: sha256(file.read_bytes()).hexdigest()[:16] for file in tmp_path.iterdir()}
    assert digests == {"config.json": "b4d1314f96dafee0", "model.safetensors": "bda3dd8f3761a403"}


def test_full_vocabulary_has_no_mapping(tmp_path):
    export(tmp_path)
    assert not {"d2t", "t2d"} & load_file(tmp_path / "model.safetensors").keys()
    fields = read_fields(tmp_path)
    assert fields["draft_vocab_size"] == fields["vocab_size"] == 29


def test_config_fields_satisfy_both_engines(tmp_path):
    export(tmp_path, make_target(num_layers=12), **REDUCED)
    fields = read_fields(tmp_path)
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": 29,
        "draft_vocab_size": 11,
        "hidden_size": 16,
        "target_hidden_size": 16,
        "norm_before_residual": False,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "fc_norm": True,
        "norm_output": True,
        "torch_dtype": "float32",
        "eos_token_id": 3,
        "max_position_embeddings": 64,
        "rope_theta": 100.0,
        "rope_scaling": None,
        # One list counts streams entering a layer, the other the layer before.
        "eagle_aux_hidden_state_layer_ids": [2, 6, 9],
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 5, 8]},
    }
    assert {key: fields[key] for key in expected} == expected


def test_a_later_layer_reads_the_state_alone_and_its_norm_has_both_engines_names(tmp_path):
    module = export(tmp_path, **TWO_LAYERS)
    tensors = load_file(tmp_path / "model.safetensors")
    later = {name.removeprefix("layers.1.") for name in tensors if name.startswith("layers.1.")}
    assert later == {name.removeprefix("midlayer.") for name in LAYER}
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 32)
    assert tensors["layers.1.self_attn.q_proj.weight"].shape == (32, 16)
    norm = module.state_dict()["layers.1.input_layernorm.weight"]
    for name in ("input_layernorm", "hidden_norm"):
        assert torch.equal(tensors[f"layers.1.{name}.weight"], norm)
    assert "layers.1.hidden_norm.weight" not in module.state_dict()
    assert read_fields(tmp_path)["num_hidden_layers"] == 2


def test_only_vllm_is_named_for_several_layers(tmp_path):
    export(tmp_path, **TWO_LAYERS)
    assert set(Eagle3Draft.from_folder(tmp_path).serving_methods) == {"vllm"}
    assert set(Eagle3Draft(Eagle3Config(num_layers=2)).serving_methods) == {"vllm"}
    assert set(Eagle3Draft(Eagle3Config(num_layers=1)).serving_methods) == {"vllm", "sglang"}


def test_a_window_is_written_as_vllm_reads_it_and_no_llamacpp_is_named(tmp_path):
    export(tmp_path, **WINDOW)
    fields = read_fields(tmp_path)
    assert (fields["layer_types"], fields["sliding_window"]) == (["sliding_attention"] * 2, 8)
    draft = Eagle3Draft.from_folder(tmp_path)
    assert draft.shape(make_target()).sliding_window == 8
    original = {"fc_norm": False, "norm_output": False}
    served = [
        set(Eagle3Draft(Eagle3Config(**original, sliding_window=size)).serving_methods) for size in (None, 9)
    ]
    assert served[0] - served[1] == {"llamacpp"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"sliding_window": 3, "num_steps": 3}, "sliding_window=3 must be above draft.num_steps=3"),
        ({"sliding_window": 9, **MLA}, "sliding_window=9: engines have no window for latent attention"),
    ],
)
def test_a_window_that_no_engine_has_or_that_hides_a_guess_is_refused(options, problem):
    with pytest.raises(TargetError, match=problem):
        Eagle3Draft(Eagle3Config(**options)).check_target(make_target())


def test_several_layers_without_copies_of_norms_are_read_and_other_norms_are_not(tmp_path):
    """The library speculators stores none; which of two different norms counts, engines do not agree on."""
    module, name = export(tmp_path, **TWO_LAYERS), "layers.1.hidden_norm.weight"
    edit_tensors(tmp_path, lambda tensors: tensors.pop(name))
    assert_same_weights(Eagle3Draft, tmp_path, module, make_target())
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: torch.ones(16)}))
    assert_damaged(Eagle3Draft, tmp_path, f"{name} differs from layers.1.input_layernorm.weight")


def test_transformers_reads_the_same_rotary_embeddings(tmp_path):
    """A fresh draft rotates all channels, as SGLang does with every draft."""
    export(tmp_path, make_target(rope={**LLAMA3, "partial_rotary_factor": 0.5}))
    config = AutoConfig.from_pretrained(tmp_path)
    found = {key: config.rope_parameters[key] for key in LLAMA3}
    assert found == LLAMA3
    fields = read_fields(tmp_path)
    assert "partial_rotary_factor" not in fields | fields["rope_parameters"]
    assert fields["rope_scaling"]["rope_type"] == "llama3"
    assert "rope_theta" not in fields["rope_scaling"]


@pytest.mark.parametrize("norm", [True, False])
def test_norms_are_the_folders_unless_an_option_says_otherwise(tmp_path, norm):
    export(tmp_path, fc_norm=norm, norm_output=norm)
    for options in ({}, {"fc_norm": None, "norm_output": None}):
        draft = Eagle3Draft(Eagle3Config(init_from=tmp_path, **options))
        assert (draft.options.fc_norm, draft.options.norm_output) == (norm, norm)
        again = Eagle3Config.model_validate(draft.config.model_dump())  # as a worker of the run gets it
        assert Eagle3Draft(again).shape(make_target()) == draft.shape(make_target())


def test_norms_are_the_default_of_a_fresh_draft_and_null_is_without(tmp_path):
    def norms(config):
        shape = Eagle3Draft(config).shape(make_target())
        return shape.fc_norm, shape.norm_output

    assert norms(Eagle3Config()) == (True, True)
    assert norms(Eagle3Config(fc_norm=None, norm_output=None)) == (False, False)
    assert norms(Eagle3Config(fc_norm=None)) == (False, True)


def test_init_from_refuses_other_layers(tmp_path):
    export(tmp_path, **REDUCED)
    with pytest.raises(TargetError, match="contradicts"):
        Eagle3Draft(Eagle3Config(init_from=tmp_path, layers=(1, 2, 3))).check_target(make_target())
    Eagle3Draft(Eagle3Config(init_from=tmp_path, layers=(2, 4, 5))).check_target(make_target())


@pytest.mark.parametrize("variant", ["layers.0", "prefix", "no t2d", "old fields", "eagle's own"])
def test_published_variants_are_read(tmp_path, variant):
    target = make_target(rope=LLAMA3)
    module = export(tmp_path, target, **REDUCED, **WITHOUT_NORMS)
    renamed = {
        "layers.0": lambda name: name.replace("midlayer.", "layers.0."),
        "prefix": lambda name: name if name in ("d2t", "t2d", "lm_head.weight") else f"model.{name}",
    }
    rename_tensors(tmp_path, renamed.get(variant, str))
    if variant == "no t2d":
        edit_tensors(tmp_path, lambda tensors: tensors.pop("t2d"))
    if variant == "old fields":
        scaling = {
            "type": "llama3",
            **{k: v for k, v in LLAMA3.items() if k not in ("rope_type", "rope_theta")},
        }
        edit_fields(
            tmp_path, rope_parameters=None, rope_scaling=scaling, eagle_aux_hidden_state_layer_ids=None
        )
    if variant == "eagle's own":
        fields = {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": None, "fc_norm": None}
        edit_fields(tmp_path, architectures=["LlamaForCausalLM"], **fields)
    assert_same_angles(assert_same_weights(Eagle3Draft, tmp_path, module, target), module)
    draft = Eagle3Draft.from_folder(tmp_path)
    assert draft.required_features(target).layers == (2, 4, 5, 8)


def stored_target(folder):
    """A target whose three tensors lie in a file, as the trainer reads them."""
    target = make_target(folder=folder)
    tensors = make_tensors(target)
    folder.mkdir()
    names = {target.embedding_name: tensors.embedding_VH, target.head_name: tensors.head_VH}
    save_file(names | {target.norm_name: tensors.norm_H}, folder / "model.safetensors")
    return target, tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_embedding_is_read_over_where_it_is_the_targets(tmp_path, dtype):
    target, tensors = stored_target(tmp_path / "target")
    export(tmp_path, target)
    stored = tensors.embedding_VH.to(dtype)
    edit_tensors(tmp_path, lambda t: t.update({"embed_tokens.weight": stored}))
    Eagle3Draft.from_folder(tmp_path).build(target, tensors, None)


@pytest.mark.parametrize("changed", ["one row", "all", "rows"])
def test_stored_embedding_of_another_target_is_refused(tmp_path, changed):
    target, tensors = stored_target(tmp_path / "target")
    export(tmp_path, target)
    other = {
        "one row": torch.cat([tensors.embedding_VH[:-1], torch.zeros(1, 16)]),
        "all": tensors.embedding_VH * 1.1,
        "rows": tensors.embedding_VH[1:].clone(),
    }[changed]
    edit_tensors(tmp_path, lambda t: t.update({"embed_tokens.weight": other}))
    with pytest.raises(ArtifactError, match=r"embed_tokens.weight is not the embedding of target"):
        Eagle3Draft.from_folder(tmp_path).check_target(target)


TENSOR_DAMAGE = {
    "missing": (lambda t: t.pop("fc.weight"), "lacks fc.weight"),
    "extra": (lambda t: t.update({"fc.bias": torch.zeros(16)}), "unknown tensors fc.bias"),
    "shape": (lambda t: t.update({"norm.weight": torch.zeros(8)}), "norm.weight has shape [8]"),
    "no mapping": (lambda t: t.pop("d2t"), "lacks d2t"),
    "dtype": (lambda t: t.update({"fc.weight": t["fc.weight"].double()}), "fc.weight has dtype F64"),
    "mapping's dtype": (lambda t: t.update({"d2t": t["d2t"].float()}), "d2t has dtype F32, expected I64"),
    "stored twice": (
        lambda t: t.update({"model.fc.weight": t["fc.weight"].clone()}),
        "are the same tensor, stored twice",
    ),
    "id too large": (lambda t: t["d2t"].fill_(25), "ids 25 to 35, the target's vocabulary has 0 to 28"),
    "id negative": (lambda t: t["d2t"].fill_(-1), "ids -1 to 9, the target's vocabulary has 0 to 28"),
    "id twice": (lambda t: t["d2t"].copy_(-torch.arange(11)), "not map its rows to strictly ascending ids"),
    "not ascending": (lambda t: t["d2t"].copy_(10 - 2 * torch.arange(11)), "strictly ascending"),
    "other t2d": (lambda t: t["t2d"].logical_not_(), "do not describe the same vocabulary"),
}


@pytest.mark.parametrize(("edit", "reason"), TENSOR_DAMAGE.values(), ids=TENSOR_DAMAGE.keys())
def test_damaged_tensors_are_an_artifact_error(tmp_path, edit, reason):
    export(tmp_path, **REDUCED)
    edit_tensors(tmp_path, edit)
    assert_damaged(Eagle3Draft, tmp_path, reason)


def test_config_that_is_not_json_is_an_artifact_error(tmp_path):
    (tmp_path / "config.json").write_text("{")
    assert_damaged(Eagle3Draft, tmp_path, "is not JSON")
