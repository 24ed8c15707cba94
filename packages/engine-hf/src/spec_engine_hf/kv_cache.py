"""KvCache: keys and values of sequences side by side, with their last tokens in the same column.

So the cache looks like that of prompts with padding on the left, which Transformers computes for every type of
target, windows and chunks of attention included. Tokens that a sequence drops leave gaps, which are masked as padding
is; where attention counts columns, the sequence moves right over them at once, elsewhere when gaps have become many.

Shapes: B sequences, L columns, W columns that are kept, N heads, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_SPARE_COLUMNS = 64
"""Columns that a layer gets beyond those that it needs, when it needs more."""
_MOST_GAPS = 0.25
"""Share of the columns that may be gaps: they cost attention time, and to move costs a copy of everything."""


class KvCache:
    """The cache of one batch; ``past`` is what a model of Transformers takes."""

    def __init__(self, config: Any, *, gaps: bool) -> None:
        """Start without sequences. ``gaps``: the target counts positions, not columns.

        ``config``: that of a target whose cache cannot forget, else None, and every layer keeps all of its keys.
        """
        self.past = DynamicCache(config=config)
        if config is None:
            self.past.layer_class_to_replicate = _GrowingLayer
        self._gaps = gaps
        self.own_BL = torch.zeros(0, 0, dtype=torch.bool)
        """The columns that hold tokens of the sequence, on the CPU; the others are padding and gaps."""

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.own_BL)

    def extend(self, new_BT: Tensor) -> None:
        """Say which of the columns that a forward pass has added, or will add, hold tokens."""
        self.own_BL = torch.cat([self.own_BL, new_BT], dim=1) if len(self) else new_BT

    def join(self, other: KvCache) -> None:
        """Take over the sequences of another cache."""
        for layer, joining in zip(self.past.layers, other.past.layers, strict=True):
            if layer.get_seq_length():  # else it uses another layer's keys
                layer.replace(_stacked(layer.keys, joining.keys), _stacked(layer.values, joining.values))
        width = max(self.own_BL.shape[1], other.own_BL.shape[1])
        self.own_BL = torch.cat([pad(own, (width - own.shape[1], 0)) for own in (self.own_BL, other.own_BL)])

    def keep(self, rows: Sequence[int], dropped: Sequence[int]) -> None:
        """Keep some sequences, each without so many of its last tokens."""
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
        """Let what sequences hold stand without gaps, in as few columns as can be."""
        column_BW = own_BL.int().argsort(dim=1, stable=True)[:, own_BL.shape[1] - width :]
        self.own_BL = own_BL.gather(1, column_BW)
        places: dict[tuple[int, int], Tensor] = {}  # most layers have the same heads and columns
        for layer in self.past.layers:
            if columns := layer.get_seq_length():
                heads = layer.keys.shape[1]
                if (heads, columns) not in places:
                    head_BN = torch.tensor(rows)[:, None] * heads + torch.arange(heads)
                    place_BNW = head_BN[..., None] * columns + column_BW[:, None]
                    places[heads, columns] = place_BNW.to(layer.keys.device)
                place_BNW = places[heads, columns]
                layer.replace(_picked(layer.keys, place_BNW), _picked(layer.values, place_BNW))


class _GrowingLayer(DynamicLayer):
    """A layer in memory with room for more columns: new tokens cost what they are, not a copy of all."""

    _rooms: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, N, T, D]; return all."""
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
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
        """Hold these keys and values instead."""
        self.keys, self.values, self._rooms = keys, values, None


def _with_room(cached_BNLD: Tensor, columns: int) -> Tensor:
    shape = list(cached_BNLD.shape)
    room = cached_BNLD.new_empty(*shape[:2], columns, shape[3])
    room[:, :, : shape[2]] = cached_BNLD
    return room


def _stacked(*cached: Tensor) -> Tensor:
    """Return keys or values of all sequences, with their last columns in the same place."""
    width = max(cached_BNLD.shape[2] for cached_BNLD in cached)
    return torch.cat([pad(c_BNLD, (0, 0, width - c_BNLD.shape[2], 0)) for c_BNLD in cached])


def _picked(cached_BNLD: Tensor, place_BNW: Tensor) -> Tensor:
    """Return some columns of some rows; picking whole vectors from a flat view is much faster than ``gather``."""
    picked = cached_BNLD.flatten(0, 2).index_select(0, place_BNW.flatten())
    return picked.unflatten(0, place_BNW.shape)
