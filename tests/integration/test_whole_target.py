"""A head that a target ships with is trained further, and written into a copy of the target."""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from spec_draft_mtp.config import MtpConfig
from spec_draft_mtp.draft import MtpDraft
from spec_draft_mtp.shape import MtpShape
from spec_kit.layers import cached_attention, rotate
from spec_kit.targets import read_target_tensors
from spec_kit.targets.target_reader import read_target
from spec_testing import TransformersTarget

from ..mtp_targets import CONSTANT, COPIES, random_head

HEAD = "mtp.safetensors"
_FULL: dict[str, object] = {"layer_types": ["full_attention"] * 8}
_ROUTED: dict[str, object] = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
_LATENT: dict[str, object] = {
    "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
KINDS: dict[str, dict[str, object]] = {
    "qwen3_5_text": _FULL,
    "qwen3_5_moe_text": {
        **_FULL,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "deepseek_v3": {**_ROUTED, **_LATENT},
    "glm4_moe": {**_ROUTED, "attention_bias": True, "use_qk_norm": True},
    "glm4_moe_lite": {**_ROUTED, **_LATENT, "n_group": 1},
}


@pytest.fixture(scope="module")
def ship(make_target, tmp_path_factory) -> Callable[[str], Path]:
    """``ship(kind)``: a target in several files, one of which holds its head."""

    def make(kind: str) -> Path:
        bare = make_target(kind, shard_bytes=30_000, dtype="bfloat16", **KINDS[kind])
        folder = shutil.copytree(bare, tmp_path_factory.mktemp("shipped") / "target")
        config = json.loads((folder / "config.json").read_text())
        count = "mtp_num_hidden_layers" if kind.startswith("qwen") else "num_nextn_predict_layers"
        (folder / "config.json").write_text(json.dumps(config | {count: 1}))
        if kind == "qwen3_5_text":
            shapes = MtpShape.for_target(MtpConfig(), read_target(folder)).tensor_shapes()
            generator = torch.Generator().manual_seed(2)
            head = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
            head = {name: tensor.bfloat16() for name, tensor in head.items()}
        else:
            head = random_head(config, torch.bfloat16)
        save_file(head, folder / HEAD)
        index = folder / "model.safetensors.index.json"
        found = json.loads(index.read_text())
        found["weight_map"] |= dict.fromkeys(head, HEAD)
        index.write_text(json.dumps(found))
        return folder

    return make


@pytest.fixture(scope="module")
def shipped(ship) -> Path:
    return ship("qwen3_5_text")


@pytest.fixture(scope="module")
def words(rows_file):
    keys = ["train.steps=4", "train.lr=1e-2", "train.warmup_steps=1", "train.global_batch_tokens=128"]
    return ["--data", str(rows_file), *keys]


RARE = ("qwen3_5_moe_text", "glm4_moe_lite")
"""Kinds whose runs are for each night: each part of their heads is another kind's, too."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind in RARE else []) for kind in KINDS]
)
def test_a_target_is_exported_with_its_trained_head(
    command_line, ship, kind, words, rows_file, tmp_path, monkeypatch
):
    shipped = ship(kind)
    monkeypatch.chdir(tmp_path)
    head_words = ["draft.name=mtp", "draft.num_steps=2", f"draft.init_from={shipped}"]
    assert command_line(*words, "--target", shipped, "--output", tmp_path / "run", *head_words).code == 0
    copy = tmp_path / "copy"
    export = ["export", "--checkpoint", tmp_path / "run" / "checkpoints" / "step-4", "--whole-target"]
    outcome = command_line(*export, "--output", "copy")
    assert (outcome.code, outcome.err) == (0, "")
    trained = load_file(tmp_path / "run" / "draft" / "model.safetensors")
    written = load_file(copy / HEAD)
    old = load_file(shipped / HEAD)
    assert written.keys() == old.keys()
    assert {name for name in old if name not in trained} == {name for name in old if name.endswith(COPIES)}
    assert all(torch.equal(written[name], trained[name]) for name in trained)
    kept = {name for name, tensor in old.items() if torch.equal(written[name], tensor)}
    assert {name for name in old if name.endswith((*COPIES, CONSTANT))} <= kept < old.keys()
    others = {file.name for file in shipped.iterdir()} - {HEAD}
    assert {file.name for file in copy.iterdir()} == others | {HEAD}
    assert all((copy / name).read_bytes() == (shipped / name).read_bytes() for name in others)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []

    assert outcome.out.splitlines()[0] == "draft: copy"
    sglang, vllm = (shlex.split(line) for line in outcome.out.splitlines() if line.startswith("  "))
    algorithm = ["--speculative-algorithm", "NEXTN", "--speculative-draft-model-path", "copy"]
    assert sglang[3:9] == ["--model-path", "copy", *algorithm]
    assert vllm[-3:-1] == ["copy", "--speculative-config"]
    assert json.loads(vllm[-1]) == {"method": "mtp", "model": "copy", "num_speculative_tokens": 2}

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(rows_file.read_text().splitlines(keepends=True)[:3]))
    evaluate = [
        "evaluate", "--target", copy, "--draft-model", copy, "--prompts", prompts, "--max-new-tokens", 8,
    ]  # fmt: skip
    evaluated = command_line(*evaluate, "--json")
    assert evaluated.code == 0
    assert json.loads(evaluated.out)["outputs_equal"]
    again = command_line(*export, "--output", copy)
    assert again.error == f"output {copy} exists; choose a new folder"


def test_a_run_that_leaves_the_targets_own_head_unused_says_so(command_line, shipped, words, tmp_path):
    plan = ["plan", *words, "--target", shipped, "--output", tmp_path / "run", "--json", "draft.name=mtp"]
    new, further = (
        [line for line in json.loads(command_line(*plan, *more).out)["warnings"] if "of its own" in line]
        for more in ([], [f"draft.init_from={shipped}"])
    )
    (line,) = new
    assert line.startswith(
        f"target {shipped} ships with a draft 'mtp' of its own, and this run begins with fresh"
    )
    assert line.endswith(f"set draft.init_from={shipped} to train on from the target's")
    assert further == []


@pytest.mark.skipif(
    not hasattr(MtpModel, "forward_layer"), reason="these Transformers run no layer of a head"
)
@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
@torch.no_grad()
def test_transformers_reads_the_same_head_from_the_targets_files(ship, kind):
    """Its state in front of the head is behind the final norm, too. It gives the head the embedding at position 0,
    which vLLM replaces by zeros: positions from 1 on compare the rest."""
    target = read_target(ship(kind))
    model = AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.float32)
    ids = torch.randint(target.vocab_size, (1, 12), generator=torch.Generator().manual_seed(1))
    hidden = TransformersTarget(target.folder).hidden(ids[0].tolist())[:, -1:]
    model._keys_to_ignore_on_load_unexpected = [
        r"model\.layers\.8\."
    ]  # Transformers knows the layers of large targets
    head = MtpModel.from_pretrained(model, device_map={"": torch.device("cpu")}).float().eval()
    position = torch.arange(1, 12)
    states = model.model(ids).last_hidden_state[:, :-1]
    cache = MtpCache(config=model.config.get_mtp_config())
    expected = head.forward_layer(0, states, position[None], cache, input_ids=ids[:, 1:])[0]

    module = MtpDraft(MtpConfig(init_from=target.folder)).build(target, read_target_tensors(target), None)
    embedded = model.get_input_embeddings()(ids[0, 1:])
    x = module.mtp.join(embedded, module.first_state(hidden[:-1]), position)
    angles = module.rope.angles(position, x.dtype)
    q, k, v, *rest = module.mtp.layer.qkv(x, lambda heads: rotate(heads, angles))
    attended = cached_attention(q, [(k, v)], [len(k)])
    torch.testing.assert_close(
        module.mtp.norm(module.mtp.layer.finish(x, attended, *rest)), expected, rtol=1e-4, atol=1e-5
    )


def test_a_head_without_a_place_in_the_target_is_refused(command_line, shipped, words, tmp_path):
    """A new head of a target that ships with none, and a draft that no target ships with."""
    bare = shutil.copytree(shipped, tmp_path / "bare")
    (bare / HEAD).unlink()
    index = bare / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    found["weight_map"] = {name: file for name, file in found["weight_map"].items() if file != HEAD}
    index.write_text(json.dumps(found))
    for name, problem in (
        ("mtp", f"target {bare} has no MTP head"),
        ("eagle3", "targets ship with no eagle3 draft"),
    ):
        run = tmp_path / name
        assert command_line(*words, "--target", bare, "--output", run, f"draft.name={name}").code == 0
        export = ["export", "--checkpoint", run / "checkpoints" / "step-4", "--output", tmp_path / "copy"]
        error = command_line(*export, "--whole-target").error
        assert problem in error
        assert "/.copy" not in error  # the folder in which the copy is made
        inside = [*export[:-1], bare / "copy", "--whole-target"]
        assert "lies in the target's folder" in command_line(*inside).error
    assert not (bare / "copy").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare", "eagle3", "mtp"]
