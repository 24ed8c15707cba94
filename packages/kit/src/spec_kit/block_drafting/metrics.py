"""Sum the metrics of guessed blocks over chunks, and compute the factor that scales a batch's loss.

Shapes: A blocks of a chunk, S guesses of a block, R counted guesses of the chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from spec_core.records import StepOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from spec_kit.block_drafting.blocks import CountedGuesses


class GuessMetrics:
    """Sums of one forward pass over all chunks: the loss, values of each guess, and acceptance lengths."""

    def __init__(
        self, scale: Tensor, num_guesses: int, values: Sequence[str], lengths: Sequence[str]
    ) -> None:
        """Start all sums at zero.

        ``scale``: a tensor with the dtype and device of the sums. ``values``: names of the metrics that each
        guess has. ``lengths``: names of the acceptance lengths, which each block has.
        """
        zeros = scale.new_zeros
        self.loss, self._num_guesses = zeros(()), num_guesses
        self._values = {name: zeros(num_guesses) for name in values}
        self._lengths = {name: zeros(()) for name in lengths}
        self._counted_S = torch.zeros(num_guesses, dtype=torch.int64, device=scale.device)

    def add(self, guesses: CountedGuesses, **value_R: Tensor) -> None:
        """Add the values of a chunk's guesses, each under the name of its metric."""
        for name, values in value_R.items():
            self._values[name] += guesses.table(values, self._num_guesses).sum(0)
        counted_R = torch.ones_like(guesses.block_R)
        self._counted_S += guesses.table(counted_R, self._num_guesses).sum(0)

    def add_lengths(self, guesses: CountedGuesses, **accepted_R: Tensor) -> None:
        """Add each block's acceptance length: 1 + Σ over guesses k of P(guesses 1 to k are all accepted).

        ``accepted_R``: name of an acceptance length -> the probability that each counted guess is accepted.
        """
        for name, accepted in accepted_R.items():
            reached_AS = guesses.table(accepted, self._num_guesses).cumprod(1)
            self._lengths[name] += len(reached_AS) + reached_AS.sum()

    def output(self, loss: Tensor) -> StepOutput:
        """Return ``loss`` and the metrics as a StepOutput.

        Acceptance lengths are divided by the number of blocks. This equals the number of first guesses,
        because the first guess of every block counts.
        """
        return StepOutput(
            loss=loss,
            sums=self._values | self._lengths,
            counts=dict.fromkeys(self._values, self._counted_S)
            | dict.fromkeys(self._lengths, self._counted_S[0]),
        )


def loss_scale(denominators: Tensor, states: Tensor) -> Tensor:
    """Return 1 / ``denominators[0]``, or 0 if that denominator is 0, on the device of ``states``.

    The dtype is float32 or wider.
    """
    total = denominators[0].to(states.device)
    wide = torch.promote_types(states.dtype, torch.float32)
    return torch.where(total > 0, 1 / total.clamp(min=1e-300), 0).to(wide)
