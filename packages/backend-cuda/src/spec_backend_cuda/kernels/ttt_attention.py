"""Merge a few further keys per query into finished attention, for training-time test.

The further keys are at the query's own index, one key for each unrolled step. A program handles some tokens
and one key-value head; its tiles are [query head of the group, token, channel]. Values may be narrower than keys.
"""

# ruff: noqa: ANN001, ANN202 (a kernel's arguments are device pointers and numbers)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

Attended = tuple[Tensor, Tensor]

TOKENS = 2
WARPS = 1
"""Number of warps of a program. One warp sums over a group without waiting for other warps. On an H200 it
takes a third of the time of four warps."""


def takes_queries(q: Tensor, *_: object) -> bool:
    """Return whether the kernels support the dtype."""
    return q.numel() > 0 and q.dtype in (torch.bfloat16, torch.float16, torch.float32)


def fused_ttt_attention(q: Tensor, attended: Attended, keys: Tensor, values: Tensor) -> Attended:
    """Merge ``attended``, attention over some keys, with S further keys at each query's own index.

    The result overwrites ``attended``. ``keys`` and ``values``: [S, T, kv_heads, D] each.
    """
    out, lse = (tensor.contiguous() for tensor in attended)
    grid, shape = _launch(q, keys, values)
    _merge_rows[grid](q, out, lse, keys, values, len(keys), *q.stride()[:2], **shape)
    return out, lse


