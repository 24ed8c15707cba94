"""The exported folder, the way back, folders of other trainers, and damaged or foreign ones."""

from functools import partial

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig

from spec_core.errors import ArtifactError
from spec_draft_dspark.draft import DSparkDraft
from spec_kit.drafting import write_draft
from spec_kit.targets import read_target, read_target_tensors

from .. import draft_folders
from ..draft_folders import (
    QWEN3_FIELDS,
    DraftFolderSuite,
    assert_damaged,
    assert_same_weights,
    edit_tensors,
    merge_fields,
    read_fields,
    write_fields,
)
from ..draft_parts import make_target
from . import cases
from .cases import RANK, make_config

HEADS = ["vanilla", "gated", "rnn"]
BACKBONE = {"fc.weight", "hidden_norm.weight", "norm.weight"}


export = partial(draft_folders.export, cases)


class TestDSparkFolder(DraftFolderSuite):
    cases = cases
    exports = (
        {},
        {"markov_head": "gated", "confidence_with_markov": False},
        {"markov_head": "rnn", "confidence": False, "sample_from_anchor": False, "sliding_window": 9},
    )
    contradictions = (
        *(("block_size", 8), ("num_layers", 3)),
        *(("markov_head", "rnn"), ("markov_rank", 7), ("confidence", False), ("sample_from_anchor", False)),
    )
    other_targets = (
        ({"hidden_size": 32}, "made for hidden size 16, this target has 32"),
        ({"num_layers": 9}, "made for number of layers 8, this target has 9"),
        ({"logit_scale": 0.5}, "scaled"),
    )
    foreign = (
        *({"architectures": names} for names in (["DFlashDraftModel"], ["Qwen3ForCausalLM"], None)),
        {"speculators_model_type": "dflash"},
    )
    damaged = (
        ({"markov_rank": None}, "markov_rank=None, expected a valid integer"),
        ({"markov_rank": 0}, "markov_rank=0, expected"),
        ({"markov_head_type": "lstm"}, "markov_head_type='lstm', expected"),
        ({"block_size": None}, "block_size=None"),
        ({"block_size": 1, "sample_from_anchor": False}, "block_size=1 leaves no slot to guess"),
        ({"mask_token_id": 29, "dflash_config": None}, "mask_token_id=29 is not below"),
        ({"is_causal": 1}, "causal=1, expected a valid boolean"),
        ({"markov_head_type": "rnn"}, "lacks markov_head.joint_proj.bias"),
        ({"enable_confidence_head": False}, "unknown tensors confidence_head.proj.bias"),
        ({"confidence_head_with_markov": False}, "confidence_head.proj.weight has shape"),
    )


