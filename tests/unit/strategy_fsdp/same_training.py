"""Compare runs of training that must be the same but for rounding."""

import pytest
import torch

TOLERANCE = 1e-5


def assert_same(got, expected):
    assert got.losses == pytest.approx(expected.losses[-len(got.losses) :], rel=TOLERANCE)
    assert got.grad_norms == pytest.approx(expected.grad_norms[-len(got.losses) :], rel=TOLERANCE)
    assert got.evaluated == pytest.approx(expected.evaluated, rel=TOLERANCE)
    for name, values in got.weights.items():
        mine, theirs = (torch.tensor(x, dtype=torch.float64) for x in (values, expected.weights[name]))
        assert (mine - theirs).norm() <= TOLERANCE * theirs.norm(), name
