"""Rounds counted over a whole batch are those of answers that are read one token at a time."""

import pytest
import torch

from spec_kit.chain_drafting.rounds import count_rounds

STEPS = 3


def read_slowly(mask, right):
    """Accepted guesses of each round: ``right[t][s]`` says whether the guess of token t + 2 + s is right."""
    found, token = [], 1
    while token < len(mask):
        first = mask[token] and not mask[token - 1]
        if not mask[token] or first:
            token += 1  # of a prompt, or an answer's first, which comes with the prompt
            continue
        count = 0
        while count < STEPS and token + count < len(mask) and mask[token + count] and right[token - 2][count]:
            count += 1
        found.append(count)
        token += count + 1
    return found


@pytest.mark.parametrize("seed", range(20))
def test_rounds_are_those_of_a_slow_reader(seed):
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(60, generator=draw) < 0.8
    mask[:3] = False
    right = torch.rand(60, STEPS, generator=draw) < 0.6
    teacher = (mask.nonzero().squeeze(1) - 1).long()
    row = teacher[:, None] - 1 - torch.arange(STEPS)
    labelled = row >= 0
    matched = right[row.clamp(min=0), torch.arange(STEPS)]
    # A guess behind a token of a prompt has a label, too, but an answer ends there.
    expected = read_slowly(mask.tolist(), right.tolist())
    accepted, rounds = count_rounds(teacher, labelled, matched)
    assert rounds == len(expected)
    assert accepted == [sum(count > place for count in expected) for place in range(STEPS)]


def test_a_batch_without_answers_has_no_rounds():
    none = torch.zeros(0, STEPS, dtype=torch.bool)
    assert count_rounds(torch.zeros(0, dtype=torch.int64), none, none) == ([0] * STEPS, 0)
