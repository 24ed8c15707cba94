"""Options of the DFlash draft: section ``draft`` of the configuration."""

from __future__ import annotations

from typing import Literal, Self

import pydantic

from spec_kit.block_drafting import MOST_LAYERS, BlockConfig
from spec_kit.drafting import DistilledLoss  # noqa: TC001 (pydantic evaluates annotations)

LossKind = Literal["ce", "dpace", "soft", "lk_alpha", "lk_lambda"]
SOFT_LOSSES: dict[str, DistilledLoss] = {"soft": "ce", "lk_alpha": "lk_alpha", "lk_lambda": "lk_lambda"}
"""Losses that compare with the target's distribution: name of the option → name of the loss between distributions."""
LayerType = Literal["full_attention", "sliding_attention"]
DEFAULT_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}


class DFlashConfig(BlockConfig):
    """Options of the DFlash draft.

    None: the value in the folder ``init_from`` or, without a folder, the default that is named below. An option
    that contradicts the folder is an error.
    """

    loss: LossKind = "ce"
    """``ce``: cross-entropy to the next tokens, with more weight on early slots. ``dpace``: the same, but a slot's
    weight is what it adds to the expected accepted length. ``soft``: cross-entropy to the target's distribution.
    ``lk_alpha``: −log of the expected acceptance. ``lk_lambda``: a weighted sum of KL divergence and probability of
    rejection; the more guesses are accepted, the less KL weighs (arXiv 2602.23881). For the last three, the
    target's last state is captured, too."""
    gamma: float | None = pydantic.Field(None, gt=0)
    """Slot k weighs exp(−(k − 1) / gamma), unless the loss is ``dpace``. None: 7, 5, 4 for blocks of 16, 10, 8, else
    half a block."""
    dpace_alpha: float = pydantic.Field(0.5, ge=0, le=1)
    """``dpace`` estimates a slot's probability of acceptance as (1 − dpace_alpha) · confidence + dpace_alpha."""

    block_size: int | None = pydantic.Field(None, ge=2, le=1024)
    """Slots of a block: the last known token and block_size − 1 guesses. None: 16."""
    num_layers: int | None = pydantic.Field(None, ge=1, le=MOST_LAYERS)
    """Decoder layers of the draft. None: one for each of ``layer_types``, else 5."""
    layer_types: tuple[LayerType, ...] | None = pydantic.Field(None, min_length=1)
    """Attention of each layer. Inside a block, full layers are bidirectional and sliding layers are causal. None:
    all sliding if ``sliding_window`` is set, else all full."""
    sliding_window: int | None = pydantic.Field(None, ge=2)
    """Number of positions that a sliding layer's query attends to, including its own; at least a block."""

    @pydantic.model_validator(mode="after")
    def _window_is_used(self) -> Self:
        if self.sliding_window and self.layer_types and "sliding_attention" not in self.layer_types:
            raise ValueError(
                f"sliding_window={self.sliding_window} with full layers alone; remove it or name a sliding layer"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        if self.num_layers and self.layer_types and self.num_layers != len(self.layer_types):
            raise ValueError(
                f"num_layers={self.num_layers} and layer_types of length {len(self.layer_types)} disagree"
            )
        return self

    def decay(self, block_size: int) -> float:
        """Return ``gamma``, or its default for this block size."""
        return self.gamma or DEFAULT_GAMMA.get(block_size, block_size / 2)
