"""GGUF files of drafts: what is stored, and each draft or target that llama.cpp would serve wrongly, refused.

That llama.cpp guesses from them as it should, ``tests/engines/test_llamacpp.py`` shows with the real server.
"""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file

from spec_core.errors import ArtifactError, ConfigError
from spec_engine_llamacpp.config import LlamacppConfig
from spec_engine_llamacpp.draft_gguf import write_draft_gguf
from spec_engine_llamacpp.serving import LlamacppServing
from spec_kit.drafting import recognise
from spec_kit.targets import read_target, read_target_tensors
from spec_testing import draw_draft

from ...engines.llamacpp_drafts import RECURRENT
from ...gguf_targets import write_target_gguf
from .conftest import BLOCK, PLAIN


def tensors(file: Path) -> dict[str, gguf.ReaderTensor]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}


@pytest.mark.parametrize(("stored_as", "error"), [("f32", 0), ("f16", 1e-3), ("bf16", 8e-3), ("q8_0", 1e-2)])
def test_matrices_are_stored_as_asked_and_norms_in_float32(
    own_gguf, tiny_llama, draw, tmp_path, stored_as, error
):
    folder = draw("eagle3", **PLAIN)
    write_draft_gguf(folder, read_target(tiny_llama), own_gguf, tmp_path / "draft.gguf", stored_as)
    stored, original = tensors(tmp_path / "draft.gguf"), load_file(folder / "model.safetensors")
    head = stored["output.weight"]
    assert head.tensor_type.name == stored_as.upper()
    expected = original["lm_head.weight"].numpy()
    assert np.abs(dequantize(head.data, head.tensor_type) - expected).max() <= error * np.abs(expected).max()
    norm = stored["blk.0.attn_norm_2.weight"]
    assert norm.tensor_type.name == "F32"
    assert np.array_equal(norm.data, original["midlayer.hidden_norm.weight"].numpy())
    # 48 channels cannot be cut into blocks of 32
    kind = stored["blk.0.ffn_down.weight"].tensor_type.name
    assert kind == ("F16" if stored_as == "q8_0" else stored_as.upper())


def test_a_vocabulary_map_holds_token_ids(own_gguf, tiny_llama, draw, tmp_path):
    folder = draw("eagle3", vocab_size=40, **PLAIN)
    write_draft_gguf(folder, read_target(tiny_llama), own_gguf, tmp_path / "draft.gguf", "f16")
    chosen = load_file(folder / "model.safetensors")["t2d"].nonzero()[:, 0].numpy()
    assert np.array_equal(tensors(tmp_path / "draft.gguf")["d2t"].data, chosen)


@pytest.mark.parametrize("algorithm", ["dflash", "dspark"])
def test_blocks_have_a_head_of_their_own_only_for_a_vocabulary_of_their_own(
    own_gguf, tiny_llama, draw, tmp_path, algorithm
):
    target = read_target(tiny_llama)
    folder = draw(algorithm, vocab_size=40, **BLOCK)
    write_draft_gguf(folder, target, own_gguf, tmp_path / "draft.gguf", "f32")
    stored, original = tensors(tmp_path / "draft.gguf"), load_file(folder / "model.safetensors")
    chosen = original["t2d"].nonzero()[:, 0].numpy()
    assert np.array_equal(stored["d2t"].data, chosen)
    rows = read_target_tensors(target).head_VH.float().numpy()[chosen]
    assert np.array_equal(stored["output.weight"].data, rows)


@pytest.mark.parametrize(
    ("algorithm", "options", "problem"),
    [
        ("eagle3", {}, "EAGLE 3.1's norms"),
        ("eagle3", {"fc_norm": False}, "EAGLE 3.1's norms"),
        ("eagle3", {"num_layers": 2, **PLAIN}, "several layers"),
        ("eagle3", {"layers": (1, 3, 5, 6), **PLAIN}, "exactly 3 layers"),
        ("peagle", {}, "P-EAGLE"),
        ("dflash", {"sliding_window": 8, **BLOCK}, "sliding layers"),
        ("dspark", {"markov_head": "gated", **BLOCK}, "vanilla"),
        ("dflash2", {"selector_top_k": 8, "conv_group_size": 8, **BLOCK}, "selector_top_k"),
    ],
)
def test_what_llamacpp_would_misread_is_refused_in_one_line(
    own_gguf, tiny_llama, draw, tmp_path, algorithm, options, problem
):
    folder = draw(algorithm, **options)
    target, serving = read_target(tiny_llama), LlamacppServing()
    draft = recognise(folder, target)
    with pytest.raises(
        ArtifactError, match=rf"\Adraft {folder} cannot be served by llama.cpp: .*{problem}.*\Z"
    ):
        serving.write(LlamacppConfig(gguf=own_gguf), target, draft, folder, tmp_path / "draft.gguf")
    assert not list(tmp_path.glob("*.gguf*"))
    with pytest.raises(ConfigError, match=r"\A[^\n]+\Z"):
        serving.availability(target, draft)
    with pytest.raises(ArtifactError):
        serving.command(target, draft, folder, 2)


