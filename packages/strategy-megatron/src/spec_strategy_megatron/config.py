"""Section ``strategy`` of a run that names the strategy megatron."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import PositiveInt, model_validator

from spec_core import StrategyConfig

_FORMER = ("context_parallel", "expert_parallel")


class MegatronConfig(StrategyConfig):
    """Section ``strategy`` of a run that names this strategy."""

    speed_only: ClassVar[frozenset[str]] = frozenset(
        {"tensor_parallel", "sequence_parallel", "distributed_optimizer"}
    )

    tensor_parallel: PositiveInt = 1
    """Processes that divide one draft: heads, channels and the vocabulary. They train the same samples."""
    sequence_parallel: bool = False
    """Whether these processes divide the tokens in modules that they do not divide otherwise, such as norms."""
    distributed_optimizer: bool = False
    """Whether each data-parallel rank stores float32 master weights and optimizer state of only its share of the
    draft."""

    @model_validator(mode="before")
    @classmethod
    def _without_former_options(cls, values: Any) -> Any:
        """Leave out two options that earlier run directories have, always 1; any other value is an unknown key."""
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if key not in _FORMER or value != 1}
