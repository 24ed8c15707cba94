"""Count the rounds in which an engine would have written the answers of a batch with a chain's guesses.

An engine verifies guesses so that an answer has the target's own tokens, drawn at the answer's temperature. A guess
that is made greedily is accepted exactly if it is the token that the answer has there. So data that the target has
written say which guesses of each round were accepted, at the temperature at which it wrote them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def count_rounds(teacher_R: Tensor, labelled_RS: Tensor, matched_RS: Tensor) -> tuple[list[int], int]:
    """Return the number of accepted guesses by position, and the number of rounds.

    ``teacher_R``: positions of the teacher, ascending. ``labelled_RS``, ``matched_RS``: whether the guess of step s
    there has a label, and whether it is the token of the data.

    The round of row t guesses tokens t + 2 and following ones. The next one begins behind the accepted guesses and
    the token that the target adds. The first token of an answer comes from its prompt, without a round.
    """
    num_steps = labelled_RS.shape[1]
    teacher_R, matched_RS = teacher_R.cpu(), (matched_RS & labelled_RS).cpu()
    size = int(teacher_R.max()) if len(teacher_R) else 0
    right_TS = torch.zeros(size, num_steps, dtype=torch.int64)
    row_RS = (teacher_R[:, None] - 1 - torch.arange(num_steps)).clamp(min=0)
    right_TS.scatter_reduce_(0, row_RS, matched_RS.long(), "amax")
    guesses_T = torch.zeros(size, dtype=torch.bool)
    guesses_T[teacher_R[labelled_RS[:, 0].cpu()] - 1] = True
    begins_T = guesses_T & F.pad(guesses_T[:-1], (1, 0))
    begins, accepted = begins_T.tolist(), right_TS.cumprod(1).sum(1).tolist()
    rounds_of, row = [0] * (num_steps + 1), 0
    while row < size:
        if begins[row]:
            rounds_of[accepted[row]] += 1
            row += accepted[row]
        row += 1
    return [sum(rounds_of[position + 1 :]) for position in range(num_steps)], sum(rounds_of)
