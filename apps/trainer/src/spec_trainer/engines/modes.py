"""What an engine's program is started for. It can do one of these at a time, so another mode is another start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from spec_core.records import FeatureSchema


@dataclass(frozen=True)
class Capturing:
    """Prefill only."""

    schema: FeatureSchema


@dataclass(frozen=True)
class Plain:
    """Decoding without a draft."""


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """Decoding with a draft: ``folder`` proposes ``num_draft_tokens`` each round."""

    folder: Path
    algorithm: str
    """Name of the draft's plugin."""
    num_draft_tokens: int
    load: int
    """Counts ``load_draft``: the same folder may hold another draft by now."""


Mode = Capturing | Plain | Drafting
