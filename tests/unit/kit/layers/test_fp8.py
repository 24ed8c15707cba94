"""Products in fp8 against float64, within what the formats' rounding explains."""

import math

import pytest
import torch

from spec_kit.layers import Fp8Layers, Mlp, linear
from spec_kit.layers.fp8 import BACKWARD, FORWARD, Fp8Kernels, Fp8Weight, quantize_rows

from ....fp8_on_cpus import needs_fp8

ROUNDING = {FORWARD: 2.0**-4, BACKWARD: 2.0**-3}
"""Half of the gap between neighbouring numbers of one exponent, over the smaller one: 3 and 2 bits of mantissa."""
SUBNORMAL = {FORWARD: 2.0**-10, BACKWARD: 2.0**-17}
"""Half of the gap between numbers below the smallest normal one."""


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def errors(rows_RK, dtype):
    """Most that rounding can change of each number of the rows, in float64."""
    wide = rows_RK.double().abs()
    scale_R1 = wide.amax(1, keepdim=True) / torch.finfo(dtype).max
    return torch.maximum(ROUNDING[dtype] * wide, SUBNORMAL[dtype] * scale_R1) * (1 + 1e-6)


def product_bound(left_RK, left_dtype, right_NK, result_dtype=torch.float32):
    """Most by which the product of two rounded matrices differs: |a b - a' b'| <= |a| db + da |b| + da db."""
    a, b, da, db = (
        left_RK.double().abs(),
        right_NK.double().abs(),
        errors(left_RK, left_dtype),
        errors(right_NK, FORWARD),
    )
    rounded = a @ db.T + da @ b.T + da @ db.T
    # Sums in float32 over K terms, and the result's own dtype.
    return rounded + (a + da) @ (b + db).T * (a.shape[1] * 2.0**-24 + torch.finfo(result_dtype).eps)


@pytest.mark.parametrize("dtype", [FORWARD, BACKWARD])
@pytest.mark.parametrize("size", [1.0, 1e-20, 1e20])
def test_a_row_is_rounded_by_no_more_than_its_format_does(dtype, size):
    rows = draw(5, 64) * size * torch.logspace(-6, 6, 5)[:, None]
    values, scale = quantize_rows(rows, dtype)
    assert values.dtype == dtype
    difference = (values.double() * scale.double() - rows.double()).abs()
    assert (difference <= errors(rows, dtype)).all()
    largest = torch.finfo(dtype).max
    assert (values.float().abs().amax(1) == largest).all(), "the format's range is not used"


def test_rows_of_zeros_stay_zero_and_what_is_not_finite_shows():
    rows = torch.zeros(3, 16)
    rows[1, 2], rows[2, 5] = math.nan, math.inf
    values, scale = quantize_rows(rows, FORWARD)
    result = values.float() * scale
    assert result[0].eq(0).all()
    assert not result[1].isfinite().all()
    assert not result[2].isfinite().all()


@needs_fp8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_with_a_weight_differ_by_rounding_only(dtype):
    rows, weight, grad = (
        draw(9, 64, dtype=dtype),
        draw(48, 64, seed=1, dtype=dtype),
        draw(9, 48, seed=2, dtype=dtype),
    )
    products = Fp8Weight(weight)
    difference = (products.forward(rows).double() - rows.double() @ weight.double().T).abs()
    assert (difference <= product_bound(rows, FORWARD, weight, dtype)).all()
    assert difference.max() > 0, "nothing was rounded"
    back = (products.backward(grad).double() - grad.double() @ weight.double()).abs()
    assert (back <= product_bound(grad, BACKWARD, weight.T, dtype)).all()


@needs_fp8
def test_gradients_of_a_layer_are_those_of_its_products():
    layers = Fp8Layers(lambda name: None)
    layer = linear(64, 48)
    layers.attach(layer)
    rows, grad = draw(3, 5, 64).requires_grad_(), draw(3, 5, 48, seed=2)
    layer(rows).backward(grad)
    products = Fp8Weight(layer.weight.detach())
    torch.testing.assert_close(rows.grad, products.backward(grad), rtol=0, atol=0)
    # The weight's own gradient is not in fp8.
    expected = grad.flatten(0, 1).double().T @ rows.detach().flatten(0, 1).double()
    torch.testing.assert_close(layer.weight.grad.double(), expected, rtol=1e-5, atol=1e-5)


@needs_fp8
def test_weights_are_read_anew_in_each_pass_and_once_in_it():
    seen = []

    def counting(rows, dtype):
        seen.append(rows.shape)
        return quantize_rows(rows, dtype)

    layers = Fp8Layers({"quantize_rows": counting}.get)
    mlp = torch.nn.Sequential(Mlp(32, 48, layers.find("swiglu_mlp")), linear(32, 16))
    layers.attach(mlp)
    rows = draw(7, 32)
    before = mlp(rows)
    assert sum(shape[0] != 7 for shape in seen) == 4
    mlp[0](rows)
    assert sum(shape[0] != 7 for shape in seen) == 4
    with torch.no_grad():
        mlp[1].weight.mul_(2)
    torch.testing.assert_close(mlp(rows), 2 * before)


@pytest.mark.parametrize("sizes", [(24, 48), (48, 24)])
def test_layers_of_other_sizes_stay_as_they_are(sizes):
    layers, layer, rows = Fp8Layers(lambda name: None), linear(*sizes), draw(5, sizes[0])
    expected = layer(rows)
    layers.attach(layer)
    assert torch.equal(layer(rows), expected)
    kernels = Fp8Kernels.of(layers.find)
    assert kernels.quantize_rows is quantize_rows
    weight = layer.weight
    calls = {
        "added_linear": (rows, weight),
        "linear_weight": (weight,),
        "swiglu_mlp": (rows, weight, weight, weight),
    }
    for name, arguments in calls.items():
        assert layers.find(name)(*arguments) is NotImplemented
