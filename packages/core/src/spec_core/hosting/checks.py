"""What is checked of a request before a target runs it. Raises EngineError."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_core.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spec_core.records import FeatureSchema
    from spec_core.target import TargetSpec


def check_schema(schema: FeatureSchema, target: TargetSpec) -> None:
    if schema.hidden_size != target.hidden_size or schema.layers[-1] > target.num_layers:
        raise EngineError(
            f"schema {schema} does not fit target {target.folder}: {target.num_layers} layers of width "
            f"{target.hidden_size}"
        )


def check_length(token_ids: Sequence[int], longest: int, what: str, see: str) -> None:
    """``see``: what the limit comes of."""
    if not 0 < len(token_ids) <= longest:
        raise EngineError(f"{what} has {len(token_ids)} tokens, expected 1 to {longest}; see {see}")


def check_vocabulary(token_ids: Sequence[int], target: TargetSpec, what: str) -> None:
    """An id that does not exist would end an engine's program on a device, not the request alone."""
    if min(token_ids) < 0 or max(token_ids) >= target.vocab_size:
        raise EngineError(
            f"{what} has token ids from {min(token_ids)} to {max(token_ids)}, target {target.folder} has "
            f"0 to {target.vocab_size - 1}"
        )
