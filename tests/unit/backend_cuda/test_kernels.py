"""The Triton kernels against plain torch in float64. They run on a GPU, or slowly, where triton is installed, in its
interpreter (TRITON_INTERPRET=1)."""

import os

import pytest
import torch

from spec_draft_dflash.kernels import scaled_softmax_
from spec_draft_dflash2.kernels import convolve
from spec_kit.block_drafting import BlockLayout, block_attention
from spec_kit.block_drafting.kernels import norm_rotate
from spec_kit.chain_drafting.kernels import ttt_attention, ttt_attention_backward
from spec_kit.layers import plain_kernels as plain
from spec_kit.layers.fp8 import BACKWARD, FORWARD, quantize_rows
from spec_kit.layers.rope import rotate

triton = pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not torch.cuda.is_available() and not INTERPRETED:
    pytest.skip("no CUDA device", allow_module_level=True)

from spec_backend_cuda.kernels import KERNELS  # noqa: E402 (needs triton)

# A worker thread of autograd has no CUDA context before its first product; torch then makes one, and says so.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")]
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
HALF = torch.float16 if INTERPRETED else torch.bfloat16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def draw(*shape, dtype):
    return torch.randn(shape, device=DEVICE).to(dtype)


def assert_near(got, expected):
    """‖got − expected‖ / ‖expected‖"""
    assert got.shape == expected.shape
    error = (got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
    assert error < TOLERANCE[got.dtype]


def assert_same_function(fused, reference, tensors):
    """Values and gradients of ``fused`` at ``tensors`` are those of ``reference`` in float64."""
    inputs = [tensor.requires_grad_() for tensor in tensors]
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    got, expected = fused(*inputs), reference(*wide)
    assert_near(got, expected)
    grad = torch.randn_like(got)
    pairs = zip(
        torch.autograd.grad(got, inputs, grad),
        torch.autograd.grad(expected, wide, grad.double()),
        strict=True,
    )
    for actual, reference in pairs:
        assert_near(actual, reference)


def angles_of(num_tokens, half, dtype):
    angle = torch.rand(num_tokens, 1, half, device=DEVICE, dtype=torch.float64) * 6
    return (angle.cos().to(dtype), angle.sin().to(dtype)), (
        angle.cos().to(dtype).double(),
        angle.sin().to(dtype).double(),
    )


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_mlp(dtype):
    shapes = (3, 5, 16), (48, 16), (48, 16), (16, 48)
    tensors = [draw(*shape, dtype=dtype) * 0.5 for shape in shapes]
    assert_same_function(KERNELS["swiglu_mlp"], plain.swiglu_mlp, [tensor.detach() for tensor in tensors])


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_swiglu(dtype):
    tensors = [draw(3, 1500, dtype=dtype) for _ in range(2)]
    assert_same_function(KERNELS["swiglu"], plain.swiglu, tensors)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("form", [FORWARD, BACKWARD])
@pytest.mark.parametrize("width", [48, 8192, 9000])
def test_quantize_rows(dtype, form, width):
    rows = draw(5, width, dtype=dtype) * torch.tensor([[1.0], [0.0], [1e-3], [30.0], [1.0]]).to(DEVICE, dtype)
    rows[4, 3] = torch.nan
    values, scale = KERNELS["quantize_rows"](rows, form)
    _, expected_scale = quantize_rows(rows, form)
    assert values.dtype == form
    torch.testing.assert_close(scale[:4], expected_scale[:4], rtol=1e-6, atol=0)
    # Half of a gap between numbers of the format. The interpreter loses a carry where it rounds up to a power of 2.
    bits, smallest = {FORWARD: (4, 2.0**-10), BACKWARD: (3, 2.0**-17)}[form]
    bound = torch.maximum(2.0**-bits * rows.double().abs(), smallest * scale.double())[:4]
    difference = (values.double() * scale.double() - rows.double())[:4].abs()
    within = difference <= bound * (1 + 1e-5)
    assert within.double().mean() > 0.9 if INTERPRETED else within.all()
    assert not (values[4].float() * scale[4]).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("heads", [1, 3])
def test_rotate_takes_a_slice_of_a_wider_tensor(dtype, heads):
    narrow, wide = angles_of(23, 16, dtype)
    whole = draw(23, 7, 32, dtype=dtype)
    assert_same_function(
        lambda x: KERNELS["rotate"](x[:, 2 : 2 + heads], narrow),
        lambda x: rotate(x[:, 2 : 2 + heads], wide),
        [whole],
    )


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_norm_rotate(dtype):
    narrow, wide = angles_of(37, 32, dtype)
    assert_same_function(
        lambda x, weight: KERNELS["norm_rotate"](x, weight, 1e-3, narrow),
        lambda x, weight: norm_rotate(x, weight, 1e-3, wide),
        [draw(37, 3, 64, dtype=dtype), 1 + 0.2 * draw(64, dtype=dtype)],
    )


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("slots", "taps", "group"), [(5, 2, 4), (3, 1, 160), (2, 4, 2), (37, 3, 32)])
def test_convolve(dtype, slots, taps, group):
    width = 160
    shapes = (7, slots, width), (taps, width), (7, slots, 2, taps, width // group)
    tensors = [draw(*shape, dtype=dtype) for shape in shapes]
    fused = KERNELS["convolve"]
    if group == 160:  # not a power of two
        assert fused(*tensors[:2], tensors[2][:, :, 1]) is NotImplemented
        return
    assert_same_function(
        lambda x, base, moving: fused(x, base, moving[:, :, 1]),
        lambda x, base, moving: convolve(x, base, moving[:, :, 1]),
        tensors,
    )


def test_partly_rotated_heads_and_float64_are_declined():
    narrow, _ = angles_of(4, 8, torch.float32)
    x = draw(4, 2, 32, dtype=torch.float32)
    assert KERNELS["rotate"](x, narrow) is NotImplemented
    weights = [draw(*shape, dtype=torch.float64) for shape in ((6, 4), (6, 4), (4, 6))]
    x = draw(3, 4, dtype=torch.float64)
    assert KERNELS["swiglu_mlp"](x, *weights) is NotImplemented


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "value_width"),
    [(4, 2, 32, 32), (6, 2, 16, 16), (2, 2, 48, 48), (3, 3, 24, 16)],
)
@pytest.mark.parametrize("num_keys", [1, 3])
def test_ttt_attention(dtype, heads, kv_heads, width, value_width, num_keys):
    """Values are as wide as keys, or narrower."""
    tokens = 21
    q, grad_q = (draw(tokens, heads, width, dtype=dtype) for _ in range(2))
    out, grad_out = (draw(tokens, heads, value_width, dtype=dtype) for _ in range(2))
    # Of a buffer with more rows, as in a step whose rows are some of those of an earlier step.
    keys, values = (
        draw(num_keys, tokens + 3, kv_heads, size, dtype=dtype)[:, :tokens] for size in (width, value_width)
    )
    lse = torch.randn(tokens, heads, device=DEVICE)
    wide = [tensor.double() for tensor in (q, out, grad_out, grad_q, keys, values)]
    wide_q, wide_out, wide_grad, wide_grad_q, wide_keys, wide_values = wide
    expected = ttt_attention(wide_q, (wide_out, lse.double()), wide_keys, wide_values)
    merged = KERNELS["ttt_attention"](q, (out, lse), keys, values)
    for got, reference in zip(merged, expected, strict=True):
        assert_near(got, reference)
    saved = wide_q, merged[0].double(), merged[1].double()
    expected = ttt_attention_backward(wide_grad, saved, wide_keys, wide_values, wide_grad_q)
    got = KERNELS["ttt_attention_backward"](grad_out, (q, *merged), keys, values, grad_q)
    for actual, reference in zip(got, expected, strict=True):
        assert_near(actual, reference)


