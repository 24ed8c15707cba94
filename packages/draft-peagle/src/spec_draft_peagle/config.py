"""Options of the P-EAGLE draft: section ``draft`` of the configuration."""

from __future__ import annotations

import pydantic

from spec_kit.drafting import CapturedLayers, DecoderConfig, DistilledLoss


class PEagleConfig(DecoderConfig):
    """Options of the P-EAGLE draft.

    None means: what the folder ``init_from`` says, else the default that is named. An option that contradicts the
    folder is an error.
    """

    loss: DistilledLoss = "ce"
    """``ce``: cross-entropy to the target's distribution. ``lk_alpha``: −log of the expected acceptance.
    ``lk_lambda``: KL and acceptance mixed, ever more acceptance as it grows (arXiv 2602.23881)."""
    num_guesses: int = pydantic.Field(8, ge=1, le=1024)
    """Guesses of a chain: how many tokens ahead the draft is trained."""
    retention: float = pydantic.Field(0.7, gt=0, le=1)
    """Guess k + 1 of a chain is kept with a chance of about retention ** k; a chain ends where one is dropped."""
    least_retention: float = pydantic.Field(0.2, ge=0, le=1)
    """The least that this chance becomes."""
    segment_tokens: int | None = pydantic.Field(None, ge=1)
    """Tokens whose chains are computed at once. Less takes less memory, and a further forward pass of the layers; the
    step stays the same. None: the whole batch at once."""

    num_layers: int | None = pydantic.Field(None, ge=1, le=1024)
    """Decoder layers of the draft. None: 4."""
    vocab_size: int | None = pydantic.Field(None, ge=1)
    """Rows of the draft's head: the most frequent supervised tokens. None: the target's whole vocabulary."""
    layers: CapturedLayers | None = pydantic.Field(None, min_length=1)
    """Ids k of the residual streams (entering target layer k) that feed the draft. None: 2, N // 2, N − 3."""
    mask_token_id: int | None = pydantic.Field(None, ge=0)
    """Token whose embedding stands for a token that is not known yet. None: one that the tokenizer leaves unused or
    reserves, else the last of the vocabulary that ends nothing."""
