"""Define the three kernels of block attention: its forward pass, and two kernels of its backward pass.

See ``block_attention``.
"""

# ruff: noqa: ANN001, ANN201, ANN202 (a kernel's arguments are device pointers and numbers)

from __future__ import annotations

import triton
import triton.language as tl

from spec_backend_cuda.kernels.block_tiles import key_ranges, own_indices, own_seen, rows_of


@triton.jit
def _attend_tiles(
    state, query, key, value, low, high, first, last, tokens, kv_head, kv_heads, scale,
    MASKED: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    total, top, weight = state
    channel = tl.arange(0, WIDTH)
    for tile in range(first, last, KEYS):
        token = tile + tl.arange(0, KEYS)
        row = (token.to(tl.int64) * kv_heads + kv_head) * WIDTH
        if MASKED:
            k = tl.load(key + row[None, :] + channel[:, None], mask=(token < tokens)[None, :], other=0.0)
            v = tl.load(value + row[:, None] + channel[None, :], mask=(token < tokens)[:, None], other=0.0)
        else:
            k = tl.load(key + row[None, :] + channel[:, None])
            v = tl.load(value + row[:, None] + channel[None, :])
        score = tl.dot(query, k) * scale
        if MASKED:
            seen = (token[None, :] >= low[:, None]) & (token[None, :] < high[:, None])
            score = tl.where(seen, score, -float("inf"))
        total, top, weight = _add(total, top, weight, score, v)
    return total, top, weight


@triton.jit
def _add(total, top, weight, score, v):
    wider = tl.maximum(top, tl.max(score, 1))
    p = tl.exp2(score - wider[:, None])
    fade = tl.exp2(top - wider)
    total = tl.dot(p.to(v.dtype), v, total * fade[:, None])
    return total, wider, weight * fade + tl.sum(p, 1)


@triton.jit(do_not_specialize=["anchor", "start", "num_blocks", "tokens"])
def blocks_forward(
    q, key, value, own_key, own_value, out, lse, anchor, start, num_blocks, tokens, kv_heads, window, scale,
    SLIDING: tl.constexpr, CAUSAL: tl.constexpr, SLOTS: tl.constexpr, GROUP: tl.constexpr, TOGETHER: tl.constexpr,
    ROWS: tl.constexpr, OWN: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute attention and its log-sum-exp for some neighbouring blocks and one key-value head."""
    # Later blocks attend to more context, so they start first.
    first_block = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOGETHER
    kv_head = tl.program_id(1)
    inside, index, low, high = rows_of(
        first_block,
        num_blocks,
        kv_head,
        anchor,
        start,
        window,
        kv_heads,
        SLIDING,
        SLOTS,
        GROUP,
        TOGETHER,
        ROWS,
    )
    channel = tl.arange(0, WIDTH)
    query = tl.load(q + index[:, None] * WIDTH + channel[None, :], mask=inside[:, None], other=0.0)
    base_2 = scale * 1.4426950408889634
    own_inside, own_index = own_indices(first_block, num_blocks, kv_head, kv_heads, SLOTS, TOGETHER, OWN)
    k = tl.load(own_key + own_index[None, :] * WIDTH + channel[:, None], mask=own_inside[None, :], other=0.0)
    v = tl.load(
        own_value + own_index[:, None] * WIDTH + channel[None, :], mask=own_inside[:, None], other=0.0
    )
    seen = own_seen(CAUSAL, SLOTS, GROUP, TOGETHER, ROWS, OWN)
    score = tl.where(seen, tl.dot(query, k) * base_2, -float("inf"))
    # The block's own keys come first, so that every row has a largest score from then on.
    top = tl.max(score, 1)
    p = tl.exp2(score - top[:, None])
    total = tl.dot(p.to(v.dtype), v)
    state = (total, top, tl.sum(p, 1))
    a, b, c, d = key_ranges(inside, low, high, KEYS)
    state = _attend_tiles(
        state, query, key, value, low, high, a, b, tokens, kv_head, kv_heads, base_2, True, WIDTH, KEYS
    )
    state = _attend_tiles(
        state, query, key, value, low, high, b, c, tokens, kv_head, kv_heads, base_2, False, WIDTH, KEYS
    )
    state = _attend_tiles(
        state, query, key, value, low, high, c, d, tokens, kv_head, kv_heads, base_2, True, WIDTH, KEYS
    )
    total, top, weight = state
    tl.store(out + index[:, None] * WIDTH + channel[None, :], total / weight[:, None], mask=inside[:, None])
    tl.store(lse + index, (top + tl.log2(weight)) * 0.6931471805599453, mask=inside)


@triton.jit
def _query_gradient(
    grad_query, query, grad, key, value, lse, drift, low, high, first, last, tokens, kv_head, kv_heads, scale,
    MASKED: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Add the context's share of the queries' gradient to ``grad_query``, without the factor ``scale``.

    ``lse``: log-sum-exp of the queries' scores in base 2. ``drift``: Σ grad · out of each query.
    """
    channel = tl.arange(0, WIDTH)
    for tile in range(first, last, KEYS):
        token = tile + tl.arange(0, KEYS)
        row = (token.to(tl.int64) * kv_heads + kv_head) * WIDTH
        if MASKED:
            k = tl.load(key + row[None, :] + channel[:, None], mask=(token < tokens)[None, :], other=0.0)
            v = tl.load(value + row[None, :] + channel[:, None], mask=(token < tokens)[None, :], other=0.0)
        else:
            k = tl.load(key + row[None, :] + channel[:, None])
            v = tl.load(value + row[None, :] + channel[:, None])
        p = tl.exp2(tl.dot(query, k) * scale - lse[:, None])
        if MASKED:
            p = tl.where((token[None, :] >= low[:, None]) & (token[None, :] < high[:, None]), p, 0.0)
        score = p * (tl.dot(grad, v) - drift[:, None])
        grad_query = tl.dot(score.to(k.dtype), tl.trans(k), grad_query)
    return grad_query


@triton.jit(do_not_specialize=["anchor", "start", "num_blocks", "tokens"])
def own_backward(
    grad_out, q, key, value, own_key, own_value, out, lse, drift_out, grad_q, grad_own_key, grad_own_value,
    anchor, start, num_blocks, tokens, kv_heads, window, scale,
    SLIDING: tl.constexpr, CAUSAL: tl.constexpr, SLOTS: tl.constexpr, GROUP: tl.constexpr, TOGETHER: tl.constexpr,
    ROWS: tl.constexpr, OWN: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute dq, and dk and dv of the blocks' own keys. Store each row's Σ grad · out in ``drift_out``."""
    first_block = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOGETHER
    kv_head = tl.program_id(1)
    inside, index, low, high = rows_of(
        first_block,
        num_blocks,
        kv_head,
        anchor,
        start,
        window,
        kv_heads,
        SLIDING,
        SLOTS,
        GROUP,
        TOGETHER,
        ROWS,
    )
    channel = tl.arange(0, WIDTH)
    element = index[:, None] * WIDTH + channel[None, :]
    query = tl.load(q + element, mask=inside[:, None], other=0.0)
    grad = tl.load(grad_out + element, mask=inside[:, None], other=0.0)
    result = tl.load(out + element, mask=inside[:, None], other=0.0)
    drift = tl.sum(grad.to(tl.float32) * result.to(tl.float32), 1)
    tl.store(drift_out + index, drift, mask=inside)
    row_lse = tl.load(lse + index, mask=inside, other=0.0) * 1.4426950408889634
    base_2 = scale * 1.4426950408889634
    own_inside, own_index = own_indices(first_block, num_blocks, kv_head, kv_heads, SLOTS, TOGETHER, OWN)
    own_element = own_index[:, None] * WIDTH + channel[None, :]
    k = tl.load(own_key + own_element, mask=own_inside[:, None], other=0.0)
    v = tl.load(own_value + own_element, mask=own_inside[:, None], other=0.0)
    seen = own_seen(CAUSAL, SLOTS, GROUP, TOGETHER, ROWS, OWN) & inside[:, None]
    p = tl.where(seen, tl.exp2(tl.dot(query, tl.trans(k)) * base_2 - row_lse[:, None]), 0.0)
    score = (p * (tl.dot(grad, tl.trans(v)) - drift[:, None])).to(query.dtype)
    grad_key = tl.dot(tl.trans(score), query) * scale
    grad_value = tl.dot(tl.trans(p.to(query.dtype)), grad)
    tl.store(grad_own_key + own_element, grad_key, mask=own_inside[:, None])
    tl.store(grad_own_value + own_element, grad_value, mask=own_inside[:, None])
    total = tl.dot(score, k)
    a, b, c, d = key_ranges(inside, low, high, KEYS)
    total = _query_gradient(
        total, query, grad, key, value, row_lse, drift, low, high, a, b, tokens, kv_head, kv_heads, base_2,
        True, WIDTH, KEYS,
    )  # fmt: skip
    total = _query_gradient(
        total, query, grad, key, value, row_lse, drift, low, high, b, c, tokens, kv_head, kv_heads, base_2,
        False, WIDTH, KEYS,
    )  # fmt: skip
    total = _query_gradient(
        total, query, grad, key, value, row_lse, drift, low, high, c, d, tokens, kv_head, kv_heads, base_2,
        True, WIDTH, KEYS,
    )  # fmt: skip
    tl.store(grad_q + element, total * scale, mask=inside[:, None])


@triton.jit(do_not_specialize=["anchor", "start", "num_blocks", "tokens"])
def context_backward(
    grad_out, q, key, value, lse, drift, grad_keys, grad_values, anchor, start, first_seen, last_seen,
    num_blocks, tokens, kv_heads, window, scale,
    SLIDING: tl.constexpr, CAUSAL: tl.constexpr, SLOTS: tl.constexpr, GROUP: tl.constexpr, TOGETHER: tl.constexpr,
    ROWS: tl.constexpr, OWN: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one tile of the context, from one share of the blocks that attend to it."""
    kv_head, split = tl.program_id(1), tl.program_id(2)
    first = tl.load(first_seen + tl.program_id(0)).to(tl.int32)
    last = tl.load(last_seen + tl.program_id(0)).to(tl.int32)
    share = tl.cdiv(tl.cdiv(tl.maximum(last - first, 0), TOGETHER), tl.num_programs(2)) * TOGETHER
    first += split * share
    last = tl.minimum(last, first + share)
    token = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    channel = tl.arange(0, WIDTH)
    mask = (token < tokens)[:, None]
    element = (token.to(tl.int64) * kv_heads + kv_head)[:, None] * WIDTH + channel[None, :]
    k = tl.load(key + element, mask=mask, other=0.0)
    v = tl.load(value + element, mask=mask, other=0.0)
    base_2 = scale * 1.4426950408889634
    grad_key = tl.zeros((KEYS, WIDTH), tl.float32)
    grad_value = tl.zeros((KEYS, WIDTH), tl.float32)
    for block in range(first, last, TOGETHER):
        inside, index, low, high = rows_of(
            block, last, kv_head, anchor, start, window, kv_heads, SLIDING, SLOTS, GROUP, TOGETHER, ROWS
        )
        row_element = index[:, None] * WIDTH + channel[None, :]
        query = tl.load(q + row_element, mask=inside[:, None], other=0.0)
        grad = tl.load(grad_out + row_element, mask=inside[:, None], other=0.0)
        row_lse = tl.load(lse + index, mask=inside, other=0.0) * 1.4426950408889634
        row_drift = tl.load(drift + index, mask=inside, other=0.0)
        # Rows of padding attend to nothing: low = high = 0.
        seen = (token[:, None] >= low[None, :]) & (token[:, None] < high[None, :])
        p = tl.where(seen, tl.exp2(tl.dot(k, tl.trans(query)) * base_2 - row_lse[None, :]), 0.0)
        grad_value = tl.dot(p.to(query.dtype), grad, grad_value)
        score = p * (tl.dot(v, tl.trans(grad)) - row_drift[None, :])
        grad_key = tl.dot(score.to(query.dtype), query, grad_key)
    shift = split.to(tl.int64) * tokens * kv_heads * WIDTH
    tl.store(grad_keys + shift + element, grad_key * scale, mask=mask)
    tl.store(grad_values + shift + element, grad_value, mask=mask)
