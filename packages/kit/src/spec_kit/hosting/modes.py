"""Define the modes of an engine's program; a process of the program keeps one mode until its end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_core.records import FeatureSchema


@dataclass(frozen=True)
class CaptureMode:
    """Prefill only, capturing the features of ``schema``."""

    schema: FeatureSchema


@dataclass(frozen=True)
class PlainMode:
    """Decoding without a draft."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeMode:
    """Decoding with the draft in ``folder``, which proposes ``num_draft_tokens`` each round."""

    folder: Path
    method: str
    """Name of the draft's speculative method in the program's arguments."""
    num_draft_tokens: int
    load: int
    """Number of the ``load_draft`` call that loaded the draft, since the folder's content may change."""


Mode = CaptureMode | PlainMode | SpeculativeMode
Fields = dict[str, Any]
"""Fields of a message between an EngineSubprocess and its EngineLink."""
