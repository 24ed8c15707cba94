"""Folders of block drafts with a reduced vocabulary: the head's rows travel along, and must be the target's."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from spec_core.errors import ArtifactError, ConfigError
from spec_kit.drafting import recognise, write_draft
from spec_kit.targets import read_target, read_target_tensors

from .draft_dflash import cases as dflash_cases
from .draft_dflash2 import cases as dflash2_cases
from .draft_dspark import cases as dspark_cases
from .draft_folders import assert_damaged, edit_tensors, read_fields
from .draft_parts import make_target as make_spec

CASES = {"dflash": dflash_cases, "dflash2": dflash2_cases, "dspark": dspark_cases}
SIZE = 40


@pytest.fixture(params=CASES)
def cases(request):
    return CASES[request.param]


@pytest.fixture
def target(make_target):
    return read_target(make_target("qwen3", tie_word_embeddings=True))


@pytest.fixture
def folder(cases, target, tmp_path):
    """An export of a fresh draft."""
    draft = cases.Draft(cases.make_config(vocab_size=SIZE))
    counts = torch.arange(target.vocab_size) % 7
    module = draft.build(target, read_target_tensors(target), counts)
    write_draft(draft, module.state_dict(), target, tmp_path)
    return tmp_path


def test_the_vocabulary_is_the_most_frequent_tokens_and_the_end_tokens(cases, target, folder):
    counts = torch.arange(target.vocab_size) % 7
    kept = load_file(folder / "model.safetensors")["t2d"]
    ends = [token for token in target.eos_token_ids if token < target.vocab_size]
    assert kept[ends].all()
    kept[ends] = False
    assert counts[kept].min() >= counts[~kept].max() - (counts[ends].max() if ends else 0)


def test_a_folder_holds_the_mapping_and_the_rows_of_the_head(target, folder):
    stored, fields = load_file(folder / "model.safetensors"), read_fields(folder)
    ids = torch.arange(SIZE) + stored["d2t"]
    assert torch.equal(ids, stored["t2d"].nonzero()[:, 0])
    assert torch.equal(stored["lm_head.weight"], read_target_tensors(target).head_VH[ids])
    assert (fields["draft_vocab_size"], fields["vocab_size"]) == (SIZE, target.vocab_size)
    assert fields["tie_word_embeddings"] is False  # the head is no embedding


def test_a_folder_comes_back(cases, target, folder, tmp_path):
    draft = recognise(folder, target)
    module = draft.build(target, read_target_tensors(target), None)
    assert module.shape.vocab_size == draft.options.vocab_size == SIZE
    assert len(list(module.parameters())) == len(module.shape.tensor_shapes())  # the head is not trained
    write_draft(draft, module.state_dict(), target, tmp_path)
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(load_file(tmp_path / "model.safetensors")[name], tensor), name


def test_options_that_contradict_the_folder_are_refused(cases, folder):
    with pytest.raises(ConfigError, match=r"draft\.vocab_size=41 contradicts"):
        cases.Draft(cases.make_config(init_from=folder, vocab_size=41))


def test_folders_of_speculators_are_taken(cases, target, folder):
    """Copies of the embedding and of the head's rows lie beside the draft, and a mapping without t2d is whole."""
    module = recognise(folder, target).build(target, read_target_tensors(target), None)
    embedding = read_target_tensors(target).embedding_VH.clone()
    edit_tensors(
        folder, lambda stored: (stored.update({"embed_tokens.weight": embedding}), stored.pop("t2d"))
    )
    fields = read_fields(folder)
    layers = fields.get("eagle_aux_hidden_state_layer_ids") or [k + 1 for k in fields["target_layer_ids"]]
    own = {
        **fields["dflash_config"],
        "speculators_model_type": cases.Draft.speculators_type,
        "aux_hidden_state_layer_ids": layers,
        "mask_token_id": fields["dflash_config"]["mask_token_id"],
        "sample_from_anchor": cases is dspark_cases,
    }
    ours = ("target_layer_ids", "dflash_config", "num_target_layers", "draft_vocab_size", "architectures")
    layer = {key: value for key, value in fields.items() if key not in ours}
    theirs = {**fields, **own, "transformer_layer_config": layer}
    (folder / "config.json").write_text(json.dumps(theirs))
    again = recognise(folder, target).build(target, read_target_tensors(target), None)
    expected = module.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())


def test_a_head_that_is_not_the_targets_is_refused(cases, target, folder):
    edit_tensors(folder, lambda stored: stored["lm_head.weight"].mul_(1.5))
    with pytest.raises(
        ArtifactError, match=r"its lm_head.weight is not the head of target [^\n]+, or trained its own"
    ):
        recognise(folder, target)


def test_a_folder_without_the_head_is_damaged(cases, folder):
    """Engines would take the target's whole head."""
    edit_tensors(folder, lambda stored: stored.pop("lm_head.weight"))
    assert_damaged(cases.Draft, folder, "lacks lm_head.weight")


def test_a_damaged_mapping_is_named(cases, folder):
    edit_tensors(folder, lambda stored: stored["d2t"].neg_().sub_(1))
    assert_damaged(cases.Draft, folder, "d2t maps rows to ids")


def test_end_tokens_need_rows(cases, target):
    ends = replace(target, eos_token_ids=tuple(range(6)))
    with pytest.raises(ConfigError, match="vocab_size=5 does not hold the target's 6 end tokens"):
        cases.Draft(cases.make_config(vocab_size=5)).check_target(ends)


def test_a_step_costs_less(cases):
    whole, reduced = (
        cases.Draft(cases.make_config(vocab_size=size)).cost(make_spec()).sample_flops(50, 20)
        for size in (None, 9)
    )
    assert reduced < whole


def test_sglang_is_not_named_among_the_engines(cases, target, folder):
    """It takes the target's whole head for a draft in blocks; vLLM a candidate's row for its token."""
    expected = {"llamacpp"} if cases is dflash2_cases else {"vllm", "llamacpp"}
    assert set(recognise(folder, target).serving_methods) == expected
    assert "sglang" not in cases.Draft(cases.make_config(vocab_size=SIZE)).serving_methods
    assert "sglang" in cases.Draft(cases.make_config()).serving_methods
