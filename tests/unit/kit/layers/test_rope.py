"""Rotary frequencies are those of transformers, and the application is the textbook one."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from spec_kit.layers import Rope, rotate
from spec_kit.layers.rope import inverse_frequencies
from spec_kit.targets.rope_parameters import rope_problem

from ...draft_batches import transformers_rope

HEAD_DIM, MAX_POSITIONS = 64, 131072

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "partial": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
    "linear, partial": {
        "rope_type": "linear",
        "rope_theta": 1e4,
        "factor": 4.0,
        "partial_rotary_factor": 0.5,
    },
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    "yarn, all fields": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096,
        "beta_fast": 16, "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False,
    },
    "yarn, attention factor": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 2.0,
        "attention_factor": 1.3,
        "original_max_position_embeddings": 4096,
    },
    "yarn below one": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 0.5,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip


def make_rope(parameters):
    return Rope(parameters, HEAD_DIM, MAX_POSITIONS)


@pytest.mark.parametrize("parameters", ROPES.values(), ids=ROPES.keys())
def test_angles_are_those_of_transformers(parameters):
    rope = make_rope(parameters)
    inv_freq, scale = transformers_rope(parameters, HEAD_DIM, MAX_POSITIONS)
    frequency = inverse_frequencies(parameters, 2 * len(inv_freq), MAX_POSITIONS)
    torch.testing.assert_close(frequency, inv_freq, rtol=3e-7, atol=0)
    position_T = torch.tensor([0, 1, 17, 4095, 100_000])
    cos, sin = rope.angles(position_T, torch.float32)
    angle = position_T[:, None].float() * inv_freq
    torch.testing.assert_close(cos[:, 0], angle.cos() * scale, rtol=0, atol=1e-6)
    torch.testing.assert_close(sin[:, 0], angle.sin() * scale, rtol=0, atol=1e-6)


def test_rotation_is_that_of_transformers():
    rope = make_rope(ROPES["default"])
    torch.manual_seed(0)
    heads_TND = torch.randn(7, 4, 64)
    angles = rope.angles(torch.arange(3, 10), torch.float32)
    cos, sin = (torch.cat([part, part], -1).transpose(0, 1) for part in angles)
    expected, _ = apply_rotary_pos_emb(
        heads_TND.transpose(0, 1)[None], heads_TND.transpose(0, 1)[None], cos, sin
    )
    torch.testing.assert_close(rotate(heads_TND, angles), expected[0].transpose(0, 1))


def test_partial_rotation_leaves_the_other_channels():
    rope = make_rope(ROPES["partial"])
    heads_TND = torch.randn(5, 2, 64)
    turned = rotate(heads_TND, rope.angles(torch.arange(5), torch.float32))
    assert torch.equal(turned[..., 16:], heads_TND[..., 16:])
    assert not torch.equal(turned[..., :16], heads_TND[..., :16])


def test_casting_the_draft_does_not_round_the_frequencies():
    rope = make_rope(ROPES["default"])
    position_T = torch.tensor([30_001])
    exact, _ = rope.angles(position_T, torch.float32)
    half, _ = rope.angles(position_T, torch.bfloat16)
    torch.testing.assert_close(half, exact.bfloat16())


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic' is not supported"),
        ({"rope_type": "longrope", "factor": 2.0}, "'longrope' is not supported"),
        ({"rope_type": "linear"}, "lacks factor"),
        ({"rope_type": "llama3", "factor": 2.0}, "lacks low_freq_factor"),
        ({"full_attention": {"rope_theta": 1e6}}, "differ between layer types"),
        ({"partial_rotary_factor": 0.33}, "an even number is needed"),
    ],
)
def test_what_cannot_be_copied_is_named(parameters, reason):
    assert reason in rope_problem(parameters, HEAD_DIM)
