"""Define the options of the P-EAGLE draft, which are the section ``draft`` of the configuration."""

from __future__ import annotations

from typing import ClassVar

import pydantic

from spec_kit.drafting import CapturedLayers, DecoderConfig, DistilledLoss


class PEagleConfig(DecoderConfig):
    """Options of the P-EAGLE draft.

    An option that is None takes its value from the draft in the folder ``init_from``. Without a folder it
    takes the default named below. A run whose options contradict the folder is refused.
    """

    speed_only: ClassVar[frozenset[str]] = frozenset({"checkpoint_activations"})

    loss: DistilledLoss = "ce"
    """``ce``: cross-entropy to the target's distribution. ``lk_alpha``: −log of the expected acceptance.
    ``lk_lambda``: a weighted sum of KL divergence and probability of rejection; the more guesses are accepted, the
    less KL weighs (arXiv 2602.23881)."""
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
    checkpoint_activations: bool = False
    """Whether to compute each layer again in the backward pass instead of storing its activations. This saves
    memory and costs one more forward pass of the layers, also with ``segment_tokens``; results stay the
    same."""

    num_layers: int | None = pydantic.Field(None, ge=1, le=1024)
    """Number of decoder layers of the draft. None means 4."""
    vocab_size: int | None = pydantic.Field(None, ge=1)
    """Size of the draft's vocabulary, which is the most frequent supervised tokens. None means the target's
    whole vocabulary."""
    layers: CapturedLayers | None = pydantic.Field(None, min_length=1)
    """Ids of the target's residual streams that feed the draft; id k is the input of target layer k. None
    means 2, N // 2 and N − 3 for a target of N layers."""
    mask_token_id: int | None = pydantic.Field(None, ge=0)
    """Id of the token whose embedding represents a token that is not known yet. None means a token that the
    tokenizer leaves unused or reserves, else the vocabulary's last token that is no end token."""
