"""Define the kernels that DFlash can use, and a plain torch version of ``scaled_softmax_``.

See ``spec_core.kernels``. Shapes: X any leading dimensions, V the vocabulary rows of this shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_kit.block_drafting import BlockKernels
from spec_kit.layers import softmax

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor


def scaled_softmax_(logits_XV: Tensor, log_sum_X: Tensor, factor_X: Tensor) -> Tensor:
    """Overwrite the logits with factor · softmax. ``log_sum_X``: their log-sum-exp over all shards."""
    return logits_XV.copy_(softmax(logits_XV, log_sum_X).mul_(factor_X[..., None]))


@dataclass(frozen=True, kw_only=True)
class DFlashKernels(BlockKernels):
    """The kernels that DFlash can use."""

    scaled_softmax_: Callable[[Tensor, Tensor, Tensor], Tensor] = scaled_softmax_

    @classmethod
    def examples(cls, draw: Callable[..., Tensor]) -> Mapping[str, tuple[object, ...]]:
        """Return example arguments for comparing each kernel with its plain version."""
        logits_XV = draw(5, 33)
        return {
            **super().examples(draw),
            "scaled_softmax_": (logits_XV, logits_XV.logsumexp(-1), draw(5)),
        }
