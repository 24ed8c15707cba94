"""Attention of blocks equals dense attention, query by query, forward and backward."""

import pytest
import torch

from spec_backend_cpu.block_attention import PIECE_QUERIES, merged_block_attention
from spec_kit.block_drafting import BlockLayout

NUM_TOKENS, HEAD_DIM = 500, 8
ANCHORS = [0, 1, 3, 5, 9, *range(10, 150), 400, 450]
"""The first one's document has nothing before it; two documents follow, of which one fills several pieces."""
STARTS = [0 if anchor < 5 else 5 if anchor < 400 else 399 for anchor in ANCHORS]


def dense(q, context, own, window, is_causal):
    """Attend each query to the keys that it sees, found one by one."""
    group = q.shape[2] // own[0].shape[2]
    blocks = []
    for block, (anchor, start) in enumerate(zip(ANCHORS, STARTS, strict=True)):
        rows = []
        for slot in range(q.shape[1]):
            oldest = start if window is None else max(start, anchor + slot - window + 1)
            last = slot + 1 if is_causal else q.shape[1]
            k, v = (
                torch.cat([old[oldest : max(oldest, anchor)], new[block, :last]]).repeat_interleave(group, 1)
                for old, new in zip(context, own, strict=True)
            )
            law = (torch.einsum("nd,und->nu", q[block, slot], k) / HEAD_DIM**0.5).softmax(-1)
            rows.append(torch.einsum("nu,und->nd", law, v))
        blocks.append(torch.stack(rows))
    return torch.stack(blocks)


def inputs(heads, kv_heads, slots):
    torch.manual_seed(0)
    blocks = len(ANCHORS), slots
    shapes = [(*blocks, heads), *[(NUM_TOKENS, kv_heads)] * 2, *[(*blocks, kv_heads)] * 2]
    return [torch.randn(*shape, HEAD_DIM, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(
    "sight", [(None, False), (None, True), (1, True), (3, True), (3, False), (40, True), (40, False)]
)
@pytest.mark.parametrize(("heads", "kv_heads", "slots"), [(4, 2, 3), (2, 2, 1)])
def test_equals_dense_attention_forward_and_backward(heads, kv_heads, slots, sight):
    q, *keys_values = given = inputs(heads, kv_heads, slots)
    context, own = tuple(keys_values[:2]), tuple(keys_values[2:])
    layout = BlockLayout(torch.tensor(ANCHORS), torch.tensor(STARTS), q.device)
    assert len(ANCHORS) * slots > PIECE_QUERIES or slots == 1
    out, expected = merged_block_attention(q, context, own, layout, *sight), dense(q, context, own, *sight)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    grad_out = torch.randn_like(expected)
    grads = (torch.autograd.grad(value, given, grad_out) for value in (out, expected))
    for got, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


def test_without_blocks_the_plain_version_is_asked():
    layout = BlockLayout(
        torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), torch.device("cpu")
    )
    q, own = torch.zeros(0, 2, 2, HEAD_DIM), (torch.zeros(0, 2, 2, HEAD_DIM),) * 2
    context = (torch.zeros(NUM_TOKENS, 2, HEAD_DIM),) * 2
    assert merged_block_attention(q, context, own, layout, None, False) is NotImplemented
