"""torch-npu's fused operators on CPU tensors, as its own documentation (``_op_plugin_docs.py``) describes them.

Schemas, and which operator is the backward pass of which, are the genuine torch_npu's. What is excluded is an error.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

FLOATS = torch.float16, torch.bfloat16, torch.float32


def refuse(operator: str, **limits: bool) -> None:
    """RuntimeError if a limit, named by its keyword, is not kept."""
    broken = [limit for limit, kept in limits.items() if not kept]
    if broken:
        raise RuntimeError(f"{operator}: not {', '.join(broken)} (error code 161002)")


def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Return the norm in the dtype of ``x``, and the reciprocal root mean square, float32."""
    refuse(
        "npu_rms_norm",
        float_dtype=x.dtype in FLOATS,
        same_dtype=gamma.dtype == x.dtype,
        dimensions_1_to_8=1 <= x.dim() <= 8,
        gamma_has_the_last_dimension=gamma.shape == x.shape[-1:],
    )
    rstd = (x.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (x.float() * rstd * gamma.float()).to(x.dtype), rstd


def npu_rms_norm_backward(dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, and of gamma in float32."""
    normed, scaled = x.float() * rstd, dy.float() * gamma.float()
    dx = rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dy.float() * normed).reshape(-1, x.shape[-1]).sum(0)


def npu_rotary_mul(
    x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """Return r1 · x + r2 · (−second half of x, first half of x), in layout BSND only."""
    width = x.shape[-1]
    refuse(
        "npu_rotary_mul",
        half_mode=rotary_mode == "half" and rotate is None,
        float_dtype=x.dtype in FLOATS,
        same_dtype=r1.dtype == r2.dtype == x.dtype,
        four_dimensions=x.dim() == r1.dim() == 4 and r1.shape == r2.shape,
        even_width_below_896=width % 2 == 0 and 0 < width < 896,
        fewer_than_1000_batches_and_heads=x.shape[0] < 1000 and x.shape[2] < 1000,
        angles_1S1D_or_BS1D=r1.shape in {(batch, x.shape[1], 1, width) for batch in (1, x.shape[0])},
    )
    first, second = x.float().chunk(2, -1)
    return (r1.float() * x.float() + r2.float() * torch.cat([-second, first], -1)).to(x.dtype)


def npu_rotary_mul_backward(
    grad: Tensor, x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, and of the angles, which are not computed here."""
    first, second = (r2.float() * grad.float()).chunk(2, -1)
    dx = r1.float() * grad.float() + torch.cat([second, -first], -1)
    return dx.to(x.dtype), torch.full_like(r1, torch.nan), torch.full_like(r2, torch.nan)


def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """Return silu(first half of x) · second half."""
    refuse("npu_swiglu", float_dtype=x.dtype in FLOATS, even_size=x.shape[dim] % 2 == 0)
    gate, up = x.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def npu_swiglu_backward(grad: Tensor, x: Tensor, dim: int = -1) -> Tensor:
    """Return the gradient of x."""
    gate, up = x.float().chunk(2, dim)
    share = gate.sigmoid()
    of_gate = grad.float() * up * share * (1 + gate * (1 - share))
    return torch.cat([of_gate, grad.float() * gate * share], dim).to(x.dtype)


def _named(operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments by name, with the defaults of the genuine schema."""
    schema = getattr(torch.ops.npu, operator).default._schema.arguments
    given = dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
    return {argument.name: argument.default_value for argument in schema} | given


def _sequences(
    operator: str, tensors: tuple[Tensor, ...], options: dict[str, Any]
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield each sequence's rows of queries and of keys, and bool [queries, keys]: True if hidden."""
    query, key, value, *others = tensors
    packed, mask, mode = options["input_layout"] == "TND", options["atten_mask"], options["sparse_mode"]
    refuse(
        operator,
        layout_TND_or_BSND_of_one_batch=packed or (options["input_layout"] == "BSND" and len(query) == 1),
        as_many_dimensions=query.dim() == (3 if packed else 4),
        float_dtype=query.dtype in FLOATS,
        same_dtype=all(tensor.dtype == query.dtype for tensor in tensors),
        contiguous=all(tensor.is_contiguous() for tensor in (*tensors, mask)),
        values_like_keys=key.shape == value.shape and query.shape[-1] == key.shape[-1],
        others_like_queries=all(tensor.shape == query.shape for tensor in others),
        width_1_to_768=1 <= query.shape[-1] <= 768,
        heads_1_to_256=options["head_num"] == query.shape[-2] <= 256,
        multiple_of_key_heads=query.shape[-2] % key.shape[-2] == 0,
        at_most_a_million_tokens=max(query.shape[-3], key.shape[-3]) <= 1 << 20,
        plain_softmax=options["keep_prob"] == 1
        and all(options[name] is None for name in ("pse", "padding_mask", "prefix", "sink")),
        sparse_mode_1_3_or_4=mode in (1, 3, 4),
        mask_of_bool_or_uint8=mask.dtype in (torch.bool, torch.uint8),
        # The default of TND stores a sequence's statistics head by head.
        statistics_in_the_layout=options["softmax_layout"] == ("TND" if packed else ""),
    )
    stops = [[query.shape[-3]], [key.shape[-3]]]
    if packed:
        stops = [options["actual_seq_qlen"], options["actual_seq_kvlen"]]
        refuse(
            operator,
            sequences_1_to_1024=1 <= len(stops[0]) == len(stops[1]) <= 1024,
            cumulated_lengths=all(list(part) == sorted(part) for part in stops),
            lengths_of_all_tokens=[part[-1] for part in stops] == [len(query), len(key)],
        )
    if mode != 1:
        refuse(
            operator,
            triangle_of_2048=torch.equal(mask.bool(), torch.ones(2048, 2048, dtype=torch.bool).triu(1)),
        )
    for rows, seen in zip(*(pairwise([0, *part]) for part in stops), strict=True):
        # Causal masks and bands begin at the last query and the last key.
        distance = torch.arange(*rows)[:, None] - rows[1] + seen[1] - torch.arange(*seen)
        before = options["pre_tockens"] if mode == 4 else torch.inf
        after = options["next_tockens"] if mode == 4 else 0
        hidden = mask.bool() if mode == 1 else (distance < -after) | (distance > before)
        refuse(operator, mask_of_queries_by_keys=hidden.shape == distance.shape)
        refuse(operator, key_for_each_query=not hidden.all(1).any())
        yield slice(*rows), slice(*seen), hidden


def _by_sequence(
    operator: str, tensors: tuple[Tensor, ...], options: dict[str, Any]
) -> Iterator[tuple[Any, ...]]:
    """Yield each sequence's rows, scores [kv_heads, group, Q, K], and tensors [kv_heads, group, rows, D]."""
    kv_heads = tensors[1].shape[-2]
    flat = [tensor.reshape(-1, *tensor.shape[-2:]).float() for tensor in tensors]
    for rows, seen, hidden in _sequences(operator, tensors, options):
        q, k, v, *others = (
            tensor[seen if index in (1, 2) else rows].transpose(0, 1).unflatten(0, (kv_heads, -1))
            for index, tensor in enumerate(flat)
        )
        yield rows, seen, (q @ k.mT * options["scale"]).masked_fill(hidden, -torch.inf), q, k, v, *others


def npu_fusion_attention(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Return the attention, and each query's largest score and Σ exp(score − largest) in 8 equal columns each."""
    options = _named("npu_fusion_attention", args, kwargs)
    query, *_ = tensors = tuple(options[name] for name in ("query", "key", "value"))
    found = []
    for _, _, scores, _, _, v in _by_sequence("npu_fusion_attention", tensors, options):
        largest = scores.amax(-1, keepdim=True)
        weights = (scores - largest).exp()
        total = weights.sum(-1, keepdim=True)
        columns = largest.expand(-1, -1, -1, 8), total.expand(-1, -1, -1, 8)
        found.append([part.flatten(0, 1).transpose(0, 1) for part in (weights / total @ v, *columns)])
    out, *statistics = (torch.cat(parts) for parts in zip(*found, strict=True))
    if query.dim() == 4:
        statistics = [statistic.transpose(0, 1)[None] for statistic in statistics]
    return out.reshape(query.shape).to(query.dtype), *statistics, torch.empty(0), 0, 0, 0


def npu_fusion_attention_grad(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value, by probabilities exp(score − softmax_max) / softmax_sum."""
    operator = "npu_fusion_attention_grad"
    options = _named(operator, args, kwargs)
    options["scale"] = options["scale_value"]
    tensors = tuple(options[name] for name in ("query", "key", "value", "dy", "attention_in"))
    statistics = [options["softmax_max"], options["softmax_sum"]]
    refuse(
        operator,
        statistics_float32=all(statistic.dtype == torch.float32 for statistic in statistics),
        statistics_in_8_equal_columns=all(
            statistic.shape[-1] == 8 and bool((statistic == statistic[..., :1]).all())
            for statistic in statistics
        ),
    )
    if tensors[0].dim() == 4:
        statistics = [statistic[0].transpose(0, 1) for statistic in statistics]
    grads = [torch.zeros(tensor.shape[-3:]) for tensor in tensors[:3]]
    for rows, seen, scores, q, k, v, grad, out in _by_sequence(operator, tensors, options):
        largest, total = (
            statistic[rows, :, :1].transpose(0, 1).unflatten(0, scores.shape[:2]) for statistic in statistics
        )
        weights = (scores - largest).exp() / total
        of_scores = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * options["scale"]
        found = (
            of_scores @ k,
            (of_scores.mT @ q).sum(1, keepdim=True),
            (weights.mT @ grad).sum(1, keepdim=True),
        )
        for whole, part, place in zip(grads, found, (rows, seen, seen), strict=True):
            whole[place] = part.flatten(0, 1).transpose(0, 1)
    results = [grad.view_as(like).to(like.dtype) for grad, like in zip(grads, tensors, strict=False)]
    return *results, torch.empty(0), torch.empty(0)


OPERATORS = {
    function.__name__: function
    for function in (
        *(npu_rms_norm, npu_rms_norm_backward, npu_rotary_mul, npu_rotary_mul_backward),
        *(npu_swiglu, npu_swiglu_backward, npu_fusion_attention, npu_fusion_attention_grad),
    )
}
