"""Section ``engine`` of a run with vLLM."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from spec_core import EngineConfig
from spec_kit.hosting import unreserved

RESERVED = frozenset(
    {
        "model",
        "dtype",
        "skip_tokenizer_init",
        "language_model_only",
        "max_model_len",
        "max_num_batched_tokens",
        "tensor_parallel_size",
        "enable_chunked_prefill",
        "enforce_eager",
        "generation_config",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "disable_log_stats",
        "speculative_config",
        "kv_transfer_config",
        "worker_extension_cls",
        "scheduler_cls",
    }
)
"""Arguments of vLLM that the engine sets itself."""
SPREADING = frozenset(
    {
        "pipeline_parallel_size",
        "data_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
        "nnodes",
    }
)
"""Arguments of vLLM that distribute a request's layers or tokens over processes."""
DRAFT_RESERVED = frozenset({"method", "model", "num_speculative_tokens", "draft_model_config"})
"""Fields of vLLM's ``speculative_config`` that the engine sets itself."""


class VllmConfig(EngineConfig):
    """Section ``engine`` of a run with vLLM."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Compute dtype of the target. None means the dtype of its stored weights."""
    max_model_len: PositiveInt | None = None
    """Maximum length of a sequence in tokens. None means the target's maximum; while vLLM captures, at most
    ``batch_tokens``, which no sample exceeds."""
    kv_cache_bytes: PositiveInt | None = None
    """Bytes of the KV cache on each device. None means the rest of the engine's share of the device's memory,
    or 1 GiB if the hardware cannot limit memory."""
    enforce_eager: bool | None = None
    """Whether to run without compilation and without CUDA graphs. None means yes only if the hardware cannot
    capture graphs."""
    draft_method: Annotated[str, Field(min_length=1)] | None = None
    """vLLM's speculative method for the exported draft. None means the method that the draft's plugin names
    for vLLM."""
    draft_args: Annotated[dict[str, Any], unreserved(DRAFT_RESERVED)] = Field(default_factory=dict)
    """Further fields of vLLM's ``speculative_config``, which are used while a draft is served."""
    args: Annotated[dict[str, Any], unreserved(RESERVED, SPREADING)] = Field(default_factory=dict)
    """Further arguments of vLLM's engine, by their Python names."""
