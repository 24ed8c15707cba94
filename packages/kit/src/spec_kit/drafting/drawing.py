"""Draw tokens from distributions by uniform random numbers; each sequence has its own generator.

Shape suffixes: B sequences, K numbers of each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Generator, Tensor


def uniform_numbers(generators: Sequence[Generator], count: int) -> Tensor:
    """Return ``count`` numbers in [0, 1) from each generator, float64 [B, K], on the generators' device.

    So a sequence's numbers do not depend on the other sequences of its batch.
    """
    return torch.stack(
        [
            torch.rand(count, dtype=torch.float64, device=generator.device, generator=generator)
            for generator in generators
        ]
    )


def draw(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Return one token of each row, int64 [B], drawn by the inverse of the row's cumulative distribution.

    Rows need not add up to 1. A token without probability is never drawn.
    """
    reached_BV = probs_BV.double().cumsum(dim=-1)
    wanted_B1 = (uniform_B * reached_BV[:, -1])[:, None]
    return torch.searchsorted(reached_BV, wanted_B1, right=True)[:, 0].clamp(max=probs_BV.shape[-1] - 1)
