"""Options of the DFlash draft: section ``draft`` of the configuration."""

from __future__ import annotations

from typing import Literal, Self

import pydantic

from spec_kit.drafting import CapturedLayers, DecoderConfig

LossKind = Literal["ce", "dpace", "soft"]
LayerType = Literal["full_attention", "sliding_attention"]
MOST_LAYERS = 1024
"""Most layers of a draft; published ones have one to eight."""


class DFlashConfig(DecoderConfig):
    """Options of the DFlash draft.

    None means: what the folder ``init_from`` says, else the default that is named. An option that contradicts the
    folder is an error.
    """

    loss: LossKind = "ce"
    """``ce``: cross-entropy to the next tokens, early slots first. ``dpace``: the same, but each slot weighs what it
    adds to the expected accepted length. ``soft``: cross-entropy to the target's distribution; its last state is
    captured."""
    num_anchors: int = pydantic.Field(512, ge=1, le=1 << 20)
    """Most blocks that one document trains in one epoch, at positions drawn anew each epoch."""
    gamma: float | None = pydantic.Field(None, gt=0)
    """Slot k weighs exp(−(k − 1) / gamma), unless the loss is ``dpace``. None: 7, 5, 4 for blocks of 16, 10, 8, else
    half a block."""
    dpace_alpha: float = pydantic.Field(0.5, ge=0, le=1)
    """``dpace`` takes a slot's chance of acceptance as (1 − dpace_alpha) · confidence + dpace_alpha."""

    block_size: int | None = pydantic.Field(None, ge=2, le=1024)
    """Slots of a block: the last known token and block_size − 1 guesses. None: 16."""
    num_layers: int | None = pydantic.Field(None, ge=1, le=MOST_LAYERS)
    """Decoder layers of the draft. None: one for each of ``layer_types``, else 5."""
    layer_types: tuple[LayerType, ...] | None = pydantic.Field(None, min_length=1)
    """Attention of each layer. Full layers look both ways inside the block, sliding ones are causal there. None:
    all sliding where there is a ``sliding_window``, else all full."""
    sliding_window: int | None = pydantic.Field(None, ge=2)
    """Positions that a sliding layer's query sees, its own included; at least a block."""
    mask_token_id: int | None = pydantic.Field(None, ge=0)
    """Token whose embedding stands in the slots to be guessed. None: one that the tokenizer leaves unused or
    reserves, else the last of the vocabulary that ends nothing."""

    num_features: int | None = pydantic.Field(None, ge=1, le=MOST_LAYERS)
    """Residual streams of the target that feed the draft, evenly from early to late. None: as many as ``layers``,
    else 5."""
    layers: CapturedLayers | None = pydantic.Field(None, min_length=1)
    """Their ids k (streams entering target layer k). None: 1 + round(1 + i · (N − 4) / (num_features − 1))."""

    @pydantic.model_validator(mode="after")
    def _window_is_used(self) -> Self:
        if self.sliding_window and self.layer_types and "sliding_attention" not in self.layer_types:
            raise ValueError(
                f"sliding_window={self.sliding_window} with full layers alone; remove it or name a sliding layer"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        for count, listed in (("num_layers", "layer_types"), ("num_features", "layers")):
            number, values = getattr(self, count), getattr(self, listed)
            if None not in (number, values) and number != len(values):
                raise ValueError(f"{count}={number} and the {len(values)} entries of {listed} disagree")
        return self
