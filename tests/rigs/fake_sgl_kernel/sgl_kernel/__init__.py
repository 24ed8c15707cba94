"""Stand-in for SGLang's kernel library, whose packages are CUDA builds: what its CPU engine calls for a Llama.

Plain torch, for SGLang 0.5.23. Drafts are chains. What has no stand-in says so when it is called.
"""

import ctypes

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in")

    return absent


def extend_attention_cpu(
    q,
    k,
    v,
    out,
    keys,
    values,
    key_scale,
    value_scale,
    req_to_token,
    requests,
    seq_lens,
    extend_lens,
    starts,
    max_extend_len,
    scaling,
    logit_cap,
    is_cross,
    window,
    encoder_lens,
    sinks,
    tree_mask,
    is_causal,
) -> None:
    """The last rows of each request over all its cached keys, which theirs are among."""
    assert (logit_cap, is_cross, sinks, tree_mask) == (0, False, None, None)
    for request, length, new, start in zip(
        requests.tolist(), seq_lens.tolist(), extend_lens.tolist(), starts.tolist(), strict=True
    ):
        rows = slice(start, start + new)
        visible = _visible(torch.arange(length - new, length), length, window, is_causal)
        _attend(q[rows], out[rows], keys, values, req_to_token[request, :length].long(), scaling, visible)


def decode_attention_cpu(
    q,
    keys,
    values,
    key_scale,
    value_scale,
    out,
    k,
    v,
    cache_loc,
    attn_logits,
    req_to_token,
    requests,
    seq_lens,
    scaling,
    logit_cap,
    is_cross,
    window,
    encoder_lens,
    sinks,
) -> None:
    """One row of each request, whose key and value are put into the cache first."""
    assert (logit_cap, is_cross, sinks) == (0, False, None)
    keys[cache_loc], values[cache_loc] = (part.view(len(q), *keys.shape[1:]) for part in (k, v))
    for row, (request, length) in enumerate(zip(requests.tolist(), seq_lens.tolist(), strict=True)):
        visible = _visible(torch.tensor([length - 1]), length, window, is_causal=True)
        rows = slice(row, row + 1)
        _attend(q[rows], out[rows], keys, values, req_to_token[request, :length].long(), scaling, visible)


def _visible(positions_T, num_keys, window, is_causal):
    keys_K = torch.arange(num_keys)
    visible_TK = torch.ones(len(positions_T), num_keys, dtype=torch.bool)
    if is_causal:
        visible_TK &= keys_K <= positions_T[:, None]
    if window > 0:
        visible_TK &= keys_K > positions_T[:, None] - window
    return visible_TK


def _attend(q_THD, out_THD, keys, values, slots_K, scaling, visible_TK) -> None:
    k_HKD, v_HKD = (cache[slots_K].movedim(0, 1).to(q_THD) for cache in (keys, values))
    out_HTD = scaled_dot_product_attention(
        q_THD.movedim(0, 1)[None],
        k_HKD[None],
        v_HKD[None],
        attn_mask=visible_TK,
        scale=scaling,
        enable_gqa=q_THD.shape[1] != k_HKD.shape[0],
    )[0]
    out_THD.copy_(out_HTD.movedim(1, 0))


def fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, q_weight, k_weight, eps, head_dim, num_heads):
    """Queries and gates lie head by head beside each other; the norms of queries and keys multiply by 1 + w."""
    q, gate = q_gate.reshape(len(q_gate), num_heads, 2, head_dim).unbind(2)
    normed = [
        rms_norm(part.reshape(-1, head_dim).float(), (head_dim,), 1 + weight.float(), eps).to(q_gate)
        for part, weight in ((q, q_weight), (k, k_weight))
    ]
    return (*normed, gate.reshape(-1, head_dim))


def fused_sigmoid_mul_cpu(x, gate) -> None:
    x.mul_(torch.sigmoid(gate.reshape(x.shape)))


