"""Attention by documents equals dense attention, document by document, forward and backward."""

import pytest
import torch

from spec_backend_cpu.attention import document_attention, document_attention_backward

HEAD_DIM = 8
BOUNDS = [(0, 5), (5, 6), (9, 700), (703, 707)]
NUM_TOKENS = 710


def dense(q, k, v, window=NUM_TOKENS):
    """Attention of every document with an explicit mask; rows outside are 0. Returns out and log-sum-exp."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    index = torch.arange(NUM_TOKENS)
    document = torch.full((NUM_TOKENS,), -1)
    for number, (start, stop) in enumerate(BOUNDS):
        document[start:stop] = number
    mask = (index[:, None] >= index) & (document[:, None] == document) & (document[:, None] >= 0)
    mask &= index[:, None] - index < window
    scores = torch.einsum("thd,uhd->htu", q, k) / HEAD_DIM**0.5
    scores = scores.masked_fill(~mask, -torch.inf)
    law = torch.where(mask, scores.softmax(-1), 0)
    lse = torch.where(document >= 0, scores.logsumexp(-1), 0)
    return torch.einsum("htu,uhd->thd", law, v), lse.T


def random_inputs(heads: int, kv_heads: int, dtype: torch.dtype):
    torch.manual_seed(0)
    shapes = [(NUM_TOKENS, heads, HEAD_DIM), *[(NUM_TOKENS, kv_heads, HEAD_DIM)] * 2]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "window"),
    [(4, 4, None), (6, 2, None), (3, 1, None), (4, 2, 1), (4, 2, 5), (3, 1, 150)],
)
def test_equals_dense_attention_forward_and_backward(heads, kv_heads, window):
    inputs = random_inputs(heads, kv_heads, torch.float64)
    expected, expected_lse = dense(*inputs, window or NUM_TOKENS)
    grad_out = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, inputs, grad_out)
    plain = tuple(tensor.detach() for tensor in inputs)
    out, lse = document_attention(*plain, BOUNDS, window)
    torch.testing.assert_close(out, expected.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse.detach(), rtol=0, atol=1e-12)
    grads = document_attention_backward(grad_out, (*plain, out, lse), BOUNDS, window)
    for got, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


def test_backward_believes_the_merged_result_it_is_given():
    """Every probability halves with an lse raised by log 2, as by further keys of equal weight."""
    q, k, v = (tensor.detach() for tensor in random_inputs(2, 2, torch.float64))
    grad_out = torch.randn_like(q)
    out, lse = document_attention(q, k, v, BOUNDS)
    (_, _, whole), merged = (
        document_attention_backward(grad_out, (q, k, v, out, lse), BOUNDS),
        lse + torch.tensor(2.0, dtype=torch.float64).log(),
    )
    (_, _, halved) = document_attention_backward(grad_out, (q, k, v, out, merged), BOUNDS)
    torch.testing.assert_close(halved, whole / 2)


def test_bfloat16_keeps_a_float32_log_sum_exp():
    q, k, v = (tensor.detach() for tensor in random_inputs(4, 2, torch.bfloat16))
    out, lse = document_attention(q, k, v, BOUNDS)
    expected, expected_lse = dense(q.float(), k.float(), v.float())
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=0.03)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=0.03)


def test_without_documents_everything_is_zero():
    q, k, v = (tensor.detach() for tensor in random_inputs(2, 1, torch.float32))
    out, lse = document_attention(q, k, v, [])
    grads = document_attention_backward(torch.ones_like(q), (q, k, v, out, lse), [])
    assert not any(tensor.any() for tensor in (out, lse, *grads))
