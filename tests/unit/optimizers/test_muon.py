"""Muon against torch's own, and what it leaves to AdamW."""

import pytest
import torch

from spec_core import TrainedWeight, map_here
from spec_optimizers.muon import MuonConfig, MuonOptimizer
from spec_optimizers.orthogonal import orthogonalised

LR, STEPS = 0.02, 5
BFLOAT16 = 0.02
"""torch's own computes in bfloat16: its steps differ by so much, as a share."""


def drawn(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def trained(optimizer, weights, lr=LR):
    for step in range(STEPS):
        for weight in weights:
            weight.grad = drawn(weight.shape, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    return weights


@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("shape", [(24, 8), (8, 40), (16, 16)])
def test_matrices_change_as_by_torchs_own(shape, scale):
    ours, theirs = [drawn(shape, 9)], [drawn(shape, 9)]
    config = MuonConfig(name="muon", weight_decay=0.1, matrix_scale=scale, matrix_rate=2.0)
    built = MuonOptimizer(config).build([TrainedWeight(name="w", values=ours[0], shape=shape)], map_here)
    torchs = torch.optim.Muon(theirs, weight_decay=0.1, adjust_lr_fn=scale)
    start = drawn(shape, 9)
    (got,), (expected,) = trained(built, ours), trained(torchs, theirs, lr=2 * LR)
    assert (got - expected).norm() < BFLOAT16 * (expected - start).norm()


def test_a_head_and_a_vector_change_as_by_adamw():
    shapes = {"head": (12, 4), "norm": (4,)}
    ours, theirs = ([drawn(shape, 9) for shape in shapes.values()] for _ in range(2))
    weights = [
        TrainedWeight(name=name, values=value, shape=shape, is_vocabulary=name == "head")
        for (name, shape), value in zip(shapes.items(), ours, strict=True)
    ]
    config = MuonConfig(name="muon", betas=(0.8, 0.95), matrix_rate=3.0)
    built = MuonOptimizer(config).build(weights, map_here)
    adamw = torch.optim.AdamW(theirs, betas=(0.8, 0.95), weight_decay=0.0)
    for got, expected in zip(trained(built, ours), trained(adamw, theirs), strict=True):
        torch.testing.assert_close(got, expected)


def test_an_orthogonalised_matrix_has_equal_singular_values_and_the_same_spaces():
    matrix = drawn((10, 30)).double()
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    turned = left.mT @ orthogonalised(matrix) @ right.mT
    assert (turned - turned.diag().diag()).abs().max() < 1e-9
    assert 0.6 < turned.diag().min() <= turned.diag().max() < 1.3


def test_a_matrix_of_zeros_stays():
    assert not orthogonalised(torch.zeros(4, 3)).any()
