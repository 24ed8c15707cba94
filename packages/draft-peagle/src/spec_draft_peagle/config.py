"""Define the options of the P-EAGLE draft, which are the section ``draft`` of the configuration."""

from __future__ import annotations

import pydantic

from spec_kit.block_drafting import MOST_LAYERS
from spec_kit.chain_drafting import ChainConfig


class PEagleConfig(ChainConfig):
    """Options of the P-EAGLE draft."""

    num_guesses: int = pydantic.Field(8, ge=1, le=1024)
    """Number of guesses of a chain: how many tokens ahead the draft is trained."""
    retention: float = pydantic.Field(0.7, gt=0, le=1)
    """The draft is trained on guess k + 1 of a chain with a probability of about retention ** k. A chain ends
    at its first dropped guess."""
    least_retention: float = pydantic.Field(0.2, ge=0, le=1)
    """Lower limit of the probability retention ** k."""
    segment_tokens: int | None = pydantic.Field(None, ge=1)
    """Number of tokens whose chains are computed at once. A smaller number needs less memory. Several such
    segments cost one more forward pass of the layers; results stay the same. None means the whole batch at
    once."""
    num_layers: int | None = pydantic.Field(None, ge=1, le=MOST_LAYERS)
    """Number of decoder layers of the draft. None means 4."""
    mask_token_id: int | None = pydantic.Field(None, ge=0)
    """Id of the token whose embedding represents a token that is not known yet. None means a token that the
    tokenizer leaves unused or reserves, else the vocabulary's last token that is no end token."""
