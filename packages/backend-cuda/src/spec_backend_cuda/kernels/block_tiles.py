"""Compute the tiles of block attention: rows, keys, and which rows attend to which keys.

See ``block_attention``.
"""

# ruff: noqa: ANN001, ANN201 (a kernel's arguments are device pointers and numbers)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_of(
    first_block, end_block, kv_head, anchor, start, window, kv_heads,
    SLIDING: tl.constexpr, SLOTS: tl.constexpr, GROUP: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return for each row whether it exists, its flat index, and the bounds of its context tokens.

    A row is a query. Its index counts in [blocks, slots, query heads]. It attends to the tokens from the
    first bound up to, but not including, the second.
    """
    row = tl.arange(0, ROWS)
    block = first_block + row // (SLOTS * GROUP)
    slot = (row // GROUP) % SLOTS
    inside = (row < TOGETHER * SLOTS * GROUP) & (block < end_block)
    index = (block.to(tl.int64) * SLOTS + slot) * (kv_heads * GROUP) + kv_head * GROUP + row % GROUP
    high = tl.load(anchor + block, mask=inside, other=0).to(tl.int32)
    low = tl.load(start + block, mask=inside, other=0).to(tl.int32)
    if SLIDING:
        low = tl.maximum(low, high + slot - (window - 1))
    return inside, index, low, high


@triton.jit
def own_indices(
    first_block, num_blocks, kv_head, kv_heads,
    SLOTS: tl.constexpr, TOGETHER: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Return for each slot of this Triton program's blocks whether it exists, and its key's index.

    The index refers to keys that are flattened from [blocks, slots, key-value heads].
    """
    column = tl.arange(0, OWN)
    block = first_block + column // SLOTS
    inside = (column < TOGETHER * SLOTS) & (block < num_blocks)
    return inside, (block.to(tl.int64) * SLOTS + column % SLOTS) * kv_heads + kv_head


@triton.jit
def own_seen(
    CAUSAL: tl.constexpr, SLOTS: tl.constexpr, GROUP: tl.constexpr, TOGETHER: tl.constexpr,
    ROWS: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Return bool [ROWS, OWN]: whether a row attends to a key of its block.

    Padding rows attend to one key, because a softmax over no keys is undefined.
    """
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, OWN)[None, :]
    seen = (row // (SLOTS * GROUP) == column // SLOTS) & (column < TOGETHER * SLOTS)
    if CAUSAL:
        seen = seen & (column % SLOTS <= (row // GROUP) % SLOTS)
    return seen | ((row >= TOGETHER * SLOTS * GROUP) & (column == 0))


@triton.jit
def key_ranges(inside, low, high, KEYS: tl.constexpr):
    """Return bounds a ≤ b ≤ c ≤ d of key indices.

    No row attends to a key outside a..d. Every row attends to all keys of b..c, a range that consists of
    whole tiles.
    """
    far: tl.constexpr = 1 << 30
    a = tl.min(tl.where(inside, low, far), 0)
    d = tl.max(tl.where(inside, high, 0), 0)
    all_from = tl.max(tl.where(inside, low, 0), 0)
    all_to = tl.min(tl.where(inside, high, far), 0)
    b = tl.minimum(a + (all_from - a + KEYS - 1) // KEYS * KEYS, tl.maximum(d, a))
    c = b + tl.maximum(all_to - b, 0) // KEYS * KEYS
    return a, b, c, d
