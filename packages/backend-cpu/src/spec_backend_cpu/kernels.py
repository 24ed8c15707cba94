"""Define the CPU's kernels, by name (B10)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_backend_cpu.attention import (
    document_attention,
    document_attention_backward,
    prefixed_attention,
    prefixed_attention_backward,
)
from spec_backend_cpu.block_attention import merged_block_attention

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spec_core import Kernel

KERNELS: Mapping[str, Kernel] = {
    "causal_attention": document_attention,
    "causal_attention_backward": document_attention_backward,
    "prefixed_attention": prefixed_attention,
    "prefixed_attention_backward": prefixed_attention_backward,
    "block_attention": merged_block_attention,
}
