"""The kernels that torch-npu's operators compute, at many shapes, against plain torch in float64.

The stand-in refuses what the operators' documentation excludes: what reaches them is within their limits.
"""

import pytest
import torch
import torch_npu  # noqa: F401 (torch.npu)

from spec_backend_ascend import kernels
from spec_kit.block_drafting.kernels import norm_rotate
from spec_kit.layers import rotate
from spec_kit.layers.plain_kernels import swiglu, swiglu_mlp

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""dtype -> largest ‖difference‖ / ‖result‖."""
EACH_DTYPE = pytest.mark.parametrize("dtype", BOUNDS, ids=lambda dtype: str(dtype).removeprefix("torch."))
EVERY_ROTATED = (7, 3, 32, 32), (5, 2, 24, 16), (1, 999, 4, 4), (3, 1, 900, 894), (9, 4, 2, 2)
"""Tokens, heads, and channels of a head, and of its rotated part."""
EVERY_MLP = ((7,), 16, 24), ((3, 5), 8, 1), ((1,), 1, 40), ((2, 1, 3), 6, 10)


@pytest.fixture(autouse=True)
def card():
    torch.npu.set_device(0)
    torch.manual_seed(0)


def draw(*shape, dtype):
    return torch.randn(*shape).to(dtype)


def assert_same(kernel, plain, tensors, dtype):
    """Values and gradients of ``kernel`` are those of ``plain`` in float64, for tensors of the kernel's own dtype."""
    got = outcome(kernel, [tensor.npu() for tensor in tensors])
    expected = outcome(plain, [tensor.double() for tensor in tensors])
    for actual, reference in zip(got, expected, strict=True):
        assert actual.dtype == dtype
        error = (actual.cpu().double() - reference).norm()
        assert error <= BOUNDS[dtype] * reference.norm()


def outcome(function, tensors):
    tensors = [tensor.requires_grad_() for tensor in tensors]
    value = function(*tensors)
    assert value is not NotImplemented
    torch.manual_seed(1)
    grad = torch.randn(value.shape).to(value)
    return value.detach(), *torch.autograd.grad(value, tensors, grad)


def angles_of(tokens, rotated, dtype):
    angle = torch.rand(tokens, 1, rotated // 2) * 6
    return angle.cos().to(dtype), angle.sin().to(dtype)


def on(angles, like):
    return tuple(part.to(like) for part in angles)


@EACH_DTYPE
@pytest.mark.parametrize(("tokens", "heads", "width", "rotated"), EVERY_ROTATED)
def test_rotated_heads(dtype, tokens, heads, width, rotated):
    angles = angles_of(tokens, rotated, dtype)
    x, weight = draw(tokens, heads, width, dtype=dtype), draw(width, dtype=dtype)
    assert_same(
        lambda x: kernels.npu_rotate(x, on(angles, x)), lambda x: rotate(x, on(angles, x)), [x], dtype
    )
    assert_same(
        lambda x, weight: kernels.npu_norm_rotate(x, weight, 1e-5, on(angles, x)),
        lambda x, weight: norm_rotate(x, weight, 1e-5, on(angles, x)),
        [x, weight],
        dtype,
    )


@EACH_DTYPE
@pytest.mark.parametrize(("leading", "width", "intermediate"), EVERY_MLP)
def test_swiglu(dtype, leading, width, intermediate):
    gate, up = (draw(*leading, intermediate, dtype=dtype) for _ in range(2))
    assert_same(kernels.npu_swiglu, swiglu, [gate, up], dtype)
    shapes = (*leading, width), (intermediate, width), (intermediate, width), (width, intermediate)
    assert_same(kernels.npu_swiglu_mlp, swiglu_mlp, [draw(*shape, dtype=dtype) for shape in shapes], dtype)


@pytest.mark.parametrize(
    ("shape", "rotated", "cos_dtype"),
    [
        ((2, 1000, 4), 4, torch.float32),
        ((2, 3, 896), 896, torch.float32),
        ((2, 3, 8), 0, torch.float32),
        ((0, 3, 8), 8, torch.float32),
        ((2, 3, 8), 8, torch.bfloat16),
    ],
    ids=["too many heads", "too wide", "unrotated", "no tokens", "angles of another dtype"],
)
def test_what_an_operator_does_not_take_is_left_to_plain_torch(shape, rotated, cos_dtype):
    x = torch.randn(*shape).npu()
    angles = tuple(part.npu() for part in angles_of(shape[0], rotated, cos_dtype))
    assert kernels.npu_rotate(x, angles) is NotImplemented
    assert kernels.npu_norm_rotate(x, torch.ones(shape[-1]).npu(), 1e-5, angles) is NotImplemented
    assert kernels.npu_swiglu(x[:0], x[:0]) is NotImplemented
    assert kernels.npu_swiglu(x, x.half()) is NotImplemented


def test_a_kernel_without_its_operator_is_not_offered(monkeypatch):
    assert kernels.npu_kernel("norm_rotate") is kernels.npu_norm_rotate
    monkeypatch.setitem(
        kernels.OPERATORS, "norm_rotate", (kernels.npu_norm_rotate, ("npu_rms_norm", "npu_absent"))
    )
    assert kernels.npu_kernel("norm_rotate") is None
