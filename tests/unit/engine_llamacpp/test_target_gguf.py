"""GGUF files of targets: which one a draft's file is for, and those that llama.cpp would serve wrongly, refused."""

import shlex
from dataclasses import replace

import gguf
import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from spec_core.errors import ArtifactError, ConfigError, TargetError
from spec_engine_llamacpp.config import LlamacppConfig
from spec_engine_llamacpp.draft_gguf import write_draft_gguf
from spec_engine_llamacpp.serving import LlamacppServing
from spec_engine_llamacpp.serving_format import WITH_CAPTURE
from spec_kit.drafting import recognise
from spec_kit.targets import read_target
from spec_testing import draw_draft
from spec_trainer.run.serving import serving_commands

from ...gguf_targets import LLAMA3, write_target_gguf
from .conftest import BLOCK, PLAIN

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("algorithm", "rope", "served"),
    [("eagle3", LLAMA3, True), ("eagle3", YARN, False), ("dflash", LLAMA3, False), ("dflash", YARN, False)],
)
def test_a_target_whose_rotary_embeddings_llamacpp_computes_otherwise_is_refused(
    make_target, tmp_path, algorithm, rope, served
):
    """The export itself is no failure: other engines serve it."""
    target = read_target(make_target("llama", rope_parameters=rope))
    options = PLAIN if algorithm == "eagle3" else BLOCK
    folder = draw_draft(tmp_path / "draft", target, 0, algorithm, **options)
    draft, serving = recognise(folder, target), LlamacppServing()
    serving.check_export(target, draft, folder)
    if served:
        serving.availability(target, draft)
        assert "draft-eagle3" in serving.command(target, draft, folder, 3)
    else:
        with pytest.raises(ConfigError, match="rotary embeddings"):
            serving.availability(target, draft)
        with pytest.raises(ArtifactError, match="rotary embeddings"):
            serving.command(target, draft, folder, 3)


def test_types_of_targets_have_the_names_of_both_programs():
    assert WITH_CAPTURE.keys() <= CONFIG_MAPPING_NAMES.keys()
    assert set(WITH_CAPTURE.values()) <= set(gguf.MODEL_ARCH_NAMES.values())


@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt2"])
def test_a_target_without_capture_points_is_refused(own_gguf, tiny_llama, draw, tmp_path, model_type):
    assert model_type not in WITH_CAPTURE
    target = replace(read_target(tiny_llama), model_type=model_type)
    with pytest.raises(ArtifactError, match="captures no layers of a target of this type"):
        write_draft_gguf(draw("eagle3", **PLAIN), target, own_gguf, tmp_path / "draft.gguf", "f16")


@pytest.mark.parametrize(
    ("shape", "config", "problem"),
    [
        ("qwen3", {}, "architecture qwen3"),
        ("llama", {"num_hidden_layers": 9}, "number of layers 9"),
        ("llama", {"hidden_size": 64}, "width 64"),
        ("llama", {"vocab_size": 98}, "vocabulary size 98"),
    ],
)
def test_a_target_of_other_sizes_is_refused(make_target, tiny_llama, draw, tmp_path, shape, config, problem):
    other = write_target_gguf(make_target(shape, **config), tmp_path / "other.gguf")
    with pytest.raises(TargetError, match=rf"\A[^\n]*{problem}[^\n]*convert this folder to GGUF\Z"):
        write_draft_gguf(
            draw("eagle3", **PLAIN), read_target(tiny_llama), other, tmp_path / "draft.gguf", "f16"
        )
    assert not (tmp_path / "draft.gguf").exists()


@pytest.mark.parametrize(
    ("tensor", "what"), [("token_embd.weight", "embedding"), ("output_norm.weight", "final norm")]
)
def test_a_target_of_other_weights_is_refused(tiny_llama, draw, tmp_path, tensor, what):
    other = write_target_gguf(tiny_llama, tmp_path / "other.gguf")
    (values,) = (t.data for t in gguf.GGUFReader(other, "r+").tensors if t.name == tensor)
    values[:] = values[::-1].copy()
    values.flush()
    with pytest.raises(TargetError, match=rf"\Atarget .* has another {what} than target [^\n]*\Z"):
        write_draft_gguf(
            draw("eagle3", **PLAIN), read_target(tiny_llama), other, tmp_path / "draft.gguf", "f16"
        )


@pytest.mark.parametrize("share", [0, 0.001, 0.01, 0.5, 0.999])
def test_a_target_that_is_cut_off_ends_in_one_line(own_gguf, tiny_llama, draw, tmp_path, share):
    cut, content = tmp_path / "cut.gguf", own_gguf.read_bytes()
    cut.write_bytes(content[: int(share * len(content))])
    with pytest.raises(
        TargetError,
        match=r"\Atarget .*cut.gguf is no complete GGUF file \(convert or download it anew\): [^\n]+\Z",
    ):
        write_draft_gguf(
            draw("eagle3", **PLAIN), read_target(tiny_llama), cut, tmp_path / "draft.gguf", "f16"
        )


def test_the_targets_file_is_the_only_one_in_its_folder_or_named(tiny_llama, own_gguf, draw, tmp_path):
    target, serving = read_target(tiny_llama), LlamacppServing()
    folder = draw("eagle3", **PLAIN)
    draft = recognise(folder, target)
    for config, problem in (
        (LlamacppConfig(), "has 0 GGUF files; set engine.gguf"),
        (LlamacppConfig(gguf=tmp_path / "none.gguf"), "engine.gguf=.*none.gguf: there is no such file"),
    ):
        with pytest.raises(ConfigError, match=problem):
            serving.write(config, target, draft, folder, tmp_path / "draft.gguf")


def test_the_printed_command_names_the_targets_file_that_the_engine_was_given(tiny_llama, own_gguf, draw):
    target = read_target(tiny_llama)
    folder = draw("eagle3", **PLAIN)
    draft = recognise(folder, target)
    for own, file in ((None, "TARGET.gguf"), (LlamacppConfig(name="llamacpp", gguf=own_gguf), str(own_gguf))):
        words = shlex.split(serving_commands(target, draft, folder, 2, own)["llamacpp"])
        assert f"engine.gguf={file}" in words
        assert words[words.index("-m") + 1] == file
