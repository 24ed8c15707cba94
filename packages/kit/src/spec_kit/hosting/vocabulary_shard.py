"""Compute an engine's own products with its embedding and head, on each rank of a tensor-parallel model.

vLLM and SGLang divide both tables by rows, in modules of the same form. Each rank computes the products of its rows
and 0 for all others, so the sum over ranks has the products of all tokens. No collective is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spec_kit.hosting.modes import Fields

_HEAD = "lm_head"
"""Name of the head in vLLM's and SGLang's models; some models with a tied head have none."""


def shard_products(
    model: nn.Module,
    embedding: str,
    token_ids: Sequence[int],
    vector: Sequence[float],
    logits: Callable[[nn.Module, Tensor], Tensor],
) -> Fields:
    """Return this rank's fields of FrozenProducts; no fields if the model has no such table.

    ``embedding``: name of the embedding's module, without the modules around it. ``logits``: returns the head's
    logits of this rank's rows for states [R, H].
    """
    table = _named(model, embedding)
    if table is None:
        return {}
    head: Any = _named(model, _HEAD) or table
    with torch.inference_mode():
        vector_H = torch.tensor(vector, dtype=table.weight.dtype, device=table.weight.device)
        row_V = logits(head, vector_H[None])[0].float()
        return {
            "embedding": _of_rows(table, token_ids, lambda rows: _embedded(table, rows) @ vector_H.float()),
            "head": _of_rows(head, token_ids, lambda rows: row_V[rows]),
            "dtypes": [str(module.weight.dtype).removeprefix("torch.") for module in (table, head)],
        }


def sum_of_shards(shards: Iterable[Fields]) -> Fields:
    """Return the fields of FrozenProducts of a whole model from those of its ranks."""
    parts = list(shards)
    if not all(parts):
        return {}
    sums = {
        name: [sum(values) for values in zip(*(part[name] for part in parts), strict=True)]
        for name in ("embedding", "head")
    }
    return {**sums, "dtypes": parts[0]["dtypes"]}


def _named(model: nn.Module, leaf: str) -> Any:
    """Return the only module with weights whose last name is ``leaf``, or None."""
    found = [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == leaf and next(module.parameters(recurse=False), None) is not None
    ]
    return found[0] if len(found) == 1 else None


def _embedded(table: Any, rows: Tensor) -> Tensor:
    method = getattr(table, "quant_method", None)
    embedded = table.weight[rows] if method is None else method.embedding(table, rows)
    return embedded.float()


def _of_rows(table: Any, token_ids: Sequence[int], values: Callable[[Tensor], Tensor]) -> list[float]:
    """Return the values of this rank's tokens, and 0 for the tokens of other ranks."""
    shard = getattr(table, "shard_indices", None)
    first = 0 if shard is None else shard.org_vocab_start_index
    stop = len(table.weight) if shard is None else shard.org_vocab_end_index
    ids_T = torch.tensor(token_ids, device=table.weight.device)
    rows_T = (ids_T - first).clamp(0, stop - first - 1)
    return torch.where((ids_T >= first) & (ids_T < stop), values(rows_T), 0.0).tolist()
