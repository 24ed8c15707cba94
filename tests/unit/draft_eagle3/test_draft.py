"""The plugin: what it accepts, captures, builds and starts from."""

import pytest
import torch

from spec_core.errors import ConfigError, TargetError
from spec_core.validation import validate
from spec_draft_eagle3.config import Eagle3Config
from spec_draft_eagle3.draft import Eagle3Draft

from ..draft_batches import random_documents, step_arguments
from ..draft_parts import make_target, make_tensors


@pytest.mark.parametrize(
    ("options", "changes", "reason"),
    [
        ({}, {"num_layers": 6}, "at least 7 are needed"),
        ({"layers": (1, 8)}, {}, "must lie between 1 and 7"),
        ({"layers": (0, 3)}, {}, "must lie between 1 and 7"),
        ({}, {"head_bias_name": "lm_head.bias"}, "has a bias"),
        ({}, {"norm": "layer"}, "an RMS norm is needed"),
        ({"vocab_size": 30}, {}, "exceeds the target's 29"),
        ({}, {"rope": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"num_heads": 3}, {}, "no multiple"),
    ],
)
def test_refuses_what_it_cannot_express_in_one_line(options, changes, reason):
    with pytest.raises(TargetError, match=reason) as caught:
        Eagle3Draft(Eagle3Config(**options)).check_target(make_target(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"layers": (1, 2)}, {"num_layers": 3}),
        ({}, {"norm": "rms_plus_one"}),
        ({}, {"hidden_act": "gelu"}),
        ({"vocab_size": 29}, {}),
    ],
)
def test_accepts_what_it_can_express(options, changes):
    Eagle3Draft(Eagle3Config(**options)).check_target(make_target(**changes))


def test_vocabulary_must_hold_the_end_tokens():
    with pytest.raises(ConfigError, match="raise it"):
        Eagle3Draft(Eagle3Config(vocab_size=2)).check_target(make_target(eos_token_ids=(3, 4, 5)))


@pytest.mark.parametrize("layers", [[3, 2], [2, 2], []])
def test_layers_must_ascend(layers):
    with pytest.raises(ConfigError, match="layers"):
        validate(Eagle3Config, {"layers": layers}, "test")


@pytest.mark.parametrize(
    ("num_layers", "layers", "expected"),
    [(7, None, (2, 3, 4, 7)), (36, None, (2, 18, 33, 36)), (8, (1, 5), (1, 5, 8))],
)
def test_captures_the_layers_and_the_input_of_the_final_norm(num_layers, layers, expected):
    target = make_target(num_layers=num_layers, dtype="bfloat16")
    schema = Eagle3Draft(Eagle3Config(layers=layers)).required_features(target)
    assert (schema.layers, schema.hidden_size, schema.dtype) == (expected, 16, "bfloat16")


def test_the_head_starts_as_the_targets_and_the_final_norm_in_proportion_to_it():
    target = make_target(logit_scale=0.5)
    counts = torch.arange(29)
    module = Eagle3Draft(Eagle3Config(vocab_size=4)).build(target, make_tensors(target), counts)
    assert module.ids_V.tolist() == [3, 26, 27, 28]
    assert torch.equal(module.lm_head.weight, 0.5 * make_tensors(target).head_VH[[3, 26, 27, 28]])
    ratio_H = module.norm.weight / make_tensors(target).norm_H
    assert ratio_H.min().item() == pytest.approx(ratio_H.max().item())


def test_buffers_are_the_vocabulary_mapping_only():
    target = make_target()
    reduced = Eagle3Draft(Eagle3Config(vocab_size=4)).build(target, make_tensors(target), None)
    full = Eagle3Draft(Eagle3Config(vocab_size=29)).build(target, make_tensors(target), None)
    assert [name for name, _ in reduced.named_buffers()] == ["d2t", "t2d"]
    assert not list(full.named_buffers())
    assert all(p.dtype == torch.float32 and p.requires_grad for p in full.parameters())


def test_overridden_sizes_are_used():
    options = {"intermediate_size": 40, "num_heads": 6, "num_kv_heads": 3, "head_dim": 4, "layers": (1, 2)}
    target, config = make_target(), Eagle3Config(num_steps=2, **options)
    module = Eagle3Draft(config).build(target, make_tensors(target), None)
    assert module.midlayer.self_attn.q_proj.weight.shape == (24, 32)
    assert module.midlayer.self_attn.k_proj.weight.shape == (12, 32)
    assert module.midlayer.mlp.up_proj.weight.shape == (40, 16)
    assert module.fc.weight.shape == (16, 32)
    documents = random_documents(target, [9], seed=1, num_states=3)
    output = module(*step_arguments(Eagle3Draft(config), target, documents))
    assert output.loss.item() > 0
