"""Define the section ``strategy`` of a run that uses the strategy ``megatron``."""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt

from spec_core import StrategyConfig


class MegatronConfig(StrategyConfig):
    """Section ``strategy`` of a run that uses this strategy."""

    speed_only: ClassVar[frozenset[str]] = frozenset(
        {"tensor_parallel", "sequence_parallel", "distributed_optimizer"}
    )

    tensor_parallel: PositiveInt = 1
    """Number of processes that divide one draft: its heads, channels and vocabulary. These processes train on
    the same samples."""
    sequence_parallel: bool = False
    """Whether these processes divide the tokens in modules whose weights they do not divide, such as
    norms."""
    distributed_optimizer: bool = False
    """Whether each data-parallel rank stores float32 master weights and optimizer state of only its share of the
    draft."""
