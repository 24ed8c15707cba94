"""Apply a function to full tensors that are sharded over the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Parts:
    """How named tensors are sharded over the ranks of a group."""

    gather: Callable[[str, Tensor], Tensor]
    """Takes a tensor's name and this rank's shard, and returns the full tensor; collective."""
    cut: Callable[[str, Tensor], Tensor]
    """Takes a tensor's name and the full tensor, and returns this rank's shard."""
    group: dist.ProcessGroup


def map_dealt(
    function: Callable[[Tensor], Tensor], parts: Mapping[str, Tensor], held: Parts
) -> dict[str, Tensor]:
    """Apply ``function`` to full tensors, each on one rank; return shards of the results. Collective.

    ``parts``: name -> this rank's shard of the tensor. ``held``: how these tensors are sharded. ``function``
    must keep shape and dtype. The ranks work in parallel, each on a different tensor, and hold at most two
    full tensors at a time.
    """
    names = list(parts)
    results = {}
    size = dist.get_world_size(held.group)
    for first in range(0, len(names), size):
        results |= _one_round(function, {name: parts[name] for name in names[first : first + size]}, held)
    return results


def _one_round(
    function: Callable[[Tensor], Tensor], parts: Mapping[str, Tensor], held: Parts
) -> dict[str, Tensor]:
    """Apply ``function`` to at most one full tensor on each rank; ``parts`` has at most one per rank."""
    rank = dist.get_rank(held.group)
    templates = list[Tensor]()
    own = made = None
    for owner, (name, part) in enumerate(parts.items()):
        whole = held.gather(name, part)
        templates.append(whole.new_empty(()).expand(whole.shape))
        own = whole if owner == rank else own
    # After all gathers, because a collective that waits for one rank's work would delay all ranks.
    if own is not None:
        made = function(own).contiguous()
    results: dict[str, Tensor] = {}
    for owner, (name, template) in enumerate(zip(parts, templates, strict=True)):
        sent = made if made is not None and owner == rank else template.contiguous()
        dist.broadcast(sent, group=held.group, group_src=owner)
        results[name] = held.cut(name, sent)
    return results
