"""Define the options of the DSpark draft, which are the section ``draft`` of the configuration."""

from __future__ import annotations

from typing import Literal, Self

import pydantic

from spec_kit.block_drafting import BlockConfig

MarkovKind = Literal["vanilla", "gated", "rnn"]


class DSparkConfig(BlockConfig):
    """Options of the DSpark draft.

    An option that is None takes its value from the draft in the folder ``init_from``. Without a folder it
    takes the default named below. A run whose options contradict the folder is refused.
    """

    vocab_size: int | None = pydantic.Field(None, ge=2)
    """Size of the draft's vocabulary, which is the most frequent supervised tokens; its head is the target's head's
    rows of these tokens. None means the target's whole vocabulary."""
    block_size: int | None = pydantic.Field(None, ge=1, le=1024)
    """Number of slots of a block. The first slot holds the last known token. None means 7."""
    sample_from_anchor: bool | None = None
    """Whether the first slot makes a guess, too. If not, a block makes one guess fewer than it has slots. None
    means yes."""
    markov_head: MarkovKind | None = None
    """Kind of Markov head, which adds a bias to a guess's logits. The bias depends on the previous token
    (``vanilla``), on the previous token and the slot's state (``gated``), or on all earlier guesses of the
    block (``rnn``). vLLM serves ``vanilla`` only. None means ``vanilla``."""
    markov_rank: int | None = pydantic.Field(None, ge=1)
    """Number of channels of the Markov head. None means 256."""
    confidence: bool | None = None
    """Whether a confidence head learns the probability that a guess is accepted. None means yes."""
    confidence_with_markov: bool | None = None
    """Whether the confidence head also reads the token before the guess. None means yes."""

    gamma: float = pydantic.Field(4.0, gt=0)
    """The loss of guess k is weighted by exp(−(k − 1) / gamma)."""
    ce_weight: float = pydantic.Field(0.1, ge=0)
    """Factor on the cross-entropy to the next tokens."""
    l1_weight: float = pydantic.Field(0.9, ge=0)
    """Factor on the L1 distance to the target's distribution. The distance is twice the probability of a
    rejection."""
    confidence_weight: float = pydantic.Field(1.0, ge=0)
    """Factor on the confidence head's cross-entropy to the probability of acceptance."""

    @pydantic.model_validator(mode="after")
    def _trains_something(self) -> Self:
        if self.ce_weight == self.l1_weight == 0:
            raise ValueError("ce_weight=0 and l1_weight=0 leave nothing that trains the guesses")
        return self

    @pydantic.model_validator(mode="after")
    def _guesses_something(self) -> Self:
        if self.block_size == 1 and self.sample_from_anchor is False:
            raise ValueError("block_size=1 and sample_from_anchor=false leave no slot to guess")
        return self

    @pydantic.model_validator(mode="after")
    def _has_the_head(self) -> Self:
        if self.confidence is False and self.confidence_with_markov:
            raise ValueError("confidence_with_markov=true, but confidence=false leaves that head out")
        return self
