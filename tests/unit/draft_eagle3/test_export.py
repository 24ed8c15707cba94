"""The exported folder: fields and names of the serving format, the way back, and damaged or foreign folders."""

from functools import partial
from hashlib import sha256
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from spec_core.errors import TargetError
from spec_draft_eagle3.config import Eagle3Config
from spec_draft_eagle3.draft import Eagle3Draft

from .. import draft_folders
from ..draft_batches import LLAMA3
from ..draft_folders import (
    DraftFolderSuite,
    assert_damaged,
    assert_same_weights,
    edit_tensors,
    read_fields,
    write_ramps,
)
from ..draft_parts import make_target
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
