"""Arguments of vLLM, read from the words themselves."""

import json
from pathlib import Path

import pytest

from spec_backend_cpu.backend import CpuBackend
from spec_core import EngineContext
from spec_core.errors import ConfigError
from spec_core.records import Capabilities, FeatureSchema
from spec_core.validation import validate
from spec_engine_vllm.arguments import CAPTURE_ENVIRONMENT, engine_arguments
from spec_engine_vllm.config import VllmConfig
from spec_kit.hosting import CaptureMode, PlainMode, SpeculativeMode
from spec_kit.targets.target_reader import read_target

CAPTURING = CaptureMode(FeatureSchema(layers=(2, 4, 8), hidden_size=32, dtype="float32"))


class GraphBackend(CpuBackend):
    """A device that captures graphs and enforces memory limits."""

    @classmethod
    def capabilities(cls) -> Capabilities:
        return Capabilities(graph_capture=True, memory_limit=True, device_bytes=50)


@pytest.fixture
def target(tiny_llama):
    return read_target(tiny_llama)


def context(backend_type=CpuBackend, **around) -> EngineContext:
    return EngineContext(backend=backend_type(CpuBackend.Config()), **around)


def drafting(load=1, **changes) -> SpeculativeMode:
    return SpeculativeMode(
        **{"folder": Path("d"), "method": "eagle3", "num_draft_tokens": 3, **changes}, load=load
    )


