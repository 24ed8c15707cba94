"""Folders of P-EAGLE: ours, and what peers write."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_core.errors import ArtifactError, ConfigError, TargetError
from spec_draft_eagle3.config import Eagle3Config
from spec_draft_eagle3.draft import Eagle3Draft
from spec_draft_peagle.config import PEagleConfig
from spec_draft_peagle.draft import PEagleDraft
from spec_kit.drafting import write_draft

from ..draft_eagle3.cases import make_model as make_eagle3
from ..draft_eagle3.cases import make_target, make_tensors
from .cases import make_config, make_model

SPECULATORS = {
    "architectures": ["PEagleSpeculator"],
    "speculators_model_type": "peagle",
    "mask_token_id": 28,
    "draft_vocab_size": 9,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "embed_requires_grad": False,
}


@pytest.fixture
def folder(tmp_path):
    """A folder of ours, with a reduced vocabulary."""
    target, config = make_target(), make_config(vocab_size=9)
    module = make_model(target, config)
    write_draft(PEagleDraft(config), module.state_dict(), target, tmp_path)
    return tmp_path


def edit(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_config_json_is_what_vllm_reads(folder):
    fields = json.loads((folder / "config.json").read_text())
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
    with pytest.raises(ConfigError, match=r"draft.num_layers=3 contradicts"):
        PEagleDraft(PEagleConfig(init_from=folder, num_layers=3))


@pytest.mark.parametrize(
    "place", [{"ptd_token_id": 7}, {"dflash_config": {"mask_token_id": 7}}, {"pard_token": 7}], ids=str
)
def test_mask_token_is_found_where_vllm_finds_it(folder, place):
    edit(folder, **{"pard_token": None, **place})
    assert PEagleDraft.from_folder(folder).shape(make_target()).mask_token_id == 7


@pytest.mark.parametrize(
    "architecture", ["PEagleDraftModel", "PeagleLlamaForCausalLM", "Eagle3LlamaForCausalLM"]
)
def test_other_names_of_the_architecture(folder, architecture):
    edit(folder, architectures=[architecture])
    assert PEagleDraft.from_folder(folder) is not None


def test_folder_is_told_from_eagle3s_by_its_mask_token(folder):
    assert Eagle3Draft.from_folder(folder) is None
    edit(folder, pard_token=None)
    assert PEagleDraft.from_folder(folder) is None
    with pytest.raises(ArtifactError, match="mask_hidden"):  # the damaged folder is no Eagle3 draft either
        Eagle3Draft.from_folder(folder)


def test_folder_of_eagle3_is_no_peagle_draft(tmp_path):
    target, config = make_target(), Eagle3Config()
    write_draft(Eagle3Draft(config), make_eagle3(target, config).state_dict(), target, tmp_path)
    assert Eagle3Draft.from_folder(tmp_path) is not None
    assert PEagleDraft.from_folder(tmp_path) is None


def test_speculators_layout_gives_the_same_weights(folder):
    """Fields of the layers lie in an object; embedding and head of the target lie beside the draft's tensors."""
    expected = PEagleDraft.from_folder(folder).build(make_target(), make_tensors(make_target()), None)
    fields = json.loads((folder / "config.json").read_text())
    inner = {key: value for key, value in fields.items() if key not in ("pard_token", "architectures")}
    inner = {key: value for key, value in inner.items() if "draft" not in key and "eagle" not in key}
    (folder / "config.json").write_text(json.dumps(SPECULATORS | {"transformer_layer_config": inner}))
    got = PEagleDraft.from_folder(folder).build(make_target(), make_tensors(make_target()), None)
    for name, value in expected.state_dict().items():
        assert torch.equal(got.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"fc_norm": True}, "fc_norm"),
        ({"pard_token": 29}, "mask_token_id=29 is not below"),
        ({"draft_vocab_size": 30}, "exceeds the target's 29"),
        ({"num_hidden_layers": 3}, "lacks layers.2"),
    ],
)
def test_what_cannot_be_expressed_is_refused(folder, changes, line):
    edit(folder, **changes)
    with pytest.raises(ArtifactError, match=line) as caught:
        PEagleDraft.from_folder(folder)
    assert "\n" not in str(caught.value)


def test_folder_without_mask_hidden_is_refused(folder):
    file = folder / "model.safetensors"
    stored = load_file(file)
    del stored["mask_hidden"]
    save_file(stored, file)
    with pytest.raises(ArtifactError, match="lacks mask_hidden"):
        PEagleDraft.from_folder(folder)


def test_targets_and_options_that_do_not_fit():
    with pytest.raises(TargetError, match="at least 7 are needed"):
        PEagleDraft(make_config()).check_target(make_target(num_layers=5))
    with pytest.raises(ConfigError, match="does not hold the target's 2 end tokens"):
        PEagleDraft(make_config(vocab_size=1)).check_target(make_target(eos_token_ids=(1, 2)))
