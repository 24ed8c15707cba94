"""The kernels that torch-npu's operators compute, at many shapes, against plain torch in float64.

The stand-in refuses what the operators' documentation excludes: what reaches them is within their limits.
"""

from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch_npu  # noqa: F401 (torch.npu)

from spec_backend_ascend import kernels
from spec_backend_ascend.attention import (
    npu_block_attention,
    npu_causal_attention,
    npu_causal_attention_backward,
)
from spec_kit.block_drafting import BlockLayout, block_attention, norm_rotate
from spec_kit.chain_drafting import ttt_attention, ttt_attention_backward
from spec_kit.layers import rotate
from spec_kit.layers.plain_kernels import rms_norm, swiglu, swiglu_mlp

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
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
        lambda x, weight: kernels.npu_rms_norm(x, weight, 1e-5),
        lambda x, weight: rms_norm(x, weight, 1e-5),
        [x, weight],
        dtype,
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


class Attention(NamedTuple):
    """A case of causal attention: documents of a batch, query and key heads, widths of keys and values."""

    bounds: list[tuple[int, int]]
    heads: tuple[int, int] = (4, 2)
    widths: tuple[int, int] = (32, 32)
    window: int | None = None
    num_later: int = 0
    """Later steps of a training-time test, each with one more key for each query."""


EVERY_ATTENTION = {
    "one_document": Attention([(0, 9)]),
    "documents_with_gaps": Attention([(1, 2), (2, 7), (8, 11)]),
    "values_narrower_than_keys": Attention([(0, 4), (4, 9)], widths=(24, 16)),
    "a_window": Attention([(0, 4), (4, 13)], window=3),
    "a_window_of_two": Attention([(0, 3)], window=2),
    "a_window_wider_than_documents": Attention([(0, 3), (3, 5)], window=50),
    "the_widest_heads": Attention([(0, 3)], heads=(2, 2), widths=(768, 768)),
    "most_heads": Attention([(0, 3)], heads=(256, 1), widths=(2, 2)),
    "more_documents_than_a_call_takes": Attention(
        [(n, n + 1) for n in range(1025)], heads=(1, 1), widths=(2, 2)
    ),
    "later_steps": Attention([(0, 4), (5, 9)], num_later=2),
    "later_steps_and_a_window": Attention([(0, 9)], window=4, num_later=1),
    "none": Attention([]),
}


@EACH_DTYPE
@pytest.mark.parametrize("case", EVERY_ATTENTION.values(), ids=EVERY_ATTENTION)
def test_attention_of_documents_merged_with_later_steps(dtype, case):
    (heads, kv_heads), (width, value_width) = case.heads, case.widths
    tokens = case.bounds[-1][1] + 1 if case.bounds else 3
    q, k = draw(tokens, heads, width, dtype=dtype), draw(tokens, kv_heads, width, dtype=dtype)
    v, grad = (draw(tokens, number, value_width, dtype=dtype) for number in (kv_heads, heads))
    later = [draw(case.num_later, tokens, kv_heads, w, dtype=dtype) for w in case.widths]

    wide = [tensor.double().requires_grad_() for tensor in (q, k, v, *later)]
    rows = [row for bound in case.bounds for row in range(*bound)]
    reference = _unrolled(*wide, case)
    expected = reference[rows], *torch.autograd.grad(reference[rows], wide, grad[rows].double())

    q, k, v, grad, *later = (tensor.npu() for tensor in (q, k, v, grad, *later))
    out, lse = npu_causal_attention(q, k, v, case.bounds, case.window)
    outside = [row for row in range(tokens) if row not in set(rows)]
    assert not out[outside].any()
    assert not lse[outside].any()
    if case.num_later:
        out, lse = ttt_attention(q, (out, lse), *later)
        grad[outside] = 0
    dq, *grads = npu_causal_attention_backward(grad, (q, k, v, out, lse), case.bounds, case.window)
    if case.num_later:
        dq, *of_later = ttt_attention_backward(grad, (q, out, lse), *later, dq)
        grads += of_later
    for actual, wanted in zip((out[rows], dq, *grads), expected, strict=False):
        assert (actual.cpu().double() - wanted).norm() <= BOUNDS[dtype] * wanted.norm()


def _unrolled(q, k, v, later_k, later_v, case):
    """Dense attention to the document's keys up to the query, and to the later keys at the query's own row."""
    group, scale, row = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5, torch.arange(len(q))
    document = torch.zeros(len(q), dtype=torch.int64)
    for number, (start, stop) in enumerate(case.bounds):
        document[start:stop] = number + 1
    distance = row[:, None] - row
    hidden = (distance < 0) | (document[:, None] != document) | (distance >= (case.window or len(q)))
    k, v, later_k, later_v = (part.repeat_interleave(group, -2) for part in (k, v, later_k, later_v))
    scores = torch.einsum("qhd,khd->qhk", q, k).masked_fill(hidden[:, None], -torch.inf)
    own = torch.einsum("qhd,sqhd->qhs", q, later_k)
    weights = (torch.cat([scores, own], -1) * scale).softmax(-1)
    seen = torch.einsum("qhk,khd->qhd", weights[..., : len(q)], v)
    return seen + torch.einsum("qhs,sqhd->qhd", weights[..., len(q) :], later_v)


@EACH_DTYPE
@pytest.mark.parametrize("slots", [1, 5])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_of_blocks(dtype, slots, window, is_causal):
    """More blocks than a chunk has, of two documents; the first block of each sees no context."""
    anchor = torch.cat([torch.arange(20), torch.arange(20, 45)])
    start = torch.where(anchor < 20, 0, 20)
    shapes = (45, slots, 4, 32), (45, 2, 32), (45, 2, 32), (45, slots, 2, 32), (45, slots, 2, 32)

    def attend(kernel, q, k, v, own_k, own_v):
        layout = BlockLayout(anchor, start, q.device)
        return kernel(q, (k, v), (own_k, own_v), layout, window, is_causal)

    tensors = [draw(*shape, dtype=dtype) for shape in shapes]
    assert_same(partial(attend, npu_block_attention), partial(attend, block_attention), tensors, dtype)


@pytest.mark.parametrize(
    ("shape", "rotated", "cos_dtype"),
    [
        ((2, 1000, 4), 4, torch.float32),
        ((2, 3, 896), 896, torch.float32),
        ((2, 3, 8), 0, torch.float32),
        ((0, 3, 8), 8, torch.float32),
        ((2, 3, 8), 8, torch.bfloat16),
    ],
    ids=["too_many_heads", "too_wide", "unrotated", "no_tokens", "angles_of_another_dtype"],
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