def fused_ttt_attention_backward(
    grad_out: Tensor,
    saved: tuple[Tensor, Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    grad_q: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``fused_ttt_attention``.

    ``saved``: q and the merged result. The memory of ``grad_q`` is reused.
    """
    q, out, lse = saved
    grid, shape = _launch(q, keys, values)
    outputs = grad_q.contiguous(), keys.new_empty(keys.shape), values.new_empty(values.shape)
    inputs = grad_out.contiguous(), q, out, lse, keys, values
    strides = *q.stride()[:2], outputs[1].stride(0), outputs[2].stride(0)
    _gradient_rows[grid](*inputs, *outputs, len(keys), *strides, **shape)
    return outputs


def _launch(q: Tensor, keys: Tensor, values: Tensor) -> tuple[tuple[int, int], dict[str, int | float]]:
    tokens, heads, width = q.shape
    kv_heads = keys.shape[2]
    value_width = values.shape[3]
    group = heads // kv_heads
    shape = {
        "tokens": tokens,
        "kv_heads": kv_heads,
        "key_step_stride": keys.stride(0),
        "value_step_stride": values.stride(0),
        "scale": width**-0.5,
    }
    constants = {
        "GROUP": group,
        "PADDED": triton.next_power_of_2(group),
        "TOKENS": TOKENS,
        "WIDTH": width,
        "PADDED_WIDTH": triton.next_power_of_2(width),
        "VALUE_WIDTH": value_width,
        "PADDED_VALUE_WIDTH": triton.next_power_of_2(value_width),
    }
    return (triton.cdiv(tokens, TOKENS), kv_heads), {**shape, **constants, "num_warps": WARPS}


@triton.jit
def _tile_rows(tokens, kv_heads, GROUP: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr):
    """Return token and query head of the tile's rows, and which rows exist; all broadcast to [PADDED, TOKENS, 1].

    PADDED is the padded size of a group of query heads.
    """
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    member = tl.arange(0, PADDED)
    head = tl.program_id(1) * GROUP + member[:, None, None]
    inside = (token < tokens)[None, :, None] & (member < GROUP)[:, None, None]
    return token[None, :, None], head, inside


@triton.jit
def _tile_elements(tokens, kv_heads, TOKENS: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr):
    """Return the indices of the tile's key or value elements, [TOKENS, PADDED_WIDTH], and which elements exist."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    channel = tl.arange(0, PADDED_WIDTH)[None, :]
    index = (token * kv_heads + tl.program_id(1))[:, None] * WIDTH + channel
    return index, (token < tokens)[:, None] & (channel < WIDTH)


@triton.jit(do_not_specialize=["tokens"])
def _merge_rows(
    q, out, lse, keys, values, steps, q_token_stride, q_head_stride,
    tokens, kv_heads, key_step_stride, value_step_stride, scale,
    GROUP: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, PADDED_VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    token, head, inside = _tile_rows(tokens, kv_heads, GROUP, PADDED, TOKENS)
    key_index, key_mask = _tile_elements(tokens, kv_heads, TOKENS, WIDTH, PADDED_WIDTH)
    value_index, value_mask = _tile_elements(tokens, kv_heads, TOKENS, VALUE_WIDTH, PADDED_VALUE_WIDTH)
    channel = tl.arange(0, PADDED_WIDTH)[None, None, :]
    value_channel = tl.arange(0, PADDED_VALUE_WIDTH)[None, None, :]
    row = token * (kv_heads * GROUP) + head
    source = q + token * q_token_stride + head * q_head_stride + channel
    query = tl.load(source, mask=inside & (channel < WIDTH), other=0.0).to(tl.float32) * scale
    target = out + row * VALUE_WIDTH + value_channel
    out_mask = inside & (value_channel < VALUE_WIDTH)
    total = tl.load(target, mask=out_mask, other=0.0).to(tl.float32)
    merged = tl.load(lse + row, mask=inside, other=0.0)
    for _ in range(steps):
        key = tl.load(keys + key_index, mask=key_mask, other=0.0).to(tl.float32)
        value = tl.load(values + value_index, mask=value_mask, other=0.0).to(tl.float32)
        score = tl.sum(query * key[None, :, :], 2)[:, :, None]
        top = tl.maximum(merged, score)
        wider = top + tl.log(tl.exp(merged - top) + tl.exp(score - top))
        total = total * tl.exp(merged - wider) + value[None, :, :] * tl.exp(score - wider)
        merged = wider
        key_index += key_step_stride
        value_index += value_step_stride
    tl.store(target, total, mask=out_mask)
    tl.store(lse + row, merged, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _gradient_rows(
    grad_out, q, out, lse, keys, values, grad_q, grad_keys, grad_values, steps,
    q_token_stride, q_head_stride, grad_key_step_stride, grad_value_step_stride,
    tokens, kv_heads, key_step_stride, value_step_stride, scale,
    GROUP: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, PADDED_VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    token, head, inside = _tile_rows(tokens, kv_heads, GROUP, PADDED, TOKENS)
    key_index, key_mask = _tile_elements(tokens, kv_heads, TOKENS, WIDTH, PADDED_WIDTH)
    value_index, value_mask = _tile_elements(tokens, kv_heads, TOKENS, VALUE_WIDTH, PADDED_VALUE_WIDTH)
    channel = tl.arange(0, PADDED_WIDTH)[None, None, :]
    value_channel = tl.arange(0, PADDED_VALUE_WIDTH)[None, None, :]
    mask, out_mask = inside & (channel < WIDTH), inside & (value_channel < VALUE_WIDTH)
    row = token * (kv_heads * GROUP) + head
    query = tl.load(q + token * q_token_stride + head * q_head_stride + channel, mask=mask, other=0.0)
    query = query.to(tl.float32)
    out_index = row * VALUE_WIDTH + value_channel
    grad = tl.load(grad_out + out_index, mask=out_mask, other=0.0).to(tl.float32)
    result = tl.load(out + out_index, mask=out_mask, other=0.0).to(tl.float32)
    drift = tl.sum(grad * result, 2)[:, :, None]
    merged = tl.load(lse + row, mask=inside, other=0.0)
    index = row * WIDTH + channel
    total = tl.load(grad_q + index, mask=mask, other=0.0).to(tl.float32)
    grad_key_index = key_index
    grad_value_index = value_index
    for _ in range(steps):
        key = tl.load(keys + key_index, mask=key_mask, other=0.0).to(tl.float32)
        value = tl.load(values + value_index, mask=value_mask, other=0.0).to(tl.float32)
        logit = tl.sum(query * key[None, :, :], 2)[:, :, None] * scale
        weight = tl.where(inside, tl.exp(logit - merged), 0.0)
        from_value = tl.sum(grad * value[None, :, :], 2)[:, :, None]
        score = weight * (from_value - drift) * scale
        total += score * key[None, :, :]
        tl.store(grad_keys + grad_key_index, tl.sum(score * query, 0), mask=key_mask)
        tl.store(grad_values + grad_value_index, tl.sum(weight * grad, 0), mask=value_mask)
        key_index += key_step_stride
        value_index += value_step_stride
        grad_key_index += grad_key_step_stride
        grad_value_index += grad_value_step_stride
    tl.store(grad_q + index, total, mask=mask)
