"""Section ``strategy`` of a run that names the strategy megatron."""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt

from spec_core import StrategyConfig


class MegatronConfig(StrategyConfig):
    """Section ``strategy`` of a run that names this strategy."""

    speed_only: ClassVar[frozenset[str]] = frozenset(
        {
            "tensor_parallel", "context_parallel", "expert_parallel", "sequence_parallel", "distributed_optimizer",
        }
    )  # fmt: skip

    tensor_parallel: PositiveInt = 1
    """Processes that divide one draft: heads, channels and the vocabulary. They train the same samples."""
    context_parallel: PositiveInt = 1
    """Not supported: 1."""
    expert_parallel: PositiveInt = 1
    """Not supported: 1."""
    sequence_parallel: bool = False
    """Whether these processes divide the tokens where they do not divide layers, such as at norms."""
    distributed_optimizer: bool = False
    """Whether each data-parallel rank keeps masters and optimizer of its share of the draft only."""