PLACES = {
    "one document": ([1, 2, 3, 9, 40, 41, 77, 150, 199], [0] * 9),
    "documents": ([0, 3, 70, 71, 90, 130, 131, 199], [0, 0, 64, 64, 64, 130, 130, 130]),
    "one block": ([5], [2]),
}


@pytest.mark.parametrize("sight", [(None, False), (None, True), (16, True), (16, False), (70, True)])
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize(("slots", "heads", "kv_heads"), [(16, 4, 1), (5, 6, 2), (8, 2, 2), (16, 5, 1)])
def test_block_attention(sight, places, slots, heads, kv_heads):
    anchors, starts = (torch.tensor(part) for part in PLACES[places])
    layout = BlockLayout(anchors, starts, DEVICE)
    tensors = [draw(len(anchors), slots, heads, 32, dtype=HALF)]
    tensors += [draw(200, kv_heads, 32, dtype=HALF) for _ in range(2)]
    tensors += [draw(len(anchors), slots, kv_heads, 32, dtype=HALF) for _ in range(2)]

    def fused(q, key, value, own_key, own_value):
        return KERNELS["block_attention"](q, (key, value), (own_key, own_value), layout, *sight)

    def reference(q, key, value, own_key, own_value):
        return block_attention(q, (key, value), (own_key, own_value), layout, *sight)

    assert_same_function(fused, reference, tensors)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_another_number_of_tokens_or_blocks_compiles_nothing(monkeypatch):
    """Triton would compile a kernel anew for a number that 16 divides."""
    compiled = []
    use_kernels(tokens=33, blocks=3)
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **kernel: compiled.append(kernel["repr"])
    )
    for tokens, blocks in (32, 3), (33, 16), (48, 32):
        use_kernels(tokens, blocks)
    assert not compiled


