"""Heads in a target's own files, in exports, and in a copy of the target."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_core.errors import ArtifactError, TargetError
from spec_draft_mtp.config import MtpConfig
from spec_draft_mtp.draft import MtpDraft
from spec_draft_mtp.shape import MtpShape
from spec_draft_mtp.stitch import stitch
from spec_testing.toy_target import toy_target

from .cases import SIZES, target_and_tensors
from .stitched_copy import assert_copied_around_the_head, export, write_in_two_files

ROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 0, 0], "mrope_interleaved": True}
TEXT = {
    "model_type": "qwen3_5_text", "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 29, "rms_norm_eps": 1e-6, "rope_parameters": ROPE,
    "attn_output_gate": True, "mtp_num_hidden_layers": 1,
}  # fmt: skip


def write_target(folder, **changes):
    """A multimodal Qwen3.5 in two files, of which only names matter outside the head."""
    folder.mkdir()
    target = toy_target(folder, **SIZES, vocab_size=29)
    shapes = MtpShape.for_target(MtpConfig(), target).tensor_shapes()
    generator = torch.Generator().manual_seed(1)
    head = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    write_in_two_files(folder, head)
    text = {**TEXT, **changes}
    fields = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    return head


def test_a_targets_own_head_is_read_from_its_files(tmp_path):
    head = write_target(tmp_path / "target")
    target, tensors = target_and_tensors(tmp_path / "target", norm="rms_plus_one")
    draft = MtpDraft(MtpConfig(init_from=tmp_path / "target"))
    state = draft.build(target, tensors, None).state_dict()
    assert state.keys() == head.keys()
    assert all(torch.equal(state[name], tensor.float()) for name, tensor in head.items())


def test_a_quarter_of_the_channels_is_rotated_where_the_target_does_not_say(tmp_path):
    write_target(tmp_path / "target")
    draft = MtpDraft.from_folder(tmp_path / "target")
    assert draft.checkpoint.shape.rope["partial_rotary_factor"] == 0.25


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers=2"),
        ({"attn_output_gate": False}, "attn_output_gate=False"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings=True"),
        ({"num_attention_heads": 8}, "o_proj"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(changes, problem, tmp_path):
    write_target(tmp_path / "target", **changes)
    with pytest.raises(ArtifactError, match=problem):
        MtpDraft.from_folder(tmp_path / "target")


@pytest.mark.parametrize(("name", "value"), [("intermediate_size", 32), ("num_kv_heads", 4)])
def test_sizes_that_are_not_the_targets_are_refused(name, value, tmp_path):
    """vLLM cuts such a head to the target's sizes, and guesses badly."""
    target, tensors = target_and_tensors(tmp_path)
    draft = MtpDraft(MtpConfig(**{name: value}))
    with pytest.raises(TargetError, match=rf"{name}={value}, and engines build .* {SIZES[name]}"):
        draft.build(target, tensors, None)


def test_a_head_of_a_target_of_other_sizes_is_refused(tmp_path):
    write_target(tmp_path / "target")
    wider, tensors = target_and_tensors(tmp_path / "wider", intermediate_size=32)
    with pytest.raises(TargetError, match=r"intermediate_size=24, and engines build .* 32"):
        MtpDraft(MtpConfig(init_from=tmp_path / "target")).build(wider, tensors, None)


def test_a_target_without_a_head_is_no_draft(tmp_path):
    write_target(tmp_path / "target", mtp_num_hidden_layers=None)
    (tmp_path / "target" / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    assert MtpDraft.from_folder(tmp_path / "target") is None


def test_a_stitched_copy_is_the_target_outside_the_head(tmp_path):
    write_target(tmp_path / "target")
    export(tmp_path / "head", *target_and_tensors(tmp_path / "target", dtype="bfloat16"))
    stitch(tmp_path / "target", tmp_path / "head", tmp_path / "copy")
    assert_copied_around_the_head(tmp_path / "target", tmp_path / "copy", tmp_path / "head")
    assert MtpDraft.from_folder(tmp_path / "copy") is not None


def test_a_head_of_another_dtype_is_refused_before_anything_is_written(tmp_path):
    write_target(tmp_path / "target")
    (tmp_path / "head").mkdir()
    stored = {
        name: tensor.float() for name, tensor in load_file(tmp_path / "target" / "a.safetensors").items()
    }
    save_file(stored, tmp_path / "head" / "model.safetensors")
    with pytest.raises(ArtifactError, match="does not fit"):
        stitch(tmp_path / "target", tmp_path / "head", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
