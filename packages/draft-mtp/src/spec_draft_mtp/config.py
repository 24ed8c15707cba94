"""Define the options of the MTP draft, which are the section ``draft`` of the configuration."""

from __future__ import annotations

from typing import ClassVar

import pydantic

from spec_kit.drafting import DecoderConfig, DistilledLoss


class MtpConfig(DecoderConfig):
    """Options of the MTP draft.

    ``init_from`` may be the target's own folder: training then continues from the MTP head that the target
    ships with. Without ``init_from`` the head starts from random weights. An option that is None takes its
    value from the folder ``init_from`` or, without a folder, from the target.
    """

    speed_only: ClassVar[frozenset[str]] = frozenset({"checkpoint_activations"})

    loss: DistilledLoss = "ce"
    """``ce``: cross-entropy to the target's distribution. ``lk_alpha``: −log of the expected acceptance.
    ``lk_lambda``: a weighted sum of KL divergence and probability of rejection; the more guesses are accepted, the
    less KL weighs (arXiv 2602.23881)."""
    num_steps: int = pydantic.Field(3, ge=1, le=1024)
    """Number of unrolled steps: how many tokens ahead the head is trained. Most shipped heads were trained
    for one step."""
    step_decay: float = pydantic.Field(0.8, gt=0, le=1)
    """Weight of one step's loss relative to the previous step's loss: step s has the weight step_decay **
    s."""
    checkpoint_activations: bool = False
    """Whether to compute each step's layer again in the backward pass instead of storing its activations.
    This saves memory and costs one more forward pass of the layer; results stay the same."""