def use_kernels(tokens, blocks):
    layout = BlockLayout(torch.arange(blocks), torch.zeros(blocks, dtype=torch.int64), DEVICE)
    own = [draw(blocks, 7, heads, 32, dtype=HALF).requires_grad_() for heads in (4, 2, 2)]
    context = [draw(tokens, 2, 32, dtype=HALF).requires_grad_() for _ in range(2)]
    KERNELS["block_attention"](own[0], tuple(context), tuple(own[1:]), layout, None).sum().backward()
    states = draw(blocks, 7, 64, dtype=HALF).requires_grad_()
    moving = draw(blocks, 7, 2, 2, 16, dtype=HALF)[:, :, 1].requires_grad_()
    KERNELS["convolve"](states, draw(2, 64, dtype=HALF), moving).sum().backward()
    q, weight = draw(tokens, 3, 32, dtype=HALF).requires_grad_(), draw(32, dtype=HALF).requires_grad_()
    angles, _ = angles_of(tokens, 16, HALF)
    KERNELS["norm_rotate"](q, weight, 1e-3, angles).sum().backward()
    q, out, *gradients = (draw(tokens, 4, 32, dtype=HALF) for _ in range(4))
    keys, values = (draw(3, tokens, 2, 32, dtype=HALF) for _ in range(2))
    merged = KERNELS["ttt_attention"](q, (out, torch.randn(tokens, 4, device=DEVICE)), keys, values)
    KERNELS["ttt_attention_backward"](gradients[0], (q, *merged), keys, values, gradients[1])


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("width", [7, 4096, 9001])
def test_vocabulary_rows(dtype, width):
    logits, other = 3 * draw(3, 2, width, dtype=dtype), 3 * draw(3, width, dtype=dtype)
    wide, wide_other = logits.double(), other.double()
    top, total, index = KERNELS["logsumexp_argmax"](logits)
    assert torch.equal(index, wide.argmax(-1))
    assert_near(top + total.log(), wide.logsumexp(-1))
    log_sum, teacher = wide.logsumexp(-1), (other, other.double().logsumexp(-1).float())
    mass, wide_teacher = torch.rand(3, device=DEVICE), (wide_other, wide_other.logsumexp(-1))
    expected = plain.distill_terms(wide, log_sum, wide_teacher, mass.double())
    for got, reference in zip(
        KERNELS["distill_terms"](logits, log_sum.float(), teacher, mass), expected, strict=True
    ):
        assert_near(got, reference)
    factors = torch.randn(3, 3, 2, device=DEVICE).unbind()
    wide_factors = tuple(factor.double() for factor in factors)
    expected = plain.distill_grad_(wide.clone(), log_sum, wide_factors, wide_teacher, mass.double())
    assert_near(KERNELS["distill_grad_"](logits.clone(), log_sum.float(), factors, teacher, mass), expected)
    expected = scaled_softmax_(wide.clone(), log_sum, wide_factors[0])
    assert_near(KERNELS["scaled_softmax_"](logits.clone(), log_sum.float(), factors[0]), expected)


def test_the_first_of_equal_logits_is_the_largest():
    logits = torch.zeros(2, 9000, device=DEVICE)
    logits[0, 5000:] = 1
    assert KERNELS["logsumexp_argmax"](logits)[2].tolist() == [5000, 0]


@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")  # the interpreter's numpy
@pytest.mark.parametrize("width", [7, 9001])
def test_a_row_without_a_largest_logit_has_an_index_inside_it(width):
    """Ids are looked up by it: a loss that is not a number must come out as one, not end the device's context."""
    _, total, index = KERNELS["logsumexp_argmax"](torch.full((2, width), torch.nan, device=DEVICE))
    assert total.isnan().all()
    assert ((index >= 0) & (index < width)).all()
