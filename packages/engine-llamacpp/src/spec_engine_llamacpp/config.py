"""Define the section ``engine`` of a command with llama.cpp. This module imports neither torch nor gguf."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pydantic

from spec_core import EngineConfig


class LlamacppConfig(EngineConfig):
    """Section ``engine`` of a command with llama.cpp."""

    gguf: Path | None = None
    """The target as a GGUF file. None means the only such file in the target's folder."""
    draft_type: Literal["f32", "f16", "bf16", "q8_0"] = "f16"
    """Type in which the matrices of a draft are written into its GGUF file."""
    threads: int = pydantic.Field(1, ge=1)
    """Threads that compute. Threads of other processes on the same cores make them wait."""
    slots: int = pydantic.Field(1, ge=1, le=256)
    """Number of prompts that are answered at once. With several, greedy answers depend on which share a pass."""
    context: int = pydantic.Field(4096, ge=8)
    """Largest number of tokens of a prompt with its answer; at most the target's positions. It takes memory."""
    attention: Literal["f16", "f32"] = "f16"
    """Type of keys and values. ``f32`` also leaves out flash attention, so that the target computes in float32 if its
    file does."""
