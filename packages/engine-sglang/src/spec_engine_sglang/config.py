"""Define the section ``engine`` of a run with SGLang. This module imports neither torch nor SGLang."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic

from spec_core import EngineConfig
from spec_kit.hosting import unreserved

RESERVED = frozenset(
    {
        "model_path",
        "skip_tokenizer_init",
        "context_length",
        "chunked_prefill_size",
        "max_prefill_tokens",
        "tp_size",
        "dtype",
        "log_level",
        "custom_sigquit_handler",
        "speculative_algorithm",
        "speculative_draft_model_path",
        "speculative_num_steps",
        "speculative_eagle_topk",
        "speculative_num_draft_tokens",
        "speculative_dflash_block_size",
        "speculative_dspark_block_size",
        "speculative_adaptive",  # acceptance counters and guess depths need a fixed number of guesses
        # modes that divide a batch differently than by request
        "enable_two_batch_overlap",
        "enable_pdmux",
        "enable_mixed_chunk",
    }
)
"""Arguments of SGLang that the engine sets itself or forbids."""
SPREADING = frozenset(
    {
        "pp_size",
        "dp_size",
        "nnodes",
        "attn_cp_size",
        "dcp_size",
        "enable_dp_attention",
        "disaggregation_mode",
    }
)
"""Arguments of SGLang that distribute a request's layers or tokens over processes."""


class SglangConfig(EngineConfig):
    """Section ``engine`` of a run with SGLang."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Compute dtype of the target; ``auto`` means the dtype of its stored weights."""
    headroom: float = pydantic.Field(0.15, gt=0, lt=1)
    """Share of the engine's memory that is reserved for activations and captured states. The rest holds
    weights and the KV cache. The option applies only if the engine's memory is limited; otherwise SGLang
    decides."""
    gaps: bool = True
    """Whether greedy answers without a draft report the gap between the two largest logits. Reporting it
    makes decoding a little slower."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Log level of SGLang's processes; their output goes to the log of the engine's process."""
    args: Annotated[dict[str, Any], unreserved(RESERVED, SPREADING)] = pydantic.Field(default_factory=dict)
    """Further arguments of SGLang's ``ServerArgs``, by its own names (``attention_backend: triton``)."""
