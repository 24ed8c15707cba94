"""Heads with experts in targets' own files, in exports, and in a copy of the target."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from spec_core.errors import ArtifactError, ConfigError, TargetError
from spec_draft_mtp.config import MtpConfig
from spec_draft_mtp.draft import MtpDraft
from spec_draft_mtp.stitch import stitch
from spec_kit.drafting import write_draft

from ...docs.recipes import CONFIGS
from ...mtp_targets import CONSTANT, COPIES, KINDS, random_head, write_config
from .cases import target_and_tensors
from .stitched_copy import assert_copied_around_the_head, export, write_in_two_files

LAYERED = [kind for kind in KINDS if kind != "qwen3_5_moe"]
STACKED = "mtp.layers.0.mlp.experts"


def write_target(folder, kind, dtype=torch.bfloat16, head=None, **changes):
    """A target in two files, of which only names matter outside the head."""
    target, tensors = target_and_tensors(folder, dtype="bfloat16")
    fields = write_config(kind, target, **changes)
    head = random_head(fields, dtype) if head is None else head
    write_in_two_files(folder, head)
    return head, target, tensors


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_has_the_targets_names_and_comes_back(kind, tmp_path):
    head, target, tensors = write_target(tmp_path / "target", kind)
    module = export(tmp_path / "head", target, tensors)
    stored = load_file(tmp_path / "head" / "model.safetensors")
    assert stored.keys() == {name for name in head if not name.endswith(COPIES)}
    for name, tensor in stored.items():
        assert tensor.dtype == head[name].dtype
        moved = 0.0 if name.endswith(CONSTANT) else 1.0
        assert torch.equal(tensor, (head[name].float() + moved).to(tensor.dtype))
    again = MtpDraft.from_folder(tmp_path / "head")
    assert again.checkpoint.shape == MtpDraft.from_folder(target.folder).checkpoint.shape
    state = again.build(target, tensors, None).state_dict()
    assert all(
        torch.equal(
            value,
            module.state_dict()[name].to(torch.bfloat16).float()
            if not name.endswith(CONSTANT)
            else module.state_dict()[name],
        )
        for name, value in state.items()
    )
    assert again.serving_methods == MtpDraft.serving_methods
    assert MtpDraft.from_folder(target.folder).serving_methods == {
        **MtpDraft.serving_methods,
        "sglang": "NEXTN",
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_stitched_copy_is_the_target_outside_the_head(kind, tmp_path):
    _, target, tensors = write_target(tmp_path / "target", kind)
    export(tmp_path / "head", target, tensors)
    stitch(target.folder, tmp_path / "head", tmp_path / "copy")
    assert_copied_around_the_head(target.folder, tmp_path / "copy", tmp_path / "head")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", LAYERED)
def test_a_copy_routes_as_the_new_head_that_was_trained(kind, dtype, tmp_path):
    """A new head's constants are zeros, and the target's are near 10."""
    head, target, tensors = write_target(tmp_path / "target", kind)
    head = {name: tensor.to(dtype) if name.endswith(CONSTANT) else tensor for name, tensor in head.items()}
    write_target(tmp_path / "target", kind, head=head)
    draft = MtpDraft(MtpConfig())
    trained = draft.build(target, tensors, None)
    (tmp_path / "head").mkdir()
    write_draft(draft, trained.state_dict(), target, tmp_path / "head")
    stitch(target.folder, tmp_path / "head", tmp_path / "copy")
    copied = load_file(tmp_path / "copy" / "a.safetensors") | load_file(tmp_path / "copy" / "b.safetensors")
    assert [tensor.dtype for name, tensor in copied.items() if name.endswith(CONSTANT)] == [dtype]
    stitched = MtpDraft.from_folder(tmp_path / "copy").build(target, tensors, None)
    for name, tensor in trained.state_dict().items():
        expected = tensor if name.endswith(CONSTANT) else tensor.bfloat16().float()
        assert torch.equal(stitched.state_dict()[name], expected), name


def test_stacked_experts_are_read_and_stitched(tmp_path):
    """Some Qwen targets store the experts stacked."""
    parted, target, tensors = write_target(tmp_path / "parted", "qwen3_5_moe")
    expected = MtpDraft(MtpConfig(init_from=target.folder)).build(target, tensors, None).state_dict()
    experts = range(KINDS["qwen3_5_moe"]["num_experts"])
    head = {name: tensor for name, tensor in parted.items() if ".experts." not in name}
    head[f"{STACKED}.gate_up_proj"] = torch.stack(
        [
            torch.cat([parted[f"{STACKED}.{expert}.{part}_proj.weight"] for part in ("gate", "up")])
            for expert in experts
        ]
    )
    head[f"{STACKED}.down_proj"] = torch.stack(
        [parted[f"{STACKED}.{expert}.down_proj.weight"] for expert in experts]
    )
    _, target, tensors = write_target(tmp_path / "target", "qwen3_5_moe", head=head)
    module = MtpDraft(MtpConfig(init_from=target.folder)).build(target, tensors, None)
    assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())
    export(tmp_path / "head", target, tensors)
    stitch(target.folder, tmp_path / "head", tmp_path / "copy")
    copied = load_file(tmp_path / "copy" / "a.safetensors") | load_file(tmp_path / "copy" / "b.safetensors")
    for name, tensor in head.items():
        assert torch.equal(copied[name], (tensor.float() + 1).bfloat16())


@pytest.mark.parametrize(
    ("kind", "changes", "problem"),
    [
        ("qwen3_5_moe", {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers=2"),
        ("deepseek_v3", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers=2: expected 1"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob=False"),
        ("deepseek_v3", {"q_lora_rank": None}, "q_lora_rank"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False"),
        ("deepseek_v3", {"index_topk": 16}, "index_topk=16"),
        ("deepseek_v3", {"n_group": 3}, "8 experts in 3 groups"),
        ("deepseek_v3", {"n_group": 8}, "8 experts in 8 groups"),
        ("deepseek_v3", {"topk_group": 5}, "3 experts for each token from 5 of 4 groups of 2"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "5 experts for each token from 2 of 4 groups of 2"),
        ("qwen3_5_moe", {"num_experts_per_tok": 6}, "6 experts for each token, of 5"),
        ("glm4_moe", {"n_shared_experts": 1}, "shared_experts.gate_proj.weight has shape"),
        ("glm4_moe", {"attention_bias": False}, "unknown tensors .*k_proj.bias"),
        ("glm4_moe", {"use_qk_norm": False}, "unknown tensors .*k_norm.weight"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(kind, changes, problem, tmp_path):
    _, target, _ = write_target(tmp_path / "target", kind)
    write_config(kind, target, **changes)
    with pytest.raises(ArtifactError, match=problem) as refusal:
        MtpDraft.from_folder(target.folder)
    assert len(str(refusal.value).splitlines()) == 1


def test_a_head_in_fp8_is_refused_with_advice(tmp_path):
    """DeepSeek publishes blocks of fp8 with scales."""
    head, *_ = write_target(tmp_path / "target", "deepseek_v3")
    name = next(name for name in head if name.endswith("experts.0.up_proj.weight"))
    head |= {name: head[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
    write_target(tmp_path / "other", "deepseek_v3", head=head)
    with pytest.raises(
        ArtifactError, match=r"has dtype F8_E4M3, expected .*; convert the target to bfloat16"
    ):
        MtpDraft.from_folder(tmp_path / "other")


@pytest.mark.parametrize(
    "missing", ["experts.7.up_proj.weight", "experts.3.down_proj.weight", "correction_bias"]
)
def test_a_head_that_lacks_a_tensor_is_refused(missing, tmp_path):
    head, *_ = write_target(tmp_path / "target", "deepseek_v3")
    left = {name: tensor for name, tensor in head.items() if not name.endswith(missing)}
    assert len(left) == len(head) - 1
    write_target(tmp_path / "other", "deepseek_v3", head=left)
    with pytest.raises(ArtifactError, match=r"not complete|lacks .*e_score_correction_bias"):
        MtpDraft.from_folder(tmp_path / "other")


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_a_target_of_other_sizes_is_refused(kind, tmp_path):
    _, target, tensors = write_target(tmp_path / "target", kind)
    other = shutil.copytree(target.folder, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 1}))
    wider, _ = target_and_tensors(other)
    draft = MtpDraft(MtpConfig(init_from=target.folder))
    with pytest.raises(TargetError, match=r"experts_per_token=\d, and engines build .* 1$"):
        draft.build(wider, tensors, None)
    (other / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(
        TargetError, match=rf"engines serve such a head only for {KINDS[kind]['architectures'][0]}"
    ):
        draft.build(wider, tensors, None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_with_other_rotary_embeddings_than_the_targets_is_refused(kind, tmp_path):
    """Engines rotate with the target's. The same values may be written in the older form, or as defaults."""
    _, target, tensors = write_target(tmp_path / "target", kind)
    export(tmp_path / "head", target, tensors)
    file = tmp_path / "head" / "config.json"
    fields = json.loads(file.read_text())
    rope = fields.pop("rope_parameters")
    fields |= {"rope_scaling": {"type": "default", "truncate": None, "beta_fast": 32}}
    file.write_text(json.dumps(fields | {"rope_theta": 100}))
    MtpDraft(MtpConfig(init_from=file.parent)).check_target(target)
    changes = {"rope_theta": 50.0} if "kv_lora_rank" in fields else {"partial_rotary_factor": 0.75}
    file.write_text(json.dumps(fields | {"rope_parameters": rope | changes}))
    with pytest.raises(
        TargetError, match=r"(rope_theta=50.0|factor=0.75), and engines build .* (100.0|0.\d+)$"
    ):
        MtpDraft(MtpConfig(init_from=file.parent)).check_target(target)


