"""Multi-head latent attention: its sizes, its arithmetic beside transformers', its folder, and what it refuses."""

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

from spec_core.errors import ConfigError, TargetError
from spec_core.target import LatentSizes
from spec_draft_eagle3.config import Eagle3Config
from spec_draft_eagle3.draft import Eagle3Draft
from spec_kit.layers import Rope, rotate

from ..draft_batches import LLAMA3, YARN
from ..draft_folders import (
    assert_damaged,
    assert_same_angles,
    assert_same_weights,
    edit_fields,
    edit_tensors,
    export,
    read_fields,
    rename_tensors,
)
from ..draft_parts import make_target
from . import cases
from .cases import MLA, latent_rope, make_model

DEEPSEEK_V3 = (1536, 512, 128, 64, 128)
SIZES = [key for key in MLA if key != "attention"]


def shape_of(target=None, **options):
    return Eagle3Draft(Eagle3Config(attention="mla", **options)).shape(target or make_target())


def sizes_of(shape):
    return tuple(getattr(shape, key) for key in SIZES)


def test_sizes_are_the_options_else_the_targets_else_those_of_deepseek_v3():
    latent = LatentSizes(q_lora_rank=9, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
    target = make_target(latent=latent)
    assert sizes_of(shape_of()) == DEEPSEEK_V3
    assert sizes_of(shape_of(target)) == (9, 8, 6, 4, 5)
    assert sizes_of(shape_of(target, kv_lora_rank=7, v_head_dim=3)) == (9, 7, 6, 4, 3)
    plain_queries = LatentSizes(
        q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5
    )
    assert sizes_of(shape_of(make_target(latent=plain_queries))) == (1536, 8, 6, 4, 5)
    assert shape_of(target, num_heads=3).num_heads == 3


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 100.0}, YARN], ids=["plain", "yarn"])
def test_the_first_pass_equals_transformers_deepseek_v3(rope):
    """Interleaved pairs, YaRN's temperature and the split of heads are those of the model that engines serve."""
    target = make_target(rope=rope)
    module = make_model(target, Eagle3Config(**MLA))
    ours = module.midlayer.self_attn
    config = DeepseekV3Config(
        hidden_size=2 * target.hidden_size,
        num_attention_heads=target.num_heads,
        num_key_value_heads=target.num_heads,
        max_position_embeddings=target.max_positions,
        rope_parameters=latent_rope(target),
        attn_implementation="eager",
        **{key: MLA[key] for key in SIZES},
    )
    theirs = DeepseekV3Attention(config, 0)
    theirs.o_proj = torch.nn.Linear(4 * MLA["v_head_dim"], target.hidden_size, bias=False)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(1, 13, 2 * target.hidden_size, generator=torch.Generator().manual_seed(3))
    position = torch.arange(13)
    mask = torch.full((13, 13), -torch.inf).triu(1)[None, None]
    expected, _ = theirs(x, DeepseekV3RotaryEmbedding(config)(x, position[None]), mask)
    queries, others = (projection(x[0]) for projection in ours.input_projections)
    angles = module.rope.angles(position, torch.float32)
    k, v = ours.keys_values(others, lambda part: rotate(part, angles))
    heads = ours.queries(queries, lambda part: rotate(part, angles)), k, v
    q, k, v = (part.transpose(0, 1) for part in heads)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
    torch.testing.assert_close(ours.output(attended), expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("rope", "factor", "original"),
    [
        ({"rope_type": "default", "rope_theta": 50.0}, 1.0, 64),
        ({**LLAMA3, "rope_theta": 50.0}, 1.0, 64),
        ({"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}, 1.0, 64),
        ({**YARN, "rope_theta": 50.0}, 4.0, 16),
    ],
    ids=["plain", "llama3", "partial", "yarn"],
)
def test_rotary_embeddings_are_the_targets_yarn_or_its_base_as_yarn_of_factor_one(rope, factor, original):
    """Engines know no other kind here; with factor 1, YaRN rotates as plain embeddings of that base do."""
    shape = shape_of(make_target(rope=rope))
    found = [shape.rope[key] for key in ("rope_type", "factor", "original_max_position_embeddings")]
    assert found == ["yarn", factor, original]
    if factor == 1.0:
        position, plain = torch.arange(64), Rope({"rope_theta": 50.0}, 64, 64)
        got = Rope(shape.rope, shape.head_dim, shape.max_positions).angles(position, torch.float32)
        for ours, expected in zip(got, plain.angles(position, torch.float32), strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
        assert shape.score_scale == 1.0
    else:
        assert shape.score_scale == pytest.approx((1 + 0.1 * torch.tensor(4.0).log().item()) ** 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"attention": "mla", "num_kv_heads": 2},
            "draft.num_kv_heads=2 does not go with draft.attention=mla",
        ),
        ({"attention": "mla", "head_dim": 8}, "draft.head_dim=8 does not go with draft.attention=mla"),
        ({"attention": "mla", "qk_norm": True}, "draft.qk_norm=True does not go with draft.attention=mla"),
        ({"v_head_dim": 8}, "draft.v_head_dim=8 does not go with draft.attention=gqa; remove it, or set"),
    ],
)
def test_sizes_of_the_other_attention_are_refused(options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        Eagle3Draft(Eagle3Config(**options))
    assert "\n" not in str(caught.value)


def test_the_counted_values_are_states_keys_and_values():
    """A value has ``v_head_dim`` channels, fewer than a key."""
    target, draft = make_target(), Eagle3Draft(Eagle3Config(**MLA, num_steps=2, checkpoint_activations=True))
    key, value = MLA["qk_nope_head_dim"] + MLA["qk_rope_head_dim"], MLA["v_head_dim"]
    assert value < key
    cached = target.num_heads * (key + value)
    assert draft.cost(target).saved_values(9, 7) == 7 * 2 * (3 * target.hidden_size + cached)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"v_head_dim": 11}, "v_head_dim=11 exceeds the 10 channels"),
        ({"qk_rope_head_dim": 5}, "an even number is needed"),
    ],
)
def test_sizes_that_no_engine_serves_are_refused(options, message):
    draft = Eagle3Draft(Eagle3Config(**{**MLA, **options}))
    with pytest.raises(TargetError, match=message):
        draft.check_target(make_target())


