"""The kernels that torch-npu's operators compute, at many shapes, against plain torch in float64.

The stand-in refuses what the operators' documentation excludes: what reaches them is within their limits.
"""

import random
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
from spec_kit.block_drafting import BlockLayout, block_attention
from spec_kit.block_drafting.kernels import norm_rotate
from spec_kit.chain_drafting.kernels import ttt_attention, ttt_attention_backward
from spec_kit.layers import rotate
from spec_kit.layers.plain_kernels import rms_norm, swiglu, swiglu_mlp

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""dtype -> largest ‖difference‖ / ‖result‖."""
LEAST = 1.0
"""The smallest ‖result‖ of that bound: the gradient of a query that sees one key is 0."""
EACH_DTYPE = pytest.mark.parametrize("dtype", BOUNDS, ids=lambda dtype: str(dtype).removeprefix("torch."))
SHAPES = 40
"""Shapes of each operator: those at its limits, and drawn ones."""


def shapes(limits, draw_shape):
    """``limits``, then shapes that ``draw_shape`` draws; every second one is computed deterministically."""
    dice = random.Random(0)
    every = [*limits, *(draw_shape(dice) for _ in range(SHAPES - len(limits)))]
    for number, shape in enumerate(every):
        torch.use_deterministic_algorithms(number % 2 == 1)
        torch.manual_seed(number)
        yield shape


@pytest.fixture(autouse=True)
def card():
    torch.npu.set_device(0)
    yield
    torch.use_deterministic_algorithms(False)


def draw(*shape, dtype):
    return torch.randn(*shape).to(dtype)


def assert_same(kernel, plain, tensors, dtype):
    """Values and gradients of ``kernel`` are those of ``plain`` in float64, for tensors of the kernel's own dtype."""
    got = outcome(kernel, [tensor.npu() for tensor in tensors])
    expected = outcome(plain, [tensor.double() for tensor in tensors])
    for actual, reference in zip(got, expected, strict=True):
        assert actual.dtype == dtype
        assert_close(actual, reference, dtype)


def assert_close(actual, reference, dtype):
    error = (actual.cpu().double() - reference).norm()
    assert error <= BOUNDS[dtype] * max(reference.norm(), LEAST)


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


ROTATED_LIMITS = (1, 999, 4, 4), (3, 1, 900, 894), (9, 4, 2, 2), (1, 1, 896, 2)
"""Tokens, heads, and channels of a head, and of its rotated part."""


def some_rotated(dice):
    width = 2 * dice.randint(1, 40)
    return dice.randint(1, 12), dice.randint(1, 8), width, 2 * dice.randint(1, width // 2)


@EACH_DTYPE
def test_rotated_heads(dtype):
    for tokens, heads, width, rotated in shapes(ROTATED_LIMITS, some_rotated):
        angles = angles_of(tokens, rotated, dtype)
        x, weight = draw(tokens, heads, width, dtype=dtype), draw(width, dtype=dtype)
        assert_same(
            lambda x, angles=angles: kernels.npu_rotate(x, on(angles, x)),
            lambda x, angles=angles: rotate(x, on(angles, x)),
            [x],
            dtype,
        )
        assert_same(
            lambda x, weight, angles=angles: kernels.npu_norm_rotate(x, weight, 1e-5, on(angles, x)),
            lambda x, weight, angles=angles: norm_rotate(x, weight, 1e-5, on(angles, x)),
            [x, weight],
            dtype,
        )


@EACH_DTYPE
def test_rms_norm(dtype):
    limits = (1,), (2, 1), (1, 1, 2, 1, 1, 3, 1, 5), (2, 4096)
    for shape in shapes(limits, lambda dice: [dice.randint(1, 9) for _ in range(dice.randint(1, 4))]):
        assert_same(
            lambda x, weight: kernels.npu_rms_norm(x, weight, 1e-5),
            lambda x, weight: rms_norm(x, weight, 1e-5),
            [draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype)],
            dtype,
        )


def some_mlp(dice):
    """Leading dimensions, width and intermediate width."""
    leading = [dice.randint(1, 5) for _ in range(dice.randint(1, 3))]
    return leading, dice.randint(1, 20), dice.randint(1, 40)