def test_a_new_head_takes_its_sizes_from_the_target_alone(tmp_path):
    _, target, tensors = write_target(tmp_path / "target", "glm4_moe")
    with pytest.raises(ConfigError, match=r"draft.num_heads=2: a head with experts has the target's sizes"):
        MtpDraft(MtpConfig(num_heads=2)).build(target, tensors, None)
    shape = MtpDraft(MtpConfig()).shape(target)
    assert shape == MtpDraft.from_folder(target.folder).checkpoint.shape


@pytest.mark.parametrize("count", [0, None])
def test_a_target_that_counts_no_mtp_layers_has_no_head(count, tmp_path):
    """Kimi K2 has DeepSeek V3's architecture and no head. A new head for it is the dense one."""
    target, tensors = target_and_tensors(tmp_path / "target", dtype="bfloat16")
    write_config("deepseek_v3", target, model_type="kimi_k2", num_nextn_predict_layers=count)
    assert MtpDraft.from_folder(target.folder) is None
    draft = MtpDraft(MtpConfig())
    assert draft.shape(target).feed_forward == "dense"
    draft.build(target, tensors, None)


def test_the_configs_of_published_targets_describe_their_heads(tmp_path):
    for name, weights in (("deepseek-ai/DeepSeek-V3", 11.5e9), ("zai-org/GLM-4.7-Flash", 0.6e9)):
        fields = {"n_shared_experts": 1, **CONFIGS[name]}
        shape = MtpDraft.shape_type(fields).from_json(fields, tmp_path)
        total = sum(torch.Size(size).numel() for size in shape.tensor_shapes().values())
        assert total == pytest.approx(weights, rel=0.1)
