"""Rounds counted over a whole batch are those of answers that are read one token at a time."""

import pytest
import torch

from spec_core.records import StepOutput
from spec_kit.layers import with_rounds

NONE = StepOutput(loss=torch.zeros(()), sums={}, counts={})
GUESSES = 3


def read_slowly(mask, right):
    """Accepted guesses of each round: ``right[t][k]`` says whether the guess of token t + 1 + k is right."""
    found, token = [], 1
    while token < len(mask):
        first = mask[token] and not mask[token - 1]
        if not mask[token] or first:
            token += 1  # of a prompt, or an answer's first, which comes with the prompt
            continue
        count = 0
        while (
            count < GUESSES and token + count < len(mask) and mask[token + count] and right[token - 1][count]
        ):
            count += 1
        found.append(count)
        token += count + 1
    return found


@pytest.mark.parametrize("after_prompts", [False, True], ids=["answers", "prompts, too"])
@pytest.mark.parametrize("seed", range(10))
def test_rounds_are_those_of_a_slow_reader(seed, after_prompts):
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(60, generator=draw) < 0.8
    mask[0] = False
    right = torch.rand(60, GUESSES, generator=draw) < 0.6
    last = (mask[1:] & (mask[:-1] | after_prompts)).nonzero().squeeze(1)
    label = last[:, None] + 1 + torch.arange(GUESSES)
    in_answer = (mask[label.clamp(max=59)] & (label < 60)).cumprod(1).bool()
    matched = (right[last] & in_answer).cumprod(1)
    expected = read_slowly(mask.tolist(), right.tolist())
    output = with_rounds(NONE, last, matched, after_prompts=after_prompts)
    assert output.counts["acceptance_per_position"].tolist() == [len(expected)] * GUESSES
    accepted = [sum(count > place for count in expected) for place in range(GUESSES)]
    assert output.sums["acceptance_per_position"].tolist() == accepted
    assert output.sums["acceptance_length_rounds"] == len(expected) + sum(expected)
    assert output.counts["acceptance_length_rounds"] == len(expected)


@pytest.mark.parametrize("after_prompts", [False, True])
def test_a_batch_without_answers_has_no_rounds(after_prompts):
    output = with_rounds(NONE, torch.zeros(0).long(), torch.zeros(0, GUESSES), after_prompts=after_prompts)
    assert output.metrics() == {"acceptance_per_position": [0.0] * GUESSES, "acceptance_length_rounds": 0.0}
