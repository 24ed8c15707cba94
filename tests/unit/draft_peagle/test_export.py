"""Folders of P-EAGLE: ours, and what peers write."""

from typing import ClassVar

import pytest
from safetensors.torch import load_file

from spec_core.errors import ArtifactError, ConfigError, TargetError
from spec_draft_eagle3.draft import Eagle3Draft
from spec_draft_peagle.config import PEagleConfig
from spec_draft_peagle.draft import PEagleDraft

from ..draft_eagle3 import cases as eagle3
from ..draft_folders import (
    DraftFolderSuite,
    assert_damaged,
    assert_same_weights,
    edit_fields,
    edit_tensors,
    export,
    read_fields,
    write_fields,
)
from ..draft_parts import make_target, make_tensors
from . import cases
from .cases import make_config

SPECULATORS = {
    "architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle", "mask_token_id": 28,
    "draft_vocab_size": 9, "eagle_aux_hidden_state_layer_ids": [2, 4, 5], "norm_before_residual": False,
    "norm_before_fc": False, "fc_norm": False, "norm_output": False, "embed_requires_grad": False,
}  # fmt: skip


class TestPEagleFolder(DraftFolderSuite):
    cases = cases
    plain_options: ClassVar = {"vocab_size": 9}
    training: ClassVar = {"num_guesses": 4}
    exports = ({"vocab_size": 9}, {"norm_before_residual": True, "norm_before_fc": True})
    contradictions = (("num_layers", 3), ("vocab_size", 10))
    other_targets = (({"vocab_size": 31}, "made for vocabulary size 29, this target has 31"),)
    foreign = ({"architectures": ["DFlashDraftModel"]},)
    damaged = (
        ({"norm_before_fc": True}, "lacks input_norm.weight"),
        ({"fc_norm": True}, "fc_norm"),
        ({"pard_token": 29}, "mask_token_id=29 is not below"),
        ({"draft_vocab_size": 30}, "exceeds the target's 29"),
        ({"num_hidden_layers": 3}, "lacks layers.2"),
        ({"num_hidden_layers": 1025}, "num_hidden_layers=1025, expected less than or equal to 1024"),
    )


@pytest.fixture
def folder(tmp_path):
    """A folder of ours, with a reduced vocabulary."""
    export(cases, tmp_path, vocab_size=9)
    return tmp_path


def test_config_json_is_what_vllm_reads(folder):
    fields = read_fields(folder)
    assert fields["architectures"] == ["LlamaForCausalLMEagle3"]
    assert fields["model_type"] == "llama"
    assert (fields["num_hidden_layers"], fields["pard_token"], fields["draft_vocab_size"]) == (2, 28, 9)
    assert fields["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert "block_size" not in fields


def test_tensors_have_vllms_names(folder):
    stored = load_file(folder / "model.safetensors")
    assert stored["mask_hidden"].shape == (1, 1, 3 * 16)
    assert stored["layers.0.self_attn.q_proj.weight"].shape == (32, 32)
    assert stored["layers.1.self_attn.q_proj.weight"].shape == (32, 16)
    assert {
        "layers.0.hidden_norm.weight",
        "fc.weight",
        "norm.weight",
        "lm_head.weight",
        "d2t",
    } <= stored.keys()
    assert "layers.1.hidden_norm.weight" not in stored


def test_folder_fixes_layers_and_vocabulary(folder):
    draft = PEagleDraft(PEagleConfig(init_from=folder, num_guesses=5))
    shape = draft.shape(make_target())
    assert (shape.num_layers, shape.vocab_size, shape.mask_token_id) == (2, 9, 28)


@pytest.mark.parametrize(
    "place", [{"ptd_token_id": 7}, {"dflash_config": {"mask_token_id": 7}}, {"pard_token": 7}], ids=str
)
def test_mask_token_is_found_where_vllm_finds_it(folder, place):
    edit_fields(folder, **{"pard_token": None, **place})
    assert PEagleDraft.from_folder(folder).shape(make_target()).mask_token_id == 7


@pytest.mark.parametrize(
    "architecture", ["PEagleDraftModel", "PeagleLlamaForCausalLM", "Eagle3LlamaForCausalLM"]
)
def test_other_names_of_the_architecture(folder, architecture):
    edit_fields(folder, architectures=[architecture])
    assert PEagleDraft.from_folder(folder) is not None


def test_folder_is_told_from_eagle3s_by_its_mask_token(folder):
    assert Eagle3Draft.from_folder(folder) is None
    edit_fields(folder, pard_token=None)
    assert PEagleDraft.from_folder(folder) is None
    with pytest.raises(ArtifactError, match="mask_hidden"):  # the damaged folder is no Eagle3 draft either
        Eagle3Draft.from_folder(folder)


def test_folder_of_eagle3_is_no_peagle_draft(tmp_path):
    export(eagle3, tmp_path)
    assert Eagle3Draft.from_folder(tmp_path) is not None
    assert PEagleDraft.from_folder(tmp_path) is None


def test_speculators_layout_gives_the_same_weights(folder):
    """Fields of the layers lie in an object; embedding and head of the target lie beside the draft's tensors."""
    expected = PEagleDraft.from_folder(folder).build(make_target(), make_tensors(make_target()), None)
    fields = read_fields(folder)
    inner = {key: value for key, value in fields.items() if key not in ("pard_token", "architectures")}
    inner = {key: value for key, value in inner.items() if "draft" not in key and "eagle" not in key}
    write_fields(folder, SPECULATORS | {"transformer_layer_config": inner})
    assert_same_weights(PEagleDraft, folder, expected, make_target())


def test_folder_without_mask_hidden_is_refused(folder):
    edit_tensors(folder, lambda stored: stored.pop("mask_hidden"))
    assert_damaged(PEagleDraft, folder, "lacks mask_hidden")


def test_targets_and_options_that_do_not_fit():
    with pytest.raises(TargetError, match="at least 7 are needed"):
        PEagleDraft(make_config()).check_target(make_target(num_layers=5))
    with pytest.raises(ConfigError, match="does not hold the target's 3 end tokens"):
        PEagleDraft(make_config(vocab_size=2)).check_target(make_target(eos_token_ids=(1, 2, 3)))