def test_the_configuration_of_a_draft_with_grouped_queries_is_written_as_before():
    """The identity of a run directory is a digest of it."""
    assert not {"attention", *SIZES} & Eagle3Config().model_dump(mode="json").keys()
    written = Eagle3Config(**MLA).model_dump(mode="json")
    assert {key: written[key] for key in MLA} == MLA


def test_the_folder_has_deepseeks_tensors_and_fields(tmp_path):
    export(cases, tmp_path, make_target(rope=YARN), **MLA, vocab_size=11)
    tensors = load_file(tmp_path / "model.safetensors")
    found = {
        name.removeprefix("midlayer.self_attn."): tuple(tensor.shape)
        for name, tensor in tensors.items()
        if ".self_attn." in name
    }
    assert found == {
        "q_a_proj.weight": (12, 32), "q_a_layernorm.weight": (12,), "q_b_proj.weight": (4 * 10, 12),
        "kv_a_proj_with_mqa.weight": (14, 32), "kv_a_layernorm.weight": (10,),
        "kv_b_proj.weight": (4 * 13, 10), "o_proj.weight": (16, 28),
    }  # fmt: skip
    fields = read_fields(tmp_path)
    expected = {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "draft_vocab_size": 11,
        "fc_norm": True,
        "norm_output": True,
        "norm_before_residual": False,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0,
            "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        **{key: MLA[key] for key in SIZES},
    }  # fmt: skip
    assert {key: fields[key] for key in expected} == expected
    assert "head_dim" not in fields


@pytest.mark.parametrize(("option", "value"), [("attention", "gqa"), ("q_lora_rank", 13)], ids=str)
def test_init_from_refuses_an_option_that_contradicts_it(tmp_path, option, value):
    export(cases, tmp_path, **MLA)
    with pytest.raises(ConfigError, match=f"draft.{option}="):
        Eagle3Draft(Eagle3Config(init_from=tmp_path, **{option: value}))


def test_published_variants_are_read(tmp_path):
    """Kimi's have the first layer by its number, the older form of rotary embeddings, and another head_dim."""
    target = make_target(rope=YARN)
    module = export(cases, tmp_path, target, **MLA)
    rename_tensors(tmp_path, lambda name: name.replace("midlayer.", "layers.0."))
    scaling = {
        key: value for key, value in module.shape.rope.items() if key not in ("rope_type", "rope_theta")
    }
    edit_fields(
        tmp_path,
        architectures=["Eagle3DeepseekV3ForCausalLM"],
        model_type="kimi_k2",
        head_dim=10,
        num_key_value_heads=1,
        rope_parameters=None,
        rope_scaling={"type": "yarn", **scaling},
    )
    again = assert_same_weights(Eagle3Draft, tmp_path, module, target)
    assert_same_angles(again, module)
    assert again.shape.score_scale == module.shape.score_scale


def test_plain_rotary_embeddings_of_a_folder_are_written_as_yarn_of_factor_one(tmp_path):
    target = make_target()
    export(cases, tmp_path, target, **MLA)
    written = read_fields(tmp_path)
    edit_fields(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 100.0}, rope_scaling=None)
    draft = Eagle3Draft.from_folder(tmp_path)
    assert draft.shape(target).rope == {"rope_type": "default", "rope_theta": 100.0}
    assert draft.exported_config(target) == written


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"q_lora_rank": None}, "q_lora_rank=None, expected a valid integer"),
        ({"qk_rope_head_dim": None}, "qk_rope_head_dim=None"),
        ({"qk_rope_head_dim": "wide"}, "='wide', expected a valid integer"),
        ({"kv_lora_rank": 11}, "config.json says"),
        ({"rope_interleave": False}, "rope_interleave=False: expected True"),
        ({"index_topk": 8}, "index_topk=8: expected no such field"),
        ({"rope_parameters": LLAMA3}, "'llama3': expected default or yarn for latent attention"),
        ({"rope_parameters": {**YARN, "factor": None}}, "yarn without factor"),
        ({"rope_parameters": {**YARN, "attention_factor": 1.0}}, "attention_factor=1.0 of rotary embeddings"),
        ({"rope_parameters": {**YARN, "truncate": False}}, "truncate=False of rotary embeddings"),
        ({"rope_parameters": {**YARN, "mscale": 0.7}}, "mscale=0.7 without mscale_all_dim"),
        ({"norm_before_fc": True}, "norm_before_fc=True: expected False"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 of rotary embeddings"),
    ],
)
def test_config_that_cannot_be_followed_is_an_artifact_error(tmp_path, changes, reason):
    export(cases, tmp_path, **MLA)
    edit_fields(tmp_path, **changes)
    assert_damaged(Eagle3Draft, tmp_path, reason)


def test_tensors_of_grouped_queries_are_an_artifact_error(tmp_path):
    export(cases, tmp_path, **MLA)
    edit_tensors(
        tmp_path, lambda tensors: tensors.update({"midlayer.self_attn.q_proj.weight": torch.zeros(2)})
    )
    assert_damaged(Eagle3Draft, tmp_path, "unknown tensors midlayer.self_attn.q_proj.weight")
