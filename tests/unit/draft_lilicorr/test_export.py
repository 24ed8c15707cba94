"""The exported folder, the way back, and damaged or foreign ones."""

from functools import partial

import pytest
from safetensors.torch import load_file

from spec_core.errors import TargetError
from spec_draft_dflash2.lilicorr.draft import LiLiCorrDraft

from .. import draft_folders
from ..draft_folders import (
    DraftFolderSuite,
    assert_damaged,
    assert_same_weights,
    merge_fields,
    read_fields,
    rename_tensors,
)
from ..draft_parts import make_target
from . import cases
from .cases import HEAD, SIZES

export = partial(draft_folders.export, cases)
PLAIN = {"conv_kernel_size": 0, "conv_group_size": None}


class TestLiLiCorrFolder(DraftFolderSuite):
    cases = cases
    exports = ({}, PLAIN, {"lilicorr_hidden_size": 16, "lilicorr_num_heads": 4})
    contradictions = (
        ("block_size", 8),
        ("conv_kernel_size", 0),
        *((key, 1) for key in HEAD if "eps" not in key),
    )
    other_targets = (
        ({"hidden_size": 32}, "made for hidden size 16, this target has 32"),
        ({"num_layers": 9}, "made for number of layers 8, this target has 9"),
        ({"embedding_scale": 2.0}, "its embedding is scaled (2.0)"),
    )
    foreign = ({"architectures": ["DFlash2DraftModel"]}, {"speculators_model_type": "dflash"})
    damaged = (
        ({"draft_vocab_size": 20}, "draft_vocab_size=20: expected 29"),
        ({"num_hidden_layers": 3, "layer_types": None}, "lacks layers.2."),
    )


def test_config_has_the_nested_fields_that_engines_read(tmp_path):
    export(tmp_path)
    fields = read_fields(tmp_path)
    assert fields["architectures"] == ["LiLiCorrDraftModel"]
    assert fields["dflash_config"] == {
        "block_size": 4,
        "mask_token_id": 28,
        "target_layer_ids": [layer - 1 for layer in fields["eagle_aux_hidden_state_layer_ids"]],
        "projector_type": "lilicorr",
        "lilicorr_enabled": True,
        **SIZES,
    }


def test_a_folder_without_convolutions_has_neither_their_fields_nor_their_tensors(tmp_path):
    export(tmp_path, **PLAIN)
    assert not any(key.startswith("conv_") for key in read_fields(tmp_path)["dflash_config"])
    assert not any("_conv." in name for name in load_file(tmp_path / "model.safetensors"))


def test_a_head_of_width_0_is_as_wide_as_the_draft(tmp_path):
    """Model-Optimizer's way to say it."""
    module = export(tmp_path, lilicorr_hidden_size=16, lilicorr_num_heads=4)
    merge_fields(tmp_path, dflash_config={"lilicorr_hidden_size": 0})
    assert LiLiCorrDraft.from_folder(tmp_path).shape(make_target()) == module.shape


def test_model_optimizers_first_names_are_read(tmp_path):
    """As the classes of SGLang 0.5.21 name their parameters."""
    module = export(tmp_path)
    sequence = {"feature_norm": "feature_mlp.0", "feature_mlp.up_proj": "feature_mlp.1"}
    sequence |= {"feature_mlp.down_proj": "feature_mlp.3"}
    for index in range(2):
        sequence |= {f"layers.{index}.mlp.up_proj": f"layers.{index}.mlp.0"}
        sequence |= {f"layers.{index}.mlp.down_proj": f"layers.{index}.mlp.2"}

    def first_name(name):
        inner, _, leaf = name.removeprefix("lilicorr.").rpartition(".")
        is_renamed = name.startswith("lilicorr.") and inner in sequence
        return f"lilicorr.{sequence[inner]}.{leaf}" if is_renamed else name

    rename_tensors(tmp_path, first_name)
    assert "lilicorr.layers.1.mlp.2.bias" in load_file(tmp_path / "model.safetensors")
    assert_same_weights(LiLiCorrDraft, tmp_path, module, make_target())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lilicorr_candidate_topk": 5}, "lilicorr_candidate_topk=5: engines need a power of two"),
        (
            {"lilicorr_candidate_topk": 32},
            "lilicorr_candidate_topk=32: engines need a power of two, at most 16",
        ),
        ({"lilicorr_num_heads": 5}, "lilicorr_num_heads=5 does not divide the width 12"),
        ({"lilicorr_logit_scale": None}, "lilicorr_logit_scale=None, expected a valid number"),
        ({"lilicorr_enabled": False}, "lilicorr_enabled=False: expected True"),
        ({"lilicorr_factor_dim": 7}, "has shape [6], config.json says [7]"),
        ({"conv_group_size": 0}, "both or neither must be 0"),
        ({"conv_kernel_size": None, "conv_group_size": None}, "has unknown tensors layers.0.attention_conv"),
    ],
    ids=str,
)
def test_what_cannot_be_expressed_is_refused_by_name_in_one_line(tmp_path, changes, reason):
    export(tmp_path)
    merge_fields(tmp_path, dflash_config=changes)
    assert_damaged(LiLiCorrDraft, tmp_path, reason)


def test_a_scaled_embedding_is_refused():
    """vLLM and SGLang would give the path head different embeddings."""
    with pytest.raises(TargetError, match=r"its embedding is scaled \(3\.0\)"):
        LiLiCorrDraft(cases.make_config()).check_target(make_target(embedding_scale=3.0))


def test_defaults_are_the_papers():
    """Published for Qwen3-8B; a narrow target has a head of its own width."""
    none = dict.fromkeys((*SIZES, "block_size", "num_layers"))
    for width, head in ((4096, 1024), (64, 64)):
        draft = LiLiCorrDraft(cases.make_config(**none))
        shape, options = draft.shape(make_target(hidden_size=width, num_layers=36)), draft.options
        assert (shape.block_size, shape.num_layers, shape.conv_kernel_size, shape.conv_group_size) == (
            16,
            5,
            2,
            16,
        )
        assert [getattr(shape, key) for key in HEAD] == [8, head, 2, 8, 2.0, head, 8.0, 1e-4]
        assert (options.gamma, options.ce_weight, options.soft_weight) == (7, 1, 0)
        assert (options.path_weight, options.margin_weight, options.penalty_weight) == (0.25, 0, 0.25)
