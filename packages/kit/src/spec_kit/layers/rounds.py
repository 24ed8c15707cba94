"""Count the rounds in which an engine would have written the answers of a batch with the draft's guesses.

An engine verifies guesses so that an answer has the target's own tokens, drawn at the answer's temperature. A guess
that is made greedily is accepted exactly if it is the token that the answer has there. So data that the target has
written say which guesses of each round were accepted, at the temperature at which it wrote them.

Shapes: A places where a round may begin, K guesses.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_core.records import StepOutput


def with_rounds(
    output: StepOutput, last_A: Tensor, right_AK: Tensor, *, after_prompts: bool = False
) -> StepOutput:
    """Return ``output`` with the metrics ``acceptance_per_position`` and ``acceptance_length_rounds``.

    ``last_A``: int64, ascending, the last known token of each place in the flat batch. ``right_AK``: whether the data
    go on with a guess and all guesses before it. ``after_prompts``: whether there is a place after each prompt, too,
    where no round begins, because the first token of an answer comes from its prompt.

    The next round begins behind the accepted guesses and the token that the target adds.
    """
    if after_prompts:
        goes_on_A = last_A.diff(prepend=last_A[:1]) == 1
        last_A, right_AK = last_A[goes_on_A], right_AK[goes_on_A]
    places: list[list[int]] = torch.stack([last_A, right_AK.sum(1).long()], dim=1).tolist()
    begun = list[int]()
    following = 0
    for place, (last, accepted) in enumerate(places):
        if last >= following:
            begun.append(place)
            following = last + accepted + 1
    accepted_K = right_AK[begun].sum(0)
    rounds_K = torch.full_like(accepted_K, len(begun))
    sums = {"acceptance_per_position": accepted_K, "acceptance_length_rounds": len(begun) + accepted_K.sum()}
    counts = {"acceptance_per_position": rounds_K, "acceptance_length_rounds": rounds_K[0]}
    return replace(output, sums={**output.sums, **sums}, counts={**output.counts, **counts})


def are_refused(guess_depth_T: Tensor) -> Tensor:
    """Return for each guessed token whether the target refused the guess: then a round begins behind the token.

    ``guess_depth_T``: depth at which an engine guessed each token; 0 for other tokens, for which the result has no
    meaning, bool [T]. The last token counts as accepted.
    """
    return F.pad(guess_depth_T[1:], (0, 1)) == 1
