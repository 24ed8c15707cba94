"""Define the options of drafts that choose among candidates, which are the section ``draft`` of the configuration."""

from __future__ import annotations

from typing import Self

import pydantic

from spec_kit.block_drafting import BlockConfig


class CandidateConfig(BlockConfig):
    """Options of a draft that chooses each guess among candidates: the tokens with the head's largest logits.

    An option that is None takes its value from the draft in the folder ``init_from``. Without a folder it
    takes the default named below. A run whose options contradict the folder is refused.
    """

    block_size: int | None = pydantic.Field(None, ge=2, le=1024)
    """Number of slots of a block: the last known token and block_size − 1 guesses. None means 8."""
    gamma: float = pydantic.Field(4.0, gt=0)
    """The loss of guess k is weighted by exp(−(k − 1) / gamma)."""
    ce_weight: float = pydantic.Field(0.0, ge=0)
    """Factor on the cross-entropies to the next tokens."""
    soft_weight: float = pydantic.Field(1.0, ge=0)
    """Factor on the cross-entropies to the target's distribution."""

    @pydantic.model_validator(mode="after")
    def _trains_something(self) -> Self:
        if self.ce_weight == self.soft_weight == 0:
            raise ValueError("ce_weight=0 and soft_weight=0 leave nothing that trains the guesses")
        return self


class DFlash2Config(CandidateConfig):
    """Options of the DFlash2 draft."""

    vocab_size: int | None = pydantic.Field(None, ge=2)
    """Size of the draft's vocabulary, which is the most frequent supervised tokens; its head is the target's head's
    rows of these tokens. None means the target's whole vocabulary."""
    conv_kernel_size: int | None = pydantic.Field(None, ge=1, le=1024)
    """Number of taps of the convolutions: one for the slot itself, and the others for the slots just before
    it. At most ``block_size``. None means 2."""
    conv_group_size: int | None = pydantic.Field(None, ge=1)
    """Number of channels that share the taps computed from a slot's state; it divides the hidden size. None
    means 16."""
    selector_rank: int | None = pydantic.Field(None, ge=1)
    """Number of channels in which the selector compares a candidate with the token before it. None means
    256."""
    selector_top_k: int | None = pydantic.Field(None, ge=1)
    """Number of candidates of a guess: the tokens with the largest logits of the target's head. None means
    16."""
    selector_weight: float = pydantic.Field(1.0, ge=0)
    """Factor on the selector's cross-entropy, relative to the cross-entropy of the head."""
