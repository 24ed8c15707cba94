"""Compute the learning rate as a pure function of the step, so that resuming needs no scheduler state."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spec_trainer.configuration.run import TrainConfig


def learning_rate(step: int, total_steps: int, config: TrainConfig) -> float:
    """Return the learning rate of step ``step``, counted from 0.

    It rises linearly to ``lr`` in the warm-up, and then follows ``train.schedule``.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    return config.lr * _after_warmup(step, total_steps, config)


def _after_warmup(step: int, total_steps: int, config: TrainConfig) -> float:
    floor = config.min_lr_ratio
    if config.schedule == "constant":
        return 1.0
    decay_steps = total_steps - config.warmup_steps
    if config.schedule == "wsd":
        decay_steps = min(decay_steps, math.ceil(total_steps * config.decay_share))
    # Counted so that the last step still trains: it gets the share 1 / (decay_steps + 1).
    left = (total_steps - step) / (max(decay_steps, 1) + 1)
    if left >= 1:
        return 1.0
    if config.schedule == "wsd":
        return floor + (1 - floor) * left
    return floor + (1 - floor) * 0.5 * (1 - math.cos(math.pi * left))
