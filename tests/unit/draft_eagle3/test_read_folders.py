"""Folders of Eagle3 drafts that are read: published ones, and damaged ones."""

from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from spec_core.errors import ArtifactError, TargetError
from spec_draft_eagle3.config import Eagle3Config
from spec_draft_eagle3.draft import Eagle3Draft

from .. import draft_folders
from ..draft_batches import LLAMA3
from ..draft_folders import (
    assert_damaged,
    assert_same_angles,
    assert_same_weights,
    edit_fields,
    edit_tensors,
    rename_tensors,
)
from ..draft_parts import make_target, make_tensors
from . import cases

REDUCED = {"vocab_size": 11, "num_steps": 3}


WITHOUT_NORMS = {"fc_norm": False, "norm_output": False}


export = partial(draft_folders.export, cases)


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


def test_null_rotary_parameters_count_as_absent(tmp_path):
    target = make_target()
    export(tmp_path, target)
    expected = Eagle3Draft.from_folder(tmp_path).shape(target).rotary_values
    edit_fields(tmp_path, rope_parameters={"rope_type": None, "rope_theta": None, "factor": None})
    draft = Eagle3Draft.from_folder(tmp_path)
    draft.build(target, make_tensors(target), None)
    assert draft.shape(target).rotary_values == expected


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
