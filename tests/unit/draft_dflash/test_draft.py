"""The plugin: what it accepts, captures and builds, and which mask token it takes."""

import json
import math

import pytest
import torch

from spec_core.errors import ConfigError, TargetError
from spec_core.records import Supervision
from spec_core.validation import validate
from spec_draft_dflash.config import DFlashConfig
from spec_draft_dflash.draft import DFlashDraft

from ..draft_parts import make_target, make_tensors

FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("options", "changes", "reason"),
    [
        ({}, {"num_layers": 7}, "too few for 5 different features"),
        ({"num_features": 9}, {}, "too few for 9 different features"),
        ({"layers": (1, 8)}, {}, "must lie between 1 and 7"),
        ({"layers": (0, 3)}, {}, "must lie between 1 and 7"),
        ({}, {"logit_scale": 0.5}, "scaled"),
        ({}, {"head_bias_name": "lm_head.bias"}, "has a bias"),
        ({}, {"norm": "layer"}, "an RMS norm is needed"),
        ({"mask_token_id": 29}, {}, "not below the vocabulary's 29"),
        ({"sliding_window": 15}, {}, "at least a block, 16"),
        ({"layer_types": (SLIDING, FULL)}, {}, "sliding_window=None"),
        ({}, {"rope": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"num_heads": 3}, {}, "no multiple"),
        ({"head_dim": 7}, {}, "an even number is needed"),
    ],
)
def test_refuses_what_it_cannot_express_in_one_line(options, changes, reason):
    with pytest.raises(TargetError, match=reason) as caught:
        DFlashDraft(DFlashConfig(**options)).check_target(make_target(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"layers": (1, 2)}, {"num_layers": 3}),
        ({"num_features": 1}, {"num_layers": 4}),
        ({}, {"norm": "rms_plus_one"}),
        ({}, {"embedding_scale": 8.0}),
        ({}, {"rope": {"rope_theta": 10.0, "partial_rotary_factor": 0.25}}),
        ({"sliding_window": 16}, {}),
        ({"layer_types": (SLIDING, FULL), "sliding_window": 16}, {}),
    ],
)
def test_accepts_what_it_can_express(options, changes):
    DFlashDraft(DFlashConfig(**options)).check_target(make_target(**changes))


