"""Compute the arguments and the environment of a vLLM that captures, speculates or decodes plainly.

Capture and speculation both need vLLM's only ``speculative_config``, so one process can do only one of the
two. This module does not import vLLM.
"""

from __future__ import annotations

from typing import Any

from spec_core import EngineContext, TargetSpec
from spec_core.records import MOST_IMAGES
from spec_engine_vllm.config import VllmConfig
from spec_engine_vllm.guess_depths import SCHEDULER
from spec_engine_vllm.serving_format import speculative_config
from spec_engine_vllm.vllm_ranks import EXTENSION
from spec_kit.hosting import CaptureMode, Mode, PlainMode, SpeculativeMode

Arguments = dict[str, Any]

FROZEN_TABLES = "spec_engine_vllm.frozen_tables.FrozenTables"
"""Extension of the workers of a vLLM that captures."""
_CONNECTOR = "spec_engine_vllm.connector"
_MOST_SEQUENCES = 256
"""Default maximum number of sequences that run at once while vLLM captures or speculates. With vLLM's own default,
1024 on large GPUs, the logits of all guesses would take gigabytes."""
_MOST_WITH_GRAPHS = 512
"""Default maximum number of sequences that run at once in a vLLM that only decodes, if it uses graphs. Its
scheduler, in Python, is slow for more: on one H200 with SmolLM2-135M, a step of 492 sequences took 10 ms, and of
1024, vLLM's own default there, 53 ms."""
_TOKENS_OF_GRAPHS = 2 * _MOST_WITH_GRAPHS
"""Most tokens of a step that runs as a graph in such a vLLM: those of all sequences, and of a new prompt. By vLLM's
own default, 512, no step in which a prompt begins while so many sequences run would be a graph."""
_GRAPH_ARGUMENTS = {"compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size"}
"""Arguments of vLLM with which a user chooses the graphs."""
_KV_BYTES = 1 << 30
"""Size of the KV cache, in bytes, if nothing limits memory. vLLM's default would take most of the host's
memory."""
_IMAGES: Arguments = {
    "limit_mm_per_prompt": {"image": MOST_IMAGES, "video": 0},
    "mm_processor_cache_gb": 0,  # vLLM's default of 4 GiB would hold images that are used once an epoch
}
"""Arguments of vLLM for a multimodal target."""
_DRAFTER_ROOM = 2
"""Number of positions added to the model length while capturing. vLLM stores no states of a batch if a
sequence, its one new token and the token that the state extractor 'drafts' together exceed the model
length."""


def longest(config: VllmConfig, target: TargetSpec, mode: Mode) -> int:
    """Return the maximum length, in tokens, of a sample or of a prompt with its answer in this mode.

    It is ``max_model_len`` if set, else the target's maximum. While vLLM captures, the default is also at
    most ``batch_tokens``.
    """
    most = target.max_positions
    if isinstance(mode, CaptureMode):
        most = min(most, config.batch_tokens)
    return config.max_model_len or most


def engine_arguments(config: VllmConfig, target: TargetSpec, context: EngineContext, mode: Mode) -> Arguments:
    """Return the arguments of vLLM's ``AsyncEngineArgs``. Nested configurations are dicts."""
    capabilities = context.backend.capabilities()
    eager = not capabilities.graph_capture if config.enforce_eager is None else config.enforce_eager
    arguments: Arguments = {
        "model": str(target.folder),
        "dtype": config.dtype or target.dtype,
        # vLLM needs the tokenizer to find the placeholder tokens of images.
        "skip_tokenizer_init": target.image_token_id is None,
        "max_model_len": longest(config, target, mode),
        "max_num_batched_tokens": config.batch_tokens,
        "tensor_parallel_size": config.tensor_parallel,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": context.reuse_prefixes,
        "enforce_eager": eager,
        # The target's generation_config.json would change the sampling parameters.
        "generation_config": "vllm",
        "disable_log_stats": True,
    }
    if not isinstance(mode, PlainMode):
        arguments["max_num_seqs"] = min(_MOST_SEQUENCES, config.batch_tokens)
    elif not eager:
        arguments["max_num_seqs"] = min(_MOST_WITH_GRAPHS, config.batch_tokens)
        if not _GRAPH_ARGUMENTS & config.args.keys():
            arguments["max_cudagraph_capture_size"] = min(_TOKENS_OF_GRAPHS, config.batch_tokens)
    if isinstance(mode, CaptureMode):
        arguments["max_model_len"] += _DRAFTER_ROOM
    if context.memory_fraction is not None:
        arguments["gpu_memory_utilization"] = context.memory_fraction
    kv_bytes = config.kv_cache_bytes or (None if capabilities.memory_limit else _KV_BYTES)
    if kv_bytes is not None:
        arguments["kv_cache_memory_bytes"] = kv_bytes
        if context.memory_fraction is None and capabilities.device_bytes is not None:
            # Then vLLM uses this fraction only to refuse a start with less free memory, and the default is 0.92.
            arguments["gpu_memory_utilization"] = min(1.0, kv_bytes / capabilities.device_bytes)
    if target.image_token_id is not None:
        arguments |= _IMAGES
    return arguments | _of_mode(config, mode) | config.args


def _of_mode(config: VllmConfig, mode: Mode) -> Arguments:
    if isinstance(mode, CaptureMode):
        layers = {"eagle_aux_hidden_state_layer_ids": list(mode.schema.layers)}
        return {
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": layers},
            },
            "kv_transfer_config": {
                "kv_connector": "CaptureConnector",
                "kv_connector_module_path": _CONNECTOR,
                "kv_role": "kv_producer",
            },
            "worker_extension_cls": FROZEN_TABLES,
        }
    if isinstance(mode, SpeculativeMode):
        return {
            "speculative_config": config.draft_args | speculative_config(mode),
            "worker_extension_cls": EXTENSION,
            "scheduler_cls": SCHEDULER,
            "disable_log_stats": False,  # the statistics include the acceptance counters
        }
    return {}


DEFAULT_ENVIRONMENT = {
    "NO_COLOR": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled at the first start, for up to two minutes
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM would bind every process of a run to the same cores
}
"""Environment variables of the vLLM process and its children. Variables that the caller has set take precedence."""
CAPTURE_ENVIRONMENT = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
"""Environment variables of a vLLM that captures, which override the caller's variables. With
``_DRAFTER_ROOM`` the model length may exceed the target's positions, although no token ever has such a
position."""
