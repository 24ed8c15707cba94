"""Compare runs of training that must be the same but for rounding."""

import pytest
from safetensors.torch import load

from ..strategy_megatron.training import LR

TOLERANCE = 1e-5


def assert_same(got, expected):
    assert got.losses == pytest.approx(expected.losses[-len(got.losses) :], rel=TOLERANCE)
    assert got.grad_norms == pytest.approx(expected.grad_norms[-len(got.losses) :], rel=TOLERANCE)
    assert got.evaluated == pytest.approx(expected.evaluated, rel=TOLERANCE)
    assert_same_weights(got.weights, expected.weights)


def assert_same_weights(got, expected):
    mine, theirs = load(got), load(expected)
    assert mine.keys() == theirs.keys()
    for name, weight in theirs.items():
        difference = mine[name].double() - weight.double()
        # A weight that has moved by less than a step, such as a bias to which attention is blind, is mostly rounding.
        assert difference.norm() <= TOLERANCE * weight.double().norm().clamp(min=LR), name
