"""Which guesses of an engine's rounds count as refused, and the denominators of Draft-OPD."""

import pytest
import torch

from spec_core.records import Supervision
from spec_kit.block_drafting import BlockConfig, BlockRule
from spec_kit.block_drafting.judged_guesses import judged_denominators

WEIGHTS = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)
DEPTHS = [0, 1, 2, 1, 2, 3, 1, 1, 2, 0, 1]
"""Guess 2 of the round at token 0 is refused, guess 3 of that at 2, and guess 1 of that at 5; others are right."""


def denominators(num_guesses, guess_depth, unsupervised=()):
    mask = torch.ones(len(DEPTHS), dtype=torch.bool)
    mask[list(unsupervised)] = False
    sample = Supervision(sample_id=1, epoch=0, loss_mask=mask, guess_depth=guess_depth)
    rule = BlockRule(BlockConfig(num_anchors=50, anchor_share=1), num_guesses)
    return judged_denominators(rule, WEIGHTS[:num_guesses], [sample]).tolist()


@pytest.mark.parametrize(
    ("num_guesses", "expected"), [(3, [6, 0.5 + 0.25 + 1]), (2, [6, 0.5 + 1]), (1, [4, 1])]
)
def test_the_last_guess_of_a_round_is_refused_if_another_round_begins_behind_it(num_guesses, expected):
    """A block shorter than a round ends before the refused guess."""
    assert denominators(num_guesses, torch.tensor(DEPTHS)) == expected


def test_guesses_behind_an_unsupervised_token_do_not_count():
    assert denominators(3, torch.tensor(DEPTHS), unsupervised=[4]) == [5, 0.5 + 1]


def test_without_guess_depths_all_guesses_are_accepted():
    assert denominators(3, None) == [3 * 8 + 2 + 1, 0]
