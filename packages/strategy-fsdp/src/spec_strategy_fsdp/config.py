"""Section ``strategy`` of a run that names the strategy fsdp."""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt

from spec_core import StrategyConfig


class FsdpConfig(StrategyConfig):
    """Section ``strategy`` of a run that names this strategy."""

    speed_only: ClassVar[frozenset[str]] = frozenset({"replicate", "context_parallel"})

    replicate: PositiveInt = 1
    """Groups of neighbouring ranks, such as those of a host, that each hold the whole draft and its optimizer,
    sharded over the ranks of the group (HSDP)."""
    context_parallel: PositiveInt = 1
    """Neighbouring ranks that divide the tokens of each sample. They train the same samples."""