def test_capturing_takes_the_schemas_layers_and_our_connector(target) -> None:
    arguments = engine_arguments(VllmConfig(batch_tokens=64), target, context(), CAPTURING)
    speculative = arguments["speculative_config"]
    assert speculative["method"] == "extract_hidden_states"
    assert speculative["draft_model_config"]["hf_config"] == {"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}
    transfer = arguments["kv_transfer_config"]
    assert (transfer["kv_connector"], transfer["kv_role"]) == ("CaptureConnector", "kv_producer")
    connector = (
        Path(__file__).parents[3]
        / "packages/engine-vllm/src"
        / transfer["kv_connector_module_path"].replace(".", "/")
    )
    assert "class CaptureConnector(" in connector.with_suffix(".py").read_text()


def test_capturing_leaves_the_extractor_two_positions_after_the_longest_sample(target) -> None:
    def length(**config) -> int:
        return engine_arguments(VllmConfig(**config), target, context(), CAPTURING)["max_model_len"]

    assert length(batch_tokens=64) == 64 + 2  # no sample is longer than a batch
    assert length(batch_tokens=8192) == target.max_positions + 2
    assert length(batch_tokens=64, max_model_len=100) == 100 + 2
    assert CAPTURE_ENVIRONMENT["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] == "1"


def test_decoding_goes_as_far_as_the_target(target) -> None:
    for mode in (PlainMode(), drafting()):
        arguments = engine_arguments(VllmConfig(batch_tokens=64), target, context(), mode)
        assert arguments["max_model_len"] == target.max_positions
        assert "kv_transfer_config" not in arguments


def test_drafting_names_folder_method_and_tokens(target) -> None:
    config = VllmConfig(draft_args={"attention_backend": "FLASH_ATTN"})
    assert engine_arguments(config, target, context(), drafting())["speculative_config"] == {
        "attention_backend": "FLASH_ATTN",
        "method": "eagle3",
        "model": "d",
        "num_speculative_tokens": 3,
    }


@pytest.mark.parametrize(
    ("fields", "is_parallel"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, False),
        ({"architectures": ["LlamaForCausalLMEagle3"], "pard_token": 0}, True),
        ({"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 5}, True),
        ({"architectures": ["LlamaForCausalLMEagle3"], "dflash_config": {"mask_token_id": 5}}, True),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": 5}}, False),
        ({"architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle"}, True),
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, False),
    ],
    ids=str,
)
def test_a_chain_that_guesses_all_tokens_at_once_is_told_so(target, tmp_path, fields, is_parallel) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    given = engine_arguments(VllmConfig(), target, context(), drafting(folder=tmp_path))
    assert given["speculative_config"].get("parallel_drafting", False) == is_parallel


def test_a_mode_changes_with_all_that_a_restart_is_needed_for() -> None:
    assert drafting() == drafting()
    others = [
        drafting(num_draft_tokens=4),
        drafting(load=2),
        drafting(folder=Path("e")),
        PlainMode(),
        CAPTURING,
    ]
    assert all(drafting() != other for other in others)


def test_memory_and_graphs_follow_the_hardware(target) -> None:
    def arguments(context: EngineContext, **config):
        return engine_arguments(VllmConfig(**config), target, context, PlainMode())

    unlimited = arguments(context())
    assert (unlimited["kv_cache_memory_bytes"], unlimited["enforce_eager"]) == (1 << 30, True)
    limited = arguments(context(GraphBackend, memory_fraction=0.4))
    assert (limited["gpu_memory_utilization"], limited["enforce_eager"]) == (0.4, False)
    assert "kv_cache_memory_bytes" not in limited
    assert "gpu_memory_utilization" not in arguments(context(GraphBackend))
    named = arguments(context(GraphBackend), kv_cache_bytes=5)
    assert (named["kv_cache_memory_bytes"], named["gpu_memory_utilization"]) == (5, 0.1)
    both = arguments(context(GraphBackend, memory_fraction=0.4), kv_cache_bytes=5)
    assert (both["kv_cache_memory_bytes"], both["gpu_memory_utilization"]) == (5, 0.4)
    assert arguments(context(GraphBackend), enforce_eager=True)["enforce_eager"] is True


def test_further_arguments_are_handed_on_and_never_override_ours(target) -> None:
    config = validate(VllmConfig, {"args": {"max_num_seqs": 3, "block_size": 32}}, "engine")
    arguments = engine_arguments(config, target, context(), PlainMode())
    assert (arguments["max_num_seqs"], arguments["block_size"]) == (3, 32)
    with pytest.raises(ConfigError, match="model cannot be set here"):
        validate(VllmConfig, {"args": {"model": "other"}}, "engine")
    with pytest.raises(ConfigError, match="method cannot be set here"):
        validate(VllmConfig, {"draft_args": {"method": "other"}}, "engine")


def test_a_pipeline_is_refused_with_the_reason() -> None:
    """vLLM's last stage alone would have the states, and not those of the layers before."""
    for name in ("pipeline_parallel_size", "decode_context_parallel_size"):
        words = rf"^engine: args: .*{name} cannot be set here: one process must hold .* use engine.tensor_parallel"
        with pytest.raises(ConfigError, match=words):
            validate(VllmConfig, {"args": {name: 2}}, "engine")


def test_every_argument_of_ours_is_reserved_or_a_default(target) -> None:
    from spec_engine_vllm.config import RESERVED

    full = VllmConfig(kv_cache_bytes=1)
    for mode in (PlainMode(), drafting(), CAPTURING):
        ours = engine_arguments(full, target, context(GraphBackend, memory_fraction=0.5), mode).keys()
        assert ours - RESERVED - {"max_num_seqs", "max_cudagraph_capture_size"} == {"enable_prefix_caching"}


def test_fewer_answers_run_at_once_where_logits_of_guesses_would_be_large(target) -> None:
    plain, *others = (
        engine_arguments(VllmConfig(), target, context(), mode)
        for mode in (PlainMode(), drafting(), CAPTURING)
    )
    assert "max_num_seqs" not in plain
    assert [arguments["max_num_seqs"] for arguments in others] == [256, 256]
    assert [arguments["disable_log_stats"] for arguments in (plain, *others)] == [True, False, True]


def test_no_more_answers_run_at_once_than_graphs_cover(target) -> None:
    def most(**config) -> int | None:
        config = VllmConfig(**config)
        return engine_arguments(config, target, context(GraphBackend), PlainMode()).get("max_num_seqs")

    assert most() == 512
    assert most(batch_tokens=128) == 128
    assert most(args={"max_num_seqs": 700}) == 700
    assert most(enforce_eager=True) is None


def test_a_step_of_all_answers_and_a_new_prompt_is_a_graph(target) -> None:
    def tokens(mode, **config) -> int | None:
        arguments = engine_arguments(VllmConfig(**config), target, context(GraphBackend), mode)
        return arguments.get("max_cudagraph_capture_size")

    assert tokens(PlainMode()) == 1024
    assert tokens(PlainMode(), batch_tokens=128) == 128
    assert tokens(PlainMode(), enforce_eager=True) is None
    assert tokens(PlainMode(), args={"max_cudagraph_capture_size": 64}) == 64
    assert tokens(PlainMode(), args={"compilation_config": {"cudagraph_capture_sizes": [8]}}) is None
    assert tokens(PlainMode(), args={"cudagraph_capture_sizes": [8, 16]}) is None
    assert [tokens(mode) for mode in (drafting(), CAPTURING)] == [None, None]


@pytest.mark.parametrize("may", [False, True])
def test_prefixes_are_reused_only_where_they_may_be(target, may) -> None:
    given = engine_arguments(VllmConfig(), target, context(reuse_prefixes=may), PlainMode())
    assert given["enable_prefix_caching"] is may


def test_a_target_that_sees_gets_images_and_no_cache_of_them(target, seeing_target) -> None:
    seeing = read_target(seeing_target("qwen2_5_vl"))
    arguments = engine_arguments(VllmConfig(), seeing, context(), PlainMode())
    assert arguments["limit_mm_per_prompt"] == {"image": 64, "video": 0}
    assert arguments["mm_processor_cache_gb"] == 0
    assert arguments["enable_prefix_caching"] is False
    assert arguments["skip_tokenizer_init"] is False
    fewer = VllmConfig(args={"limit_mm_per_prompt": {"image": 2}})
    assert engine_arguments(fewer, seeing, context(), PlainMode())["limit_mm_per_prompt"] == {"image": 2}
    blind = engine_arguments(VllmConfig(), target, context(), PlainMode())
    assert blind["skip_tokenizer_init"] is True
    assert "limit_mm_per_prompt" not in blind