@EACH_DTYPE
def test_swiglu(dtype):
    for leading, width, intermediate in shapes([((3, 5), 8, 1), ((1,), 1, 40)], some_mlp):
        gate, up = (draw(*leading, intermediate, dtype=dtype) for _ in range(2))
        assert_same(kernels.npu_swiglu, swiglu, [gate, up], dtype)
        sizes = (*leading, width), (intermediate, width), (intermediate, width), (width, intermediate)
        assert_same(kernels.npu_swiglu_mlp, swiglu_mlp, [draw(*size, dtype=dtype) for size in sizes], dtype)


class Attention(NamedTuple):
    """A case of causal attention: documents of a batch, query and key heads, widths of keys and values."""

    bounds: list[tuple[int, int]]
    heads: tuple[int, int] = (4, 2)
    widths: tuple[int, int] = (32, 32)
    window: int | None = None
    num_later: int = 0
    """Later steps of a training-time test, each with one more key for each query."""


ATTENTION_LIMITS = [
    Attention([(1, 2), (2, 7), (8, 11)]),  # with gaps
    Attention([(0, 4), (4, 9)], widths=(24, 16)),
    Attention([(0, 3)], window=2),
    Attention([(0, 3), (3, 5)], window=50),
    Attention([(0, 3)], heads=(2, 2), widths=(768, 768)),
    Attention([(0, 3)], heads=(256, 1), widths=(2, 2)),
    Attention([(n, n + 1) for n in range(1025)], heads=(1, 1), widths=(2, 2)),  # more than a call takes
    Attention([(0, 9)], window=4, num_later=1),
    Attention([]),
]


def some_attention(dice):
    marks = sorted(dice.sample(range(20), 2 * dice.randint(1, 4)))
    kv_heads = dice.randint(1, 3)
    return Attention(
        list(zip(marks[::2], marks[1::2], strict=True)),
        (kv_heads * dice.randint(1, 4), kv_heads),
        (dice.randint(1, 48),) * 2,
        dice.choice([None, dice.randint(2, 9)]),
        dice.randint(0, 3),
    )


@EACH_DTYPE
def test_attention_of_documents_merged_with_later_steps(dtype):
    for case in shapes(ATTENTION_LIMITS, some_attention):
        assert_attention(dtype, case)


def assert_attention(dtype, case):
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
        assert_close(actual, wanted, dtype)


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


class Blocks(NamedTuple):
    """A case of attention of blocks: two documents' tokens, each with a block; slots, heads and their width."""

    tokens: tuple[int, int] = (20, 25)  # more blocks than a chunk has
    slots: int = 5
    heads: tuple[int, int] = (4, 2)
    width: int = 32
    window: int | None = None
    is_causal: bool = False


def some_blocks(dice):
    kv_heads = dice.randint(1, 3)
    return Blocks(
        (dice.randint(1, 20), dice.randint(1, 20)),
        dice.randint(1, 8),
        (kv_heads * dice.randint(1, 4), kv_heads),
        dice.randint(1, 48),
        dice.choice([None, dice.randint(1, 9)]),
        dice.random() < 0.5,
    )


BLOCK_LIMITS = [
    *(Blocks(slots=slots, window=window, is_causal=slots > 1) for slots in (1, 5) for window in (None, 6)),
    Blocks((2, 1), 2, (256, 1), 2),
    Blocks((2, 1), 2, (2, 2), 768),
]


@EACH_DTYPE
def test_attention_of_blocks(dtype):
    """The first block of each document sees no context."""
    for case in shapes(BLOCK_LIMITS, some_blocks):
        total, (heads, kv_heads), slots = sum(case.tokens), case.heads, case.slots
        anchor = torch.arange(total)
        start = torch.where(anchor < case.tokens[0], 0, case.tokens[0])
        own = total, slots, kv_heads, case.width
        sizes = (total, slots, heads, case.width), own[::2] + own[3:], own[::2] + own[3:], own, own

        def attend(kernel, q, k, v, own_k, own_v, case=case, at=(anchor, start)):
            layout = BlockLayout(*at, q.device)
            return kernel(q, (k, v), (own_k, own_v), layout, case.window, case.is_causal)

        tensors = [draw(*size, dtype=dtype) for size in sizes]
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
    needed = ("npu_rms_norm", "npu_absent")
    monkeypatch.setitem(kernels.OPERATORS, "norm_rotate", (kernels.npu_norm_rotate, needed))
    assert kernels.npu_kernel("norm_rotate") is None
