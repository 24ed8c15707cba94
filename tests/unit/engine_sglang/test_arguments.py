"""Arguments of SGLang, by version and draft."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from spec_core.errors import ArtifactError, ConfigError
from spec_core.records import FeatureSchema
from spec_core.validation import validate
from spec_engine_sglang import hook
from spec_engine_sglang.arguments import server_arguments
from spec_engine_sglang.config import RESERVED, SPREADING, SglangConfig
from spec_engine_sglang.engine import SglangEngine
from spec_engine_sglang.request_names import Assignment, name_of, read_name
from spec_engine_sglang.serving_format import check_speculation
from spec_kit.hosting import DRAFT_TOKEN_VARIABLE, CaptureMode, PlainMode, SpeculativeMode
from spec_kit.targets.target_reader import read_target

SCHEMA = FeatureSchema(layers=(2,), hidden_size=32, dtype="float32")
CHAIN = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 50}
WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 2048}
BLOCK = {
    "architectures": ["DFlashDraftModel"],
    "layer_types": ["full_attention", "full_attention"],
    "is_causal": False,
    "dflash_config": {"block_size": 8, "mask_token_id": 3, "target_layer_ids": [1]},
}

MARKOV_BLOCK = {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 7,
    "markov_head_type": "rnn",
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1]},
}


@pytest.fixture
def draft(tmp_path):
    def write(fields, **more):
        (tmp_path / "config.json").write_text(json.dumps({**fields, **more}))
        return tmp_path

    return write


def drafting(folder, num_draft_tokens, method="EAGLE3"):
    return SpeculativeMode(folder=folder, method=method, num_draft_tokens=num_draft_tokens, load=1)


@pytest.fixture
def arguments(tiny_llama):
    def of(mode, memory_fraction=None, **config):
        return server_arguments(SglangConfig(**config), read_target(tiny_llama), memory_fraction, mode)

    return of


def test_every_mode_runs_the_target_in_passes_of_batch_tokens(arguments, tiny_llama, draft):
    for mode in (PlainMode(), CaptureMode(SCHEMA), drafting(draft(CHAIN), 3)):
        given = arguments(mode, batch_tokens=512, tensor_parallel=2)
        assert given["model_path"] == str(tiny_llama)
        assert (given["chunked_prefill_size"], given["max_prefill_tokens"], given["tp_size"]) == (512, 512, 2)
        assert given["skip_tokenizer_init"] is True
        assert "mem_fraction_static" not in given


def test_capture_needs_every_row_computed_by_python(arguments):
    given = arguments(CaptureMode(SCHEMA), args={"disable_radix_cache": False, "disable_cuda_graph": False})
    assert given["disable_radix_cache"] is True
    assert given["disable_cuda_graph"] is True
    assert given["enforce_disable_flashinfer_allreduce_fusion"] is True
    assert "speculative_algorithm" not in given


def test_decoding_keeps_what_the_user_sets(arguments):
    given = arguments(PlainMode(), args={"disable_cuda_graph": True, "attention_backend": "triton"})
    assert given["disable_cuda_graph"] is True
    assert given["attention_backend"] == "triton"
    assert "disable_radix_cache" not in given


def test_a_memory_limit_leaves_headroom(arguments):
    assert arguments(PlainMode(), 0.5, headroom=0.2)["mem_fraction_static"] == 0.4
    assert arguments(PlainMode(), 0.5, args={"mem_fraction_static": 0.3})["mem_fraction_static"] == 0.3


def test_a_chain_is_drafted_step_by_step_and_a_block_at_once(arguments, draft):
    chain = arguments(drafting(draft(CHAIN), 3))
    assert chain["speculative_algorithm"] == "EAGLE3"
    assert (chain["speculative_num_steps"], chain["speculative_num_draft_tokens"]) == (3, 4)
    block = arguments(drafting(draft(BLOCK), 7, "DFLASH"))
    assert block["speculative_algorithm"] == "DFLASH"
    assert (block["speculative_num_steps"], block["speculative_num_draft_tokens"]) == (1, 8)
    for given in (chain, block):
        assert given["speculative_eagle_topk"] == 1
        assert Path(given["speculative_draft_model_path"]).is_dir()


@pytest.mark.parametrize("guesses", [7, 3])
def test_a_block_whose_first_slot_guesses_is_as_long_as_what_is_asked_for(arguments, draft, guesses):
    """SGLang takes block_size otherwise, and refuses another number of draft tokens."""
    given = arguments(drafting(draft(MARKOV_BLOCK), guesses, "DSPARK"))
    assert given["speculative_algorithm"] == "DSPARK"
    assert given["speculative_dspark_block_size"] == guesses
    assert (given["speculative_num_steps"], given["speculative_num_draft_tokens"]) == (1, guesses + 1)


def test_the_window_of_a_chain_is_an_argument_without_the_querys_own_position(arguments, draft):
    assert arguments(drafting(draft(CHAIN | WINDOW), 3, "EAGLE3"))["speculative_draft_window_size"] == 2047
    unused = {"layer_types": ["full_attention"], "sliding_window": 2048}
    for fields in (CHAIN, CHAIN | unused, BLOCK | WINDOW):
        assert "speculative_draft_window_size" not in arguments(drafting(draft(fields), 3, "EAGLE3"))


@pytest.mark.parametrize("name", sorted(RESERVED | SPREADING))
def test_arguments_that_the_engine_decides_cannot_be_given(name):
    with pytest.raises(ConfigError, match=f"engine: args: .*{name} cannot be set here"):
        validate(SglangConfig, {"args": {name: 1}}, "engine")


def test_blocks_propose_less_than_their_size(draft):
    folder = draft(BLOCK)
    check_speculation(folder, 7)
    for wrong in (0, 8):
        with pytest.raises(ConfigError, match=rf"{wrong} draft tokens are wanted, .* 1 to 7$"):
            check_speculation(folder, wrong)
    check_speculation(draft(MARKOV_BLOCK), 7)
    with pytest.raises(ConfigError, match=r"8 draft tokens are wanted, .* 1 to 7$"):
        check_speculation(draft(MARKOV_BLOCK), 8)
    with pytest.raises(ConfigError, match="proposes 1 or more"):
        check_speculation(draft(CHAIN), 0)


@pytest.mark.parametrize(
    ("version", "fields", "problem"),
    [
        ("0.5.16", BLOCK | {"is_causal": True}, "is_causal=true with layer_types"),
        ("0.5.16", BLOCK | {"layer_types": ["sliding_attention"] * 2}, "is_causal=false with layer_types"),
        ("0.5.16", CHAIN | {"norm_before_fc": True}, "norm_before_fc=true"),
        ("0.5.16", {"architectures": ["Qwen3_5ForCausalLM"]}, "which SGLang reads from 0.5.17 on"),
        ("0.5.18", BLOCK | {"architectures": ["DFlash2DraftModel"]}, "which SGLang reads from 0.5.19 on"),
        ("0.5.18", MARKOV_BLOCK | {"sample_from_anchor": False}, "which SGLang reads from 0.5.19 on"),
        ("0.5.19", CHAIN | {"image_embeddings": "merged"}, "serves as it was trained from 0.5.20 on"),
        ("0.5.22", CHAIN | WINDOW, "sliding_window=2048, which SGLang has for Eagle3 from 0.5.23 on"),
        ("0.5.23", CHAIN | {"norm_before_residual": True}, "norm_before_residual=true"),
        ("0.5.23", CHAIN | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5, but SGLang rotates"),
    ],
)
def test_drafts_that_an_sglang_reads_otherwise_are_refused(draft, monkeypatch, version, fields, problem):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(ArtifactError, match=problem) as caught:
        check_speculation(draft(fields), 1)
    assert "\n" not in str(caught.value)


def test_switches_of_an_unknown_architecture_are_passed_on(draft, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "0.5.16")
    check_speculation(draft({"architectures": ["Other"], "norm_before_residual": True, "is_causal": True}), 1)


def test_a_newer_sglang_reads_what_an_older_one_does_not(draft, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "0.5.23")
    check_speculation(draft(BLOCK | {"is_causal": True}), 1)
    check_speculation(draft(CHAIN | {"norm_before_fc": True}), 1)
    check_speculation(draft(CHAIN | {"image_embeddings": "merged"}), 1)
    silent = draft(MARKOV_BLOCK, sample_from_anchor=False)
    check_speculation(silent, 6)
    with pytest.raises(ConfigError, match=r"7 draft tokens are wanted, .* 1 to 6$"):
        check_speculation(silent, 7)
    check_speculation(draft({"architectures": ["Qwen3_5ForCausalLM"]}), 1)


@pytest.mark.parametrize(
    ("version", "ok"),
    [("0.5.15", False), ("0.5.16", True), ("0.5.16.post1", True), ("0.5.23", True), ("0.6.0", False)],
)
def test_versions_outside_the_tested_range_are_not_available(monkeypatch, version, ok):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    found = SglangEngine.probe()
    assert found.ok is ok
    assert dict(found.versions) == {"sglang": version}
    assert ok or f"sglang {version} is installed, this engine works with >=0.5.16,<0.5.24" in found.reason


@pytest.mark.parametrize("destinations", [("3", "10"), ()])
def test_names_carry_id_length_and_destinations(destinations):
    assignment = Assignment(request_id=12, num_tokens=345, destinations=destinations)
    assert read_name(name_of(assignment)) == assignment == read_name(name_of(assignment, 17))
    assert name_of(assignment, 1) != name_of(assignment, 2)
    assert read_name("spec-capture-12") is None
    assert read_name("HEALTH_CHECK_spec-capture-1-2-3") is None


def test_a_users_list_of_plugins_is_extended():
    assert "SGLANG_PLUGINS" not in hook.hook_environment("norm", {})
    assert hook.hook_environment("norm", {"SGLANG_PLUGINS": "a,b"})["SGLANG_PLUGINS"] == "a,b,spec-trainer"
    assert hook.update_environment({"SGLANG_PLUGINS": "a"})["SGLANG_PLUGINS"] == "a,spec-trainer"
    assert hook.update_environment({})[DRAFT_TOKEN_VARIABLE]
    (plugin,) = metadata.entry_points(group="sglang.srt.plugins", name=hook.PLUGIN)
    assert plugin.load() is hook.register


def test_everybody_elses_sglang_is_left_alone():
    """The entry point is called in every SGLang of the environment: without our variable it must not even import."""
    code = (
        "import sys, spec_engine_sglang.hook as hook; hook.register();"
        "print([name for name in ('torch', 'sglang', 'spec_core') if name in sys.modules])"
    )
    ours = (hook.NORM_VARIABLE, DRAFT_TOKEN_VARIABLE)
    env = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout == "[]\n"
