"""Sum the metrics of guessed blocks, and compute the factor that scales a batch's loss.

Shapes: A blocks, S guesses of a block, R counted guesses, M metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from spec_core import to_device_async
from spec_core.records import DraftBatch, StepOutput
from spec_kit.block_drafting.blocks import CountedGuesses
from spec_kit.layers import with_rounds


class GuessMetrics:
    """The loss, values of each guess, and acceptance lengths.

    Chunks only add their values to lists, which are summed at the end. Sums of each chunk would be many small
    operations.
    """

    def __init__(
        self,
        guesses: CountedGuesses,
        num_guesses: int,
        values: Sequence[str],
        lengths: Mapping[str, tuple[str, str]],
    ) -> None:
        """Start without values.

        ``guesses``: all guesses of the batch. ``values``: names of the metrics that each guess has; ``accuracy`` is
        whether it is the token of the data. ``lengths``: name
        of an acceptance length -> names of two values: the probability that the data go on with a guess, and the
        probability that the guess is accepted.
        """
        self._guesses = guesses
        self._num_guesses = num_guesses
        self._lengths = lengths
        self._weighted: list[Tensor] = []
        self._values: dict[str, list[Tensor]] = {name: [] for name in values}

    def add(self, weighted_R: Tensor, **value_R: Tensor) -> None:
        """Add a chunk's guesses: their summands of the loss, and each value under the name of its metric."""
        self._weighted.append(weighted_R)
        for name, values in value_R.items():
            self._values[name].append(values)

    def loss(self, scale: Tensor) -> Tensor:
        """Return the sum of the guesses' summands of the loss, with dtype and device of ``scale``."""
        return torch.cat([scale.new_zeros(0), *self._weighted]).sum()

    def output(self, loss: Tensor, batch: DraftBatch) -> StepOutput:
        """Return ``loss`` and the metrics as a StepOutput, in an evaluation with those of an engine's rounds.

        A block's acceptance length is 1 + Σ over guesses k of P(the data go on with guesses 1 to k − 1) · P(guess k
        is accepted). The lengths are divided by the number of blocks, which is the number of first guesses, because
        the first guess of every block counts.
        """
        none = loss.new_zeros(0)
        columns = [
            torch.cat([none, *(part.to(none.dtype) for part in parts)]) for parts in self._values.values()
        ]
        table_ASM = self._guesses.table(torch.stack(columns, dim=1), self._num_guesses)
        counted_S = self._counted(loss.device)
        value_AS = dict(zip(self._values, table_ASM.unbind(2), strict=True))
        sums = {name: table_AS.sum(0) for name, table_AS in value_AS.items()}
        lengths: dict[str, Tensor] = {}
        for name, (followed, accepted) in self._lengths.items():
            before_AS = value_AS[followed].cumprod(1).roll(1, 1)
            before_AS[:, :1] = 1
            lengths[name] = len(table_ASM) + (before_AS * value_AS[accepted]).sum()
        output = StepOutput(
            loss=loss,
            sums=sums | lengths,
            counts=dict.fromkeys(sums, counted_S) | dict.fromkeys(self._lengths, counted_S[0]),
        )
        # Ranks of a context-parallel group have some of an answer's blocks each.
        if not batch.evaluates or batch.context is not None:
            return output
        anchor_A = self._guesses.anchor_R[self._guesses.guess_R == 0]
        return with_rounds(output, anchor_A, value_AS["accuracy"].cumprod(1))

    def _counted(self, device: torch.device) -> Tensor:
        """Return how many blocks have each guess, int64 [S]."""
        counted_AS = self._guesses.counted_A[:, None] > torch.arange(self._num_guesses)
        return to_device_async(counted_AS.sum(0), device)


def loss_scale(denominators: Tensor, states: Tensor) -> Tensor:
    """Return 1 / ``denominators[0]``, or 0 if that denominator is 0, on the device of ``states``.

    The dtype is float32 or wider.
    """
    total = denominators[0].to(states.device)
    wide = torch.promote_types(states.dtype, torch.float32)
    return torch.where(total > 0, 1 / total.clamp(min=1e-300), 0).to(wide)
