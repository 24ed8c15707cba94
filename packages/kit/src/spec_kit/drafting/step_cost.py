"""StepCost estimates the floating-point operations (FLOPs) of training a draft on one sample.

A draft computes some values for every token, and others for every *row*: a supervised token, or a block of guesses
at such a token. Attention compares every token, or every row, with the tokens before it. Importing this module
imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod

TRAINED, FROZEN, TEACHER = 6, 4, 2
"""FLOPs for each weight and row of a trained layer (forward pass, and gradients of inputs and weights), of a frozen
layer (no gradient of weights), and of a layer that only runs forward."""
_PAIR = 24
"""FLOPs for each compared pair and channel of the queries: two products, each computed forward and twice backward,
make 12. Attention reaches half the FLOP/s of the other products (``docs/cuda.md``, Attention), so it counts twice."""


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Coefficients of a sample's cost; a call returns the cost in FLOPs (``DraftCost.sample_flops``)."""

    per_token: int
    per_row: int
    token_channels: int = 0
    """Channels of the queries by which each token is compared with the tokens before it, summed over all layers."""
    row_channels: int = 0
    """Channels of the queries by which each row is compared with tokens before it, summed over layers and steps."""
    window: int | None = None
    """Most tokens that a query is compared with; None means all tokens before it."""
    num_rows: Callable[[int], int] = int
    """Returns the number of rows of a sample with this number of supervised tokens; by default it is the same."""

    def __call__(self, num_tokens: int, num_supervised: int) -> int:
        """Return the cost of a sample, assuming that its supervised tokens are its last, as in an answer."""
        rows = self.num_rows(num_supervised)
        pairs = self.token_channels * num_tokens * self._seen(num_tokens // 2)
        pairs += self.row_channels * rows * self._seen(num_tokens - num_supervised // 2)
        return num_tokens * self.per_token + rows * self.per_row + _PAIR * pairs

    def _seen(self, num_tokens: int) -> int:
        return num_tokens if self.window is None else min(num_tokens, self.window)


def num_weights(shapes: Iterable[tuple[int, ...]]) -> int:
    """Return the number of weights of the matrices in ``shapes``; norms and biases cost next to nothing."""
    return sum(prod(shape) for shape in shapes if len(shape) == 2)
