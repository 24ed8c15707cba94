"""A range of a tensor's elements is cut into rectangles of it, and filled from any others."""

from itertools import combinations_with_replacement
from math import prod

import pytest
import torch

from spec_kit.sharding import FlatShard
from spec_kit.sharding.sharded_state import copy_overlap


def shard(shape, first, values, offset=None, whole=None):
    return FlatShard(
        shape=whole or shape,
        offset=offset or (0,) * len(shape),
        part=shape,
        first=first,
        values=values,
        saves=True,
    )


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (4, 1), (1, 4), (2, 3, 4), (2, 1, 3)])
def test_any_range_is_a_few_rectangles(shape):
    for first, stop in combinations_with_replacement(range(prod(shape) + 1), 2):
        got = torch.full(shape, -1)
        rectangles = list(shard(shape, first, torch.arange(first, stop)).rectangles())
        for rectangle, offset in rectangles:
            got[tuple(slice(o, o + n) for o, n in zip(offset, rectangle.shape, strict=True))] = rectangle
        expected = torch.arange(prod(shape))
        expected[:first] = expected[stop:] = -1
        assert torch.equal(got, expected.view(shape))
        assert len(rectangles) <= max(1, 2 * len(shape) - 1)


def test_a_range_of_a_part_is_filled_from_rectangles_of_the_whole():
    whole = torch.arange(48).view(6, 8)
    own = shard((6, 4), 5, torch.zeros(13, dtype=torch.int64), offset=(0, 4), whole=(6, 8))
    for rows in (slice(0, 2), slice(2, 6)):
        copy_overlap(own, (6, 8), whole[rows], (rows.start, 0), "w")
    assert torch.equal(own.values, whole[:, 4:].flatten()[5:18])
