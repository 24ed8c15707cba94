"""The exported folder, the way back, folders of other trainers, and damaged or foreign ones."""

from functools import partial

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig

from spec_draft_dflash2.draft import DFlash2Draft

from .. import draft_folders
from ..draft_folders import (
    QWEN3_FIELDS,
    DraftFolderSuite,
    assert_damaged,
    assert_same_weights,
    merge_fields,
    read_fields,
    write_fields,
)
from ..draft_parts import make_target
from . import cases
from .cases import SIZES

LAYERS = [1, 9, 17, 25, 33]


export = partial(draft_folders.export, cases)


class TestDFlash2Folder(DraftFolderSuite):
    cases = cases
    exports = ({}, {"sliding_window": 9})
    contradictions = (("block_size", 8), ("sliding_window", 9), *((key, 1) for key in SIZES))
    other_targets = (
        ({"hidden_size": 32}, "made for hidden size 16, this target has 32"),
        ({"num_layers": 9}, "made for number of layers 8, this target has 9"),
        ({"logit_scale": 0.5}, "scaled"),
    )
    foreign = ({"architectures": ["DFlashDraftModel"]}, {"speculators_model_type": "dflash"})
    damaged = (
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window=None: at least a block, 4, is needed"),
        ({"layer_types": ["chunked"] * 2}, "layer_types='chunked', expected"),
        ({"num_hidden_layers": 3, "layer_types": None}, "lacks layers.2."),
    )


def test_tensors_are_the_serving_formats(tmp_path):
    export(tmp_path)
    tensors = {name: tuple(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()}
    own = {
        "candidate_selector.predecessor_codebook": (29, 6),
        "candidate_selector.successor_codebook": (29, 6),
        "candidate_selector.hidden_projection.weight": (6, 16),
    }
    for layer in range(2):
        for name in ("attention_conv", "mlp_conv"):
            own[f"layers.{layer}.{name}.base_kernel"] = (2, 2, 16)
            own[f"layers.{layer}.{name}.kernel_projection.weight"] = (2 * 2 * 4, 16)
    assert tensors.items() >= own.items()
    others = {name for name in tensors.keys() - own.keys() if not name.startswith("layers.")}
    assert others == {"fc.weight", "hidden_norm.weight", "norm.weight"}


def test_config_has_the_nested_fields_that_engines_read(tmp_path):
    export(tmp_path, make_target(num_layers=36), num_layers=3)
    fields = read_fields(tmp_path)
    expected = {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 3,
        "num_target_layers": 36,
        "block_size": 4,
        "layer_types": ["full_attention"] * 3,
        "is_causal": False,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in LAYERS],
        "dflash_config": {"block_size": 4, "mask_token_id": 28, "target_layer_ids": LAYERS, **SIZES},
    }
    assert {key: fields[key] for key in expected} == expected
    assert AutoConfig.from_pretrained(tmp_path).dflash_config == fields["dflash_config"]


LAYER_FIELDS = {**QWEN3_FIELDS, "num_hidden_layers": 2, "rope_theta": 100.0}
NESTED = {"mask_token_id": 20, "target_layer_ids": LAYERS, "block_size": 4, **SIZES}
ZLAB = LAYER_FIELDS | {
    "architectures": ["DFlash2DraftModel"],
    "is_causal": False,
    "layer_types": ["full_attention"] * 2,
    "num_target_layers": 36,
    "dflash_config": NESTED | {"output_multiplier": 1.0},
}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "use_sliding_window": True}
SPECULATORS = {
    "architectures": ["DFlash2DraftModel"],
    "speculators_model_type": "dflash2",
    "aux_hidden_state_layer_ids": [layer + 1 for layer in LAYERS],
    "block_size": 4,
    "draft_vocab_size": 29,
    "mask_token_id": 20,
    "sample_from_anchor": False,
    "sliding_window_non_causal": True,
    "transformer_layer_config": LAYER_FIELDS,
    **SIZES,
}


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        (ZLAB, {}),
        (ZLAB | SLIDING, {"sliding_window": 9}),
        (SPECULATORS, {}),
        (SPECULATORS | {"transformer_layer_config": LAYER_FIELDS | SLIDING}, {"sliding_window": 9}),
    ],
    ids=["z-lab", "z-lab, sliding", "speculators", "speculators, sliding"],
)
def test_folders_of_other_trainers_are_read(tmp_path, fields, options):
    target = make_target(num_layers=36)
    module = export(tmp_path, target, mask_token_id=20, **options)
    assert module.shape.causality == (False, False)
    write_fields(tmp_path, fields)
    again = assert_same_weights(DFlash2Draft, tmp_path, module, target)
    depth = fields.get("num_target_layers")
    assert again.shape == module.shape.model_copy(update={"num_target_layers": depth})


@pytest.mark.parametrize(
    ("fields", "changes", "reason"),
    [
        (ZLAB, {"dflash_config": {"output_multiplier": 2.0}}, "output_multiplier=2.0: expected 1.0"),
        (ZLAB, {"dflash_config": {"input_embedding_scale": 4.0}}, "input_embedding_scale=4.0: expected 1.0"),
        (ZLAB, {"dflash_config": {"final_logit_softcapping": 30.0}}, "final_logit_softcapping=30.0"),
        (
            ZLAB,
            {"dflash_config": {"conv_kernel_size": None}},
            "conv_kernel_size=None, expected a valid integer",
        ),
        (
            ZLAB,
            {"dflash_config": {"conv_kernel_size": 5}},
            "conv_kernel_size=5 is more than a block of 4 has",
        ),
        (ZLAB, {"dflash_config": {"conv_group_size": 3}}, "conv_group_size=3 does not divide the width 16"),
        (
            ZLAB,
            {"dflash_config": {"selector_top_k": 30}},
            "selector_top_k=30 is more than the vocabulary's 29",
        ),
        (
            ZLAB,
            {"dflash_config": {"selector_rank": 7}},
            "candidate_selector.hidden_projection.weight has shape",
        ),
        (ZLAB, {"dflash_config": {"block_size": 1}}, "block_size=1 leaves no slot to guess"),
        (SPECULATORS, {"sample_from_anchor": True}, "sample_from_anchor=True: expected False"),
        (SPECULATORS, {"draft_vocab_size": 20}, "model.safetensors lacks d2t"),
    ],
    ids=str,
)
def test_what_cannot_be_expressed_is_refused_by_name_in_one_line(tmp_path, fields, changes, reason):
    export(tmp_path, make_target(num_layers=36), mask_token_id=20)
    write_fields(tmp_path, fields)
    merge_fields(tmp_path, **changes)
    assert_damaged(DFlash2Draft, tmp_path, reason)
