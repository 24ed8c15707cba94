"""The modes of an engine's program, and the messages to it. A program is in one mode from its start to its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

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
    """The program's own name for how the draft proposes."""
    num_draft_tokens: int
    load: int
    """Number of the ``load_draft`` call: the same folder may hold another draft by now."""


Mode = CaptureMode | PlainMode | SpeculativeMode
Fields = dict[str, Any]
"""Fields of a message between an EngineSubprocess and its EngineLink."""