@pytest.mark.parametrize(
    "options",
    [
        {"layers": [3, 2]},
        {"layers": [2, 2]},
        {"layers": []},
        {"layers": [1, 2], "num_features": 3},
        {"layer_types": [FULL], "num_layers": 2},
        {"sliding_window": 16, "layer_types": [FULL]},
        {"layer_types": ["chunked"]},
        {"block_size": 1},
        {"num_anchors": 0},
        {"loss": "kl"},
        {"opd": True, "loss": "dpace"},
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_config_errors(options):
    with pytest.raises(ConfigError, match=rf"{next(iter(options))}|disagree"):
        validate(DFlashConfig, options, "test")


@pytest.mark.parametrize(
    ("num_layers", "options", "expected"),
    [
        (36, {}, (2, 10, 18, 26, 34)),
        (28, {}, (2, 8, 14, 20, 26)),
        (8, {}, (2, 3, 4, 5, 6)),
        (36, {"num_features": 1}, (19,)),
        (36, {"num_features": 3}, (2, 18, 34)),
        (94, {}, (2, 25, 47, 69, 92)),  # 23.5 and 68.5 are rounded, to the even 24 and 68
        (36, {"layers": (5, 35)}, (5, 35)),
        (8, {"loss": "soft"}, (2, 3, 4, 5, 6, 8)),
        (8, {"loss": "lk_lambda"}, (2, 3, 4, 5, 6, 8)),
    ],
    ids=str,
)
def test_captures_the_papers_layers_and_the_teacher_only_where_it_is_used(num_layers, options, expected):
    target = make_target(num_layers=num_layers, dtype="bfloat16")
    schema = DFlashDraft(DFlashConfig(**options)).required_features(target)
    assert (schema.layers, schema.hidden_size, schema.dtype) == (expected, 16, "bfloat16")


def test_defaults_are_the_papers_and_the_final_norm_is_scaled():
    target = make_target()
    module = DFlashDraft(DFlashConfig()).build(target, make_tensors(target), None)
    shape = module.shape
    assert (shape.num_layers, shape.block_size, shape.num_features) == (5, 16, 5)
    assert shape.windows == (None,) * 5
    ratio_H = module.norm.weight / make_tensors(target).norm_H
    assert ratio_H.min().item() == pytest.approx(ratio_H.max().item())
    names = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    assert names == shape.tensor_shapes()
    assert DFlashDraft(DFlashConfig()).shard_hints(target).blocks == tuple(f"layers.{i}" for i in range(5))


def write_tokenizer(folder, vocabulary, added=()):
    tokens = [{"id": number, "content": name} for name, number in added]
    text = json.dumps({"model": {"vocab": vocabulary}, "added_tokens": tokens})
    (folder / "tokenizer.json").write_text(text)


WORDS = {f"w{i}": i for i in range(26)}


@pytest.mark.parametrize(
    ("vocabulary", "added", "expected"),
    [
        (WORDS, [("<|MASK|>", 26)], 26),
        (WORDS, [("<|MASK|>", 40)], 28),  # outside the target's vocabulary
        (WORDS, [("<|end|>", 26)], 27),  # the first id behind the tokenizer's
        ({**WORDS, "w26": 26, "w27": 27}, [("<|reserved_special_token_0|>", 28)], 28),
        ({**WORDS, "reserved": 26, "w27": 27, "[unused3]": 28}, [], 28),
        ({**WORDS, "w26": 26, "w27": 27, "w28": 28}, [], 28),
        ([[word, 0.0] for word in WORDS], [], 26),  # Unigram
        (None, [], 28),
    ],
    ids=["own", "own too large", "padded", "reserved", "unused", "full", "unigram", "no tokenizer"],
)
def test_mask_token_is_one_that_nothing_else_uses(tmp_path, vocabulary, added, expected):
    if vocabulary is not None:
        write_tokenizer(tmp_path, vocabulary, added)
    target = make_target(folder=tmp_path, eos_token_ids=(3,))
    module = DFlashDraft(DFlashConfig()).build(target, make_tensors(target), None)
    assert module.shape.mask_token_id == expected


def test_a_mask_token_that_texts_may_have_is_said(tmp_path, caplog):
    write_tokenizer(tmp_path, {**WORDS, "w26": 26, "w27": 27, "SmolWord": 28}, [])
    target = make_target(folder=tmp_path, eos_token_ids=(3,))
    DFlashDraft(DFlashConfig()).build(target, make_tensors(target), None)
    assert "have the token 28, 'SmolWord', which texts may have, too; draft.mask_token_id sets" in caplog.text


def test_mask_token_is_no_end_token():
    target = make_target(eos_token_ids=(28, 27))
    module = DFlashDraft(DFlashConfig()).build(target, make_tensors(target), None)
    assert module.shape.mask_token_id == 26


def test_tokenizer_that_cannot_be_read_is_a_target_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("[]")
    target = make_target(folder=tmp_path)
    with pytest.raises(TargetError, match=r"set draft\.mask_token_id"):
        DFlashDraft(DFlashConfig()).check_target(target)
    DFlashDraft(DFlashConfig(mask_token_id=4)).check_target(target)


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7), (10, 5), (8, 4), (12, 6), (5, 2.5)])
def test_slots_decay_with_the_papers_gamma(block_size, gamma):
    weights = DFlashDraft(DFlashConfig(block_size=block_size)).guess_weights.tolist()
    assert weights == pytest.approx([math.exp(-k / gamma) for k in range(block_size - 1)])
    other = DFlashDraft(DFlashConfig(block_size=block_size, gamma=2.0)).guess_weights
    assert other[1].item() == pytest.approx(math.exp(-0.5))


def test_denominators_are_those_of_the_drawn_slots():
    """Ten anchors of which the last two have fewer slots: 3 · 8 + 2 + 1 slots."""
    whole = [
        Supervision(sample_id=index, epoch=2, seed=9, loss_mask=torch.tensor(mask, dtype=torch.bool))
        for index, mask in enumerate([[1] * 11, [0, 1]])
    ]
    assert DFlashDraft(DFlashConfig(block_size=4, loss="dpace", anchor_share=1)).denominators(
        whole
    ).tolist() == [27]
    weights = [1, math.exp(-0.5), math.exp(-1)]
    expected = 10 * weights[0] + 9 * weights[1] + 8 * weights[2]
    found = DFlashDraft(DFlashConfig(block_size=4, anchor_share=1)).denominators(whole)
    assert (found.dtype, found.tolist()) == (torch.float64, pytest.approx([expected]))
    assert DFlashDraft(DFlashConfig()).denominators([]).tolist() == [0]