def test_an_mtp_head_with_experts_belongs_into_its_target(own_gguf, make_target, tmp_path):
    experts = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    target = read_target(
        make_target(
            "qwen3_5_moe_text", num_experts_per_tok=2, mtp_num_hidden_layers=1, **experts, **RECURRENT
        )
    )
    folder = draw_draft(tmp_path / "draft", target, 0, "mtp")
    with pytest.raises(ArtifactError, match="--whole-target"):
        write_draft_gguf(folder, target, own_gguf, tmp_path / "draft.gguf", "f16")


def test_an_mtp_head_is_one_more_layer_beside_the_targets_embedding_and_head(make_target, tmp_path):
    """Its own file has a head, as a target's has that ships with one, and so it stands for such a target here."""
    target = read_target(make_target("qwen3_5_text", **RECURRENT))
    folder = draw_draft(tmp_path / "draft", target, 0, "mtp")
    whole = write_target_gguf(target.folder, tmp_path / "target.gguf")
    write_draft_gguf(folder, target, whole, tmp_path / "first.gguf", "f16")
    write_draft_gguf(folder, target, tmp_path / "first.gguf", tmp_path / "draft.gguf", "q8_0")
    reader, stored, own = (
        gguf.GGUFReader(tmp_path / "draft.gguf"),
        tensors(tmp_path / "draft.gguf"),
        tensors(whole),
    )
    for key, expected in {"block_count": 9, "nextn_predict_layers": 1, "ssm.state_size": 16}.items():
        assert reader.get_field(f"qwen35.{key}").contents() == expected
    for name in ("token_embd.weight", "output_norm.weight", "output.weight"):
        assert stored[name].tensor_type == own[name].tensor_type
        assert np.array_equal(stored.pop(name).data, own[name].data)
    assert all(name.startswith("blk.8.") for name in stored)
    head = load_file(folder / "model.safetensors")
    assert len(stored) == len(head)
    norm = head["mtp.pre_fc_norm_hidden.weight"].float().numpy()
    assert np.array_equal(stored["blk.8.nextn.hnorm.weight"].data, norm + 1)
    assert stored["blk.8.nextn.eh_proj.weight"].tensor_type == gguf.GGMLQuantizationType.Q8_0


def test_a_whole_target_and_the_head_of_another_one_are_refused(own_gguf, make_target, tiny_llama, tmp_path):
    target = read_target(make_target("qwen3_5_text", **RECURRENT))
    folder = draw_draft(tmp_path / "draft", target, 0, "mtp")
    whole = write_target_gguf(target.folder, tmp_path / "target.gguf")
    with pytest.raises(ArtifactError, match="beside a target of type qwen3_5_text alone"):
        write_draft_gguf(folder, read_target(tiny_llama), own_gguf, tmp_path / "draft.gguf", "f16")
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"model.norm.weight": torch.ones(target.hidden_size)}, file)
    with pytest.raises(ArtifactError, match="it is a whole target"):
        write_draft_gguf(folder, target, whole, tmp_path / "draft.gguf", "f16")


def test_a_file_that_is_there_stays(own_gguf, tiny_llama, draw, tmp_path):
    output = tmp_path / "draft.gguf"
    output.write_text("mine")
    with pytest.raises(ArtifactError, match=r"cannot be written as .*draft.gguf: .*exists"):
        write_draft_gguf(draw("eagle3", **PLAIN), read_target(tiny_llama), own_gguf, output, "f16")
    assert output.read_text() == "mine"
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_settings_under_names_of_other_projects_are_read(own_gguf, tiny_llama, draw, tmp_path, algorithm):
    folder = draw(algorithm, **(PLAIN if algorithm == "eagle3" else BLOCK))
    target, own, other = read_target(tiny_llama), tmp_path / "own.gguf", tmp_path / "other.gguf"
    fields = json.loads((folder / "config.json").read_text())
    rope = fields["rope_parameters"] = {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}
    (folder / "config.json").write_text(json.dumps(fields))
    write_draft_gguf(folder, target, own_gguf, own, "f32")
    for key in ("rope_parameters", "target_hidden_size", "eagle_aux_hidden_state_layer_ids", "head_dim"):
        fields.pop(key, None)
    fields |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "linear", "factor": 4.0}}
    if algorithm == "eagle3":
        fields["architectures"] = ["LlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(fields))
    write_draft_gguf(folder, target, own_gguf, other, "f32")
    assert other.read_bytes() == own.read_bytes()


def test_causal_blocks_that_only_the_nested_section_names_are_refused(own_gguf, tiny_llama, draw, tmp_path):
    folder = draw("dflash", **BLOCK)
    fields = json.loads((folder / "config.json").read_text())
    del fields["is_causal"]
    fields["dflash_config"]["causal"] = True
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ArtifactError, match="looks back alone inside a block"):
        write_draft_gguf(folder, read_target(tiny_llama), own_gguf, tmp_path / "draft.gguf", "f32")
