"""Options of the DFlash2 draft: section ``draft`` of the configuration."""

from __future__ import annotations

from typing import Self

import pydantic

from spec_kit.block_drafting import BlockConfig


class DFlash2Config(BlockConfig):
    """Options of the DFlash2 draft.

    None: the value in the folder ``init_from`` or, without a folder, the default that is named below. An option
    that contradicts the folder is an error.
    """

    block_size: int | None = pydantic.Field(None, ge=2, le=1024)
    """Slots of a block: the last known token and block_size − 1 guesses. None: 8."""
    conv_kernel_size: int | None = pydantic.Field(None, ge=1, le=1024)
    """Number of taps of the convolutions: one for a slot and one for each slot before it; at most a block. None:
    2."""
    conv_group_size: int | None = pydantic.Field(None, ge=1)
    """Number of channels that share the taps computed from a slot's state; it divides the width. None: 16."""
    selector_rank: int | None = pydantic.Field(None, ge=1)
    """Channels in which the selector compares a candidate with the token before it. None: 256."""
    selector_top_k: int | None = pydantic.Field(None, ge=1)
    """Candidates of a guess: the tokens that the target's head finds most likely. None: 16."""

    gamma: float = pydantic.Field(4.0, gt=0)
    """Guess k weighs exp(−(k − 1) / gamma)."""
    ce_weight: float = pydantic.Field(0.0, ge=0)
    """Factor on the cross-entropies to the next tokens."""
    soft_weight: float = pydantic.Field(1.0, ge=0)
    """Factor on the cross-entropies to the target's distribution."""
    selector_weight: float = pydantic.Field(1.0, ge=0)
    """Factor on the selector's cross-entropy, relative to the cross-entropy of the head."""

    @pydantic.model_validator(mode="after")
    def _trains_something(self) -> Self:
        if self.ce_weight == self.soft_weight == 0:
            raise ValueError("ce_weight=0 and soft_weight=0 leave nothing that trains the guesses")
        return self
