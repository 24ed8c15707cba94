"""The slow way of the attention kernel, against autograd through dense attention. (The fused way needs a GPU:
tests/contract/test_cuda_backend.py.)"""

import pytest
import torch

from spec_backend_cuda import attention, dense_attention, padded_attention
from spec_backend_cuda.attention import (
    flash_attention,
    flash_attention_backward,
    flash_attention_of_pieces,
    flash_attention_of_pieces_backward,
)
from spec_testing.dense_attention import attention_reference


@pytest.fixture(params=[1 << 28, 300], ids=["one chunk", "many chunks"])
def chunks(request, monkeypatch):
    monkeypatch.setattr(dense_attention, "SCORE_BYTES", request.param)


@pytest.mark.parametrize("bounds", [[(0, 9)], [(0, 1), (1, 6), (7, 9)], [(2, 5)], []])
@pytest.mark.parametrize("value_width", [24, 16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_dense_attention(bounds, dtype, value_width, chunks):
    generator = torch.Generator().manual_seed(0)
    shapes = (4, 24), (2, 24), (2, value_width), (4, value_width)
    q, k, v, grad = (torch.randn(9, *shape, generator=generator, dtype=dtype) for shape in shapes)
    wide = tuple(tensor.double().requires_grad_() for tensor in (q, k, v))
    out, lse = attention_reference(*wide, bounds)
    expected = torch.autograd.grad(out, wide, grad.double(), allow_unused=True, materialize_grads=True)
    got_out, got_lse = flash_attention(q, k, v, bounds)
    got = flash_attention_backward(grad, (q, k, v, got_out, got_lse), bounds)
    rows = [row for bound in bounds for row in range(*bound)]
    for actual, reference in zip((got_out, *got), (out, *expected), strict=True):
        torch.testing.assert_close(actual.double(), reference, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got_lse.double()[rows], lse[rows], rtol=1e-4, atol=1e-5)
    assert got_out.dtype == dtype


def test_backward_takes_a_merged_result():
    """Attention over keys A and B: the kernel sees A only, and gets out and lse of both."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(5, 2, 8, dtype=torch.float64) for _ in range(4))
    extra_k, extra_v = torch.randn(5, 2, 8, dtype=torch.float64), torch.randn(5, 2, 8, dtype=torch.float64)
    inputs = tuple(tensor.requires_grad_() for tensor in (q, k, v))
    score = torch.einsum("qhd,khd->hqk", q, k) * 8**-0.5
    score = score.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf"))
    diagonal = (q * extra_k).sum(-1).T[..., None] * 8**-0.5  # one more key per query
    probability = torch.cat([score, diagonal], dim=-1).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", probability[..., :5], v) + probability[..., 5].T[..., None] * extra_v
    lse = torch.cat([score, diagonal], dim=-1).logsumexp(-1).T
    _, dk, dv = torch.autograd.grad(out, inputs, grad)
    saved = tuple(tensor.detach() for tensor in (q, k, v, out, lse))
    _, got_dk, got_dv = flash_attention_backward(grad, saved, [(0, 5)])
    torch.testing.assert_close(got_dk, dk)
    torch.testing.assert_close(got_dv, dv)


def test_pieces_equal_the_same_rows_of_dense_attention(chunks):
    """Pieces at the front, in the middle and at the end of documents; two of one document share keys."""
    torch.manual_seed(0)
    bounds, pieces = [(0, 7), (8, 13)], [(0, 0, 2), (0, 5, 7), (8, 9, 11)]
    rows = [row for _, first, stop in pieces for row in range(first, stop)]
    q, k, v, grad = (torch.randn(13, heads, 8, dtype=torch.float64) for heads in (4, 2, 2, 4))
    wide = tuple(tensor.requires_grad_() for tensor in (q, k, v))
    out, lse = attention_reference(*wide, bounds)
    expected = list(torch.autograd.grad(out[rows], wide, grad[rows]))
    expected[0] = expected[0][rows]
    own = (q[rows].detach(), k.detach(), v.detach())
    got_out, got_lse = flash_attention_of_pieces(*own, pieces)
    got = flash_attention_of_pieces_backward(grad[rows], (*own, got_out, got_lse), pieces)
    for actual, reference in zip((got_out, got_lse, *got), (out[rows], lse[rows], *expected), strict=True):
        torch.testing.assert_close(actual, reference)
    nothing, _ = flash_attention_of_pieces(own[0][:0], *own[1:], [])
    assert nothing.shape == (0, 4, 8)


@pytest.mark.parametrize("window", [1, 3, 20])
def test_a_window_equals_dense_attention_with_a_mask(window, chunks):
    torch.manual_seed(0)
    bounds = [(0, 4), (4, 13)]
    q, k, v, grad = (torch.randn(13, heads, 8, dtype=torch.float64) for heads in (4, 2, 2, 4))
    wide = tuple(tensor.requires_grad_() for tensor in (q, k, v))
    out, lse = attention_reference(*wide, bounds, window)
    plain = tuple(tensor.detach() for tensor in wide)
    got_out, got_lse = flash_attention(*plain, bounds, window)
    got = flash_attention_backward(grad, (*plain, got_out, got_lse), bounds, window)
    expected = torch.autograd.grad(out, wide, grad)
    for actual, reference in zip((got_out, got_lse, *got), (out, lse, *expected), strict=True):
        torch.testing.assert_close(actual, reference)


def test_the_fused_kernel_is_told_the_window(monkeypatch):
    """It counts the rows before a row's own, and gets no padded documents, for which cuDNN has no window."""
    asked = []

    def forward(q, *_, **sides):
        asked.append(sides)
        return q, q.new_zeros(q.shape[1], len(q))

    monkeypatch.setattr(attention, "_forward", forward)
    monkeypatch.setattr(attention, "padding", lambda *_: pytest.fail("padded attention has no window"))
    q = torch.zeros(4, 2, 8, dtype=torch.bfloat16)
    flash_attention(q, q, q, [(0, 4)], 3)
    assert asked == [{"window_size_left": 2, "window_size_right": 0}]


@pytest.fixture
def packed_kernel(monkeypatch):
    """torch's operator on packed sequences, computed densely: its own needs a GPU."""

    def spans(starts_q, starts_k):
        ends = (zip(starts.tolist(), starts.tolist()[1:], strict=False) for starts in (starts_q, starts_k))
        return [tuple(slice(*bound) for bound in pair) for pair in zip(*ends, strict=True)]

    def forward(q, k, v, starts_q, starts_k, *_):
        parts = [dense_attention.dense_forward(q[a], k[b], v[b]) for a, b in spans(starts_q, starts_k)]
        out, lse = (torch.cat(part) for part in zip(*parts, strict=True))
        return out, lse.T

    def backward(grad, q, k, v, out, lse, starts_q, starts_k, *_):
        parts = [
            dense_attention.dense_backward(grad[a], (q[a], k[b], v[b], out[a], lse.T[a]))
            for a, b in spans(starts_q, starts_k)
        ]
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    monkeypatch.setattr(attention, "_forward", forward)
    monkeypatch.setattr(attention, "_backward", backward)
    monkeypatch.setattr(attention, "_is_fused", lambda q: True)


PIECES = {
    "shared keys": [(0, 0, 2), (0, 5, 7), (8, 9, 11)],
    "one piece of each document": [(0, 5, 7), (8, 8, 10)],
    "whole documents, adjacent": [(0, 0, 7), (7, 7, 13)],
    "the same keys twice": [(0, 0, 3), (0, 3, 13)],
}


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_packed_pieces_are_put_back_where_they_were(packed_kernel, pieces):
    torch.manual_seed(0)
    rows = [row for _, first, stop in pieces for row in range(first, stop)]
    q, k, v, grad = (
        torch.randn(len(n), h, 8, dtype=torch.float64)
        for n, h in ((rows, 4), (range(13), 2), (range(13), 2), (rows, 4))
    )
    out, lse = flash_attention_of_pieces(q, k, v, pieces)
    got = flash_attention_of_pieces_backward(grad, (q, k, v, out, lse), pieces)
    wide = tuple(tensor.requires_grad_() for tensor in (q, k, v))
    expected, position = [], 0
    for start, first, stop in pieces:
        whole_q = torch.zeros(stop - start, 4, 8, dtype=torch.float64)
        mine = q[position : position + stop - first]
        whole_q = torch.cat([whole_q[: first - start], mine])
        attended, _ = attention_reference(whole_q, k[start:stop], v[start:stop], [(0, stop - start)])
        expected.append(attended[first - start :])
        position += stop - first
    torch.testing.assert_close(out, torch.cat(expected))
    for actual, reference in zip(got, torch.autograd.grad(torch.cat(expected), wide, grad), strict=True):
        torch.testing.assert_close(actual, reference)


@pytest.fixture
def padded_kernel(monkeypatch):
    """cuDNN's operator on a batch of padded documents, computed densely: its own needs a GPU."""

    def by_document(batch):
        return [part.transpose(0, 1) for part in batch]

    def forward(q, k, v, *_):
        parts = [
            dense_attention.dense_forward(*one) for one in zip(*map(by_document, (q, k, v)), strict=True)
        ]
        out, lse = (torch.stack(part).transpose(1, 2) for part in zip(*parts, strict=True))
        return out, lse[..., None]

    def backward(grad, q, k, v, out, lse, *_):
        parts = [
            dense_attention.dense_backward(grad, (*saved, lse.squeeze(-1)))
            for grad, *saved, lse in zip(*map(by_document, (grad, q, k, v, out, lse)), strict=True)
        ]
        return tuple(torch.stack(part).transpose(1, 2) for part in zip(*parts, strict=True))

    monkeypatch.setattr(padded_attention, "_forward", forward)
    monkeypatch.setattr(padded_attention, "_backward", backward)
    monkeypatch.setattr(padded_attention, "LENGTH_MULTIPLE", 1)
    monkeypatch.setattr(attention, "_is_fused", lambda q: True)
    monkeypatch.setattr(
        attention, "padding", lambda bounds, q, v: padded_attention._padding(bounds, q.device)
    )


@pytest.mark.parametrize(
    "bounds", [[(0, 6), (6, 12)], [(1, 6), (7, 12)], [(0, 8), (8, 15)], [(0, 7), (9, 16)]]
)
def test_padded_documents_equal_dense_attention(padded_kernel, bounds):
    """Documents of the same length, with and without rows between them, and of other lengths, which are padded."""
    assert padded_attention._padding(tuple(bounds), torch.device("cpu")) is not None
    torch.manual_seed(0)
    shapes = (4, 8), (2, 8), (2, 6), (4, 6)
    q, k, v, grad = (torch.randn(16, *shape, dtype=torch.float64) for shape in shapes)
    wide = tuple(tensor.requires_grad_() for tensor in (q, k, v))
    out, lse = attention_reference(*wide, bounds)
    rows = [row for bound in bounds for row in range(*bound)]
    own = tuple(tensor.detach() for tensor in (q, k, v))
    got_out, got_lse = flash_attention(*own, bounds)
    torch.testing.assert_close(got_out, out)
    torch.testing.assert_close(got_lse[rows], lse[rows])
    outside = torch.ones(16, dtype=torch.bool).index_fill(0, torch.tensor(rows), value=False)
    assert not got_out[outside].any()
    grad[outside] = 0
    got = flash_attention_backward(grad, (*own, got_out, got_lse), bounds)
    for actual, reference in zip(got, torch.autograd.grad(out, wide, grad), strict=True):
        torch.testing.assert_close(actual, reference)


def test_a_padded_document_may_be_a_part_of_all_keys(padded_kernel):
    torch.manual_seed(0)
    (q, grad), (k, v) = torch.randn(2, 8, 4, 8).double(), torch.randn(2, 16, 2, 8).double()
    out, lse = flash_attention_of_pieces(q, k, v, [(0, 0, 8)])
    got = flash_attention_of_pieces_backward(grad, (q, k, v, out, lse), [(0, 0, 8)])
    wide = tuple(tensor.requires_grad_() for tensor in (q, k, v))
    attended, _ = attention_reference(q, k[:8], v[:8], [(0, 8)])
    torch.testing.assert_close(out, attended)
    torch.testing.assert_close(got, torch.autograd.grad(attended, wide, grad))


def test_lengths_are_rounded_up_so_that_there_are_few_plans():
    device = torch.device("cpu")
    for length in (2000, 2047, 2048):
        padding = padded_attention._padding(((0, length),), device)
        assert padding.length == 2048
        assert (padding.places is None) == (length == 2048)


def test_documents_of_very_different_lengths_are_not_padded():
    for bounds in (((0, 2048), (2048, 2100)), ((0, 0),), ()):
        assert padded_attention._padding(bounds, torch.device("cpu")) is None
