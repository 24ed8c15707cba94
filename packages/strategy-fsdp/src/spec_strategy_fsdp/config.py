"""Define the section ``strategy`` of a run that uses the strategy ``fsdp``."""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt

from spec_core import StrategyConfig


class FsdpConfig(StrategyConfig):
    """Section ``strategy`` of a run that uses this strategy."""

    speed_only: ClassVar[frozenset[str]] = frozenset({"replicate", "context_parallel"})

    replicate: PositiveInt = 1
    """Number of groups of neighbouring ranks, for example one group for each host (HSDP). Each group holds
    the whole draft and its optimizer, sharded over the group's ranks."""
    context_parallel: PositiveInt = 1
    """Number of neighbouring ranks that divide the tokens of each sample (context parallelism). These ranks
    train on the same samples."""
