"""Define the options of the DFlash draft, which are the section ``draft`` of the configuration."""

from __future__ import annotations

from typing import Literal, Self

import pydantic

from spec_kit.block_drafting import MOST_LAYERS, BlockConfig, LayerType
from spec_kit.drafting import DistilledLoss

LossKind = Literal["ce", "dpace", "soft", "lk_alpha", "lk_lambda"]
SOFT_LOSSES: dict[str, DistilledLoss] = {"soft": "ce", "lk_alpha": "lk_alpha", "lk_lambda": "lk_lambda"}
"""Losses that compare guesses with the target's distribution: value of ``loss`` → ``DistilledLoss``."""
DEFAULT_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}


class DFlashConfig(BlockConfig):
    """Options of the DFlash draft.

    An option that is None takes its value from the draft in the folder ``init_from``. Without a folder it
    takes the default named below. A run whose options contradict the folder is refused.
    """

    loss: LossKind = "ce"
    """``ce``: cross-entropy to the next tokens, with more weight on early slots. ``dpace``: the same, but a
    slot's weight is its contribution to the expected accepted length. ``soft``: cross-entropy to the target's
    distribution. ``lk_alpha``: −log of the expected acceptance. ``lk_lambda``: a weighted sum of KL
    divergence and probability of rejection; the more guesses are accepted, the less KL weighs (arXiv
    2602.23881). The last three also need the target's last hidden state, which is then captured, too."""
    gamma: float | None = pydantic.Field(None, gt=0)
    """The loss of slot k is weighted by exp(−(k − 1) / gamma), unless ``loss`` is ``dpace``. None means 7, 5
    and 4 for blocks of 16, 10 and 8 slots, and half the block size for others."""
    dpace_alpha: float = pydantic.Field(0.5, ge=0, le=1)
    """``dpace`` estimates a slot's probability of acceptance as (1 − dpace_alpha) · confidence + dpace_alpha."""

    vocab_size: int | None = pydantic.Field(None, ge=2)
    """Size of the draft's vocabulary, which is the most frequent supervised tokens; its head is the target's head's
    rows of these tokens. None means the target's whole vocabulary."""
    block_size: int | None = pydantic.Field(None, ge=2, le=1024)
    """Number of slots of a block: the last known token and block_size − 1 guesses. None means 16."""
    num_layers: int | None = pydantic.Field(None, ge=1, le=MOST_LAYERS)
    """Number of decoder layers of the draft. None means the length of ``layer_types``, else 5."""
    layer_types: tuple[LayerType, ...] | None = pydantic.Field(None, min_length=1)
    """Kind of attention of each layer. Inside a block, full attention is bidirectional and sliding attention
    is causal. None means sliding attention in all layers if ``sliding_window`` is set, else full attention in
    all layers."""

    @pydantic.model_validator(mode="after")
    def _window_is_used(self) -> Self:
        if self.sliding_window and self.layer_types and "sliding_attention" not in self.layer_types:
            raise ValueError(
                f"sliding_window={self.sliding_window} with full layers alone; remove it or name a sliding layer"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _places_have_weights(self) -> Self:
        if self.opd and self.loss == "dpace":
            raise ValueError("opd=true with loss=dpace, which weighs guesses by itself; set another loss")
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