@pytest.mark.parametrize(
    ("head", "own"),
    [
        ("vanilla", {}),
        ("gated", {"gate_proj.weight": (RANK, 16 + RANK), "gate_proj.bias": (RANK,)}),
        ("rnn", {"joint_proj.weight": (3 * RANK, 2 * RANK + 16), "joint_proj.bias": (3 * RANK,)}),
    ],
)
def test_tensors_are_the_serving_formats(tmp_path, head, own):
    export(tmp_path, markov_head=head)
    tensors = {name: tuple(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()}
    heads = {
        "markov_head.markov_w1.weight": (29, RANK),
        "markov_head.markov_w2.weight": (29, RANK),
        "confidence_head.proj.weight": (1, 16 + RANK),
        "confidence_head.proj.bias": (1,),
        **{f"markov_head.{name}": shape for name, shape in own.items()},
    }
    assert tensors.items() >= heads.items()
    others = {name for name in tensors.keys() - heads.keys() if not name.startswith("layers.")}
    assert others == BACKBONE


def test_config_has_deepspecs_fields_and_the_nested_ones(tmp_path):
    export(tmp_path, make_target(num_layers=36), num_layers=3, block_size=7, markov_head="gated")
    layers = [1, 9, 17, 25, 33]
    expected = {
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "num_hidden_layers": 3,
        "num_target_layers": 36, "block_size": 7, "layer_types": ["full_attention"] * 3,
        "tie_word_embeddings": False, "mask_token_id": 28, "target_layer_ids": layers, "markov_rank": RANK,
        "sample_from_anchor": True, "markov_head_type": "gated",
        "enable_confidence_head": True, "confidence_head_with_markov": True,
        "dflash_config": {"mask_token_id": 28, "target_layer_ids": layers},
    }  # fmt: skip
    fields = read_fields(tmp_path)
    assert {key: fields[key] for key in expected} == expected
    seen = AutoConfig.from_pretrained(tmp_path)
    assert (seen.dflash_config, seen.markov_rank) == (fields["dflash_config"], RANK)


DEEPSPEC = {
    **QWEN3_FIELDS, "architectures": ["Qwen3DSparkModel"], "attention_dropout": 0.0, "block_size": 7,
    "bos_token_id": 0, "confidence_head_with_markov": True, "dtype": "bfloat16",
    "enable_confidence_head": True, "eos_token_id": 3, "initializer_range": 0.02,
    "layer_types": ["full_attention"] * 2, "markov_head_type": "vanilla", "markov_rank": RANK,
    "mask_token_id": 20, "max_window_layers": 2, "num_anchors": 512, "num_hidden_layers": 2,
    "num_target_layers": 36, "rope_scaling": None, "rope_theta": 100.0, "sliding_window": None,
    "target_layer_ids": [1, 9, 17, 25, 33], "tie_word_embeddings": False, "use_cache": True,
    "use_sliding_window": False,
}  # fmt: skip
HEAD_FIELDS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")


@pytest.fixture
def make_target_folder(request):
    """``make_target`` of the root's conftest; the name is taken here."""
    return request.getfixturevalue("make_target")


def test_deepspecs_folder_is_read(tmp_path):
    target = make_target(num_layers=36)
    module = export(tmp_path, target, block_size=7, mask_token_id=20)
    write_fields(tmp_path, DEEPSPEC)
    assert assert_same_weights(DSparkDraft, tmp_path, module, target).shape == module.shape
    assert DSparkDraft.from_folder(tmp_path).required_features(target).layers == (2, 10, 18, 26, 34, 36)


def test_copies_of_embedding_and_head_are_left_out_where_they_are_the_targets(make_target_folder, tmp_path):
    """DeepSpec saves both; vLLM uses the copies, SGLang the target's own."""
    target = read_target(make_target_folder("qwen3"))
    tensors, draft = read_target_tensors(target), DSparkDraft(make_config())
    module = draft.build(target, tensors, None)
    write_draft(draft, module.state_dict(), target, tmp_path)
    copies = {"embed_tokens.weight": tensors.embedding_VH.clone(), "lm_head.weight": tensors.head_VH.clone()}
    edit_tensors(tmp_path, lambda stored: stored.update(copies))
    DSparkDraft.from_folder(tmp_path).check_target(target)
    again = DSparkDraft.from_folder(tmp_path).build(target, tensors, None)
    assert again.state_dict().keys() == module.state_dict().keys()
    for name, what in (("lm_head.weight", "head"), ("embed_tokens.weight", "embedding")):
        edit_tensors(tmp_path, lambda stored, name=name: stored[name].mul_(1.5))
        with pytest.raises(ArtifactError, match=f"is not the {what} of target"):
            DSparkDraft.from_folder(tmp_path).check_target(target)


def specforge(fields):
    """The heads' fields in ``dflash_config``, under an architecture of their own."""
    nested = (*HEAD_FIELDS, "mask_token_id", "target_layer_ids")
    own = {key: fields[key] for key in nested}
    others = {key: value for key, value in fields.items() if key not in nested}
    more = {"attention_mode": "gqa", "confidence_head_alpha": 1.0, "projector_type": "dspark"}
    return others | {"architectures": ["DSparkDraftModel"], "dflash_config": own | more}


@pytest.mark.parametrize("head", HEADS)
def test_specforges_folder_is_read(tmp_path, head):
    target = make_target(num_layers=36)
    module = export(tmp_path, target, block_size=7, mask_token_id=20, markov_head=head)
    write_fields(tmp_path, specforge(DEEPSPEC | {"markov_head_type": head}))
    assert assert_same_weights(DSparkDraft, tmp_path, module, target).shape == module.shape


def speculators(fields, **changes):
    layer = {key: value for key, value in fields.items() if key not in (*HEAD_FIELDS, "architectures")}
    for key in ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "num_anchors"):
        layer.pop(key)
    return {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in fields["target_layer_ids"]],
        "block_size": fields["block_size"],
        "draft_vocab_size": fields["vocab_size"],
        "mask_token_id": fields["mask_token_id"],
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        "transformer_layer_config": layer,
        **{key: fields[key] for key in HEAD_FIELDS},
    } | changes


@pytest.mark.parametrize("anchor", [True, False, None])
def test_speculators_folder_is_read(tmp_path, anchor):
    """Without a word about its first slot, the slot makes no guess, as in vLLM; in DeepSpec's layout it makes one."""
    target = make_target(num_layers=36)
    module = export(tmp_path, target, block_size=7, mask_token_id=20, sample_from_anchor=bool(anchor))
    write_fields(tmp_path, speculators(DEEPSPEC, sample_from_anchor=anchor))
    draft = DSparkDraft.from_folder(tmp_path)
    assert draft.shape(target) == module.shape.model_copy(update={"num_target_layers": None})
    assert draft.max_draft_tokens == (7 if anchor else 6)


@pytest.mark.parametrize("non_causal", [True, False])
def test_speculators_sliding_layers_are_causal_unless_the_folder_says_otherwise(tmp_path, non_causal):
    target = make_target(num_layers=36)
    export(tmp_path, target, block_size=7, mask_token_id=20)
    sliding = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9}
    write_fields(tmp_path, speculators(DEEPSPEC | sliding, sliding_window_non_causal=non_causal))
    shape = DSparkDraft.from_folder(tmp_path).shape(target)
    assert (shape.windows, shape.causality) == ((9, 9), (not non_causal,) * 2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"draft_vocab_size": 20}, "lacks d2t"),
        (
            {"transformer_layer_config": {"layer_types": ["sliding_attention"] * 2}},
            "sliding_window=None: at least a block, 7, is needed",
        ),
    ],
    ids=str,
)
def test_speculators_folders_that_compute_something_else_are_refused_by_name(tmp_path, changes, reason):
    export(tmp_path, make_target(num_layers=36), block_size=7, mask_token_id=20)
    write_fields(tmp_path, speculators(DEEPSPEC))
    merge_fields(tmp_path, **changes)
    assert_damaged(DSparkDraft, tmp_path, reason)
