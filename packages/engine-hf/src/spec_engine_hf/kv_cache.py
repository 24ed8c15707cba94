"""KvCache holds several sequences' keys and values, aligned so that last tokens share a column.

The cache thus looks like a cache of left-padded prompts, which Transformers supports for every type of
target, sliding-window and chunked attention included. Dropped tokens leave gaps, which are masked like
padding. If the target's attention depends on column numbers, gaps are removed at once; otherwise only when
there are many gaps.

Shapes: B sequences, L columns, W columns after the gaps are removed, N heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_SPARE_COLUMNS = 64
"""Number of extra columns that are allocated each time a layer's memory grows."""
_MOST_GAPS = 0.25
"""Largest share of the columns that may be gaps. Attention takes longer with gaps, and removing gaps copies
the whole cache."""


class KvCache:
    """The cache of one batch. ``past`` is the cache object that a Transformers model takes."""

    def __init__(self, config: Any, *, gaps: bool) -> None:
        """Start without sequences. ``gaps``: whether unused columns may be between a sequence's tokens.

        Gaps are possible if the target's attention depends on the tokens' positions and not on the columns of
        the cache. ``config``: the target's configuration, if its cache cannot drop tokens; otherwise None,
        and every layer keeps all of its keys.
        """
        self.past = DynamicCache(config=config)
        if config is None:
            self.past.layer_class_to_replicate = _GrowingLayer
        self._gaps = gaps
        self.own_BL = torch.zeros(0, 0, dtype=torch.bool)
        """bool, on the CPU: whether a column holds a token of the sequence. Other columns are padding or
        gaps."""

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.own_BL)

    def extend(self, new_BT: Tensor) -> None:
        """Record which columns of a forward pass hold tokens; the call may come before or after the pass."""
        self.own_BL = torch.cat([self.own_BL, new_BT], dim=1) if len(self) else new_BT

    def join(self, other: KvCache) -> None:
        """Append the sequences of another cache."""
        for layer, joining in zip(self.past.layers, other.past.layers, strict=True):
            if layer.get_seq_length():  # a layer without keys uses another layer's keys
                layer.replace(_stacked(layer.keys, joining.keys), _stacked(layer.values, joining.values))
        width = max(self.own_BL.shape[1], other.own_BL.shape[1])
        self.own_BL = torch.cat([pad(own, (width - own.shape[1], 0)) for own in (self.own_BL, other.own_BL)])

    def keep(self, rows: Sequence[int], dropped: Sequence[int]) -> None:
        """Keep only the sequences ``rows``, without the last ``dropped[i]`` tokens of sequence i."""
        columns = self.own_BL.shape[1]
        dropped_B1 = torch.tensor(dropped)[:, None]
        own_BL = self.own_BL[list(rows)] & (torch.arange(columns, 0, -1) > dropped_B1)
        width = int(own_BL.sum(dim=1).max())
        uneven = len(set(dropped)) > 1 and not self._gaps
        if len(rows) < len(self) or uneven or width < (1 - _MOST_GAPS) * (columns - min(dropped)):
            self._move(list(rows), own_BL, width)
            return
        if min(dropped):
            self.past.crop(-min(dropped))
        self.own_BL = own_BL[:, : columns - min(dropped)]

    def _move(self, rows: list[int], own_BL: Tensor, width: int) -> None:
        """Keep only the sequences ``rows``; move the tokens marked in ``own_BL`` into the last columns.

        The cache then has ``width`` columns, without the columns of dropped tokens.
        """
        column_BW = own_BL.int().argsort(dim=1, stable=True)[:, own_BL.shape[1] - width :]
        self.own_BL = own_BL.gather(1, column_BW)
        indices: dict[tuple[int, int], Tensor] = {}  # most layers have the same heads and columns
        for layer in self.past.layers:
            if columns := layer.get_seq_length():
                heads = layer.keys.shape[1]
                if (heads, columns) not in indices:
                    head_BN = torch.tensor(rows)[:, None] * heads + torch.arange(heads)
                    index_BNW = head_BN[..., None] * columns + column_BW[:, None]
                    indices[heads, columns] = index_BNW.to(layer.keys.device)
                index_BNW = indices[heads, columns]
                layer.replace(_picked(layer.keys, index_BNW), _picked(layer.values, index_BNW))


class _GrowingLayer(DynamicLayer):
    """A layer whose memory has spare columns, so that appending tokens does not copy the whole cache."""

    _rooms: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, N, T, D]; return all keys and all values."""
        if not self.is_initialized:
            self.dtype = key_states.dtype
            self.device = key_states.device
            self.is_initialized = True
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        before = self.keys.shape[2]
        after = before + key_states.shape[2]
        if self._rooms is None or self._rooms[0].shape[2] < after:
            self._rooms = (
                _with_room(self.keys, after + _SPARE_COLUMNS),
                _with_room(self.values, after + _SPARE_COLUMNS),
            )
        for room, new in zip(self._rooms, (key_states, value_states), strict=True):
            room[:, :, before:after] = new
        self.keys, self.values = (room[:, :, :after] for room in self._rooms)
        return self.keys, self.values

    def replace(self, keys: Tensor, values: Tensor) -> None:
        """Replace the layer's keys and values."""
        self.keys = keys
        self.values = values
        self._rooms = None


def _with_room(cached_BNLD: Tensor, columns: int) -> Tensor:
    shape = list(cached_BNLD.shape)
    room = cached_BNLD.new_empty(*shape[:2], columns, shape[3])
    room[:, :, : shape[2]] = cached_BNLD
    return room


def _stacked(*cached: Tensor) -> Tensor:
    """Return the keys or values of all sequences, padded on the left so that their last columns align."""
    width = max(cached_BNLD.shape[2] for cached_BNLD in cached)
    return torch.cat([pad(c_BNLD, (0, 0, width - c_BNLD.shape[2], 0)) for c_BNLD in cached])


def _picked(cached_BNLD: Tensor, index_BNW: Tensor) -> Tensor:
    """Return the cached vectors at the indices ``index_BNW`` of the flattened cache.

    Indexing a flat view is much faster than ``gather``.
    """
    picked = cached_BNLD.flatten(0, 2).index_select(0, index_BNW.flatten())
    return picked.unflatten(0, index_BNW.shape)
