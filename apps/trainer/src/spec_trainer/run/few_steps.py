"""Warn of a run that has too few steps for its draft to learn much."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spec_trainer.configuration.run import TrainConfig

FEWEST_STEPS = 100
"""Smallest number of steps after which a draft has learned something; the quickstart's run takes 160."""
_WARM_UPS = 5
"""Least ratio of a run's steps to its warm-up steps."""


def few_steps_warning(train: TrainConfig, num_steps: int, remedy: str | None = None) -> str | None:
    """Return a warning that ``num_steps`` are too few, with advice; None if they are enough.

    ``remedy``: the advice where the user does not set the number of steps; None names configuration keys.
    """
    enough = max(FEWEST_STEPS, _WARM_UPS * train.warmup_steps)
    if num_steps >= enough:
        return None
    what = (
        f"too few steps to teach a draft much: {num_steps}, {min(train.warmup_steps, num_steps)} of them warm-up; "
        f"{enough} or more are advised; "
    )
    return what + (remedy or _configuration_remedy(train, num_steps, enough))


def _configuration_remedy(train: TrainConfig, num_steps: int, enough: int) -> str:
    more = (
        f"train.steps={enough}" if train.steps else f"train.epochs={ceil(train.epochs * enough / num_steps)}"
    )
    warmup = num_steps // _WARM_UPS
    shorter = f", and train.warmup_steps={warmup} for a short trial" if warmup < train.warmup_steps else ""
    return (
        f"add {more}, or more data, or a train.global_batch_tokens below {train.global_batch_tokens}{shorter}"
    )
