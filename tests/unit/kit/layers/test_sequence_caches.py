"""Attention over caches against softmax in float64, position by position."""

import pytest
import torch

from spec_kit.layers import cached_attention, extended_caches, new_positions

HEADS, KV_HEADS, WIDTH = 4, 2, 8
CACHED, COUNTS = [0, 5, 2], [3, 1, 4]
"""Positions that each of three sequences has, and new ones."""


def drawn(length: int, heads: int) -> torch.Tensor:
    return torch.randn(length, heads, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize("window", [None, 2])
def test_new_positions_attend_to_their_own_sequence_up_to_themselves(window) -> None:
    torch.manual_seed(0)
    caches = [(drawn(length, KV_HEADS), drawn(length, KV_HEADS)) for length in CACHED]
    total = sum(COUNTS)
    q, k, v = drawn(total, HEADS), drawn(total, KV_HEADS), drawn(total, KV_HEADS)
    assert new_positions(caches, COUNTS).tolist() == [0, 1, 2, 5, 2, 3, 4, 5]
    longer = extended_caches(caches, k, v, COUNTS)
    assert [len(keys) for keys, _ in caches] == CACHED
    got, row = cached_attention(q, longer, COUNTS, window), 0
    for (keys, values), cached, count in zip(longer, CACHED, COUNTS, strict=True):
        assert torch.equal(keys[cached:], k[row : row + count])
        assert torch.equal(values[cached:], v[row : row + count])
        for position in range(cached, cached + count):
            for head in range(HEADS):
                own = head // (HEADS // KV_HEADS)
                seen = slice(0 if window is None else max(0, position + 1 - window), position + 1)
                scores = keys[seen, own] @ q[row, head] / WIDTH**0.5
                expected = scores.softmax(0) @ values[seen, own]
                torch.testing.assert_close(got[row, head], expected, rtol=1e-12, atol=1e-12)
            row += 1