# SGLang calls these as operators. Only where it finds the operator convert_weight_packed, too, does it take the
# library for one with Intel's matrix kernels, and call many more of them.
torch.ops.sgl_kernel.extend_attention_cpu = extend_attention_cpu
torch.ops.sgl_kernel.decode_attention_cpu = decode_attention_cpu
torch.ops.sgl_kernel.fused_qk_gemma_rmsnorm_with_gate_cpu = fused_qk_gemma_rmsnorm_with_gate_cpu
torch.ops.sgl_kernel.fused_sigmoid_mul_cpu = fused_sigmoid_mul_cpu


def build_draft_decode_metadata_cpu(req_to_token, requests, seq_lens, topk, num_steps, pool_len):
    """The slots of each request's prefix and of its guesses, which are beside each other in a chain."""
    assert topk == 1
    return req_to_token[requests]


def build_tree_kernel_efficient_cpu(
    parents,
    selected,
    seq_lens,
    tree_mask,
    positions,
    index,
    next_token,
    next_sibling,
    topk,
    depth,
    num_tokens,
    mode,
) -> None:
    """The last known token of each request and its guesses, one after the other."""
    assert topk == 1
    steps = torch.arange(num_tokens)
    positions.copy_((seq_lens[:, None] + steps).flatten())
    index.copy_(torch.arange(index.numel()).view_as(index))
    next_token.copy_(torch.where(steps + 1 < num_tokens, steps + 1, -1).expand_as(next_token))
    next_sibling.fill_(-1)


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
) -> None:
    """A guess is accepted if it and all before it are the target's choices."""
    are_right = candidates[:, 1:] == target_predict[:, :-1]
    accepted = are_right.long().cumprod(1).sum(1)
    accept_token_num.copy_(accepted)
    steps = torch.arange(accept_index.shape[1])
    accept_index.copy_(torch.where(steps <= accepted[:, None], retrive_index[:, : len(steps)], -1))
    predicts[retrive_index.flatten()] = target_predict.flatten().to(predicts.dtype)


def assign_req_to_token_pool_cpu(requests, req_to_token, starts, ends, out_cache_loc, pool_len) -> None:
    done = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        req_to_token[request, start:end] = out_cache_loc[done : done + end - start].to(req_to_token.dtype)
        done += end - start


def assign_draft_cache_locs_contiguous_cpu(
    requests, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps
) -> None:
    ends = seq_lens + topk * num_steps
    assign_extend_cache_locs_cpu(requests, req_to_token, seq_lens, ends, out_cache_loc, pool_len)


def assign_extend_cache_locs_cpu(requests, req_to_token, starts, ends, out_cache_loc, pool_len) -> None:
    spans = zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True)
    found = torch.cat([req_to_token[request, start:end] for request, start, end in spans])
    out_cache_loc[: len(found)] = found


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride) -> None:
    indices = accept_stride * torch.arange(len(accept_lens)) + accept_lens - 1
    bonus_tokens.copy_(accept_tokens.flatten()[indices])


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc) -> None:
    found = out_cache_loc[accept_index[accept_index > -1].long()]
    accept_out_cache_loc[: len(found)] = found


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, to, source) -> None:
    """Move rows of every layer's cache, of which the address and the bytes of a row are given."""
    for start, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(start + index * size, size) for index in source.tolist()]
        for index, row in zip(to.tolist(), rows, strict=True):
            ctypes.memmove(start + index * size, row, size)


_IMPORTED = """fused_qk_gemma_rmsnorm_cpu fused_gdn_gating_cpu flash_attn_varlen_func apply_rotary_pos_emb_cpu
causal_conv1d_fwd_cpu causal_conv1d_update_cpu chunk_gated_delta_rule_cpu fused_sigmoid_gating_delta_rule_update_cpu
fused_qkvzba_split_reshape_cat_contiguous_cpu"""
for _name in _IMPORTED.split():  # models look these up when they are imported
    if not hasattr(torch.ops.sgl_kernel, _name):
        torch.library.define(f"sgl_kernel::{_name}", "(Tensor absent) -> Tensor")
