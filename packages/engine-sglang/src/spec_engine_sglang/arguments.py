"""Compute the arguments of an SGLang process that captures, speculates or decodes plainly.

The arguments are fields of SGLang's ``ServerArgs``, named as in every version from 0.5.16 to 0.5.23.
"""

from __future__ import annotations

from typing import Any

from spec_core import TargetSpec
from spec_engine_sglang.config import SglangConfig
from spec_engine_sglang.serving_format import speculative_arguments
from spec_kit.hosting import CaptureMode, Mode, SpeculativeMode

Arguments = dict[str, Any]

SPARE_POSITIONS = 8
"""Number of positions added to SGLang's context length, because SGLang refuses prompts within 7 tokens of its
limit. The engine checks lengths itself, so no token gets a position beyond the target's maximum."""
ENVIRONMENT = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}


def server_arguments(
    config: SglangConfig, target: TargetSpec, memory_fraction: float | None, mode: Mode
) -> Arguments:
    """Return the fields of SGLang's ``ServerArgs``.

    Users' arguments cannot override fields that the engine needs. ``memory_fraction`` is the share of each
    device's memory that SGLang may take; None sets no limit.
    """
    return {
        "random_seed": 0,
        **_memory(config, memory_fraction),
        **config.args,
        "model_path": str(target.folder),
        "skip_tokenizer_init": True,
        "context_length": target.max_positions + SPARE_POSITIONS,
        "dtype": config.dtype,
        "tp_size": config.tensor_parallel,
        "chunked_prefill_size": config.batch_tokens,
        "max_prefill_tokens": config.batch_tokens,
        "log_level": config.log_level,
        **_of_mode(mode),
    }


def _of_mode(mode: Mode) -> Arguments:
    if isinstance(mode, CaptureMode):
        return {
            # A cached prefix is not computed again, so its states would be missing.
            "disable_radix_cache": True,
            # No hook is called while a CUDA graph is replayed.
            "disable_cuda_graph": True,
            # With it, layers return partial sums, which only the next layer's fused kernel sums over ranks.
            "enforce_disable_flashinfer_allreduce_fusion": True,
        }
    if isinstance(mode, SpeculativeMode):
        return speculative_arguments(mode)
    return {}


def _memory(config: SglangConfig, memory_fraction: float | None) -> Arguments:
    """Return the fraction of a device's memory for SGLang's weights and KV cache.

    SGLang takes this fraction of the memory that is free when it starts.
    """
    if memory_fraction is None:
        return {}
    return {"mem_fraction_static": round(memory_fraction * (1 - config.headroom), 4)}
