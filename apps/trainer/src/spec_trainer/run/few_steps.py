"""A warning for a run that ends before its draft has learned much."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spec_trainer.config import TrainConfig

FEWEST_STEPS = 100
"""Steps below which a draft learns little: the quickstart's takes 160."""
_WARM_UPS = 5
"""Steps of a run over those of its warm-up, at least."""


def few_steps_warning(train: TrainConfig, num_steps: int) -> str | None:
    """Return in one line why ``num_steps`` are few, and the words that give more; None where they are enough."""
    enough = max(FEWEST_STEPS, _WARM_UPS * train.warmup_steps)
    if num_steps >= enough:
        return None
    more = (
        f"train.steps={enough}" if train.steps else f"train.epochs={ceil(train.epochs * enough / num_steps)}"
    )
    warmup = num_steps // _WARM_UPS
    shorter = f", and train.warmup_steps={warmup} for a short trial" if warmup < train.warmup_steps else ""
    return (
        f"{num_steps} steps, {min(train.warmup_steps, num_steps)} of them warm-up, teach a draft little: {enough} or "
        f"more are advised; add {more}, or more data, or a train.global_batch_tokens below "
        f"{train.global_batch_tokens}{shorter}"
    )
